# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# (what NumPy gives for values of any type has no type that a checker could know)
"""The few operations on numbers that NumPy does not have as kernels mean them. All take arrays or single numbers."""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from typing import Any

import numpy as np

from remap.kernels.lanes import Run


def truth(value: Any) -> Any:
    """Return booleans that were read: memory may have been written as another type, and any byte but 0 is True."""
    return value.view(np.uint8) != 0


def smaller(a: Any, b: Any) -> Any:
    """Return `b` where it is smaller than `a`, else `a`: Python's `min`, also for NaN and signed zeros."""
    return np.where(b < a, b, a)


def larger(a: Any, b: Any) -> Any:
    """Return `b` where it is larger than `a`, else `a`: Python's `max`."""
    return np.where(b > a, b, a)


def to_integer(value: Any, kind: Any) -> Any:
    """Return floats as integers: towards zero, held to the range, NaN becomes 0."""
    limits = np.iinfo(kind)
    low, high = value.dtype.type(limits.min), value.dtype.type(limits.max)
    below, above, none = value <= low, value >= high, np.isnan(value)
    plain = np.where(below | above | none, value.dtype.type(0), value).astype(kind)
    found = np.where(below, kind(limits.min), np.where(above, kind(limits.max), plain))
    return found if found.ndim else found[()]


def compare(a: Any, b: Any) -> Any:
    """Return the sign of a - b for an unsigned and a signed 64-bit integer, in either order."""
    if a.dtype.kind == "i":
        return -compare(b, a)
    other = b.astype(np.uint64)
    return np.where((b < 0) | (a > other), 1, np.where(a == other, 0, -1))


def advance(a: Any, b: Any) -> Any:
    """Return a + b for int64, held to the range."""
    total = a + b
    if isinstance(total, Run):
        return total
    passed = (total < a) != (b < 0)
    if not passed.any():
        return total
    limits = np.iinfo(np.int64)
    return np.where(passed, np.where(b < 0, limits.min, limits.max), total)[()]


def fma(x: Any, y: Any, z: Any) -> Any:
    """Return x × y + z rounded once. One by one: NumPy has no such operation."""
    kind = x.dtype
    return np.asarray(_fma(kind.itemsize)(x, y, z)).astype(kind)


@cache
def _fma(size: int) -> Any:
    library = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
    function = library.fmaf if size == 4 else library.fma
    kind = ctypes.c_float if size == 4 else ctypes.c_double
    function.argtypes, function.restype = (kind, kind, kind), kind
    return np.frompyfunc(function, 3, 1)
