"""Chunks: how large the physical allocations of a growing buffer are, and pools that keep them for the next one.

Granting access costs about 32 µs for each mapping, whatever its size up to 64 MiB, so a buffer that grows in small
steps maps larger chunks than it is asked for (`ChunkSizes`). Creating and releasing memory costs as much again; a
`ChunkPool` saves both, for those who say how much it may keep.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from remap import drivers
from remap.errors import CudaResult, InvalidValueError, RemapError, driver_error
from remap.handles import create_handle, reclaimers
from remap.lifetime import Description, Release, Resource, drain, queued, undo
from remap.locations import LocationLike, device, location
from remap.ranges import Chunk
from remap.sizes import MiB, Size, check_aligned, format_size, parse_size
from remap.types import AllocationProperties, Location

ChunkLike: TypeAlias = Size | Literal["exact", "geometric"]
"""What is taken as `chunk=`: a size, "exact" or "geometric"."""

LARGEST_CHUNK = 64 * MiB  # beyond it, mapping costs more per chunk and no less per byte


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """How a range is cut into chunks. Made by `parse_chunk`.

    "exact" takes one chunk for each request. "fixed" takes chunks of `unit` bytes, which begin at multiples of it.
    "geometric" takes what was asked for or a quarter of what is mapped in front of it, whichever is more, from one
    granule up to `largest`: growing in small steps then maps rarely, and takes at most a quarter too much.
    """

    kind: Literal["exact", "fixed", "geometric"]
    unit: int
    largest: int

    def cut(self, start: int, stop: int, room: int, before: int, *, tight: bool = False) -> list[int]:
        """Return the sizes of chunks that lie one after the other from `start` on, and cover the bytes up to `stop`.

        They end at `room` at the latest; `before` bytes are mapped right in front. `tight` takes no more than needed.
        """
        if self.kind == "exact":
            return [stop - start]
        sizes: list[int] = []
        at = start
        while at < stop:
            size = self.unit
            if self.kind == "geometric":
                size = max(_power_below(before // 4), _power_below(stop - at))
                size = max(min(size, self.largest) // self.unit * self.unit, self.unit)
            size = min(size, (stop if tight and self.kind == "geometric" else room) - at)
            sizes.append(size)
            at += size
            before += size
        return sizes

    def next(self, at: int, room: int, before: int) -> int:
        """Return the size of the next chunk where nothing in particular was asked for."""
        if self.kind == "exact":
            return min(self.largest, room - at)
        return self.cut(at, min(at + self.unit, room), room, before)[0]


def parse_chunk(chunk: ChunkLike | None, granule: int, *, shareable: bool = False) -> ChunkSizes:
    """Return what `chunk=` means; raises `AlignmentError` for a size that is no multiple of the granule.

    None is "geometric", or "exact" for shareable memory, where each chunk costs its importers a handle.
    """
    if chunk is None:
        chunk = "exact" if shareable else "geometric"
    largest = max(LARGEST_CHUNK // granule * granule, granule)
    if chunk == "exact":
        return ChunkSizes("exact", granule, largest)
    if chunk == "geometric":
        return ChunkSizes("geometric", granule, largest)
    size = parse_size(chunk, "chunk")
    if size == 0:
        raise InvalidValueError(
            "chunk 0", rule='it is "exact", "geometric" or a size of one granule and more'
        )
    return ChunkSizes("fixed", check_aligned(size, granule, "chunk"), largest)


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number > 0 else 0


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool holds at one moment, and what it has done. Sizes in bytes.

    `used` is in buffers, `kept` is waiting for the next one; `reserved` is both. Peaks count since the pool was made.
    """

    used: int
    kept: int
    used_peak: int
    reserved_peak: int
    hits: int
    misses: int
    limit: int
    used_limit: int | None

    @property
    def reserved(self) -> int:
        """The bytes that buffers use and those that the pool keeps."""
        return self.used + self.kept


