"""The frozen values that drivers take and give, and that every room above them shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from remap.errors import InvalidValueError
from remap.sizes import format_size


class LocationKind(StrEnum):
    """The kinds of place where physical memory can be."""

    DEVICE = "device"
    HOST = "host"
    HOST_NUMA = "host_numa"


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """A place that can hold memory or be granted access to it.

    `index` is the device number or the NUMA node; it is 0 for `HOST`.
    """

    kind: LocationKind
    index: int = 0
    # Locations are keys at every launch and copy, so the hash is made once.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the hash."""
        object.__setattr__(self, "_hash", hash((self.kind, self.index)))

    def __hash__(self) -> int:
        """Return the hash made at construction."""
        return self._hash

    @property
    def is_device(self) -> bool:
        """Whether this is a device (and not the host or one of its NUMA nodes)."""
        return self.kind is LocationKind.DEVICE

    def __repr__(self) -> str:
        """Return what a program writes for it."""
        if self.kind is LocationKind.DEVICE:
            return f"remap.device({self.index}).location"
        return "remap.Host()" if self.kind is LocationKind.HOST else f"remap.HostNuma({self.index})"

    def __str__(self) -> str:
        """Return the name used in messages and pictures: `device 0`, `host`, `host node 1`."""
        if self.kind is LocationKind.DEVICE:
            return f"device {self.index}"
        return "host" if self.kind is LocationKind.HOST else f"host node {self.index}"


def Host() -> Location:  # noqa: N802 (a place, named as users write it: remap.Host())
    """Return the host's memory, on whatever NUMA node the driver picks."""
    return Location(LocationKind.HOST)


def HostNuma(node: int) -> Location:  # noqa: N802
    """Return the memory of the host's NUMA node `node`; raises `InvalidValueError` for a negative one."""
    if node < 0:
        raise InvalidValueError(
            f"NUMA node {node}",
            rule="nodes are numbered from 0, and -1 means that the system has no such node",
            next_step="Use remap.Host() to let the driver pick",
        )
    return Location(LocationKind.HOST_NUMA, node)


class Access(StrEnum):
    """What a location may do with a mapping."""

    NONE = "none"
    READ = "r"
    READ_WRITE = "rw"

    @classmethod
    def parse(cls, value: Access | str) -> Access:
        """Return `value` as an access right; raises `InvalidValueError`."""
        try:
            return cls(value)
        except ValueError:
            rule = 'access is "none", "r" or "rw"'
            raise InvalidValueError(f"access {value!r}", rule=rule) from None

    @property
    def readable(self) -> bool:
        """Whether reads are allowed."""
        return self is not _NONE

    @property
    def writable(self) -> bool:
        """Whether writes are allowed."""
        return self is _READ_WRITE


# Looking a member up in its enum takes longer than everything else that these are compared for.
_NONE, _READ_WRITE = Access.NONE, Access.READ_WRITE


class HandleType(StrEnum):
    """The kinds of shareable handle an allocation can be created for."""

    POSIX_FD = "posix_fd"
    FABRIC = "fabric"
    WIN32 = "win32"


@dataclass(frozen=True, slots=True)
class AllocationProperties:
    """What a physical allocation is asked to be, or was found to be (`CUmemAllocationProp`).

    `compressible` is a request when creating, and the outcome when read back.
    """

    location: Location
    handle_types: frozenset[HandleType] = frozenset()
    compressible: bool = False
    rdma: bool = False
    # Drivers look their own form of these up at each create, so the hash is made once.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the hash."""
        object.__setattr__(
            self, "_hash", hash((self.location, self.handle_types, self.compressible, self.rdma))
        )

    def __hash__(self) -> int:
        """Return the hash made at construction."""
        return self._hash

    def at(self, place: Location) -> AllocationProperties:
        """Return the same properties for another location."""
        if self.location == place:
            return self
        return AllocationProperties(place, self.handle_types, self.compressible, self.rdma)


@dataclass(frozen=True, slots=True)
class Granularity:
    """The sizes in bytes that allocations must (minimum) and should (recommended) be multiples of."""

    minimum: int
    recommended: int


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """The memory of one device in bytes, as its driver reports it; `free` is machine-wide."""

    free: int
    total: int

    @property
    def used(self) -> int:
        """The bytes that are not free, whoever holds them."""
        return self.total - self.free


@dataclass(frozen=True, slots=True)
class AddressRange:
    """The base address and the size in bytes of one mapping or one plain allocation."""

    base: int
    size: int


