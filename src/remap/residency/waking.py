"""An ordered resume under way: buffers can be used at once, and every use waits for the chunks that it touches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

from remap.buffers.base import Buffer
from remap.lifetime import Description, Release, Resource, Step
from remap.locations import Device, in_context
from remap.ranges import Chunk
from remap.residency.results import Moved
from remap.residency.stores import Asleep
from remap.sizes import format_size
from remap.streams import Event, Queue


class ChunkEvent(Event):
    """The event of one chunk: it has passed when the chunk's bytes are there. It lives as long as its `Waking`."""

    __slots__ = ("_waking", "buffer", "chunk")

    kind: ClassVar[str] = "chunk event"

    def __init__(self, waking: Waking, buffer: Buffer, chunk: Chunk, at: Device, handle: int) -> None:
        # Not `_opened()`: it owns nothing, its event is destroyed by the `Waking`.
        Resource.__init__(self, waking._driver)
        self._waking = waking
        self.buffer = buffer
        self.chunk = chunk
        self.device = at
        self.handle = handle

    @property
    def closed(self) -> bool:
        """Whether its `Waking` was closed; the bytes are there then."""
        return self._waking.closed

    def _check(self) -> None:
        self._waking._check()


class Mark(NamedTuple):
    """A chunk on its way: the stream that brings it, and the event behind it."""

    buffer: Buffer
    chunk: Chunk
    device: Device
    lane: int
    event: int


class Arrival:
    """The chunks of one buffer that are on their way (`Range._arriving`)."""

    __slots__ = ("marks", "waking")

    def __init__(self, waking: Waking, marks: list[Mark]) -> None:
        self.waking = waking
        self.marks = marks

    def join(self, queue: Queue, part: tuple[int, int] | None = None) -> None:
        """Let later work of a stream wait for the chunks of a part, or for all; its context is current."""
        last: dict[int, Mark] = {}  # a stream brings its chunks in order, so the last of each is enough
        for mark in self.marks:
            if part is not None:
                start = mark.chunk.address - mark.buffer._address
                if start >= part[0] + part[1] or part[0] >= start + mark.chunk.size:
                    continue
            last[mark.lane] = mark
        driver = self.waking._driver
        # Against whoever closes it, and destroys the events. While that one still waits, it counts as open.
        with driver.lock:
            if not self.waking.closed:
                for mark in last.values():
                    driver.wait_event(queue.handle, mark.event)


class Waking(Resource):
    """Buffers whose memory is there and whose contents are being copied. Made by `remap.resume(events=True)`.

    Fills, copies, launches and views through remap wait for the chunks that they touch, on their stream. Whoever uses
    the addresses otherwise lets a stream wait for `events`. The backups are kept until this is closed, which waits
    until everything has arrived; leaving the `with` block does it.
    """

    kind: ClassVar[str] = "resume under way"

    def __init__(
        self,
        driver: Any,
        lanes: list[tuple[Device, int]],
        marks: list[Mark],
        backups: Iterable[Asleep],
        keep_host: bool,
        measure: Callable[[], Moved],
    ) -> None:
        super().__init__(driver)
        self._lanes = lanes
        self._marks = marks
        self._backups = tuple(backups)
        self._keep_host = keep_host
        self._measure = measure
        self._result: Moved | None = None
        self._coming = True
        self.events = tuple(
            ChunkEvent(self, mark.buffer, mark.chunk, mark.device, mark.event) for mark in marks
        )
        """An event for each chunk, in the order in which they arrive."""
        by_buffer: dict[Buffer, list[Mark]] = {}
        for mark in marks:
            by_buffer.setdefault(mark.buffer, []).append(mark)
        for buffer, some in by_buffer.items():
            for at, lane in dict.fromkeys((mark.device, mark.lane) for mark in some):
                buffer._uses.add(Queue(lane, at, self))
            buffer._arriving = Arrival(self, some)
        self._buffers = tuple(by_buffer)
        self._opened()

    @property
    def closed(self) -> bool:
        """Whether it was closed, and everything has arrived: until then, nobody may take it for done."""
        return not self._open and not self._coming

    def wait(self) -> Moved:
        """Wait until everything has arrived, close, and return what was done."""
        self.close()
        return self.result

    @property
    def result(self) -> Moved:
        """What was done, once this is closed."""
        if self._result is None:
            self._result = self._measure()
        return self._result

    def close(self) -> None:
        """Wait until everything has arrived, then give the backups back. Closing again does nothing."""
        super().close()
        if self._result is None:
            self._result = self._measure()

    def _detach(self) -> Release:
        driver, lanes = self._driver, self._lanes
        steps: list[Step] = [(_arrived, (self._buffers, self))]
        steps += [(in_context, (mark.device, driver.destroy_event, mark.event)) for mark in self._marks]
        steps += [(in_context, (at, driver.destroy_stream, lane)) for at, lane in lanes]
        steps += [(backup.drop, (self._keep_host,)) for backup in self._backups]
        return Release(0, steps, lambda: _synchronize(driver, lanes))

    def describe(self) -> Description:
        """Return what is on its way."""
        size = sum(mark.chunk.size for mark in self._marks)
        detail = f"{len(self._marks)} chunks, {format_size(size)}"
        return Description(self.kind, self.serial, size, None, detail)


def _synchronize(driver: Any, lanes: list[tuple[Device, int]]) -> None:
    for at, lane in lanes:
        in_context(at, driver.synchronize_stream, lane)


def _arrived(buffers: Iterable[Buffer], waking: Waking) -> None:
    with waking._driver.lock:
        waking._coming = False
        for buffer in buffers:
            arrival = buffer._arriving
            if isinstance(arrival, Arrival) and arrival.waking is waking:
                buffer._arriving = None
