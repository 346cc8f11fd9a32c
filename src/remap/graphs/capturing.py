"""Graphs by capture: what is queued on a stream becomes nodes instead of running."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from remap.drivers.graph_powers import CaptureMode, SupportsCapture
from remap.drivers.powers import SupportsPools
from remap.drivers.protocol import PER_THREAD_STREAM
from remap.errors import ClosedError, InUseError, InvalidValueError
from remap.graphs.graph import Graph
from remap.graphs.nodes import Allocation, is_captured, missing
from remap.kernels.module import Module
from remap.launches import Recorded, launches
from remap.lifetime import Release, Resource, capturing, epoch, live, queued, undo
from remap.locations import Device, device, in_context
from remap.sizes import Size, parse_byte, parse_size
from remap.spans import Span
from remap.streams import Queue, StreamLike, as_stream
from remap.types import Access
from remap.uses import Uses


class Capture:
    """A stream whose work becomes a graph, from `__enter__` to `__exit__`. Made by `capture`.

    `graph` is there when the block has ended; it keeps the buffers and modules that were used in it alive. Further
    streams take part if they wait for an event of this one, and must be joined to it again before the end. A wait for
    a captured stream is refused and leaves the capture intact. If the block fails, there is no graph.
    """

    _process = Resource._process  # not by a name of the module, which may be gone when the process ends

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
        self._held = _under_way()  # dropped with it, too
        self._recorded: Sequence[Recorded] = ()
        self._allocations: list[Allocation] = []
        self._freed: list[Allocation] = []
        self._graph: Graph | None = None
        self._on = False
        self._begun = False  # the stream is being captured for this object, or may be
        self._epoch = epoch()

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
        self._allocations.append(found)
        return found

    def free(self, allocation: Allocation) -> None:
        """Free an allocation in the graph, after the work captured so far."""
        driver = self._pools("a free")
        if not isinstance(allocation, Allocation):
            raise TypeError(f"a capture frees what a graph has allocated, not {type(allocation).__name__}")
        self._check_there("a free", allocation)
        with self.device.current():
            driver.pool_free(allocation.address, self._queue.handle)
        self._freed.append(allocation)

    def fill(self, target: Allocation, value: int, *, offset: Size = 0, size: Size | None = None) -> None:
        """Capture a fill: each byte of a part of an allocation becomes `value`, 0 to 255.

        Buffers are filled by their own `fill`, with the captured stream.
        """
        byte = parse_byte(value)
        address, room = self._place("a fill", target, offset)
        size = _length("a fill", size, room)
        with self.device.current():
            self.device._driver.fill(address, byte, 1, size, self._queue.handle)

    def copy(
        self,
        target: Allocation | Span,
        source: Allocation | Span,
        *,
        offset: Size = 0,
        source_offset: Size = 0,
        size: Size | None = None,
    ) -> None:
        """Capture a copy between allocations of the graph and buffers, the whole of the smaller one by default.

        Host arrays are copied by a buffer's `copy_from_host` and `copy_to_host`, with the captured stream.
        """
        to, room = self._place("a copy", target, offset)
        origin, there = self._place("a copy", source, source_offset)
        size = _length("a copy", size, room, there)
        stream: Any = self._queue.handle if self._queue.owner is None else self._queue.owner
        with self.device.current(), ExitStack() as uses:
            for what, start, needed in ((target, to, Access.READ_WRITE), (source, origin, Access.READ)):
                if isinstance(what, Span):
                    part = (start - what._address, size)
                    uses.enter_context(what._using("copy in a capture", needed, stream, part=part))
            self.device._driver.copy(to, origin, size, self._queue.handle)

    def _place(self, asked: str, what: Allocation | Span, offset: Size) -> tuple[int, int]:
        """Return the address at an offset of memory, and how many bytes there are from there on."""
        self._check_on(asked)
        start = parse_size(offset, "offset")
        if isinstance(what, Span):
            what._check()
            return what._address + start, what.size - start
        if not isinstance(what, Allocation):
            said = f"{asked} in a capture takes allocations of graphs and buffers"
            raise TypeError(f"{said}, not {type(what).__name__}")
        self._check_there(asked, what)
        return what.address + start, what.size - start

    def _check_there(self, asked: str, allocation: Allocation) -> None:
        if allocation in self._freed:
            raise ClosedError(
                f"{asked} of {allocation}",
                rule="this capture has freed it already",
                next_step="Work with it before it is freed, and free it once",
            )

    def _check_on(self, asked: str) -> None:
        if not self._on:
            raise ClosedError(f"{asked} in a capture", rule="its with block has ended, or has not begun")

    def _pools(self, asked: str) -> SupportsPools:
        self._check_on(asked)
        if not isinstance(self._driver, SupportsPools):
            raise missing("memory_pools", f"{asked} in a capture")
        return self._driver

    def __enter__(self) -> Self:
        """Begin the capture."""
        if self._on or self._graph is not None:
            raise InUseError("a second use of a capture", rule="it captures once", next_step="Make another")
        self._recorded = self._held.__enter__()
        try:
            with self.device.current():
                self._begun = not self.device._driver.stream_capturing(self._queue.handle)
                self._driver.begin_capture(self._queue.handle, self._mode)
        except BaseException as error:
            self._discard(error)
            raise
        self._on = True
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """End the capture; make the graph unless the block has failed."""
        self._on = False
        if error is not None:
            self._discard(error)
            return
        handle, graph = 0, None
        try:
            used, streams = list(self._used()), self._taking_part()
            with self.device.current():
                handle = self._driver.end_capture(self._queue.handle)
                self._begun = False
            owned, handle = handle, 0  # an object that was interrupted as it was made may give it back itself
            graph = Graph(self.device, _handle=owned)
            graph._adopt(graph._driver.graph_nodes(owned), self._allocations)
            # Those that are still being captured take part in something else.
            own = {key for key, queue in streams.items() if queue is None or not is_captured(queue)}
            for queue, things in self._recorded:
                if _key(queue) in own:
                    used += things
            graph._keeps = used
            self._graph = graph
            self._recorded, self._freed = (), []
            self._held.__exit__(None, None, None)
        except BaseException as failed:
            if graph is not None:
                undo(failed, graph.close)
            elif handle:
                undo(failed, in_context, self.device, self._destroy, handle)
            self._graph = None
            self._discard(failed)
            raise

    def _discard(self, error: BaseException) -> None:
        """Let the stream go after `error`, without a graph."""
        self._held.__exit__(None, None, None)
        self._recorded = ()
        begun, self._begun = self._begun, False
        if begun:
            undo(error, _end, self.device, self._queue.handle)

    def _destroy(self, graph: int) -> None:
        driver: Any = self._driver
        driver.graph_destroy(graph)

    def __del__(self) -> None:
        """Leave the end of a capture that an interrupt kept from ending to the next call."""
        process = self._process
        if getattr(self, "_begun", False) and not process.ending and self._epoch == process.epoch:
            queued.append(Release(0, [(_end, (self.device, self._queue.handle))]))

    def _used(self) -> Iterable[object]:
        """Yield the buffers and modules with work in streams that are being captured: what the graph needs."""
        known: dict[tuple[int, int], bool] = {}
        for thing in live(Resource):
            uses: Uses | None = thing._uses if isinstance(thing, Module) else None
            if isinstance(thing, Span):
                uses = thing._known_uses
            for queue in uses.queues if uses is not None else ():
                key = _key(queue)
                if key not in known:
                    known[key] = is_captured(queue)
                if known[key]:
                    yield thing
                    break

    def _taking_part(self) -> dict[tuple[int, int], Queue | None]:
        """Return the streams with recorded work that are being captured, as far as it is safe to ask; None elsewhere.

        A bare handle was valid when that work was queued, and nobody knows whether it still is.
        """
        found: dict[tuple[int, int], Queue | None] = {}
        for queue in {_key(queue): queue for queue, _ in self._recorded}.values():
            if queue.owner is None and queue.handle > PER_THREAD_STREAM:
                found[_key(queue)] = None
            elif not queue.gone() and is_captured(queue):
                found[_key(queue)] = queue
        return found


@contextmanager
def _under_way() -> Generator[Sequence[Recorded]]:
    """Hold releases back and record uses while a capture is on. Not an `ExitStack`: an interrupt would leave it on."""
    with capturing(), launches.recording() as found:
        yield found


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


def _length(asked: str, size: Size | None, *rooms: int) -> int:
    room = min(rooms)
    number = room if size is None else parse_size(size)
    if not 0 < number <= room:
        raise InvalidValueError(
            f"{asked} of {number} bytes in a capture", rule=f"there are {max(room, 0)} of them"
        )
    return number


def _key(queue: Queue) -> tuple[int, int]:
    return queue.device.index, queue.handle


def _end(at: Device, stream: int) -> None:
    """End the capture of a stream, if it is still on, and drop what was captured."""
    driver: Any = at._driver
    with at.current():
        if driver.stream_capturing(stream):
            graph = driver.end_capture(stream)
            driver.graph_destroy(graph)
