"""Streams and events: ordered work, and who may still be using a range of memory.

`None` is the default stream: the legacy one, or the calling thread's own where
`CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM` says so. Any object with `__cuda_stream__` is a stream too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial
from typing import Any, ClassVar, TypeAlias

from remap.drivers.protocol import DEFAULT_STREAM, PER_THREAD_STREAM
from remap.ends import End
from remap.errors import InUseError, InvalidValueError
from remap.launches import launches
from remap.lifetime import Description, Release, Resource, Rollback, captures_running
from remap.locations import Device, DeviceLike, device, in_context
from remap.types import SupportsStream


class StreamCalls:
    """What can be done with any stream of remap: those that it creates, and the default ones."""

    __slots__ = ()

    device: Device
    handle: int
    _driver: Any

    def synchronize(self) -> None:
        """Wait until all work queued so far has completed; `InUseError` under a capture, which a wait would break."""
        self._check()
        Queue(self.handle, self.device, self).check_not_capturing(f"wait for {self}")
        with self.device.current():
            self._driver.synchronize_stream(self.handle)

    @property
    def done(self) -> bool:
        """Whether all work queued so far has completed; does not wait. Refused as `synchronize` is."""
        self._check()
        Queue(self.handle, self.device, self).check_not_capturing(f"question whether {self} is done")
        with self.device.current():
            return bool(self._driver.stream_done(self.handle))

    @property
    def capturing(self) -> bool:
        """Whether work on this stream goes into a graph instead of running."""
        self._check()
        with self.device.current():
            return bool(self._driver.stream_capturing(self.handle))

    def record(self, event: Event | None = None, *, timing: bool = False) -> Event:
        """Mark the work queued so far with `event`, a new one by default, and return it."""
        self._check()
        event = event or Event(self.device, timing=timing)
        event._check()
        with self.device.current():
            self._driver.record_event(event.handle, self.handle)
        return event

    def wait(self, what: Event | StreamLike) -> None:
        """Let later work of this stream wait for an event, or for what another one has queued so far; does not wait."""
        self._check()
        if not isinstance(what, Event):
            Queue(self.handle, self.device, self).follow(as_stream(what, self.device))
            return
        what._check()
        with self.device.current():
            self._driver.wait_event(self.handle, what.handle)

    def fork(self) -> Stream:
        """Return a new stream of the same device whose work starts where this one is now."""
        with Rollback() as rollback:
            child = Stream(self.device)
            rollback.undo(child.close)
            child.wait(self)
        return child

    def join(self, *others: StreamLike) -> None:
        """Let later work of this stream wait for what `others` have queued so far."""
        for other in others:
            self.wait(other)

    def _check(self) -> None:
        """Raise where the stream cannot be used any more."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (0, handle), so that any CUDA library takes this stream."""
        self._check()
        return 0, self.handle


class Stream(Resource, StreamCalls):
    """A queue of work on one device that runs in order.

    `nonblocking=True` (the default) means that it does not order itself with the legacy default stream. Closing waits
    for its work, so that memory used here knows that this is over; `InUseError` while it is captured or launched on.
    Source: cuStreamCreateWithPriority.
    """

    __slots__ = ("_end", "device", "handle")

    kind: ClassVar[str] = "stream"

    def __init__(self, at: DeviceLike | None = None, *, nonblocking: bool = True, priority: int = 0) -> None:
        self.device = device(at)
        super().__init__(self.device._driver)
        with self.device.current():
            self._end = End(self._driver)
            self.handle: int = self._driver.create_stream(nonblocking, priority)
            self._open = True  # from here on an interrupt leaves it to its finaliser
        self._opened()

    def _check_closable(self) -> None:
        Queue(self.handle, self.device, self).check_not_capturing(f"closing {self.describe()}")
        launches.check_none(self, self, "closed")

    def _detach(self) -> Release:
        driver, handle = self._driver, self.handle
        # A wait and no step: interrupted, it leaves the stream open, and its work known.
        wait = partial(in_context, self.device, driver.synchronize_stream, handle)
        destroy = partial(in_context, self.device, driver.destroy_stream, handle)
        return Release(1, [(self._end.destroy, (destroy,))], wait)

    def describe(self) -> Description:
        """Return what this stream is."""
        return Description(self.kind, self.serial, 0, None, f"on {self.device}, handle {self.handle:#x}")


