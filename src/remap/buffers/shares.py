"""Shares: chunks that several buffers have mapped, read-only in all of them, until one takes a copy of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from remap.buffers.base import Buffer, runs
from remap.chunks.pool import ChunkPool, release_all
from remap.handles import PhysicalAllocation, reserve_range
from remap.lifetime import Release, Rollback, queued, repeatable, undo
from remap.locations import in_context
from remap.spans import Chunk, Span
from remap.streams import Queue
from remap.types import Access, Grants, Location
from remap.uses import Known

if TYPE_CHECKING:
    from remap.buffers.growth import GrowingBuffer


class Share:
    """One physical allocation that `users` buffers have mapped, or will have when they wake.

    They sleep and move together. `place` is where it lies, None while it is away with all of them asleep. Both are
    changed under the driver's lock.
    """

    __slots__ = ("place", "users")

    def __init__(self, place: Location) -> None:
        self.users = 1
        self.place: Location | None = place

    def turn(self, place: Location | None) -> bool:
        """Note where it lies now; return False if another of its buffers has said so before."""
        before, self.place = self.place, place
        return before != place


class Left(NamedTuple):
    """A shared chunk that one buffer has unmapped: the pool that counts it; whether it was known to be the last one."""

    share: Share
    size: int
    pool: ChunkPool | None
    last: bool


class Doomed(NamedTuple):
    """Chunks that are to go, in order: all of them, those that nobody shares, and what is known of the others."""

    chunks: Sequence[Chunk]
    own: Sequence[Chunk]
    left: list[Left]

    @property
    def range(self) -> tuple[int, int]:
        """The (address, size) from the first to the last one."""
        start, last = self.chunks[0].address, self.chunks[-1]
        return start, last.address + last.size - start


@repeatable
def leave(all_left: list[Left], lock: AbstractContextManager[Any]) -> None:
    """Count one user less of each, and empty the list: doing so again goes on after an interrupt."""
    lost: list[Left] = []
    with lock:
        while all_left:
            left = all_left[-1]
            left.share.users -= 1
            del all_left[-1]
            if not left.share.users and not left.last:  # another one left at the same time
                lost.append(left)
    for left in lost:
        if left.pool is not None:
            left.pool.lose(left.size)


def read_only(grants: Grants) -> Grants:
    """Return the same locations with no more than the right to read."""
    return tuple((place, Access.READ if right.writable else right) for place, right in grants)


def alias(source: GrowingBuffer, child: GrowingBuffer) -> None:
    """Map everything behind `source` into `child` as well, which has nothing yet, read-only in both.

    The caller keeps everybody else from using either, and has waited. After a failure both are as they were. An
    interrupt that comes when all is mapped leaves `child` with all of it, to be given back.
    """
    driver, chunks = source._driver, source._chunks
    granted = source._granted
    offset = child._address - source._address
    alone = [chunk for chunk in chunks if chunk.address not in source._shares]
    with Rollback() as rollback:
        if any(right.writable for _, right in granted):
            for address, size in runs(alone):
                rollback.undo(driver.set_access, address, size, granted)
                driver.set_access(address, size, read_only(granted))
        if chunks:
            rollback.undo(driver.unmap, child._address, child._reserved)
        copies: list[Chunk] = []
        for chunk in chunks:
            handle = driver.retain(chunk.address)
            try:
                driver.map(chunk.address + offset, chunk.size, handle)
            finally:
                driver.release(handle)
            copies.append(Chunk(chunk.address + offset, chunk.size, chunk.location))
        if granted:
            for address, size in runs(copies):
                driver.set_access(address, size, read_only(granted))
        shares = {**source._shares, **{chunk.address: Share(chunk.location) for chunk in alone}}
        counted = [shares[chunk.address] for chunk in chunks]
        lent = source._supply.lent
        pools = {copy.address: lent.get(copy.address - offset) for copy in copies}
        known = {copy.address: share for copy, share in zip(copies, counted, strict=True)}
        extents = source._extents.copy()
        with driver.lock:
            child._supply.lent.update({at: pool for at, pool in pools.items() if pool is not None})
            # No call from here on: all of it is noted, or nothing.
            child._chunks, child._extents = copies, extents
            child._front, child._size = source._front, source._size
            source._shares, child._shares = shares, known
            try:
                while counted:
                    counted[-1].users += 1
                    del counted[-1]
            finally:
                while counted:  # an interrupt came
                    counted[-1].users += 1
                    del counted[-1]
                rollback.steps = []


def separate(buffer: GrowingBuffer, chunks: Sequence[Chunk]) -> None:
    """Put copies in the place of shared chunks, with the rights of the buffer.

    The caller excludes other changes. Others may go on reading while the copies are made, and are excluded when they
    are put in place. After a failure everything is as it was; one that comes with the last step, releasing, leaves
    the copies in place.
    """
    driver, supply = buffer._driver, buffer._supply
    lent = {chunk.address: supply.lent.pop(chunk.address, None) for chunk in chunks}
    handles: list[int] = []
    leftovers: Release | None = None
    try:
        for chunk in chunks:
            handles.append(supply.take(chunk))  # noqa: PERF401 (it may fail half-way)
        _copy(buffer, chunks, handles)
        with buffer._excluding("made private"):
            buffer._wait("made private", Known.STREAMS)
            shares = buffer._shares
            left = [Left(shares[chunk.address], chunk.size, lent[chunk.address], False) for chunk in chunks]
            gone = {chunk.address for chunk in chunks}
            kept = {address: share for address, share in shares.items() if address not in gone}
            then = Release(0, [(leave, (left, driver.lock))])
            then.steps += [(driver.release, (handle,)) for handle in handles]
            _put(buffer, chunks, handles, then)
            # No call here: an interrupt finds all of it undone, or knows what is left to do.
            leftovers, buffer._shares = then, kept
    except BaseException as error:
        if leftovers is not None:
            queued.append(leftovers)
            raise
        supply.lose(chunks[: len(handles)])
        supply.lent.update({address: pool for address, pool in lent.items() if pool is not None})
        undo(error, release_all, driver, handles)
        raise
    try:
        leftovers.run()
    except BaseException:
        if not leftovers.begun:
            queued.append(leftovers)
        raise


def _copy(buffer: GrowingBuffer, chunks: Sequence[Chunk], handles: Sequence[int]) -> None:
    """Copy chunks into new memory, which is mapped at another address for as long as that takes."""
    driver = buffer._driver
    size = sum(chunk.size for chunk in chunks)
    copier = buffer._actor("make_private", Access.READ, None, None)
    start = at = reserve_range(driver, size)
    queue: Queue | None = None
    try:
        for chunk, handle in zip(chunks, handles, strict=True):
            driver.map(at, chunk.size, handle)
            at += chunk.size
        driver.set_access(start, size, ((copier, Access.READ_WRITE),))
        with buffer._using("make_private", Access.READ, None) as queue:
            at = start
            for chunk in chunks:
                if queue is None:
                    ctypes.memmove(at, chunk.address, chunk.size)
                else:
                    driver.copy(at, chunk.address, chunk.size, queue.handle)
                at += chunk.size
        driver.unmap(start, size)
    except BaseException as error:
        if queue is not None:
            undo(error, in_context, queue.device, driver.synchronize_stream, queue.handle)
        undo(error, driver.unmap, start, size)
        undo(error, driver.free_range, start, size)
        raise
    driver.free_range(start, size)


def _put(buffer: GrowingBuffer, chunks: Sequence[Chunk], handles: Sequence[int], then: Release) -> None:
    """Map other memory where chunks are, and let `then` release what was there; all of it, or nothing."""
    driver, granted = buffer._driver, buffer._granted
    old: list[int] = []
    try:
        for chunk in chunks:
            old.append(driver.retain(chunk.address))
            then.steps.append((driver.release, (old[-1],)))
        with Rollback() as rollback:
            for chunk, handle, before in zip(chunks, handles, old, strict=True):
                rollback.undo(
                    _map_back, buffer, chunk, before
                )  # first: an interrupt comes as the call returns
                driver.unmap(chunk.address, chunk.size)
                driver.map(chunk.address, chunk.size, handle)
            if granted:
                for address, size in runs(chunks):
                    driver.set_access(address, size, granted)
    except BaseException as error:
        undo(error, release_all, driver, old)
        raise


def _map_back(buffer: GrowingBuffer, chunk: Chunk, handle: int) -> None:
    driver, granted = buffer._driver, buffer._granted
    driver.unmap(chunk.address, chunk.size)
    driver.map(chunk.address, chunk.size, handle)
    if granted:
        driver.set_access(chunk.address, chunk.size, read_only(granted))


def footprint(memory: Iterable[Span | PhysicalAllocation]) -> dict[Location, int]:
    """Return the physical bytes behind buffers and other memory by location; what they share counts once.

    Paused buffers have nothing behind them.
    """
    total: dict[Location, int] = {}
    seen: set[Any] = set()
    for one in dict.fromkeys(memory):
        one._check()
        found: list[tuple[Any, Location, int]]
        if isinstance(one, Buffer):
            shares: Mapping[int, Share] = getattr(one, "_shares", {})  # of a room above
            found = [(shares.get(chunk.address), chunk.location, chunk.size) for chunk in one._backing()]
        else:
            found = [(held.memory, held.location, held.size) for held in one._facts().held]
        for shared, place, size in found:
            if shared is None or shared not in seen:
                total[place] = total.get(place, 0) + size
            if shared is not None:
                seen.add(shared)
    return total
