"""Physical allocations: what they are made of, what they may be, and what they cost (T1, T2, T8)."""

from __future__ import annotations

from collections.abc import Callable

from remap.drivers.host.backing import Extent, Files, SharedFile, give_pages
from remap.drivers.host.devices import Devices
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import invalid, system_error
from remap.errors import OutOfMemoryError
from remap.sizes import format_size
from remap.types import (
    AllocationProperties,
    Granularity,
    HandleType,
    Location,
    LocationKind,
    MemoryInfo,
)


class Allocation:
    """Physical memory: an extent of an arena, or a shareable file of its own.

    `allowed` are the locations (bits) that may be granted access to it.
    """

    __slots__ = (
        "allowed",
        "buried",
        "extent",
        "file",
        "handle",
        "mappings",
        "properties",
        "references",
        "size",
        "starts",
    )

    def __init__(
        self,
        handle: int,
        size: int,
        properties: AllocationProperties,
        extent: Extent,
        allowed: int,
        file: SharedFile | None = None,
    ) -> None:
        self.handle = handle
        self.size = size
        self.properties = properties
        self.extent = extent
        self.file = file
        self.allowed = allowed
        self.starts = (extent.fd << 64) + extent.offset
        self.references = 1
        self.mappings = 0
        # What is done at its end, for what is no memory but goes by a handle of memory.
        self.buried: Callable[[Allocation], None] | None = None


