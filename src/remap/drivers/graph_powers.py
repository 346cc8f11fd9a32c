"""Optional powers of a driver: graphs, the memory inside them, and capture. Ask with `isinstance`.

As in the protocol, handles, nodes and addresses are integers, errors come from `errors.driver_error`, and nothing
waits unless its docstring says so. Nodes are added behind those named in `after`, and begin when all of these have
ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Protocol, runtime_checkable

from remap.sizes import format_size
from remap.types import LaunchConfig, PackedArguments, Touched


class NodeKind(StrEnum):
    """What a node of a graph does."""

    ALLOCATE = "allocate"
    FREE = "free"
    KERNEL = "kernel"
    COPY = "copy"
    FILL = "fill"
    HOST = "host"
    CHILD = "child"
    CONDITIONAL = "conditional"
    EMPTY = "empty"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node as the driver tells it: what it does, what it comes after, and the memory it allocates or frees."""

    node: int
    kind: NodeKind
    after: tuple[int, ...] = ()
    address: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class GraphFigures:
    """The graph memory of a device in bytes: associated with graphs, and taken from the device; now and at most."""

    used: int
    used_high: int
    reserved: int
    reserved_high: int

    def __repr__(self) -> str:
        """Return the figures with units."""
        said = ", ".join(f"{one.name}={format_size(getattr(self, one.name))}" for one in fields(self))
        return f"GraphFigures({said})"


class HighMark(StrEnum):
    """The high marks of graph memory, each of which is reset by itself."""

    USED = "used"
    RESERVED = "reserved"


class CaptureMode(StrEnum):
    """Which calls are refused while a stream is captured, as they might break it (`CUstreamCaptureMode`)."""

    GLOBAL = "global"
    THREAD_LOCAL = "thread_local"
    RELAXED = "relaxed"


class CaptureStatus(StrEnum):
    """Whether a stream is being captured, and whether that can still succeed."""

    NONE = "none"
    ACTIVE = "active"
    INVALIDATED = "invalidated"


@runtime_checkable
class SupportsGraphs(Protocol):
    """A driver that runs graphs of work."""

    def graph_create(self) -> int:
        """Create an empty graph. (cuGraphCreate)"""
        ...

    def graph_destroy(self, graph: int) -> None:
        """Destroy a graph; executables made from it stay, and so do their addresses. (cuGraphDestroy)"""
        ...

    def graph_clone(self, graph: int) -> int:
        """Return a copy; NOT_SUPPORTED for a graph with memory nodes (T16). (cuGraphClone)"""
        ...

    def graph_nodes(self, graph: int) -> Sequence[NodeInfo]:
        """Return every node. (cuGraphGetNodes, cuGraphGetEdges, cuGraphNodeGetType)"""
        ...

    def graph_add_empty(self, graph: int, after: Sequence[int]) -> int:
        """Add a node that does nothing. (cuGraphAddEmptyNode)"""
        ...

    def graph_add_kernel(
        self,
        graph: int,
        after: Sequence[int],
        function: int | Callable[..., None],
        config: LaunchConfig,
        arguments: PackedArguments,
        touches: Sequence[Touched] | None,
    ) -> int:
        """Add a launch in the current context; its arguments are copied now. (cuGraphAddKernelNode)

        `function` and `touches` are those of `Driver.launch`.
        """
        ...

    def graph_add_copy(
        self, graph: int, after: Sequence[int], destination: int, source: int, size: int, host: str = ""
    ) -> int:
        """Add a copy; `host` says which end is host memory, `"source"`, `"destination"` or none.

        (cuGraphAddMemcpyNode)
        """
        ...

    def graph_add_fill(
        self, graph: int, after: Sequence[int], address: int, value: int, width: int, count: int
    ) -> int:
        """Add `count` writes of a `value` of `width` 1, 2 or 4 bytes. (cuGraphAddMemsetNode)"""
        ...

    def graph_add_host(self, graph: int, after: Sequence[int], function: Callable[[], None]) -> int:
        """Add a call of a Python function, which must neither raise nor call the driver. (cuGraphAddHostNode)

        The caller keeps the function alive for as long as the graph, or an executable of it, can run it: the driver
        may hold it weakly.
        """
        ...

    def graph_add_child(self, graph: int, after: Sequence[int], child: int) -> int:
        """Add a copy of another graph as one node; NOT_SUPPORTED if it has memory nodes.

        (cuGraphAddChildGraphNode)
        """
        ...

    def graph_condition(self, graph: int, default: int | None) -> int:
        """Return a handle that kernels set to 0 or 1; at each launch it is `default`, if there is one.

        (cuGraphConditionalHandleCreate)
        """
        ...

    def graph_add_conditional(
        self, graph: int, after: Sequence[int], condition: int, loop: bool
    ) -> tuple[int, int]:
        """Add a node that runs its body if the condition holds, or while it does; return node and body graph.

        Each condition serves one node. The body takes no memory, host or other nodes that the driver forbids
        there. (cuGraphAddNode, CU_GRAPH_NODE_TYPE_CONDITIONAL)
        """
        ...

    def graph_order(self, graph: int, node: int, after: int) -> None:
        """Let a node come after another. (cuGraphAddDependencies)"""
        ...

    def graph_remove(self, graph: int, node: int) -> None:
        """Remove a node with its edges; NOT_SUPPORTED in a graph with memory nodes. (cuGraphDestroyNode)"""
        ...

    def graph_instantiate(self, graph: int, auto_free: bool = False) -> int:
        """Return an executable; NOT_SUPPORTED for a second one of a graph with memory nodes (T16).

        `auto_free` lets each launch free what the one before left allocated. (cuGraphInstantiate)
        """
        ...

    def graph_launch(self, executable: int, stream: int) -> None:
        """Queue one run, behind earlier runs of the same executable (T15). (cuGraphLaunch)"""
        ...

    def graph_upload(self, executable: int, stream: int) -> None:
        """Prepare the next launch in the order of a stream. (cuGraphUpload)"""
        ...

    def graph_update(self, executable: int, graph: int) -> None:
        """Take the parameters of a graph of the same shape into an executable. (cuGraphExecUpdate)"""
        ...

    def graph_exec_destroy(self, executable: int) -> None:
        """Destroy an executable; a run under way ends first, and is not waited for. (cuGraphExecDestroy)"""
        ...


