"""Plain device memory (`cuMemAlloc`): small pieces of slabs, outside of virtual memory management.

A slab is a multiple of the granularity and takes from the device's budget as a whole, as on CUDA; it goes back as soon
as nothing in it is used. Kernels of the owning device reach plain memory and those of its peers do not, since on CUDA
that takes a peer-enable call, which remap never makes. Copies between the plain memory of any two devices work.
"""

from __future__ import annotations

from remap.drivers.host import linux
from remap.drivers.host.addresses import AddressMap
from remap.drivers.host.allocations import Allocations
from remap.drivers.host.backing import Extent, Files, give_pages
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import in_use, invalid, system_error
from remap.drivers.host.space import AddressSpace, Reservation
from remap.drivers.host.work import OpaqueWork, Region
from remap.errors import DriverError
from remap.sizes import round_up
from remap.types import AddressRange, Location, LocationKind, PointerInfo

_ALIGNMENT = 256


class PlainRegion(Region):
    """One plain allocation."""

    __slots__ = ("device", "size", "slab")

    plain = True

    def __init__(self, base: int, size: int, identity: int, born: int, slab: _Slab) -> None:
        super().__init__(base, size, identity, born)
        self.slab = slab
        self.readers = self.writers = 1 << slab.device


class _Slab:
    """A stretch of a device's arena, mapped for good, with its free pieces in order."""

    __slots__ = ("base", "device", "extent", "free", "reservation", "size")

    def __init__(self, device: int, reservation: Reservation, extent: Extent) -> None:
        self.device = device
        self.reservation = reservation
        self.extent = extent
        self.base = reservation.base
        self.size = reservation.end - reservation.base
        self.free: list[tuple[int, int]] = [(self.base, self.base + self.size)]

    @property
    def empty(self) -> bool:
        return self.free == [(self.base, self.base + self.size)]

    def take(self, size: int) -> int:
        """Return the address of a free piece, 0 where none is large enough."""
        for index, (start, end) in enumerate(self.free):
            if end - start >= size:
                self.free[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start
        return 0

    def give(self, start: int, size: int) -> None:
        """Take a piece back, and join it with its free neighbours."""
        pieces = sorted([*self.free, (start, start + size)])
        joined = [pieces[0]]
        for piece in pieces[1:]:
            if piece[0] == joined[-1][1]:
                joined[-1] = (joined[-1][0], piece[1])
            else:
                joined.append(piece)
        self.free = joined


class PlainMemory:
    """The plain allocations of all devices."""

    def __init__(
        self,
        machine: Machine,
        allocations: Allocations,
        space: AddressSpace,
        files: Files,
        opaque: OpaqueWork,
    ) -> None:
        self._machine = machine
        self._allocations = allocations
        self._space = space
        self._files = files
        self._opaque = opaque
        self._slabs: list[list[_Slab]] = [[] for _ in range(machine.options.devices)]
        self.regions: AddressMap[PlainRegion] = AddressMap()

    def allocate(self, device: int, size: int) -> int:
        """Allocate memory on a device, aligned to 256 bytes."""
        call = "cuMemAlloc"
        if size <= 0:
            raise invalid(call, f"size {size}", "sizes are positive")
        rounded = round_up(size, _ALIGNMENT)
        with self._machine.lock:
            for slab in self._slabs[device]:
                base = slab.take(rounded)
                if base:
                    break
            else:
                slab = self._new_slab(call, device, round_up(rounded, self._machine.options.granularity))
                base = slab.take(rounded)
            identity = next(self._machine.handles)
            self.regions.insert(PlainRegion(base, size, identity, self._machine.tick, slab))
        return base

    def _new_slab(self, call: str, device: int, size: int) -> _Slab:
        location = Location(LocationKind.DEVICE, device)
        budget = self._machine.budget(location)
        space = self._space
        self._allocations.take(call, location, size)
        try:
            extent = self._files.arena(location).allocate(size)
            reservation = space.reserve(size, 0, 0, call=call, listed=False)
        except OSError as error:
            budget.give(size)
            raise system_error(call, error) from error
        except DriverError:
            budget.give(size)
            raise
        try:
            linux.place(reservation.base, size, extent, linux.PROT_READ_WRITE)
        except OSError as error:
            space.free(reservation, listed=False)
            budget.give(size)
            raise system_error(call, error) from error
        slab = _Slab(device, reservation, extent)
        self._slabs[device].append(slab)
        return slab

    def find(self, address: int) -> PlainRegion:
        """Return the allocation that begins at an address, or raise INVALID_VALUE."""
        found = self.regions.starting_at(address)
        if found is None:
            raise invalid("cuMemFree", f"address {address:#x}", "no plain allocation begins there")
        return found

    def free(self, address: int) -> None:
        """Free an allocation that the caller has waited for."""
        with self._machine.lock:
            found = self.find(address)
            everyone = (1 << self._machine.options.devices) - 1
            work = found.unordered(everyone) or self._opaque.unordered(found, everyone)
            if work is not None:
                raise in_use(f"free {found.base:#x}", work)
            self._remove(found)

    def _remove(self, found: PlainRegion) -> None:
        slab = found.slab
        self.regions.remove(found)
        slab.give(found.base, round_up(found.end - found.base, _ALIGNMENT))
        if slab.empty:
            location = Location(LocationKind.DEVICE, slab.device)
            self._slabs[slab.device].remove(slab)
            self._space.free(slab.reservation, listed=False)
            give_pages(slab.extent, slab.size)
            self._machine.budget(location).give(slab.size)

    def close_device(self, device: int) -> None:
        """Free everything on a device whose context goes away."""
        with self._machine.lock:
            for region in [region for region in self.regions if region.slab.device == device]:
                self._remove(region)

    def address_range(self, address: int) -> AddressRange | None:
        """Return the allocation that holds an address."""
        with self._machine.lock:
            found = self.regions.at(address)
            return None if found is None else AddressRange(found.base, found.end - found.base)

    def pointer_info(self, address: int) -> PointerInfo | None:
        """Return what is known of an address."""
        with self._machine.lock:
            found = self.regions.at(address)
            if found is None:
                return None
            return PointerInfo(found.base, found.end - found.base, found.identity, found.slab.device)

    def shut_down(self) -> None:
        """Unmap everything."""
        with self._machine.lock:
            for slabs in self._slabs:
                for slab in slabs:
                    linux.give_back(slab.base, slab.size)
                slabs.clear()
