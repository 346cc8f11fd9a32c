"""Reservations, mappings and access rights, by the rules of CUDA (T3 … T8, T11, T12)."""

from __future__ import annotations

from remap.drivers.host import linux
from remap.drivers.host.allocations import Allocation, Allocations
from remap.drivers.host.devices import Devices
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import in_use, invalid, span
from remap.drivers.host.space import UNMAPPED, AddressSpace, Mapping
from remap.drivers.host.team import MulticastMapping, Team
from remap.drivers.host.work import OpaqueWork
from remap.errors import CudaResult, driver_error
from remap.sizes import counted, format_size, is_power_of_two
from remap.types import (
    Access,
    AddressRange,
    Grants,
    Location,
    PointerInfo,
)

_NONE, _READ_WRITE = Access.NONE, Access.READ_WRITE


class Memory:
    """The calls on memory objects, which need no context and wait for nothing."""

    def __init__(
        self, machine: Machine, devices: Devices, allocations: Allocations, opaque: OpaqueWork
    ) -> None:
        self._machine = machine
        self._devices = devices
        self._allocations = allocations
        self._opaque = opaque
        self._granule = machine.options.granularity
        self.space = AddressSpace(self._granule)

    # -- reservations --

    def reserve(self, size: int, alignment: int, hint: int) -> int:
        """Reserve an address range (T3)."""
        call = "cuMemAddressReserve"
        self._devices.require(call, "vmm")
        if size <= 0 or size % self._granule:
            raise invalid(call, f"size {size}", self._allocations.multiple)
        if alignment and not is_power_of_two(alignment):
            raise invalid(
                call, f"alignment {alignment}", "an alignment is a power of two, or 0 for the default"
            )
        if hint < 0 or hint % self._granule:
            raise invalid(call, f"hint {hint:#x}", f"it is no multiple of {format_size(self._granule)}")
        with self._machine.lock:
            return self.space.reserve(size, alignment, hint).base

    def free_range(self, address: int, size: int) -> None:
        """Free exactly one reservation (T4)."""
        call = "cuMemAddressFree"
        with self._machine.lock:
            found = self.space.reservations.starting_at(address)
            if found is None or found.end != address + size:
                rule = "it is not exactly one reservation"
                raise invalid(call, span(address, size), rule)
            inside = self.space.mappings.overlapping(address, found.end)
            if inside:
                rule = f"{counted(len(inside), 'mapping')} inside, the first at {inside[0].base:#x}"
                raise invalid(call, span(address, size), rule, "Unmap them first")
            self.space.free(found)

    # -- mappings --

    def map(self, address: int, size: int, handle: int, offset: int) -> None:
        """Map a whole allocation; nobody has access to the mapping yet (T5)."""
        call = "cuMemMap"
        space = self.space
        with self._machine.lock:
            allocation = self._allocations.find(call, handle)
            if offset or size != allocation.size:
                raise driver_error(
                    call,
                    CudaResult.NOT_SUPPORTED,
                    asked=f"{size} bytes from offset {offset}",
                    rule=f"only a whole allocation can be mapped: {allocation.size} bytes from offset 0",
                )
            if address % self._granule:
                raise invalid(
                    call, f"address {address:#x}", f"it is no multiple of {format_size(self._granule)}"
                )
            end = address + size
            if not space.covers(address, end):
                raise invalid(call, span(address, size), "a part of it is not reserved")
            if space.mappings.overlaps(address, end):
                other = space.mappings.overlapping(address, end)[0]
                rule = f"the mapping at {other.base:#x} is in the way"
                raise invalid(call, span(address, size), rule, "Unmap it first")
            identity = next(self._machine.handles)
            kind = MulticastMapping if isinstance(allocation, Team) else Mapping
            space.insert(kind(address, allocation, identity, self._machine.tick))
            allocation.mappings += 1

    def unmap(self, address: int, size: int) -> None:
        """Unmap the whole mappings in a range (T7), or raise `InUseError` naming the work that may use one."""
        call = "cuMemUnmap"
        if size <= 0 or (address | size) % self._granule:
            raise invalid(call, span(address, size), self._allocations.multiple)
        space = self.space
        with self._machine.lock:
            if not space.covers(address, address + size):
                raise invalid(call, span(address, size), "a part of it is not reserved")
            found = self._whole(call, address, size)
            for mapping in found:
                if mapping.reads or mapping.writes or self._opaque.latest:
                    self._check_unused(mapping, self._machine.all_devices, "unmap")
                mapping.wanted = UNMAPPED
            # Without rights until the tables have followed the kernel: an interrupt in between leaves what is no longer
            # mapped in them, and whoever used it would crash.
            rights = [(mapping.readers, mapping.writers) for mapping in found]
            for mapping in found:
                mapping.readers = mapping.writers = 0
            try:
                space.change(call, found)
            except BaseException:
                for mapping, (readers, writers) in zip(found, rights, strict=True):
                    mapping.readers, mapping.writers = readers, writers
                raise
            allocations = self._allocations
            for mapping in found:
                space.remove(mapping)
                # Written out, as in `drop_mapping`: an interrupt comes where a function begins.
                allocation = mapping.allocation
                allocation.mappings -= 1
                if not allocation.mappings and not allocation.references:
                    del allocations.by_handle[allocation.handle]
                    allocations.dead[0:0] = (allocation,)
        if allocations.dead:
            allocations.bury()

    def _whole(self, call: str, address: int, size: int) -> list[Mapping]:
        end = address + size
        one = self.space.mappings.starting_at(address)
        if one is not None and one.end == end:
            return [one]
        found = self.space.mappings.overlapping(address, end)
        if found and (found[0].base < address or found[-1].end > end):
            cut = found[0] if found[0].base < address else found[-1]
            rule = (
                f"it takes a part of the mapping at {span(cut.base, cut.end - cut.base)}; mappings are whole"
            )
            raise invalid(call, span(address, size), rule)
        return found

    def _check_unused(self, mapping: Mapping, devices: int, what: str, reads: bool = True) -> None:
        work = mapping.unordered(devices, reads) or self._opaque.unordered(mapping, devices)
        if work is not None:
            raise in_use(f"{what} {span(mapping.base, mapping.end - mapping.base)}", work)

    def set_access(self, address: int, size: int, grants: Grants) -> None:
        """Set the rights of locations on whole mappings (T6); others keep theirs."""
        call = "cuMemSetAccess"
        if not grants:
            raise invalid(call, "no locations", "an access call names at least one")
        machine = self._machine
        keep, read, write = -1, 0, 0
        for location, access in grants:
            bit = machine.bit(location)
            if not bit:
                raise invalid(call, f"access for {location}", "this machine has no such location")
            keep &= ~bit
            read &= ~bit
            write &= ~bit
            if access is not _NONE:
                read |= bit
                if access is _READ_WRITE:
                    write |= bit
        with machine.lock:
            found = self._whole(call, address, size)
            if not found or sum([mapping.end - mapping.base for mapping in found]) != size:
                raise invalid(call, span(address, size), "a part of it is not mapped")
            for mapping in found:
                if read & ~mapping.allocation.allowed:
                    self._refuse_grant(call, mapping.allocation, read)
                readers, writers = mapping.readers & keep | read, mapping.writers & keep | write
                if mapping.readers & ~readers or mapping.writers & ~writers:
                    self._check_unused(mapping, mapping.readers & ~readers, "take access from")
                    self._check_unused(
                        mapping, mapping.writers & ~writers, "take write access from", reads=False
                    )
                # Threads of this process act for every location, so the CPU gets the union of all rights. What nobody
                # may use and the kernel does not have yet can stay out of it.
                if readers and not mapping.multicast:
                    mapping.wanted = linux.PROT_READ_WRITE if writers else linux.PROT_READ
                else:
                    mapping.wanted = min(mapping.protection, linux.PROT_NONE)
            self.space.change(call, found)
            opaque = self._opaque.latest
            for mapping in found:
                readers = mapping.readers & keep | read
                if opaque and readers & ~mapping.readers:
                    self._note_grant(mapping, readers & ~mapping.readers)
                mapping.readers, mapping.writers = readers, mapping.writers & keep | write

    def _note_grant(self, mapping: Mapping, gained: int) -> None:
        if mapping.granted is None:
            mapping.granted = {}
        for device in range(self._machine.options.devices):
            if gained >> device & 1:
                mapping.granted[device] = self._machine.tick

    def _refuse_grant(self, call: str, allocation: Allocation, granted: int) -> None:
        if isinstance(allocation, Team):
            rule = "only devices of its team that this process added can use a multicast object"
            raise invalid(call, "access to a multicast object", rule)
        home = allocation.properties.location
        if granted & self._machine.cpu & ~allocation.allowed:
            raise driver_error(
                call,
                CudaResult.NOT_SUPPORTED,
                asked=f"access for the host to memory on {home}",
                rule="the CPU cannot reach memory on a device",
                next_step="Place the memory on the host",
            )
        rule = f"not every device that is named reaches {home}: they are no peers"
        raise invalid(call, f"access to memory on {home}", rule, "Ask can_access_peer first")

    def get_access(self, address: int, location: Location) -> Access:
        """Return the right of a location at an address."""
        call = "cuMemGetAccess"
        bit = self._machine.bit(location)
        if not bit:
            if location.is_device:
                self._devices.check(call, location.index)
            raise invalid(call, f"access of {location}", "this machine has no such location")
        with self._machine.lock:
            mapping = self._mapping(call, address)
            if mapping.writers & bit:
                return Access.READ_WRITE
            return Access.READ if mapping.readers & bit else Access.NONE

    def retain(self, address: int) -> int:
        """Add a reference to what is mapped at an address (T8)."""
        with self._machine.lock:
            allocation = self._mapping("cuMemRetainAllocationHandle", address).allocation
            allocation.references += 1
            return allocation.handle

    # -- looking up addresses --

    def _mapping(self, call: str, address: int) -> Mapping:
        found = self.space.mappings.at(address)
        if found is None:
            raise invalid(call, f"address {address:#x}", "nothing is mapped there")
        return found

    def address_range(self, address: int) -> AddressRange | None:
        """Return the mapping that holds an address, None where no device has access to any (T12)."""
        with self._machine.lock:
            found = self.space.mappings.at(address)
            if found is None or not found.readers & self._machine.all_devices:
                return None
            return AddressRange(found.base, found.end - found.base)

    def pointer_info(self, address: int) -> PointerInfo | None:
        """Return what is known of an address, None where nothing is mapped (T12)."""
        with self._machine.lock:
            found = self.space.mappings.at(address)
            around = self.space.around(address)
            if found is None or around is None:
                return None
            home = found.allocation.properties.location
            device = home.index if home.is_device else 0  # what CUDA says of memory on the host
            return PointerInfo(around.base, around.end - around.base, found.identity, device)

    def shut_down(self) -> None:
        """Unmap everything; the files are closed by their owner."""
        with self._machine.lock:
            self.space.close()
            self._allocations.by_handle.clear()
            self._allocations.dead.clear()
