"""Structures by value: NumPy's structured types and dataclasses, laid out as C does."""

from __future__ import annotations

import dataclasses
import math
import typing
from functools import lru_cache
from typing import Any

import numpy as np

from remap.errors import LaunchError
from remap.kernels.ir import is_numpy, storable

_PYTHON: dict[Any, Any] = {int: np.int64, float: np.float64, bool: np.bool_}


@lru_cache(maxsize=256)
def structure_of(kind: type) -> np.dtype[Any]:
    """Return the C layout of a dataclass: `int` is an int64, `float` a float64, and NumPy types are themselves."""
    hints: dict[str, Any] = {one.name: one.type for one in dataclasses.fields(kind)}
    if any(isinstance(hint, str) for hint in hints.values()):
        try:
            hints = typing.get_type_hints(kind)
        except Exception as error:  # noqa: BLE001 (an annotation can raise anything)
            raise LaunchError(
                f"structure {kind.__name__}",
                rule=f"its annotations mean nothing in its module ({error})",
                next_step="Give the types of its fields names of that module, or write them as objects and not as text",
            ) from None
    fields: list[tuple[str, Any]] = []
    for one in dataclasses.fields(kind):
        hint: Any = _PYTHON.get(hints[one.name], hints[one.name])
        if is_numpy(hint, type) and dataclasses.is_dataclass(hint):
            inner: Any = hint
            fields.append((one.name, structure_of(inner)))
            continue
        try:
            fields.append((one.name, np.dtype(hint)))
        except TypeError:
            raise LaunchError(
                f"structure {kind.__name__}, field {one.name}",
                rule=f"{hint!r} has no layout in C",
                next_step="Use int, float, bool, NumPy types and dataclasses of them",
            ) from None
    dtype = np.dtype(fields, align=True)
    check_layout(dtype, kind.__name__)
    return dtype


def check_layout(dtype: np.dtype[Any], name: str) -> None:
    """Raise `LaunchError` unless a structured type has numbers and structures in it, each where C would put it."""
    for field in dtype.names or ():
        inner = dtype[field]
        if inner.fields is not None:
            check_layout(inner, f"{name}.{field}")
        elif not storable(inner):
            raise LaunchError(
                f"structure {name}, field {field}: {inner}",
                rule="a field is a boolean, an integer, a float32, a float64, or a structure of them",
            )
    # C's layout: each field at the next multiple of its alignment, the whole a multiple of the largest.
    at, align = 0, 1
    for field in dtype.names or ():
        inner = dtype[field]
        unit = alignment(inner)
        align = max(align, unit)
        at = -(-at // unit) * unit
        if field_offset(dtype, field) != at:
            raise _not_c(
                name, f"field {field} lies at byte {field_offset(dtype, field)}, and C puts it at {at}"
            )
        at += inner.itemsize
    whole = -(-at // align) * align
    if dtype.itemsize != whole:
        raise _not_c(name, f"it has {dtype.itemsize} bytes, and in C it has {whole}")


def _not_c(name: str, rule: str) -> LaunchError:
    return LaunchError(
        f"structure {name}", rule=rule, next_step="Make the type with numpy.dtype(…, align=True)"
    )


def alignment(dtype: np.dtype[Any]) -> int:
    """Return the alignment of a type in C."""
    if dtype.fields is None:
        return dtype.itemsize
    return max((alignment(dtype[field]) for field in dtype.names or ()), default=1)


def field_offset(dtype: np.dtype[Any], field: str) -> int:
    """Return the byte at which a field lies."""
    fields: Any = dtype.fields
    return int(fields[field][1])


def as_record(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a dataclass, or a structured scalar, as a structured scalar of that type, a copy of its own.

    Raises `ValueError` for a number that a field cannot hold, naming the field.
    """
    if isinstance(value, np.void):
        return value.copy()
    record: Any = np.array(_tuple(value, dtype, ""), dtype)[()]
    return record


def _tuple(value: Any, dtype: np.dtype[Any], above: str) -> tuple[Any, ...]:
    found: list[Any] = []
    for one in dataclasses.fields(value):
        given, kind, name = getattr(value, one.name), dtype[one.name], f"{above}{one.name}"
        if kind.fields is not None:
            found.append(_tuple(given, kind, f"{name}.") if dataclasses.is_dataclass(given) else given)
            continue
        reason = misfit(given, kind)
        if reason:
            raise ValueError(f"field {name}: {given!r}: {reason}")
        found.append(given)
    return tuple(found)


def misfit(value: Any, dtype: np.dtype[Any]) -> str:
    """Return why a number cannot go to a place of this type unchanged but for rounding, empty where it can."""
    if dtype.kind == "b":
        return ""
    if isinstance(value, float) or is_numpy(value, np.floating):
        if dtype.kind in "iu":
            return f"it is a float, and {dtype} is wanted"
        # From here on it rounds to infinity, which is no number of the user's.
        too_large = dtype.itemsize == 4 and _LARGEST_32 <= abs(float(value)) < math.inf
        return f"it does not fit into {dtype}" if too_large else ""
    if not isinstance(value, int) and not is_numpy(value, (np.integer, np.bool_)):
        return f"it is no number, and {dtype} is wanted"
    low, high = _LIMITS[dtype.str]
    return "" if low <= int(value) <= high else f"it does not fit into {dtype}"


_LARGEST_32 = float.fromhex("0x1.ffffffp+127")
_LIMITS: dict[str, tuple[int, int]] = {
    **{
        np.dtype(name).str: (int(np.iinfo(name).min), int(np.iinfo(name).max))
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
    np.dtype("float32").str: (-(2**128 - 2**103 - 1), 2**128 - 2**103 - 1),
    np.dtype("float64").str: (-(2**1024 - 2**970 - 1), 2**1024 - 2**970 - 1),
}


def describe_layout(dtype: np.dtype[Any], at: int = 0, indent: str = "") -> list[str]:
    """Return a line for each field of a structure: byte, size, type and name, padding included."""
    lines: list[str] = []
    end = 0
    for field in dtype.names or ():
        inner, offset = dtype[field], field_offset(dtype, field)
        if offset > end:
            lines.append(f"{indent}{at + end:>5} {offset - end:>5}  (padding)")
        lines.append(
            f"{indent}{at + offset:>5} {inner.itemsize:>5}  {inner if inner.fields is None else 'structure'} {field}"
        )
        if inner.fields is not None:
            lines += describe_layout(inner, at + offset, indent + "  ")
        end = offset + inner.itemsize
    if dtype.itemsize > end:
        lines.append(f"{indent}{at + end:>5} {dtype.itemsize - end:>5}  (padding)")
    return lines