class DefaultStream(StreamCalls):
    """The default stream of a device: what `stream=None` means. Made by `remap.default_stream`; nothing to close."""

    __slots__ = ("_driver", "device", "handle")

    def __init__(self, at: Device) -> None:
        self.device, self._driver = at, at._driver
        self.handle = default_handle()


def default_stream(at: DeviceLike | None = None) -> DefaultStream:
    """Return the default stream of a device, the fastest by default."""
    return DefaultStream(device(at))


class Event(Resource):
    """A mark in a stream that hosts and other streams can wait for. Source: cuEventCreate."""

    __slots__ = ("device", "handle")

    kind: ClassVar[str] = "event"

    def __init__(self, at: DeviceLike | None = None, *, timing: bool = False) -> None:
        self.device = device(at)
        super().__init__(self.device._driver)
        with self.device.current():
            self.handle: int = self._driver.create_event(timing)
            self._open = True  # from here on an interrupt leaves it to its finaliser
        self._opened()

    def synchronize(self) -> None:
        """Wait until what this event marks has completed."""
        self._check()
        with self.device.current():
            self._driver.synchronize_event(self.handle)

    @property
    def done(self) -> bool:
        """Whether what this event marks has completed; does not wait."""
        self._check()
        with self.device.current():
            return bool(self._driver.event_done(self.handle))

    def elapsed(self, later: Event) -> float:
        """Return the milliseconds from this event to a later one, both made with `timing=True` and completed."""
        self._check()
        later._check()
        with self.device.current():
            return float(self._driver.elapsed(self.handle, later.handle))

    def _detach(self) -> Release:
        return Release(1, [(in_context, (self.device, self._driver.destroy_event, self.handle))])

    def describe(self) -> Description:
        """Return what this event is."""
        return Description(self.kind, self.serial, 0, None, f"on {self.device}, handle {self.handle:#x}")


StreamLike: TypeAlias = Stream | SupportsStream | int
"""What is taken where a stream is asked for, beside None for the default one."""


class Queue:
    """A stream as the rooms above use it: its handle, its device, and the object that keeps it alive."""

    __slots__ = ("device", "handle", "owner")

    def __init__(self, handle: int, device: Device, owner: object) -> None:
        self.handle = handle
        self.device = device
        self.owner = owner

    def of(self, owner: object) -> Queue:
        """Return the same stream, kept alive by `owner`."""
        return Queue(self.handle, self.device, owner)

    @property
    def over(self) -> bool:
        """Whether this is a stream of ours whose closing has waited for all its work."""
        owner = self.owner
        return owner._end.over if isinstance(owner, Stream) else isinstance(owner, Resource) and owner.closed

    def kept(self) -> AbstractContextManager[bool]:
        """Keep the handle valid for a block that names it; gives False where it is `over`, and names nothing."""
        return self.owner._end.kept() if isinstance(self.owner, Stream) else nullcontext(not self.over)

    @property
    def transient(self) -> bool:
        """Whether the bare handle may mean another stream later: a raw integer, or a thread's own default."""
        return self.handle == PER_THREAD_STREAM or (self.owner is None and self.handle > PER_THREAD_STREAM)

    def follow(self, earlier: Queue) -> None:
        """Let later work of this stream wait for what another one has queued so far; the host does not wait."""
        with earlier.device.current(), Event(earlier.device) as event:
            earlier.device._driver.record_event(event.handle, earlier.handle)
            with self.device.current():  # it says which device's default stream is meant
                self.device._driver.wait_event(self.handle, event.handle)

    def check_not_capturing(self, asked: str) -> None:
        """Raise `InUseError` if work on this stream goes into a graph: waiting would break the capture."""
        with self.device.current():
            capturing = self.device._driver.stream_capturing(self.handle)
        if capturing:
            raise InUseError(
                asked,
                rule=f"stream {self.handle:#x} is being captured, and a wait would break the capture",
                next_step="End the capture first, or pass after= to name what to wait for",
            )


