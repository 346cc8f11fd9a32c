"""Host memory that every device reaches: pinned, registered, and managed memory.

To the host driver they are all memory of this process that the CPU may touch at any time, entered in the tables so
that copies and kernels may touch it, too. Managed memory also remembers where it was asked to be; nothing moves.
"""

from __future__ import annotations

from remap.drivers.host import linux
from remap.drivers.host.addresses import AddressMap
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import in_use, invalid, span
from remap.drivers.host.streams import Streams
from remap.drivers.host.stretches import Stretch, Stretches
from remap.drivers.host.work import OpaqueWork, Region
from remap.drivers.powers import ManagedAdvice
from remap.errors import DriverError, driver_error
from remap.sizes import LARGEST, round_up
from remap.types import AddressRange, Host, Location, PointerInfo


class Reachable(Region):
    """Host memory with an entry in the tables. `stretch` is what it is made of, None where it is the caller's own."""

    __slots__ = ("advice", "places", "stretch")

    plain = True

    def __init__(
        self, base: int, size: int, identity: int, born: int, users: int, stretch: Stretch | None
    ) -> None:
        super().__init__(base, size, identity, born)
        self.readers = self.writers = users
        self.stretch = stretch
        # For managed memory: (start, end, location) of what was prefetched, in order; and the advice that is set.
        self.places: list[tuple[int, int, Location]] | None = None
        self.advice: set[tuple[int, int, ManagedAdvice, Location]] = set()

    @property
    def managed(self) -> bool:
        """Whether this is managed memory."""
        return self.places is not None


