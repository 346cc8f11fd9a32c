"""The calls that queue work and wait for it, each given to the part that it belongs to, or to a capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remap.drivers.host.capture import Captures
from remap.drivers.host.copies import Copies
from remap.drivers.host.events import Events
from remap.drivers.host.graphs import Graphs
from remap.drivers.host.guard import Guard
from remap.drivers.host.launch import Launches
from remap.drivers.host.pools import Pools
from remap.drivers.host.streams import Streams
from remap.types import LaunchConfig, PackedArguments, Touched


class WorkCalls:
    """Copies, fills, streams, events and launches."""

    _guard: Guard
    _copies: Copies
    _streams: Streams
    _events: Events
    _pools: Pools
    _launches: Launches
    _graphs: Graphs
    _captures: Captures

    # -- copies and fills in the current context --

    def copy_to_device(self, address: int, source: int, size: int, stream: int) -> None:
        self._copy("cuMemcpyHtoDAsync", address, source, size, stream, "source")

    def copy_to_host(self, destination: int, address: int, size: int, stream: int) -> None:
        self._copy("cuMemcpyDtoHAsync", destination, address, size, stream, "destination")

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        self._copy("cuMemcpyDtoDAsync", destination, source, size, stream, "")

    def _copy(self, call: str, destination: int, source: int, size: int, stream: int, host: str) -> None:
        self._guard.check(call)
        if (
            self._captures.active
            and size
            and self._captures.queue(
                call,
                stream,
                lambda graph, after: self._graphs.add_copy(graph, after, destination, source, size, host),
            )
        ):
            return
        self._copies.copy(call, destination, source, size, stream, host)

    def fill(self, address: int, value: int, width: int, count: int, stream: int) -> None:
        call = "cuMemsetD8Async"
        self._guard.check(call)
        if (
            self._captures.active
            and count
            and self._captures.queue(
                call,
                stream,
                lambda graph, after: self._graphs.add_fill(graph, after, address, value, width, count),
            )
        ):
            return
        self._copies.fill(address, value, width, count, stream)

    # -- streams --

    def create_stream(self, nonblocking: bool = True, priority: int = 0) -> int:
        self._guard.check("cuStreamCreateWithPriority")
        return self._streams.create(nonblocking, priority)

    def destroy_stream(self, stream: int) -> None:
        call = "cuStreamDestroy"
        self._guard.check(call)
        if self._captures.active:
            self._captures.forget_stream(call, stream)
        self._streams.destroy(stream)

    def synchronize_stream(self, stream: int) -> None:
        call = "cuStreamSynchronize"
        self._guard.check(call)
        if self._captures.active:
            self._captures.refuse_on(call, stream)
        self._streams.synchronize(stream)
        self._pools.after_wait()

    def stream_done(self, stream: int) -> bool:
        call = "cuStreamQuery"
        self._guard.check(call)
        if self._captures.active:
            self._captures.refuse_on(call, stream)
        return self._streams.done(stream)

    def stream_capturing(self, stream: int) -> bool:
        call = "cuStreamIsCapturing"
        self._guard.check(call)
        if self._captures.active:
            return self._captures.status(stream) != "none"
        self._streams.find(call, stream)
        return False

    # -- events --

    def wait_event(self, stream: int, event: int) -> None:
        call = "cuStreamWaitEvent"
        self._guard.check(call)
        if self._captures.active and self._captures.wait(call, stream, event):
            return
        self._events.wait(stream, event)

    def create_event(self, timing: bool = False) -> int:
        self._guard.check("cuEventCreate")
        return self._events.create(timing)

    def destroy_event(self, event: int) -> None:
        self._guard.check("cuEventDestroy")
        self._events.destroy(event)
        self._captures.renew_event(event)

    def record_event(self, event: int, stream: int) -> None:
        call = "cuEventRecord"
        self._guard.check(call)
        if self._captures.active and self._captures.record(call, event, stream):
            return
        self._events.record(event, stream)
        self._captures.renew_event(event)

    def synchronize_event(self, event: int) -> None:
        call = "cuEventSynchronize"
        self._guard.check(call)
        self._captures.refuse_event(call, event)
        self._events.synchronize(event)
        self._pools.after_wait()

    def event_done(self, event: int) -> bool:
        call = "cuEventQuery"
        self._guard.check(call)
        self._captures.refuse_event(call, event)
        return self._events.done(event)

    def elapsed(self, start: int, end: int) -> float:
        self._guard.check("cuEventElapsedTime")
        return self._events.elapsed(start, end)

    # -- kernels --

    def launch(
        self,
        function: int | Callable[..., None],
        config: LaunchConfig,
        stream: int,
        arguments: PackedArguments,
        touches: Sequence[Touched] | None,
    ) -> None:
        call = "cuLaunchKernel"
        self._guard.check(call)
        if self._captures.active and self._captures.queue(
            call,
            stream,
            lambda graph, after: self._graphs.add_kernel(graph, after, function, config, arguments, touches),
        ):
            return
        self._launches.launch(function, config, stream, arguments, touches)
