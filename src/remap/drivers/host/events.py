"""Events: marks in streams that others can wait for."""

from __future__ import annotations

import time

from remap.drivers.host.contexts import Contexts
from remap.drivers.host.machine import Machine
from remap.drivers.host.streams import Stream, Streams
from remap.drivers.host.work import Clock, join
from remap.errors import CudaResult, DriverError, driver_error


class _Mark:
    """The point in a stream that one `record` marked; recording again makes another."""

    __slots__ = ("clock", "number", "stream", "time")

    def __init__(self, stream: Stream, number: int, clock: Clock) -> None:
        self.stream = stream
        self.number = number
        self.clock = clock
        self.time = 0.0

    @property
    def done(self) -> bool:
        return self.stream.completed >= self.number


class _Event:
    __slots__ = ("device", "mark", "timing")

    def __init__(self, device: int, timing: bool) -> None:
        self.device = device
        self.timing = timing
        self.mark: _Mark | None = None


class Events:
    """All events of a driver by handle, and the calls on them."""

    def __init__(self, machine: Machine, contexts: Contexts, streams: Streams) -> None:
        self._machine = machine
        self._contexts = contexts
        self._streams = streams
        self._events: dict[int, _Event] = {}

    def create(self, timing: bool) -> int:
        """Create an event in the current context."""
        device = self._contexts.device("cuEventCreate")
        handle = next(self._machine.handles)
        self._events[handle] = _Event(device, timing)
        return handle

    def destroy(self, handle: int) -> None:
        """Forget an event; work that waits for its mark holds the mark."""
        self._find("cuEventDestroy", handle)
        self._events.pop(handle, None)

    def record(self, handle: int, stream_handle: int) -> None:
        """Mark the work queued on a stream so far."""
        call = "cuEventRecord"
        event = self._find(call, handle)
        stream = self._streams.find(call, stream_handle)
        if stream.device != event.device:
            rule = f"the event belongs to device {event.device}"
            raise driver_error(call, CudaResult.INVALID_HANDLE, asked=f"a record on {stream}", rule=rule)
        with self._machine.lock:
            mark = _Mark(stream, 0, {})

            def stamp() -> None:
                mark.time = time.perf_counter()

            # Something must be queued to take the time, or to stand for all that the default stream waits for.
            if event.timing or stream.blocking:
                self._streams.submit(stream, "an event", stamp)
            mark.number = stream.submitted
            mark.clock = stream.now()
            event.mark = mark

    def wait(self, stream_handle: int, handle: int) -> None:
        """Let later work of a stream wait for what an event marks; nothing recorded means nothing to wait for."""
        call = "cuStreamWaitEvent"
        event = self._find(call, handle)
        stream = self._streams.find(call, stream_handle)
        with self._machine.lock:
            mark = event.mark
            if mark is None:
                return
            if not mark.done:
                self._streams.submit(stream, "a wait for an event", None, needs=[(mark.stream, mark.number)])
            join(stream.clock, mark.clock)

    def synchronize(self, handle: int) -> None:
        """Wait for what an event marks."""
        call = "cuEventSynchronize"
        mark = self._find(call, handle).mark
        self._streams.wait_for(call, mark.clock if mark else {})

    def done(self, handle: int) -> bool:
        """Tell whether what an event marks is done; if so, the host knows from now on."""
        call = "cuEventQuery"
        mark = self._find(call, handle).mark
        return self._streams.try_learn(call, mark.clock if mark else {})

    def elapsed(self, start: int, end: int) -> float:
        """Return the milliseconds between two timing events."""
        call = "cuEventElapsedTime"
        times: list[float] = []
        for handle in (start, end):
            event = self._find(call, handle)
            if not event.timing or event.mark is None:
                rule = "it was never recorded" if event.timing else "it was created without timing"
                raise driver_error(call, CudaResult.INVALID_HANDLE, asked=f"event {handle}", rule=rule)
            if not event.mark.done:
                rule = "it has not been reached"
                raise driver_error(call, CudaResult.NOT_READY, asked=f"event {handle}", rule=rule)
            times.append(event.mark.time)
        return (times[1] - times[0]) * 1000.0

    def close_device(self, device: int) -> None:
        """Destroy the events of a device whose context goes away."""
        for handle in [handle for handle, event in list(self._events.items()) if event.device == device]:
            self._events.pop(handle, None)

    def _find(self, call: str, handle: int) -> _Event:
        event = self._events.get(handle)
        if event is None:
            raise _no_event(call, handle)
        return event


def _no_event(call: str, handle: int) -> DriverError:
    return driver_error(
        call, CudaResult.INVALID_HANDLE, asked=f"event {handle}", rule="there is no such event"
    )
