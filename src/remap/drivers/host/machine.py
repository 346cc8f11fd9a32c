"""The simulated machine: what `HostDriver(...)` was asked to be, and the state that all its parts share."""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from remap.drivers.host import linux
from remap.drivers.host.guard import Guard
from remap.drivers.host.ledger import Ledger
from remap.errors import CudaResult, InvalidValueError, driver_error
from remap.sizes import Size, check_aligned, format_size, is_power_of_two, parse_size
from remap.types import CAPABILITIES, Location, LocationKind, MemoryInfo

T = TypeVar("T")
_DEVICE = LocationKind.DEVICE  # looking a member up costs more than all the rest of `bit`
Peers: TypeAlias = str | Sequence[Sequence[bool]]
"""`"all"`, `"none"`, or a matrix whose row `i` says which devices device `i` reaches."""


class Machine:
    """The state that all parts of one driver share.

    `lock` guards every table of the driver. It is held for a few microseconds at a time, never while waiting for
    work or copying bytes; whoever holds it may take a stream's own lock, never the other way round.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._devices = options.devices
        self.all_devices = (1 << options.devices) - 1
        self.cpu = 1 << options.devices
        self.lock = threading.Lock()
        self.guard = Guard()
        # One counter for every kind of handle: a stream's can then never be taken for an event's. The first ones
        # are left out, as CUDA gives 0, 1 and 2 a meaning as streams.
        self.handles = itertools.count(16)
        self.ledger = Ledger.from_environment()
        self.budgets = {
            Location(LocationKind.DEVICE, index): Budget(f"device {index}", size, self.ledger)
            for index, size in enumerate(options.memory)
        }
        self.host_budget = Budget("the host", options.host_memory, self.ledger, "host_memory")
        # Counts the launches that may touch anything; a mapping remembers how many there were before it.
        self.tick = 0
        self.guard.watch_forks(self)

    def after_fork(self) -> None:
        """Renew the lock, which a thread that does not exist in the child may hold, and close the ledger."""
        self.lock = threading.Lock()
        if self.ledger is not None:
            self.ledger.after_fork()

    def shut_down(self) -> None:
        """Leave the ledger."""
        if self.ledger is not None:
            with self.lock:
                self.ledger.close()

    def budget(self, location: Location) -> Budget:
        """Return what pays for memory at a location that exists."""
        return self.budgets[location] if location.is_device else self.host_budget

    def bit(self, location: Location) -> int:
        """Return the bit that stands for a location in sets of locations, 0 if the machine has no such location.

        The host and its nodes are one there: a right of the CPU holds for every node, on CUDA too.
        """
        index = location.index
        if location.kind is _DEVICE:
            return 1 << index if 0 <= index < self._devices else 0
        if location.kind is LocationKind.HOST_NUMA and not 0 <= index < self.options.numa_nodes:
            return 0
        return self.cpu


class Budget:
    """The physical memory of one place: a figure that allocations take from and give back to.

    With a ledger, all processes that use the same one take from the same figure. `inode` is then what tells shareable
    memory apart, which counts once however many hold it; it is 0 for all other memory.
    """

    __slots__ = ("_ledger", "_name", "_option", "_total", "_used")

    def __init__(self, name: str, total: int, ledger: Ledger | None, option: str = "memory") -> None:
        self._name = name
        self._option = option
        self._total = total
        self._used = 0
        self._ledger = ledger

    @property
    def free(self) -> int:
        """The bytes that can be taken."""
        return self._total - (self._used if self._ledger is None else self._ledger.used(self._name))

    def info(self) -> MemoryInfo:
        """Return what is free, and the total."""
        return MemoryInfo(max(self.free, 0), self._total)

    def take(self, call: str, size: int, inode: int = 0) -> None:
        """Take `size` bytes, or raise OUT_OF_MEMORY saying what is free."""
        if self._ledger is None:
            free = self._total - self._used
        else:
            free = self._ledger.take(self._name, size, self._total, inode)
        if size > free:
            raise driver_error(
                call,
                CudaResult.OUT_OF_MEMORY,
                asked=f"{format_size(size)} of memory on {self._name}",
                rule=f"{format_size(max(free, 0))} of {format_size(self._total)} are free",
                next_step="Free other memory there, or open the host driver with more: "
                f'remap.use("host", {self._option}=...)',
            )
        self._used += size

    def give(self, size: int, inode: int = 0) -> None:
        """Give back what was taken."""
        self._used -= size
        if self._ledger is not None:
            self._ledger.give(self._name, size, inode)

    def hold(self, size: int, inode: int) -> None:
        """Note memory that another process took and this one holds, too: without a ledger it is only the other's."""
        if self._ledger is not None:
            self._ledger.hold(self._name, size, inode)

    def let_go(self, size: int, inode: int) -> None:
        """Hold it no longer."""
        if self._ledger is not None:
            self._ledger.give(self._name, size, inode)


