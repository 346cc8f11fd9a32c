"""Launches: work that uses several things at once, and is queued again and again at about the driver's price.

What a launch needs is much: buffers that are open, backed, within reach and not being taken away, a module and a stream
that live. Whoever changes any of that puts a new stamp in place (`launches.renew`), so that a launch which finds the
stamp of its last look has nothing to look at.

A launch and somebody who takes memory away may meet. The launch says first what it uses, and looks at the stamp then;
the other one renews the stamp first, and looks then who uses it (`launches.check_none`). So one of them sees the other:
the launch looks again, and is refused, or the other one is. That takes no lock. Rejected: counting uses under the
driver's lock, which a launch would take twice; and holding it throughout, as a launch waits where its stream is full.

A graph is launched long after its work was put together. So what that work uses is noted part by part (`MemoryUse`),
for a node when it is made, and for work on a captured stream when it is queued (`launches.recording`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias
from weakref import ReferenceType, ref

from remap.errors import InUseError
from remap.forks import in_child
from remap.lifetime import Resource, captures_running
from remap.types import Access, Location


class Usable(Protocol):
    """What a launch uses: memory, a module, an executable graph."""

    @property
    def _uses(self) -> Any:
        """The queued work that may still use it (`uses.Uses`)."""
        ...

    def _check_use(self, asked: str, place: Location) -> None:
        """Raise if the device at `place` cannot use it now; the caller holds the driver's lock."""
        ...


class Memory(Usable, Protocol):
    """Memory of remap, whose parts may differ in what can be done with them."""

    def _check_use(
        self, asked: str, place: Location, needed: Access = ..., part: tuple[int, int] | None = ...
    ) -> None:
        """Raise if the device at `place` cannot use it, or its part, (offset, size), in that way now."""
        ...


class MemoryUse:
    """A use of memory by a graph: who reads or writes which part, (offset, size), of it; None where nobody knows.

    It is looked at before a launch of the graph as a direct use would be, with the same errors, and keeps the memory
    alive. What a kernel in CUDA C++ touches nobody knows, so that there is none for its arguments.
    """

    __slots__ = ("__weakref__", "memory", "needed", "part", "place")

    def __init__(self, memory: Memory, place: Location, needed: Access, part: tuple[int, int] | None) -> None:
        self.memory = memory
        self.place = place
        self.needed = needed
        self.part = part

    @property
    def _uses(self) -> Any:
        return self.memory._uses

    def _check_use(self, asked: str, place: Location) -> None:
        del place  # the device that does the work need not be the one that the graph is launched on
        self.memory._check_use(asked, self.place, self.needed, self.part)


class Launches:
    """What is being launched at this moment, and the stamps that change when launches have to look or note again."""

    __slots__ = ("recorders", "stamp", "under_way", "waits")

    def __init__(self) -> None:
        self.stamp: object = object()
        self.waits: object = object()
        self.under_way: dict[object, Sequence[object]] = {}
        # What the captures that are on have recorded, each under a token of its own; mostly there is none.
        self.recorders: dict[object, list[Recorded]] = {}

    def renew(self) -> None:
        """Let every launch look again, when something that it looks at has changed."""
        self.stamp = object()

    def forget(self) -> None:
        """Let every launch note its stream again, when a wait has taken over what was noted, and before it waits."""
        self.waits = object()

    def check_none(self, held: object, thing: Resource, doing: str) -> None:
        """Let launches look again, and raise `InUseError` if one that uses `thing` is under way, or other work.

        The caller holds the driver's lock, and when it lets go of that, `thing` says that nobody may use it: it is
        closed, or taken. `held` is how launches name it: its `_uses`, or a stream; None where there never was one.
        `doing` is a past participle.
        """
        if held is None:
            return
        self.renew()
        if any(held is one for several in list(self.under_way.values()) for one in several):
            raise InUseError(
                f"{thing.describe()} to be {doing}",
                rule="work that uses it is under way in another thread, which is about to queue it",
                next_step="Let that end first",
            )

    @contextmanager
    def recording(self) -> Generator[list[Recorded]]:
        """Give a list that gets what work on captured streams uses, until the block ends."""
        token, found = object(), list[Recorded]()
        self.recorders[token] = found
        self.forget()  # launches that are kept come by then, too
        try:
            yield found
        finally:
            self.recorders.pop(token, None)

    def record(self, queue: Any, things: Sequence[object]) -> None:
        """Note what work just queued uses, if its stream is being captured; there are recorders."""
        with queue.device.current():
            if not queue.device._driver.stream_capturing(queue.handle):
                return
        for found in list(self.recorders.values()):
            found.append((queue, things))

    def _forked(self) -> None:
        self.under_way = {}
        self.recorders = {}
        self.renew()


Recorded: TypeAlias = tuple[Any, Sequence[object]]
"""A captured stream, as a `streams.Queue`, and what work that was queued there uses."""

PartUse: TypeAlias = tuple[ReferenceType[Any], Access, tuple[int, int]]
"""Memory that a launch is known to use, how, and which part of it, (offset, size)."""

launches = Launches()
# Launches of other threads have not come along into a forked child; those of this one are refused there.
in_child(launches._forked)


