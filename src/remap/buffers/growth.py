"""Growing: a buffer of which any part may be backed, and whose backed parts may grow and shrink.

What `ElasticBuffer` stands on: how chunks are mapped into holes and unmapped again, without anybody noticing but
those who asked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

from remap.buffers.ahead import Ahead, next_place
from remap.buffers.base import Buffer
from remap.buffers.changes import ChangingBuffer
from remap.buffers.extents import Extents
from remap.buffers.placement import Placement
from remap.buffers.shares import Doomed, Left, leave, read_only
from remap.chunks.pool import ChunkPool, pools_of
from remap.chunks.sizes import ChunkSizes
from remap.chunks.supply import Supply
from remap.errors import OutOfAddressSpaceError, OutOfMemoryError
from remap.handles import reserve_range
from remap.lifetime import Release, Rollback, Step, repeatable, undo
from remap.locations import explain_shortage
from remap.ranges import Granted
from remap.sizes import format_size, round_up
from remap.spans import Chunk
from remap.types import Grants, Held, Location


class Change(NamedTuple):
    """What a change of a buffer's size did, in bytes.

    `mapped` were mapped anew; `freed` went back to the driver; `pooled` were unmapped and stay in a chunk pool.
    Memory that others still share is unmapped and counts as neither.
    """

    mapped: int = 0
    freed: int = 0
    pooled: int = 0


class Hole(NamedTuple):
    """Where chunks are missing, as offsets: from `start` to `stop`, with nothing mapped up to `room`.

    `before` bytes are mapped right in front of it, as far as it matters.
    """

    start: int
    stop: int
    room: int
    before: int


class GrowingBuffer(ChangingBuffer):
    """A reservation of which parts are committed, and the chunks that back them, in address order.

    Every byte that is committed lies in a chunk. `_front` is the offset up to which chunks follow each other from the
    first byte on; it is what makes growing at the end cheap.
    """

    capacity: int = 0
    _front: int = 0
    _ahead: Ahead | None = None

    def __init__(
        self,
        driver: Any,
        placement: Placement,
        capacity: int,
        sizes: ChunkSizes,
        *,
        alignment: int = 0,
        pool: ChunkPool | None = None,
        pools: Mapping[Location, ChunkPool] | None = None,
        ahead: int = 0,
    ) -> None:
        super(Buffer, self).__init__(driver)
        self._chunks = []
        self._rights = placement.rights
        self._granted: Grants = placement.grants
        self._places = tuple(one.location for one in placement.properties)
        self._placement = placement
        self.properties = placement.properties[0]
        self._sizes = sizes
        self._extents = Extents()
        self._shares = {}
        self._supply = Supply(
            driver, self.properties, pools_of(driver, self._places, pool) if pools is None else pools
        )
        self._margin = ahead
        self._alignment = alignment
        if capacity:
            try:
                self._address = reserve_range(driver, capacity, alignment)
            except OutOfAddressSpaceError as error:
                raise error.explain(
                    f"a capacity of {format_size(capacity)}",
                    rule=error.rule,
                    next_step="Pass a smaller capacity=: it is how far the buffer can ever grow, and costs addresses "
                    "only. Or close reservations, or raise the limit (ulimit -v)",
                ) from None
            self.capacity = self._reserved = capacity
            self._open = True  # from here on an interrupt leaves it to its finaliser
            if ahead:
                self._ahead = Ahead(self._supply, self._address, ahead, sizes, self._places, self._granted)

    def _backing(self) -> Sequence[Chunk]:
        found = super()._backing()
        return found if self._ahead is None else sorted([*found, *self._ahead.ready])

    def _held(self) -> tuple[Held, ...]:
        shares, granted = self._shares, tuple(self._granted)
        lowered = tuple(read_only(granted))
        found: list[Held] = []
        for one in super()._held():
            share = shares.get(one.address or 0)
            found.append(one._replace(memory=share, rights=granted if share is None else lowered))
        return tuple(found)

    def _grant(self, grants: Grants) -> None:
        """Give chunks these rights from now on."""
        self._granted = grants
        if self._ahead is not None:
            self._ahead.grants = grants

    # -- growing --

    def _map(self, start: int, stop: int) -> list[Chunk]:
        """Back the bytes from `start` up to `stop`, and return the new chunks, which nobody can see yet.

        The caller holds `_change`, publishes them under the lock or gives them to `_unmap_new`. After a failure
        nothing is mapped.
        """
        if start >= stop:
            return []
        try:
            return self._map_new(start, stop)
        except OutOfMemoryError as error:  # it names a chunk, which nobody asked for
            missing = sum(hole.stop - hole.start for hole in self._holes(start, stop, ()))
            asked = (
                f"{format_size(missing)} more of memory, for bytes {start:,} to {stop:,} of {self.describe()}"
            )
            if len(self._places) == 1 and not self._supply.pools:  # pools have limits of their own
                raise explain_shortage(error, asked, missing, self._places[0]) from None
            raise error.explain(asked, rule=f"{error.asked}: {error.rule}") from None

    def _map_new(self, start: int, stop: int) -> list[Chunk]:
        new: list[Chunk] = []
        try:
            if self._ahead is not None and stop > self._front:
                self._ahead.take(start, stop, new)
            holes = self._holes(start, stop, new)
            try:
                new += self._fill_holes(holes, tight=False)
            except OutOfMemoryError:
                if self._sizes.kind != "geometric":
                    raise
                new += self._fill_holes(holes, tight=True)  # no more than what was asked for
        except BaseException as error:
            undo(error, self._unmap_new, new)
            raise
        return new

    def _holes(self, start: int, stop: int, new: Sequence[Chunk]) -> list[Hole]:
        """Return where chunks are missing between two offsets; `new` are chunks that nobody can see yet."""
        unit, base = self._sizes.unit, self._address
        start = start // unit * unit
        stop = min(round_up(stop, unit), self.capacity)
        at = max(start, self._front)
        holes: list[Hole] = []
        chunks = self._chunks
        index = max(self._index(at + 1) - 1, 0)  # the chunk that holds `at`, if any does
        before = self._mapped_before(at, index) if at > self._front or self._shares else at
        found = chunks[index : self._index(stop)]
        for chunk in sorted([*found, *new]) if new else found:
            offset = chunk.address - base
            if offset > at:
                holes.append(Hole(at, offset, offset, before))
                before = 0
            if offset + chunk.size > at:
                at = offset + chunk.size
                before = 0 if chunk.address in self._shares else before + chunk.size
        if at < stop:
            following = self._index(stop)
            room = chunks[following].address - base if following < len(chunks) else self.capacity
            waiting = () if self._ahead is None else self._ahead.ready
            room = min([room, *[chunk.address - base for chunk in waiting if chunk.address - base >= stop]])
            holes.append(Hole(at, stop, room, before))
        return holes

    def _mapped_before(self, at: int, index: int) -> int:
        """Return how many bytes of this buffer alone are mapped right in front, up to what makes chunks largest.

        What forks share does not count: a sequence that goes on behind a long prefix begins with small chunks again.
        """
        enough = 4 * self._sizes.largest
        end, total = self._address + at, 0
        for chunk in reversed(self._chunks[max(index - 64, 0) : index + 1]):
            if chunk.address + chunk.size != end - total or total >= enough or chunk.address in self._shares:
                break
            total += chunk.size
        return total

    def _fill_holes(self, holes: Sequence[Hole], *, tight: bool) -> list[Chunk]:
        """Create and map chunks in holes, with the buffer's rights; one access call for each hole. All, or nothing."""
        driver, supply, base = self._driver, self._supply, self._address
        new: list[Chunk] = []
        try:
            for hole in holes:
                sizes = self._sizes.cut(hole.start, hole.stop, hole.room, hole.before, tight=tight)
                at = first = base + hole.start
                place = self._place_before(hole.start, new)
                for size in sizes:
                    place = next_place(self._places, place)
                    chunk = Chunk(at, size, place)
                    # Noted before: an interrupt may come with the mapping done, and unmapping nothing is fine (T7).
                    new.append(chunk)
                    handle = supply.take(chunk)
                    try:
                        driver.map(at, size, handle)
                    except BaseException as error:
                        undo(error, driver.release, handle)
                        raise
                    at += size
                    driver.release(handle)
                if self._granted:
                    driver.set_access(first, at - first, self._granted)
        except BaseException as error:
            undo(error, self._unmap_new, new)
            raise
        return new

    def _place_before(self, offset: int, new: Sequence[Chunk]) -> Location | None:
        end = self._address + offset
        if new and new[-1].address + new[-1].size == end:
            return new[-1].location
        index = self._index(offset) - 1
        return self._chunks[index].location if index >= 0 else None

    def _unmap_new(self, new: Sequence[Chunk]) -> None:
        """Unmap chunks that nobody has seen, and that may have others between them."""
        if not new:
            return
        first = 0
        for index, (one, other) in enumerate(pairwise(new), 1):
            if one.address + one.size != other.address:
                self._driver.unmap(new[first].address, one.address + one.size - new[first].address)
                first = index
        self._driver.unmap(new[first].address, new[-1].address + new[-1].size - new[first].address)
        self._supply.lose(new)

    def _publish(self, new: Sequence[Chunk]) -> None:
        """Let everybody see new chunks; the caller holds the lock. Doing so again, after an interrupt, is fine."""
        if not new:
            return
        chunks, base = self._chunks, self._address
        at = self._index(new[0].address - base)
        if at == len(chunks):
            chunks.extend(new)
        elif chunks[at] == new[0]:  # and so all of them, which were put there in one call
            pass
        elif at == self._index(new[-1].address - base):
            chunks[at:at] = new
        else:
            self._chunks = chunks = sorted([*chunks, *new])  # two sorted runs: one pass
        while at < len(chunks) and chunks[at].address - base == self._front:
            self._front += chunks[at].size
            at += 1

    def _prepare_more(self) -> None:
        """Let the thread go on mapping behind the front."""
        if self._ahead is None:
            return
        following = self._index(self._front)
        chunks = self._chunks
        room = chunks[following].address - self._address if following < len(chunks) else self.capacity
        last = chunks[following - 1].location if following else None
        before = self._mapped_before(self._front, following - 1) if self._shares else self._front
        self._ahead.go(self._front, room, before, last)

    def _index(self, offset: int) -> int:
        """Return the index of the first chunk that begins at or behind an offset."""
        return bisect_left(self._chunks, (self._address + offset,))

    # -- shrinking --

    def _doomed(self, first: int, last: int) -> Doomed:
        """Return what is known of the chunks of two indices before they go; the caller holds `_excluding`."""
        chunks = self._chunks[first:last]
        if not self._shares:
            return Doomed(chunks, chunks, [])
        with self._driver.lock:  # nobody else leaves a chunk between the two looks at it
            return Doomed(chunks, [chunk for chunk in chunks if self._sole(chunk)], self._leaving(chunks))

    def _unmap(self, doomed: Doomed) -> Change:
        """Unmap chunks that nothing uses any more, and what was mapped ahead; after a failure they are as they were."""
        waiting = sum(chunk.size for chunk in self._flush())
        if not doomed.chunks:
            return Change(0, waiting, 0)
        pooled = self._supply.unmap(*doomed.range, doomed.own)
        return Change(0, sum([chunk.size for chunk in doomed.own]) + waiting - pooled, pooled)

    def _sole(self, chunk: Chunk) -> bool:
        """Tell whether a chunk is mapped here and nowhere else."""
        share = self._shares.get(chunk.address)
        return share is None or share.users == 1

    def _forget(self, doomed: Doomed) -> None:
        """Take chunks that were unmapped off the list; the caller holds the lock. Doing so again is fine."""
        if not doomed.chunks:
            return
        address, size = doomed.range
        start = address - self._address
        self._front = min(self._front, start)
        first, last = self._index(start), self._index(start + size)
        del self._chunks[first:last]
        if self._shares:
            leave(doomed.left, self._driver.lock)
            for chunk in doomed.chunks:
                self._shares.pop(chunk.address, None)
                self._supply.lent.pop(chunk.address, None)

    def _leaving(self, chunks: Sequence[Chunk]) -> list[Left]:
        shares, lent = self._shares, self._supply.lent
        return [
            Left(shares[at], size, lent.get(at), shares[at].users == 1)
            for at, size, _ in chunks
            if at in shares
        ]

    # -- for residency, and for closing --

    def _flush(self) -> Sequence[Chunk]:
        return () if self._ahead is None else self._ahead.flush()

    def _unmap_chunks(self) -> None:
        """Unmap everything in one call: all of it, or nothing."""
        if not self._reserved:
            return
        if self._ahead is None:
            self._driver.unmap(self._address, self._reserved)
        else:
            with self._ahead.leaving():
                self._driver.unmap(self._address, self._reserved)
        self._lose(self._chunks)

    def _lose(self, chunks: Sequence[Chunk]) -> None:
        """Count chunks that are not mapped any more, as their memory goes back to the driver."""
        if not self._shares:
            self._supply.lose(chunks)
            return
        self._supply.lose([chunk for chunk in chunks if self._turned(chunk, None)])
        for chunk in chunks:
            self._supply.lent.pop(chunk.address, None)

    def _turned(self, chunk: Chunk, place: Location | None) -> bool:
        """Note where a chunk lies, and tell whether to count that: for what forks share, the first of them does."""
        share = self._shares.get(chunk.address)
        return share is None or share.turn(place)

    def _relocated(self) -> None:
        if self._paused:
            return  # it counts nowhere
        if self._shares:
            self._supply.moved([chunk for chunk in self._chunks if self._turned(chunk, chunk.location)])
            self._supply.label(self._chunks)
        else:
            self._supply.moved(self._chunks)

    def _map_chunks(
        self, chunks: Sequence[Chunk], handles: Sequence[int], rollback: Rollback, *, full: bool = False
    ) -> None:
        super()._map_chunks(chunks, handles, rollback, full=full)
        rollback.undo(self._lose, chunks)
        if self._shares:
            self._supply.gained([chunk for chunk in chunks if self._turned(chunk, chunk.location)])
            self._supply.label(chunks)
        else:
            self._supply.gained(chunks)

    def _granted_runs(self, chunks: Sequence[Chunk]) -> list[Granted]:
        if not self._shares:
            return super()._granted_runs(chunks)
        own = super()._granted_runs([chunk for chunk in chunks if chunk.address not in self._shares])
        shared = super()._granted_runs([chunk for chunk in chunks if chunk.address in self._shares])
        lowered = dict(read_only(tuple(self._rights.items())))
        return [*own, *((address, size, lowered) for address, size, _ in shared)]

    def _detach(self) -> Release:
        if not self._reserved:
            return Release(0, [])
        backed = [] if self._paused else self._chunks
        own = [chunk for chunk in backed if self._sole(chunk)] if self._shares else backed
        steps: list[Step] = [
            (_unmap_all, (self._supply, self._address, self._reserved, own, self._ahead, [])),
            # Those of a buffer that sleeps, too: the forks that are left need not wait for it when they wake.
            (leave, (self._leaving(self._chunks) if self._shares else [], self._driver.lock)),
            (self._driver.free_range, (self._address, self._reserved)),
        ]
        return Release(0, steps, self._wait_on_close())


@repeatable
def _unmap_all(
    supply: Supply, address: int, size: int, chunks: list[Chunk], ahead: Ahead | None, begun: list[bool]
) -> None:
    """Unmap everything. Doing so again, after an interrupt, unmaps what is left, and pools keep none of it."""
    again, begun[:] = bool(begun), [True]
    with nullcontext() if ahead is None else ahead.leaving():
        if again:
            supply.driver.unmap(address, size)
            supply.lose(chunks)
        else:
            supply.unmap(address, size, chunks)
    if ahead is not None:
        ahead.end()