class ReachableMemory:
    """All of it, and the calls on it."""

    def __init__(self, machine: Machine, streams: Streams, stretches: Stretches, opaque: OpaqueWork) -> None:
        self._machine = machine
        self._streams = streams
        self._stretches = stretches
        self._opaque = opaque
        self.regions: AddressMap[Reachable] = AddressMap()

    # -- pinned memory --

    def allocate(self, call: str, size: int, managed: bool = False) -> int:
        """Allocate whole pages of the host's budget."""
        if size <= 0:
            raise invalid(call, f"size {size}", "sizes are positive")
        with self._machine.lock:
            stretch = self._stretches.map(call, Host(), round_up(size, linux.PAGE))
            region = self._insert(stretch.base, size, stretch)
            region.places = [] if managed else None
            return region.base

    def free(self, call: str, address: int, managed: bool = False) -> None:
        """Free what `allocate` gave, after all work of all devices."""
        self.find_start(call, address, managed)
        for device in range(self._machine.options.devices):
            self._streams.synchronize_device(call, device)
        with self._machine.lock:
            region = self.find_start(call, address, managed)
            self._remove(region, "free")
            assert region.stretch is not None
            self._stretches.unmap(region.stretch)

    def register(self, address: int, size: int) -> None:
        """Enter memory of the caller's into the tables."""
        call = "cuMemHostRegister"
        if size <= 0 or not 0 < address <= LARGEST - size:
            raise invalid(call, span(address, size), "it must be host memory, of 1 byte or more")
        with self._machine.lock:
            if self.regions.overlaps(address, address + size):
                rule = "a part of it is registered, or pinned, already"
                name = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
                raise driver_error(call, 712, name, asked=span(address, size), rule=rule)
            self._insert(address, size, None)

    def unregister(self, address: int) -> None:
        """Take the caller's memory out of the tables; refused while work may use it."""
        with self._machine.lock:
            region = self.regions.starting_at(address)
            if region is None or region.stretch is not None:
                raise _not_registered("cuMemHostUnregister", address)
            self._remove(region, "unregister")

    def device_pointer(self, address: int) -> int:
        """Return the address by which devices reach pinned memory: the same one."""
        with self._machine.lock:
            region = self.regions.at(address)
        if region is None or region.managed:
            raise invalid("cuMemHostGetDevicePointer", f"address {address:#x}", "no pinned memory is there")
        return address

    # -- managed memory --

    def prefetch(self, address: int, size: int, location: Location, stream_handle: int) -> None:
        """Queue what would be a move, and remember the place."""
        call = "cuMemPrefetchAsync"
        stream = self._streams.find(call, stream_handle)
        with self._machine.lock:
            region = self._within(call, address, size, location)
            work = self._streams.submit(stream, "a prefetch", None)
            region.record(work, False)
            region.places = _with_place(region.places or [], address, address + size, location)

    def advise(self, address: int, size: int, advice: ManagedAdvice, location: Location, on: bool) -> None:
        """Remember advice."""
        with self._machine.lock:
            region = self._within("cuMemAdvise", address, size, location)
            entry = (address, size, advice, location)
            if on:
                region.advice.add(entry)
            else:
                region.advice.discard(entry)

    def prefetched_to(self, address: int, size: int) -> Location | None:
        """Return the one place that all of a range was prefetched to, None where there is none."""
        with self._machine.lock:
            region = self._within("cuMemRangeGetAttribute", address, size, Host())
            end = address + size
            inside = [one for one in region.places or () if one[0] < end and address < one[1]]
        covered = sum(min(end, stop) - max(address, start) for start, stop, _ in inside)
        places = {place for _, _, place in inside}
        return places.pop() if covered == size and len(places) == 1 else None

    # -- for the other parts of the driver --

    def find_start(self, call: str, address: int, managed: bool) -> Reachable:
        """Return the allocation that begins at an address, or raise INVALID_VALUE."""
        region = self.regions.starting_at(address)
        if region is None or region.stretch is None or region.managed is not managed:
            what = "managed" if managed else "pinned"
            raise invalid(call, f"address {address:#x}", f"no {what} allocation begins there")
        return region

    def owns_managed(self, address: int) -> bool:
        """Tell whether managed memory begins at an address."""
        region = self.regions.starting_at(address)
        return region is not None and region.managed

    def address_range(self, address: int) -> AddressRange | None:
        """Return the memory that holds an address."""
        with self._machine.lock:
            region = self.regions.at(address)
            return None if region is None else AddressRange(region.base, region.end - region.base)

    def pointer_info(self, address: int) -> PointerInfo | None:
        """Return what is known of an address."""
        with self._machine.lock:
            region = self.regions.at(address)
            if region is None:
                return None
            return PointerInfo(region.base, region.end - region.base, region.identity, 0)

    def _within(self, call: str, address: int, size: int, location: Location) -> Reachable:
        region = self.regions.at(address)
        if size <= 0 or region is None or not region.managed or address + size > region.end:
            raise invalid(call, span(address, size), "the range must lie within managed memory")
        if not self._machine.bit(location):
            raise driver_error(call, 101, asked=str(location), rule="there is no such place")
        return region

    def _insert(self, base: int, size: int, stretch: Stretch | None) -> Reachable:
        users = self._machine.all_devices | self._machine.cpu
        identity = next(self._machine.handles)
        region = Reachable(base, size, identity, self._machine.tick, users, stretch)
        self.regions.insert(region)
        return region

    def _remove(self, region: Reachable, verb: str) -> None:
        everyone = self._machine.all_devices
        work = region.unordered(everyone) or self._opaque.unordered(region, everyone)
        if work is not None:
            raise in_use(f"{verb} the host memory at {region.base:#x}", work)
        self.regions.remove(region)


def _not_registered(call: str, address: int) -> DriverError:
    name, rule = "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "no registered memory begins there"
    return driver_error(call, 713, name, asked=f"address {address:#x}", rule=rule)


def _with_place(
    places: list[tuple[int, int, Location]], start: int, end: int, location: Location
) -> list[tuple[int, int, Location]]:
    """Return the places with one range of them at another location."""
    kept: list[tuple[int, int, Location]] = []
    for first, last, place in places:
        if first < min(last, start):
            kept.append((first, min(last, start), place))
        if max(first, end) < last:
            kept.append((max(first, end), last, place))
    return sorted([*kept, (start, end, location)])
