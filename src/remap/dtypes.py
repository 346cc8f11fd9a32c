"""Element types: NumPy's, and those of frameworks that the package ml_dtypes adds to NumPy (bfloat16, float8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from remap.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy

ADDED = {
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}
"""The types that NumPy has not, with the code and the bits that DLPack has for them (`DLDataTypeCode`)."""


def parse_dtype(dtype: Any) -> numpy.dtype[Any]:
    """Return NumPy's dtype for a name, a dtype of NumPy or torch, or what else NumPy takes for one.

    Raises `TypeError` for what is none, and `InvalidValueError` for a type that NumPy has only with ml_dtypes, where
    that is missing.
    """
    import numpy as np

    try:
        kind: numpy.dtype[Any] = np.dtype(dtype)
        return kind
    except TypeError as error:
        text = str(dtype)
        name = text.removeprefix("torch.")
        if name in ADDED:
            return added(name)
        if name != text and hasattr(np, name):
            return np.dtype(name)
        raise TypeError(f"a dtype is one of NumPy's, such as 'float32', not {dtype!r}: {error}") from None


def check_order(order: str, dtype: Any, shape: Any) -> None:
    """Raise `TypeError` where a shape stands in the place of a type, or a type in that of a shape."""
    each = cast("Iterable[Any]", dtype) if isinstance(dtype, list | tuple) else (dtype,)
    if all(hasattr(one, "__index__") and not isinstance(one, type) for one in each):
        raise TypeError(f"{dtype!r} is a shape, and no type of elements: the order is {order}")
    if isinstance(shape, type) or (hasattr(shape, "itemsize") and not hasattr(shape, "__index__")):
        raise TypeError(f"{shape!r} is a type of elements, and no shape: the order is {order}")


def added(name: str) -> numpy.dtype[Any]:
    """Return the dtype that ml_dtypes has for one of the types in `ADDED`."""
    import numpy as np

    try:
        import ml_dtypes
    except ImportError:
        bits = f"uint{ADDED[name][1]}"
        raise InvalidValueError(
            f"elements of type {name}",
            rule="NumPy has no such type, and the package ml_dtypes, which adds it, is not installed",
            next_step=f"Install ml_dtypes, or view the bits: array({bits!r}), and in torch "
            f"torch.from_dlpack(array).view(torch.{name})",
        ) from None
    kind: numpy.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return kind
