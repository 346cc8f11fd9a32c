# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# (what NumPy gives for values of any type has no type that a checker could know)
"""Many threads at once: the values of a variable for all of them, and the choice of those that take part.

The host runs a kernel for a batch of threads together: every variable is a NumPy array with one element for each
thread (a *lane*), or a single number where all threads have the same. Where threads part ways, a *selection* says
which of the lanes go on: None for all, a slice where they lie together, an array of their numbers otherwise, and
`NONE` for no lane. What is computed for a selection has one element for each of its lanes.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

Selection: TypeAlias = Any
"""None, a slice, an array of lane numbers, or `NONE`."""

NONE: Final = "no lane"


class Run(np.lib.mixins.NDArrayOperatorsMixin):
    """The numbers start, start + 1, … as a value, so that an index into neighbouring elements stays a slice.

    Behaves as the int64 array that it stands for.
    """

    __slots__ = ("count", "start")

    ndim = 1
    dtype = np.dtype(np.int64)

    def __init__(self, start: int, count: int) -> None:
        self.start = start
        self.count = count

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the array that this stands for."""
        return np.arange(self.start, self.start + self.count, dtype=dtype or np.int64)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Let sums with one number, and comparisons with one, be worked out without the array."""
        if method == "__call__" and not options and len(inputs) == 2:
            one, other = inputs
            if one is self and not isinstance(other, Run) and getattr(other, "ndim", 0) == 0:
                number = int(other)
                if ufunc is np.add and _fits(self, number):
                    return Run(self.start + number, self.count)
                if ufunc is np.subtract and _fits(self, -number):
                    return Run(self.start - number, self.count)
                if ufunc is np.less:
                    return self._below(number)
                if ufunc is np.greater_equal:
                    return ~self._below(number)
                if ufunc is np.less_equal:
                    return self._below(number + 1)
                if ufunc is np.greater:
                    return ~self._below(number + 1)
            elif ufunc is np.add and other is self and getattr(one, "ndim", 0) == 0 and _fits(self, int(one)):
                return Run(self.start + int(one), self.count)
        arrays = tuple(np.asarray(value) if isinstance(value, Run) else value for value in inputs)
        return getattr(ufunc, method)(*arrays, **options)

    def _below(self, number: int) -> Any:
        found = np.zeros(self.count, np.bool_)
        found[: min(max(number - self.start, 0), self.count)] = True
        return found

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        """Return the array in another type."""
        del copy
        return np.asarray(self).astype(dtype)

    def __getitem__(self, selection: Any) -> Any:
        """Return the numbers of a selection."""
        if isinstance(selection, slice):
            start, stop, _ = selection.indices(self.count)
            return Run(self.start + start, stop - start)
        return selection + self.start

    def __len__(self) -> int:
        """Return how many there are."""
        return self.count


def _fits(run: Run, number: int) -> bool:
    return abs(run.start) + abs(number) + run.count < 1 << 62


class Own:
    """A thread's own index, for all lanes: its number, and whether the lane may write there (None: all may)."""

    __slots__ = ("col", "number", "owns", "row", "space")

    ndim = 1

    def __init__(self, space: str, number: Any, owns: Any = None, row: Any = None, col: Any = None) -> None:
        self.space = space
        self.number = number
        self.owns = owns
        self.row = row
        self.col = col

    def __getitem__(self, selection: Any) -> Own:
        """Return the index for a selection of lanes."""
        parts = (
            None if one is None else pick(one, selection)
            for one in (self.number, self.owns, self.row, self.col)
        )
        return Own(self.space, *parts)


def pick(value: Any, selection: Selection) -> Any:
    """Return a value for a selection of lanes."""
    if selection is None or value.ndim == 0:
        return value
    return value[selection]


def put(old: Any, value: Any, selection: Selection, count: int) -> Any:
    """Return a variable with a new value for a selection; the other lanes keep what they have."""
    if selection is None:
        return value
    if isinstance(value, Own):  # an index is the same whenever a thread asks for it, so all lanes may have it
        return _put_own(old, value, selection, count)
    kind = value.dtype
    if old is None:
        new = np.zeros(count, kind)
    elif old.ndim == 0:
        new = np.full(count, old, kind)
    else:
        new = np.array(old, kind)
    new[selection] = value
    return new


def _put_own(old: Any, value: Own, selection: Selection, count: int) -> Own:
    def one(before: Any, after: Any) -> Any:
        return None if after is None else put(before, after, selection, count)

    if old is None:
        return Own(
            value.space, *(one(None, part) for part in (value.number, value.owns, value.row, value.col))
        )
    return Own(
        value.space,
        one(old.number, value.number),
        one(old.owns, value.owns),
        one(old.row, value.row),
        one(old.col, value.col),
    )


def split(test: Any, selection: Selection) -> tuple[Selection, Selection]:
    """Return the lanes of a selection for which a test holds, and the others."""
    if test.ndim == 0:
        return (selection, NONE) if test else (NONE, selection)
    if test.all():
        return selection, NONE
    if not test.any():
        return NONE, selection
    return _chosen(test, selection), _chosen(~test, selection)


def _chosen(test: Any, selection: Selection) -> Selection:
    found: Selection
    first = int(test.argmax())
    count = int(np.count_nonzero(test))
    found = slice(first, first + count) if test[first : first + count].all() else np.flatnonzero(test)
    return inner(selection, found)


def inner(outer: Selection, found: Selection) -> Selection:
    """Return a selection among the lanes of another as a selection among all lanes."""
    if outer is None or found is None:
        return found if outer is None else outer
    if isinstance(outer, slice):
        if isinstance(found, slice):
            return slice(outer.start + found.start, outer.start + found.stop)
        return found + outer.start
    return outer[found]


def union(one: Selection, other: Selection, whole: Selection, count: int) -> Selection:
    """Return the lanes of two selections that share none; `whole`, of which both are parts, if that is all of it."""
    if one is NONE:
        return other
    if other is NONE:
        return one
    found = np.concatenate([numbers(one, count), numbers(other, count)])
    if len(found) == size(whole, count):
        return whole
    found.sort()
    if found[-1] - found[0] + 1 == len(found):
        return slice(int(found[0]), int(found[-1]) + 1)
    return found


def numbers(selection: Selection, count: int) -> Any:
    """Return the numbers of the selected lanes."""
    if selection is None:
        return np.arange(count)
    if isinstance(selection, slice):
        return np.arange(selection.start, selection.stop)
    return selection


def size(selection: Selection, count: int) -> int:
    """Return how many lanes are selected."""
    if selection is None:
        return count
    if isinstance(selection, slice):
        return int(selection.stop - selection.start)
    return 0 if selection is NONE else len(selection)