def as_stream(stream: StreamLike | None, at: Device) -> Queue:
    """Return any form of stream as a `Queue` on device `at` (a remap stream knows its own device)."""
    if stream is None:
        return Queue(default_handle(), at, None)
    if isinstance(stream, StreamCalls):
        stream._check()
        return Queue(stream.handle, stream.device, stream)
    if isinstance(stream, int):
        if stream < 0:
            raise InvalidValueError(f"stream {stream}", rule="a stream handle is 0 or more")
        return Queue(stream, at, None)
    # Not isinstance with the protocol, which takes longer than a launch.
    ask: Callable[[], tuple[int, int]] | None = getattr(stream, "__cuda_stream__", None)
    if ask is not None:
        version, handle = ask()
        if version != 0:
            raise InvalidValueError(f"__cuda_stream__ version {version}", rule="remap knows version 0")
        return Queue(int(handle), at, stream)
    raise TypeError(f"a stream is None, a remap.Stream, an int or has __cuda_stream__, not {type(stream)}")


def default_handle() -> int:
    """Return the handle that stands for no stream: legacy, or per thread where the environment says so."""
    per_thread = os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "0") not in ("", "0")
    return PER_THREAD_STREAM if per_thread else DEFAULT_STREAM


class Uses:
    """The queued work that may still use a range of memory, as far as remap knows (invariant 7).

    Streams are held, so that their handles cannot come to mean others; a bare integer gets an event right after the
    use. `escaped` says that the address was given away: then only the whole context tells when work has ended.
    """

    __slots__ = ("_events", "_held", "_streams", "escaped")

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int], Queue] = {}
        self._events: dict[tuple[int, int], Event] = {}
        self._held: list[object] = []
        self.escaped = False

    def __bool__(self) -> bool:
        """Tell whether there is anything to wait for."""
        return bool(self._streams or self._events or self.escaped)

    def add(self, queue: Queue, keep: object = None) -> None:
        """Note work just queued; `keep` stays alive until the next wait (the host side of a copy)."""
        key = (queue.device.index, queue.handle)
        if keep is not None:
            self._held.append(keep)
        if not queue.transient:
            self._streams[key] = queue
            return
        event = self._events.get(key)
        if event is None:
            event = self._events[key] = Event(queue.device)
        with queue.device.current():
            queue.device._driver.record_event(event.handle, queue.handle)

    def keep(self, things: Iterable[object]) -> None:
        """Keep things alive until the next wait: what work that was noted still uses."""
        self._held += things

    def check_not_capturing(self, asked: str) -> None:
        """Raise `InUseError` if a stream to be waited for is being captured; nothing has been waited for then."""
        for queue in list(self._streams.values()):
            with queue.kept() as there:
                if there:
                    queue.check_not_capturing(asked)
        if self.escaped and captures_running():
            raise InUseError(
                asked,
                rule="its address was given away, so that whole contexts are waited for, and that would break the "
                "capture that is running",
                next_step="End the capture first, or pass after= to name what to wait for",
            )

    def wait(self, accessing: tuple[Device, ...], asked: str) -> None:
        """Wait on the host for all of it; if the address escaped, for the contexts of `accessing` too."""
        self.check_not_capturing(asked)
        streams, events, held = self._streams, self._events, self._held
        self._streams, self._events, self._held = {}, {}, []
        launches.forget()
        try:
            for (index, handle), queue in list(streams.items()):
                if self.escaped and any(one.index == index for one in accessing):
                    continue  # the whole context is waited for below
                with queue.kept() as there, queue.device.current():
                    if there:  # else closing it has waited
                        queue.device._driver.synchronize_stream(handle)
            for event in events.values():
                event.synchronize()
            if self.escaped:
                for one in accessing:
                    one.synchronize()
        except BaseException:  # nothing is forgotten that was not waited for
            self._streams = {**streams, **self._streams}
            self._events = {**events, **self._events}
            self._held = held + self._held
            raise
        for event in events.values():
            event.close()

    def forget(self) -> None:
        """Drop everything that was noted, once the memory is gone."""
        self._streams.clear()
        self._held.clear()
        while self._events:
            self._events.popitem()[1].close()

    def join(self, target: Queue) -> None:
        """Let later work of `target` wait for all of it; the host does not wait."""
        for (_, handle), queue in list(self._streams.items()):
            if handle == target.handle and queue.device == target.device:
                continue
            with queue.kept() as there:
                if there:
                    target.follow(queue)
        for event in list(self._events.values()):
            with target.device.current():
                target.device._driver.wait_event(target.handle, event.handle)

    @property
    def queues(self) -> tuple[Queue, ...]:
        """The streams that have work pending, those with an event of their own left out."""
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
    with queue.device.current():
        queue.device._driver.synchronize_stream(queue.handle)
