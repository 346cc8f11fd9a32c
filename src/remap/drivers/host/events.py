"""Events: marks in streams that others can wait for."""

from __future__ import annotations

import time

from remap.drivers.host import shared_events
from remap.drivers.host.contexts import Contexts
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import invalid
from remap.drivers.host.shared_events import SharedMark
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
    __slots__ = ("device", "generation", "mark", "shared", "timing")

    def __init__(self, device: int, timing: bool, shared: SharedMark | None = None) -> None:
        self.device = device
        self.timing = timing
        self.mark: _Mark | None = None
        self.shared = shared
        self.generation = 0  # of a shared event: the number of the latest record by this process

    def elsewhere(self) -> int:
        """Return the number of the latest record of a shared event if another process made it, else 0."""
        recorded = self.shared.recorded if self.shared is not None else 0
        return recorded if recorded != self.generation else 0

    def retire(self) -> None:
        """Take the name of a shared event away."""
        if self.shared is not None:
            self.shared.retire()


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

    def create_shared(self) -> int:
        """Create an event that can be exported."""
        device = self._contexts.device("cuEventCreate")
        return self._add(_Event(device, timing=False, shared=shared_events.create()))

    def export(self, handle: int) -> bytes:
        """Return the 64 bytes that name a shared event."""
        call = "cuIpcGetEventHandle"
        shared = self._find(call, handle).shared
        if shared is None:
            raise invalid(call, f"event {handle}", "it was not created for several processes")
        return shared.handle()

    def open_handle(self, shareable: bytes) -> int:
        """Open a shared event by its name."""
        device = self._contexts.device("cuIpcOpenEventHandle")
        return self._add(_Event(device, timing=False, shared=shared_events.open_handle(shareable)))

    def _add(self, event: _Event) -> int:
        handle = next(self._machine.handles)
        self._events[handle] = event
        return handle

    def destroy(self, handle: int) -> None:
        """Forget an event; work that waits for its mark holds the mark."""
        event = self._find("cuEventDestroy", handle)
        self._events.pop(handle, None)
        event.retire()

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
            shared = event.shared
            number = shared.begin() if shared is not None else 0

            def stamp() -> None:
                mark.time = time.perf_counter()
                if shared is not None:
                    shared.reach(number)

            event.generation = number
            # Something must be queued to take the time, or to stand for all that the default stream waits for.
            if event.timing or stream.blocking or shared is not None:
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
            shared, number = event.shared, event.elsewhere()
            if shared is not None and number:
                kind = "a wait for another process"
                self._streams.submit(stream, kind, lambda: shared.wait(number))
                return
            mark = event.mark
            if mark is None:
                return
            if not mark.done:
                self._streams.submit(stream, "a wait for an event", None, needs=[(mark.stream, mark.number)])
            join(stream.clock, mark.clock)

    def synchronize(self, handle: int) -> None:
        """Wait for what an event marks."""
        call = "cuEventSynchronize"
        event = self._find(call, handle)
        number = event.elsewhere()
        if event.shared is not None and number:
            self._streams.check_thread(call)
            event.shared.wait(number)
            self._machine.guard.check_faults(call)
            return
        mark = event.mark
        self._streams.wait_for(call, mark.clock if mark else {})

    def done(self, handle: int) -> bool:
        """Tell whether what an event marks is done; if so, the host knows from now on."""
        call = "cuEventQuery"
        event = self._find(call, handle)
        number = event.elsewhere()
        if event.shared is not None and number:
            self._machine.guard.check_faults(call)
            return event.shared.done(number)
        mark = event.mark
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
            event = self._events.pop(handle, None)
            if event is not None:
                event.retire()

    def shut_down(self) -> None:
        """Let go of all events, which also ends what waits for other processes."""
        while self._events:
            event = self._events.popitem()[1]
            if event.shared is not None:
                event.shared.abandon(event.generation)

    def _find(self, call: str, handle: int) -> _Event:
        event = self._events.get(handle)
        if event is None:
            raise _no_event(call, handle)
        return event


def _no_event(call: str, handle: int) -> DriverError:
    return driver_error(
        call, CudaResult.INVALID_HANDLE, asked=f"event {handle}", rule="there is no such event"
    )