class ChunkPool(Resource):
    """Physical allocations of one location that buffers gave up, kept for the next ones.

    It keeps up to `limit` bytes, and lends buffers up to `used_limit` bytes altogether (None for no bound). What it
    keeps was waited for when it was unmapped, so nobody uses it any more. Where memory runs out on its location, for
    whatever request of remap, everything it keeps is given back and the request tried once more. Closing gives it
    back too; buffers that still have memory of the pool keep it, and give it back to the driver.
    """

    __slots__ = (
        "_hits",
        "_kept",
        "_kept_bytes",
        "_lock",
        "_misses",
        "_reserved_peak",
        "_used",
        "_used_peak",
        "limit",
        "location",
        "used_limit",
    )

    kind: ClassVar[str] = "chunk pool"

    def __init__(
        self, at: LocationLike | None = None, *, limit: Size = 0, used_limit: Size | None = None
    ) -> None:
        super().__init__(drivers.current())
        self.location = location(device() if at is None else at)
        self.limit = parse_size(limit, "limit")
        self.used_limit = None if used_limit is None else parse_size(used_limit, "used_limit")
        self._lock = threading.Lock()
        self._kept: dict[tuple[AllocationProperties, int], list[int]] = {}
        self._kept_bytes = self._used = 0
        self._used_peak = self._reserved_peak = 0
        self._hits = self._misses = 0
        self._opened()
        _known.add(self)

    def statistics(self) -> PoolStatistics:
        """Return what the pool holds now and has done so far."""
        self._check()
        with self._lock:
            return PoolStatistics(
                self._used,
                self._kept_bytes,
                self._used_peak,
                self._reserved_peak,
                self._hits,
                self._misses,
                self.limit,
                self.used_limit,
            )

    def trim(self, to: Size = 0) -> int:
        """Give memory back until at most `to` bytes are kept, and return how many bytes that freed."""
        self._check()
        return self._trim(parse_size(to, "to"))

    def _trim(self, to: int) -> int:
        freed = 0
        doomed: list[int] = []
        with self._lock:
            while self._kept_bytes > to:
                key, handles = next(iter(self._kept.items()))
                doomed.append(handles.pop())
                if not handles:
                    del self._kept[key]
                self._kept_bytes -= key[1]
                freed += key[1]
        release_all(self._driver, doomed)
        return freed

    # -- for buffers --

    def lend(self, properties: AllocationProperties, size: int, create: Callable[..., int]) -> int:
        """Return a handle of such an allocation: one that was kept, else a new one."""
        with self._lock:
            if self.used_limit is not None and self._used + size > self.used_limit:
                raise driver_error(
                    "cuMemCreate",
                    CudaResult.OUT_OF_MEMORY,
                    asked=f"{format_size(size)} from {self.describe()}",
                    rule=f"buffers use {format_size(self._used)} of it, and its used_limit is "
                    f"{format_size(self.used_limit)}",
                    next_step="Shrink or close one, or raise the limit",
                )
            self._count(size)
            handles = self._kept.get((properties, size))
            if handles:
                handle = handles.pop()
                self._kept_bytes -= size
                if not handles:
                    del self._kept[properties, size]
                self._hits += 1
                return handle
            self._misses += 1
        try:
            return create(self._driver, size, properties)
        except BaseException:
            self.lose(size)
            raise

    def _count(self, size: int) -> None:
        self._used += size
        self._used_peak = max(self._used_peak, self._used)
        self._reserved_peak = max(self._reserved_peak, self._used + self._kept_bytes)

    def lent(self, size: int) -> None:
        """Count memory that a buffer got in another way: when it was resumed, say."""
        with self._lock:
            self._count(size)

    def lose(self, size: int) -> None:
        """Count memory that a buffer gave back to the driver itself."""
        with self._lock:
            self._used -= size

    def wants(self, size: int) -> bool:
        """Tell whether an allocation of this size would be kept."""
        return self._open and self._kept_bytes + size <= self.limit

    def give(self, properties: AllocationProperties, size: int, handle: int) -> bool:
        """Take an allocation back that is mapped nowhere any more; return False if it was released and not kept."""
        with self._lock:
            self._used -= size
            if self._open and self._kept_bytes + size <= self.limit:
                self._kept.setdefault((properties, size), []).append(handle)
                self._kept_bytes += size
                return True
        self._driver.release(handle)
        return False

    def _detach(self) -> Release:
        if _defaults.get(self.location) is self:
            del _defaults[self.location]
        return Release(1, [(self._trim, (0,))])

    def describe(self) -> Description:
        """Return what this pool is."""
        return Description(
            self.kind,
            self.serial,
            self._kept_bytes,
            None,
            f"on {self.location}, limit {format_size(self.limit)}",
        )


_known: weakref.WeakSet[ChunkPool] = weakref.WeakSet()
_defaults: dict[Location, ChunkPool] = {}


