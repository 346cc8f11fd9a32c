"""An ordered resume under way: buffers can be used at once, and every use waits for the chunks that it touches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from typing import Any, ClassVar, NamedTuple

from remap.buffers.base import Buffer
from remap.ends import End
from remap.errors import InUseError
from remap.lifetime import Description, Release, Resource, Step, epoch, repeatable, undo
from remap.locations import Device, in_context
from remap.ranges import Chunk
from remap.residency.feed import Feed, Worker
from remap.residency.flow import Flow
from remap.residency.portions import Portion
from remap.residency.results import Moved
from remap.residency.stores import Asleep, drop_all
from remap.sizes import counted, format_size
from remap.streams import Event, Queue


class ChunkEvent(Event):
    """The event of one chunk: it has passed when the chunk's bytes are there. It lives as long as its `Waking`.

    Whoever waits for it, or reads its `handle`, waits on the host first until the chunk is mapped and its copy queued,
    which is a matter of milliseconds; `PausedError` if that has failed.
    """

    __slots__ = ("_event", "_portion", "_waking", "buffer", "chunk")

    kind: ClassVar[str] = "chunk event"

    def __init__(self, waking: Waking, mark: Mark) -> None:
        # Not `_opened()`: it owns nothing, its event is destroyed by the `Waking`.
        Resource.__init__(self, waking._driver)
        self._waking = waking
        self._end = waking._end
        self._portion = mark.portion
        self.buffer = mark.portion.buffer
        self.chunk = mark.chunk
        self.device = mark.device
        self._event = mark.event

    @property
    def handle(self) -> int:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        """The event's handle. A stream that waited for it before it is recorded would not wait at all."""
        if not self._portion.done:
            self._await_queued()
        return self._event

    @property
    def closed(self) -> bool:
        """Whether its `Waking` was closed; the bytes are there then."""
        return self._waking.closed

    @property
    def done(self) -> bool:
        """Whether the chunk's bytes are there; does not wait."""
        self._waking._check()
        if not self._portion.done:
            if self._waking.held_up is None:
                return False
            self._await_queued()
        with self._end.kept() as there, self.device.current():
            return not there or bool(self._driver.event_done(self._event))

    def synchronize(self) -> None:
        """Wait until the chunk's bytes are there."""
        self._check()
        with self._end.kept() as there:
            if there:  # else closing has waited
                with self.device.current():
                    self._driver.synchronize_event(self._event)

    def describe(self) -> Description:
        """Return what this event is."""
        return Description(self.kind, self.serial, 0, None, f"on {self.device}, handle {self._event:#x}")

    def _await_queued(self) -> None:
        self._waking._check()
        self._waking._feed.wait([self._portion], "a chunk")

    def _check(self) -> None:
        self._await_queued()


class Mark(NamedTuple):
    """A chunk on its way: the portion that brings it, the device and stream that do, and the event behind it."""

    portion: Portion
    chunk: Chunk
    device: Device
    lane: int
    event: int


class Arrival:
    """The chunks of one buffer that are on their way (`Range._arriving`, and `Range._coming` until all are mapped)."""

    __slots__ = ("buffer", "marks", "portions", "waking")

    def __init__(self, waking: Waking, buffer: Buffer) -> None:
        self.waking = waking
        self.buffer = buffer
        self.portions: list[Portion] = []
        self.marks: list[Mark] = []

    def join(self, queue: Queue, part: tuple[int, int] | None = None) -> None:
        """Let later work of a stream wait for the chunks of a part, or for all; its context is current.

        The host waits until they are mapped. Raises `InUseError` under a capture: what brings them is not in the graph.
        """
        if part is not None and sum(part) > self.buffer._size:
            part = None  # through the second view of a ring, where the chunks have other offsets
        self.waking._feed.wait([portion for portion in self.portions if portion.touches(part)], "use")
        last: dict[int, Mark] = {}  # a stream brings its chunks in order, so the last of each is enough
        for mark in self.marks:
            if part is not None:
                start = mark.chunk.address - self.buffer._address
                if start >= part[0] + part[1] or part[0] >= start + mark.chunk.size:
                    continue
            last[mark.lane] = mark
        driver = self.waking._driver
        if last and driver.stream_capturing(queue.handle):
            raise InUseError(
                f"use of {self.buffer.describe()} in a capture",
                rule="its contents are still arriving, by copies that are no part of the graph",
                next_step="Close what remap.resume returned first, or begin the capture later",
            )
        # Against whoever closes it, and destroys the events. While that one still waits, it counts as open.
        with driver.lock:
            if not self.waking.closed:
                for mark in last.values():
                    driver.wait_event(queue.handle, mark.event)

    def wait(self) -> None:
        """Wait on the host until all of the buffer is mapped; raises `PausedError` if that has failed."""
        self.waking._feed.wait(self.portions, "use")

    @repeatable
    def leave(self) -> None:
        """Bring nothing more into the buffer, which is being closed."""
        self.waking._feed.leave(self.buffer)


