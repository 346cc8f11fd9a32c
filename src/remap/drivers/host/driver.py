"""The host driver: CUDA's rules of memory, streams and contexts on a machine without a GPU."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from remap.drivers.host import linux
from remap.drivers.host.allocations import Allocations
from remap.drivers.host.backing import Files
from remap.drivers.host.callbacks import HostFunctions
from remap.drivers.host.capture import Captures
from remap.drivers.host.contexts import Contexts
from remap.drivers.host.copies import Copies, Spans
from remap.drivers.host.devices import Devices
from remap.drivers.host.events import Events
from remap.drivers.host.graph_access import GraphAccess
from remap.drivers.host.graph_calls import GraphCalls
from remap.drivers.host.graph_launches import Executables
from remap.drivers.host.graph_memory import GraphMemory
from remap.drivers.host.graphs import Graphs
from remap.drivers.host.launch import Launches
from remap.drivers.host.machine import Machine, Peers, check_options
from remap.drivers.host.memory import Memory
from remap.drivers.host.multicast import Teams
from remap.drivers.host.optional import OptionalCalls
from remap.drivers.host.plain import PlainMemory
from remap.drivers.host.pools import Pools
from remap.drivers.host.reachable import ReachableMemory
from remap.drivers.host.refusals import invalid
from remap.drivers.host.sharing import Sharing
from remap.drivers.host.streams import Streams
from remap.drivers.host.stretches import Stretches
from remap.drivers.host.work import OpaqueWork
from remap.drivers.host.work_calls import WorkCalls
from remap.drivers.protocol import LEGACY_STREAM
from remap.errors import CudaResult, driver_error
from remap.registers import Register
from remap.sizes import MiB, Size
from remap.types import (
    Access,
    AddressRange,
    AllocationProperties,
    Capability,
    DeviceProperties,
    Grants,
    Granularity,
    HandleType,
    Location,
    LocationKind,
    MemoryInfo,
    PointerInfo,
)


class HostDriver(WorkCalls, GraphCalls, OptionalCalls):
    """A driver whose devices are budgets of this machine's memory; implements `Driver` and every optional power.

    What the options mean is said at `remap.use`.

    With `REMAP_HOST_STATE=path` in the environment, the budgets are those of all processes that name the same path.

    The defaults fit a machine with 1 GiB of memory, as pages are only taken when they are written.

    Happens-before: unmapping, freeing and lowering access are refused with `InUseError` while work that uses the
    memory has not been waited for, whether it has finished by chance or not. Only waits and successful queries count;
    there is one host clock for all threads, as the ways in which they wait for each other cannot be seen from here.
    """

    lock: AbstractContextManager[Any]

    def __init__(
        self,
        *,
        devices: int = 2,
        memory: Size | Sequence[Size] = 512 * MiB,
        host_memory: Size = 1024 * MiB,
        granularity: Size = 2 * MiB,
        peers: Peers = "all",
        numa_nodes: int = 1,
        clock_khz: int | Sequence[int] = 1_000_000,
        coherent: bool = False,
        integrated: bool | None = None,
        compression: bool = False,
        capabilities: Mapping[str, bool] | None = None,
    ) -> None:
        options = check_options(
            devices=devices,
            memory=memory,
            host_memory=host_memory,
            granularity=granularity,
            peers=peers,
            numa_nodes=numa_nodes,
            clock_khz=clock_khz,
            coherent=coherent,
            integrated=integrated,
            compression=compression,
            capabilities=capabilities or {},
        )
        self.lock = threading.RLock()
        machine = self._machine = Machine(options)
        self._guard = machine.guard
        files = self._files = Files()
        machine.guard.watch_forks(files)
        machine.guard.watch_forks(self)
        opaque = OpaqueWork()
        self._devices = Devices(machine)
        self._contexts = Contexts(machine, self._devices)
        self._allocations = Allocations(machine, self._devices, files)
        self._memory = Memory(machine, self._devices, self._allocations, opaque)
        stretches = self._stretches = Stretches(machine, self._allocations, self._memory.space, files)
        self._plain = PlainMemory(machine, stretches, opaque)
        teams = self._teams = Teams(machine, self._devices, self._allocations, files)
        machine.guard.watch_forks(teams)
        self._sharing = Sharing(machine, self._devices, self._allocations, files, teams)
        self._streams = Streams(machine, self._contexts)
        self._events = Events(machine, self._contexts, self._streams)
        self._pools = Pools(machine, self._streams, stretches)
        self._reachable = ReachableMemory(machine, self._streams, stretches, opaque)
        self._host_functions = HostFunctions(machine, self._streams)
        graph_memory = self._graph_memory = GraphMemory(
            machine, self._devices, self._allocations, self._memory.space, files
        )
        spans = Spans(self._memory, self._plain, self._pools, self._reachable, graph_memory)
        self._copies = Copies(machine, self._contexts, self._streams, spans)
        self._launches = Launches(machine, self._devices, self._contexts, self._streams, spans, opaque, teams)
        access = GraphAccess(machine, spans)
        graphs = self._graphs = Graphs(machine, self._contexts, self._launches, access, graph_memory)
        self._executables = Executables(machine, self._streams, spans, opaque, graphs, graph_memory)
        self._captures = Captures(machine, self._contexts, self._streams, graphs)
        _open.add(self)

    @property
    def name(self) -> str:
        return "host"

    def version(self) -> str:
        try:
            own = version("remap")
        except PackageNotFoundError:  # run from a source tree that was not installed
            own = "unknown"
        return f"host driver {own} on Linux {platform.release()}, page {linux.PAGE}"

    def after_fork(self) -> None:
        """Renew the lock in a forked child, where a thread that does not exist there may hold it."""
        self.lock = threading.RLock()

    def shutdown(self) -> None:
        self._streams.check_thread("shutdown")
        if self._guard.close():
            self._events.shut_down()
            self._streams.shut_down()
            self._graph_memory.shut_down()
            self._stretches.shut_down()
            self._memory.shut_down()
            self._teams.shut_down()
            self._files.close_all()
            self._machine.shut_down()

    def __repr__(self) -> str:
        return f"<HostDriver of {self._machine.options.devices} devices in process {os.getpid()}>"

    # -- devices --

    def device_count(self) -> int:
        self._guard.check_open("cuDeviceGetCount")
        return self._machine.options.devices

    def device_properties(self, device: int) -> DeviceProperties:
        self._guard.check_open("cuDeviceGetAttribute")
        return self._devices.properties(device)

    def capabilities(self, device: int) -> Mapping[str, Capability]:
        self._guard.check_open("cuDeviceGetAttribute")
        return self._devices.capabilities(device)

    def can_access_peer(self, device: int, other: int) -> bool:
        self._guard.check_open("cuDeviceCanAccessPeer")
        return self._devices.can_access_peer(device, other)

    # -- contexts --

    def retain_context(self, device: int) -> int:
        self._guard.check("cuDevicePrimaryCtxRetain")
        return self._contexts.retain(device)

    def release_context(self, device: int) -> None:
        call = "cuDevicePrimaryCtxRelease"
        self._guard.check(call)
        if self._contexts.release(device):
            # As on CUDA, what lives in a context goes with it, and memory that is not bound to one stays.
            self._streams.synchronize_device(call, device)
            self._streams.close_device(device)
            self._events.close_device(device)
            self._plain.close_device(device)

    def current_context(self) -> int:
        self._guard.check_open("cuCtxGetCurrent")
        return self._contexts.current()

    def push_context(self, context: int) -> None:
        self._guard.check_open("cuCtxPushCurrent")
        self._contexts.push(context)

    def pop_context(self) -> int:
        self._guard.check_open("cuCtxPopCurrent")
        return self._contexts.pop()

    def synchronize_context(self) -> None:
        call = "cuCtxSynchronize"
        self._guard.check(call)
        if self._captures.active:
            self._captures.refuse_on_device(call)
        self._streams.synchronize_device(call, self._contexts.device(call))
        self._pools.after_wait()

    # -- physical allocations, reservations, mappings --

    def granularity(self, properties: AllocationProperties) -> Granularity:
        self._guard.check_open("cuMemGetAllocationGranularity")
        return self._allocations.granularity(properties)

    def create(self, size: int, properties: AllocationProperties) -> int:
        self._guard.check_open("cuMemCreate")
        return self._allocations.create(size, properties)

    def release(self, handle: int) -> None:
        self._guard.check_open("cuMemRelease")
        self._allocations.release(handle)

    def retain(self, address: int) -> int:
        self._guard.check_open("cuMemRetainAllocationHandle")
        return self._memory.retain(address)

    def properties_of(self, handle: int) -> AllocationProperties:
        self._guard.check_open("cuMemGetAllocationPropertiesFromHandle")
        return self._allocations.properties_of(handle)

    def reserve(self, size: int, alignment: int = 0, hint: int = 0) -> int:
        self._guard.check_open("cuMemAddressReserve")
        return self._memory.reserve(size, alignment, hint)

    def free_range(self, address: int, size: int) -> None:
        self._guard.check_open("cuMemAddressFree")
        self._memory.free_range(address, size)

    def map(self, address: int, size: int, handle: int, offset: int = 0) -> None:
        self._guard.check_open("cuMemMap")
        self._teams.check_mappable("cuMemMap", handle, address)
        self._memory.map(address, size, handle, offset)

    def unmap(self, address: int, size: int) -> None:
        self._guard.check_open("cuMemUnmap")
        self._memory.unmap(address, size)

    def set_access(self, address: int, size: int, grants: Grants) -> None:
        self._guard.check_open("cuMemSetAccess")
        self._memory.set_access(address, size, grants)

    def get_access(self, address: int, location: Location) -> Access:
        self._guard.check_open("cuMemGetAccess")
        if self._other_range(address):
            return Access.NONE  # what CUDA answers for memory that was never granted to anybody
        return self._memory.get_access(address, location)

    def address_range(self, address: int) -> AddressRange:
        call = "cuMemGetAddressRange"
        self._guard.check(call)
        found = self._memory.address_range(address) or self._other_range(address)
        if found is None:
            rule = "nothing is mapped there, or nobody has access to it"
            raise driver_error(call, CudaResult.NOT_FOUND, asked=f"address {address:#x}", rule=rule)
        return found

    def _other_range(self, address: int) -> AddressRange | None:
        return (
            self._plain.address_range(address)
            or self._pools.address_range(address)
            or self._reachable.address_range(address)
            or self._graph_memory.address_range(address)
        )

    def pointer_info(self, address: int) -> PointerInfo:
        call = "cuPointerGetAttribute"
        self._guard.check(call)
        found = (
            self._memory.pointer_info(address)
            or self._plain.pointer_info(address)
            or self._pools.pointer_info(address)
            or self._reachable.pointer_info(address)
            or self._graph_memory.pointer_info(address)
        )
        if found is None:
            raise invalid(call, f"address {address:#x}", "nothing is mapped there")
        return found

    # -- the current context: memory, copies, fills --

    def memory_info(self) -> MemoryInfo:
        call = "cuMemGetInfo"
        self._guard.check(call)
        location = Location(LocationKind.DEVICE, self._contexts.device(call))
        return self._allocations.info(location)

    def allocate(self, size: int) -> int:
        call = "cuMemAlloc"
        self._guard.check(call)
        self._captures.refuse_unsafe(call)
        return self._plain.allocate(self._contexts.device(call), size)

    def free(self, address: int) -> None:
        call = "cuMemFree"
        self._guard.check(call)
        self._contexts.device(call)
        if address == 0:  # as on CUDA
            return
        self._captures.refuse_unsafe(call)
        if self._pools.owns(address):  # as on CUDA, which takes pool and managed memory, too
            self._streams.synchronize_device(call, self._pools.device_of(address))
            self._pools.free(address, LEGACY_STREAM)
        elif (device := self._executables.device_of(address)) is not None:
            self._streams.synchronize_device(call, device)
            self._executables.free(call, address, None)
        elif self._reachable.owns_managed(address):
            self._reachable.free(call, address, managed=True)
        else:
            self._streams.synchronize_device(call, self._plain.find(address).device)
            self._plain.free(address)

    # -- memory of other processes --

    def export_handle(self, handle: int, kind: HandleType) -> int | bytes:
        self._guard.check_open("cuMemExportToShareableHandle")
        return self._sharing.export_handle(handle, kind)

    def import_handle(self, shareable: int | bytes, kind: HandleType) -> int:
        self._guard.check_open("cuMemImportFromShareableHandle")
        return self._sharing.import_handle(shareable, kind)


def _tell_what_nobody_waited_for() -> None:
    """Say, when the process ends, what kernels did wrongly if no wait came that could raise it."""
    end = time.monotonic() + _PATIENCE
    for driver in _open:
        guard = driver._guard
        if guard.refusal is None:
            driver._streams.let_end(end)
        for error in guard.untold():
            sys.stderr.write(f"remap: nothing waited for a kernel that failed: {error}\n")


_open: Register[HostDriver] = Register()
_PATIENCE = 1.0  # seconds that a process which ends waits for kernels, as one may never return
atexit.register(_tell_what_nobody_waited_for)
