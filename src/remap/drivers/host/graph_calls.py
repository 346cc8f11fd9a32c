"""The calls on graphs, their memory and captures, each given to the part that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remap.drivers.graph_powers import (
    CaptureMode,
    CaptureStatus,
    GraphFigures,
    HighMark,
    NodeInfo,
    NodeKind,
)
from remap.drivers.host.capture import Captures
from remap.drivers.host.contexts import Contexts
from remap.drivers.host.graph_launches import Executables
from remap.drivers.host.graph_memory import GraphMemory
from remap.drivers.host.graphs import Graphs
from remap.drivers.host.guard import Guard
from remap.types import LaunchConfig, PackedArguments, Touched


class GraphCalls:
    """The calls of `drivers.graph_powers`."""

    _guard: Guard
    _contexts: Contexts
    _graphs: Graphs
    _executables: Executables
    _graph_memory: GraphMemory
    _captures: Captures

    # -- graphs --

    def graph_create(self) -> int:
        call = "cuGraphCreate"
        self._guard.check(call)
        return self._graphs.create(self._contexts.device(call))

    def graph_destroy(self, graph: int) -> None:
        self._guard.check("cuGraphDestroy")
        self._graphs.destroy(graph)

    def graph_clone(self, graph: int) -> int:
        self._guard.check("cuGraphClone")
        return self._graphs.clone(graph)

    def graph_nodes(self, graph: int) -> Sequence[NodeInfo]:
        self._guard.check("cuGraphGetNodes")
        return self._graphs.nodes(graph)

    # -- nodes --

    def graph_add_empty(self, graph: int, after: Sequence[int]) -> int:
        call = "cuGraphAddEmptyNode"
        self._guard.check(call)
        return self._graphs.add(call, graph, after, NodeKind.EMPTY)

    def graph_add_kernel(
        self,
        graph: int,
        after: Sequence[int],
        function: int | Callable[..., None],
        config: LaunchConfig,
        arguments: PackedArguments,
        touches: Sequence[Touched] | None,
    ) -> int:
        self._guard.check("cuGraphAddKernelNode")
        return self._graphs.add_kernel(graph, after, function, config, arguments, touches)

    def graph_add_copy(
        self, graph: int, after: Sequence[int], destination: int, source: int, size: int, host: str = ""
    ) -> int:
        self._guard.check("cuGraphAddMemcpyNode")
        return self._graphs.add_copy(graph, after, destination, source, size, host)

    def graph_add_fill(
        self, graph: int, after: Sequence[int], address: int, value: int, width: int, count: int
    ) -> int:
        self._guard.check("cuGraphAddMemsetNode")
        return self._graphs.add_fill(graph, after, address, value, width, count)

    def graph_add_host(self, graph: int, after: Sequence[int], function: Callable[[], None]) -> int:
        self._guard.check("cuGraphAddHostNode")
        return self._graphs.add_host(graph, after, function)

    def graph_add_child(self, graph: int, after: Sequence[int], child: int) -> int:
        self._guard.check("cuGraphAddChildGraphNode")
        return self._graphs.add_child(graph, after, child)

    def graph_condition(self, graph: int, default: int | None) -> int:
        self._guard.check("cuGraphConditionalHandleCreate")
        return self._graphs.condition(graph, default)

    def graph_set_condition(self, condition: int, value: int) -> None:
        """Set a condition, from a kernel: what cudaGraphSetConditional is on a device."""
        self._guard.check("cudaGraphSetConditional")
        self._executables.set_condition(condition, value)

    def graph_add_conditional(
        self, graph: int, after: Sequence[int], condition: int, loop: bool
    ) -> tuple[int, int]:
        self._guard.check("cuGraphAddNode")
        return self._graphs.add_conditional(graph, after, condition, loop)

    def graph_order(self, graph: int, node: int, after: int) -> None:
        self._guard.check("cuGraphAddDependencies")
        self._graphs.order(graph, node, after)

    def graph_remove(self, graph: int, node: int) -> None:
        self._guard.check("cuGraphDestroyNode")
        self._graphs.remove(graph, node)

    # -- executables --

    def graph_instantiate(self, graph: int, auto_free: bool = False) -> int:
        self._guard.check("cuGraphInstantiate")
        return self._executables.instantiate(graph, auto_free)

    def graph_launch(self, executable: int, stream: int) -> None:
        call = "cuGraphLaunch"
        self._guard.check(call)
        if self._captures.active:
            self._captures.refuse_on(call, stream)
        self._executables.launch(executable, stream)

    def graph_upload(self, executable: int, stream: int) -> None:
        self._guard.check("cuGraphUpload")
        self._executables.upload(executable, stream)

    def graph_update(self, executable: int, graph: int) -> None:
        self._guard.check("cuGraphExecUpdate")
        self._executables.update(executable, graph)

    def graph_exec_destroy(self, executable: int) -> None:
        self._guard.check("cuGraphExecDestroy")
        self._executables.destroy(executable)

    # -- memory --

    def graph_add_allocate(
        self, graph: int, after: Sequence[int], device: int, size: int, accessing: Sequence[int] = ()
    ) -> tuple[int, int]:
        self._guard.check("cuGraphAddMemAllocNode")
        return self._graphs.add_allocate(graph, after, device, size, accessing)

    def graph_add_free(self, graph: int, after: Sequence[int], address: int) -> int:
        self._guard.check("cuGraphAddMemFreeNode")
        return self._graphs.add_free(graph, after, address)

    def graph_figures(self, device: int) -> GraphFigures:
        self._guard.check("cuDeviceGetGraphMemAttribute")
        return self._graph_memory.figures(device)

    def graph_set_high(self, device: int, mark: HighMark, value: int) -> None:
        self._guard.check("cuDeviceSetGraphMemAttribute")
        self._graph_memory.set_high(device, mark, value)

    def graph_trim(self, device: int) -> None:
        self._guard.check("cuDeviceGraphMemTrim")
        self._graph_memory.trim(device)

    # -- capture --

    def begin_capture(self, stream: int, mode: CaptureMode) -> None:
        self._guard.check("cuStreamBeginCapture")
        self._captures.begin(stream, mode)

    def end_capture(self, stream: int) -> int:
        self._guard.check("cuStreamEndCapture")
        return self._captures.end(stream)

    def capture_status(self, stream: int) -> CaptureStatus:
        self._guard.check("cuStreamGetCaptureInfo")
        return self._captures.status(stream)

    def exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        self._guard.check("cuThreadExchangeStreamCaptureMode")
        return self._captures.exchange_mode(mode)
