"""Optional powers of a driver, beside `SupportsModules` and `SupportsSharing` in `protocol`: ask with `isinstance`.

As in the protocol, handles and addresses are integers, errors come from `errors.driver_error`, and nothing waits
unless its docstring says so. Calls act in the calling thread's current context.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from remap.types import LaunchConfig, Location, PackedArguments


@runtime_checkable
class SupportsRepeats(Protocol):
    """A driver that works out once what it takes to make the same launch many times.

    The calls that it returns keep what they need, and act in `context`, whichever is current.
    """

    def repeat_launch(
        self, context: int, function: int, config: LaunchConfig, stream: int, arguments: PackedArguments
    ) -> Callable[[], None]:
        """Return a call that makes this `launch`, with what `arguments` holds at that time. (cuLaunchKernel)"""
        ...

    def repeat_graph_launch(self, context: int, executable: int, stream: int) -> Callable[[], None]:
        """Return a call that makes this `graph_launch`. (cuGraphLaunch)"""
        ...


@runtime_checkable
class SupportsPinned(Protocol):
    """A driver that gives host memory which devices copy at link speed and can reach."""

    def allocate_pinned(self, size: int) -> int:
        """Allocate page-locked host memory, mapped for all devices, and return its address. (cuMemHostAlloc)"""
        ...

    def free_pinned(self, address: int) -> None:
        """Free what `allocate_pinned` gave; waits for work that uses it. (cuMemFreeHost)"""
        ...

    def register_pinned(self, address: int, size: int) -> None:
        """Page-lock host memory of the caller's, and map it for all devices. (cuMemHostRegister)"""
        ...

    def unregister_pinned(self, address: int) -> None:
        """Undo `register_pinned`. (cuMemHostUnregister)"""
        ...

    def device_pointer(self, address: int) -> int:
        """Return the address at which devices reach pinned memory. (cuMemHostGetDevicePointer)"""
        ...


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """What a device's memory pool holds in bytes: in use, and taken from the driver; now and at most."""

    used: int
    used_high: int
    reserved: int
    reserved_high: int


@runtime_checkable
class SupportsPools(Protocol):
    """A driver with stream-ordered memory: allocated and freed in the order of a stream, from a pool for each device.

    The pool is the device's current one, which is its default one unless somebody has set another.
    """

    def pool_allocate(self, size: int, stream: int) -> int:
        """Allocate memory that work queued on the stream from now on may use. (cuMemAllocAsync)"""
        ...

    def pool_free(self, address: int, stream: int) -> None:
        """Free memory once the stream has reached this point; never waits on the host. (cuMemFreeAsync)"""
        ...

    def pool_figures(self, device: int) -> PoolFigures:
        """Return the figures of a device's pool. (cuMemPoolGetAttribute)"""
        ...

    def pool_reset_high(self, device: int) -> None:
        """Set both high marks to the present figures. (cuMemPoolSetAttribute)"""
        ...

    def pool_trim(self, device: int, keep: int) -> None:
        """Give free memory of the pool back, down to `keep` bytes reserved. (cuMemPoolTrimTo)"""
        ...

    def pool_retain(self, device: int, size: int) -> None:
        """Let the pool keep up to `size` free bytes across synchronisations.

        (CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        """
        ...


class ManagedAdvice(StrEnum):
    """Advice on managed memory, by CUDA's names (`CUmem_advise`)."""

    READ_MOSTLY = "read_mostly"
    PREFERRED_LOCATION = "preferred_location"
    ACCESSED_BY = "accessed_by"


@runtime_checkable
class SupportsManaged(Protocol):
    """A driver with managed memory: one address, pages that move to whoever touches them."""

    def allocate_managed(self, size: int) -> int:
        """Allocate managed memory and return its address. (cuMemAllocManaged)"""
        ...

    def free_managed(self, address: int) -> None:
        """Free managed memory; waits. (cuMemFree)"""
        ...

    def prefetch(self, address: int, size: int, location: Location, stream: int) -> None:
        """Queue a move of pages to a location. (cuMemPrefetchAsync)"""
        ...

    def advise_managed(
        self, address: int, size: int, advice: ManagedAdvice, location: Location, on: bool
    ) -> None:
        """Set or unset advice for a range. (cuMemAdvise)"""
        ...

    def prefetched_to(self, address: int, size: int) -> Location | None:
        """Return where the range was last prefetched to, None where nowhere or not as a whole.

        (cuMemRangeGetAttribute, LAST_PREFETCH_LOCATION)
        """
        ...


@runtime_checkable
class SupportsHostFunctions(Protocol):
    """A driver that calls a Python function in the order of a stream."""

    def launch_host_function(self, stream: int, function: Callable[[], None]) -> None:
        """Queue a call; it must not call the driver. The driver keeps it alive until then. (cuLaunchHostFunc)

        In a graph it is called at each launch of the graph. What it raises goes to `threading.excepthook`.
        """
        ...


@runtime_checkable
class SupportsSharedEvents(Protocol):
    """A driver whose events can be waited for by other processes."""

    def create_shared_event(self) -> int:
        """Create an event that can be exported. (cuEventCreate, INTERPROCESS)"""
        ...

    def export_event(self, event: int) -> bytes:
        """Return the 64 bytes by which another process opens the event. (cuIpcGetEventHandle)"""
        ...

    def import_event(self, shareable: bytes) -> int:
        """Open another process's event. (cuIpcOpenEventHandle)"""
        ...


def call_host_function(function: Callable[[], None]) -> None:
    """Call a function in the order of a stream, for a driver: what it raises reaches no caller and stops nothing."""
    try:
        function()
    except BaseException as error:  # noqa: BLE001 (it must not end the stream)
        thread = threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))
