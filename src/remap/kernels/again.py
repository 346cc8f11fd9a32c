"""The same launch again: what was checked once for some arrays, a stream and a shape need not be checked again.

A program launches its kernels on the same arrays over and over, and a launch should cost little more than the driver's
own call. So the last launch of each kernel on some arrays is kept, packed, with what its checks depended on: whatever
has changed since sends the launch back to the checks. Arrays are known by their identity, and forgotten when they go,
so that nothing is kept alive.
"""

from __future__ import annotations

import operator
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from remap.launches import Changed, PartUse, Repeat, Usable, launches
from remap.lifetime import watchers
from remap.ranges import Range
from remap.spans import Span
from remap.streams import StreamCalls, StreamLike

Shape: TypeAlias = tuple[Any, ...]
"""What is compared of a launch: the number of arguments, grid, block, dynamic shared memory, and the like."""

Packed: TypeAlias = tuple[int, type, struct.Struct, int]
"""A number among the arguments: its place, its type, how it is packed, and where."""


class Repeatable(NamedTuple):
    """What of a launch differs from one time to the next, or may.

    `places` are those of the memory among the arguments, all others are `numbers`. `outside` gives what the kernel
    takes from outside, values and what was compiled in, and `values` are those of this launch.
    """

    places: Sequence[int]
    numbers: Sequence[Packed]
    outside: Callable[[], Iterable[Any]] | None = None
    values: Sequence[Any] = ()


class Kept:
    """The launches of one kernel that can be made again."""

    __slots__ = ("_launches", "_pick")

    def __init__(self) -> None:
        self._launches: dict[tuple[int, ...], Again] = {}
        self._pick: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple

    def again(self, given: tuple[Any, ...], stream: StreamLike | None, shape: Shape) -> bool:
        """Launch, if that was done before and no check would find anything new; else return False.

        Raises, with nothing launched, what the checks would say of memory that may not be used now.
        """
        owner = None
        try:
            arrays = tuple(map(id, self._pick(given)))
            kept = self._launches.get((id(stream), *arrays))
            if kept is None and self._launches and is_foreign(stream):
                owner = stream
                kept = self._launches.get((_foreign_id(stream), *arrays))
            # A launch that is kept holds the driver's call itself, which a trace would not see.
            if kept is None or kept.shape != shape or watchers:
                return False
        except (IndexError, ValueError):  # too few arguments; arrays in the shape, which cannot be compared
            return False
        if kept._seen is not launches.stamp and not kept.same():
            return False
        if kept.outside is not None and any(map(operator.is_not, kept.outside(), kept.values)):
            return False
        try:
            if kept.numbers:
                return kept.go_with(given, owner)
            kept.go(owner)
        except Changed:
            return False
        return True

    def keep(self, launch: Again, stream: object, given: tuple[Any, ...]) -> None:
        """Keep a launch for as long as the stream and the arrays live.

        Others make a new object for the same stream all the time. So a stream of theirs is known by its handle, and
        each launch brings along what keeps it alive.
        """
        pick = self._pick = _picker(launch.places)
        arrays, kept = pick(given), self._launches
        foreign = is_foreign(stream)
        key = (_foreign_id(stream) if foreign else id(stream), *map(id, arrays))
        if foreign:
            launch.queue = launch.queue.of(None)
            stream = None

        def gone(_: object) -> None:
            kept.pop(key, None)

        # A weak reference calls only while it lives itself.
        launch.references = [weakref.ref(one, gone) for one in (stream, *arrays) if one is not None]
        if len(kept) >= _MOST:
            kept.clear()
        kept[key] = launch

    def clear(self) -> None:
        """Forget all of them."""
        self._launches.clear()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._launches)


class Again(Repeat):
    """A launch that was made once, and can be made again: `work` is what it was.

    `checked` is the stamp that was there before its checks.
    """

    __slots__ = (
        "_last",
        "_packing",
        "_spans",
        "_work",
        "numbers",
        "outside",
        "places",
        "references",
        "shape",
        "values",
    )

    def __init__(
        self,
        things: Sequence[Usable],
        work: Any,
        asked: str,
        call: Callable[[], None],
        shape: Shape,
        found: Repeatable,
        checked: object,
        parts: Sequence[PartUse],
    ) -> None:
        super().__init__(things, work.queue, asked, call, checked, parts)
        self.shape = shape
        self.places, self.numbers, self.outside, self.values = found
        self.references: list[weakref.ref[Any]] = []
        self._work = work
        self._packing = threading.Lock()
        self._last: dict[int, Any] = dict.fromkeys([index for index, *_ in self.numbers], self)
        # Rights are changed by putting another table in their place.
        spans = [thing for thing in things if isinstance(thing, Span)]
        self._spans = [(weakref.ref(span), span._rights, _version(span)) for span in spans]

    def same(self) -> bool:
        """Tell whether the checks would find what they have found, now that something somewhere has changed.

        What `Repeat` looks at itself is left to it.
        """
        for reference, rights, version in self._spans:
            span = reference()
            if span is None or span._rights is not rights or _version(span) != version:
                return False
            # Its parts differ, and only the checks know which of them are used.
            if type(span)._check_part is not Range._check_part and self._checked is not launches.stamp:
                return False
        return True

    def _check_current(self) -> None:
        super()._check_current()
        if self._seen is not None and not self.same():
            raise Changed

    def go_with(self, given: tuple[Any, ...], owner: object) -> bool:
        """Launch with other numbers; return False where they do not fit, or another thread is at it."""
        # They are put into the one copy of the arguments, so that one thread at a time can do this.
        if not self._packing.acquire(False):
            return False
        try:
            last = self._last
            for index, kind, layout, offset in self.numbers:
                value = given[index]
                if value is last[index]:
                    continue
                if type(value) is not kind:
                    return False
                try:
                    layout.pack_into(self._work.packed.content, offset, value)
                except (struct.error, OverflowError):  # it does not fit, which the checks will say
                    return False
                last[index] = value
            self.go(owner)
        finally:
            self._packing.release()
        return True


def is_foreign(stream: object) -> bool:
    """Tell whether this is a stream of another library."""
    return hasattr(stream, "__cuda_stream__") and not isinstance(stream, StreamCalls)


def _foreign_id(stream: Any) -> int:
    """Return what a stream of another library is known by; negative, as no `id` is, or 0 where nobody knows it."""
    version, handle = stream.__cuda_stream__()
    return ~int(handle) if version == 0 else 0


def _version(span: Any) -> tuple[int, str] | None:
    """Return what changes with what stands behind a buffer; None for memory that stays what it is."""
    generation = getattr(span, "generation", None)
    return None if generation is None else (generation, span._paused)


def _picker(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return operator.itemgetter(slice(places[0], places[0] + 1)) if places else operator.itemgetter(slice(0))


_MOST = 256  # launches that one kernel can make again
