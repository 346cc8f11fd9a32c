"""The calls that build graphs, by CUDA's rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sortedcontainers import SortedDict

from remap.drivers.graph_powers import NodeInfo, NodeKind
from remap.drivers.host import linux
from remap.drivers.host.contexts import Contexts
from remap.drivers.host.copies import fill
from remap.drivers.host.graph_access import Access, GraphAccess
from remap.drivers.host.graph_heap import Allocation
from remap.drivers.host.graph_memory import GraphMemory
from remap.drivers.host.graph_nodes import Action, Graph, Node, not_supported
from remap.drivers.host.graph_run import Run
from remap.drivers.host.launch import Launch, Launches
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import invalid
from remap.errors import CudaResult, driver_error
from remap.types import LaunchConfig, PackedArguments, Touched

_IN_BODY = "the body of a conditional node holds kernels, copies, fills, children and conditionals only"


class Graphs:
    """All graphs and executables of a driver by handle. Its methods take the table lock themselves."""

    def __init__(
        self,
        machine: Machine,
        contexts: Contexts,
        launches: Launches,
        access: GraphAccess,
        memory: GraphMemory,
    ) -> None:
        self._machine = machine
        self._contexts = contexts
        self._launches = launches
        self._access = access
        self._memory = memory
        self._graphs: dict[int, Graph] = {}
        self._allocations: SortedDict[int, Allocation] = SortedDict()  # the newest at each address

    # -- graphs --

    def create(self, device: int) -> int:
        """Return a new graph whose kernels and copies run on a device."""
        with self._machine.lock:
            return self._keep(Graph(next(self._machine.handles), device))

    def _keep(self, graph: Graph) -> int:
        self._graphs[graph.handle] = graph
        return graph.handle

    def destroy(self, handle: int) -> None:
        """Forget a graph; what was made from it stays."""
        with self._machine.lock:
            graph = self.find("cuGraphDestroy", handle)
            if graph.conditional:
                raise invalid("cuGraphDestroy", f"graph {handle}", "it belongs to its conditional node")
            del self._graphs[handle]
            for heap in graph.heaps.values():
                self._memory.drop_heap(heap)
            for address, allocations in graph.allocations.items():
                if self._allocations.get(address) in allocations:
                    del self._allocations[address]
            for body in bodies(graph):
                self._graphs.pop(body.handle, None)

    def clone(self, handle: int) -> int:
        """Return a copy of a graph without memory nodes."""
        call = "cuGraphClone"
        with self._machine.lock:
            graph = self.find(call, handle)
            graph.check_memory_free(call, "a clone", "a graph with memory nodes cannot be cloned")
            return self._keep(graph.snapshot(next(self._machine.handles)))

    def nodes(self, handle: int) -> Sequence[NodeInfo]:
        """Return what a graph consists of."""
        with self._machine.lock:
            return self.find("cuGraphGetNodes", handle).told()

    def order(self, handle: int, node: int, after: int) -> None:
        """Let a node come after another."""
        call = "cuGraphAddDependencies"
        with self._machine.lock:
            graph = self.find(call, handle)
            (first,), (second,) = graph.numbers_of(call, [after]), graph.numbers_of(call, [node])
            if not graph.order.order(second, first):
                raise invalid(call, f"node {node} after node {after}", "that would be a cycle")

    def remove(self, handle: int, node: int) -> None:
        """Remove a node from a graph without memory nodes."""
        call = "cuGraphDestroyNode"
        with self._machine.lock:
            graph = self.find(call, handle)
            (number,) = graph.numbers_of(call, [node])
            rule = "nodes and edges of a graph with memory nodes cannot be removed"
            graph.check_memory_free(call, f"removal of node {node}", rule)
            graph.remove(number)

    # -- nodes --

    def add(
        self,
        call: str,
        handle: int,
        after: Sequence[int],
        kind: NodeKind,
        action: Action | None = None,
        touches: Sequence[Touched] | None = (),
    ) -> int:
        """Add a node that needs no more than this."""
        with self._machine.lock:
            graph = self.find(call, handle)
            if graph.conditional and kind is NodeKind.HOST:
                raise not_supported(call, "a host function in the body of a conditional node", _IN_BODY)
            numbers = graph.numbers_of(call, after)
            return graph.add(Node(next(self._machine.handles), kind, action, touches), numbers)

    def add_kernel(
        self,
        handle: int,
        after: Sequence[int],
        function: int | Callable[..., None],
        config: LaunchConfig,
        arguments: PackedArguments,
        touches: Sequence[Touched] | None,
    ) -> int:
        """Add a launch on the current context's device."""
        call = "cuGraphAddKernelNode"
        device = self._contexts.device(call)
        if not callable(function):
            rule = "the host driver runs Python callables, and has no compiled functions"
            raise driver_error(call, CudaResult.INVALID_HANDLE, asked=f"function {function!r}", rule=rule)
        self._launches._check_config(call, device, config)
        name = str(getattr(function, "__qualname__", type(function).__qualname__))
        values = tuple(arguments.values)

        def kernel(run: Run) -> None:
            launch = Launch(self._launches, name, device, config, values)
            launch.work, launch.point = run.work, run.point
            launch.run(function)

        return self.add(call, handle, after, NodeKind.KERNEL, kernel, touches)

    def add_copy(
        self, handle: int, after: Sequence[int], destination: int, source: int, size: int, host: str
    ) -> int:
        """Add a copy."""
        call = "cuGraphAddMemcpyNode"
        if size <= 0:
            raise invalid(call, f"a copy of {size} bytes", "a copy node moves at least one byte")
        ends = (
            Access(destination, size, writes=True, host=host == "destination"),
            Access(source, size, writes=False, host=host == "source"),
        )
        return self._add_moving(
            call, handle, after, NodeKind.COPY, ends, lambda: linux.copy(destination, source, size)
        )

    def add_fill(
        self, handle: int, after: Sequence[int], address: int, value: int, width: int, count: int
    ) -> int:
        """Add a fill."""
        call = "cuGraphAddMemsetNode"
        if width not in {1, 2, 4} or not 0 <= value < 1 << 8 * width or address % width or count <= 0:
            rule = "a fill writes one element or more, of 1, 2 or 4 bytes each, at a multiple of their size"
            raise invalid(call, f"{count} elements of {width} bytes at {address:#x}", rule)
        size, pattern = width * count, value.to_bytes(width, "little")
        ends = (Access(address, size, writes=True),)
        return self._add_moving(
            call, handle, after, NodeKind.FILL, ends, lambda: fill(address, pattern, size)
        )

    def _add_moving(
        self,
        call: str,
        handle: int,
        after: Sequence[int],
        kind: NodeKind,
        ends: Sequence[Access],
        move: Callable[[], None],
    ) -> int:
        device = self._contexts.device(call)
        with self._machine.lock:
            for end in ends:
                self._access.check(call, device, end, self._allocations)
        touches = [Touched(end.address, end.size, end.writes) for end in ends]

        def action(run: Run) -> None:
            if all(self._access.usable(run, device, end) for end in ends):
                move()

        return self.add(call, handle, after, kind, action, touches)

    def add_host(self, handle: int, after: Sequence[int], function: Callable[[], None]) -> int:
        """Add a call of a Python function."""
        return self.add("cuGraphAddHostNode", handle, after, NodeKind.HOST, lambda _: function())

    def add_child(self, handle: int, after: Sequence[int], child: int) -> int:
        """Add a copy of another graph."""
        call = "cuGraphAddChildGraphNode"
        with self._machine.lock:
            graph, inner = self.find(call, handle), self.find(call, child)
            inner.check_memory_free(call, "a child graph", "a graph with memory nodes cannot be copied in")
            numbers = graph.numbers_of(call, after)
            body = inner.snapshot(next(self._machine.handles))
            return graph.add(Node(next(self._machine.handles), NodeKind.CHILD, body=body), numbers)

    def condition(self, handle: int, default: int | None) -> int:
        """Return a condition for one conditional node of a graph."""
        with self._machine.lock:
            graph = self.find("cuGraphConditionalHandleCreate", handle)
            condition = next(self._machine.handles)
            graph.conditions[condition] = default
            return condition

    def add_conditional(
        self, handle: int, after: Sequence[int], condition: int, loop: bool
    ) -> tuple[int, int]:
        """Add a conditional node and return it with its empty body."""
        call = "cuGraphAddNode"
        with self._machine.lock:
            graph = self.find(call, handle)
            numbers = graph.numbers_of(call, after)
            taken = any(node is not None and node.condition == condition for node in graph.nodes)
            if condition not in graph.conditions or taken:
                raise invalid(call, f"condition {condition}", "each condition serves one node of its graph")
            body = Graph(next(self._machine.handles), graph.device, conditional=True)
            # A condition of the body's own nodes is created on the whole graph, as on CUDA.
            body.conditions = graph.conditions
            self._keep(body)
            node = Node(next(self._machine.handles), NodeKind.CONDITIONAL, body=body)
            node.condition, node.loop = condition, loop
            return graph.add(node, numbers), body.handle

    # -- memory nodes --

    def add_allocate(
        self, handle: int, after: Sequence[int], device: int, size: int, accessing: Sequence[int]
    ) -> tuple[int, int]:
        """Add an allocation and return its node and its address (T16)."""
        call = "cuGraphAddMemAllocNode"
        with self._machine.lock:
            graph = self.find(call, handle)
            if graph.conditional:
                raise not_supported(call, "an allocation in the body of a conditional node", _IN_BODY)
            numbers = graph.numbers_of(call, after)
            heap = graph.heaps.get(device) or self._memory.new_heap(device)
            allocation = self._memory.allocate(heap, graph.order.ancestors(numbers), size, accessing)
            graph.heaps[device] = heap
            node = Node(next(self._machine.handles), NodeKind.ALLOCATE, allocation=allocation)
            graph.allocations.setdefault(allocation.address, []).append(allocation)
            self._allocations[allocation.address] = allocation
            return graph.add(node, numbers), allocation.address

    def add_free(self, handle: int, after: Sequence[int], address: int) -> int:
        """Add a node that frees an allocation of this graph, or what another graph leaves allocated (T16)."""
        call = "cuGraphAddMemFreeNode"
        with self._machine.lock:
            graph = self.find(call, handle)
            if graph.conditional:
                raise not_supported(call, "a free node in the body of a conditional node", _IN_BODY)
            numbers = graph.numbers_of(call, after)
            # Earlier ones at this address are freed, or the latest would not have got it.
            latest = graph.allocations.get(address, [])[-1:]
            own = [one for one in latest if one.freed_by < 0]
            found = own[0] if own else self._allocations.get(address)
            if found is None:
                raise invalid(call, f"address {address:#x}", "no allocation node has returned it")
            if found.freed_by >= 0 or found.elsewhere or address in graph.frees:
                raise invalid(call, f"address {address:#x}", "another node frees it already")
            node = Node(next(self._machine.handles), NodeKind.FREE, frees=address)
            if own:
                node.allocation = found
                graph.add(node, numbers)
                found.heap.free(found, graph.numbers[node.handle])
            else:
                graph.frees.add(address)
                graph.add(node, numbers)
            return node.handle

    def find(self, call: str, handle: int) -> Graph:
        """Return a graph by its handle. The caller holds the table lock."""
        graph = self._graphs.get(handle)
        if graph is None:
            raise invalid(call, f"graph {handle}", "there is no such graph")
        return graph


def bodies(graph: Graph) -> list[Graph]:
    """Return the bodies of a graph's conditional nodes, and of theirs."""
    found: list[Graph] = []
    for node in graph.nodes:
        if node is not None and node.body is not None:
            found += [node.body, *bodies(node.body)]
    return found
