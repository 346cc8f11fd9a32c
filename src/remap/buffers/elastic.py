"""`ElasticBuffer`: a range of addresses that is backed as far as it is needed, and grows and shrinks in place."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, TypeAlias

from remap import drivers
from remap.buffers.base import POISON, all_mapped
from remap.buffers.forking import ForkingBuffer
from remap.buffers.growth import Change
from remap.buffers.placement import one_place, place
from remap.buffers.shares import Doomed
from remap.chunks.pool import ChunkPool
from remap.chunks.sizes import ChunkLike, parse_chunk
from remap.errors import AccessError, InvalidValueError
from remap.handles import parse_alignment
from remap.hints import hinted
from remap.launches import launches
from remap.lifetime import Description, drain, epoch, queued, undo
from remap.locations import LocationLike, RightLike
from remap.sizes import Size, counted, format_size, parse_size, round_up
from remap.spans import Chunk
from remap.streams import Queue
from remap.types import Access, HandleType, Location
from remap.uses import After, Known

Part: TypeAlias = tuple[int, int]
"""A part of a buffer as (start, stop) offsets."""

_NOTHING = Change()
_NOBODY = Doomed((), (), [])
_NO_BYTES = _NO_CHUNKS = (0, 0)


@hinted(grow="resize(size)", shrink="resize(size)")
class ElasticBuffer(ForkingBuffer):
    """Memory that grows and shrinks under one address, and needs to be backed only where it is used.

    `capacity` bytes of addresses are reserved once; they cost no memory, and cannot be exceeded. `resize(n)` commits
    the first n bytes and gives the rest back; `commit` and `decommit` do the same for any part. Sizes need no
    alignment. `size` is the end of the last committed byte. What is not committed cannot be copied or filled.

    Memory comes in chunks: `chunk=` is "geometric" (2 to 64 MiB, growing with the buffer; the default), a size, or
    "exact" (one for each request). Only whole chunks go back: a chunk stays while one of its bytes is committed. New
    chunks go to the resident locations in turn, and have the rights that the buffer was given. Their contents are
    undefined; `poison=True` fills newly committed bytes with 0xCB, as long as somebody may write them.

    Growing waits for nothing and disturbs nobody: other threads, and work in flight, go on using what is committed.
    Giving back waits as `close` does, and takes `after=`. With `ahead=` bytes, a thread keeps that much memory mapped
    behind the end, so that growing by less only counts; it never takes what another request needs. `footprint()` and
    snapshots count it.

    Memory that is given back goes to the `ChunkPool` in `pool=`, or to the one that `remap.chunk_pool` made for its
    location, as far as that keeps it, else to the driver. Source: cuMemAddressReserve, cuMemCreate, cuMemMap.
    """

    kind: ClassVar[str] = "elastic buffer"

    def __init__(
        self,
        capacity: Size,
        *,
        device: LocationLike | None = None,
        resident: LocationLike | Iterable[LocationLike] | None = None,
        accessing: LocationLike | Iterable[LocationLike] | None = None,
        access: RightLike = Access.READ_WRITE,
        chunk: ChunkLike | None = None,
        shareable: HandleType | str | Iterable[HandleType | str] | None = None,
        compressible: bool = False,
        rdma: bool = False,
        pool: ChunkPool | None = None,
        ahead: Size = 0,
        alignment: Size | None = None,
        poison: bool = False,
    ) -> None:
        driver = drivers.current()
        if queued:
            drain()
        where = one_place("an elastic buffer", device, resident)
        placement = place(driver, where, accessing, access, shareable, compressible, rdma)
        granule = placement.granule
        if pool is not None:
            pool._check()
        super().__init__(
            driver,
            placement,
            round_up(parse_size(capacity, "capacity"), granule),
            parse_chunk(chunk, granule, shareable=bool(placement.properties[0].handle_types)),
            alignment=parse_alignment(alignment),
            pool=pool,
            ahead=parse_size(ahead, "ahead"),
        )
        self._poison = poison
        self._opened()

    # -- growing and shrinking --

    def resize(self, size: Size, *, after: After = Known.STREAMS, detach: bool = False) -> Change:
        """Commit the first `size` bytes, give everything behind them back, and say what that changed.

        Growing waits for nothing. Giving chunks back waits for the work that may use them (see `close` for `after=`).
        Where other processes hold the memory it needs `detach=True`: they keep what they have. Raises
        `InvalidValueError` beyond the capacity, `OutOfMemoryError`, `PausedError`, and `InUseError` while another
        change goes on, or while something uses a buffer that has to give chunks back. After a failure everything is
        as it was.
        """
        number = size if type(size) is int and size >= 0 else parse_size(size)
        with self._driver.lock:
            # Most steps of a buffer that grows in small ones stay within the last chunk: they only count.
            stops = self._extents.stops
            if (
                self._size <= number <= self._front
                and len(stops) == 1
                and self._extents.starts[0] == 0
                and self._open
                and not (self._changing or self._taken or self._paused or self._poison)
                and self._epoch == epoch()
            ):
                self._size = stops[0] = number
                return _NOTHING
        return self._resize(number, after, detach)

    def _resize(self, size: int, after: After, detach: bool) -> Change:
        self._check_bounds("resize", 0, size)
        with self._change("resized"):
            grown, waiting = size > self._size, self._ahead is not None and self._ahead.bytes > 0
            doomed = self._index(size), len(self._chunks)
            change = self._apply(
                (0, size), (size, self.capacity), doomed, after, detach, flush=waiting and not grown
            )
            if grown:
                self._prepare_more()
        return self._done(change)

    def commit(self, start: Size, stop: Size) -> Change:
        """Back the bytes from `start` up to `stop`, and say what that changed; the rest stays as it is.

        Waits for nothing. Raises as `resize` does; after a failure everything is as it was.
        """
        first, last = parse_size(start, "start"), parse_size(stop, "stop")
        self._check_bounds("commit", first, last)
        with self._change("committed"):
            change = self._apply((first, last), _NO_BYTES, _NO_CHUNKS)
            self._prepare_more()
        return self._done(change)

    def decommit(
        self, start: Size, stop: Size, *, after: After = Known.STREAMS, detach: bool = False
    ) -> Change:
        """Give the bytes from `start` up to `stop` back, and say what that freed.

        Only chunks with no committed byte left are unmapped; their contents are lost. Waits, and raises, as `resize`
        does when it shrinks; after a failure everything is as it was.
        """
        first, last = parse_size(start, "start"), parse_size(stop, "stop")
        self._check_bounds("decommit", first, last)
        with self._change("decommitted"):
            change = self._apply(_NO_BYTES, (first, last), self._left_alone(first, last), after, detach)
        return self._done(change)

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """The committed parts as (start, stop) offsets, in order; none touch."""
        self._check()
        with self._driver.lock:
            return tuple(self._extents)

    def _check_part(
        self, asked: str, offset: int, size: int, needed: Access, place: Location | None = None
    ) -> None:
        if not size:
            return
        stop = offset + size
        if not self._extents.covers(offset, stop):
            start, end = self._extents.gaps(offset, stop)[0]
            raise InvalidValueError(
                f"{asked} of bytes {offset} to {stop} of {self.describe()}",
                rule=f"bytes {start} to {end} are not committed, and have no memory",
                next_step=f"Call commit({start}, {end}) first",
            )
        if needed is Access.READ_WRITE and not self._part_writable(offset, size):
            raise AccessError(
                f"{asked} of bytes {offset} to {stop} of {self.describe()}",
                rule="a part of them is shared with a fork, and read-only in both",
                next_step=f"Call make_private({offset}, {stop}) first",
            )

    # -- the steps of a change --

    def _apply(
        self,
        kept: Part,
        gone: Part,
        indices: tuple[int, int],
        after: After = Known.STREAMS,
        detach: bool = False,
        *,
        flush: bool = False,
    ) -> Change:
        """Commit a part, give another one back, and unmap the chunks of two indices: all of it, or nothing.

        `flush` gives back what is mapped ahead, too, as is done wherever chunks go. An interrupt that comes when chunks
        have gone, or somebody may have seen new ones, is raised when the rest is done.
        """
        doomed, done = _NOBODY, _NOTHING
        giving = flush or indices[0] < indices[1]
        settling = False
        new = self._map(*kept)
        try:
            self._fill_fresh(*kept)
            with self._excluding("shrunk", detach=detach) if giving else nullcontext():
                try:
                    if giving:
                        self._wait("shrunk", after)
                        doomed = self._doomed(*indices)
                        done = self._unmap(doomed)
                    settling = True
                    self._settle(new, doomed, kept, gone)
                except BaseException as error:
                    if not isinstance(error, Exception) and not all_mapped(self._driver, doomed.chunks):
                        settling = True
                        undo(error, self._driver.unmap, *doomed.range)  # nothing is fine, too (T7)
                        undo(error, self._supply.lose, doomed.own)
                    if settling:
                        undo(error, self._settle, new, doomed, kept, gone)
                    raise
        except BaseException as error:
            if settling:
                undo(error, self._changed)
            else:
                undo(error, self._unmap_new, new)
            raise
        return Change(sum([chunk.size for chunk in new]), done.freed, done.pooled) if new or giving else done

    def _fill_fresh(self, start: int, stop: int) -> None:
        """Poison what is newly committed, where somebody may write it."""
        if not self._poison or not any(right.writable for right in self._rights.values()):
            return
        fresh = [part for gap in self._extents.gaps(start, stop) for part in self._writable_parts(*gap)]
        if not fresh:
            return
        with self._using("poison", Access.READ_WRITE, None) as queue:
            for one, other in fresh:
                if queue is not None:
                    with _waited_for(self._driver, queue):
                        self._driver.fill(self._address + one, POISON, 1, other - one, queue.handle)
                else:
                    ctypes.memset(self._address + one, POISON, other - one)

    def _settle(self, new: list[Chunk], doomed: Doomed, kept: Part, gone: Part) -> None:
        """Let everybody see which chunks there are, and which bytes are committed; doing so again is fine."""
        with self._driver.lock:
            self._forget(doomed)
            self._publish(new)
            self._extents.add(*kept)
            if self._extents.overlaps(*gone):
                self._extents.remove(*gone)
                launches.renew()  # also where no chunk goes: launches have to look again which bytes they may use
            self._size = self._extents.end

    def _done(self, change: Change) -> Change:
        if change is not _NOTHING:
            self._changed()
        return change

    def _left_alone(self, start: int, stop: int) -> tuple[int, int]:
        """Return the indices of the chunks that lie in a part, and have no committed byte outside of it."""
        first, last = self._touching(start, stop)
        base, chunks = self._address, self._chunks
        if first < last and self._extents.overlaps(chunks[first].address - base, start):
            first += 1
        if first < last and self._extents.overlaps(
            stop, chunks[last - 1].address - base + chunks[last - 1].size
        ):
            last -= 1
        return first, last

    def describe(self) -> Description:
        """Return what this buffer is."""
        detail = f"capacity {format_size(self.capacity)}, {counted(len(self._chunks), 'chunk')}"
        if self._ahead is not None and self._ahead.bytes:
            detail += f", {format_size(self._ahead.bytes)} mapped ahead"
        if self._paused:
            detail += f", paused ({self._paused})"
        return Description(self.kind, self.serial, self._size, self._address, detail)


@contextmanager
def _waited_for(driver: Any, queue: Queue) -> Generator[None]:
    """Queue work in a block; if that fails, wait for what was queued before, so that its memory can be given back."""
    try:
        yield
    except BaseException as error:
        undo(error, driver.synchronize_stream, queue.handle)
        raise
