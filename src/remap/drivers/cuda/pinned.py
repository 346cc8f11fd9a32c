"""The driver's calls on pinned host memory: pages that stay where they are and that every device reaches."""

from __future__ import annotations

from remap.drivers.cuda.bindings import cuda, failure
from remap.errors import CudaResult
from remap.sizes import format_size

# CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP; the flags of cuMemHostRegister have the same values.
_FOR_ALL_DEVICES = 1 | 2


class PinnedCalls:
    """`SupportsPinned` of the CUDA driver; it keeps no state."""

    def allocate_pinned(self, size: int) -> int:
        err, address = cuda.cuMemHostAlloc(size, _FOR_ALL_DEVICES)
        if err:
            rule = "the size must not be 0" if size == 0 and err == CudaResult.INVALID_VALUE else ""
            asked = f"allocate {format_size(size)} of pinned memory"
            raise failure("cuMemHostAlloc", err, asked=asked, rule=rule)
        return int(address)

    def free_pinned(self, address: int) -> None:
        (err,) = cuda.cuMemFreeHost(address)
        if err:
            rule = "no pinned allocation begins there" if err == CudaResult.INVALID_VALUE else ""
            raise failure("cuMemFreeHost", err, asked=f"free the pinned memory at {address:#x}", rule=rule)

    def register_pinned(self, address: int, size: int) -> None:
        (err,) = cuda.cuMemHostRegister(address, size, _FOR_ALL_DEVICES)
        if err:
            asked = f"register {format_size(size)} of host memory at {address:#x}"
            rule = _WHY_NOT_REGISTERED.get(int(err), "")
            raise failure("cuMemHostRegister", err, asked=asked, rule=rule)

    def unregister_pinned(self, address: int) -> None:
        (err,) = cuda.cuMemHostUnregister(address)
        if err:
            asked = f"unregister the host memory at {address:#x}"
            rule = _WHY_NOT_REGISTERED.get(int(err), "")
            raise failure("cuMemHostUnregister", err, asked=asked, rule=rule)

    def device_pointer(self, address: int) -> int:
        err, pointer = cuda.cuMemHostGetDevicePointer(address, 0)
        if err:
            rule = "no pinned memory is there" if err == CudaResult.INVALID_VALUE else ""
            asked = f"the device's address of host memory at {address:#x}"
            raise failure("cuMemHostGetDevicePointer", err, asked=asked, rule=rule)
        return int(pointer)


_WHY_NOT_REGISTERED = {
    int(CudaResult.INVALID_VALUE): "it must be host memory of this process, of 1 byte or more",
    712: "a part of it is registered already",
    713: "no registered memory begins there",
}
