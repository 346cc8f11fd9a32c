"""Plain device memory (`cuMemAlloc`): small pieces of slabs, outside of virtual memory management.

A slab is a multiple of the granularity and takes from the device's budget as a whole, as on CUDA; it goes back as soon
as nothing in it is used. Kernels of the owning device reach plain memory and those of its peers do not, since on CUDA
that takes a peer-enable call, which remap never makes. Copies between the plain memory of any two devices work.
"""

from __future__ import annotations

from remap.drivers.host.addresses import AddressMap
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import in_use, invalid
from remap.drivers.host.stretches import Stretch, Stretches
from remap.drivers.host.work import OpaqueWork, Region
from remap.sizes import round_up
from remap.types import AddressRange, Location, LocationKind, PointerInfo

_ALIGNMENT = 256


class PlainRegion(Region):
    """One plain allocation."""

    __slots__ = ("device", "slab")

    plain = True

    def __init__(self, base: int, size: int, identity: int, born: int, slab: Stretch) -> None:
        super().__init__(base, size, identity, born)
        self.slab = slab
        self.device = slab.location.index
        self.readers = self.writers = 1 << self.device


class PlainMemory:
    """The plain allocations of all devices."""

    def __init__(self, machine: Machine, stretches: Stretches, opaque: OpaqueWork) -> None:
        self._machine = machine
        self._stretches = stretches
        self._opaque = opaque
        self._slabs: list[list[Stretch]] = [[] for _ in range(machine.options.devices)]
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
                location = Location(LocationKind.DEVICE, device)
                slab = self._stretches.map(
                    call, location, round_up(rounded, self._machine.options.granularity)
                )
                self._slabs[device].append(slab)
                base = slab.take(rounded)
            identity = next(self._machine.handles)
            self.regions.insert(PlainRegion(base, size, identity, self._machine.tick, slab))
        return base

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
            self._slabs[found.device].remove(slab)
            self._stretches.unmap(slab)

    def close_device(self, device: int) -> None:
        """Free everything on a device whose context goes away."""
        with self._machine.lock:
            for region in [region for region in self.regions if region.device == device]:
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
            return PointerInfo(found.base, found.end - found.base, found.identity, found.device)
