"""Supply: where the chunks of one buffer come from, and where they go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remap.chunks.pool import ChunkPool, release_all
from remap.handles import create_handle
from remap.lifetime import undo
from remap.ranges import Chunk
from remap.types import AllocationProperties, Location


class Supply:
    """Where the chunks of one buffer come from, and where they go: the driver, or pools by location.

    `properties` is what they are asked to be, whatever their location. `lent` tells which pool counts the chunk at an
    address as used.
    """

    __slots__ = ("_by_location", "driver", "lent", "pools", "properties")

    def __init__(
        self, driver: Any, properties: AllocationProperties, pools: Mapping[Location, ChunkPool]
    ) -> None:
        self.driver = driver
        self.properties = properties
        self.pools = pools
        self.lent: dict[int, ChunkPool] = {}
        self._by_location = {properties.location: properties}

    def at(self, place: Location) -> AllocationProperties:
        """Return what memory on a location is asked to be."""
        found = self._by_location.get(place)
        if found is None:
            found = self._by_location[place] = self.properties.at(place)
        return found

    def take(self, chunk: Chunk, *, background: bool = False) -> int:
        """Return a handle for a chunk; in the background what runs out is not taken from others."""
        create = _create_quietly if background else create_handle
        properties = self.at(chunk.location)
        pool = self.pools.get(chunk.location)
        if pool is None:
            return create(self.driver, chunk.size, properties)
        handle = pool.lend(properties, chunk.size, create)
        self.lent[chunk.address] = pool
        return handle

    def lose(self, chunks: Iterable[Chunk]) -> None:
        """Count chunks that went back to the driver."""
        if self.lent:
            for chunk in chunks:
                pool = self.lent.get(chunk.address)
                if pool is not None:
                    pool.lose_lent(chunk.size, self.lent, chunk.address)

    def gained(self, chunks: Iterable[Chunk]) -> None:
        """Count chunks that came from the driver by another way: when the buffer was resumed."""
        if self.pools:
            for chunk in chunks:
                pool = self.pools.get(chunk.location)
                if pool is not None:
                    pool.gain(chunk.size)
                    self.lent[chunk.address] = pool

    def label(self, chunks: Iterable[Chunk]) -> None:
        """Note which pools count chunks that another buffer, which shares them, was the first to tell of."""
        for chunk in chunks if self.pools else ():
            pool = self.pools.get(chunk.location)
            if pool is None:
                self.lent.pop(chunk.address, None)
            else:
                self.lent[chunk.address] = pool

    def moved(self, chunks: Iterable[Chunk]) -> None:
        """Count mapped chunks that have come to another location: from where a pool counts, or to where one does."""
        if self.pools:
            there = [
                chunk
                for chunk in chunks
                if self.lent.get(chunk.address) is not self.pools.get(chunk.location)
            ]
            self.lose(there)
            self.gained(there)

    def unmap(self, address: int, size: int, chunks: Sequence[Chunk]) -> int:
        """Unmap a range; of its `chunks`, which are mapped nowhere else, return the bytes that pools keep.

        After a failure everything is mapped as it was; an interrupt that comes later gives all of it to the driver.
        """
        if not self.pools:
            self.driver.unmap(address, size)
            return 0
        kept: list[Chunk] = []
        handles: list[int] = []
        pooled = 0
        room = {place: pool.room for place, pool in self.pools.items()}
        try:
            for chunk in chunks:
                if room.get(chunk.location, 0) >= chunk.size:
                    room[chunk.location] -= chunk.size
                    handles.append(self.driver.retain(chunk.address))
                    kept.append(chunk)
            self.driver.unmap(address, size)
            self.lose(chunks)
            for chunk in reversed(kept):
                pool = self.pools[chunk.location]
                pooled += chunk.size * pool.give(self.at(chunk.location), chunk.size, handles)
        except BaseException as error:
            undo(error, release_all, self.driver, handles)
            raise
        return pooled


def _create_quietly(driver: Any, size: int, properties: AllocationProperties) -> int:
    handle: int = driver.create(size, properties)
    return handle
