"""Captures: streams whose work becomes the nodes of a graph.

A captured stream has tips: the nodes that its next one will come after. An event recorded there marks its tips, and a
stream that waits for such an event joins the capture. What CUDA forbids meanwhile is refused by the same name, and, as
there, breaks the capture: nothing but its end is possible then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from remap.drivers.graph_powers import CaptureMode, CaptureStatus
from remap.drivers.host.contexts import Contexts
from remap.drivers.host.graphs import Graphs
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import invalid
from remap.drivers.host.streams import Stream, Streams
from remap.drivers.protocol import DEFAULT_STREAM, LEGACY_STREAM
from remap.errors import CudaResult, DriverError, driver_error

# Results that no other room tells apart, with CUDA's names.
_UNMATCHED = 903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"
_UNJOINED = 904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
_ISOLATION = 905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"
_WRONG_THREAD = 908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"

Add = Callable[[int, Sequence[int]], int]
"""What adds a node to a graph, behind others, and returns it."""


class Capture:
    """One capture: its graph, and the tips of the streams that take part."""

    def __init__(self, graph: int, origin: Stream, mode: CaptureMode) -> None:
        self.graph = graph
        self.origin = origin
        self.mode = mode
        self.thread = threading.get_ident()
        self.tips: dict[Stream, list[int]] = {origin: []}
        self.broken = False


class Captures:
    """The captures of a driver. Its methods are safe from any thread, but a capture is one thread's business."""

    def __init__(self, machine: Machine, contexts: Contexts, streams: Streams, graphs: Graphs) -> None:
        self._machine = machine
        self._contexts = contexts
        self._streams = streams
        self._graphs = graphs
        self._by_stream: dict[Stream, Capture] = {}
        self._by_event: dict[int, tuple[Capture, list[int]]] = {}
        self._spent: set[int] = set()  # the events of captures that have ended
        self._modes = threading.local()

    # -- the calls --

    def begin(self, handle: int, mode: CaptureMode) -> None:
        """Let a stream be captured."""
        call = "cuStreamBeginCapture"
        stream = self._streams.find(call, handle)
        if handle in {DEFAULT_STREAM, LEGACY_STREAM}:
            rule = "the legacy default stream cannot be captured"
            raise driver_error(
                call, CudaResult.STREAM_CAPTURE_UNSUPPORTED, asked="capture a stream", rule=rule
            )
        if stream in self._by_stream:
            rule = "it is being captured already"
            raise driver_error(call, CudaResult.ILLEGAL_STATE, asked=f"capture {stream}", rule=rule)
        self._by_stream[stream] = Capture(self._graphs.create(stream.device), stream, mode)

    def end(self, handle: int) -> int:
        """Return the graph of a capture that began on this stream; a broken one is over, too."""
        call = "cuStreamEndCapture"
        stream = self._streams.find(call, handle)
        capture = self._by_stream.get(stream)
        if capture is None:
            rule = "it is not being captured"
            raise driver_error(call, CudaResult.ILLEGAL_STATE, asked=f"end a capture on {stream}", rule=rule)
        if capture.origin is not stream:
            raise _wrong(call, _UNMATCHED, f"the capture began on {capture.origin}")
        if capture.mode is not CaptureMode.RELAXED and capture.thread != threading.get_ident():
            raise _wrong(call, _WRONG_THREAD, "another thread began this capture")
        self._by_stream = {one: other for one, other in self._by_stream.items() if other is not capture}
        self._spent |= {event for event, mark in self._by_event.items() if mark[0] is capture}
        self._by_event = {event: mark for event, mark in self._by_event.items() if mark[0] is not capture}
        if capture.broken:
            self._graphs.destroy(capture.graph)
            rule = "an earlier call has broken the capture"
            raise driver_error(call, CudaResult.STREAM_CAPTURE_INVALIDATED, asked="end a capture", rule=rule)
        apart = [one for one in capture.tips if not self._joined(capture, one)]
        if apart:
            self._graphs.destroy(capture.graph)
            raise _wrong(call, _UNJOINED, f"{apart[0]} has captured work that {stream} does not wait for")
        return capture.graph

    def status(self, handle: int) -> CaptureStatus:
        """Tell whether a stream is being captured."""
        capture = self._by_stream.get(self._streams.find("cuStreamGetCaptureInfo", handle))
        if capture is None:
            return CaptureStatus.NONE
        return CaptureStatus.INVALIDATED if capture.broken else CaptureStatus.ACTIVE

    def exchange_mode(self, mode: CaptureMode) -> CaptureMode:
        """Set the calling thread's mode and return the one before."""
        before: CaptureMode = getattr(self._modes, "mode", CaptureMode.GLOBAL)
        self._modes.mode = mode
        return before

    # -- for the calls that queue work --

    @property
    def active(self) -> bool:
        """Whether there is any capture at all: asked first, as there mostly is none."""
        return bool(self._by_stream)

    def queue(self, call: str, handle: int, add: Add) -> bool:
        """Add work to the capture of a stream; return False if it is not being captured."""
        stream = self._streams.find(call, handle)
        capture = self._usable(call, stream)
        if capture is None:
            return False
        capture.tips[stream] = [add(capture.graph, capture.tips[stream])]
        return True

    def allocate(self, call: str, size: int, handle: int) -> int:
        """Add an allocation to the capture of a stream and return its address, 0 if it is not being captured."""
        addresses = [0]
        device = self._contexts.device(call)

        def add(graph: int, after: Sequence[int]) -> int:
            node, addresses[0] = self._graphs.add_allocate(graph, after, device, size, ())
            return node

        self.queue(call, handle, add)
        return addresses[0]

    def refuse_on(self, call: str, handle: int) -> None:
        """Refuse a call that waits for a stream, or asks about its work, while it is being captured."""
        stream = self._streams.find(call, handle)
        self._refuse(call, f"a wait for {stream}", self._by_stream.get(stream))

    def refuse_on_device(self, call: str) -> None:
        """Refuse a wait for all streams of the current device while one of them is being captured."""
        device = self._contexts.device(call)
        for stream, capture in list(self._by_stream.items()):
            if stream.device == device:
                self._refuse(call, f"a wait for device {device}", capture)

    def refuse_unsafe(self, call: str) -> None:
        """Refuse a call that may wait for running work, where a capture or the thread's mode forbids it."""
        mode: CaptureMode = getattr(self._modes, "mode", CaptureMode.GLOBAL)
        if mode is CaptureMode.RELAXED:
            return
        for capture in list(self._by_stream.values()):
            own = capture.thread == threading.get_ident() and capture.mode is not CaptureMode.RELAXED
            if own or (mode is CaptureMode.GLOBAL and capture.mode is CaptureMode.GLOBAL):
                self._refuse(call, call, capture)

    def record(self, call: str, event: int, handle: int) -> bool:
        """Let an event mark the tips of a captured stream; return False if the stream is not one."""
        stream = self._streams.find(call, handle)
        capture = self._usable(call, stream)
        if capture is None:
            self._by_event.pop(event, None)
            return False
        self._by_event[event] = capture, list(capture.tips[stream])
        return True

    def wait(self, call: str, handle: int, event: int) -> bool:
        """Let a stream's captured work come after a captured event; return False if neither is captured."""
        stream = self._streams.find(call, handle)
        capture = self._usable(call, stream)
        mark = self._by_event.get(event)
        if mark is None:
            if capture is not None:
                capture.broken = True
                raise _wrong(call, _ISOLATION, "captured work cannot wait for work outside of the capture")
            return False
        joined, tips = mark
        if capture is not None and capture is not joined:
            raise _wrong(call, _ISOLATION, "the event belongs to another capture")
        self._by_stream[stream] = joined
        joined.tips[stream] = list(dict.fromkeys([*joined.tips.get(stream, []), *tips]))
        return True

    def refuse_event(self, call: str, event: int) -> None:
        """Refuse a wait of the host for an event that was captured."""
        if event in self._by_event:
            rule = "it was recorded in a capture, so nothing has happened yet"
            raise driver_error(call, CudaResult.CAPTURED_EVENT, asked=f"event {event}", rule=rule)
        if event in self._spent:
            raise invalid(
                call, f"event {event}", "it was recorded in a capture, and is a part of the graph now"
            )

    def renew_event(self, event: int) -> None:
        """Forget that an event was captured: it is recorded again, or goes."""
        self._spent.discard(event)

    def forget_stream(self, call: str, handle: int) -> None:
        """Break the capture of a stream that is destroyed."""
        capture = self._by_stream.pop(self._streams.find(call, handle), None)
        if capture is not None:
            capture.broken = True

    # -- checks --

    def _usable(self, call: str, stream: Stream) -> Capture | None:
        capture = self._by_stream.get(stream)
        if capture is not None and capture.broken:
            rule = "an earlier call has broken the capture of this stream"
            raise driver_error(
                call, CudaResult.STREAM_CAPTURE_INVALIDATED, asked=f"work on {stream}", rule=rule
            )
        return capture

    def _refuse(self, call: str, asked: str, capture: Capture | None) -> None:
        if capture is None:
            return
        capture.broken = True
        rule = f"{capture.origin} is being captured, and this breaks the capture"
        raise driver_error(call, CudaResult.STREAM_CAPTURE_UNSUPPORTED, asked=asked, rule=rule)

    def _joined(self, capture: Capture, stream: Stream) -> bool:
        """Tell whether all work captured from a stream comes before the end of the origin."""
        with self._machine.lock:
            graph = self._graphs.find("cuStreamEndCapture", capture.graph)
            numbers = [graph.numbers[tip] for tip in capture.tips[capture.origin]]
            before = graph.order.ancestors(numbers)
            return all(before >> graph.numbers[tip] & 1 for tip in capture.tips[stream])


def _wrong(call: str, result: tuple[int, str], rule: str) -> DriverError:
    return driver_error(call, *result, asked="a capture", rule=rule)
