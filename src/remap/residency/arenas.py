"""Where host memory lies: one long range of addresses for each NUMA node, cut into slabs and lent out in extents."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeAlias

from remap.errors import CudaResult, driver_error
from remap.locations import Device
from remap.residency import pages
from remap.sizes import GiB, MiB, TiB, format_size, round_up

if TYPE_CHECKING:
    from remap.residency.hostpool import HostPool

SLAB = 32 * MiB
"""The piece that is touched, locked and given back as a whole."""

Job: TypeAlias = "Future[None]"

_ALIGNMENT = 2 * MiB
_LONGEST, _SHORTEST = 16 * TiB, 1 * GiB


class Arena:
    """The addresses of one NUMA node: slabs from the start on, and the gaps between extents."""

    def __init__(self, node: int, at: Device) -> None:
        self.node = node
        self.device = at
        self.slabs: list[Slab] = []
        length = _LONGEST
        while True:
            try:
                self.reserved = pages.reserve(length)
                break
            except OSError as error:  # an address-space limit (ulimit -v)
                length //= 2
                if length < _SHORTEST:
                    asked = f"{format_size(2 * length)} of addresses for host memory"
                    raise driver_error(
                        "mmap", CudaResult.OUT_OF_MEMORY, asked=asked, rule=str(error)
                    ) from error
        self.length = length
        self.base = round_up(self.reserved, SLAB)
        self._gaps: list[tuple[int, int]] = [(self.base, self.reserved + length - SLAB)]

    def slab(self, index: int) -> Slab:
        """Return a slab by its place; those up to it come to be."""
        while len(self.slabs) <= index:
            self.slabs.append(Slab(self.base + len(self.slabs) * SLAB, self.device))
        return self.slabs[index]

    def place(self, size: int, pool: HostPool) -> Extent:
        """Return the lowest piece that is free: what was prepared or kept is at the low addresses."""
        if not size:
            return Extent(pool, self, self.base, 0, [])
        room = round_up(size, _ALIGNMENT)
        for index, (start, end) in enumerate(self._gaps):
            if end - start >= room:
                self._gaps[index : index + 1] = [(start + room, end)] if end - start > room else []
                first, last = (start - self.base) // SLAB, (start + room - 1 - self.base) // SLAB
                return Extent(pool, self, start, size, [self.slab(at) for at in range(first, last + 1)])
        asked = f"{format_size(size)} of addresses for host memory"
        raise driver_error(
            "mmap", CudaResult.OUT_OF_MEMORY, asked=asked, rule="the pool's addresses are full"
        )

    def free(self, extent: Extent) -> None:
        """Take a piece back, and join it with the gaps beside it."""
        if not extent.size:
            return
        start, end = extent.address, extent.address + round_up(extent.size, _ALIGNMENT)
        index = next((at for at, gap in enumerate(self._gaps) if gap[0] >= end), len(self._gaps))
        if index < len(self._gaps) and self._gaps[index][0] == end:
            end = self._gaps.pop(index)[1]
        if index and self._gaps[index - 1][1] == start:
            index -= 1
            start = self._gaps.pop(index)[0]
        self._gaps.insert(index, (start, end))


class Extent:
    """A contiguous piece of the pool."""

    __slots__ = ("address", "arena", "pool", "size", "slabs")

    def __init__(self, pool: HostPool, arena: Arena, address: int, size: int, slabs: list[Slab]) -> None:
        self.pool = pool
        self.arena = arena
        self.address = address
        self.size = size
        self.slabs = slabs

    def pieces(self, offset: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield (address, size) of a part, cut where slabs meet, each as soon as there is memory behind it.

        No piece crosses from one registration to the next, which copies may not.
        """
        at, end = self.address + offset, self.address + offset + size
        first = self.slabs[0].address if self.slabs else at
        while at < end:
            slab = self.slabs[(at - first) // SLAB]
            slab.ready()
            stop = min(end, slab.address + SLAB)
            yield at, stop - at
            at = stop

    def ready(self) -> None:
        """Wait until there is memory behind all of it."""
        for slab in self.slabs:
            slab.ready()


class Slab:
    """A piece of an arena that is touched, locked and given back as a whole."""

    __slots__ = ("address", "device", "filling", "held", "job", "kept", "leaving", "pinned", "users")

    def __init__(self, address: int, at: Device) -> None:
        self.address = address
        self.device = at
        self.users = 0
        self.held = self.kept = self.leaving = self.pinned = False
        self.job: Job | None = None  # the newest
        self.filling: Job | None = None  # the one before the newest that gives it back

    def ready(self) -> None:
        """Wait until there is memory here; raises `OutOfMemoryError` if there was none."""
        job = self.job
        if job is not None:
            job.result()
