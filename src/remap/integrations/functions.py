"""The functions that native callbacks call: libcuda's own, or the host driver's behind the same signatures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from remap import drivers
from remap.drivers.protocol import Driver
from remap.errors import CudaResult, DriverError, RemapError
from remap.integrations.layout import Functions, Options
from remap.integrations.support import immortal
from remap.types import Access, AllocationProperties, HandleType, Location, LocationKind

_I64 = ctypes.c_int64
_NAMES = {
    "reserve": ("cuMemAddressReserve", 5),
    "free_range": ("cuMemAddressFree", 2),
    "create": ("cuMemCreate", 4),
    "release": ("cuMemRelease", 1),
    "map": ("cuMemMap", 5),
    "unmap": ("cuMemUnmap", 2),
    "set_access": ("cuMemSetAccess", 4),
    "push": ("cuCtxPushCurrent_v2", 1),
    "pop": ("cuCtxPopCurrent_v2", 1),
    "synchronize": ("cuCtxSynchronize", 0),
    "capturing": ("cuStreamIsCapturing", 2),
    "capture_mode": ("cuThreadExchangeStreamCaptureMode", 1),
    "memory_info": ("cuMemGetInfo_v2", 2),
}
"""The exported symbols, each with its number of arguments; all are 64 bits wide here, which is how they are passed."""

_PINNED, _DEVICE, _HOST = 1, 1, 2  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, _HOST
_HANDLE_TYPES = {HandleType.POSIX_FD: 1, HandleType.FABRIC: 8}
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class _Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = [("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int)]


def options_of(
    properties: AllocationProperties, accessing: Sequence[Location], granule: int, chunks: int
) -> Options:
    """Return what a pool asks for on the device of `properties`; all who access get to read and write."""
    index = properties.location.index
    kinds = sum(_HANDLE_TYPES.get(kind, 0) for kind in properties.handle_types)
    prop = _Properties(
        type=_PINNED, handle_types=kinds, location_type=_DEVICE, location_id=index, rdma=properties.rdma
    )
    access = b"".join(
        bytes(
            _Access(
                location_type=_DEVICE if one.is_device else _HOST, location_id=one.index, flags=_READ_WRITE
            )
        )
        for one in accessing
    )
    return Options(bytes(prop), access, len(accessing), granule, chunks)


def functions_of(driver: Driver) -> Functions:
    """Return the functions that callbacks for this kind of driver call."""
    found = _cuda() if driver.name == "cuda" else _host()
    libc = ctypes.CDLL(None)
    for name in ("lock", "unlock"):
        found[name] = _at(ctypes.cast(getattr(libc, f"pthread_mutex_{name}"), ctypes.c_void_p).value, 1)
    return Functions(**found)


def _at(address: int | None, arguments: int) -> Any:
    """Return the function at an address, taking 64-bit integers."""
    assert address
    return ctypes.CFUNCTYPE(ctypes.c_int, *[_I64] * arguments)(address)


def _cuda() -> dict[str, Any]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return {
            name: _at(ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value, arguments)
            for name, (symbol, arguments) in _NAMES.items()
        }
    except (OSError, AttributeError) as error:
        raise RemapError(
            "native allocation callbacks", rule=f"the functions of libcuda could not be found ({error})"
        ) from error


# -- the host driver --


def _host() -> dict[str, Any]:
    """Return the host driver's functions behind CUDA's signatures: those of the driver that is present at each call.

    Unlike CUDA's they need the GIL. That harms nobody: no framework calls them under a lock of its own.
    """

    def store(where: int, value: int) -> None:
        _I64.from_address(where).value = value

    def reserve(where: int, size: int, alignment: int, hint: int, _flags: int) -> None:
        store(where, drivers.current().reserve(size, alignment, hint))

    def create(where: int, size: int, properties: int, _flags: int) -> None:
        store(where, drivers.current().create(size, _read_properties(properties)))

    def map_(address: int, size: int, offset: int, handle: int, _flags: int) -> None:
        drivers.current().map(address, size, handle, offset)

    def set_access(address: int, size: int, descriptions: int, count: int) -> None:
        drivers.current().set_access(address, size, _read_grants(descriptions, count))

    def pop(where: int) -> None:
        store(where, drivers.current().pop_context())

    def capturing(stream: int, where: int) -> None:
        ctypes.c_int.from_address(where).value = int(drivers.current().stream_capturing(stream))

    def memory_info(free: int, total: int) -> None:
        found = drivers.current().memory_info()
        store(free, found.free)
        store(total, found.total)

    def nothing(_mode: int) -> None:
        """Do nothing: captures of the host driver mind nobody's calls."""

    def call(name: str) -> Callable[..., None]:
        def present(*arguments: int) -> None:
            getattr(drivers.current(), name)(*arguments)

        return present

    calls: dict[str, Callable[..., None]] = {
        "reserve": reserve,
        "free_range": call("free_range"),
        "create": create,
        "release": call("release"),
        "map": map_,
        "unmap": call("unmap"),
        "set_access": set_access,
        "push": call("push_context"),
        "pop": pop,
        "synchronize": call("synchronize_context"),
        "capturing": capturing,
        "capture_mode": nothing,
        "memory_info": memory_info,
    }
    return {
        name: immortal(ctypes.CFUNCTYPE(ctypes.c_int, *[_I64] * _NAMES[name][1])(_result(function)))
        for name, function in calls.items()
    }


def _result(call: Callable[..., None]) -> Callable[..., int]:
    """Return a call that returns a result as CUDA does, and never raises into its C caller (trap 9)."""

    def returning(*arguments: int) -> int:
        try:
            call(*arguments)
        except DriverError as error:
            return error.code
        except BaseException:  # noqa: BLE001 (there is nobody to raise it to)
            return int(CudaResult.UNKNOWN)
        return 0

    return returning


def _read_properties(where: int) -> AllocationProperties:
    prop = _Properties.from_address(where)
    kinds = frozenset(kind for kind, bit in _HANDLE_TYPES.items() if prop.handle_types & bit)
    return AllocationProperties(Location(LocationKind.DEVICE, prop.location_id), kinds, rdma=bool(prop.rdma))


def _read_grants(where: int, count: int) -> tuple[tuple[Location, Access], ...]:
    found = (_Access * count).from_address(where)
    kinds = {_DEVICE: LocationKind.DEVICE, _HOST: LocationKind.HOST}
    return tuple((Location(kinds[one.location_type], one.location_id), Access.READ_WRITE) for one in found)