class Waking(Resource):
    """Buffers whose memory is there and whose contents are being copied. Made by `remap.resume(events=True)`.

    Memory was created for all of them. What comes first in the order is mapped, and its copies are queued; a thread
    maps and queues the rest. Fills, copies, launches and views through remap wait for the chunks that they touch, on
    the host until those are mapped and on their stream until their bytes are there. Whoever uses the addresses
    otherwise lets a stream wait for `events`. The backups are kept until this is closed, which waits until everything
    has arrived; leaving the `with` block does it.

    Where the thread is refused something, `held_up` says what. What has come back by then stays; a use of the rest
    raises `PausedError`, its backup is intact, and `remap.resume` of its buffers, or closing this, tries it again.
    """

    kind: ClassVar[str] = "resume under way"

    def __init__(
        self,
        driver: Any,
        flow: Flow,
        end: End,
        portions: Sequence[Portion],
        backups: Iterable[Asleep],
        keep_host: bool,
        poison: bool,
        measure: Callable[[], Moved],
    ) -> None:
        super().__init__(driver)
        # Whether it gives back what it stands on: not while that can still be taken back by the call that makes it.
        self._owns = False
        self._end = end
        self._closing = RLock()
        self._flow = flow
        self._feed = Feed(driver, flow, [portion for portion in portions if not portion.done], poison)
        self._marks = [
            Mark(portion, chunk, portion.copier(chunk), flow.lane(portion.copier(chunk)), event)
            for portion in portions
            if portion.events
            for chunk, event in zip(portion.chunks, portion.events, strict=True)
        ]
        self._backups = tuple(backups)
        self._keep_host = keep_host
        self._measure = measure
        self._result: Moved | None = None
        self._coming = True
        self.events = tuple(ChunkEvent(self, mark) for mark in self._marks)
        """An event for each chunk, in the order in which they arrive."""
        arrivals: dict[Buffer, Arrival] = {}
        for portion in portions:
            if portion.events or not portion.done:
                arrivals.setdefault(portion.buffer, Arrival(self, portion.buffer)).portions.append(portion)
        for mark in self._marks:
            arrivals[mark.portion.buffer].marks.append(mark)
        for buffer, arrival in arrivals.items():
            for at, lane in dict.fromkeys((mark.device, mark.lane) for mark in arrival.marks):
                buffer._uses.add(Queue(lane, at, self))
            buffer._arriving = arrival
            buffer._coming = None if all(portion.done for portion in arrival.portions) else arrival
        self._buffers = tuple(arrivals)
        try:
            self._opened()
        except BaseException as error:
            undo(error, self.disown)
            raise

    def disown(self) -> None:
        """End in silence: whoever makes it takes back all that it stands on."""
        super().close()

    @property
    def closed(self) -> bool:
        """Whether it was closed, and everything has arrived: until then, nobody may take it for done."""
        return not self._open and not self._coming

    @property
    def held_up(self) -> BaseException | None:
        """What was refused while the rest was mapped, None where nothing was."""
        return self._feed.error

    def wait(self) -> Moved:
        """Wait until everything has arrived, close, and return what was done."""
        self.close()
        return self.result

    @property
    def result(self) -> Moved:
        """What was done, once this is closed; the figures of this moment before that."""
        if self._result is None:
            self._check_process()  # its figures are those of the parent's pool
        return self._result or self._measure()

    def close(self) -> None:
        """Wait until everything has arrived, then give the backups back. Closing again does nothing.

        What was held up is tried again; if it is refused again, that is raised, and this stays open. Where another
        thread is closing it, this waits for that, too.
        """
        if (
            self._epoch != epoch()
        ):  # a forked child has neither its memory nor the threads that hold its locks
            super().close()
            return
        with self._closing:
            super().close()
            if self._result is None:
                self._result = self._measure()

    def settle(self) -> None:
        """Close as `close` does, unless another thread is doing so."""
        if self._closing.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._closing.release()

    def go_on(self) -> None:
        """Try again what was held up; raises what the driver says."""
        if self.held_up is not None:
            self._feed.finish()

    def __del__(self) -> None:
        """Queue what it owns, and warn; its buffers go with it, and nothing more is brought into them."""
        if getattr(self, "_owns", False):  # else whoever made it has taken everything back
            self._feed.abandon()
            super().__del__()

    def _start(self, worker: Worker) -> None:
        self._feed.start(worker)

    def _detach(self) -> Release:
        if not self._owns:
            return Release(0, [])
        driver = self._driver
        handles: list[Step] = [
            (in_context, (mark.device, driver.destroy_event, mark.event)) for mark in self._marks
        ]
        handles += [(in_context, (at, driver.destroy_stream, lane)) for at, lane in self._flow.lanes]
        steps: list[Step] = [(arrived, (self._buffers, self))]
        steps += [(self._feed.forget, ()), (self._end.destroy, (Release(1, handles).run,))]
        steps += self._feed.end()
        if self._backups:
            steps.append((drop_all, (self._backups, self._keep_host)))
        return Release(0, steps, self._arrive)

    def _arrive(self) -> None:
        self._feed.finish()
        self._flow.wait()

    def describe(self) -> Description:
        """Return what is on its way."""
        size = sum(mark.chunk.size for mark in self._marks)
        detail = f"{counted(len(self._marks), 'chunk')}, {format_size(size)}"
        if self.held_up is not None:
            detail += f", held up: {self.held_up}"
        return Description(self.kind, self.serial, size, None, detail)


@repeatable
def arrived(buffers: Iterable[Buffer], waking: Waking) -> None:
    """Note that everything has arrived; doing so again changes nothing."""
    with waking._driver.lock:
        waking._coming = False
        for buffer in buffers:
            arrival = buffer._arriving
            if isinstance(arrival, Arrival) and arrival.waking is waking:
                buffer._arriving = buffer._coming = None
