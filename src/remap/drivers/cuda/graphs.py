"""The driver's calls on graphs: building, instantiating and launching them."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from remap.drivers.cuda.bindings import cuda, failure
from remap.drivers.graph_powers import NodeInfo, NodeKind
from remap.errors import CudaResult, DriverError
from remap.types import LaunchConfig, PackedArguments, Touched

_AUTO_FREE_ON_LAUNCH = 1  # CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH
_CONDITION_DEFAULT = 1  # CU_GRAPH_COND_ASSIGN_DEFAULT
_EDGE_DATA_SINCE = 13000  # from this version of the bindings on, edges carry data

# Numbers of `CUgraphNodeType` from cuda.h.
_KINDS = {
    0: NodeKind.KERNEL,
    1: NodeKind.COPY,
    2: NodeKind.FILL,
    3: NodeKind.HOST,
    4: NodeKind.CHILD,
    5: NodeKind.EMPTY,
    10: NodeKind.ALLOCATE,
    11: NodeKind.FREE,
    13: NodeKind.CONDITIONAL,
}

# The functions of host nodes, for as long as somebody else keeps them: a graph may run them any number of times, and
# the driver tells nobody when the last time was.
_functions: weakref.WeakValueDictionary[int, Callable[[], None]] = weakref.WeakValueDictionary()
_tokens = itertools.count(1)


def _called(token: int) -> None:
    function = _functions.get(token)
    if function is not None:
        function()


# One C function for all of them: it lives as long as the process, and so cannot go while the driver may call it.
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_called)
_CALLED = ctypes.cast(_FUNCTION, ctypes.c_void_p).value


class GraphCalls:
    """`SupportsGraphs` of the CUDA driver; it keeps no state."""

    # -- graphs --

    def graph_create(self) -> int:
        err, graph = cuda.cuGraphCreate(0)
        if err:
            raise failure("cuGraphCreate", err, asked="create a graph")
        return int(graph)

    def graph_destroy(self, graph: int) -> None:
        (err,) = cuda.cuGraphDestroy(graph)
        if err:
            raise failure("cuGraphDestroy", err, asked="destroy a graph")

    def graph_clone(self, graph: int) -> int:
        err, clone = cuda.cuGraphClone(graph)
        if err:
            raise _refused("cuGraphClone", err, "clone a graph", "a graph with memory nodes has no copies")
        return int(clone)

    def graph_nodes(self, graph: int) -> Sequence[NodeInfo]:
        err, _, count = cuda.cuGraphGetNodes(graph)
        if err:
            raise failure("cuGraphGetNodes", err, asked="the nodes of a graph")
        if not count:
            return ()
        err, nodes, _ = cuda.cuGraphGetNodes(graph, count)
        if err:
            raise failure("cuGraphGetNodes", err, asked="the nodes of a graph")
        after: dict[int, list[int]] = {int(node): [] for node in nodes}
        found = cuda.cuGraphGetEdges(graph)  # its last part is the number of edges, whatever the version
        if not found[0] and found[-1]:
            found = cuda.cuGraphGetEdges(graph, found[-1])
            for first, second in zip(found[1], found[2], strict=True):
                after[int(second)].append(int(first))
        if found[0]:
            raise failure("cuGraphGetEdges", found[0], asked="the edges of a graph")
        return [_told(node, tuple(before)) for node, before in after.items()]

    # -- nodes --

    def graph_add_empty(self, graph: int, after: Sequence[int]) -> int:
        err, node = cuda.cuGraphAddEmptyNode(graph, node_array(after), len(after))
        if err:
            raise failure("cuGraphAddEmptyNode", err, asked="add a node")
        return int(node)

    def graph_add_kernel(
        self,
        graph: int,
        after: Sequence[int],
        function: int | Callable[..., None],
        config: LaunchConfig,
        arguments: PackedArguments,
        touches: Sequence[Touched] | None,
    ) -> int:
        params = cuda.CUDA_KERNEL_NODE_PARAMS()
        params.func = cuda.CUfunction(function)
        params.gridDimX, params.gridDimY, params.gridDimZ = config.grid
        params.blockDimX, params.blockDimY, params.blockDimZ = config.block
        params.sharedMemBytes = config.shared_bytes
        params.kernelParams = arguments.pointers
        err, node = cuda.cuGraphAddKernelNode(graph, node_array(after), len(after), params)
        if err:
            asked = f"add a launch of {config.grid} blocks of {config.block} threads"
            raise failure("cuGraphAddKernelNode", err, asked=asked)
        return int(node)

    def graph_add_copy(
        self, graph: int, after: Sequence[int], destination: int, source: int, size: int, host: str = ""
    ) -> int:
        params = cuda.CUDA_MEMCPY3D()
        kinds = cuda.CUmemorytype
        if host == "source":
            params.srcMemoryType, params.srcHost = kinds.CU_MEMORYTYPE_HOST, source
        else:
            params.srcMemoryType, params.srcDevice = kinds.CU_MEMORYTYPE_DEVICE, cuda.CUdeviceptr(source)
        if host == "destination":
            params.dstMemoryType, params.dstHost = kinds.CU_MEMORYTYPE_HOST, destination
        else:
            params.dstMemoryType, params.dstDevice = kinds.CU_MEMORYTYPE_DEVICE, cuda.CUdeviceptr(destination)
        params.WidthInBytes, params.Height, params.Depth = size, 1, 1
        err, node = cuda.cuGraphAddMemcpyNode(graph, node_array(after), len(after), params, _context())
        if err:
            asked = f"add a copy of {size} bytes from {source:#x} to {destination:#x}"
            raise _refused("cuGraphAddMemcpyNode", err, asked, _WHY_NO_MEMORY)
        return int(node)

    def graph_add_fill(
        self, graph: int, after: Sequence[int], address: int, value: int, width: int, count: int
    ) -> int:
        params = cuda.CUDA_MEMSET_NODE_PARAMS()
        params.dst = cuda.CUdeviceptr(address)
        params.value, params.elementSize, params.width, params.height = value, width, count, 1
        params.pitch = width * count
        err, node = cuda.cuGraphAddMemsetNode(graph, node_array(after), len(after), params, _context())
        if err:
            asked = f"add a fill of {width * count} bytes at {address:#x}"
            raise _refused("cuGraphAddMemsetNode", err, asked, _WHY_NO_MEMORY)
        return int(node)

    def graph_add_host(self, graph: int, after: Sequence[int], function: Callable[[], None]) -> int:
        token = next(_tokens)
        _functions[token] = function
        params = cuda.CUDA_HOST_NODE_PARAMS()
        params.fn = cuda.CUhostFn(_CALLED)
        params.userData = token
        err, node = cuda.cuGraphAddHostNode(graph, node_array(after), len(after), params)
        if err:
            raise failure("cuGraphAddHostNode", err, asked="add a host function")
        return int(node)

    def graph_add_child(self, graph: int, after: Sequence[int], child: int) -> int:
        err, node = cuda.cuGraphAddChildGraphNode(graph, node_array(after), len(after), child)
        if err:
            rule = "a graph with memory nodes cannot be copied into another"
            raise _refused("cuGraphAddChildGraphNode", err, "add a child graph", rule)
        return int(node)

    def graph_condition(self, graph: int, default: int | None) -> int:
        flags = 0 if default is None else _CONDITION_DEFAULT
        err, handle = cuda.cuGraphConditionalHandleCreate(graph, _context(), default or 0, flags)
        if err:
            raise failure("cuGraphConditionalHandleCreate", err, asked="create a condition")
        return int(handle)

    def graph_add_conditional(
        self, graph: int, after: Sequence[int], condition: int, loop: bool
    ) -> tuple[int, int]:
        kinds = cuda.CUgraphConditionalNodeType
        params = cuda.CUgraphNodeParams()
        params.type = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = cuda.CUgraphConditionalHandle(condition)
        params.conditional.type = kinds.CU_GRAPH_COND_TYPE_WHILE if loop else kinds.CU_GRAPH_COND_TYPE_IF
        params.conditional.size = 1
        params.conditional.ctx = _context()
        data = (None,) if cuda.CUDA_VERSION >= _EDGE_DATA_SINCE else ()
        err, node = cuda.cuGraphAddNode(graph, node_array(after), *data, len(after), params)
        if err:
            raise failure("cuGraphAddNode", err, asked="add a conditional node")
        return int(node), int(params.conditional.phGraph_out[0])

    def graph_order(self, graph: int, node: int, after: int) -> None:
        data = (None,) if cuda.CUDA_VERSION >= _EDGE_DATA_SINCE else ()
        (err,) = cuda.cuGraphAddDependencies(graph, node_array([after]), node_array([node]), *data, 1)
        if err:
            raise failure("cuGraphAddDependencies", err, asked="let a node come after another")

    def graph_remove(self, graph: int, node: int) -> None:
        (err,) = cuda.cuGraphDestroyNode(node)
        if err:
            rule = "nodes of a graph with memory nodes cannot be removed"
            raise _refused("cuGraphDestroyNode", err, "remove a node", rule)

    # -- executables --

    def graph_instantiate(self, graph: int, auto_free: bool = False) -> int:
        err, executable = cuda.cuGraphInstantiate(graph, _AUTO_FREE_ON_LAUNCH if auto_free else 0)
        if err:
            rule = "a graph with memory nodes has one executable at a time"
            raise _refused("cuGraphInstantiate", err, "instantiate a graph", rule)
        return int(executable)

    def graph_launch(self, executable: int, stream: int) -> None:
        (err,) = cuda.cuGraphLaunch(executable, stream)
        if err:
            raise graph_launch_failed(err)

    def graph_upload(self, executable: int, stream: int) -> None:
        (err,) = cuda.cuGraphUpload(executable, stream)
        if err:
            raise failure("cuGraphUpload", err, asked="upload a graph")

    def graph_update(self, executable: int, graph: int) -> None:
        err, told = cuda.cuGraphExecUpdate(executable, graph)
        if err:
            rule = "the graph must have the same shape and kinds of nodes, and no memory nodes"
            if told is not None:  # the bindings give it with a success only, at least up to 13.3
                rule += f" ({getattr(told.result, 'name', told.result)})"
            raise failure("cuGraphExecUpdate", err, asked="update an executable graph", rule=rule)

    def graph_exec_destroy(self, executable: int) -> None:
        (err,) = cuda.cuGraphExecDestroy(executable)
        if err:
            raise failure("cuGraphExecDestroy", err, asked="destroy an executable graph")


def graph_launch_failed(err: Any) -> DriverError:
    """Return the error for the launch of a graph that failed."""
    known = err == CudaResult.INVALID_VALUE
    rule = "what an earlier launch allocated must have been freed" if known else ""
    return failure("cuGraphLaunch", err, asked="launch a graph", rule=rule)


_WHY_NO_MEMORY = "the whole range must be memory that the current device can use so"


def _refused(call: str, err: Any, asked: str, rule: str) -> DriverError:
    known = err in (CudaResult.INVALID_VALUE, CudaResult.NOT_SUPPORTED)
    return failure(call, err, asked=asked, rule=rule if known else "")


def node_array(numbers: Sequence[int]) -> list[Any]:
    """Return nodes as the objects that the bindings take."""
    return [cuda.CUgraphNode(number) for number in numbers]


def _context() -> Any:
    err, context = cuda.cuCtxGetCurrent()
    if err:
        raise failure("cuCtxGetCurrent", err)
    return context


def _told(node: int, after: tuple[int, ...]) -> NodeInfo:
    handle = cuda.CUgraphNode(node)
    err, kind = cuda.cuGraphNodeGetType(handle)
    if err:
        raise failure("cuGraphNodeGetType", err, asked="the type of a node")
    known = _KINDS.get(int(kind), NodeKind.OTHER)
    if known is NodeKind.ALLOCATE:
        err, params = cuda.cuGraphMemAllocNodeGetParams(handle)
        if err:
            raise failure("cuGraphMemAllocNodeGetParams", err, asked="what a node allocates")
        return NodeInfo(node, known, after, int(params.dptr), int(params.bytesize))
    if known is NodeKind.FREE:
        err, address = cuda.cuGraphMemFreeNodeGetParams(handle)
        if err:
            raise failure("cuGraphMemFreeNodeGetParams", err, asked="what a node frees")
        return NodeInfo(node, known, after, int(address))
    return NodeInfo(node, known, after)
