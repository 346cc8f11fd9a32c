"""Streams: ordered queues of work, each on a thread of its own, with CUDA's rules of the default streams.

The legacy default stream of a device waits for its blocking streams, and they wait for it; non-blocking streams stand
apart. The per-thread default stream is a blocking stream that belongs to one thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from remap.drivers.host.contexts import Contexts
from remap.drivers.host.guard import context_lost, lose_context
from remap.drivers.host.machine import Machine
from remap.drivers.host.work import Clock, Point, Work, join, learn
from remap.drivers.protocol import DEFAULT_STREAM, LEGACY_STREAM, PER_THREAD_STREAM
from remap.errors import ContextLostError, CudaResult, driver_error

_IDLE = 1.0  # seconds until a thread without work ends; starting one anew costs some 40 µs

Need = tuple["Stream", int]
"""Work that must be done first: a stream, and a number of its work."""


class Stream:
    """One queue. `submitted` and `clock` belong to the table lock, `completed` to the stream's own."""

    def __init__(self, handle: int, device: int, blocking: bool, what: str = "") -> None:
        self.handle = handle
        self.device = device
        self.blocking = blocking
        self.submitted = 0
        self.completed = 0
        self.known = 0
        self.clock: Clock = {}
        self._name = what or f"stream {handle}"
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._finished = threading.Condition(self._lock)
        self._queue: deque[tuple[int, tuple[Need, ...], Callable[[], None] | None]] = deque()
        self._thread: threading.Thread | None = None
        self._retired = False

    def __str__(self) -> str:
        return f"{self._name} of device {self.device}"

    @property
    def idle(self) -> bool:
        """Whether everything submitted has completed."""
        return self.completed >= self.submitted

    def now(self) -> Clock:
        """Return the clock of a point after everything submitted so far."""
        clock = {stream: number for stream, number in self.clock.items() if number > stream.known}
        self.clock = dict(clock)
        if self.submitted > self.known:
            clock[self] = self.submitted
        return clock

    def put(self, needs: tuple[Need, ...], run: Callable[[], None] | None) -> int:
        """Queue work behind everything submitted so far and return its number."""
        with self._lock:
            if self._thread is None:
                thread = _StreamThread(target=self._serve, name=f"remap {self}", daemon=True)
                thread.start()  # raises RuntimeError where the system has no more threads; nothing has changed then
                self._thread = thread
            self.submitted += 1
            self._queue.append((self.submitted, needs, run))
            self._arrived.notify()
            return self.submitted

    def wait(self, number: int) -> None:
        """Block until work `number` is done or dropped."""
        if self.completed < number:
            with self._lock:
                while self.completed < number:
                    self._finished.wait()

    def retire(self) -> None:
        """Let the thread end once the queue is empty."""
        with self._lock:
            self._retired = True
            self._arrived.notify()

    def drop(self) -> threading.Thread | None:
        """Throw away what has not begun, and return the thread if it still runs something."""
        with self._lock:
            self._retired = True
            self._queue.clear()
            self._arrived.notify()
            return self._thread

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not self._queue:
                    if self._retired or not (self._arrived.wait(_IDLE) or self._queue):
                        self._thread = None
                        self.completed = self.submitted  # says something only after `drop`
                        self._finished.notify_all()
                        return
                number, needs, run = self._queue.popleft()
            for stream, needed in needs:
                stream.wait(needed)
            # After a fault nothing runs any more, as on a device whose context is lost.
            if run is not None and not context_lost():
                try:
                    run()
                except BaseException as error:  # noqa: BLE001 (whatever it was, it must not end the queue silently)
                    lose_context(failed(str(self), error))
            del needs, run
            with self._lock:
                self.completed = number
                self._finished.notify_all()


def failed(what: str, error: BaseException) -> ContextLostError:
    """Return the sticky error for work that ended with an exception."""
    text = f"{type(error).__name__}: {error}"
    found = driver_error("cuLaunchKernel", CudaResult.LAUNCH_FAILED, asked=what, rule=text)
    found.__cause__ = error
    return (
        found if isinstance(found, ContextLostError) else ContextLostError(found.call, found.name, found.code)
    )


