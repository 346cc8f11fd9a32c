"""Translate remap's frozen values to the structures of cuda.bindings and back.

Building a structure costs several calls into the bindings, so each distinct value is built once and kept. Drivers
only read what they are given, so one structure may serve any number of threads.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from remap.drivers.cuda.bindings import cuda
from remap.errors import CudaResult, driver_error
from remap.types import Access, AllocationProperties, HandleType, Location, LocationKind

_KEPT = 256  # far more kinds of memory and sets of rights than a program has, far less than would matter

# Numbers from cuda.h, since the enums cannot be had before the bindings are there.
_LOCATION_TYPES = {LocationKind.DEVICE: 1, LocationKind.HOST: 2, LocationKind.HOST_NUMA: 3}
_LOCATION_KINDS = {number: kind for kind, number in _LOCATION_TYPES.items()}
_ACCESS_FLAGS = {Access.NONE: 0, Access.READ: 1, Access.READ_WRITE: 3}
ACCESS_OF = {number: access for access, number in _ACCESS_FLAGS.items()}
_HANDLE_TYPES = {HandleType.POSIX_FD: 1, HandleType.WIN32: 2, HandleType.FABRIC: 8}


@lru_cache(maxsize=_KEPT)
def allocation_prop(properties: AllocationProperties) -> Any:
    """Return `CUmemAllocationProp` for `properties`."""
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location = location_of(properties.location)
    bits = handle_bits(properties.handle_types)
    # The bindings take the bit-or of several kinds as a number, and a single kind as a member of the enum.
    single = len(properties.handle_types) < 2
    prop.requestedHandleTypes = cuda.CUmemAllocationHandleType(bits) if single else bits
    prop.allocFlags.compressionType = int(properties.compressible)
    prop.allocFlags.gpuDirectRDMACapable = int(properties.rdma)
    return prop


@lru_cache(maxsize=_KEPT)
def location_of(location: Location) -> Any:
    """Return `CUmemLocation` for `location`."""
    made = cuda.CUmemLocation()
    made.type = cuda.CUmemLocationType(_LOCATION_TYPES[location.kind])
    made.id = location.index
    return made


@lru_cache(maxsize=_KEPT)
def access_descriptions(grants: tuple[tuple[Location, Access], ...]) -> list[Any]:
    """Return the list of `CUmemAccessDesc` for `grants`, in their order; it must not be changed."""
    made: list[Any] = []
    for location, access in grants:
        description = cuda.CUmemAccessDesc()
        description.location = location_of(location)
        description.flags = cuda.CUmemAccess_flags(_ACCESS_FLAGS[access])
        made.append(description)
    return made


def handle_bits(kinds: frozenset[HandleType]) -> int:
    """Return the bit-or of `CUmemAllocationHandleType` for several kinds."""
    return sum(_HANDLE_TYPES[kind] for kind in kinds)


def handle_type(kind: HandleType) -> Any:
    """Return `CUmemAllocationHandleType` for `kind`."""
    return cuda.CUmemAllocationHandleType(_HANDLE_TYPES[kind])


def properties_from(prop: Any) -> AllocationProperties:
    """Return the frozen value of a `CUmemAllocationProp` that the driver filled in."""
    kind = _LOCATION_KINDS.get(int(prop.location.type))
    if kind is None:
        raise driver_error(
            "cuMemGetAllocationPropertiesFromHandle",
            CudaResult.NOT_SUPPORTED,
            asked="read the properties of an allocation",
            rule=f"its location is of a kind that remap does not know ({int(prop.location.type)})",
        )
    # The second field of the structure. Read as a number: as an enum, the bit-or of two kinds raises ValueError.
    bits = ctypes.c_int.from_address(int(prop.getPtr()) + ctypes.sizeof(ctypes.c_int)).value
    return AllocationProperties(
        location=Location(kind, int(prop.location.id) if kind is not LocationKind.HOST else 0),
        handle_types=frozenset(kind for kind, bit in _HANDLE_TYPES.items() if bits & bit),
        compressible=bool(prop.allocFlags.compressionType),
        rdma=bool(prop.allocFlags.gpuDirectRDMACapable),
    )