@dataclass(frozen=True, slots=True)
class PointerInfo:
    """What the driver says of an address: its whole reservation, the mapping's identity, the device."""

    range_start: int
    range_size: int
    buffer_id: int
    device: int


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether one feature works here, and the reason where it does not."""

    name: str
    supported: bool
    reason: str = ""

    def __bool__(self) -> bool:
        """Tell whether the feature works."""
        return self.supported


@dataclass(frozen=True, slots=True)
class MemoryType:
    """One combination of place, shareable handle, compression and RDMA: whether such memory can be had, or why not.

    True as a condition where it can.
    """

    asked: AllocationProperties
    """What was asked for; it names one kind of shareable handle, or none."""

    supported: bool
    reason: str = ""
    """Why it cannot be had, empty where it can."""

    def __bool__(self) -> bool:
        """Tell whether such memory can be had, as asked."""
        return self.supported

    def __str__(self) -> str:
        """Return what it is in words, such as `compressible, shared by posix_fd, on device 0`."""
        words = ["compressible"] * self.asked.compressible + ["for RDMA"] * self.asked.rdma
        words += [f"shared by {kind}" for kind in sorted(self.asked.handle_types)]
        return ", ".join([*(words or ["plain"]), f"on {self.asked.location}"])


CAPABILITIES = (
    "vmm",
    "posix_fd",
    "win32",
    "fabric",
    "multicast",
    "compression",
    "rdma",
    "host_vmm",
    "host_numa_vmm",
    "memory_pools",
    "managed_memory",
    "hmm",
    "ats",
    "coherent",
)
"""The names of all capabilities; every driver answers for each of them on each device."""


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What a device is, in the units of `cuDeviceGetAttribute`: clock in kHz, sizes in bytes."""

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    cores_per_multiprocessor: int
    clock_khz: int
    memory: int
    warp_size: int = 32
    max_threads_per_block: int = 1024
    max_block: tuple[int, int, int] = (1024, 1024, 64)
    max_grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    shared_memory_per_block: int = 48 * 1024
    shared_memory_per_block_optin: int = 227 * 1024
    l2_cache: int = 0
    numa_node: int | None = None
    integrated: bool = False

    @property
    def speed(self) -> int:
        """Multiprocessors × cores × clock: the figure by which the fastest device is chosen (A1)."""
        return self.multiprocessors * self.cores_per_multiprocessor * self.clock_khz


Grants: TypeAlias = Sequence[tuple[Location, Access]]
"""Access rights as a driver takes them: a location and its right, in order."""

Dim3: TypeAlias = tuple[int, int, int]
"""The three extents of a grid or a block."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The shape of one launch: blocks, threads a block, and dynamic shared memory in bytes a block."""

    grid: Dim3
    block: Dim3
    shared_bytes: int = 0


class PackedArguments(Protocol):
    """Kernel arguments, packed once and kept alive until the launch has been queued."""

    @property
    def pointers(self) -> int:
        """The address of the array of pointers that `cuLaunchKernel` takes; 0 where there are none."""
        ...

    @property
    def values(self) -> tuple[object, ...]:
        """The same arguments as Python values, for kernels that run in Python."""
        ...


@dataclass(frozen=True, slots=True)
class Touched:
    """A range that a launch may read, or read and write (`writes`)."""

    address: int
    size: int
    writes: bool = field(default=True)


class Held(NamedTuple):
    """Physical bytes that an object holds, or has mapped; `address` is None for bytes at no address.

    `memory` is equal for the same bytes held twice (aliases), and None where nobody else can hold them. `rights` are
    those of this mapping. `source` says who counts the bytes: "own", "pool" and "graph" (a device's pool for stream
    order, and for graphs), or "foreign" (another process).
    """

    address: int | None
    size: int
    location: Location
    memory: object = None
    rights: tuple[tuple[Location, Access], ...] = ()
    source: str = "own"


@dataclass(frozen=True, slots=True)
class Description:
    """What a live object is, as a frozen record."""

    kind: str
    serial: int
    size: int
    address: int | None
    detail: str

    def __str__(self) -> str:
        """Return it as one phrase: `buffer 7 of 4 MiB at 0x7f… (2 chunks)`."""
        where = "" if self.address is None else f" at {self.address:#x}"
        detail = f" ({self.detail})" if self.detail else ""
        # What lies nowhere and has no bytes, a stream for instance, has no size at all.
        sized = f" of {format_size(self.size)}" if self.size or where else ""
        return f"{self.kind} {self.serial}{sized}{where}{detail}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a live object holds, for pictures and reports: addresses, bytes, and what became of them.

    `reserved` is the (address, size) of the addresses that it keeps, `kept` the bytes that its backup takes on the
    host while it is paused.
    """

    reserved: tuple[int, int] | None = None
    held: tuple[Held, ...] = ()
    paused: str = ""
    shared: bool = False
    kept: int = 0
    groups: tuple[str, ...] = ()


@runtime_checkable
class SupportsStream(Protocol):
    """Any stream of another library, by CUDA's protocol: `__cuda_stream__()` returns (version, handle)."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, 0, and the stream's handle."""
        ...
