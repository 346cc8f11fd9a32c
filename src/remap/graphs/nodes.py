"""What a graph is made of: nodes, the allocations among them, conditions, and memory that a launch has left."""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from remap.drivers.graph_powers import NodeKind, SetsConditions
from remap.drivers.powers import SupportsPools
from remap.errors import (
    ClosedError,
    InvalidValueError,
    LaunchError,
    NotSupportedError,
    not_supported,
)
from remap.lifetime import Description, Release, Step
from remap.locations import Device, in_context
from remap.sizes import format_size
from remap.spans import Chunk, Span
from remap.streams import Queue, StreamLike, as_stream
from remap.types import Access, Held

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from remap.graphs.building import Nodes


class Node:
    """One node of a graph. It keeps what it uses alive: buffers, arrays, kernels, functions.

    `number` counts the nodes of its graph, and `after` are the nodes that it was told to come after.
    """

    __slots__ = ("_graph", "_handle", "_keeps", "after", "body", "detail", "kind", "number")

    def __init__(
        self,
        graph: object,
        handle: int,
        number: int,
        kind: NodeKind,
        after: Sequence[Node],
        *,
        detail: str = "",
        keeps: Sequence[object] = (),
        body: Nodes | None = None,
    ) -> None:
        # What tells it from nodes of other graphs; not the graph itself, which holds its nodes.
        self._graph = graph
        self._handle = handle
        self._keeps = tuple(keeps)
        self.number = number
        self.kind = kind
        self.after = tuple(after)
        self.detail = detail
        self.body = body

    def __str__(self) -> str:
        """Return the node as one line: `2 free 64 MiB at 0x…, after 1`."""
        behind = f", after {', '.join(str(node.number) for node in self.after)}" if self.after else ""
        return f"{self.number} {self.kind}{f' {self.detail}' if self.detail else ''}{behind}"

    def __repr__(self) -> str:
        """Return the line in angles."""
        return f"<remap node {self}>"


