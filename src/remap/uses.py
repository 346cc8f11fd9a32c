"""What may still be using a range of memory, and waiting for it before the memory is taken away (invariant 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import TypeAlias

from remap.errors import InUseError
from remap.launches import launches
from remap.lifetime import captures_running
from remap.locations import Device
from remap.streams import Event, Queue, StreamLike, as_stream


class Uses:
    """The queued work that may still use a range of memory, as far as remap knows (invariant 7).

    Streams are held, so that their handles cannot come to mean others; a bare integer gets an event right after the
    use, but for work that is captured, which is the graph's. `escaped` says that the address was given away: then only
    the whole context tells when work has ended, as it does for a stream that another library has closed meanwhile.
    """

    __slots__ = ("_events", "_held", "_lost", "_streams", "escaped")

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int], Queue] = {}
        self._events: dict[tuple[int, int], Event] = {}
        self._held: list[object] = []
        self._lost: dict[Device, None] = {}
        self.escaped = False

    def __bool__(self) -> bool:
        """Tell whether there is anything to wait for."""
        return bool(self._streams or self._events or self._lost or self.escaped)

    def settle(self) -> None:
        """Ask other libraries which of their streams they have closed: those are named no more (`Queue.gone`).

        Before each wait, and not under a lock.
        """
        for key, queue in list(self._streams.items()):
            if queue.gone():
                self._lost[queue.device] = None
                if self._streams.get(key) is queue:
                    self._streams.pop(key, None)  # another thread may have found it, too

    def add(self, queue: Queue, keep: object = None) -> None:
        """Note work just queued; `keep` stays alive until the next wait (the host side of a copy)."""
        key = (queue.device.index, queue.handle)
        if keep is not None:
            self._held.append(keep)
        if not queue.transient:
            self._streams[key] = queue
            return
        driver = queue.device._driver
        with queue.device.current():
            if driver.stream_capturing(queue.handle):
                return  # a node of a graph, whose launches are noted; an event of a capture can never be waited for
            event = self._events.get(key)
            if event is None:
                event = self._events[key] = Event(queue.device)
            driver.record_event(event.handle, queue.handle)

    def keep(self, things: Iterable[object]) -> None:
        """Keep things alive until the next wait: what work that was noted still uses."""
        self._held += things

    def check_not_capturing(self, asked: str, but: Queue | None = None) -> None:
        """Raise `InUseError` if a stream to be waited for is being captured; nothing has been waited for then.

        `but` is a stream that the caller has asked itself.
        """
        for queue in list(self._streams.values()):
            if but is not None and queue.handle == but.handle and queue.device == but.device:
                continue
            with queue.kept() as there:
                if there:
                    queue.check_not_capturing(asked)
        if (self.escaped or self._lost) and captures_running():
            why = (
                "its address was given away"
                if self.escaped
                else "a stream that used it was closed by its library"
            )
            raise InUseError(
                asked,
                rule=f"{why}, so that whole contexts are waited for, and that would break the capture that is running",
                next_step="End the capture first, or pass after= to name what to wait for",
            )

    def wait(self, accessing: tuple[Device, ...], asked: str) -> None:
        """Wait on the host for all of it; if the address escaped, for the contexts of `accessing` too."""
        self.settle()
        self.check_not_capturing(asked)
        streams, events, held, lost = self._streams, self._events, self._held, self._lost
        self._streams, self._events, self._held, self._lost = {}, {}, [], {}
        launches.forget()
        try:
            for (index, _), queue in list(streams.items()):
                if self.escaped and any(one.index == index for one in accessing):
                    continue  # the whole context is waited for below
                with queue.kept() as there:
                    if there:  # else closing it has waited
                        queue.synchronize()
            for event in events.values():
                event.synchronize()
            for one in dict.fromkeys((*lost, *(accessing if self.escaped else ()))):
                one.synchronize()
        except BaseException:  # nothing is forgotten that was not waited for
            self._streams = {**streams, **self._streams}
            self._events = {**events, **self._events}
            self._held = held + self._held
            self._lost = {**lost, **self._lost}
            raise
        for event in events.values():
            event.close()

    def forget(self) -> None:
        """Drop everything that was noted, once the memory is gone."""
        self._streams.clear()
        self._held.clear()
        self._lost.clear()
        while self._events:
            self._events.popitem()[1].close()

    def join(self, target: Queue) -> None:
        """Let later work of `target` wait for all of it.

        The host does not wait, but for streams that other libraries have closed; `InUseError` under a capture then.
        """
        self.settle()
        if self._lost:
            self._wait_for_lost()
        for (_, handle), queue in list(self._streams.items()):
            if handle == target.handle and queue.device == target.device:
                continue
            with queue.kept() as there:
                if there:
                    target.follow(queue)
        for event in list(self._events.values()):
            with target.device.current():
                target.device._driver.wait_event(target.handle, event.handle)

    def _wait_for_lost(self) -> None:
        if captures_running():
            self.check_not_capturing("use behind a stream that its library has closed")
        for one in list(self._lost):
            one.synchronize()
            self._lost.pop(one, None)

    @property
    def queues(self) -> tuple[Queue, ...]:
        """The streams that have work pending, those with an event of their own left out, and those that are gone."""
        self.settle()
        return tuple(self._streams.values())

    def latest(self) -> Queue | None:
        """Return one of the streams that have work pending, the last one first used; None if there is none."""
        return next(reversed(list(self._streams.values())), None)

    def waiter(self, accessing: tuple[Device, ...], asked: str) -> Callable[[], None] | None:
        """Return the wait as a call that a release can keep, or None if there is nothing to wait for."""
        return (lambda: self.wait(accessing, asked)) if self else None


def wait_for_all(uses: Sequence[tuple[Uses, tuple[Device, ...], str]]) -> None:
    """Wait as `Uses.wait` does for each, given with its accessing devices and what is asked, but once for each context.

    Raises `InUseError` for a stream that is being captured, with nothing waited for.
    """
    for one, _, asked in uses:
        one.settle()
        one.check_not_capturing(asked)
    for place in dict.fromkeys(place for one, accessing, _ in uses if one.escaped for place in accessing):
        place.synchronize()
    for one, accessing, asked in uses:
        escaped, one.escaped = one.escaped, False  # that much is done
        try:
            one.wait(accessing, asked)
        finally:
            one.escaped = escaped or one.escaped


class Known(Enum):
    """What `after=` means where it is not given: the streams that remap knows, and contexts once escaped."""

    STREAMS = "the streams that remap knows"


After: TypeAlias = StreamLike | Event | Known | None
"""What is taken as `after=`: a stream, an event, or None for the caller's promise that no work is left."""


def wait_after(after: StreamLike | Event | None, at: Device, asked: str) -> None:
    """Wait on the host for what the caller named; None is the caller's promise that nothing is left to wait for."""
    if after is None:
        return
    if isinstance(after, Event):
        after.synchronize()
        return
    queue = as_stream(after, at)
    queue.check_not_capturing(asked)
    queue.synchronize()
