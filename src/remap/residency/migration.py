"""`migrate`: the bytes are copied to their new place first, then swapped in under the address."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import cycle
from typing import Any

from remap import drivers
from remap.buffers.base import Buffer, runs
from remap.buffers.changes import shares_of
from remap.buffers.placement import check_reach
from remap.buffers.shares import Share
from remap.errors import AccessError, OutOfMemoryError, RemapError
from remap.handles import create_handle
from remap.lifetime import Release, Rollback, Step, drain, queued
from remap.locations import Device, LocationLike, device, location
from remap.ranges import Chunk, grant
from remap.residency.families import Carriers, carried, carriers
from remap.residency.flow import Flow, Window, actor
from remap.residency.present import current_pool
from remap.residency.results import Moved, Progress
from remap.residency.targets import (
    Targets,
    announce,
    free_memory,
    free_memory_now,
    growth,
    held,
    named,
    wait_for_work,
)
from remap.sizes import counted
from remap.types import Location
from remap.uses import After, Known


def migrate(
    buffers: Targets,
    to: LocationLike,
    *,
    after: After = Known.STREAMS,
    progress: Progress | None = None,
    detach: bool = False,
) -> Moved:
    """Move the memory behind buffers to another location, a device or the host; their addresses and rights stay.

    The locations that had access have it afterwards, and nobody else: a buffer that was moved to the host can be read
    by the CPU after `buffer.set_access({remap.Host(): "rw"})`, which has to be taken back before it moves to a device.
    A paused buffer is not copied; it will wake at the new place.

    Both places hold the memory until all of it was copied. Waits as `pause` does. A failure leaves every buffer where
    it was; one while the old memory is given back leaves them moved, and says so. Raises `OutOfMemoryError` where the
    new place is short of memory, `AccessError` where a location that has access cannot reach it, `InUseError` as
    `pause` does, `NotSupportedError`. Source: cuMemCreate, cuMemMap.
    """
    start = time.perf_counter()
    drain()
    driver, place = drivers.current(), location(to)
    plans = named(buffers, "migrated")
    for buffer in plans:
        buffer._check()
        _check_rights(driver, buffer, place)
    moves: list[_Move] = []
    with held(plans, "migrated", detach=detach):
        wait_for_work(plans, after, "migrated")
        before = {**free_memory(plans), **_free_at(place)}
        by = carriers(dict.fromkeys(plans))
        common: dict[Share, int] = {}
        moves = [_Move(driver, buffer, place, by, common) for buffer in plans]
        moves = [move for move in moves if move.chunks]
        for move in moves:
            if move.buffer._paused:
                _check_wakes(driver, move.buffer, place)
        total = sum(move.size for move in moves)
        leftovers: Release | None = None
        try:
            with Rollback() as rollback:
                with Flow(driver, total, progress) as flow:
                    for move in moves:
                        move.copy(flow, rollback)
                    flow.finish()
                for move in moves:
                    move.swap(rollback)
                leftovers = Release(1, [step for move in moves for step in move.leftovers])
            failure = _finish(moves, leftovers)
        except BaseException:
            if leftovers is not None and not leftovers.begun:  # an interrupt, when all have moved
                queued.append(leftovers)
            raise
    announce((move.buffer for move in moves), failure)
    after_it = free_memory_now(before)
    figures = current_pool(driver).statistics()
    return Moved(
        buffers=len(moves),
        bytes=total,
        freed=total,
        confirmed=growth(before, after_it),
        free=after_it,
        seconds=time.perf_counter() - start,
        host=figures.held + figures.leaving,
        notes=figures.notes,
    )


def _check_rights(driver: Any, buffer: Buffer, place: Location) -> None:
    """Raise `AccessError` unless everyone with a right to a buffer can have it at another place."""
    for user in tuple(buffer._rights):
        try:
            check_reach(driver, (user,), (place,))
        except AccessError as error:
            named = user.index if user.is_device else user
            step = f'Take the right away first: buffer.set_access({{{named!r}: "none"}})'
            raise error.explain(
                f"{buffer.describe()} to be migrated: {error.asked}", next_step=step
            ) from None


def _check_wakes(driver: Any, buffer: Buffer, place: Location) -> None:
    """Raise what a place has against memory of this kind: a buffer that sleeps would only find out when it wakes."""
    properties = buffer.properties.at(place)
    if not (properties.handle_types or properties.rdma):
        return  # plain memory can lie anywhere
    with suppress(OutOfMemoryError):  # there may be some when it wakes
        driver.release(driver.create(driver.granularity(properties).minimum, properties))


class _Move:
    """One buffer on its way to another place. `common` has the new memory of what forks share, by who carries it."""

    def __init__(
        self, driver: Any, buffer: Buffer, place: Location, by: Carriers, common: dict[Share, int]
    ) -> None:
        self._driver = driver
        self.buffer = buffer
        self._place = place
        self._common = common
        self.chunks = [chunk for chunk in buffer._chunks if chunk.location != place]
        mine = () if buffer._paused else set(carried(buffer, by))
        self._carried = [chunk for chunk in self.chunks if chunk in mine]
        self.size = sum(chunk.size for chunk in self._carried)
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._window: Window | None = None

    def copy(self, flow: Flow, rollback: Rollback) -> None:
        """Create memory at the new place and queue the copies to it."""
        driver, buffer, shares = self._driver, self.buffer, shares_of(self.buffer)
        for chunk in () if buffer._paused else self.chunks:
            handle = driver.retain(chunk.address)
            rollback.steps += [
                (driver.release, (handle,))
            ]  # not with `undo`, where an interrupt could come first
            self._old[chunk.address] = handle
        if not self.size:
            return
        properties = buffer.properties.at(self._place)
        window = self._window = Window(driver, 2 * self.size)
        rollback.undo(window.close)
        offset = 0
        for chunk in self._carried:
            with driver.lock:
                handle = create_handle(driver, chunk.size, properties)
                rollback.steps += [(driver.release, (handle,))]
                self._new[chunk.address] = handle
                if chunk.address in shares:
                    self._common[shares[chunk.address]] = handle
                at = self._copier(chunk)
                target = window.show(handle, offset, chunk.size, at)
                source = chunk.address
                if actor(buffer, chunk.location, writes=False) != at:
                    source = window.show(self._old[chunk.address], self.size + offset, chunk.size, at)
            flow.across(at, target, source, chunk.size)
            offset += chunk.size

    def swap(self, rollback: Rollback) -> None:
        """Put the new memory behind the addresses; `rollback` puts the old memory back."""
        driver, buffer, shares = self._driver, self.buffer, shares_of(self.buffer)
        buffer._flush()  # it would stay behind
        with driver.lock:
            chunks = [] if buffer._paused else self.chunks
            mapped, granted = buffer._mappings(chunks), buffer._granted_runs(chunks)
            for run in granted:
                rollback.undo(grant, driver, *run)
            for chunk, handle in zip(mapped, cycle([self._old[at] for at, *_ in chunks]), strict=False):
                rollback.undo(driver.map, chunk.address, chunk.size, handle)
            for address, size in runs(mapped):
                rollback.undo(driver.unmap, address, size)
            for address, size in runs(mapped):
                driver.unmap(address, size)
            new = [self._common[shares[at]] if at in shares else self._new[at] for at, *_ in chunks]
            for chunk, handle in zip(mapped, cycle(new), strict=False):
                driver.map(chunk.address, chunk.size, handle)
            for run in granted:
                grant(driver, *run)
            before = list(buffer._chunks), buffer.properties
            rollback.undo(self._note, *before)
            moved = [
                Chunk(chunk.address, chunk.size, self._place) if chunk.location != self._place else chunk
                for chunk in buffer._chunks
            ]
            self._note(moved, buffer.properties.at(self._place))

    @property
    def leftovers(self) -> list[Step]:
        """The calls that give back what is not needed any more; the old memory goes with them."""
        steps: list[Step] = [] if self._window is None else [(self._window.close, ())]
        handles = (*self._new.values(), *self._old.values())
        return steps + [(self._driver.release, (handle,)) for handle in handles]

    def _note(self, chunks: list[Chunk], properties: Any) -> None:
        self.buffer._chunks[:] = chunks
        self.buffer.properties = properties

    def _copier(self, chunk: Chunk) -> Device:
        """Return the device that copies: one of the two places, or another that may read the buffer."""
        for place in (chunk.location, self._place):
            if place.is_device:
                return device(place.index)
        return actor(self.buffer, chunk.location, writes=False) or device()


def _finish(moves: list[_Move], leftovers: Release) -> RemapError | None:
    for move in moves:
        move.buffer._shared = False
        with move.buffer._driver.lock:
            move.buffer._relocated()
    try:
        leftovers.run()
    except RemapError as error:
        error.add_note(f"{counted(len(moves), 'buffer')} moved all the same; some memory was not given back")
        return error
    return None


def _free_at(place: Location) -> dict[Location, Any]:
    return {place: device(place.index).memory()} if place.is_device else {}
