"""Streams and events: ordered work.

`None` is the default stream: the legacy one, or the calling thread's own where
`CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM` says so. Any object with `__cuda_stream__` is a stream too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, TypeAlias

from remap.drivers.protocol import DEFAULT_STREAM, PER_THREAD_STREAM
from remap.ends import End
from remap.errors import CudaResult, DriverError, InUseError, InvalidValueError
from remap.hints import hinted
from remap.launches import launches
from remap.lifetime import Description, Release, Resource, Rollback
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
        with self._named(), self.device.current():
            Queue(self.handle, self.device, self).check_not_capturing(f"wait for {self}")
            self._driver.synchronize_stream(self.handle)

    @property
    def done(self) -> bool:
        """Whether all work queued so far has completed; does not wait. Refused as `synchronize` is."""
        with self._named(), self.device.current():
            Queue(self.handle, self.device, self).check_not_capturing(f"question whether {self} is done")
            return bool(self._driver.stream_done(self.handle))

    @property
    def capturing(self) -> bool:
        """Whether work on this stream goes into a graph instead of running."""
        with self._named(), self.device.current():
            return bool(self._driver.stream_capturing(self.handle))

    def record(self, event: Event | None = None, *, timing: bool = False) -> Event:
        """Mark the work queued so far with `event`, a new one by default, and return it."""
        with self._named(), Rollback() as rollback:
            if event is None:
                event = Event(self.device, timing=timing)
                rollback.undo(event.close)
            with event._named(), self.device.current():
                self._driver.record_event(event.handle, self.handle)
        return event

    def wait(self, what: Event | StreamLike) -> None:
        """Let later work of this stream wait for an event, or for what another one has queued so far; does not wait."""
        with self._named():
            if isinstance(what, Event):
                with what._named(), self.device.current():
                    self._driver.wait_event(self.handle, what.handle)
                return
            earlier = as_stream(what, self.device)
            with earlier.kept() as there:
                if there:  # else closing it has waited
                    Queue(self.handle, self.device, self).follow(earlier)

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

    def _named(self) -> AbstractContextManager[object]:
        """Keep the handle for a block that names it; raises as `_check` does."""
        return nullcontext()

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (0, handle), so that any CUDA library takes this stream."""
        self._check()
        return 0, self.handle


