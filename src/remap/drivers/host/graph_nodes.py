"""Graphs as they are built: nodes, and the order between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from remap.drivers.ancestry import Ancestry
from remap.drivers.graph_powers import NodeInfo, NodeKind
from remap.drivers.host.graph_heap import Allocation, Heap
from remap.drivers.host.refusals import invalid
from remap.errors import CudaResult, DriverError, driver_error
from remap.types import Touched

if TYPE_CHECKING:
    from remap.drivers.host.graph_run import Run

Action: TypeAlias = "Callable[[Run], None]"
"""What a node does in a run."""


@dataclass(eq=False, slots=True)
class Node:
    """One node. `touches` is what it may use, None for anything; `body` is a conditional's or a child's graph."""

    handle: int
    kind: NodeKind
    action: Action | None = None
    touches: Sequence[Touched] | None = ()
    allocation: Allocation | None = None
    frees: int = 0
    body: Graph | None = None
    condition: int = 0
    loop: bool = False


class Graph:
    """One graph. Its nodes have numbers in the order in which they were added; a removed one leaves a gap."""

    def __init__(self, handle: int, device: int, conditional: bool = False) -> None:
        self.handle = handle
        self.device = device
        self.conditional = conditional  # the body of a conditional node
        self.order = Ancestry()
        self.nodes: list[Node | None] = []
        self.numbers: dict[int, int] = {}
        self.heaps: dict[int, Heap] = {}
        self.allocations: dict[int, list[Allocation]] = {}
        self.frees: set[int] = set()  # addresses of other graphs that nodes of this one free
        self.conditions: dict[int, int | None] = {}  # each condition and its default
        self.executables = 0

    @property
    def has_memory(self) -> bool:
        """Whether it has nodes that allocate or free."""
        return bool(self.allocations or self.frees)

    def numbers_of(self, call: str, handles: Sequence[int]) -> list[int]:
        """Return the numbers of nodes; INVALID_VALUE for one that is not in this graph."""
        found: list[int] = []
        for handle in handles:
            number = self.numbers.get(handle)
            if number is None:
                raise invalid(call, f"node {handle}", "it is no node of this graph")
            found.append(number)
        if len(set(found)) != len(found):
            raise invalid(call, f"nodes {list(handles)}", "a dependency is named twice")
        return found

    def add(self, node: Node, after: Sequence[int]) -> int:
        """Add a node behind others, given by number, and return its handle."""
        self.numbers[node.handle] = self.order.add(after)
        self.nodes.append(node)
        return node.handle

    def remove(self, number: int) -> None:
        """Take a node out."""
        node = self.nodes[number]
        assert node is not None
        self.order.remove(number)
        self.nodes[number] = None
        del self.numbers[node.handle]

    def snapshot(self, handle: int) -> Graph:
        """Return a copy that later changes of this one do not reach."""
        copy = Graph(handle, self.device, self.conditional)
        copy.order = self.order.copy()
        copy.nodes = list(self.nodes)
        copy.numbers = dict(self.numbers)
        copy.conditions = dict(self.conditions)
        return copy

    def told(self) -> list[NodeInfo]:
        """Return what there is, as the protocol tells it."""
        found: list[NodeInfo] = []
        for number, node in enumerate(self.nodes):
            if node is None:
                continue
            after = tuple(self.handle_of(other) for other in self.order.after[number])
            address, size = node.frees, 0
            if node.kind is NodeKind.ALLOCATE and node.allocation is not None:
                address, size = node.allocation.address, node.allocation.size
            found.append(NodeInfo(node.handle, node.kind, after, address, size))
        return found

    def handle_of(self, number: int) -> int:
        """Return the handle of a node."""
        node = self.nodes[number]
        assert node is not None  # nothing comes after a node that was removed
        return node.handle

    def check_memory_free(self, call: str, asked: str, rule: str) -> None:
        """Raise NOT_SUPPORTED for a graph with memory nodes."""
        if self.has_memory:
            raise not_supported(call, asked, rule)


def not_supported(call: str, asked: str, rule: str) -> DriverError:
    """Return the NOT_SUPPORTED error of a call."""
    return driver_error(call, CudaResult.NOT_SUPPORTED, asked=asked, rule=rule)
