"""Graphs: work with its order and its memory, built once and launched many times.

    g = remap.Graph(0)
    a = g.alloc("64MiB")                                   # the address is known now, memory is taken at a launch
    k = g.launch(kernel, a, grid=…, block=…, after=[a])
    g.free(a, after=[k])
    with g.instantiate() as executable:
        executable.launch(stream)

Rules of freeing. An allocation that its graph frees costs nothing between launches: its bytes serve other graphs whose
runs are ordered by a stream or an event. One that its graph leaves allocated lives until its `memory` is closed or
freed in the order of a stream, a node of another graph frees it, or, with `auto_free`, until the next launch. Dropping
graph and executable frees neither; dropping the memory object does, with a warning. `remap.graph_memory(device)` shows
what all graphs of a device hold, and gives back what none of them uses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

from remap.drivers.graph_powers import NodeInfo, NodeKind, SupportsGraphMemory, SupportsGraphs
from remap.errors import InvalidValueError, NotSupportedError, not_supported
from remap.graphs.building import Nodes, handles_of
from remap.graphs.executable import Executable
from remap.graphs.nodes import Allocation, Condition, Node, missing
from remap.lifetime import Description, Release, Resource, drain, queued
from remap.locations import Device, DeviceLike, device
from remap.sizes import Size, counted


class Graph(Resource, Nodes):
    """Work for one device: nodes, and which comes after which. Source: cuGraphCreate.

    A graph is built by one thread. Changing it later does not change what was instantiated from it.
    """

    kind: ClassVar[str] = "graph"

    def __init__(self, at: DeviceLike | None = None, *, _handle: int | None = None) -> None:
        self.device = device(at)
        Resource.__init__(self, self.device._driver)
        if queued:
            drain()
        if not isinstance(self._driver, SupportsGraphs) or not isinstance(self._driver, SupportsGraphMemory):
            raise missing("graphs", f"a graph on {self.device}")
        self._begin(_handle or 0, deque())
        if _handle is not None:
            self._open = True  # from here on an interrupt leaves it to its finaliser
        else:
            with self.device.current():
                self._handle = self._driver.graph_create()
                self._open = True
        self._opened()

    # -- nodes that hold graphs --

    def child(self, graph: Graph, *, after: Iterable[Node] = ()) -> Node:
        """Add all nodes of another graph, as they are now, as one node.

        Raises `NotSupportedError` for a graph with memory nodes, which the driver does not copy.
        Source: cuGraphAddChildGraphNode.
        """
        return _child(self, graph, after)

    def condition(self, default: int | None = None) -> Condition:
        """Return a condition for one conditional node; at each launch it is `default`, if that is given.

        Source: cuGraphConditionalHandleCreate.
        """
        self._check()
        return self._condition(default)

    def when(self, condition: Condition, *, after: Iterable[Node] = ()) -> Node:
        """Add a node that runs its `body` if the condition is 1 when its turn comes; fill the body with nodes then.

        A body takes launches, copies, fills, children and conditionals; memory nodes and host functions raise
        `NotSupportedError`, by the driver's rule. Source: cuGraphAddNode (CU_GRAPH_COND_TYPE_IF).
        """
        return _conditional(self, self, condition, after, loop=False)

    def loop(self, condition: Condition, *, after: Iterable[Node] = ()) -> Node:
        """Add a node that runs its `body` while the condition is 1; as `when`. (CU_GRAPH_COND_TYPE_WHILE)"""
        return _conditional(self, self, condition, after, loop=True)

    # -- the whole graph --

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """The allocations among its nodes."""
        return tuple(node for node in self.nodes if isinstance(node, Allocation))

    def remove(self, node: Node) -> None:
        """Remove a node with its edges; raises `NotSupportedError` in a graph with memory nodes.

        Source: cuGraphDestroyNode.
        """
        self._check()
        self._own("a removal", node)
        if self._has_memory():
            raise _forbidden(f"removal of {node}", "nodes and edges of a graph with memory nodes stay")
        with self.device.current():
            self._driver.graph_remove(self._handle, node._handle)
        self._order.remove(node.number)
        self._nodes[node.number] = None
        self._gone += 1
        for other in self.nodes:
            other.after = tuple(one for one in other.after if one is not node)

    def clone(self) -> Graph:
        """Return a graph with the same nodes, which goes its own way from now on.

        Raises `NotSupportedError` for a graph with memory nodes, whose addresses there can be only once.
        Source: cuGraphClone.
        """
        self._check()
        if self._has_memory():
            raise _forbidden(f"a clone of {self.describe()}", "a graph with memory nodes cannot be cloned")
        with self.device.current():
            handle = self._driver.graph_clone(self._handle)
        clone = Graph(self.device, _handle=handle)
        clone._adopt(self._driver.graph_nodes(handle))
        clone._keeps = self.kept()
        clone._failures = self._failures
        return clone

    def instantiate(self, *, auto_free: bool = False) -> Executable:
        """Return an executable of the nodes as they are now.

        With `auto_free`, each launch frees what the one before has left allocated. A graph with memory nodes has one
        executable at a time: another one raises `NotSupportedError` until that is closed.
        Source: cuGraphInstantiate.
        """
        self._check()
        if queued:
            drain()
        return Executable(self, auto_free)

    def _has_memory(self) -> bool:
        return any(node.kind in (NodeKind.ALLOCATE, NodeKind.FREE) for node in self.nodes)

    def _adopt(self, told: Iterable[NodeInfo], known: Iterable[Allocation] = ()) -> None:
        """Take over the nodes that the driver made: by a capture, with the allocations it gave out, or by cloning."""
        given: dict[int, deque[Allocation]] = {}
        for one in known:  # several may have had one address, each after the one before was freed
            given.setdefault(one.address, deque()).append(one)
        waiting = {info.node: info for info in told}
        made: dict[int, Node] = {}
        while waiting:
            ready = [info for info in waiting.values() if all(node in made for node in info.after)]
            for info in ready:
                made[info.node] = self._adopt_node(info, [made[node] for node in info.after], given)
                del waiting[info.node]
            assert ready  # a graph has no cycle

    def _adopt_node(self, info: NodeInfo, after: list[Node], given: Mapping[int, deque[Allocation]]) -> Node:
        if info.kind is NodeKind.ALLOCATE:
            number = self._order.add([node.number for node in after])
            place = (self._token, info.node, number, after)
            if given.get(info.address):
                found = given[info.address].popleft()
                found._settle(*place)
            else:
                found = Allocation(*place, device=self.device, address=info.address, size=info.size)
            self._nodes.append(found)
            return found
        detail = f"{info.address:#x}" if info.address else ""
        node = self._add(info.node, info.kind, after, detail)
        if info.kind is NodeKind.FREE:
            for one in self.allocations:
                if one.address == info.address and one.freed is None:
                    one.freed = node
                    break
        return node

    # -- the end --

    def _detach(self) -> Release:
        return Release(1, [(self._driver.graph_destroy, (self._handle,))])

    def describe(self) -> Description:
        """Return what this graph is; its size is that of its allocations together."""
        size = sum(one.size for one in self.allocations)
        detail = f"{counted(len(self), 'node')} on {self.device}"
        return Description(self.kind, self.serial, size, None, detail)

    def __str__(self) -> str:
        """Return the graph for a reader: one line for each node, and for those of bodies."""
        return "\n".join([str(self.describe()), *_lines(self, 1)])

    def __bool__(self) -> bool:
        """Be true, with nodes or without."""
        return True


class Body(Nodes):
    """What a conditional node runs; it lives as long as its graph."""

    def __init__(self, graph: Graph, handle: int) -> None:
        self._whole = graph
        self.device: Device = graph.device
        self._driver = graph._driver
        self._begin(handle, graph._failures)

    def _check(self) -> None:
        self._whole._check()

    def child(self, graph: Graph, *, after: Iterable[Node] = ()) -> Node:
        """Add all nodes of another graph as one node; as `Graph.child`."""
        return _child(self, graph, after)

    def alloc(
        self, size: Size, *, after: Iterable[Node] = (), accessing: Iterable[Device] = ()
    ) -> Allocation:
        """Raise `NotSupportedError`: drivers take no memory nodes in the body of a conditional node."""
        raise _forbidden(f"an allocation of {size} in a body", _IN_BODY)

    def free(self, allocation: Allocation, *, after: Iterable[Node] = ()) -> Node:
        """Raise `NotSupportedError`, as `alloc`."""
        raise _forbidden(f"a free of {allocation} in a body", _IN_BODY)

    def host(self, function: Callable[..., object], *arguments: object, after: Iterable[Node] = ()) -> Node:
        """Raise `NotSupportedError`: drivers take no host functions in the body of a conditional node."""
        raise _forbidden(f"a host function {function} in a body", _IN_BODY)


_IN_BODY = "the body of a conditional node takes launches, copies, fills, children and conditionals only"


def _child(nodes: Nodes, graph: Graph, after: Iterable[Node]) -> Node:
    behind = nodes._behind("a child graph", after)
    graph._check()
    if graph is nodes:
        raise InvalidValueError("a graph as its own child", rule="that would be a cycle")
    if graph._has_memory():
        rule = "the driver does not copy a graph with memory nodes into another"
        raise _forbidden(f"{graph.describe()} as a child", rule)
    with nodes.device.current():
        handle = nodes._driver.graph_add_child(nodes._handle, handles_of(behind), graph._handle)
    detail = f"graph {graph.serial}, {len(graph)} nodes"
    return nodes._add(handle, NodeKind.CHILD, behind, detail, keeps=graph.kept())


def _conditional(
    nodes: Nodes, whole: Graph, condition: Condition, after: Iterable[Node], *, loop: bool
) -> Node:
    behind = nodes._behind("a conditional node", after)
    with nodes.device.current():
        handle, body = nodes._driver.graph_add_conditional(
            nodes._handle, handles_of(behind), int(condition.value), loop
        )
    detail = "repeats its body while" if loop else "runs its body if"
    return nodes._add(
        handle,
        NodeKind.CONDITIONAL,
        behind,
        f"{detail} {int(condition.value):#x}",
        keeps=[condition],
        body=Body(whole, body),
    )


def _forbidden(asked: str, rule: str) -> NotSupportedError:
    # The driver says the same; asked beforehand, the answer names the object.
    return not_supported("cuGraph", asked, rule)


def _lines(nodes: Nodes, depth: int) -> list[str]:
    found: list[str] = []
    for node in nodes.nodes:
        found.append("  " * depth + str(node))
        if node.body is not None:
            found += _lines(node.body, depth + 1)
    return found
