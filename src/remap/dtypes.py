"""Element types: NumPy's, and those of frameworks that the package ml_dtypes adds to NumPy (bfloat16, float8)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

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


def check_type(dtype: Any) -> Any:
    """Return what an array can be made of as a dtype; raises `InvalidValueError` for what has no bytes of its own."""
    kind = parse_dtype(dtype)
    if kind.hasobject:
        raise InvalidValueError(f"an array of {kind}", rule="Python objects cannot lie in memory of a device")
    if kind.itemsize == 0 or kind.subdtype is not None:
        raise InvalidValueError(
            f"an array of {kind!r}",
            rule="its elements have no size of their own",
            next_step="Name a type with a size, and put extents into the shape",
        )
    return kind


def check_shape(shape: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
    """Return a shape as a tuple; raises `InvalidValueError` for a negative extent."""
    sequence: Sequence[SupportsIndex] = shape if isinstance(shape, Sequence) else (shape,)
    try:
        extents = tuple(operator.index(extent) for extent in sequence)
    except TypeError:
        raise TypeError(f"a shape is a number of elements, or one for each axis, not {shape!r}") from None
    if any(extent < 0 for extent in extents):
        raise InvalidValueError(f"shape {extents}", rule="an extent is 0 or more")
    return extents


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