def chunk_pool(
    at: LocationLike | None = None, *, limit: Size | None = None, used_limit: Size | None = None
) -> ChunkPool:
    """Return the pool of a location (the fastest device by default), made on first use.

    Elastic buffers made from then on take their chunks there and give them back to it. It keeps up to `limit` bytes,
    nothing at first; `used_limit` bounds what buffers take from it. A limit that is given holds from then on, for
    everybody; a lower one gives back what is above it. Close the pool to be rid of it. `ChunkPool(…)` makes one for
    those buffers alone that are given it as `pool=`.
    """
    driver = drivers.current()
    if queued:
        drain()
    place = location(device() if at is None else at)
    kept = None if limit is None else parse_size(limit, "limit")
    used = None if used_limit is None else parse_size(used_limit, "used_limit")
    with driver.lock:
        pool = find_pool(driver, place)
        if pool is None:
            pool = _defaults[place] = ChunkPool(place)
        if kept is not None:
            pool.limit = kept
        if used is not None:
            pool.used_limit = used
    pool._trim(pool.limit)
    return pool


def find_pool(driver: Any, place: Location) -> ChunkPool | None:
    """Return the pool of a location, None where nobody asked for one."""
    pool = _defaults.get(place)
    return pool if pool is not None and pool._open and pool._driver is driver else None


class Supply:
    """Where the chunks of one buffer come from, and where they go: the driver, or pools by location.

    `properties` is what they are asked to be, whatever their location.
    """

    __slots__ = ("_by_location", "driver", "pools", "properties")

    def __init__(
        self, driver: Any, properties: AllocationProperties, pools: Mapping[Location, ChunkPool]
    ) -> None:
        self.driver = driver
        self.properties = properties
        self.pools = pools
        self._by_location = {properties.location: properties}

    def at(self, place: Location) -> AllocationProperties:
        """Return what memory on a location is asked to be."""
        found = self._by_location.get(place)
        if found is None:
            one = self.properties
            found = AllocationProperties(place, one.handle_types, one.compressible, one.rdma)
            self._by_location[place] = found
        return found

    def take(self, place: Location, size: int, *, background: bool = False) -> int:
        """Return a handle; in the background what runs out is not taken from others."""
        create = _create_quietly if background else create_handle
        pool = self.pools.get(place)
        if pool is None:
            return create(self.driver, size, self.at(place))
        return pool.lend(self.at(place), size, create)

    def lose(self, chunks: Iterable[Chunk]) -> None:
        """Count chunks that went back to the driver."""
        if self.pools:
            for chunk in chunks:
                if chunk.location in self.pools:
                    self.pools[chunk.location].lose(chunk.size)

    def found(self, chunks: Iterable[Chunk]) -> None:
        """Count chunks that came from the driver."""
        if self.pools:
            for chunk in chunks:
                if chunk.location in self.pools:
                    self.pools[chunk.location].lent(chunk.size)

    def unmap(self, address: int, size: int, chunks: Sequence[Chunk]) -> int:
        """Unmap a range; of its `chunks`, which are mapped nowhere else, return the bytes that pools keep.

        After a failure everything is mapped as it was.
        """
        if not self.pools:
            self.driver.unmap(address, size)
            return 0
        kept: dict[int, int] = {}  # index: handle
        try:
            room = {place: pool.limit - pool._kept_bytes for place, pool in self.pools.items()}
            for index, chunk in enumerate(chunks):
                if room.get(chunk.location, 0) >= chunk.size and self.pools[chunk.location].wants(chunk.size):
                    room[chunk.location] -= chunk.size
                    kept[index] = self.driver.retain(chunk.address)
            self.driver.unmap(address, size)
        except BaseException as error:
            undo(error, release_all, self.driver, list(kept.values()))
            raise
        pooled = 0
        for index, chunk in enumerate(chunks):
            if index in kept:
                pooled += chunk.size * self.pools[chunk.location].give(
                    self.at(chunk.location), chunk.size, kept[index]
                )
            elif chunk.location in self.pools:
                self.pools[chunk.location].lose(chunk.size)
        return pooled


def release_all(driver: Any, handles: Iterable[int]) -> None:
    """Release every handle; raise the first error when all were tried."""
    first: RemapError | None = None
    for handle in handles:
        try:
            driver.release(handle)
        except RemapError as error:
            first = first or error
    if first is not None:
        raise first


def _create_quietly(driver: Any, size: int, properties: AllocationProperties) -> int:
    handle: int = driver.create(size, properties)
    return handle


def _trim_pools(driver: Any, place: Location) -> int:
    """Give back what all pools of a location keep, for a request that found no memory."""
    return sum(
        pool._trim(0)
        for pool in list(_known)
        if pool._open and pool._driver is driver and pool.location == place
    )


reclaimers.append(_trim_pools)
