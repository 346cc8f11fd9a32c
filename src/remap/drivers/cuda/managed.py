"""The driver's calls on managed memory: one address, pages that move to whoever touches them."""

from __future__ import annotations

from typing import Any

from remap.drivers.cuda.bindings import cuda, failure
from remap.drivers.cuda.structures import location_of
from remap.drivers.powers import ManagedAdvice
from remap.errors import CudaResult, DriverError, driver_error
from remap.sizes import format_size
from remap.types import Host, Location, LocationKind

_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL: every stream of every device
_LAST_PREFETCH_LOCATION = 4  # CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION
_CPU = -1  # CU_DEVICE_CPU; CU_DEVICE_INVALID is -2
# `CUmem_advise`: what sets each; the number after it unsets.
_ADVICE = {
    ManagedAdvice.READ_MOSTLY: 1,
    ManagedAdvice.PREFERRED_LOCATION: 3,
    ManagedAdvice.ACCESSED_BY: 5,
}


class ManagedCalls:
    """`SupportsManaged` of the CUDA driver; it keeps no state."""

    def allocate_managed(self, size: int) -> int:
        err, address = cuda.cuMemAllocManaged(size, _ATTACH_GLOBAL)
        if err:
            rule = "the size must not be 0" if size == 0 and err == CudaResult.INVALID_VALUE else ""
            asked = f"allocate {format_size(size)} of managed memory"
            raise failure("cuMemAllocManaged", err, asked=asked, rule=rule)
        return int(address)

    def free_managed(self, address: int) -> None:
        (err,) = cuda.cuMemFree(address)
        if err:
            raise failure("cuMemFree", err, asked=f"free the managed memory at {address:#x}")

    def prefetch(self, address: int, size: int, location: Location, stream: int) -> None:
        # With a location since CUDA 12.2; its number was a part of the name until 13.0.
        call = getattr(cuda, "cuMemPrefetchAsync_v2", None) or cuda.cuMemPrefetchAsync
        try:
            (err,) = call(address, size, location_of(location), 0, stream)
        except RuntimeError as error:
            raise _too_old("cuMemPrefetchAsync", error) from error
        if err:
            asked = f"prefetch {format_size(size)} at {address:#x} to {location}"
            raise failure("cuMemPrefetchAsync", err, asked=asked, rule=_rule(err))

    def advise_managed(
        self, address: int, size: int, advice: ManagedAdvice, location: Location, on: bool
    ) -> None:
        call = getattr(cuda, "cuMemAdvise_v2", None) or cuda.cuMemAdvise
        number = cuda.CUmem_advise(_ADVICE[advice] + (not on))
        try:
            (err,) = call(address, size, number, location_of(location))
        except RuntimeError as error:
            raise _too_old("cuMemAdvise", error) from error
        if err:
            asked = f"advise {advice} ({location}) for {format_size(size)} at {address:#x}"
            raise failure("cuMemAdvise", err, asked=asked, rule=_rule(err))

    def prefetched_to(self, address: int, size: int) -> Location | None:
        # The newer attributes, which tell NUMA nodes apart, are refused by the bindings of CUDA 12.
        attribute = cuda.CUmem_range_attribute(_LAST_PREFETCH_LOCATION)
        err, found = cuda.cuMemRangeGetAttribute(4, attribute, address, size)
        if err:
            asked = f"where {format_size(size)} at {address:#x} were prefetched to"
            raise failure("cuMemRangeGetAttribute", err, asked=asked, rule=_rule(err))
        number = int(found)
        if number >= 0:
            return Location(LocationKind.DEVICE, number)
        return Host() if number == _CPU else None


def _rule(err: Any) -> str:
    return "the range must lie within managed memory" if err == CudaResult.INVALID_VALUE else ""


def _too_old(call: str, error: RuntimeError) -> DriverError:
    rule = f"the driver is older than CUDA 12.2 ({error})"
    return driver_error(call, CudaResult.NOT_SUPPORTED, asked=call, rule=rule)
