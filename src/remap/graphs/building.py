"""`Nodes`: adding nodes to a graph, with the checks that a driver leaves out or makes too late.

A driver takes almost any order of nodes; a kernel that runs before its memory is allocated, or after it was freed, is
found on the device, if at all. Here every use must come after the allocation and before the free.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from remap.drivers.ancestry import Ancestry
from remap.drivers.graph_powers import NodeKind
from remap.errors import (
    ClosedError,
    CudaResult,
    InUseError,
    InvalidValueError,
    OutOfMemoryError,
    driver_error,
)
from remap.graphs.nodes import Allocation, Condition, GraphArray, HostCall, Node
from remap.kernels.launch import Extent, Prepared
from remap.launches import MemoryUse, check_uses
from remap.locations import Device
from remap.sizes import Size, format_size, parse_byte, parse_size
from remap.spans import Span
from remap.types import Access, Touched

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUMBERS: Any = (int, float, np.generic, ctypes._SimpleCData, ctypes.Structure, ctypes.Union, type(None))


class Nodes:
    """The nodes of a graph, or of the body of a conditional node, in the order in which they were added."""

    _driver: Any
    device: Device

    def _begin(self, handle: int, failures: deque[BaseException]) -> None:
        self._handle = handle
        self._token = object()
        self._failures = failures
        self._order = Ancestry()
        self._nodes: list[Node | None] = []
        self._gone = 0  # how many of those were removed
        self._keeps: list[object] = []

    def _check(self) -> None:
        raise NotImplementedError

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node, in the order in which they were added."""
        return tuple(node for node in self._nodes if node is not None)

    def __len__(self) -> int:
        """Return how many nodes there are."""
        return len(self._nodes) - self._gone

    # -- memory --

    def alloc(
        self, size: Size, *, after: Iterable[Node] = (), accessing: Iterable[Device] = ()
    ) -> Allocation:
        """Add an allocation on the graph's device; its address is known at once, memory is taken at a launch.

        It may get the address of an allocation whose free node comes before it. `accessing` are further devices
        that may touch it. Raises `InvalidValueError` for no bytes, `OutOfMemoryError` for more than the device has.
        Source: cuGraphAddMemAllocNode.
        """
        number = parse_size(size)
        if number == 0:
            raise InvalidValueError("a graph's allocation of 0 bytes", rule="it has at least one byte")
        self.device.require("memory_pools")
        if number > (most := self.device.properties.memory):
            raise driver_error(
                "cuGraphAddMemAllocNode",
                CudaResult.OUT_OF_MEMORY,
                asked=f"{format_size(number)} in a graph of {self.device}",
                rule=f"the device has {format_size(most)}",
                next_step="Allocate less",
            )
        behind = self._behind("an allocation", after)
        others = [other.index for other in accessing]
        index = self.device.index
        try:
            with self.device.current():
                handle, address = self._driver.graph_add_allocate(
                    self._handle, handles_of(behind), index, number, others
                )
        except OutOfMemoryError as error:
            asked = f"{format_size(number)} in a graph of {self.device}"
            raise error.explain(asked, next_step=error.next_step or "Allocate less") from None
        place = self._order.add([node.number for node in behind])
        found = Allocation(
            self._token, handle, place, behind, device=self.device, address=address, size=number
        )
        self._nodes.append(found)
        return found

    def free(self, allocation: Allocation, *, after: Iterable[Node] = ()) -> Node:
        """Add a node that frees an allocation of this graph, or one that another graph leaves allocated.

        It must come after the allocation and after every node that uses it. Raises `InvalidValueError` for memory
        that no graph allocated, `ClosedError` for what is freed already, `InUseError` where a user does not come
        before. Source: cuGraphAddMemFreeNode.
        """
        asked = "a free node"
        if not isinstance(allocation, Allocation):
            rule = "a graph frees what a graph has allocated"
            raise InvalidValueError(f"{asked} for {allocation!r}", rule=rule, next_step="Close it instead")
        behind = self._behind(asked, after)
        taken = allocation.freed or allocation.released
        if taken is not None:
            where = "its own graph" if taken is allocation.freed else "another graph"
            rule = f"node {taken.number} of {where} frees it already"
            raise ClosedError(f"{asked} for {allocation}", rule=rule)
        own = allocation._graph is self._token
        if own:
            before = self._order.ancestors([node.number for node in behind])
            late = [user for user in (allocation.number, *allocation._users) if not before >> user & 1]
            if late:
                raise InUseError(
                    f"{asked} for {allocation}",
                    rule=f"node {late[-1]} uses it and does not come before",
                    next_step="Name the users: after=[…]",
                )
        with self.device.current():
            handle = self._driver.graph_add_free(self._handle, handles_of(behind), allocation.address)
        detail = f"{format_size(allocation.size)} at {allocation.address:#x}"
        node = self._add(handle, NodeKind.FREE, behind, detail, keeps=[allocation])
        if own:
            allocation.freed = node
        else:
            allocation.released = node
        return node

    # -- work --

    def launch(
        self,
        kernel: Any,
        *arguments: Any,
        grid: Extent,
        block: Extent,
        shared: Size = 0,
        after: Iterable[Node] = (),
    ) -> Node:
        """Add a launch of a kernel, whose arguments are taken over now; allocations of graphs are among them.

        Otherwise as `kernel.launch`. Buffers and the kernel's module must be open and backed at each launch of the
        graph. Raises `InUseError` for an allocation that does not come before. Source: cuGraphAddKernelNode.
        """
        name = str(getattr(kernel, "name", None) or getattr(kernel, "__name__", type(kernel).__name__))
        behind = self._behind(f"a launch of {name}", after)
        allocations = [_allocation(one) for one in arguments if isinstance(one, Allocation | GraphArray)]
        self._check_uses(f"a launch of {name}", allocations, behind)
        if not hasattr(kernel, "_prepare"):
            raise TypeError(f"a kernel of remap is launched, not {type(kernel).__name__}")
        prepared: Prepared = kernel._prepare(arguments, grid, block, shared, self.device)
        packed = prepared.packed
        try:
            touches = prepared.touches
            if touches is None and all(_known(one) for one in arguments):
                touches = [Touched(one.address, one.size) for one in allocations]
                touches += [Touched(span._address, span.size) for span in packed.spans if span.size]
            with self.device.current():
                for stream in packed.streams:  # what another library still writes to its array
                    self._driver.synchronize_stream(stream)
                handle = self._driver.graph_add_kernel(
                    self._handle, handles_of(behind), prepared.function, prepared.config, packed, touches
                )
            keeps = [prepared.module, kernel, *arguments, *packed.spans, *prepared.memory]
        finally:
            packed.give_back()
        return self._add(handle, NodeKind.KERNEL, behind, name, keeps=keeps, uses=allocations)

    def copy(
        self,
        target: Any,
        source: Any,
        *,
        offset: Size = 0,
        source_offset: Size = 0,
        size: Size | None = None,
        after: Iterable[Node] = (),
    ) -> Node:
        """Add a copy between buffers, allocations of graphs and host arrays (one of the two at most).

        The whole of the smaller one by default. A host array is kept, and read or written at each launch.
        Source: cuGraphAddMemcpyNode.
        """
        behind = self._behind("a copy", after)
        ends = (self._end(target, offset, True), self._end(source, source_offset, False))
        if ends[0].host and ends[1].host:
            raise InvalidValueError("a copy between two host arrays", rule="a graph moves memory of devices")
        size = min(end.size for end in ends) if size is None else parse_size(size)
        host = "destination" if ends[0].host else "source" if ends[1].host else ""
        # Against whoever takes the memory away meanwhile: either of the two is told.
        with self._driver.lock, self.device.current():
            self._check_ends("a copy", ends, size, behind)
            handle = self._driver.graph_add_copy(
                self._handle, handles_of(behind), ends[0].address, ends[1].address, size, host
            )
        detail = f"{format_size(size)} {ends[1].address:#x} to {ends[0].address:#x}"
        keeps = [target, source, *self._memory(ends, size)]
        return self._add(handle, NodeKind.COPY, behind, detail, keeps=keeps, uses=_used(ends))

    def fill(
        self,
        target: Any,
        value: int,
        *,
        offset: Size = 0,
        size: Size | None = None,
        after: Iterable[Node] = (),
    ) -> Node:
        """Add a fill: each byte of a part of a buffer or allocation becomes `value`, 0 to 255.

        Source: cuGraphAddMemsetNode.
        """
        byte = parse_byte(value)
        behind = self._behind("a fill", after)
        end = self._end(target, offset, True)
        if end.host:
            raise InvalidValueError("a fill of a host array", rule="a graph fills memory of devices")
        size = end.size if size is None else parse_size(size)
        with self._driver.lock, self.device.current():  # as for a copy
            self._check_ends("a fill", (end,), size, behind)
            handle = self._driver.graph_add_fill(self._handle, handles_of(behind), end.address, byte, 1, size)
        detail = f"{format_size(size)} at {end.address:#x} with {byte}"
        keeps = [target, *self._memory((end,), size)]
        return self._add(handle, NodeKind.FILL, behind, detail, keeps=keeps, uses=_used((end,)))

    def host(self, function: Callable[..., object], *arguments: object, after: Iterable[Node] = ()) -> Node:
        """Add a call of a Python function, on a thread of the driver's; it must not use remap or CUDA.

        What it raises is raised by the next launch. Source: cuGraphAddHostNode.
        """
        behind = self._behind("a host function", after)
        call = HostCall(function, arguments, self._failures)
        with self.device.current():
            handle = self._driver.graph_add_host(self._handle, handles_of(behind), call)
        name = str(getattr(function, "__qualname__", type(function).__name__))
        return self._add(handle, NodeKind.HOST, behind, name, keeps=[call])

    def join(self, *, after: Iterable[Node]) -> Node:
        """Add a node that does nothing: what comes after it comes after all those. Source: cuGraphAddEmptyNode."""
        behind = self._behind("a node", after)
        with self.device.current():
            handle = self._driver.graph_add_empty(self._handle, handles_of(behind))
        return self._add(handle, NodeKind.EMPTY, behind)

    # -- order --

    def order(self, first: Node, then: Node) -> None:
        """Let a node come after another that is there already; raises `InvalidValueError` for a cycle.

        Source: cuGraphAddDependencies.
        """
        for node in (first, then):
            self._own("an order of nodes", node)
        if first is then or self._order.precedes(then.number, first.number):
            raise InvalidValueError(
                f"node {then.number} after node {first.number}",
                rule=f"node {first.number} comes after node {then.number} already: that would be a cycle",
            )
        if first in then.after:
            return
        with self.device.current():
            self._driver.graph_order(self._handle, then._handle, first._handle)
        self._order.order(then.number, first.number)
        then.after = (*then.after, first)

    # -- checks --

    def _behind(self, asked: str, after: Iterable[Node]) -> list[Node]:
        self._check()
        found = list(dict.fromkeys((after,) if isinstance(after, Node) else after))
        for node in found:
            self._own(asked, node)
        return found

    def _own(self, asked: str, node: Node) -> None:
        if node._graph is not self._token:
            rule = "the nodes of one graph come after each other only"
            raise InvalidValueError(f"{asked} after {node}", rule=f"it is no node of this graph: {rule}")
        if self._nodes[node.number] is not node:
            raise ClosedError(f"{asked} after {node}", rule="it was removed from the graph")

    def _check_uses(self, asked: str, allocations: Sequence[Allocation], behind: Sequence[Node]) -> None:
        """Raise unless every allocation is there when a node with these dependencies begins."""
        before = self._order.ancestors([node.number for node in behind])
        for one in allocations:
            if one.freed is not None:
                rule = f"node {one.freed.number} frees it, and a new node cannot come before that"
                raise ClosedError(f"{asked} with {one}", rule=rule)
            if one._graph is self._token and not before >> one.number & 1:
                raise InUseError(
                    f"{asked} with {one}",
                    rule="the node does not come after the allocation",
                    next_step="Name it: after=[allocation]",
                )

    def _end(self, what: Any, offset: Size, writes: bool) -> _End:
        offset = parse_size(offset, "offset")
        if isinstance(what, Allocation):
            return _End(what.address + offset, what.size - offset, what, None, False, writes)
        if isinstance(what, Span):
            what._check()
            return _End(what._address + offset, what.size - offset, None, what, False, writes)
        if isinstance(what, np.ndarray):
            array = cast("NDArray[Any]", what)
            if not array.flags.c_contiguous or (writes and not array.flags.writeable):
                rule = "it must be contiguous, and writable where it is written"
                raise InvalidValueError("a host array of this kind in a graph", rule=rule)
            return _End(array.ctypes.data + offset, array.nbytes - offset, None, None, True, writes)
        raise TypeError(f"a graph copies buffers, allocations and NumPy arrays, not {type(what).__name__}")

    def _check_ends(self, asked: str, ends: Sequence[_End], size: int, behind: Sequence[Node]) -> None:
        if size <= 0 or any(size > end.size for end in ends):
            room = min(end.size for end in ends)
            raise InvalidValueError(
                f"{asked} of {size} bytes", rule=f"there are {max(room, 0)} bytes, and one at least is moved"
            )
        self._check_uses(asked, _used(ends), behind)
        check_uses(self._memory(ends, size), self.device.location, asked)

    def _memory(self, ends: Sequence[_End], size: int) -> list[MemoryUse]:
        """Return which parts of buffers a node uses, for the launches that look at them again."""
        found: list[MemoryUse] = []
        for end in ends:
            if end.span is not None:
                needed = Access.READ_WRITE if end.writes else Access.READ
                part = (end.address - end.span._address, size)
                found.append(MemoryUse(end.span, self.device.location, needed, part))
        return found

    def _add(
        self,
        handle: int,
        kind: NodeKind,
        behind: Sequence[Node],
        detail: str = "",
        *,
        keeps: Sequence[object] = (),
        uses: Sequence[Allocation] = (),
        body: Nodes | None = None,
    ) -> Node:
        number = self._order.add([node.number for node in behind])
        node = Node(self._token, handle, number, kind, behind, detail=detail, keeps=keeps, body=body)
        self._nodes.append(node)
        for allocation in uses:
            if allocation._graph is self._token:
                allocation._users.append(number)
        return node

    def _condition(self, default: int | None) -> Condition:
        if default not in (None, 0, 1):
            raise InvalidValueError(f"condition {default}", rule="a condition is 0 or 1")
        with self.device.current():
            handle = self._driver.graph_condition(self._handle, default)
        condition = Condition(handle)
        condition._driver = self._driver
        return condition

    def kept(self) -> list[object]:
        """Return everything that the nodes use, those of bodies and child graphs included."""
        found = [*self._keeps]
        for node in self.nodes:
            found += node._keeps
            if node.body is not None:
                found += node.body.kept()
        return found


class _End(NamedTuple):
    """One end of a copy: its address, how many bytes there are, what it belongs to, and whether it is written."""

    address: int
    size: int
    allocation: Allocation | None
    span: Span | None
    host: bool
    writes: bool


def _used(ends: Sequence[_End]) -> list[Allocation]:
    return [end.allocation for end in ends if end.allocation is not None]


def _allocation(argument: Allocation | GraphArray) -> Allocation:
    return argument.allocation if isinstance(argument, GraphArray) else argument


def _known(argument: object) -> bool:
    """Tell whether it is certain what memory an argument names, if any."""
    return isinstance(argument, (Span, Allocation, GraphArray, *_NUMBERS))


def handles_of(nodes: Sequence[Node]) -> list[int]:
    """Return the driver's handles of nodes."""
    return [node._handle for node in nodes]
