"""The driver's calls on memory that graphs allocate, and on captures."""

from __future__ import annotations

from collections.abc import Sequence

from remap.drivers.cuda.bindings import cuda, failure
from remap.drivers.cuda.graphs import node_array
from remap.drivers.cuda.structures import access_descriptions, location_of
from remap.drivers.graph_powers import CaptureMode, CaptureStatus, GraphFigures, HighMark
from remap.errors import CudaResult
from remap.sizes import format_size
from remap.types import Access, Location, LocationKind

# Numbers of `CUgraphMem_attribute` from cuda.h, since the enum cannot be had before the bindings are there.
_USED, _USED_HIGH, _RESERVED, _RESERVED_HIGH = 0, 1, 2, 3
_MARKS = {HighMark.USED: _USED_HIGH, HighMark.RESERVED: _RESERVED_HIGH}
_MODES = (CaptureMode.GLOBAL, CaptureMode.THREAD_LOCAL, CaptureMode.RELAXED)  # in the order of their numbers
_STATES = (CaptureStatus.NONE, CaptureStatus.ACTIVE, CaptureStatus.INVALIDATED)


class GraphMemoryCalls:
    """`SupportsGraphMemory` of the CUDA driver; it keeps no state."""

    def graph_add_allocate(
        self, graph: int, after: Sequence[int], device: int, size: int, accessing: Sequence[int] = ()
    ) -> tuple[int, int]:
        params = cuda.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.poolProps.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        params.poolProps.location = location_of(Location(LocationKind.DEVICE, device))
        params.bytesize = size
        others = [Location(LocationKind.DEVICE, other) for other in accessing if other != device]
        if others:
            params.accessDescs = access_descriptions(tuple((other, Access.READ_WRITE) for other in others))
            params.accessDescCount = len(others)
        err, node = cuda.cuGraphAddMemAllocNode(graph, node_array(after), len(after), params)
        if err:
            asked = f"add an allocation of {format_size(size)} on device {device}"
            rule = "the size must not be 0" if size == 0 else ""
            raise failure("cuGraphAddMemAllocNode", err, asked=asked, rule=rule)
        return int(node), int(params.dptr)

    def graph_add_free(self, graph: int, after: Sequence[int], address: int) -> int:
        err, node = cuda.cuGraphAddMemFreeNode(graph, node_array(after), len(after), address)
        if err:
            rule = "an allocation node must have returned it, and it is freed once"
            rule = rule if err == CudaResult.INVALID_VALUE else ""
            asked = f"add a node that frees {address:#x}"
            raise failure("cuGraphAddMemFreeNode", err, asked=asked, rule=rule)
        return int(node)

    def graph_figures(self, device: int) -> GraphFigures:
        return GraphFigures(
            used=_get(device, _USED),
            used_high=_get(device, _USED_HIGH),
            reserved=_get(device, _RESERVED),
            reserved_high=_get(device, _RESERVED_HIGH),
        )

    def graph_set_high(self, device: int, mark: HighMark, value: int) -> None:
        attribute = cuda.CUgraphMem_attribute(_MARKS[mark])
        (err,) = cuda.cuDeviceSetGraphMemAttribute(device, attribute, cuda.cuuint64_t(value))
        if err:
            rule = "a high mark can be set to 0 only" if err == CudaResult.INVALID_VALUE else ""
            asked = f"set the high mark of {mark} graph memory to {value}"
            raise failure("cuDeviceSetGraphMemAttribute", err, asked=asked, rule=rule)

    def graph_trim(self, device: int) -> None:
        (err,) = cuda.cuDeviceGraphMemTrim(device)
        if err:
            raise failure("cuDeviceGraphMemTrim", err, asked=f"trim the graph memory of device {device}")


class CaptureCalls:
    """`SupportsCapture` of the CUDA driver; it keeps no state."""

    def begin_capture(self, stream: int, mode: CaptureMode) -> None:
        (err,) = cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode(_MODES.index(mode)))
        if err:
            rule = "the legacy default stream cannot be captured, nor one that is being captured"
            raise failure("cuStreamBeginCapture", err, asked="capture a stream", rule=rule)

    def end_capture(self, stream: int) -> int:
        err, graph = cuda.cuStreamEndCapture(stream)
        if err:
            raise failure("cuStreamEndCapture", err, asked="end the capture of a stream")
        return int(graph)

    def capture_status(self, stream: int) -> CaptureStatus:
        err, status = cuda.cuStreamIsCapturing(stream)
        if err:
            raise failure("cuStreamIsCapturing", err, asked="ask whether a stream is being captured")
        return _STATES[int(status)]

    def exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        wanted = cuda.CUstreamCaptureMode(_MODES.index(mode))
        err, before = cuda.cuThreadExchangeStreamCaptureMode(wanted)
        if err:
            raise failure("cuThreadExchangeStreamCaptureMode", err, asked="change the mode for captures")
        return _MODES[int(before)]


def _get(device: int, attribute: int) -> int:
    err, value = cuda.cuDeviceGetGraphMemAttribute(device, cuda.CUgraphMem_attribute(attribute))
    if err:
        raise failure("cuDeviceGetGraphMemAttribute", err, asked=f"graph memory of device {device}")
    return int(value)
