"""Graphs by capture: what is queued on a stream becomes nodes instead of running."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from remap.drivers.graph_powers import CaptureMode, SupportsCapture
from remap.drivers.powers import SupportsPools
from remap.errors import ClosedError, InUseError, InvalidValueError
from remap.graphs.graph import Graph
from remap.graphs.nodes import Allocation, missing
from remap.kernels.module import Module
from remap.lifetime import Resource, capturing, live, undo
from remap.locations import Device, device
from remap.sizes import Size, parse_size
from remap.spans import Span
from remap.streams import StreamLike, Uses, as_stream


class Capture:
    """A stream whose work becomes a graph, from `__enter__` to `__exit__`. Made by `capture`.

    `graph` is there when the block has ended; it keeps the buffers and modules that were used in it alive. Further
    streams take part if they wait for an event of this one, and must be joined to it again before the end. A wait for
    a captured stream is refused and leaves the capture intact. If the block fails, there is no graph.
    """

    def __init__(self, stream: StreamLike | None, mode: CaptureMode) -> None:
        known = getattr(stream, "device", None)
        at = known if isinstance(known, Device) else device()
        self._queue = as_stream(stream, at)
        self.device = self._queue.device
        driver: Any = self.device._driver
        if not isinstance(driver, SupportsCapture):
            raise missing("captures", f"a capture on {self.device}")
        self._driver = driver
        self._mode = mode
        self._held = capturing()
        self._allocations: dict[int, Allocation] = {}
        self._graph: Graph | None = None
        self._on = False

    @property
    def graph(self) -> Graph:
        """The graph, once the block has ended."""
        if self._graph is None:
            raise ClosedError("the graph of a capture", rule="it is there when the with block has ended well")
        return self._graph

    def alloc(self, size: Size) -> Allocation:
        """Add an allocation to the graph and return it; its address serves work captured after it."""
        number = parse_size(size)
        if number == 0:
            raise InvalidValueError("an allocation of 0 bytes", rule="it has at least one byte")
        driver = self._pools("an allocation")
        with self.device.current():
            address = driver.pool_allocate(number, self._queue.handle)
        # Its node is known at the end; until then it is an address with a size.
        found = Allocation(
            self, 0, len(self._allocations), (), device=self.device, address=address, size=number
        )
        self._allocations[address] = found
        return found

    def free(self, allocation: Allocation) -> None:
        """Free an allocation in the graph, after the work captured so far."""
        driver = self._pools("a free")
        with self.device.current():
            driver.pool_free(allocation.address, self._queue.handle)

    def _pools(self, asked: str) -> SupportsPools:
        if not self._on:
            raise ClosedError(f"{asked} in a capture", rule="its with block has ended, or has not begun")
        if not isinstance(self._driver, SupportsPools):
            raise missing("memory_pools", f"{asked} in a capture")
        return self._driver

    def __enter__(self) -> Self:
        """Begin the capture."""
        if self._on or self._graph is not None:
            raise InUseError("a second use of a capture", rule="it captures once", next_step="Make another")
        with self.device.current():
            self._driver.begin_capture(self._queue.handle, self._mode)
        self._held.__enter__()
        self._on = True
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """End the capture; make the graph unless the block has failed."""
        self._on = False
        used = list(self._used()) if error is None else []
        self._held.__exit__(None, None, None)
        with self.device.current():
            if error is not None:
                undo(error, self._discard)
                return
            handle = self._driver.end_capture(self._queue.handle)
        graph = Graph(self.device, _handle=handle)
        graph._adopt(graph._driver.graph_nodes(handle))
        graph._keeps = used
        self._graph = graph

    def _discard(self) -> None:
        driver: Any = self._driver
        driver.graph_destroy(self._driver.end_capture(self._queue.handle))

    def _used(self) -> Iterable[object]:
        """Yield the buffers and modules with work in streams that are being captured: what the graph needs."""
        known: dict[tuple[int, int], bool] = {}
        for thing in live(Resource):
            uses: Uses | None = thing._uses if isinstance(thing, Module) else None
            if isinstance(thing, Span):
                uses = thing._known_uses
            for queue in uses.queues if uses is not None else ():
                key = (queue.device.index, queue.handle)
                if key not in known:
                    with queue.kept() as there, queue.device.current():
                        known[key] = there and queue.device._driver.stream_capturing(queue.handle)
                if known[key]:
                    yield thing
                    break


def capture(stream: StreamLike | None = None, *, mode: CaptureMode | str = CaptureMode.RELAXED) -> Capture:
    """Return a context manager that captures what is queued on a stream into a graph.

    `mode` says which calls the driver refuses meanwhile, as they might break the capture: in this thread and others
    (`"global"`), in this thread (`"thread_local"`) or none (`"relaxed"`, so that remap can allocate). The legacy
    default stream cannot be captured. Source: cuStreamBeginCapture, cuStreamEndCapture.
    """
    try:
        return Capture(stream, CaptureMode(mode))
    except ValueError:
        rule = f"a mode is one of {', '.join(CaptureMode)}"
        raise InvalidValueError(f"capture mode {mode!r}", rule=rule) from None
