"""Where host-located memory is mapped: there CUDA copies with the CPU, and a right that the CPU lacks ends the process.

Seen on H200 (driver 580): a copy to, from or between mappings of HOST or HOST_NUMA memory that nobody may read, or
from pageable host memory into one that the CPU may only read, is a segmentation fault inside the driver, where the
same on device memory is INVALID_VALUE. So copies that touch such a mapping are checked here first. Programs without
host-located memory pay for one look at an empty list.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from typing import Any

from remap.drivers.cuda.bindings import cuda
from remap.drivers.cuda.structures import location_of
from remap.errors import CudaResult, DriverError, driver_error
from remap.sizes import format_size
from remap.types import Host, Location, LocationKind

_READ, _WRITE = 1, 2  # the bits of CUmemAccess_flags


class HostMappings:
    """The mappings of host-located memory, by address.

    Callers look at `handles` and `starts` themselves before they ask: mostly both are empty, and a call costs more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.handles: set[int] = set()
        self.starts: list[int] = []
        self._ends: list[int] = []

    def created(self, handle: int, *, at_host: bool) -> None:
        """Note where the memory of a new handle is; numbers of handles come again."""
        if at_host:
            self.handles.add(handle)
        elif self.handles:
            self.handles.discard(handle)

    def mapped(self, address: int, size: int, handle: int) -> None:
        """Note a mapping, if it is of host-located memory."""
        if handle in self.handles:
            with self._lock:
                at = bisect_left(self.starts, address)
                self.starts.insert(at, address)
                self._ends.insert(at, address + size)

    def unmapped(self, address: int, size: int) -> None:
        """Forget the mappings in a range."""
        with self._lock:
            first, last = bisect_left(self.starts, address), bisect_left(self.starts, address + size)
            del self.starts[first:last], self._ends[first:last]

    def base_of(self, address: int) -> int:
        """Return the base of the mapping that holds an address, 0 if there is none."""
        with self._lock:
            at = bisect_right(self.starts, address) - 1
            return self.starts[at] if at >= 0 and address < self._ends[at] else 0

    def check(self, call: str, address: int, size: int, *, writes: bool, pageable: bool = False) -> None:
        """Refuse a copy that the CPU would make without the right to; `pageable` says that it comes from host memory.

        Raises INVALID_VALUE, as for memory on a device.
        """
        with self._lock:
            first = max(bisect_right(self.starts, address) - 1, 0)
            last = bisect_left(self.starts, address + size)
            touched = list(zip(self.starts[first:last], self._ends[first:last], strict=True))
        touched = [(start, end) for start, end in touched if end > address]
        if not touched:
            return
        needed = _WRITE if writes else _READ
        at = address
        for start, end in touched:
            by_device, by_cpu = _access(_current_device(), start), _access(Host(), start)
            allowed = by_device or by_cpu
            if not allowed & needed or (pageable and by_cpu and not by_cpu & needed):
                raise _refusal(call, address, size, "the CPU makes this copy, and has no right to it here")
            if at < start:
                _check_mapped(call, address, size, at)
            at = end
        if at < address + size:
            _check_mapped(call, address, size, at)


def _check_mapped(call: str, address: int, size: int, at: int) -> None:
    """Raise if nothing is mapped at an address in the middle of a copy: there it would run into a hole."""
    err, _, _ = cuda.cuMemGetAddressRange(at)
    if err:
        raise _refusal(call, address, size, f"nothing is mapped at {at:#x}")


def _current_device() -> Location:
    err, device = cuda.cuCtxGetDevice()
    return Location(LocationKind.DEVICE, 0 if err else int(device))


def _access(location: Location, address: int) -> int:
    err, flags = cuda.cuMemGetAccess(location_of(location), address)
    return 0 if err else int(flags)


def _refusal(call: str, address: int, size: int, rule: str) -> DriverError:
    return driver_error(
        call,
        CudaResult.INVALID_VALUE,
        asked=f"copy at {address:#x}, {format_size(size)}, in memory located on the host",
        rule=rule,
        next_step="Grant the host the right, or copy through memory on a device",
    )


def at_host(prop: Any) -> bool:
    """Tell whether properties that the driver filled in are those of host-located memory."""
    return int(prop.location.type) in (2, 3, 4)
