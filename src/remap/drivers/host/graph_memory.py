"""Memory that graphs allocate: which of it lives, where its bytes are, and how much there is of it (T15, T16).

An allocation that its own graph frees lives within a run: it appears when the run reaches its node. One that the graph
leaves allocated lives from the launch until something frees it, and can be copied and handed to kernels like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remap.drivers.graph_powers import GraphFigures, HighMark
from remap.drivers.host.addresses import AddressMap
from remap.drivers.host.allocations import Allocations
from remap.drivers.host.backing import Files
from remap.drivers.host.devices import Devices
from remap.drivers.host.graph_heap import Allocation, Heap
from remap.drivers.host.graph_pool import GraphPool, Page, Placing
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import in_use, invalid
from remap.drivers.host.space import AddressSpace
from remap.drivers.host.streams import Need
from remap.drivers.host.work import Clock, Mark, Point, Region, Work
from remap.errors import CudaResult, DriverError, driver_error
from remap.sizes import format_size
from remap.types import AddressRange, Location, LocationKind, PointerInfo


class _Life:
    """From a launch that left an allocation to what freed it; `point` is where that launch stands."""

    __slots__ = ("allocated", "freed", "point")

    def __init__(self, allocated: Mark, point: Point) -> None:
        self.allocated = allocated
        self.point = point
        self.freed: Mark | None = None


class GraphRegion(Region):
    """One allocation of a graph. One that launches leave has a life after the other; others live within a run."""

    __slots__ = ("allocation", "device", "lives", "point")

    plain = True  # as plain memory: it ends where it ends, and every device copies it

    def __init__(self, allocation: Allocation, identity: int, born: int, point: Point | None = None) -> None:
        super().__init__(allocation.address, allocation.size, identity, born)
        self.allocation = allocation
        self.point = point  # where the run stands that it lives in, if it does
        self.device = allocation.heap.device
        self.readers = self.writers = allocation.readers
        self.lives: list[_Life] = []

    @property
    def alive(self) -> bool:
        """Whether what was launched so far leaves it allocated."""
        return not self.lives or self.lives[-1].freed is None

    def refusal(self, point: Point) -> str:
        """Return why work at a point in the order of the streams may not use it, if so."""
        for life in reversed(self.lives):
            if life.point is not point and not point.after(life.allocated):
                continue
            if life.freed is not None and not point.before(life.freed):
                return f"the graph memory at {self.base:#x} was freed by {life.freed}"
            return ""
        return f"no launch that this work waits for has allocated {self.base:#x}" if self.lives else ""


class GraphRegions:
    """The allocations that live within runs, and those that launches have left, by address.

    Within each of the two none lies on another. But one that a launch leaves may have the address of one that the same
    run has used and freed before, so that only the order of the work tells which of them is meant.
    """

    def __init__(self) -> None:
        self.running: AddressMap[GraphRegion] = AddressMap()
        self.left: AddressMap[GraphRegion] = AddressMap()

    def __len__(self) -> int:
        return len(self.running) + len(self.left)

    def at(self, address: int, point: Point | None) -> GraphRegion | None:
        """Return the allocation that holds an address, as work at a point in the order of the streams sees it."""
        found = self.running.at(address)
        return found if found is not None and found.point is point else self.left.at(address)

    def overlaps(self, start: int, end: int) -> bool:
        """Tell whether any allocation shares an address with a range."""
        return self.running.overlaps(start, end) or self.left.overlaps(start, end)

    def overlapping(self, start: int, end: int) -> list[GraphRegion]:
        """Return every allocation that shares an address with a range."""
        return [*self.running.overlapping(start, end), *self.left.overlapping(start, end)]


class GraphMemory:
    """The graph memory of all devices. The caller holds the table lock, unless a method says otherwise."""

    def __init__(
        self,
        machine: Machine,
        devices: Devices,
        allocations: Allocations,
        space: AddressSpace,
        files: Files,
    ) -> None:
        self._machine = machine
        self._devices = devices
        self._space = space
        self._pools = [
            GraphPool(machine, allocations, files, device) for device in range(machine.options.devices)
        ]
        self._heaps: set[Heap] = set()
        # Users of addresses that go once some work has ended; executables among them leave their memory then.
        self._leaving: list[tuple[Need | None, Heap, bool]] = []
        self.regions = GraphRegions()

    # -- addresses --

    def new_heap(self, device: int) -> Heap:
        """Return room for the addresses that one graph will have on a device."""
        heap = Heap(self._space, device, self._machine.options.granularity)
        self._heaps.add(heap)
        return heap

    def allocate(self, heap: Heap, before: int, size: int, accessing: Iterable[int]) -> Allocation:
        """Give an allocation its address; its node has the ancestors `before` (bits)."""
        call = "cuGraphAddMemAllocNode"
        if size <= 0:
            raise invalid(call, f"an allocation of {size} bytes", "sizes are positive")
        most = self._machine.budget(Location(LocationKind.DEVICE, heap.device)).info().total
        if size > most:
            raise driver_error(
                call,
                CudaResult.OUT_OF_MEMORY,
                asked=f"{format_size(size)} of graph memory on device {heap.device}",
                rule=f"the device has {format_size(most)}",
                next_step="Allocate less, or open the host driver with more memory",
            )
        readers = 1 << heap.device
        for other in accessing:
            if other != heap.device and not self._devices.can_access_peer(other, heap.device):
                rule = f"device {other} does not reach the memory of device {heap.device}"
                raise invalid(call, f"access for device {other}", rule)
            readers |= 1 << other
        return heap.allocate(before, size, readers)

    # -- launches --

    def bind(
        self,
        call: str,
        heaps: Iterable[tuple[Heap, Sequence[Page]]],
        clock: Clock,
        renewed: Sequence[GraphRegion],
    ) -> tuple[list[Placing], list[Placing]]:
        """Find memory for a launch that comes after `clock`, and that allocates the `renewed` ones anew.

        Return what is to be mapped now, and what when the launch runs. Raises OUT_OF_MEMORY.
        """
        self.sweep()
        now: list[Placing] = []
        later: list[Placing] = []
        self._count_holders(renewed, -1)
        try:
            for heap, pages in heaps:
                first, second = self._pools[heap.device].bind(call, pages, clock)
                now += first
                later += second
        except DriverError:
            self._count_holders(renewed, 1)
            raise
        # Those pages may have other blocks now. `let_go` counts down again.
        self._count_holders(renewed, 1)
        return now, later

    def _count_holders(self, regions: Sequence[GraphRegion], step: int) -> None:
        for region in regions:
            for page in region.allocation.pages:
                if page.block is not None:
                    page.block.held += step

    def lives(self, allocation: Allocation, point: Point, begins: bool) -> None:
        """Begin or end the life of an allocation within the run at `point`. Takes the lock."""
        running = self.regions.running
        with self._machine.lock:
            if begins:
                running.insert(self._region(allocation, point))
                return
            region = running.starting_at(allocation.address)
            if region is not None:
                running.remove(region)

    def hold(self, allocation: Allocation, work: Work, point: Point) -> None:
        """Let an allocation live that a launch leaves allocated: nobody else gets its memory."""
        region = self.regions.left.starting_at(allocation.address)
        if region is None:
            region = self._region(allocation)
            self.regions.left.insert(region)
        mark = Mark(work.stream, work.number, dict(point.clock), str(work))
        region.lives = [life for life in region.lives if life.freed is None or not life.freed.settled]
        region.lives.append(_Life(mark, point))
        self._count_holders([region], 1)
        allocation.heap.users += 1

    def _region(self, allocation: Allocation, point: Point | None = None) -> GraphRegion:
        return GraphRegion(allocation, next(self._machine.handles), self._machine.tick, point)

    def let_go(self, region: GraphRegion, freed: Mark | None) -> None:
        """End the life of an allocation that a launch left; None stands for the host, which has waited."""
        life = region.lives[-1]
        life.freed = freed or Mark(life.allocated.stream, 0, {}, "the host")
        last = None if freed is None else (freed.stream, freed.number)
        self._count_holders([region], -1)
        for page in region.allocation.pages:
            if page.block is not None:
                page.block.last = last or page.block.last
        self._leaving.append((last, region.allocation.heap, False))
        self.sweep()

    def live(self, call: str, address: int) -> GraphRegion:
        """Return the allocation that begins at an address and that a launch has left allocated."""
        region = self.regions.left.starting_at(address)
        if region is None or not region.lives or not region.alive:
            rule = "no launch of a graph has left an allocation there"
            raise invalid(call, f"address {address:#x}", rule)
        return region

    def check_ordered(self, region: GraphRegion, clock: Clock) -> None:
        """Raise `InUseError` if work that does not come before `clock` may still use the memory."""
        for log in (region.writes, region.reads):
            for work in (log or {}).values():
                if not work.ordered and work.number > clock.get(work.stream, 0):
                    raise in_use(f"free the graph memory at {region.base:#x}", work)

    def leave(self, heap: Heap, last: Need | None) -> None:
        """Let an executable go from its addresses and its memory, once its last run has ended."""
        self._leaving.append((last, heap, True))
        self.sweep()

    def sweep(self) -> None:
        """Finish what had to wait for work that may have ended by now."""
        waiting: list[tuple[Need | None, Heap, bool]] = []
        for last, heap, whole in self._leaving:
            if last is not None and last[0].completed < last[1]:
                waiting.append((last, heap, whole))
                continue
            if whole:
                free = [page for page in heap.pages if page.block is not None and not page.block.held]
                self._pools[heap.device].unbind(free)
            self._drop(heap)
        self._leaving = waiting

    def drop_heap(self, heap: Heap) -> None:
        """Let a graph go from its addresses."""
        self._leaving.append((None, heap, False))
        self.sweep()

    def _drop(self, heap: Heap) -> None:
        heap.users -= 1
        if heap.users:
            return
        self._pools[heap.device].unbind(heap.pages)
        for reservation in heap.reservations:
            for region in self.regions.left.overlapping(reservation.base, reservation.end):
                self.regions.left.remove(region)
            self._space.free(reservation, listed=False)
        self._heaps.discard(heap)

    # -- figures --

    def figures(self, device: int) -> GraphFigures:
        """Return the graph memory of a device. Takes the lock."""
        self._devices.check("cuDeviceGetGraphMemAttribute", device)
        with self._machine.lock:
            self.sweep()
            return self._pools[device].figures()

    def set_high(self, device: int, mark: HighMark, value: int) -> None:
        """Reset a high mark. Takes the lock."""
        self._devices.check("cuDeviceSetGraphMemAttribute", device)
        with self._machine.lock:
            self._pools[device].set_high(mark, value)

    def trim(self, device: int) -> None:
        """Give back what nothing uses. Takes the lock."""
        self._devices.check("cuDeviceGraphMemTrim", device)
        with self._machine.lock:
            self.sweep()
            extents = self._pools[device].trim()
        self._pools[device].give_back(extents)

    def address_range(self, address: int) -> AddressRange | None:
        """Return the live allocation that holds an address. Takes the lock."""
        with self._machine.lock:
            found = self.regions.left.at(address)
            return (
                None if found is None or not found.alive else AddressRange(found.base, found.end - found.base)
            )

    def pointer_info(self, address: int) -> PointerInfo | None:
        """Return what is known of an address. Takes the lock."""
        with self._machine.lock:
            found = self.regions.left.at(address)
            if found is None or not found.alive:
                return None
            return PointerInfo(found.base, found.end - found.base, found.identity, found.device)

    def shut_down(self) -> None:
        """Give the addresses back; the files are closed by their owner. Takes the lock."""
        with self._machine.lock:
            for heap in list(self._heaps):
                for reservation in heap.reservations:
                    self._space.free(reservation, listed=False)
            self._heaps.clear()
