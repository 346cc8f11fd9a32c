"""Extents: which bytes of a range are committed, as sorted intervals that do not touch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Extents:
    """A set of bytes, kept as the fewest intervals [start, stop). Look-ups take logarithmic time.

    Not locked: the owner holds the driver's lock.
    """

    __slots__ = ("starts", "stops")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Return the intervals in order."""
        return zip(self.starts, self.stops, strict=True)

    @property
    def end(self) -> int:
        """The end of the last interval, 0 if there is none."""
        return self.stops[-1] if self.stops else 0

    def add(self, start: int, stop: int) -> None:
        """Add the bytes from `start` up to `stop`."""
        if start >= stop:
            return
        # Those that only touch the new one become one with it.
        first, last = bisect_left(self.stops, start), bisect_right(self.starts, stop)
        if first < last:
            start, stop = min(start, self.starts[first]), max(stop, self.stops[last - 1])
        self.starts[first:last] = [start]
        self.stops[first:last] = [stop]

    def remove(self, start: int, stop: int) -> None:
        """Take the bytes from `start` up to `stop` out."""
        first, last = bisect_right(self.stops, start), bisect_left(self.starts, stop)
        if start >= stop or first >= last:
            return
        left = (self.starts[first], min(start, self.stops[first]))
        right = (max(stop, self.starts[last - 1]), self.stops[last - 1])
        kept = [(one, other) for one, other in (left, right) if one < other]
        starts, stops = [one for one, _ in kept], [other for _, other in kept]
        # Both at once: an interrupt comes where a call returns.
        self.starts[first:last], self.stops[first:last] = starts, stops

    def covers(self, start: int, stop: int) -> bool:
        """Tell whether all bytes from `start` up to `stop` are in the set."""
        at = bisect_right(self.starts, start) - 1
        return start >= stop or (at >= 0 and stop <= self.stops[at])

    def overlaps(self, start: int, stop: int) -> bool:
        """Tell whether any byte from `start` up to `stop` is in the set."""
        at = bisect_right(self.stops, start)
        return start < stop and at < len(self.starts) and self.starts[at] < stop

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the intervals between `start` and `stop` that are not in the set."""
        found: list[tuple[int, int]] = []
        first, last = bisect_right(self.stops, start), bisect_left(self.starts, stop)
        for one, other in zip(self.starts[first:last], self.stops[first:last], strict=True):
            if start < one:
                found.append((start, one))
            start = other
        if start < stop:
            found.append((start, stop))
        return found

    def copy(self) -> Extents:
        """Return a set of the same bytes."""
        twin = Extents()
        twin.starts, twin.stops = self.starts.copy(), self.stops.copy()
        return twin