class Allocation(Node):
    """Memory that a graph allocates when it runs, at an address that is known from the start.

    The address is an argument for the graph's own kernels, copies and fills between this node and the one that frees
    it. If the graph does not free it, a launch leaves it allocated: `memory` is a buffer over it then.
    """

    __slots__ = ("_memory", "_users", "address", "device", "freed", "released", "size")

    def __init__(
        self,
        graph: object,
        handle: int,
        number: int,
        after: Sequence[Node],
        *,
        device: Device,
        address: int,
        size: int,
    ) -> None:
        detail = f"{format_size(size)} at {address:#x}"
        super().__init__(graph, handle, number, NodeKind.ALLOCATE, after, detail=detail)
        self.device = device
        self.address = address
        self.size = size
        self.freed: Node | None = None  # the node of the same graph that frees it
        self.released: Node | None = None  # the node of another graph that does
        self._users: list[int] = []
        self._memory: GraphMemory | None = None

    def _settle(self, graph: object, handle: int, number: int, after: Sequence[Node]) -> None:
        """Take its place in a graph, for one that a capture gave out before there was a graph."""
        self._graph, self._handle, self.number, self.after = graph, handle, number, tuple(after)

    @property
    def memory(self) -> GraphMemory:
        """The buffer over what the latest launch has left allocated.

        Raises `ClosedError` where there is none: before a launch, once it was freed, and where the graph frees it.
        """
        found = self._memory
        if found is None or found.closed:
            rule = f"node {self.freed.number} frees it" if self.freed else "no launch has left it allocated"
            raise ClosedError(
                f"memory of {self}", rule=rule, next_step="Launch an executable of its graph first"
            )
        return found

    def array(self, dtype: DTypeLike = "uint8", shape: int | Sequence[int] | None = None) -> GraphArray:
        """Return this memory as an array argument for kernels of the graph."""
        kind = np.dtype(dtype)
        extents = (self.size // kind.itemsize,) if shape is None else shape
        found = (extents,) if isinstance(extents, int) else tuple(extents)
        if any(extent < 0 for extent in found) or math.prod(found) * kind.itemsize > self.size:
            raise InvalidValueError(
                f"an array of shape {found} of {kind} over {self}", rule=f"there are {self.size} bytes"
            )
        return GraphArray(self, kind, found)


class GraphArray:
    """An allocation of a graph as an array, for kernels of that graph. Made by `Allocation.array`."""

    def __init__(self, allocation: Allocation, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.allocation = allocation
        self.dtype = dtype
        self.shape = shape
        self._remap_array = (allocation.address, dtype, shape)  # how Python kernels take it
        self.__cuda_array_interface__ = {
            "data": (allocation.address, False),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
            "strides": None,
        }


class GraphMemory(Span):
    """Memory that a launch has left allocated. Made by the launch, and found as `allocation.memory`.

    `close()` waits and frees it, `free(stream)` frees it in the order of a stream. Until then it holds its bytes: the
    executable cannot be launched again, unless it was instantiated with `auto_free`.
    """

    kind: ClassVar[str] = "graph memory"

    def __init__(self, allocation: Allocation) -> None:
        super().__init__(allocation.device._driver)
        self.device = allocation.device
        self._address = allocation.address
        self._size = allocation.size
        self._rights = {self.device.location: Access.READ_WRITE}
        self._opened()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The one (address, size, location) of this memory. Reading it lets the address escape."""
        return (Chunk(self.address, self._size, self.device.location),)

    def _held(self) -> tuple[Held, ...]:
        rights = tuple(self._rights.items())
        return (Held(self._address, self._size, self.device.location, None, rights, "graph"),)

    def free(self, stream: StreamLike | None = None) -> None:
        """Free it once a stream has come to this point; the host does not wait. Source: cuMemFreeAsync.

        It waits for the device if another library has closed a stream that used it, and raises `InUseError`, with
        nothing changed, if a capture is running then.
        """
        queue = as_stream(stream, self.device)
        driver = self._driver
        if not isinstance(driver, SupportsPools):
            raise missing("memory_pools", f"free of {self.describe()} in stream order")

        def in_order(release: Release) -> None:
            if self._known_uses:
                self._known_uses.join(queue)
            release.wait = None
            release.steps = [(in_context, (self.device, driver.pool_free, self._address, queue.handle))]

        with queue._named():
            if self._close(in_order) and self._known_uses is not None:
                self._known_uses.forget()

    def _end(self) -> None:
        """Mark it closed, since a launch has freed it."""
        self._begin_close()

    def _detach(self) -> Release:
        steps: list[Step] = [(in_context, (self.device, self._driver.free, self._address))]
        return Release(0, steps, self._wait_on_close())

    def describe(self) -> Description:
        """Return what this memory is."""
        return Description(self.kind, self.serial, self._size, self._address, f"on {self.device}")


class Condition(ctypes.c_uint64):
    """A value, 0 or 1, that a kernel sets and a conditional node asks. Made by `Graph.condition`.

    It is an argument for kernels, which get the handle (an unsigned 64-bit integer) for cudaGraphSetConditional; the
    Python twin of a kernel gets this object and calls `set`.
    """

    _driver: Any = None

    def set(self, value: int) -> None:
        """Set it, from the Python twin of a kernel."""
        if not isinstance(self._driver, SetsConditions):
            raise missing("host kernels", "setting a condition from Python")
        self._driver.graph_set_condition(int(self.value), value)


class HostCall:
    """A Python function that a graph calls; what it raises is kept for the next launch, as nobody can catch it."""

    def __init__(
        self, function: Callable[..., object], arguments: tuple[object, ...], failures: deque[BaseException]
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._failures = failures

    def __call__(self) -> None:
        """Call it, on a thread of the driver's."""
        try:
            self._function(*self._arguments)
        except BaseException as error:  # noqa: BLE001 (it must not go through the driver)
            self._failures.append(error)


def raise_failure(failures: deque[BaseException], asked: str) -> None:
    """Raise what a host function of an earlier run has raised, if any has."""
    if failures:
        error = failures.popleft()
        raise LaunchError(
            asked,
            rule=f"a host function of an earlier run has raised {type(error).__name__}: {error}",
            next_step="Nothing was launched; launch again to go on",
        ) from error


def is_captured(queue: Queue) -> bool:
    """Tell whether a stream is being captured, by whomever."""
    with queue.kept() as there, queue.device.current():
        return there and bool(queue.device._driver.stream_capturing(queue.handle))


def missing(capability: str, asked: str) -> NotSupportedError:
    """Return the error for a power that the driver does not have."""
    return not_supported("cuGraphCreate", asked, f"the driver has no {capability}", capability=capability)
