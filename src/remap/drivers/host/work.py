"""Which work may still use which memory: happens-before, as far as the host has been told.

Every stream numbers its work, and finishes it in that order. `Stream.known` is the number up to which the host knows
that work is done: it is raised only by waits and successful queries, never by the work itself. So "is this use
ordered before that unmapping?" is one comparison, and its answer does not depend on how fast anything ran: a copy
that finished long ago, but which nobody waited for, is still a mistake, because on a GPU it might not have finished.

There is one host for this purpose, not one for each thread: threads order themselves by means that a driver cannot
see (a queue, a lock), so what one of them has waited for counts for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from remap.drivers.host.guard import context_lost

if TYPE_CHECKING:
    from remap.drivers.host.streams import Stream

_LONG = 16  # entries of one log before those that are done are swept out (streams come and go)

Clock: TypeAlias = "dict[Stream, int]"
"""For each stream, the number of the last work that is done when this point is reached."""


class Work:
    """One piece of queued work, as the logs of the memory it uses remember it."""

    __slots__ = ("kind", "number", "stream", "tick")

    def __init__(self, stream: Stream, number: int, kind: str, tick: int = 0) -> None:
        self.stream = stream
        self.number = number
        self.kind = kind
        self.tick = tick

    @property
    def ordered(self) -> bool:
        """Whether the host knows that this is done; once the context is lost, no wait can tell, so its end counts."""
        return self.number <= self.stream.known or (context_lost() and self.number <= self.stream.completed)

    def __str__(self) -> str:
        return f"{self.kind} (work {self.number} of {self.stream})"


Log: TypeAlias = "dict[Stream, Work]"


def join(clock: Clock, other: Clock) -> None:
    """Raise `clock` to include `other`, and forget in it what the host knows anyway."""
    for stream, number in other.items():
        if number > stream.known and number > clock.get(stream, 0):
            clock[stream] = number


def learn(clock: Clock) -> None:
    """Let the host know that everything in `clock` is done."""
    for stream, number in clock.items():
        stream.known = max(stream.known, number)


class Region:
    """Memory at an address, with the rights of every location and the log of its users.

    `readers` and `writers` are sets of location bits (`Machine.bit`). The log keeps the latest reader and writer of
    each stream: earlier ones are done when these are.
    """

    __slots__ = ("base", "born", "end", "granted", "identity", "readers", "reads", "writers", "writes")

    plain = False
    multicast = False

    def __init__(self, base: int, size: int, identity: int, born: int) -> None:
        self.base = base
        self.end = base + size
        self.identity = identity
        self.readers = 0
        self.writers = 0
        self.reads: Log | None = None
        self.writes: Log | None = None
        # Launches that may touch anything are logged once for all memory: those before tick `born` cannot mean
        # this region, nor those of a device before it was `granted` access to it.
        self.born = born
        self.granted: dict[int, int] | None = None

    def record(self, work: Work, writes: bool) -> None:
        """Note that `work` uses this memory."""
        log = self.writes if writes else self.reads
        if log is None:
            log = {}
            if writes:
                self.writes = log
            else:
                self.reads = log
        elif len(log) > _LONG:
            for stream in [stream for stream, old in log.items() if old.ordered]:
                del log[stream]
        log[work.stream] = work

    def unordered(self, devices: int, reads: bool = True) -> Work | None:
        """Return work of one of the `devices` (bits) that may still use this memory; `reads` counts readers too."""
        for log in (self.writes, self.reads if reads else None):
            if log:
                for work in log.values():
                    if not work.ordered and devices >> work.stream.device & 1:
                        return work
        return None


class OpaqueWork:
    """The launches that may touch anything their device may access, logged once instead of on every mapping."""

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest: Log = {}

    def record(self, work: Work) -> None:
        """Note a launch."""
        self.latest[work.stream] = work

    def unordered(self, region: Region, devices: int) -> Work | None:
        """Return such a launch of one of the `devices` (bits) that may still use the region."""
        for stream, work in list(self.latest.items()):
            if work.ordered:
                del self.latest[stream]
            elif (
                work.tick > region.born
                and (devices & region.readers) >> stream.device & 1
                and not (region.granted and region.granted.get(stream.device, 0) >= work.tick)
            ):
                return work
        return None


class Mark:
    """A point in the order of a stream: what comes after the first `number` pieces of its work, and after `clock`."""

    __slots__ = ("_told", "clock", "number", "stream")

    def __init__(self, stream: Stream, number: int, clock: Clock, told: str) -> None:
        self.stream = stream
        self.number = number
        self.clock = clock
        self._told = told

    @property
    def settled(self) -> bool:
        """Whether the host knows that everything before this point is done."""
        return self.number <= self.stream.known and all(n <= s.known for s, n in self.clock.items())

    def needs(self) -> list[tuple[Stream, int]]:
        """Return the work that must be done before this point is reached."""
        return [(self.stream, self.number), *self.clock.items()]

    def join_into(self, stream: Stream) -> None:
        """Let a stream's later work come after this point."""
        join(stream.clock, {**self.clock, self.stream: self.number})

    def __str__(self) -> str:
        return self._told


class Point:
    """Where a piece of work stands in the order of all streams: its stream, its number, and what is done before it."""

    __slots__ = ("clock", "number", "stream")

    def __init__(self, stream: Stream, number: int, clock: Clock) -> None:
        self.stream = stream
        self.number = number
        self.clock = clock

    def covers(self, stream: Stream, number: int) -> bool:
        """Tell whether a piece of another stream's work is done before this point."""
        return self.clock.get(stream, 0) >= number

    def after(self, mark: Mark) -> bool:
        """Tell whether this work comes after a mark."""
        return all(
            self.number > number
            if stream is self.stream
            else number <= stream.known or self.covers(stream, number)
            for stream, number in mark.needs()
        )

    def before(self, mark: Mark) -> bool:
        """Tell whether this work comes before a mark."""
        if mark.stream is self.stream:
            return self.number <= mark.number
        return mark.clock.get(self.stream, 0) >= self.number
