"""Shares: chunks that several buffers have mapped, read-only in all of them, until one takes a copy of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from remap.buffers.base import Buffer, runs
from remap.chunks.pool import ChunkPool, release_all
from remap.handles import reserve_range
from remap.lifetime import Rollback, undo
from remap.spans import Chunk
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


def leave(all_left: Iterable[Left], lock: AbstractContextManager[Any]) -> None:
    """Count one user less of each."""
    lost: list[Left] = []
    with lock:
        for left in all_left:
            left.share.users -= 1
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

    The caller keeps everybody else from using either, and has waited. After a failure both are as they were.
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
    with driver.lock:
        for chunk in alone:
            source._shares[chunk.address] = Share(chunk.location)
        for chunk, copy in zip(chunks, copies, strict=True):
            share = source._shares[chunk.address]
            share.users += 1
            child._shares[copy.address] = share
            if chunk.address in source._supply.lent:
                child._supply.lent[copy.address] = source._supply.lent[chunk.address]
        child._chunks = copies
        child._front = source._front
        child._extents = source._extents.copy()
        child._size = source._size


def separate(buffer: GrowingBuffer, chunks: Sequence[Chunk]) -> None:
    """Put copies in the place of shared chunks, with the rights of the buffer.

    The caller excludes other changes. Others may go on reading while the copies are made, and are excluded when they
    are put in place. After a failure everything is as it was; one that comes with the last step, releasing, leaves
    the copies in place.
    """
    driver, supply = buffer._driver, buffer._supply
    lent = {chunk.address: supply.lent.pop(chunk.address, None) for chunk in chunks}
    handles: list[int] = []
    try:
        for chunk in chunks:
            handles.append(supply.take(chunk))  # noqa: PERF401 (it may fail half-way)
        _copy(buffer, chunks, handles)
        with buffer._excluding("made private"):
            buffer._wait("made private", Known.STREAMS)
            old = _put(buffer, chunks, handles)
            with driver.lock:
                left = [
                    Left(buffer._shares.pop(chunk.address), chunk.size, lent[chunk.address], False)
                    for chunk in chunks
                ]
    except BaseException as error:
        supply.lose(chunks[: len(handles)])
        supply.lent.update({address: pool for address, pool in lent.items() if pool is not None})
        undo(error, release_all, driver, handles)
        raise
    leave(left, driver.lock)
    release_all(driver, [*old, *handles])


def _copy(buffer: GrowingBuffer, chunks: Sequence[Chunk], handles: Sequence[int]) -> None:
    """Copy chunks into new memory, which is mapped at another address for as long as that takes."""
    driver = buffer._driver
    size = sum(chunk.size for chunk in chunks)
    copier = buffer._actor("make_private", Access.READ, None, None)
    start = at = reserve_range(driver, size)
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
                    with waited_for(driver, queue):
                        driver.copy(at, chunk.address, chunk.size, queue.handle)
                at += chunk.size
        driver.unmap(start, size)
    except BaseException as error:
        undo(error, driver.unmap, start, size)
        undo(error, driver.free_range, start, size)
        raise
    driver.free_range(start, size)


@contextmanager
def waited_for(driver: Any, queue: Queue) -> Generator[None]:
    """Queue work in a block; if that fails, wait for what was queued before, so that its memory can be given back."""
    try:
        yield
    except BaseException as error:
        undo(error, driver.synchronize_stream, queue.handle)
        raise


def _put(buffer: GrowingBuffer, chunks: Sequence[Chunk], handles: Sequence[int]) -> list[int]:
    """Map other memory where chunks are, and return the handles of what was there; all of it, or nothing."""
    driver, granted = buffer._driver, buffer._granted
    old: list[int] = []
    try:
        for chunk in chunks:
            old.append(driver.retain(chunk.address))  # noqa: PERF401 (it may fail half-way)
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
    return old


def _map_back(buffer: GrowingBuffer, chunk: Chunk, handle: int) -> None:
    driver, granted = buffer._driver, buffer._granted
    driver.unmap(chunk.address, chunk.size)
    driver.map(chunk.address, chunk.size, handle)
    if granted:
        driver.set_access(chunk.address, chunk.size, read_only(granted))


def footprint(buffers: Buffer | Iterable[Buffer]) -> dict[Location, int]:
    """Return the physical bytes behind a buffer, or several, by location; chunks that they share count once.

    Paused buffers have nothing behind them.
    """
    total: dict[Location, int] = {}
    seen: set[Share] = set()
    for buffer in dict.fromkeys((buffers,) if isinstance(buffers, Buffer) else buffers):
        buffer._check()
        shares: dict[int, Share] = getattr(buffer, "_shares", {})
        for chunk in buffer._backing():
            share = shares.get(chunk.address)
            if share is None or share not in seen:
                total[chunk.location] = total.get(chunk.location, 0) + chunk.size
            if share is not None:
                seen.add(share)
    return total
