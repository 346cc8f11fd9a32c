"""Where host memory lies: one long range of addresses for each NUMA node, cut into slabs and lent out in extents."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from remap.errors import CudaResult, DriverError, driver_error
from remap.locations import Device
from remap.residency import pages
from remap.residency.jobs import Job
from remap.sizes import GiB, MiB, TiB, format_size, round_up

if TYPE_CHECKING:
    from remap.residency.hostpool import HostPool

SLAB = 32 * MiB
"""The piece that is touched, locked and given back as a whole."""

STRETCH = 16
"""How many slabs get the same kind of pages: saying so stops everybody who touches some, for 3.5 ms on an H200."""

Asked: TypeAlias = Callable[[], bool] | None
"""What tells whether pages are to be large, None where they stay as they are."""

_ALIGNMENT = 2 * MiB
_LONGEST, _SHORTEST = 16 * TiB, 4 * SLAB
_SPARE = 1 * GiB  # what stays for threads, each with a stack and a heap, where addresses are few


class Arena:
    """The addresses of one NUMA node: slabs from the start on, and the gaps between extents."""

    def __init__(self, node: int, at: Device) -> None:
        self.node = node
        self.device = at
        self.slabs: list[Slab] = []
        length = _LONGEST
        while True:
            try:
                self.reserved = _reserve(length)
                break
            except OSError as error:  # an address-space limit (ulimit -v)
                length //= 2
                if length < _SHORTEST:
                    asked = f"{format_size(2 * length)} of addresses for host memory, with some to spare"
                    raise no_addresses(asked, error.strerror or str(error)) from error
        self.length = length
        self.base = round_up(self.reserved, SLAB)
        self._gaps: list[tuple[int, int]] = [(self.base, self.reserved + length - SLAB)]
        self._open = self.base
        pages.advise(self.reserved, length, True)
        self._small: set[int] = set()  # the stretches that were told otherwise
        self._advising = threading.Lock()
        self._going: list[tuple[int, int]] | None = None  # what `give_back` has still to do

    def slab(self, index: int) -> Slab:
        """Return a slab by its place; those up to it come to be."""
        while len(self.slabs) <= index:
            self.slabs.append(Slab(self.base + len(self.slabs) * SLAB, self.device))
        return self.slabs[index]

    def open_up(self, slabs: Iterable[Slab]) -> None:
        """Let slabs be touched, all that are new by one call; raises `OutOfMemoryError`, with nothing changed."""
        end = max((slab.address + SLAB for slab in slabs), default=0)
        if end <= self._open:
            return
        try:
            pages.open_up(self._open, end - self._open, self.node)
        except OSError as error:
            raise no_memory(end - self._open, error) from error
        self._open = end

    def stretch(self, slab: Slab) -> int:
        """Return the number of the stretch that a slab lies in."""
        return (slab.address - self.base) // SLAB // STRETCH

    def pages_of(self, slab: Slab, wanted: Asked) -> bool:
        """Return whether a slab that is about to be touched has large pages, after asking what its stretch is to have.

        None leaves that as it is.
        """
        number = self.stretch(slab)
        with self._advising:
            before = number not in self._small
            large = before if wanted is None else wanted()
            if large != before:
                pages.advise(self.base + number * STRETCH * SLAB, STRETCH * SLAB, large)
                (self._small.discard if large else self._small.add)(number)
        return large

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
        raise no_addresses(asked, f"all of the pool's {format_size(self.length)} are taken")

    def give_back(self) -> None:
        """Give the addresses back, but for slabs that are still locked. Doing so again goes on after an interrupt.

        The driver goes on taking those addresses for the pages that it locked. Whatever came to lie there next would
        be copied to and from these pages, and its own contents would be lost without an error.
        """
        if self._going is None:
            self._going = self._unlocked()
        unmap = pages.unmapping()
        while self._going:
            start, size = self._going[-1]
            # Noted before: others may have the addresses as soon as the call has returned.
            del self._going[-1]
            unmap(start, size)

    def _unlocked(self) -> list[tuple[int, int]]:
        """Return the ranges without slabs that are still locked."""
        found: list[tuple[int, int]] = []
        start = self.reserved
        for slab in self.slabs:
            if slab.pinned:
                if slab.address > start:
                    found.append((start, slab.address - start))
                start = slab.address + SLAB
        return [*found, (start, self.reserved + self.length - start)]

    def free(self, extent: Extent) -> None:
        """Take a piece back, and join it with the gaps beside it."""
        if not extent.size:
            return
        start, end = extent.address, extent.address + round_up(extent.size, _ALIGNMENT)
        gaps = self._gaps
        first = last = next((at for at, gap in enumerate(gaps) if gap[0] >= end), len(gaps))
        if last < len(gaps) and gaps[last][0] == end:
            end = gaps[last][1]
            last += 1
        if first and gaps[first - 1][1] == start:
            first -= 1
            start = gaps[first][0]
        gaps[first:last] = [
            (start, end)
        ]  # in one step: an interrupt before it loses these addresses, and no others


class PageChoice:
    """Whether large or small pages are sooner ready, by how long the latest slabs took: it differs, and changes.

    Large ones are fewer to touch and to lock: a first pause ran at 25 GB/s with them on an H200, and at 17 with small
    ones. But they do not everywhere get faster with the threads that touch them (16 threads touched 8 GB/s of large
    pages and 21 of small ones on one such machine, 46 and 33 on another), and where a virtual machine gets its own
    memory only when it is touched, fresh large ones take many times as long as those that were in use before.

    It is asked a stretch of slabs at a time. Rejected: asking for each slab, and trying both in turn. Every change
    stops those who touch pages; that pause ran at 14 GB/s.
    """

    _LATEST = 8  # slabs of each kind that are compared
    _EACH = 16  # one stretch in so many tries the kind that was slower, and so does the second of all

    def __init__(self) -> None:
        self._turns = count()
        self._taken = {large: deque[float](maxlen=self._LATEST) for large in (True, False)}

    @property
    def large(self) -> bool:
        """Which kind was faster; large ones until both were tried."""
        large, small = (sorted(self._taken[kind]) for kind in (True, False))
        return not large or not small or large[len(large) // 2] <= small[len(small) // 2]

    def next(self) -> bool:
        """Return whether the next stretch is to have large pages."""
        return self.large != (next(self._turns) % self._EACH == 1)

    def note(self, large: bool, seconds: float) -> None:
        """Note how long it took until a slab was ready."""
        self._taken[large].append(seconds)


class Extent:
    """A contiguous piece of the pool, `lent` until it is given back."""

    __slots__ = ("address", "arena", "lent", "pool", "size", "slabs")

    def __init__(self, pool: HostPool, arena: Arena, address: int, size: int, slabs: list[Slab]) -> None:
        self.pool = pool
        self.arena = arena
        self.address = address
        self.size = size
        self.slabs = slabs
        self.lent = True

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

    __slots__ = ("address", "device", "dropping", "filling", "held", "job", "kept", "pinned", "users")

    def __init__(self, address: int, at: Device) -> None:
        self.address = address
        self.device = at
        self.users = 0
        self.held = self.kept = self.pinned = False
        self.job: Job | None = None  # the newest
        self.dropping: Job | None = None  # the newest that gives it back, until that is done
        self.filling: Job | None = None  # the one before that

    def ready(self) -> None:
        """Wait until there is memory here; raises `OutOfMemoryError` if there was none."""
        job = self.job
        if job is not None:
            job.result()


def _reserve(length: int) -> int:
    """Reserve addresses, and leave some to others; raises `OSError`."""
    address = pages.reserve(length)
    try:
        pages.give_back(pages.reserve(_SPARE), _SPARE)
    except OSError:
        pages.give_back(address, length)
        raise
    return address


def no_addresses(asked: str, rule: str) -> DriverError:
    """Return the error for addresses that the process does not get."""
    step = "Raise the limit of address space (ulimit -v), or pause less at once"
    return driver_error("mmap", CudaResult.OUT_OF_MEMORY, asked=asked, rule=rule, next_step=step)


def no_memory(size: int, error: OSError) -> DriverError:
    """Return the error for host memory that the machine does not give."""
    asked = f"{format_size(size)} of host memory for a backup"
    return driver_error("madvise", CudaResult.OUT_OF_MEMORY, asked=asked, rule=str(error))