class _StreamThread(threading.Thread):
    """A thread that runs the work of a stream, told apart since it may not wait for streams itself."""


class Streams:
    """All streams of a driver by handle, and the calls on them."""

    def __init__(self, machine: Machine, contexts: Contexts) -> None:
        self._machine = machine
        self._contexts = contexts
        self._by_handle: dict[int, Stream] = {}
        devices = range(machine.options.devices)
        self._legacy = [Stream(LEGACY_STREAM, device, True, "the default stream") for device in devices]
        # Those created, and those destroyed of which the host does not yet know that they are done.
        self._of_device: list[list[Stream]] = [[] for _ in devices]
        self._per_thread = threading.local()
        self._threads: list[tuple[threading.Thread, Stream]] = []

    # -- the calls --

    def create(self, nonblocking: bool, priority: int) -> int:
        """Create a stream in the current context; the host driver has one priority."""
        del priority
        device = self._contexts.device("cuStreamCreateWithPriority")
        with self._machine.lock:
            handle = next(self._machine.handles)
            stream = self._by_handle[handle] = Stream(handle, device, blocking=not nonblocking)
            self._of_device[device].append(stream)
        return handle

    def destroy(self, handle: int) -> None:
        """Forget a stream; what is queued still runs."""
        with self._machine.lock:
            stream = self._by_handle.pop(handle, None)
            if stream is None:
                raise _no_stream("cuStreamDestroy", handle)
            stream.retire()
            self._sweep(stream.device)

    def synchronize(self, handle: int) -> None:
        """Wait for what is queued on a stream so far."""
        call = "cuStreamSynchronize"
        stream = self.find(call, handle)
        with self._machine.lock:
            clock = self._reach(stream)
        self.wait_for(call, clock)

    def done(self, handle: int) -> bool:
        """Tell whether what is queued on a stream so far is done; if so, the host knows from now on."""
        stream = self.find("cuStreamQuery", handle)
        with self._machine.lock:
            clock = self._reach(stream)
        return self.try_learn("cuStreamQuery", clock)

    def synchronize_device(self, call: str, device: int) -> None:
        """Wait for all streams of a device."""
        with self._machine.lock:
            clock: Clock = {}
            for stream in self.all_of(device):
                join(clock, stream.now())
        self.wait_for(call, clock)
        with self._machine.lock:
            self._sweep(device)

    # -- for the other parts of the driver --

    def find(self, call: str, handle: int) -> Stream:
        """Return a stream by its handle, or the current context's default streams by theirs."""
        if handle == PER_THREAD_STREAM:
            return self._own(self._contexts.device(call))
        device = self._contexts.device(call)
        if handle in {DEFAULT_STREAM, LEGACY_STREAM}:
            return self._legacy[device]
        stream = self._by_handle.get(handle)
        if stream is None:
            raise _no_stream(call, handle)
        return stream

    def submit(
        self,
        stream: Stream,
        kind: str,
        run: Callable[[], None] | None,
        needs: Iterable[Need] = (),
        tick: int = 0,
    ) -> Work:
        """Queue work under the rules of the default streams. The caller holds the table lock."""
        pending = list(needs)
        for other in self._before(stream):
            join(stream.clock, other.now())
            if not other.idle:
                pending.append((other, other.submitted))
        try:
            number = stream.put(tuple(pending), run)
        except RuntimeError as error:
            rule = f"no thread can be started for {stream}: {error}"
            raise driver_error(
                "cuStreamCreate", 304, "CUDA_ERROR_OPERATING_SYSTEM", asked=kind, rule=rule
            ) from error
        return Work(stream, number, kind, tick)

    def _before(self, stream: Stream) -> tuple[Stream, ...]:
        """Return the streams of which all earlier work comes before new work of this one."""
        legacy = self._legacy[stream.device]
        if stream is legacy:
            return tuple(
                other for other in self.all_of(stream.device) if other.blocking and other is not legacy
            )
        return (legacy,) if stream.blocking else ()

    def point(self, stream: Stream) -> Point:
        """Return where the next work of a stream would stand. The caller holds the table lock."""
        clock = stream.now()
        for other in self._before(stream):
            join(clock, other.now())
        return Point(stream, stream.submitted + 1, clock)

    def wait_for(self, call: str, clock: Clock) -> None:
        """Wait until a clock is reached, and let the host know; raises the fault of a kernel, if there was one."""
        self.check_thread(call)
        for stream, number in clock.items():
            stream.wait(number)
        self._machine.guard.check_faults(call)
        with self._machine.lock:
            learn(clock)

    def check_thread(self, call: str) -> None:
        """Raise NOT_PERMITTED if a kernel calls, which would wait for itself."""
        if isinstance(threading.current_thread(), _StreamThread):
            rule = "a kernel may not wait for the driver it runs on"
            raise driver_error(call, CudaResult.NOT_PERMITTED, asked=call, rule=rule)

    def try_learn(self, call: str, clock: Clock) -> bool:
        """As `wait_for`, if that needs no wait; else return False."""
        for stream, number in clock.items():
            if stream.completed < number:
                return False
        self._machine.guard.check_faults(call)
        with self._machine.lock:
            learn(clock)
        return True

    def all_of(self, device: int) -> list[Stream]:
        """Return every stream of a device, the default ones included. The caller holds the table lock."""
        own = [stream for _, stream in self._threads if stream.device == device]
        return [self._legacy[device], *self._of_device[device], *own]

    def let_end(self, end: float) -> None:
        """Wait for all streams, until a moment of the monotonic clock at most; the host learns nothing by it."""
        with self._machine.lock:
            streams = [stream for device in range(len(self._legacy)) for stream in self.all_of(device)]
        for stream in streams:
            with stream._lock:
                while not stream.idle and stream._finished.wait(end - time.monotonic()):
                    pass

    def close_device(self, device: int) -> None:
        """Destroy the streams that were created on a device whose context goes away, after their work."""
        with self._machine.lock:
            for handle in [handle for handle, stream in self._by_handle.items() if stream.device == device]:
                self._by_handle.pop(handle).retire()
            self._sweep(device)

    def shut_down(self) -> None:
        """Drop what is queued, and wait for what runs."""
        with self._machine.lock:
            streams = [stream for device in range(len(self._legacy)) for stream in self.all_of(device)]
            self._by_handle.clear()
        threads = [stream.drop() for stream in streams]
        for thread in threads:
            if thread is not None:
                thread.join()

    def _reach(self, stream: Stream) -> Clock:
        clock = stream.now()
        if stream is self._legacy[stream.device]:
            # Whoever waits for the default stream waits for what it would wait for.
            for other in self.all_of(stream.device):
                if other.blocking:
                    join(clock, other.now())
        return clock

    def _own(self, device: int) -> Stream:
        streams: dict[int, Stream] | None = getattr(self._per_thread, "streams", None)
        if streams is None:
            streams = self._per_thread.streams = {}
        if device not in streams:
            thread = threading.current_thread()
            stream = Stream(PER_THREAD_STREAM, device, True, f"the default stream of thread {thread.name!r}")
            streams[device] = stream
            with self._machine.lock:
                self._threads = [
                    (owner, old)
                    for owner, old in self._threads
                    if owner.is_alive() or old.known < old.submitted
                ]
                self._threads.append((thread, stream))
        return streams[device]

    def _sweep(self, device: int) -> None:
        self._of_device[device] = [
            stream
            for stream in self._of_device[device]
            if stream.handle in self._by_handle or stream.known < stream.submitted
        ]


def _no_stream(call: str, handle: int) -> Exception:
    return driver_error(
        call, CudaResult.INVALID_HANDLE, asked=f"stream {handle}", rule="there is no such stream"
    )
