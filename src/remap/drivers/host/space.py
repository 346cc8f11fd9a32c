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

from remap.drivers.host import linux
from remap.drivers.host.addresses import AddressMap
from remap.drivers.host.allocations import Allocation
from remap.drivers.host.refusals import system_error
from remap.drivers.host.work import Region
from remap.errors import CudaResult, DriverError, OutOfAddressSpaceError
from remap.sizes import LARGEST, format_size, round_up

_SHARE = 0.9  # of the kernel's limit; the rest is for libraries that map without asking us
_RECOUNT = 4096  # mappings of ours between two looks at how many the rest of the process has


UNMAPPED = -1
_HOLE = -1  # the edge of a hole, on either side: holes go on into each other
_NOTHING = -2  # the edge of what is not ours


class Reservation:
    """A range of addresses that is ours."""

    __slots__ = ("base", "end")

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.end = base + size


class Mapping(Region):
    """An allocation at an address.

    `protection` is what the kernel lets the CPU do there, `UNMAPPED` while the kernel has no such mapping; `wanted` is
    what it is about to become.

    `starts` and `stops` are the mapping's edges in its file, as numbers whose low bits are free for a protection.
    Two neighbours are one mapping to the kernel if the edge at which the left one stops, with its protection, equals
    the edge at which the right one starts: same file, same right, and the offset goes on.
    """

    __slots__ = ("allocation", "protection", "starts", "stops", "wanted")

    def __init__(self, base: int, allocation: Allocation, identity: int, born: int) -> None:
        super().__init__(base, allocation.size, identity, born)
        self.allocation = allocation
        self.starts = allocation.starts
        self.stops = allocation.starts + allocation.size
        self.protection = UNMAPPED
        self.wanted = UNMAPPED