class Changed(Exception):  # noqa: N818 (it tells its caller something, and nobody else sees it)
    """What was checked for a launch has changed before it was made; nothing was launched, and all is checked again."""


class Repeat:
    """A launch on one stream, which can be made again and again: `go` does it.

    `call` is what queues it, in whatever context is current. Everything that the launch uses is kept from being taken
    away meanwhile; closing it and the like wait from then on until the stream has passed (invariant 7).

    `checked` is the stamp that was there before the checks that it was made after, beyond those that it makes itself.
    `parts` are those of memory that it uses, as far as they are known.
    """

    __slots__ = (
        "_asked",
        "_call",
        "_checked",
        "_held",
        "_noted",
        "_parts",
        "_seen",
        "_things",
        "_uses",
        "queue",
    )

    def __init__(
        self,
        things: Sequence[Usable],
        queue: Any,
        asked: str,
        call: Callable[[], None],
        checked: object = None,
        parts: Sequence[PartUse] = (),
    ) -> None:
        self.queue = queue
        self._checked = checked
        self._parts = parts
        # Weakly: who launches holds what is launched on, and a launch that is kept for later must not.
        self._things = [ref(thing) for thing in things]
        self._uses = [thing._uses for thing in things]
        self._held = self._uses if queue.owner is None else [*self._uses, queue.owner]
        self._asked = asked
        self._call = call
        # The stamps at which everything was looked at, and at which the stream was noted everywhere.
        self._seen: object = None
        self._noted: object = None

    def go(self, owner: object = None) -> None:
        """Launch; raises what is wrong with anything that it uses, and `Changed`; nothing was launched then.

        `owner` is what keeps the stream alive, where `queue` has only its handle.
        """
        token = object()  # of this call: other threads may be in it, too
        try:
            launches.under_way[token] = self._held
            if self._seen is not launches.stamp:
                self._look()
            self._call()
            if self._noted is not launches.waits:
                self._note(owner)
        except Exception:
            raise
        except BaseException:  # an interrupt, which may have come when the work was queued
            self._note(owner)
            raise
        finally:
            launches.under_way.pop(token, None)

    def _look(self) -> None:
        queue = self.queue
        things = [thing for one in self._things if (thing := one()) is not None]
        with queue.device._driver.lock:
            stamp = launches.stamp
            if isinstance(queue.owner, Resource):
                queue.owner._check()
            self._check_current()
            check_uses(things, queue.device.location, self._asked)
        joined = False
        for thing in things:
            # Read once: another thread drops it when everything has arrived.
            arriving = getattr(thing, "_arriving", None)
            if arriving is not None:
                with queue.device.current():
                    arriving.join(queue)
                joined = True
        # Streams are in order, so that they join once; but what a capture has joined is the graph.
        if not (joined and captures_running()):
            self._seen = stamp

    def _check_current(self) -> None:
        """Raise `Changed` if what was checked before may not be true any more; the caller holds the driver's lock."""
        if self._checked is not None and self._seen is None and self._checked is not launches.stamp:
            raise Changed

    def _note(self, owner: object) -> None:
        """Note the stream as one that uses all of it.

        A wait that forgets it meanwhile says so before it waits. So either that is seen here, or the wait begins after
        the launch, and what was noted before is waited for.
        """
        queue = self.queue if owner is None else self.queue.of(owner)
        while True:
            waits = launches.waits
            for uses in self._uses:
                uses.add(queue)
            if queue.transient:  # each launch has to be noted by itself
                break
            if waits is launches.waits:
                if not launches.recorders:  # so has each one in a capture
                    self._noted = waits
                break
        if launches.recorders:
            launches.record(queue, self._memory())

    def _memory(self) -> list[object]:
        """Return what it uses, to be kept alive, and of memory the parts, as far as those are known."""
        place = self.queue.device.location
        found: list[object] = [thing for one in self._things if (thing := one()) is not None]
        for reference, needed, part in self._parts:
            memory = reference()
            if memory is not None:
                found.append(MemoryUse(memory, place, needed, part))
        return found


def merged(uses: Iterable[MemoryUse]) -> list[MemoryUse]:
    """Return the same uses in as few as possible: neighbouring and overlapping parts become one."""
    alike: dict[tuple[int, Location, Access], list[MemoryUse]] = {}
    for use in uses:
        alike.setdefault((id(use.memory), use.place, use.needed), []).append(use)
    found: list[MemoryUse] = []
    for (_, place, needed), several in alike.items():
        parts: list[tuple[int, int] | None] = [None] if any(use.part is None for use in several) else []
        for part in sorted(use.part for use in several if use.part is not None and use.part[1]):
            last = parts[-1] if parts else None
            if last is not None and part[0] <= sum(last):
                parts[-1] = last[0], max(sum(last), sum(part)) - last[0]
            else:
                parts.append(part)
        found += [MemoryUse(several[0].memory, place, needed, part) for part in parts]
    return found


def check_uses(things: Iterable[Usable], place: Location, asked: str) -> None:
    """Raise if the device at `place` cannot use one of these now; the caller holds the driver's lock."""
    for thing in things:
        thing._check_use(asked, place)
