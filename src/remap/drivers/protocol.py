"""What a driver is: plain calls on integers and frozen values, with no policy.

Handles, addresses, contexts, streams, events, modules and functions are integers. A call that the driver refuses
raises the error that `errors.driver_error` makes of its result, and changes nothing. Nothing here waits unless its
docstring says so, rounds a size, or guesses a default: that is the business of the rooms above.

Names follow the CUDA function in the docstring. Lines of the rule book are cited as T1 … T17; both drivers must
behave alike there, and `remap.testing` proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from remap.types import (
    Access,
    AddressRange,
    AllocationProperties,
    Capability,
    DeviceProperties,
    Grants,
    Granularity,
    HandleType,
    LaunchConfig,
    Location,
    MemoryInfo,
    PackedArguments,
    PointerInfo,
    Touched,
)

DEFAULT_STREAM = 0
LEGACY_STREAM = 1
PER_THREAD_STREAM = 2
"""CUDA's reserved stream handles: the current context's default, the legacy one, the calling thread's own."""


class Driver(Protocol):
    """The calls that every driver has.

    Threads: every call is safe from any thread. `lock` is the one structural lock that the rooms above hold around
    steps that belong together; a driver never takes it, and nobody holds it while waiting or copying (invariant 13).

    Contexts: calls on memory objects (create … get_access) need none; `memory_info`, copies, fills, plain memory,
    streams, events, modules and launches act in the calling thread's current context and raise INVALID_CONTEXT
    where there is none (T11).
    """

    lock: AbstractContextManager[Any]

    @property
    def name(self) -> str:
        """The name it is opened by: `"cuda"` or `"host"`."""
        ...

    def version(self) -> str:
        """Return the versions of driver and bindings as text for a person."""
        ...

    def shutdown(self) -> None:
        """Give back everything the driver itself holds: contexts, threads, files. Idempotent."""
        ...

    # -- devices --

    def device_count(self) -> int:
        """Return the number of devices. (cuDeviceGetCount)"""
        ...

    def device_properties(self, device: int) -> DeviceProperties:
        """Return what a device is; INVALID_DEVICE for a number that does not exist. (cuDeviceGetAttribute)"""
        ...

    def capabilities(self, device: int) -> Mapping[str, Capability]:
        """Return every capability of `types.CAPABILITIES` for a device, each with a reason where it is missing."""
        ...

    def can_access_peer(self, device: int, other: int) -> bool:
        """Tell whether kernels on `device` can reach memory on `other`; False for itself. (cuDeviceCanAccessPeer)"""
        ...

    # -- contexts --

    def retain_context(self, device: int) -> int:
        """Add a reference to a device's primary context and return it. (cuDevicePrimaryCtxRetain)"""
        ...

    def release_context(self, device: int) -> None:
        """Drop one reference that `retain_context` added. (cuDevicePrimaryCtxRelease)"""
        ...

    def current_context(self) -> int:
        """Return the calling thread's current context, 0 where there is none. (cuCtxGetCurrent)"""
        ...

    def push_context(self, context: int) -> None:
        """Make a context current for the calling thread. (cuCtxPushCurrent)"""
        ...

    def pop_context(self) -> int:
        """Make the previous context current again and return the one that was. (cuCtxPopCurrent)"""
        ...

    def synchronize_context(self) -> None:
        """Wait for all work of the current context. (cuCtxSynchronize)"""
        ...

    # -- physical allocations, reservations, mappings --

    def granularity(self, properties: AllocationProperties) -> Granularity:
        """Return the granularities for such memory (T1). (cuMemGetAllocationGranularity)"""
        ...

    def create(self, size: int, properties: AllocationProperties) -> int:
        """Create a physical allocation and return its handle (T2). (cuMemCreate)"""
        ...

    def release(self, handle: int) -> None:
        """Drop one reference to an allocation; memory stays while it is mapped (T8). (cuMemRelease)"""
        ...

    def retain(self, address: int) -> int:
        """Add a reference to the allocation mapped at `address` and return its handle (T8).

        (cuMemRetainAllocationHandle)
        """
        ...

    def properties_of(self, handle: int) -> AllocationProperties:
        """Return what an allocation was found to be. (cuMemGetAllocationPropertiesFromHandle)"""
        ...

    def reserve(self, size: int, alignment: int = 0, hint: int = 0) -> int:
        """Reserve an address range and return its base (T3). (cuMemAddressReserve)"""
        ...

    def free_range(self, address: int, size: int) -> None:
        """Free exactly one reservation with nothing mapped inside (T4). (cuMemAddressFree)"""
        ...

    def map(self, address: int, size: int, handle: int, offset: int = 0) -> None:
        """Map a whole allocation at an address; the mapping has no access yet (T5, T6). (cuMemMap)"""
        ...

    def unmap(self, address: int, size: int) -> None:
        """Unmap the whole mappings in a range (T7). Does not wait for work that uses them. (cuMemUnmap)"""
        ...

    def set_access(self, address: int, size: int, grants: Grants) -> None:
        """Set rights of locations on whole mappings; other locations keep theirs (T6). (cuMemSetAccess)"""
        ...

    def get_access(self, address: int, location: Location) -> Access:
        """Return the right of a location at an address. (cuMemGetAccess)"""
        ...

    def address_range(self, address: int) -> AddressRange:
        """Return the one mapping or plain allocation that holds an address (T12). (cuMemGetAddressRange)"""
        ...

    def pointer_info(self, address: int) -> PointerInfo:
        """Return what the driver knows of an address (T12). (cuPointerGetAttribute)"""
        ...

    # -- the current context: memory, copies, fills --

    def memory_info(self) -> MemoryInfo:
        """Return the current device's free and total memory. (cuMemGetInfo)"""
        ...

    def allocate(self, size: int) -> int:
        """Allocate plain device memory and return its address. (cuMemAlloc)"""
        ...

    def free(self, address: int) -> None:
        """Free plain device memory; waits for the device. (cuMemFree)"""
        ...

    def copy_to_device(self, address: int, source: int, size: int, stream: int) -> None:
        """Queue a copy of `size` bytes from host memory at `source` to `address` (T9). (cuMemcpyHtoDAsync)

        The host memory must stay until the stream has reached the copy.
        """
        ...

    def copy_to_host(self, destination: int, address: int, size: int, stream: int) -> None:
        """Queue a copy from `address` to host memory (T9); as `copy_to_device`. (cuMemcpyDtoHAsync)"""
        ...

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        """Queue a copy between two device addresses, on any devices (T9). (cuMemcpyDtoDAsync)"""
        ...

    def fill(self, address: int, value: int, width: int, count: int, stream: int) -> None:
        """Queue `count` writes of a `value` of `width` 1, 2 or 4 bytes (T9). (cuMemsetD8Async, D16, D32)"""
        ...

    # -- streams and events --

    def create_stream(self, nonblocking: bool = True, priority: int = 0) -> int:
        """Create a stream in the current context. (cuStreamCreateWithPriority)"""
        ...

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream; work already queued still runs. (cuStreamDestroy)"""
        ...

    def synchronize_stream(self, stream: int) -> None:
        """Wait for all work queued on a stream so far. (cuStreamSynchronize)"""
        ...

    def stream_done(self, stream: int) -> bool:
        """Tell whether all work queued on a stream has completed. (cuStreamQuery)"""
        ...

    def stream_capturing(self, stream: int) -> bool:
        """Tell whether a stream is being captured into a graph. (cuStreamIsCapturing)"""
        ...

    def wait_event(self, stream: int, event: int) -> None:
        """Let later work of a stream wait for an event; the host does not wait. (cuStreamWaitEvent)"""
        ...

    def create_event(self, timing: bool = False) -> int:
        """Create an event in the current context. (cuEventCreate)"""
        ...

    def destroy_event(self, event: int) -> None:
        """Destroy an event; a recorded point that work waits for stays valid. (cuEventDestroy)"""
        ...

    def record_event(self, event: int, stream: int) -> None:
        """Let an event mark the work queued on a stream so far. (cuEventRecord)"""
        ...

    def synchronize_event(self, event: int) -> None:
        """Wait for what an event marks. (cuEventSynchronize)"""
        ...

    def event_done(self, event: int) -> bool:
        """Tell whether what an event marks has completed. (cuEventQuery)"""
        ...

    def elapsed(self, start: int, end: int) -> float:
        """Return the milliseconds between two timing events that have completed. (cuEventElapsedTime)"""
        ...

    # -- kernels --

    def launch(
        self,
        function: int | Callable[..., None],
        config: LaunchConfig,
        stream: int,
        arguments: PackedArguments,
        touches: Sequence[Touched] | None,
    ) -> None:
        """Queue a kernel. (cuLaunchKernel)

        The CUDA driver takes a function handle of `SupportsModules.get_function`. The host driver takes a Python
        callable and runs `function(launch)` on the stream's thread, with a `HostLaunch`. `touches` lists the ranges
        that the kernel may touch, None where the caller cannot know (then: any); only the host driver looks at it.
        """
        ...


@runtime_checkable
class SupportsModules(Protocol):
    """A driver that loads compiled device code."""

    def load_module(self, image: bytes) -> int:
        """Load a cubin, fatbin or PTX image into the current context. (cuModuleLoadDataEx)"""
        ...

    def unload_module(self, module: int) -> None:
        """Unload a module; the caller has waited for its kernels. (cuModuleUnload)"""
        ...

    def get_function(self, module: int, name: str) -> int:
        """Return a kernel of a module by its unmangled name; NOT_FOUND if there is none. (cuModuleGetFunction)"""
        ...

    def function_attributes(self, function: int) -> Mapping[str, int]:
        """Return a function's figures. (cuFuncGetAttribute)

        They are `max_threads_per_block`, `shared_bytes`, `registers`, `binary_version` and `ptx_version`.
        """
        ...

    def set_dynamic_shared_limit(self, function: int, size: int) -> None:
        """Allow a function up to `size` bytes of dynamic shared memory. (cuFuncSetAttribute)"""
        ...


@runtime_checkable
class SupportsSharing(Protocol):
    """A driver that hands physical allocations to other processes."""

    def export_handle(self, handle: int, kind: HandleType) -> int | bytes:
        """Return a new file descriptor, or 64 bytes of fabric handle (T17). (cuMemExportToShareableHandle)"""
        ...

    def import_handle(self, shareable: int | bytes, kind: HandleType) -> int:
        """Return a handle for another's allocation; the descriptor stays the caller's (T17).

        (cuMemImportFromShareableHandle)
        """
        ...


class HostLaunch(Protocol):
    """What a kernel that runs on the host driver is given: its launch, and the device's view of memory."""

    @property
    def device(self) -> int:
        """The number of the device that the launch runs on."""
        ...

    @property
    def config(self) -> LaunchConfig:
        """Grid, block and dynamic shared memory."""
        ...

    @property
    def arguments(self) -> tuple[object, ...]:
        """The arguments as Python values."""
        ...

    def read(self, address: int, size: int) -> memoryview:
        """Return read-only bytes at an address; an unmapped or forbidden one faults the kernel (T10)."""
        ...

    def write(self, address: int, size: int) -> memoryview:
        """Return writable bytes at an address; an unmapped or forbidden one faults the kernel (T10)."""
        ...
