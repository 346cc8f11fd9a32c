"""The optional powers of the host driver, each call given to the part that it belongs to."""

from __future__ import annotations

from collections.abc import Callable

from remap.drivers.host.callbacks import HostFunctions
from remap.drivers.host.capture import Captures
from remap.drivers.host.devices import Devices
from remap.drivers.host.events import Events
from remap.drivers.host.graph_launches import Executables
from remap.drivers.host.graphs import Graphs
from remap.drivers.host.guard import Guard
from remap.drivers.host.multicast import Teams
from remap.drivers.host.pools import Pools
from remap.drivers.host.reachable import ReachableMemory
from remap.drivers.multicast_power import MulticastProperties
from remap.drivers.powers import ManagedAdvice, PoolFigures
from remap.types import Granularity, Location


class OptionalCalls:
    """Pinned, pool and managed memory, host functions, shared events, multicast objects."""

    _guard: Guard
    _captures: Captures
    _executables: Executables
    _graphs: Graphs
    _devices: Devices
    _events: Events
    _pools: Pools
    _reachable: ReachableMemory
    _teams: Teams
    _host_functions: HostFunctions

    # -- pinned host memory --

    def allocate_pinned(self, size: int) -> int:
        call = "cuMemHostAlloc"
        self._guard.check(call)
        return self._reachable.allocate(call, size)

    def free_pinned(self, address: int) -> None:
        call = "cuMemFreeHost"
        self._guard.check(call)
        self._reachable.free(call, address)

    def register_pinned(self, address: int, size: int) -> None:
        self._guard.check("cuMemHostRegister")
        self._reachable.register(address, size)

    def unregister_pinned(self, address: int) -> None:
        self._guard.check("cuMemHostUnregister")
        self._reachable.unregister(address)

    def device_pointer(self, address: int) -> int:
        self._guard.check("cuMemHostGetDevicePointer")
        return self._reachable.device_pointer(address)

    # -- pools --

    def pool_allocate(self, size: int, stream: int) -> int:
        call = "cuMemAllocAsync"
        self._guard.check(call)
        self._devices.require(call, "memory_pools")
        if self._captures.active and (address := self._captures.allocate(call, size, stream)):
            return address
        return self._pools.allocate(size, stream)

    def pool_free(self, address: int, stream: int) -> None:
        call = "cuMemFreeAsync"
        self._guard.check(call)
        if self._captures.active and self._captures.queue(
            call, stream, lambda graph, after: self._graphs.add_free(graph, after, address)
        ):
            return
        if not self._executables.free(call, address, stream):  # what a launch of a graph left allocated
            self._pools.free(address, stream)

    def pool_figures(self, device: int) -> PoolFigures:
        self._check_pool("cuMemPoolGetAttribute", device)
        return self._pools.figures(device)

    def pool_reset_high(self, device: int) -> None:
        self._check_pool("cuMemPoolSetAttribute", device)
        self._pools.reset_high(device)

    def pool_trim(self, device: int, keep: int) -> None:
        self._check_pool("cuMemPoolTrimTo", device)
        self._pools.trim(device, keep)

    def pool_retain(self, device: int, size: int) -> None:
        self._check_pool("cuMemPoolSetAttribute", device)
        self._pools.retain(device, size)

    def _check_pool(self, call: str, device: int) -> None:
        self._guard.check(call)
        self._devices.check(call, device)
        self._devices.require(call, "memory_pools")

    # -- managed memory --

    def allocate_managed(self, size: int) -> int:
        call = "cuMemAllocManaged"
        self._guard.check(call)
        self._devices.require(call, "managed_memory")
        return self._reachable.allocate(call, size, managed=True)

    def free_managed(self, address: int) -> None:
        call = "cuMemFree"
        self._guard.check(call)
        self._reachable.free(call, address, managed=True)

    def prefetch(self, address: int, size: int, location: Location, stream: int) -> None:
        self._guard.check("cuMemPrefetchAsync")
        self._reachable.prefetch(address, size, location, stream)

    def advise_managed(
        self, address: int, size: int, advice: ManagedAdvice, location: Location, on: bool
    ) -> None:
        self._guard.check("cuMemAdvise")
        self._reachable.advise(address, size, advice, location, on)

    def prefetched_to(self, address: int, size: int) -> Location | None:
        self._guard.check("cuMemRangeGetAttribute")
        return self._reachable.prefetched_to(address, size)

    # -- host functions and shared events --

    def launch_host_function(self, stream: int, function: Callable[[], None]) -> None:
        call = "cuLaunchHostFunc"
        self._guard.check(call)
        if self._captures.active and self._captures.queue(
            call, stream, lambda graph, after: self._graphs.add_host(graph, after, function)
        ):
            return
        self._host_functions.launch(stream, function)

    def create_shared_event(self) -> int:
        self._guard.check("cuEventCreate")
        return self._events.create_shared()

    def export_event(self, event: int) -> bytes:
        self._guard.check("cuIpcGetEventHandle")
        return self._events.export(event)

    def import_event(self, shareable: bytes) -> int:
        self._guard.check("cuIpcOpenEventHandle")
        return self._events.open_handle(shareable)

    # -- multicast objects --

    def multicast_granularity(self, properties: MulticastProperties) -> Granularity:
        self._guard.check_open("cuMulticastGetGranularity")
        return self._teams.granularity(properties)

    def create_multicast(self, properties: MulticastProperties) -> int:
        self._guard.check_open("cuMulticastCreate")
        return self._teams.create(properties)

    def add_multicast_device(self, handle: int, device: int) -> None:
        self._guard.check_open("cuMulticastAddDevice")
        self._teams.add(handle, device)

    def bind_multicast(self, handle: int, offset: int, memory: int, memory_offset: int, size: int) -> None:
        self._guard.check_open("cuMulticastBindMem")
        self._teams.bind(handle, offset, memory, memory_offset, size)

    def unbind_multicast(self, handle: int, device: int, offset: int, size: int) -> None:
        self._guard.check_open("cuMulticastUnbind")
        self._teams.unbind(handle, device, offset, size)
