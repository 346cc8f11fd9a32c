"""The address space: reservations, mappings, and the kernel's table of mappings behind them.

A mapping that nobody may access is not in the kernel at all: the hole of its reservation already says "no access",
and the first grant maps the memory with its right at once. Several mappings that are neighbours in the address space
and in their file take one system call together.

The kernel allows a process `vm.max_map_count` mappings, and at that limit even unmapping fails. So ours are counted,
merged as the kernel merges them, and refused at 90 % of what the rest of the process leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeAlias

from remap.drivers.host import linux
from remap.drivers.host.addresses import AddressMap
from remap.drivers.host.backing import Extent, SharedFile
from remap.drivers.host.work import Region
from remap.errors import CudaResult, DriverError, OutOfAddressSpaceError, driver_error
from remap.sizes import LARGEST, format_size, round_up
from remap.types import AllocationProperties

_SHARE = 0.9  # of the kernel's limit; the rest is for libraries that map without asking us
_RECOUNT = 4096  # mappings of ours between two looks at how many the rest of the process has


class Allocation:
    """Physical memory: an extent of an arena, or a shareable file of its own."""

    __slots__ = ("extent", "file", "handle", "mappings", "properties", "references", "size")

    def __init__(
        self,
        handle: int,
        size: int,
        properties: AllocationProperties,
        extent: Extent,
        file: SharedFile | None = None,
    ) -> None:
        self.handle = handle
        self.size = size
        self.properties = properties
        self.extent = extent
        self.file = file
        self.references = 1
        self.mappings = 0


class Reservation:
    """A range of addresses that is ours."""

    __slots__ = ("base", "end")

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.end = base + size


class Mapping(Region):
    """An allocation at an address.

    `protection` is what the kernel lets the CPU do there, None while the kernel has no such mapping; `wanted` is what
    it is about to become.
    """

    __slots__ = ("allocation", "fd", "offset", "protection", "wanted")

    def __init__(self, base: int, allocation: Allocation, identity: int, born: int) -> None:
        super().__init__(base, allocation.size, identity, born)
        self.allocation = allocation
        self.fd, self.offset = allocation.extent
        self.protection: int | None = None
        self.wanted: int | None = None


class AddressSpace:
    """The tables of one driver, and the system calls that keep the kernel in step. The caller holds the lock."""

    def __init__(self, granularity: int) -> None:
        self._granularity = granularity
        self.reservations: AddressMap[Reservation] = AddressMap()
        self.mappings: AddressMap[Mapping] = AddressMap()
        self.kernel_mappings = 0
        self._limit = 0
        self._counted_at = 0
        self._count_others()

    # -- reservations --

    def reserve(
        self, size: int, alignment: int, hint: int, call: str = "cuMemAddressReserve", listed: bool = True
    ) -> Reservation:
        """Reserve `size` bytes at `hint` if that is free, else anywhere at a multiple of `alignment`.

        A reservation that is not `listed` is the driver's own: no call on mappings can reach it.
        """
        alignment = max(alignment, self._granularity)
        self._check_count(call, 1)
        base = 0
        if size + alignment + hint > LARGEST:
            raise self._no_addresses(call, size, alignment)
        try:
            if hint and hint % alignment == 0:
                with contextlib.suppress(FileExistsError):  # a hint that is taken is silently replaced (T3)
                    base = linux.reserve(size, hint)
            if not base:
                base = self._reserve_aligned(size, alignment)
        except OSError as error:
            raise self._no_addresses(call, size, alignment) from error
        found = Reservation(base, size)
        if listed:
            self.kernel_mappings += self._reservation_pieces(found)
            self.reservations.insert(found)
        else:
            self.kernel_mappings += 1
        return found

    def _reserve_aligned(self, size: int, alignment: int) -> int:
        base = linux.reserve(size)
        if base % alignment == 0:
            return base
        linux.give_back(base, size)
        wide = linux.reserve(size + alignment)
        base = round_up(wide, alignment)
        if base > wide:
            linux.give_back(wide, base - wide)
        if wide + alignment > base:
            linux.give_back(base + size, wide + alignment - base)
        return base

    def _no_addresses(self, call: str, size: int, alignment: int) -> DriverError:
        limit = linux.address_space_limit()
        if limit is not None:
            rule = f"the process may use {format_size(limit)} of address space (ulimit -v)"
            step = "Raise the limit, or reserve less"
        else:
            rule = "the kernel has no such range free; this is address space, not memory"
            step = "Reserve less, or free other reservations"
        asked = f"a range of {format_size(size)} aligned to {format_size(alignment)}"
        name, code = "CUDA_ERROR_OUT_OF_MEMORY", CudaResult.OUT_OF_MEMORY
        return OutOfAddressSpaceError(call, name, code, asked=asked, rule=rule, next_step=step)

    def _reservation_pieces(self, reservation: Reservation) -> int:
        # An empty reservation is one hole, which merges with a hole on either side.
        return 1 - (self._end_at(reservation.base) == _HOLE) - (self._start_at(reservation.end) == _HOLE)

    def free(self, reservation: Reservation, listed: bool = True) -> None:
        """Give a reservation without mappings back to the kernel."""
        linux.give_back(reservation.base, reservation.end - reservation.base)
        if listed:
            self.reservations.remove(reservation)
            self.kernel_mappings -= self._reservation_pieces(reservation)
        else:
            self.kernel_mappings -= 1

    def covers(self, start: int, end: int) -> bool:
        """Tell whether reservations cover [start, end) without a gap."""
        while start < end:
            reservation = self.reservations.at(start)
            if reservation is None:
                return False
            start = reservation.end
        return True

    # -- the kernel's mappings --

    def protect(self, call: str, mappings: Sequence[Mapping]) -> None:
        """Give mappings, in address order, the CPU rights in their `wanted`; all of them or none."""
        changed = [
            mapping for mapping in mappings if mapping.wanted != (mapping.protection or linux.PROT_NONE)
        ]
        if not changed:
            return
        growth = self._growth(changed)
        self._check_count(call, growth)
        done: list[tuple[Mapping, int | None]] = []
        try:
            for run in _runs(changed):
                first, last = run[0], run[-1]
                if first.protection is None:
                    linux.place(first.base, last.end - first.base, first.fd, first.offset, first.wanted or 0)
                else:
                    linux.protect(first.base, last.end - first.base, first.wanted or 0)
                for mapping in run:
                    done.append((mapping, mapping.protection))
                    mapping.protection = mapping.wanted
        except OSError as error:
            self._undo(done)
            raise system_error(call, error) from error
        self.kernel_mappings += growth

    def _undo(self, done: list[tuple[Mapping, int | None]]) -> None:
        for mapping, before in reversed(done):
            mapping.protection = before
            with contextlib.suppress(OSError):
                if before is None:
                    linux.clear(mapping.base, mapping.end - mapping.base)
                else:
                    linux.protect(mapping.base, mapping.end - mapping.base, before)

    def clear(self, mappings: Sequence[Mapping]) -> None:
        """Turn mappings, in address order, into holes again; raises `OSError`."""
        placed = [mapping for mapping in mappings if mapping.protection is not None]
        if not placed:
            return
        for mapping in placed:
            mapping.wanted = None
        growth = self._growth(placed)
        start = end = placed[0].base
        for mapping in placed:
            if mapping.base != end:
                linux.clear(start, end - start)
                start = mapping.base
            end = mapping.end
        linux.clear(start, end - start)
        for mapping in placed:
            mapping.protection = None
        self.kernel_mappings += growth

    # -- counting --

    def _growth(self, changed: Sequence[Mapping]) -> int:
        """Return by how many the kernel's mappings grow when `changed` get what is `wanted` for them.

        A mapping of the kernel begins wherever what ends and what begins at an address do not continue each other,
        so it is enough to look at both ends of every changed mapping, before and after.
        """
        growth = 0
        previous: Mapping | None = None
        before: _Edge | None
        after: _Edge | None
        for mapping in changed:
            if previous is not None and previous.end == mapping.base:
                before, after = _end(previous, previous.protection), _end(previous, previous.wanted)
            else:
                if previous is not None:
                    growth += self._growth_after(previous)
                before = after = self._end_at(mapping.base)
            growth += after != _start(mapping, mapping.wanted)
            growth -= before != _start(mapping, mapping.protection)
            previous = mapping
        return growth if previous is None else growth + self._growth_after(previous)

    def _growth_after(self, mapping: Mapping) -> int:
        right = self._start_at(mapping.end)
        if right is None:
            return 0
        return (_end(mapping, mapping.wanted) != right) - (_end(mapping, mapping.protection) != right)

    def _end_at(self, address: int) -> _Edge | None:
        """Return the edge that ends at an address, None where nothing of ours does."""
        mapping = self.mappings.at(address - 1)
        if mapping is not None:
            return _end(mapping, mapping.protection)
        return None if self.reservations.at(address - 1) is None else _HOLE

    def _start_at(self, address: int) -> _Edge | None:
        """Return the edge that starts at an address, None where nothing of ours does."""
        mapping = self.mappings.starting_at(address)
        if mapping is not None:
            return _start(mapping, mapping.protection)
        return None if self.reservations.at(address) is None else _HOLE

    def _check_count(self, call: str, growth: int) -> None:
        if growth <= 0:
            return
        if (
            self.kernel_mappings + growth <= self._limit
            and self.kernel_mappings < self._counted_at + _RECOUNT
        ):
            return
        self._count_others()
        if self.kernel_mappings + growth > self._limit:
            raise OutOfAddressSpaceError(
                call,
                "CUDA_ERROR_OUT_OF_MEMORY",
                CudaResult.OUT_OF_MEMORY,
                asked=f"{growth} more kernel mappings, {self.kernel_mappings} are in use",
                rule=f"the kernel's limit of {linux.largest_map_count()} (vm.max_map_count) leaves this driver "
                f"{max(self._limit, 0)}; there may be memory enough",
                next_step="Use larger or neighbouring allocations, or raise the limit as root: "
                "sysctl -w vm.max_map_count=1048576",
            )

    def _count_others(self) -> None:
        others = max(linux.map_count() - self.kernel_mappings, 0)
        self._limit = int(linux.largest_map_count() * _SHARE) - others
        self._counted_at = self.kernel_mappings


# Two neighbours are one mapping to the kernel if the edge at which the left one ends equals the one at which the right
# one starts: same file, same protection, and the offset goes on. Holes always go on.
_Edge: TypeAlias = tuple[int, int, int]
_HOLE: _Edge = (-1, 0, 0)


def _start(mapping: Mapping, protection: int | None) -> _Edge:
    return _HOLE if protection is None else (mapping.fd, mapping.offset, protection)


def _end(mapping: Mapping, protection: int | None) -> _Edge:
    if protection is None:
        return _HOLE
    return (mapping.fd, mapping.offset + mapping.end - mapping.base, protection)


def _runs(mappings: Sequence[Mapping]) -> list[list[Mapping]]:
    """Split mappings into runs that one system call can change."""
    runs: list[list[Mapping]] = []
    edge: _Edge = _HOLE
    for mapping in mappings:
        # Those that are placed only have to be neighbours; the others must also go on in their file.
        file, offset = (-1, mapping.base) if mapping.protection is not None else (mapping.fd, mapping.offset)
        wanted = mapping.wanted or linux.PROT_NONE
        if runs and edge == (file, offset, wanted) and runs[-1][-1].end == mapping.base:
            runs[-1].append(mapping)
        else:
            runs.append([mapping])
        edge = (file, offset + mapping.end - mapping.base, wanted)
    return runs


def system_error(call: str, error: OSError) -> DriverError:
    """Return the error for a system call that failed for a reason which no rule of CUDA covers."""
    rule = f"the operating system refused: {error.strerror or error}"
    return driver_error(call, 304, "CUDA_ERROR_OPERATING_SYSTEM", asked=call, rule=rule)
