"""Copies of a move: queued on a stream of their own, counted, and waited for before anything else happens to them."""

from __future__ import annotations

from collections import deque
from typing import Any, Self

from remap import lifetime
from remap.buffers.base import Buffer
from remap.lifetime import Release, Step, undo
from remap.locations import Device, device, in_context
from remap.ranges import Chunk
from remap.residency.arenas import Extent
from remap.residency.results import Progress
from remap.types import Access, Location


class Owner:
    """What queues, when it is collected, what it has not given back: where an interrupt came before that."""

    # Not by a name of the module, which may be gone when the process ends.
    _process = lifetime.Resource._process
    _epoch = -1

    def __init__(self) -> None:
        self._epoch = lifetime.epoch()

    def __del__(self) -> None:
        process = self._process
        if self._epoch == process.epoch and not process.ending:
            steps = self._left()
            if steps:
                lifetime.queued.append(Release(0, steps))

    def _left(self) -> list[Step]:
        raise NotImplementedError


class Flow(Owner):
    """Copies on a stream of each device, for the time of a `with` block, done in the order in which they were queued.

    `finish()` waits for them. Leaving the block destroys the streams; if the block fails, it waits for what was queued
    first, so that memory can be taken away after it. Rejected: two streams of a device in turn. 200 chunks of 16 MiB
    came at 51.7 GB/s that way, and at 54.5 by raw calls over one stream (H200, after a rest).
    """

    def __init__(self, driver: Any, total: int, progress: Progress | None) -> None:
        self._driver = driver
        self._progress = progress
        self._lanes: dict[int, tuple[Device, int]] = {}
        self._marks: deque[tuple[Device, int, int]] = deque()
        self._later: list[Step] = []
        self.total = total
        self.done = 0
        super().__init__()

    def lane(self, at: Device) -> int:
        """Return the stream that copies of a device go over."""
        found = self._lanes.get(at.index)
        if found is None:
            with at.current():
                found = self._lanes[at.index] = (at, self._driver.create_stream(True, 0))
        return found[1]

    @property
    def lanes(self) -> list[tuple[Device, int]]:
        """Every stream so far, with its device."""
        return list(self._lanes.values())

    def out(self, at: Device, address: int, size: int, extent: Extent, offset: int) -> None:
        """Queue a copy from memory that a device reads to a part of an extent."""
        lane, copy = self.lane(at), self._driver.copy_to_host
        with at.current():
            for host, length in extent.pieces(offset, size):
                copy(host, address, length, lane)
                address += length
                self._count_later(at, lane, length)

    def into(self, at: Device, address: int, size: int, extent: Extent, offset: int) -> int:
        """Queue a copy from a part of an extent to memory that a device writes; return the stream."""
        lane, copy = self.lane(at), self._driver.copy_to_device
        with at.current():
            for host, length in extent.pieces(offset, size):
                copy(address, host, length, lane)
                address += length
                self._count_later(at, lane, length)
        return lane

    def across(self, at: Device, target: int, source: int, size: int) -> None:
        """Queue a copy between two addresses that a device reaches."""
        lane = self.lane(at)
        with at.current():
            self._driver.copy(target, source, size, lane)
            self._count_later(at, lane, size)

    def fill(self, at: Device, address: int, size: int, value: int) -> int:
        """Queue a fill of memory that a device writes; return the stream."""
        lane = self.lane(at)
        with at.current():
            self._driver.fill(address, value, 1, size, lane)
        return lane

    def reach(self, buffer: Buffer, chunk: Chunk, *, writes: bool) -> tuple[Device, int]:
        """Return the device that copies a chunk, and at which address: in a window of it where none has the right."""
        at = actor(buffer, chunk.location, writes=writes)
        if at is not None:
            return at, chunk.address
        at = near(chunk.location)
        window = window_on(self._driver, chunk.address, chunk.size, at)
        self._later.append((window.close, ()))  # written out: an interrupt comes where a function begins
        return at, window.address

    def wait(self) -> None:
        """Wait for all that is queued now."""
        for at, lane in self.lanes:
            in_context(at, self._driver.synchronize_stream, lane)

    def finish(self) -> None:
        """Wait for all copies, and for what was to follow them."""
        while self._marks:
            at, event, _ = self._marks[0]
            with at.current():
                self._driver.synchronize_event(event)
            self._report()
        self.wait()
        while self._later:
            call, arguments = self._later[-1]
            call(*arguments)
            del self._later[-1]

    def report(self, size: int) -> None:
        """Count bytes that are done."""
        self.done += size
        if self._progress is not None and size:
            self._progress(self.done, self.total)

    def hand_over(self) -> Flow:
        """Return another flow with the streams and what is queued on them; whoever takes it waits and destroys them.

        Until this one is told to `forget` them, it destroys them, too: whichever comes first.
        """
        if self._later:
            self.finish()
        taken = Flow(self._driver, self.total, None)
        taken._lanes, taken._epoch = self._lanes, -1  # its finaliser would take them from under this one
        return taken

    def forget(self) -> None:
        """Let go of the streams, which others destroy."""
        self._lanes = {}

    def close(self) -> None:
        """Destroy the streams, whose work is done."""
        while self._marks:
            at, event, _ = self._marks.popleft()
            with at.current():
                self._driver.destroy_event(event)
        for at, lane in self.lanes:
            with at.current():
                if at.index in self._lanes:  # noted before the call: an interrupt comes as it returns
                    del self._lanes[at.index]
                    self._driver.destroy_stream(lane)

    def _left(self) -> list[Step]:
        lanes, destroy = self.lanes, self._driver.destroy_event
        steps: list[Step] = [(in_context, (at, destroy, event)) for at, event, _ in self._marks]
        return steps + [(in_context, (at, self._driver.destroy_stream, lane)) for at, lane in lanes]

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Destroy the streams; after a failure, wait for their work first."""
        if error is None:
            self.close()
            return
        for at, lane in self.lanes:
            undo(error, in_context, at, self._driver.synchronize_stream, lane)
        while self._later:
            call, arguments = self._later[-1]
            undo(error, call, *arguments)
            del self._later[-1]
        undo(error, self.close)

    def _count_later(self, at: Device, lane: int, size: int) -> None:
        """Count the copy just queued when it is done; at once where nobody asks, as no event is then needed."""
        if self._progress is None:
            self.done += size
            return
        event = self._driver.create_event()
        self._marks.append((at, event, size))
        self._driver.record_event(event, lane)
        while self._marks and self._driver.event_done(self._marks[0][1]):
            self._report()

    def _report(self) -> None:
        at, event, size = self._marks.popleft()
        with at.current():
            self._driver.destroy_event(event)
        self.report(size)


class Window(Owner):
    """A second, temporary mapping of memory that one device may read and write."""

    def __init__(self, driver: Any, size: int) -> None:
        super().__init__()
        self._driver = driver
        self._release = Release(0, [])
        self.address: int = driver.reserve(size)
        where = (self.address, size)
        self._release.steps += [(driver.unmap, where), (driver.free_range, where)]

    def show(self, handle: int, offset: int, size: int, at: Device) -> int:
        """Map a whole allocation, give the device its rights, and return the address."""
        address = self.address + offset
        self._driver.map(address, size, handle)
        self._driver.set_access(address, size, ((at.location, Access.READ_WRITE),))
        return address

    @lifetime.repeatable
    def close(self) -> None:
        """Unmap everything and free the addresses; the memory is of others. Closing again does what is left to do."""
        if not self._release.begun:
            self._release.run()

    def _left(self) -> list[Step]:
        return [] if self._release.begun else self._release.steps


def window_on(driver: Any, address: int, size: int, at: Device) -> Window:
    """Return a window on the allocation that is mapped at an address, for a device that has no right there."""
    window = Window(driver, size)
    try:
        handle = driver.retain(address)
        try:
            window.show(handle, 0, size, at)
        finally:
            driver.release(handle)
    except BaseException as error:
        undo(error, window.close)
        raise
    return window


def actor(buffer: Buffer, place: Location, *, writes: bool) -> Device | None:
    """Return the device that copies a chunk at `place`: the one that holds it, or another that has the right."""
    fitting = [
        who
        for who, right in buffer._rights.items()
        if who.is_device and (right.writable if writes else right.readable)
    ]
    if not fitting:
        return None
    return device(place.index if place in fitting else fitting[0].index)


def near(place: Location) -> Device:
    """Return a device that reaches memory at a place: the one that holds it, the fastest for host memory."""
    return device(place.index) if place.is_device else device()