@hinted(sync="synchronize()")
class Stream(Resource, StreamCalls):
    """A queue of work on one device that runs in order.

    `nonblocking=True` (the default) means that it does not order itself with the legacy default stream. Closing waits
    for its work, so that memory used here knows that this is over; `InUseError` while it is captured, or work is just
    being queued there. Source: cuStreamCreateWithPriority.
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

    def _named(self) -> AbstractContextManager[object]:
        return self._end.named(self)

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


@hinted(query="done", sync="synchronize()")
class Event(Resource):
    """A mark in a stream that hosts and other streams can wait for. Source: cuEventCreate."""

    __slots__ = ("_end", "device", "handle")

    kind: ClassVar[str] = "event"

    def __init__(self, at: DeviceLike | None = None, *, timing: bool = False) -> None:
        self.device = device(at)
        super().__init__(self.device._driver)
        self._end = End(self._driver)
        with self.device.current():
            self.handle: int = self._driver.create_event(timing)
            self._open = True  # from here on an interrupt leaves it to its finaliser
        self._opened()

    def synchronize(self) -> None:
        """Wait until what this event marks has completed."""
        with self._named(), self.device.current():
            self._driver.synchronize_event(self.handle)

    @property
    def done(self) -> bool:
        """Whether what this event marks has completed; does not wait."""
        with self._named(), self.device.current():
            return bool(self._driver.event_done(self.handle))

    def elapsed(self, later: Event) -> float:
        """Return the milliseconds from this event to a later one, both made with `timing=True` and completed."""
        with self._named(), later._named(), self.device.current():
            try:
                return float(self._driver.elapsed(self.handle, later.handle))
            except DriverError as error:
                if error.name == "CUDA_ERROR_INVALID_HANDLE":
                    error.next_step = "Make and record both with timing: stream.record(timing=True)"
                raise

    def _named(self) -> AbstractContextManager[object]:
        return self._end.named(self)

    def _detach(self) -> Release:
        destroy = partial(in_context, self.device, self._driver.destroy_event, self.handle)
        return Release(1, [(self._end.destroy, (destroy,))])

    def describe(self) -> Description:
        """Return what this event is."""
        return Description(self.kind, self.serial, 0, None, f"on {self.device}, handle {self.handle:#x}")


StreamLike: TypeAlias = Stream | SupportsStream | int
"""What is taken where a stream is asked for, beside None for the default one."""


class Queue:
    """A stream as the rooms above use it: its handle, its device, and the object that keeps it alive."""

    __slots__ = ("_gone", "device", "handle", "owner")

    def __init__(self, handle: int, device: Device, owner: object) -> None:
        self.handle = handle
        self.device = device
        self.owner = owner
        self._gone = False

    def of(self, owner: object) -> Queue:
        """Return the same stream, kept alive by `owner`."""
        return Queue(self.handle, self.device, owner)

    @property
    def over(self) -> bool:
        """Whether nothing may name it any more: closed if it is ours, found `gone` if it is another library's."""
        end = self._end
        if end is not None:
            return end.over
        return self._gone or (
            issubclass(type(self.owner), Resource) and bool(getattr(self.owner, "closed", False))
        )

    def kept(self) -> AbstractContextManager[bool]:
        """Keep the handle valid for a block that names it; gives False where it is `over`, and names nothing."""
        end = self._end
        return end.kept() if end is not None else nullcontext(not self.over)

    def _named(self) -> AbstractContextManager[object]:
        """Keep the handle valid for a block that names it; raises `ClosedError` where the stream was closed."""
        end = self._end
        return nullcontext() if end is None else end.named(self.owner)

    def gone(self) -> bool:
        """Ask another library whether it has closed its stream, though it keeps the object; it is `over` from then on.

        The driver is not asked: it takes the handle for an address, and the process ends if nothing is there. Not under
        a lock, as this calls others' code.
        """
        if not self._gone and not issubclass(type(self.owner), (Resource, StreamCalls)):
            try:
                ask: Callable[[], tuple[int, int]] | None = getattr(self.owner, "__cuda_stream__", None)
                self._gone = ask is not None and int(ask()[1]) != self.handle
            except Exception:  # noqa: BLE001 (whatever a closed stream of another library raises)
                self._gone = True
        return self._gone

    @property
    def _end(self) -> End | None:
        owner = self.owner  # it may be a weak proxy, so that only its type can be asked
        found = getattr(owner, "_end", None) if issubclass(type(owner), Resource) else None
        return found if isinstance(found, End) else None

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
        try:
            with self.device.current():
                capturing = self.device._driver.stream_capturing(self.handle)
        except DriverError as error:
            if not self._was_destroyed(error):
                raise
            return
        if capturing:
            raise InUseError(
                asked,
                rule=f"stream {self.handle:#x} is being captured, and a wait would break the capture",
                next_step="End the capture first, or pass after= to name what to wait for",
            )

    def synchronize(self) -> None:
        """Wait on the host for all of it, which is not being captured."""
        driver = self.device._driver
        with self.device.current():
            try:
                driver.synchronize_stream(self.handle)
            except DriverError as error:
                if not self._was_destroyed(error):
                    raise
                driver.synchronize_context()  # its work may still go on

    def _was_destroyed(self, error: DriverError) -> bool:
        """Tell whether a stream of another library has gone though its object goes on naming it."""
        ours = self.owner is None or issubclass(type(self.owner), Resource)
        return error.code == CudaResult.INVALID_HANDLE and not ours


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