class AddressSpace:
    """The tables of one driver, and the system calls that keep the kernel in step. The caller holds the lock."""

    def __init__(self, granularity: int) -> None:
        self._granularity = granularity
        self.reservations: AddressMap[Reservation] = AddressMap()
        self.mappings: AddressMap[Mapping] = AddressMap()
        self._by_end: dict[int, Mapping] = {}
        self._latest: Reservation | None = None
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
        if listed:
            # Out of the table first: after an interrupt it must not name addresses that the kernel gives to others.
            self.reservations.remove(reservation)
            self._latest = None
        try:
            linux.give_back(reservation.base, reservation.end - reservation.base)
        except OSError:
            if listed:
                self.reservations.insert(reservation)
            raise
        self.kernel_mappings -= self._reservation_pieces(reservation) if listed else 1

    def around(self, address: int) -> Reservation | None:
        """Return the reservation that holds an address; calls in a row mostly mean the same one."""
        latest = self._latest
        if latest is not None and latest.base <= address < latest.end:
            return latest
        found = self.reservations.at(address)
        if found is not None:
            self._latest = found
        return found

    def covers(self, start: int, end: int) -> bool:
        """Tell whether reservations cover [start, end) without a gap."""
        latest = self._latest  # mostly the one, also below: a call of `around` costs more than all the rest
        if latest is not None and latest.base <= start and end <= latest.end:
            return True
        while start < end:
            reservation = self.around(start)
            if reservation is None:
                return False
            start = reservation.end
        return True

    def close(self) -> None:
        """Give all reservations back to the kernel, with what is mapped inside."""
        for reservation in self.reservations:
            linux.give_back(reservation.base, reservation.end - reservation.base)
        self.reservations, self.mappings = AddressMap(), AddressMap()
        self._by_end.clear()
        self._latest = None
        self.kernel_mappings = 0

    # -- mappings --

    def insert(self, mapping: Mapping) -> None:
        """Add a mapping to the tables; the kernel hears of it when somebody is given access."""
        self.mappings.insert(mapping)
        self._by_end[mapping.end] = mapping

    def remove(self, mapping: Mapping) -> None:
        """Take a mapping that the kernel does not have any more out of the tables."""
        self.mappings.remove(mapping)
        del self._by_end[mapping.end]

    def change(self, call: str, mappings: Sequence[Mapping]) -> None:
        """Let the kernel do what is `wanted` for mappings, in address order: for all of them, or for none.

        Raises `OutOfAddressSpaceError` where that would take too many kernel mappings.
        """
        changed = mappings
        if len(mappings) != 1 or mappings[0].wanted == mappings[0].protection:
            changed = [mapping for mapping in mappings if mapping.wanted != mapping.protection]
            if not changed:
                return
        growth = self._growth(changed)
        # What is kept free below the kernel's limit is there so that unmapping always works.
        if growth > 0 and changed[0].wanted != UNMAPPED:
            self._check_count(call, growth)
        runs = [changed] if len(changed) == 1 else _runs(changed)
        done = 0
        try:
            for run in runs:
                first = run[0]
                size = run[-1].end - first.base
                if first.wanted == UNMAPPED:
                    linux.clear(first.base, size)
                elif first.protection == UNMAPPED:
                    linux.place(first.base, size, first.allocation.extent, first.wanted)
                else:
                    linux.protect(first.base, size, first.wanted)
                done += 1
        except BaseException as error:
            # An interrupt is raised when a system call has returned: the last run may be changed or not, and is brought
            # back too, since whoever trusted the tables would crash.
            for run in runs[: done + 1]:
                _undo(run)
            if isinstance(error, OSError):
                raise system_error(call, error) from error
            raise
        for mapping in changed:
            mapping.protection = mapping.wanted
        self.kernel_mappings += growth

    # -- counting --

    def _growth(self, changed: Sequence[Mapping]) -> int:
        """Return by how many the kernel's mappings grow when `changed` get what is `wanted` for them.

        A mapping of the kernel begins wherever what ends and what begins at an address do not continue each other,
        so it is enough to look at both ends of every changed mapping, before and after.
        """
        growth = end = 0
        before = after = _NOTHING
        for mapping in changed:
            protection, wanted = mapping.protection, mapping.wanted
            if mapping.base != end:
                if end:
                    growth += self._growth_after(end, before, after)
                before = after = self._end_at(mapping.base)
            growth += after != (_HOLE if wanted < 0 else mapping.starts | wanted)
            growth -= before != (_HOLE if protection < 0 else mapping.starts | protection)
            before = _HOLE if protection < 0 else mapping.stops | protection
            after = _HOLE if wanted < 0 else mapping.stops | wanted
            end = mapping.end
        return growth + self._growth_after(end, before, after)

    def _growth_after(self, address: int, before: int, after: int) -> int:
        right = self._start_at(address)
        return 0 if right == _NOTHING else (after != right) - (before != right)

    def _end_at(self, address: int) -> int:
        """Return the edge that ends at an address."""
        mapping = self._by_end.get(address)
        if mapping is not None and mapping.protection >= 0:
            return mapping.stops | mapping.protection
        latest = self._latest
        if latest is not None and latest.base < address <= latest.end:
            return _HOLE
        return _NOTHING if self.around(address - 1) is None else _HOLE

    def _start_at(self, address: int) -> int:
        """Return the edge that starts at an address."""
        mapping = self.mappings.starting_at(address)
        if mapping is not None and mapping.protection >= 0:
            return mapping.starts | mapping.protection
        latest = self._latest
        if latest is not None and latest.base <= address < latest.end:
            return _HOLE
        return _NOTHING if self.around(address) is None else _HOLE

    def _check_count(self, call: str, growth: int) -> None:
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


def _runs(mappings: Sequence[Mapping]) -> list[list[Mapping]]:
    """Split mappings into runs that one system call can change."""
    runs: list[list[Mapping]] = []
    end = edge = 0
    for mapping in mappings:
        # What gets into the kernel has to go on in its file as well; for other changes it is enough to be neighbours.
        placing = mapping.protection == UNMAPPED
        starts, stops = (mapping.starts, mapping.stops) if placing else (mapping.base, mapping.end)
        if mapping.base == end and starts == edge and mapping.wanted == runs[-1][-1].wanted:
            runs[-1].append(mapping)
        else:
            runs.append([mapping])
        end, edge = mapping.end, stops
    return runs


def _undo(run: Sequence[Mapping]) -> None:
    """Bring the kernel back to the `protection` of mappings which it had changed to `wanted`."""
    for mapping in run:
        size = mapping.end - mapping.base
        with contextlib.suppress(OSError):
            if mapping.protection == UNMAPPED:
                linux.clear(mapping.base, size)
            elif mapping.wanted == UNMAPPED:
                linux.place(mapping.base, size, mapping.allocation.extent, mapping.protection)
            else:
                linux.protect(mapping.base, size, mapping.protection)
