"""Host functions: Python functions that are called in the order of a stream, on its thread."""

from __future__ import annotations

from collections.abc import Callable

from remap.drivers.host.machine import Machine
from remap.drivers.host.streams import Streams
from remap.drivers.powers import call_host_function


class HostFunctions:
    """The call that queues them."""

    def __init__(self, machine: Machine, streams: Streams) -> None:
        self._machine = machine
        self._streams = streams

    def launch(self, stream_handle: int, function: Callable[[], None]) -> None:
        """Queue a call."""
        stream = self._streams.find("cuLaunchHostFunc", stream_handle)
        with self._machine.lock:
            self._streams.submit(stream, "a host function", lambda: call_host_function(function))
