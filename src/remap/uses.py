"""What may still be using a range of memory, and waiting for it before the memory is taken away (invariant 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from threading import get_ident
from typing import TypeAlias

from remap.copies import Copies
from remap.drivers.protocol import PER_THREAD_STREAM
from remap.errors import DriverError, InUseError, context_lost
from remap.launches import launches
from remap.lifetime import captures_running
from remap.locations import Device
from remap.streams import Event, Queue, StreamLike, as_stream


class Uses:
    """The queued work that may still use a range of memory, as far as remap knows (invariant 7).

    Streams are held, so that their handles cannot come to mean others; a bare integer gets an event right after the
    use, but for work that is captured, which is the graph's. `escaped` says that the address was given away: then only
    the whole context tells when work has ended, as it does for a stream that another library has closed meanwhile.

    What a wait has begun to wait for is there until the wait has ended, so that all others wait for it, too.
    """

    __slots__ = ("_noted", "escaped")

    def __init__(self) -> None:
        # The last one is added to. A wait puts a new one behind it, and drops the others when it has ended.
        self._noted = [_Noted()]
        self.escaped = False

    def __bool__(self) -> bool:
        """Tell whether there is anything to wait for."""
        return self.escaped or self.pending

    @property
    def pending(self) -> bool:
        """Whether there is work that is known; what those do who were given the address is not."""
        for noted in self._noted.copy():  # noqa: SIM110 (any() takes thrice as long)
            if noted.streams or noted.events or noted.lost:
                return True
        return False

    def settle(self) -> None:
        """Drop streams that are closed, and ask other libraries which of theirs are (`Queue.gone`).

        Before each wait, and not under a lock.
        """
        for noted in self._noted.copy():
            for key, queue in list(noted.streams.items()):
                if queue.gone():
                    noted.lost[queue.device] = None
                elif not queue.over:  # closing one of ours has waited
                    continue
                if noted.streams.get(key) is queue:
                    noted.streams.pop(key, None)  # another thread may have found it, too

    def add(self, queue: Queue, keep: object = None) -> None:
        """Note work just queued; `keep`, the host side of a copy, stays alive until that has passed."""
        while True:
            noted = self._noted[-1]
            if queue.transient:
                noted.mark(queue)
            else:
                noted.streams[queue.device.index, queue.handle] = queue
            if keep is not None:
                noted.hold(queue, keep)
            if noted is self._noted[-1]:
                return
            # A wait has begun meanwhile, and may have looked there already.

    def keep(self, things: Sequence[object]) -> None:
        """Keep things alive until the next wait: what work that was noted still uses."""
        while True:
            noted = self._noted[-1]
            noted.held += things
            if noted is self._noted[-1]:
                return

    def check_not_capturing(self, asked: str, but: Queue | None = None) -> None:
        """Raise `InUseError` if a stream to be waited for is being captured; nothing has been waited for then.

        `but` is a stream that the caller has asked itself.
        """
        lost = False
        for noted in self._noted.copy():
            for queue in list(noted.streams.values()):
                if but is not None and queue.handle == but.handle and queue.device == but.device:
                    continue
                with queue.kept() as there:
                    if there:
                        queue.check_not_capturing(asked)
            lost = lost or bool(noted.lost)
        if (self.escaped or lost) and captures_running():
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
        noted = self._take()
        launches.forget()
        _wait_for(noted, accessing if self.escaped else ())
        self._drop(noted)

    def _take(self) -> list[_Noted]:
        """Return what was noted so far, which is not added to any more."""
        noted = self._noted.copy()
        if noted[-1]:
            self._noted.append(_Noted())
        else:
            noted.pop()
        return noted

    def _drop(self, noted: Iterable[_Noted]) -> None:
        """Drop what was waited for."""
        for one in noted:
            with suppress(ValueError):  # another thread has waited for it, too
                self._noted.remove(one)
            one.clear()

    def forget(self) -> None:
        """Drop everything that was noted, once the memory is gone."""
        for one in self._noted.copy():
            one.clear()

    def join(self, target: Queue) -> None:
        """Let later work of `target` wait for all of it.

        The host does not wait, but for streams that other libraries have closed; `InUseError` under a capture then.
        """
        self.settle()
        for noted in self._noted.copy():
            if noted.lost:
                self._wait_for_lost(noted)
            for queue in list(noted.streams.values()):
                if queue.handle == target.handle and queue.device == target.device:
                    continue
                with queue.kept() as there:
                    if there:
                        target.follow(queue)
                if (
                    not there and queue.gone()
                ):  # since it was settled; of a stream of ours, closing it has waited
                    self.join(target)
                    return
            for event in list(noted.events.values()):
                with event._end.kept() as there, target.device.current():
                    if there:  # else it was waited for
                        target.device._driver.wait_event(target.handle, event.handle)

    def _wait_for_lost(self, noted: _Noted) -> None:
        if captures_running():
            self.check_not_capturing("use behind a stream that its library has closed")
        for one in list(noted.lost):
            one.synchronize()
            noted.lost.pop(one, None)

    @property
    def queues(self) -> tuple[Queue, ...]:
        """The streams that have work pending, those with an event of their own left out, and those that are gone."""
        self.settle()
        return tuple(queue for noted in self._noted.copy() for queue in list(noted.streams.values()))

    def latest(self) -> Queue | None:
        """Return one of the streams that have work pending, the last one first used; None if there is none."""
        for noted in reversed(self._noted.copy()):
            if noted.streams:
                return next(reversed(list(noted.streams.values())), None)
        return None

    def waiter(self, accessing: tuple[Device, ...], asked: str) -> Callable[[], None] | None:
        """Return the wait before the end of what is used, as a release keeps it; None if there is nothing to wait for.

        Nobody adds anything any more then, so that it takes less than `wait`.
        """
        return partial(self._wait_and_forget, accessing, asked) if self else None

    def _wait_and_forget(self, accessing: tuple[Device, ...], asked: str) -> None:
        self.settle()
        self.check_not_capturing(asked)
        _wait_for(self._noted.copy(), accessing if self.escaped else ())
        self.forget()


class _Noted:
    """What was noted between two waits: streams, events behind work on bare handles, things that the work uses."""

    __slots__ = ("copies", "events", "held", "lost", "streams")

    def __init__(self) -> None:
        self.streams: dict[tuple[int, int], Queue] = {}
        self.events: dict[tuple[int, int, int], Event] = {}
        self.held: list[object] = []
        self.copies: dict[tuple[int, int, int], Copies] = {}
        # Devices with work of which no stream and no event tells: all of the device is waited for.
        self.lost: dict[Device, None] = {}

    def __bool__(self) -> bool:
        return bool(self.streams or self.events or self.held or self.copies or self.lost)

    def hold(self, queue: Queue, thing: object) -> None:
        """Keep the host side of a copy that was just queued."""
        key = (queue.device.index, queue.handle, get_ident())
        copies = self.copies.get(key)
        if copies is None:
            copies = self.copies[key] = Copies()
        self.held += copies.add(queue, thing)

    def mark(self, queue: Queue) -> None:
        """Put an event behind what was just queued on a stream that cannot be named later."""
        driver = queue.device._driver
        # Each thread has another stream behind the handle of its own default one.
        key = (queue.device.index, queue.handle, get_ident() if queue.handle == PER_THREAD_STREAM else 0)
        try:
            with queue.device.current():
                if driver.stream_capturing(queue.handle):
                    return  # a node of a graph, whose launches are noted; an event of a capture can never be waited for
                event = self.events.get(key)
                if event is None:
                    event = Event(queue.device)
                    event._warns = False  # nobody can close it who drops the memory
                    event = self.events.setdefault(key, event)
                with event._end.kept() as there:
                    if there:  # else a wait has begun: it is marked once more, in the next one
                        driver.record_event(event.handle, queue.handle)
        except BaseException as error:
            # Refused an event, for want of memory say, or interrupted; the work is queued all the same.
            self.lost[queue.device] = None
            if context_lost() or not isinstance(error, DriverError):
                raise

    def clear(self) -> None:
        """Drop everything."""
        self.streams.clear()
        self.held.clear()
        self.lost.clear()
        while self.copies:
            self.copies.popitem()[1].clear()
        while self.events:
            self.events.popitem()[1].close()


def wait_for_all(uses: Sequence[tuple[Uses, tuple[Device, ...], str]]) -> None:
    """Wait as `Uses.wait` does for each, given with its accessing devices and what is asked, but once for each context.

    Raises `InUseError` for a stream that is being captured, with nothing waited for.
    """
    for one, _, asked in uses:
        one.settle()
        one.check_not_capturing(asked)
    taken = [one._take() for one, _, _ in uses]
    launches.forget()
    escaped = [place for one, accessing, _ in uses if one.escaped for place in accessing]
    _wait_for([one for several in taken for one in several], escaped)
    for (one, _, _), several in zip(uses, taken, strict=True):
        one._drop(several)


def _wait_for(noted: Iterable[_Noted], escaped: Iterable[Device]) -> None:
    """Wait on the host for what was noted, and for the contexts of some devices."""
    streams: list[Queue] = []
    events: list[Event] = []
    whole = dict.fromkeys(escaped)
    for one in noted:
        streams += one.streams.values()
        events += one.events.values()
        whole.update(one.lost)  # after the streams: `settle` puts them here first
    for place in whole:
        place.synchronize()
    for queue in streams:
        if whole and queue.device in whole:
            continue
        with queue.kept() as there:
            if there:
                queue.synchronize()
            elif queue.gone():  # since it was settled; of a stream of ours, closing it has waited
                queue.device.synchronize()
    for event in events:
        with event._end.kept() as there, event.device.current():
            if there:  # else another thread has waited for it
                event._driver.synchronize_event(event.handle)


class Known(Enum):
    """What `after=` means where it is not given: the streams that remap knows, and contexts once escaped."""

    STREAMS = "the streams that remap knows"


After: TypeAlias = StreamLike | Event | Known | None
"""What is taken as `after=`: a stream, an event, or None for the caller's promise that no work is left."""


def resolve_after(after: StreamLike | Event | None, at: Device) -> Queue | Event | None:
    """Return what the caller named, or None for the caller's promise; raises `ClosedError`, `TypeError`."""
    if isinstance(after, Event):
        after._check()
        return after
    return None if after is None else as_stream(after, at)


def wait_after(after: StreamLike | Event | None, at: Device, asked: str) -> None:
    """Wait on the host for what the caller named; None is the caller's promise that nothing is left to wait for."""
    what = resolve_after(after, at)
    if isinstance(what, Event):
        what.synchronize()
    elif what is not None:
        with what._named():
            what.check_not_capturing(asked)
            what.synchronize()