@dataclass(frozen=True, slots=True)
class Options:
    """What the machine is made of, checked; the arguments of `HostDriver`."""

    memory: tuple[int, ...]
    host_memory: int
    granularity: int
    peers: tuple[tuple[bool, ...], ...]
    numa_nodes: int
    clock_khz: tuple[int, ...]
    coherent: bool
    integrated: bool
    compression: bool
    capabilities: Mapping[str, bool] = field(default_factory=dict[str, bool])

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.memory)


def check_options(
    *,
    devices: int,
    memory: Size | Sequence[Size],
    host_memory: Size,
    granularity: Size,
    peers: Peers,
    numa_nodes: int,
    clock_khz: int | Sequence[int],
    coherent: bool,
    integrated: bool | None,
    compression: bool,
    capabilities: Mapping[str, bool],
) -> Options:
    """Return the options of a machine; raises `InvalidValueError` naming the one that cannot be."""
    devices = _count(devices, "devices", "devices")
    numa_nodes = _count(numa_nodes, "numa_nodes", "NUMA nodes")
    granule = parse_size(granularity, "granularity")
    if not is_power_of_two(granule) or granule % linux.PAGE:
        rule = f"it must be a power of two and a multiple of the page size ({linux.PAGE} bytes)"
        raise InvalidValueError(f"granularity={granularity!r}", rule=rule)
    if not isinstance(capabilities, Mapping):
        raise TypeError(f'capabilities={capabilities!r}: it says yes or no to names, as in {{"hmm": True}}')
    each = memory if isinstance(memory, Sequence) and not isinstance(memory, str) else [memory] * devices
    sizes = [parse_size(one, "memory") for one in _per_device(each, devices, "memory")]
    for size in sizes:
        check_aligned(size, granule, "memory")
    clocks = clock_khz if isinstance(clock_khz, Sequence) else [clock_khz] * devices
    if not all(isinstance(clock, int) for clock in clocks):
        raise TypeError(f"clock_khz={clock_khz!r}: a clock is a whole number of kHz")
    unknown = sorted(set(capabilities) - set(CAPABILITIES))
    if unknown:
        raise InvalidValueError(
            f"capabilities={unknown}",
            rule="there are no such capabilities",
            next_step=f"The names are {', '.join(CAPABILITIES)}",
        )
    looks = coherent or capabilities.get("coherent", False)
    return Options(
        memory=tuple(sizes),
        host_memory=parse_size(host_memory, "host_memory"),
        granularity=granule,
        peers=_peer_matrix(peers, devices),
        numa_nodes=numa_nodes,
        clock_khz=tuple(_per_device(clocks, devices, "clock_khz")),
        coherent=looks,
        integrated=looks if integrated is None else integrated,
        compression=compression or capabilities.get("compression", False),
        capabilities=dict(capabilities),
    )


def _count(value: int, what: str, things: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what}={value!r}: it is the number of {things}, 1 to 64") from None
    if not 1 <= number <= 64:
        raise InvalidValueError(f"{what}={number}", rule=f"a machine has 1 to 64 {things}")
    return number


def _per_device(each: Sequence[T], devices: int, what: str) -> Sequence[T]:
    if len(each) != devices:
        raise InvalidValueError(
            f"{what}={each!r}", rule=f"give one value, or one for each of {devices} devices"
        )
    return each


def _peer_matrix(peers: Peers, devices: int) -> tuple[tuple[bool, ...], ...]:
    if isinstance(peers, str):
        if peers not in {"all", "none"}:
            raise InvalidValueError(
                f"peers={peers!r}", rule='it is "all", "none" or a matrix of truth values'
            )
        return tuple(tuple(peers == "all" and i != j for j in range(devices)) for i in range(devices))
    try:
        rows = [list(row) for row in peers]
    except TypeError:
        said = f'peers={peers!r}: it is "all", "none", or a list with a list of truth values for each device'
        raise TypeError(said) from None
    if len(rows) != devices or any(len(row) != devices for row in rows):
        rule = f"{devices} devices need a matrix of {devices} rows with {devices} truth values each"
        raise InvalidValueError(f"peers={peers!r}", rule=rule)
    return tuple(tuple(bool(row[j]) and i != j for j in range(devices)) for i, row in enumerate(rows))
