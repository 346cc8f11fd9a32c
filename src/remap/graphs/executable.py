"""Executables: graphs that can be launched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from remap.drivers.graph_powers import NodeKind
from remap.errors import InUseError, NotSupportedError
from remap.graphs import footprint
from remap.graphs.nodes import Allocation, GraphMemory, Node, _in_context, raise_failure
from remap.kernels.module import Module
from remap.lifetime import Description, Release, Resource, Step
from remap.ranges import begin_uses, end_uses
from remap.spans import Span
from remap.streams import Queue, StreamLike, Uses, as_stream

if TYPE_CHECKING:
    from remap.graphs.graph import Graph


class Executable(Resource):
    """A graph as it was when it was instantiated. Made by `Graph.instantiate`.

    It keeps buffers, modules and functions of its nodes alive. A launch needs the buffers open and backed: one that
    was paused and resumed, or moved, between two launches is at the same address, and the graph goes on (T13).
    """

    kind: ClassVar[str] = "executable graph"

    def __init__(self, graph: Graph, auto_free: bool) -> None:
        super().__init__(graph._driver)
        self.device = graph.device
        self.auto_free = auto_free
        self._default = as_stream(None, self.device)
        self._failures = graph._failures
        self._uses = Uses()
        with self.device.current():
            try:
                self._handle: int = self._driver.graph_instantiate(graph._handle, auto_free)
            except NotSupportedError as error:
                raise error.explain(f"an executable of {graph.describe()}") from None
        self._launch = self._driver.graph_launch
        self._take(graph)
        self._opened()

    def _take(self, graph: Graph) -> None:
        """Note what the nodes of a graph use, so that launches keep it from being taken away."""
        self._nodes = graph.nodes
        self._kept = kept = graph.kept()
        self._spans: tuple[Span, ...] = tuple(_distinct(one for one in kept if isinstance(one, Span)))
        self._modules: tuple[Module, ...] = tuple(_distinct(one for one in kept if isinstance(one, Module)))
        allocations = [node for node in self._nodes if isinstance(node, Allocation)]
        # What each launch leaves allocated, what it frees of other graphs', and what it uses of theirs.
        self._left = tuple(one for one in allocations if one.freed is None)
        others = _distinct(one for one in kept if isinstance(one, Allocation) and one not in allocations)
        frees = [node for node in self._nodes if node.kind is NodeKind.FREE]
        self._foreign = tuple(others)
        self._ends = tuple(one for one in others if any(one in node._keeps for node in frees))
        self._plain = not (self._spans or self._modules or self._left or self._foreign)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes as they were when it was instantiated or updated."""
        return self._nodes

    def launch(self, stream: StreamLike | None = None) -> None:
        """Queue one run on a stream; does not wait.

        It comes after what the stream has, and after earlier runs of this executable. Raises `InUseError` while
        memory that an earlier launch left lives (unless made with `auto_free`), `OutOfMemoryError`, `ClosedError` or
        `PausedError` for buffers of its nodes, and `LaunchError` for what a host function has raised in an earlier
        run; nothing is launched then. Source: cuGraphLaunch.
        """
        self._check()
        queue = self._default if stream is None else as_stream(stream, self.device)
        if self._failures:
            raise_failure(self._failures, f"launch of {self.describe()}")
        driver, context = self._driver, self.device._context
        if self._plain and context and driver.current_context() == context:
            self._launch(self._handle, queue.handle)
        else:
            self._launch_with(queue)
        if queue.transient:
            self._uses.add(queue)
        else:
            self._uses._streams[queue.device.index, queue.handle] = queue
        if footprint.watching:
            footprint.sample(self.device, "launch")

    def _launch_with(self, queue: Queue) -> None:
        asked = f"launch of {self.describe()}"
        left = [one._memory for one in self._left if one._memory is not None and not one._memory.closed]
        if left and not self.auto_free:
            raise InUseError(
                asked,
                rule=f"{left[0].describe()} lives on from an earlier launch",
                next_step="Close it, free it in a stream, or instantiate with auto_free=True",
            )
        foreign = [one.memory for one in self._foreign]
        spans: list[Span] = [*self._spans, *foreign]
        with self._driver.lock:
            for memory in left:
                memory._check_closable()
        queued = None
        begin_uses(spans, self.device.location, asked)
        try:
            self._begin_modules()
            try:
                with self.device.current():
                    for span in spans:
                        if span._arriving is not None:
                            span._arriving.join(queue)
                    self._launch(self._handle, queue.handle)
                queued = queue
            finally:
                self._end_modules(queued)
        finally:
            end_uses(spans, queued)
        for memory in [*left, *(one.memory for one in self._ends)]:
            memory._end()
        for one in self._left:
            one._memory = GraphMemory(one)
            one._memory._uses.add(queue)

    def _begin_modules(self) -> None:
        with self._driver.lock:
            for module in self._modules:
                module._check()
            for module in self._modules:
                module._busy += 1

    def _end_modules(self, queue: Queue | None) -> None:
        try:
            if queue is not None:
                for module in self._modules:
                    module._uses.add(queue)
        finally:
            with self._driver.lock:
                for module in self._modules:
                    module._busy -= 1

    def upload(self, stream: StreamLike | None = None) -> None:
        """Prepare the next launch in the order of a stream, so that it takes less time. Source: cuGraphUpload."""
        self._check()
        queue = as_stream(stream, self.device)
        with self.device.current():
            self._driver.graph_upload(self._handle, queue.handle)
        self._uses.add(queue)

    def update(self, graph: Graph) -> None:
        """Take over the nodes of a graph of the same shape: other arguments, sizes and buffers.

        Raises `DriverError` for another shape, `NotSupportedError` for memory nodes; then nothing has changed.
        Source: cuGraphExecUpdate.
        """
        self._check()
        graph._check()
        memory = (NodeKind.ALLOCATE, NodeKind.FREE)
        if any(node.kind in memory for node in (*self._nodes, *graph.nodes)):
            raise NotSupportedError(
                "cuGraphExecUpdate",
                "CUDA_ERROR_NOT_SUPPORTED",
                801,
                asked=f"an update of {self.describe()} with {graph.describe()}",
                rule="the driver does not update graphs with memory nodes",
                next_step="Close this executable and instantiate the graph",
            )
        with self.device.current():
            self._driver.graph_update(self._handle, graph._handle)
        # Runs under way still use what the nodes named before.
        before = self._kept
        self._take(graph)
        self._uses._held += before

    def _detach(self) -> Release:
        steps: list[Step] = [(_in_context, (self.device, self._driver.graph_exec_destroy, self._handle))]
        wait = self._uses.waiter((self.device,), f"closing {self.kind} {self.serial}")
        return Release(1, steps, wait)

    def describe(self) -> Description:
        """Return what this executable is."""
        count = len(self._nodes)
        size = sum(node.size for node in self._nodes if isinstance(node, Allocation))
        return Description(
            self.kind, self.serial, size, None, f"{count} node{'s' * (count != 1)} on {self.device}"
        )


def _distinct(things: Iterable[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())
