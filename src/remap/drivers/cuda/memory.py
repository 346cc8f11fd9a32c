"""The driver's calls on memory: allocations, reservations, mappings, access, sharing, copies and fills."""

from __future__ import annotations

from typing import Any

from remap.drivers.cuda.bindings import cuda, failure
from remap.drivers.cuda.host_mappings import HostMappings, at_host
from remap.drivers.cuda.structures import (
    ACCESS_OF,
    access_descriptions,
    allocation_prop,
    handle_type,
    location_of,
    properties_from,
)
from remap.errors import CudaResult, driver_error
from remap.sizes import format_size
from remap.types import (
    Access,
    AddressRange,
    AllocationProperties,
    Grants,
    Granularity,
    HandleType,
    Location,
    MemoryInfo,
    PointerInfo,
)

_FABRIC_BYTES = 64  # CU_IPC_HANDLE_SIZE

# Each method is written out, call by call: a helper that checks results would cost as much as the call itself.


class MemoryCalls:
    """The half of the CUDA driver that deals with memory.

    All it remembers is where host-located memory is mapped, and what was asked for last.
    """

    def __init__(self) -> None:
        super().__init__()
        self._host_mappings = HostMappings()
        # What was asked for last, and the structures made of it: programs ask for the same again and again.
        self._last_prop: tuple[AllocationProperties | None, Any, bool] = (None, None, False)
        self._last_grants: tuple[tuple[tuple[Location, Access], ...] | None, list[Any]] = (None, [])

    # -- physical allocations --

    def granularity(self, properties: AllocationProperties) -> Granularity:
        prop = allocation_prop(properties)
        flags = cuda.CUmemAllocationGranularity_flags
        err, minimum = cuda.cuMemGetAllocationGranularity(prop, flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
        if err:
            raise failure("cuMemGetAllocationGranularity", err, asked=f"granularity of {_told(properties)}")
        err, recommended = cuda.cuMemGetAllocationGranularity(
            prop, flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        )
        if err:
            raise failure("cuMemGetAllocationGranularity", err, asked=f"granularity of {_told(properties)}")
        return Granularity(int(minimum), int(recommended))

    def create(self, size: int, properties: AllocationProperties) -> int:
        last, prop, hosted = self._last_prop
        if last is not properties:  # looking one up costs more than all the rest of this method
            prop, hosted = allocation_prop(properties), not properties.location.is_device
            self._last_prop = properties, prop, hosted
        err, handle = cuda.cuMemCreate(size, prop, 0)
        if err:
            rule, step = _WHY_NOT_CREATED.get(int(err), ("", ""))
            if err == CudaResult.NOT_PERMITTED and HandleType.FABRIC not in properties.handle_types:
                rule, step = "", ""
            asked = f"create {format_size(size)} of {_told(properties)}"
            raise failure("cuMemCreate", err, asked=asked, rule=rule, next_step=step)
        number = int(handle)
        if hosted or self._host_mappings.handles:
            self._host_mappings.created(number, at_host=hosted)
        return number

    def release(self, handle: int) -> None:
        (err,) = cuda.cuMemRelease(handle)
        if err:
            raise failure("cuMemRelease", err, asked="release an allocation")

    def retain(self, address: int) -> int:
        err, handle = cuda.cuMemRetainAllocationHandle(address)
        if err:
            rule = "an allocation must be mapped there" if err == CudaResult.INVALID_VALUE else ""
            asked = f"retain the allocation at {address:#x}"
            raise failure("cuMemRetainAllocationHandle", err, asked=asked, rule=rule)
        number = int(handle)
        if self._host_mappings.starts or self._host_mappings.handles:
            self._host_mappings.created(number, at_host=_is_at_host(number))
        return number

    def properties_of(self, handle: int) -> AllocationProperties:
        err, prop = cuda.cuMemGetAllocationPropertiesFromHandle(handle)
        if err:
            asked = "read the properties of an allocation"
            raise failure("cuMemGetAllocationPropertiesFromHandle", err, asked=asked)
        return properties_from(prop)

    # -- reservations and mappings --

    def reserve(self, size: int, alignment: int = 0, hint: int = 0) -> int:
        err, address = cuda.cuMemAddressReserve(size, alignment, hint, 0)
        if err:
            asked = f"reserve {format_size(size)} of addresses"
            if alignment:
                asked += f", aligned to {format_size(alignment)}"
            rule = _WHY_NOT_RESERVED.get(int(err), "")
            raise failure("cuMemAddressReserve", err, asked=asked, rule=rule)
        return int(address)

    def free_range(self, address: int, size: int) -> None:
        (err,) = cuda.cuMemAddressFree(address, size)
        if err:
            rule = "it must be exactly one reservation with nothing mapped inside"
            rule = rule if err == CudaResult.INVALID_VALUE else ""
            raise failure(
                "cuMemAddressFree", err, asked=_at("free the reservation", address, size), rule=rule
            )

    def map(self, address: int, size: int, handle: int, offset: int = 0) -> None:
        (err,) = cuda.cuMemMap(address, size, offset, handle, 0)
        if err:
            rule = _WHY_NOT_MAPPED.get(int(err), "")
            raise failure("cuMemMap", err, asked=_at("map an allocation", address, size), rule=rule)
        if self._host_mappings.handles:
            self._host_mappings.mapped(address, size, handle)

    def unmap(self, address: int, size: int) -> None:
        (err,) = cuda.cuMemUnmap(address, size)
        if err:
            rule = "a range may hold whole mappings only" if err == CudaResult.INVALID_VALUE else ""
            raise failure("cuMemUnmap", err, asked=_at("unmap", address, size), rule=rule)
        if self._host_mappings.starts:
            self._host_mappings.unmapped(address, size)

    def set_access(self, address: int, size: int, grants: Grants) -> None:
        last, descriptions = self._last_grants
        if last is not grants:
            kept = tuple(grants)  # the same object if it cannot change, and only then found again
            descriptions = access_descriptions(kept)
            self._last_grants = kept, descriptions
        (err,) = cuda.cuMemSetAccess(address, size, descriptions, len(descriptions))
        if err:
            rule = _WHY_NO_ACCESS.get(int(err), "")
            rights = ", ".join(f"{location} {access}" for location, access in grants) or "nobody"
            asked = _at(f"set access ({rights})", address, size)
            raise failure("cuMemSetAccess", err, asked=asked, rule=rule)

    def get_access(self, address: int, location: Location) -> Access:
        err, flags = cuda.cuMemGetAccess(location_of(location), address)
        if err:
            raise failure("cuMemGetAccess", err, asked=f"access of {location} at {address:#x}")
        return ACCESS_OF[int(flags)]

    def address_range(self, address: int) -> AddressRange:
        err, base, size = cuda.cuMemGetAddressRange(address)
        if err:
            rule = "nothing that anybody may access is there" if err == CudaResult.NOT_FOUND else ""
            raise failure("cuMemGetAddressRange", err, asked=f"the range at {address:#x}", rule=rule)
        # For host-located memory the driver leaves the base at 0 (seen on H200).
        return AddressRange(int(base) or self._host_mappings.base_of(address), int(size))

    def pointer_info(self, address: int) -> PointerInfo:
        # Not cuPointerGetAttributes, which answers zeros for an address that it does not know.
        names = cuda.CUpointer_attribute
        found: list[int] = []
        for name in (
            names.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            names.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            names.CU_POINTER_ATTRIBUTE_BUFFER_ID,
            names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        ):
            err, value = cuda.cuPointerGetAttribute(name, address)
            if err:
                raise failure("cuPointerGetAttribute", err, asked=f"what is known of {address:#x}")
            found.append(int(value))
        return PointerInfo(*found)

    # -- the current context --

    def memory_info(self) -> MemoryInfo:
        err, free, total = cuda.cuMemGetInfo()
        if err:
            raise failure("cuMemGetInfo", err)
        return MemoryInfo(int(free), int(total))

    def allocate(self, size: int) -> int:
        err, address = cuda.cuMemAlloc(size)
        if err:
            rule = "the size must not be 0" if size == 0 and err == CudaResult.INVALID_VALUE else ""
            raise failure("cuMemAlloc", err, asked=f"allocate {format_size(size)}", rule=rule)
        return int(address)

    def free(self, address: int) -> None:
        (err,) = cuda.cuMemFree(address)
        if err:
            raise failure("cuMemFree", err, asked=f"free the allocation at {address:#x}")

    def copy_to_device(self, address: int, source: int, size: int, stream: int) -> None:
        if self._host_mappings.starts:
            self._host_mappings.check("cuMemcpyHtoDAsync", address, size, writes=True, pageable=True)
        (err,) = cuda.cuMemcpyHtoDAsync(address, source, size, stream)
        if err:
            rule = _WHY_NOT_WRITTEN if err == CudaResult.INVALID_VALUE else ""
            asked = _at("copy from the host", address, size)
            raise failure("cuMemcpyHtoDAsync", err, asked=asked, rule=rule)

    def copy_to_host(self, destination: int, address: int, size: int, stream: int) -> None:
        if self._host_mappings.starts:
            self._host_mappings.check("cuMemcpyDtoHAsync", address, size, writes=False)
        (err,) = cuda.cuMemcpyDtoHAsync(destination, address, size, stream)
        if err:
            rule = _WHY_NOT_READ if err == CudaResult.INVALID_VALUE else ""
            asked = _at("copy to the host", address, size)
            raise failure("cuMemcpyDtoHAsync", err, asked=asked, rule=rule)

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        if self._host_mappings.starts:
            self._host_mappings.check("cuMemcpyDtoDAsync", source, size, writes=False)
            self._host_mappings.check("cuMemcpyDtoDAsync", destination, size, writes=True)
        (err,) = cuda.cuMemcpyDtoDAsync(destination, source, size, stream)
        if err:
            rule = "the source must be mapped and readable, the destination mapped and writable"
            rule = rule if err == CudaResult.INVALID_VALUE else ""
            asked = _at(f"copy from {source:#x}", destination, size)
            raise failure("cuMemcpyDtoDAsync", err, asked=asked, rule=rule)

    def fill(self, address: int, value: int, width: int, count: int, stream: int) -> None:
        if width == 1:
            call, (err,) = "cuMemsetD8Async", cuda.cuMemsetD8Async(address, value, count, stream)
        elif width == 2:
            call, (err,) = "cuMemsetD16Async", cuda.cuMemsetD16Async(address, value, count, stream)
        elif width == 4:
            call, (err,) = "cuMemsetD32Async", cuda.cuMemsetD32Async(address, value, count, stream)
        else:
            asked, rule = f"fill with a value of {width} bytes", "the driver fills with 1, 2 or 4"
            raise driver_error("cuMemsetD8Async", CudaResult.INVALID_VALUE, asked=asked, rule=rule)
        if err:
            rule = _WHY_NOT_WRITTEN if err == CudaResult.INVALID_VALUE else ""
            raise failure(call, err, asked=_at("fill", address, width * count), rule=rule)

    # -- sharing --

    def export_handle(self, handle: int, kind: HandleType) -> int | bytes:
        err, shareable = cuda.cuMemExportToShareableHandle(handle, handle_type(kind), 0)
        if err:
            wrong = err == CudaResult.INVALID_VALUE
            raise failure(
                "cuMemExportToShareableHandle",
                err,
                asked=f"export an allocation as {kind}",
                rule="the kind of handle is fixed when the memory is created" if wrong else "",
                next_step=f'Create it with shareable="{kind}"' if wrong else "",
            )
        return bytes(shareable.data) if kind is HandleType.FABRIC else int(shareable)

    def import_handle(self, shareable: int | bytes, kind: HandleType) -> int:
        # The driver would read 64 bytes whatever was given, and this comes from another process (invariant 11).
        if kind is HandleType.FABRIC and (
            not isinstance(shareable, bytes) or len(shareable) != _FABRIC_BYTES
        ):
            asked, rule = "import an allocation from fabric", f"a fabric handle is {_FABRIC_BYTES} bytes"
            call = "cuMemImportFromShareableHandle"
            raise driver_error(call, CudaResult.INVALID_VALUE, asked=asked, rule=rule)
        err, handle = cuda.cuMemImportFromShareableHandle(shareable, handle_type(kind))
        if err:
            rule = (
                "the descriptor is closed, or not one of exported memory" if err == CudaResult.UNKNOWN else ""
            )
            asked = f"import an allocation from {kind}"
            raise failure("cuMemImportFromShareableHandle", err, asked=asked, rule=rule)
        number = int(handle)
        self._host_mappings.created(number, at_host=_is_at_host(number))
        return number


def _is_at_host(handle: int) -> bool:
    err, prop = cuda.cuMemGetAllocationPropertiesFromHandle(handle)
    return not err and at_host(prop)


def _at(what: str, address: int, size: int) -> str:
    return f"{what} at {address:#x}, {format_size(size)}"


def _told(properties: AllocationProperties) -> str:
    """Describe memory in a message."""
    words = [f"memory on {properties.location}"]
    if properties.handle_types:
        words.append("shareable as " + " and ".join(sorted(properties.handle_types)))
    words += ["compressible"] if properties.compressible else []
    words += ["for RDMA"] if properties.rdma else []
    return ", ".join(words)


_WHY_NOT_CREATED = {
    int(CudaResult.INVALID_VALUE): (
        "the size must be a multiple of the granularity and not 0, and the place must take these options",
        "Ask driver.granularity() for the granularity; host memory on no particular node cannot be shared",
    ),
    int(CudaResult.INVALID_DEVICE): ("there is no such place", ""),
    int(CudaResult.OUT_OF_MEMORY): ("there is not enough free memory there", ""),
    int(CudaResult.NOT_PERMITTED): (
        "fabric handles need an IMEX channel in /dev/nvidia-caps-imex-channels",
        "Have an administrator grant the same channel to both ends, or share by posix_fd",
    ),
}
_WHY_NOT_RESERVED = {
    int(CudaResult.INVALID_VALUE): (
        "the size must be a multiple of the granularity and not 0, the alignment a power of two"
    ),
    int(CudaResult.OUT_OF_MEMORY): "no free range of addresses is that large; this says nothing about memory",
}
_WHY_NOT_MAPPED = {
    int(CudaResult.INVALID_VALUE): "the range must be reserved, free of mappings, and the handle alive",
    int(CudaResult.NOT_SUPPORTED): "the driver maps whole allocations only: offset 0 and their exact size",
}
_WHY_NO_ACCESS = {
    int(CudaResult.INVALID_VALUE): "the range must be whole mappings, and the list not empty",
    int(CudaResult.NOT_SUPPORTED): "this location cannot reach that memory",
}
_WHY_NOT_WRITTEN = "the whole range must be mapped and writable for the current device"
_WHY_NOT_READ = "the whole range must be mapped and readable for the current device"