class Allocations:
    """All physical allocations of a driver by handle, and the calls on them."""

    def __init__(self, machine: Machine, devices: Devices, files: Files) -> None:
        self._machine = machine
        self._devices = devices
        self._files = files
        self._granule = machine.options.granularity
        self.by_handle: dict[int, Allocation] = {}
        # What nobody can find any more, and `bury` has still to give back: an interrupted call leaves it to the next.
        self.dead: list[Allocation] = []
        homes = [Location(LocationKind.DEVICE, device) for device in range(machine.options.devices)]
        self._allowed = [self._reached_by(home) for home in homes]

    # -- the calls --

    def granularity(self, properties: AllocationProperties) -> Granularity:
        """Return the granularities, which are the same for every location (T1)."""
        self._check_properties("cuMemGetAllocationGranularity", properties)
        return Granularity(self._granule, self._granule)

    def create(self, size: int, properties: AllocationProperties) -> int:
        """Take memory from the location's budget and give it a handle (T2)."""
        call = "cuMemCreate"
        if self.dead:
            self.bury()
        self._check_properties(call, properties)
        if size <= 0 or size % self._granule:
            raise invalid(call, f"size {size}", self.multiple)
        location = properties.location
        found = properties
        compressed = properties.compressible and self._machine.options.compression
        if properties.compressible != compressed or location.kind is LocationKind.HOST:
            # What was asked of the host at large is read back as the node that the driver picked.
            place = Location(LocationKind.HOST_NUMA) if location.kind is LocationKind.HOST else location
            found = AllocationProperties(place, properties.handle_types, compressed, properties.rdma)
        made: Allocation | None = None
        try:
            with self._machine.lock:
                allowed, handle = self.allowed(location), next(self._machine.handles)
                extent, file = self._memory_file(call, size, properties)
                try:
                    made = self.by_handle[handle] = Allocation(handle, size, found, extent, allowed, file)
                finally:
                    if made is None:
                        self._take_back(location, size, file)
            return handle
        except BaseException:  # an interrupt: nobody has heard of the handle
            if made is not None:
                self.release(made.handle)
            raise

    def _take_back(self, location: Location, size: int, file: SharedFile | None) -> None:
        if file is None:
            self._machine.budget(location).give(size)
        elif self._files.leave(file):
            self._give(file)

    def _memory_file(
        self, call: str, size: int, properties: AllocationProperties
    ) -> tuple[Extent, SharedFile | None]:
        """Take the budget, and then the file's bytes: an absurd size must not use up an arena."""
        location = properties.location
        try:
            if not properties.handle_types:
                self.take(call, location, size)
                try:
                    return self._files.arena(location).allocate(size), None
                except BaseException:
                    self._machine.budget(location).give(size)
                    raise
            file = self._files.create_sealed(location, size)
        except OSError as error:
            raise system_error(call, error) from error
        try:
            self.take(call, location, size, file.inode)
        except BaseException:
            self._files.leave(file)
            raise
        return Extent(file.fd, 0), file

    @property
    def multiple(self) -> str:
        """The rule of sizes, for messages."""
        return f"sizes are positive multiples of the granularity, {format_size(self._granule)}"

    def _check_properties(self, call: str, properties: AllocationProperties) -> None:
        location = properties.location
        if not self._machine.bit(location):
            if location.is_device:
                self._devices.check(call, location.index)
            nodes = self._machine.options.numa_nodes
            raise invalid(call, str(location), f"the NUMA nodes are numbered 0 to {nodes - 1}")
        if location.kind is LocationKind.DEVICE:
            self._devices.require(call, "vmm")
        else:
            self._devices.require(call, "host_vmm" if location.kind is LocationKind.HOST else "host_numa_vmm")
        for kind in properties.handle_types:
            if kind is HandleType.WIN32:
                raise invalid(call, str(kind), self._devices.reason("win32"))
            if location.kind is LocationKind.HOST:
                rule = "memory at the location HOST has no shareable handles"
                raise invalid(call, f"{kind} at {location}", rule, "Use remap.HostNuma(node), or a device")
            self._devices.require(call, kind.value)
        if properties.rdma:
            self._devices.require(call, "rdma")

    # -- for the other parts of the driver --

    def info(self, location: Location) -> MemoryInfo:
        """Return what is free and what there is at a location."""
        if self.dead:
            self.bury()
        with self._machine.lock:
            self.reclaim()
            return self._machine.budget(location).info()

    def take(self, call: str, location: Location, size: int, inode: int = 0) -> None:
        """Take from a location's budget, after those who have left. The caller holds the table lock."""
        budget = self._machine.budget(location)
        try:
            budget.take(call, size, inode)
        except OutOfMemoryError:
            self.reclaim()
            budget.take(call, size, inode)

    def reclaim(self) -> None:
        """Give back the budget of exported memory that nobody holds any more. The caller holds the table lock."""
        for file in self._files.sweep():
            self._give(file)

    def _give(self, file: SharedFile) -> None:
        budget = self._machine.budget(file.location)
        if file.imported:
            budget.let_go(file.size, file.inode)
        else:
            budget.give(file.size, file.inode)

    def find(self, call: str, handle: int) -> Allocation:
        """Return a live allocation by its handle."""
        found = self.by_handle.get(handle)
        if found is None or not found.references:
            raise invalid(call, f"handle {handle}", "it is not the handle of a live allocation")
        return found

    def release(self, handle: int) -> None:
        """Drop a reference; the memory stays while it is mapped (T8)."""
        with self._machine.lock:
            found = self.find("cuMemRelease", handle)
            # From here to the end of the block nothing is called, so that no interrupt comes between the tables.
            found.references -= 1
            if not found.references and not found.mappings:
                del self.by_handle[handle]
                self.dead[0:0] = (found,)
        if self.dead:
            self.bury()

    def drop_mapping(self, allocation: Allocation) -> None:
        """Drop a reason to stay; `bury` follows. The caller holds the lock. Calls nothing, as in `release`."""
        allocation.mappings -= 1
        if not allocation.mappings and not allocation.references:
            del self.by_handle[allocation.handle]
            self.dead[0:0] = (allocation,)

    def bury(self) -> None:
        """Give back what is left of the allocations that nobody can find any more."""
        dead: Allocation | None = None
        try:
            while True:
                with self._machine.lock:
                    if not self.dead:
                        return
                    dead = self.dead[-1]
                    del self.dead[-1]
                if dead.buried is not None:
                    dead.buried(dead)
                elif dead.file is None:
                    # Outside the lock: a GiB of pages takes long.
                    give_pages(dead.extent, dead.size)
                    with self._machine.lock:
                        self._machine.budget(dead.properties.location).give(dead.size)
                        dead = None
                else:
                    with self._machine.lock:
                        if self._files.leave(dead.file):
                            self._give(dead.file)
                dead = None
        except BaseException:  # the next call goes on with it
            if dead is not None:
                self.dead[0:0] = (dead,)
            raise

    def properties_of(self, handle: int) -> AllocationProperties:
        """Return what an allocation was found to be."""
        with self._machine.lock:
            return self.find("cuMemGetAllocationPropertiesFromHandle", handle).properties

    def allowed(self, home: Location) -> int:
        """Return the locations (bits) that may be granted access to memory at `home`."""
        return self._allowed[home.index] if home.is_device else self._machine.cpu | self._machine.all_devices

    def _reached_by(self, home: Location) -> int:
        devices = range(self._machine.options.devices)
        reaching = sum(1 << device for device in devices if self._devices.reaches(device, home))
        return reaching | self._machine.cpu if self._machine.options.coherent else reaching