@runtime_checkable
class SupportsGraphMemory(Protocol):
    """A driver whose graphs allocate: addresses when nodes are added, memory when graphs are launched.

    What a launch left allocated is freed by `Driver.free`, which waits, or by `SupportsPools.pool_free` in the order
    of a stream; on a stream that is being captured, `pool_allocate` and `pool_free` add memory nodes.
    """

    def graph_add_allocate(
        self, graph: int, after: Sequence[int], device: int, size: int, accessing: Sequence[int] = ()
    ) -> tuple[int, int]:
        """Add an allocation on a device and return the node and the address (T16).

        The devices in `accessing` may touch it, too. (cuGraphAddMemAllocNode)
        """
        ...

    def graph_add_free(self, graph: int, after: Sequence[int], address: int) -> int:
        """Add a node that frees an allocation of this graph, or one that another graph leaves allocated (T16).

        (cuGraphAddMemFreeNode)
        """
        ...

    def graph_figures(self, device: int) -> GraphFigures:
        """Return the graph memory of a device (T15). (cuDeviceGetGraphMemAttribute)"""
        ...

    def graph_set_high(self, device: int, mark: HighMark, value: int) -> None:
        """Reset a high mark: `value` must be 0 (T15). (cuDeviceSetGraphMemAttribute)"""
        ...

    def graph_trim(self, device: int) -> None:
        """Give memory back that no run and no unfreed allocation uses (T15). (cuDeviceGraphMemTrim)"""
        ...


@runtime_checkable
class SupportsCapture(Protocol):
    """A driver that turns work queued on a stream into a graph."""

    def begin_capture(self, stream: int, mode: CaptureMode) -> None:
        """Let work queued on a stream become nodes from now on. (cuStreamBeginCapture)"""
        ...

    def end_capture(self, stream: int) -> int:
        """End a capture and return the graph; a broken one is refused, and is over then. (cuStreamEndCapture)"""
        ...

    def capture_status(self, stream: int) -> CaptureStatus:
        """Tell whether a stream is being captured. (cuStreamIsCapturing)"""
        ...

    def exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        """Set which calls captures of other threads refuse to this thread, and return what was set before.

        (cuThreadExchangeStreamCaptureMode)
        """
        ...


@runtime_checkable
class SetsConditions(Protocol):
    """A driver whose kernels are Python functions, which have no cudaGraphSetConditional."""

    def graph_set_condition(self, condition: int, value: int) -> None:
        """Set a condition, from a kernel that comes before the conditional node or lies in its body."""
        ...
