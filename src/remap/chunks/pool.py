"""Chunk pools: physical allocations that are kept for the next buffer, by those who say how much to keep.

Creating and releasing memory costs as much as mapping it; what a pool keeps saves both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from remap import drivers
from remap.errors import CudaResult, InvalidValueError, RemapError, driver_error
from remap.handles import reclaimers
from remap.lifetime import Description, Release, Resource, drain, queued, undo
from remap.locations import LocationLike, device, location
from remap.registers import Register
from remap.sizes import Size, format_size, parse_size
from remap.types import AllocationProperties, Facts, Held, Location


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
        doomed = Release(1, [])
        try:
            with self._lock:
                while self._kept_bytes > to:
                    key, handles = next(iter(self._kept.items()))
                    # No call from here on: an interrupt finds it in one of both lists.
                    doomed.steps += [(self._driver.release, (handles[-1],))]
                    del handles[-1]
                    if not handles:
                        del self._kept[key]
                    self._kept_bytes -= key[1]
                    freed += key[1]
        finally:  # an interrupt may have come
            doomed.run()
        return freed

    # -- for buffers --

    def lend(self, properties: AllocationProperties, size: int, create: Callable[..., int]) -> int:
        """Return a handle of such an allocation: one that was kept, else a new one."""
        handle = counted = 0
        try:
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
                handles = self._kept.get((properties, size))
                # No call until it is counted: an interrupt finds all of that done, or nothing.
                if handles:
                    handle = handles[-1]
                    del handles[-1]
                    self._kept_bytes -= size
                    if not handles:
                        del self._kept[properties, size]
                    self._hits += 1
                else:
                    self._misses += 1
                self._used, counted = self._used + size, size
                self._note_peaks()
            return handle or create(self._driver, size, properties)
        except BaseException as error:
            self.lose(counted)
            if handle:
                undo(error, self._driver.release, handle)
            raise

    def _note_peaks(self) -> None:
        self._used_peak = max(self._used_peak, self._used)
        self._reserved_peak = max(self._reserved_peak, self._used + self._kept_bytes)

    def gain(self, size: int) -> None:
        """Count memory that a buffer got in another way: when it was resumed, say."""
        with self._lock:
            self._used += size
            self._note_peaks()

    def lose(self, size: int) -> None:
        """Count memory that a buffer gave back to the driver itself."""
        with self._lock:
            self._used -= size

    def lose_lent(self, size: int, lent: dict[int, ChunkPool], address: int) -> None:
        """Do the same, and note in `lent` that the chunk at an address is not counted any more: both, or neither."""
        with self._lock:
            self._used -= size
            del lent[address]

    @property
    def room(self) -> int:
        """How many more bytes it would keep."""
        return self.limit - self._kept_bytes if self._open else 0

    def give(self, properties: AllocationProperties, size: int, handles: list[int]) -> bool:
        """Take and keep the last of allocations that are mapped nowhere; return False if it was released instead."""
        with self._lock:
            if self._open and self._kept_bytes + size <= self.limit:
                found = self._kept.get((properties, size))
                # No call from here on: an interrupt finds it here, or still there.
                if found is None:
                    found = self._kept[properties, size] = []
                found += handles[-1:]
                del handles[-1]
                self._kept_bytes += size
                return True
        handle = handles[-1]
        del handles[-1]
        self._driver.release(handle)
        return False

    def _detach(self) -> Release:
        if _defaults.get(self.location) is self:
            del _defaults[self.location]
        return Release(1, [(self._trim, (0,))])

    def _facts(self) -> Facts:
        with self._lock:
            kept = [(size, place.location) for (place, size), all_of in self._kept.items() for _ in all_of]
        return Facts(held=tuple(Held(None, size, place) for size, place in kept))

    def describe(self) -> Description:
        """Return what this pool is."""
        return Description(
            self.kind,
            self.serial,
            self._kept_bytes,
            None,
            f"on {self.location}, limit {format_size(self.limit)}",
        )


_known: Register[ChunkPool] = Register()
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


def pools_of(
    driver: Any, places: Iterable[Location], own: ChunkPool | None = None
) -> Mapping[Location, ChunkPool]:
    """Return the pools that there are for locations; `own` comes before the one that all share.

    Raises `InvalidValueError` for an `own` of another location, which would neither give nor limit anything.
    """
    found = {place: find_pool(driver, place) for place in places}
    if own is not None:
        if own.location not in found:
            raise InvalidValueError(
                f"a buffer on {', '.join(map(str, found))} with a chunk pool of {own.location}",
                rule="a pool keeps and limits chunks of its own location",
                next_step="Make a pool there: remap.ChunkPool(at)",
            )
        found[own.location] = own
    return {place: pool for place, pool in found.items() if pool is not None}


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


def _trim_pools(driver: Any, place: Location) -> int:
    """Give back what all pools of a location keep, for a request that found no memory."""
    return sum(
        pool._trim(0) for pool in _known if pool._open and pool._driver is driver and pool.location == place
    )


reclaimers.append(_trim_pools)
