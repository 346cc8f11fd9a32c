"""Locations: devices, what they are and can do and how much memory they have; and how to name a place.

Not called `device`: a submodule of that name would take the place of the function `remap.device`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, SupportsIndex, TypeAlias

from remap import drivers
from remap.drivers.memory_types import probe
from remap.drivers.protocol import Driver
from remap.errors import InvalidValueError, OutOfMemoryError, RemapError, not_supported
from remap.hints import hinted
from remap.lifetime import drain, queued
from remap.sizes import KiB, MiB, counted, format_size
from remap.types import (
    Access,
    AllocationProperties,
    Capability,
    DeviceProperties,
    Grants,
    Granularity,
    HandleType,
    Host,
    HostNuma,
    Location,
    LocationKind,
    MemoryInfo,
    MemoryType,
)


@hinted(free="memory().free", sync="synchronize()", total="memory().total")
class Device:
    """One device of the current driver. Made by `remap.device`; two with the same number are equal.

    Its primary context is retained at the first call that needs one, never created anew or reset, and kept until
    the driver is closed.
    """

    __slots__ = ("_capabilities", "_context", "_driver", "_properties", "index", "location")

    def __init__(self, driver: Driver, index: int) -> None:
        self._driver = driver
        self.index = index
        self.location = Location(LocationKind.DEVICE, index)
        self._context = 0
        self._properties: DeviceProperties | None = None
        self._capabilities: Mapping[str, Capability] | None = None

    @property
    def properties(self) -> DeviceProperties:
        """What the device is, as its driver reports it."""
        if self._properties is None:
            self._properties = self._driver.device_properties(self.index)
        return self._properties

    @property
    def name(self) -> str:
        """The product's name."""
        return self.properties.name

    @property
    def capabilities(self) -> Mapping[str, Capability]:
        """Every feature by name: whether it works on this device and, where not, the reason.

        Asked once: what a probe found missing (a fabric handle, say) is not tried again.
        """
        if self._capabilities is None:
            self._capabilities = MappingProxyType(dict(self._driver.capabilities(self.index)))
        return self._capabilities

    def require(self, capability: str) -> None:
        """Raise `NotSupportedError`, naming the capability and the reason, unless the device has it."""
        found = self.capabilities[capability]
        if not found:
            asked = f"{capability} on {self}"
            raise not_supported("cuDeviceGetAttribute", asked, found.reason, capability=capability)

    def memory_types(self) -> tuple[MemoryType, ...]:
        """Return every combination of place, shareable handle, compression and RDMA, each tried and not assumed.

        The places are this device, the host, and the host's NUMA node beside the device if there is one. Each try
        takes one granule of memory there for a moment; where none is free, that is the reason.
        """
        node = self.properties.numa_node
        places = (self.location, Host(), *(() if node is None else (HostNuma(node),)))
        with self.current():
            return tuple(probe(self._driver, places, self.capabilities))

    def memory(self) -> MemoryInfo:
        """Return free and total memory in bytes, machine-wide, at this moment. (cuMemGetInfo)

        Unless a stream is being captured, what was collected unclosed is given back first, which may wait for work that
        still uses it.
        """
        if queued:
            drain()
        return self._memory()

    def _memory(self) -> MemoryInfo:
        """Return it as it is, and wait for nothing: for those who may hold a lock."""
        with self.current():
            return self._driver.memory_info()

    def granularity(
        self, *, shareable: HandleType | str | None = None, compressible: bool = False, rdma: bool = False
    ) -> Granularity:
        """Return the granularities in bytes of allocations on this device. (cuMemGetAllocationGranularity)"""
        kinds = parse_handle_types(shareable)
        return self._driver.granularity(AllocationProperties(self.location, kinds, compressible, rdma))

    def peers(self) -> tuple[Device, ...]:
        """Return the other devices whose memory this one can reach. (cuDeviceCanAccessPeer)"""
        others = (device(index) for index in range(self._driver.device_count()) if index != self.index)
        return tuple(other for other in others if self._driver.can_access_peer(self.index, other.index))

    def backing_devices(self) -> tuple[Device, ...]:
        """Return the devices that can back memory this one uses: itself and its peers that have VMM."""
        found = sorted((self, *self.peers()), key=lambda one: one.index)
        return tuple(one for one in found if one.capabilities["vmm"])

    def synchronize(self) -> None:
        """Wait for all work of this device's context. (cuCtxSynchronize)"""
        with self.current():
            self._driver.synchronize_context()

    def current(self) -> Current:
        """Return a context manager in which this device's context is the thread's current one."""
        return Current(self)

    def __eq__(self, other: object) -> bool:
        """Compare by driver and number."""
        return isinstance(other, Device) and other.index == self.index and other._driver is self._driver

    def __hash__(self) -> int:
        """Hash by number."""
        return hash((Device, self.index))

    def __repr__(self) -> str:
        """Return driver, number and name, or why its driver does not tell the name."""
        try:
            name = self.name
        except RemapError as error:
            name = error.rule or str(error)
        return f"<remap.Device {self.index} of the {self._driver.name} driver: {name}>"

    def __str__(self) -> str:
        """Return `device 0`."""
        return str(self.location)


class Current:
    """Make a device's context current for a block, and restore the thread's own on every path.

    Pushes only if another context is current, so that a program that has set one pays nothing.
    """

    __slots__ = ("_device", "_pushed")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pushed = False

    def __enter__(self) -> None:
        """Push the context if another is current."""
        device = self._device
        driver = device._driver
        if not device._context:
            device._context = driver.retain_context(device.index)
        if driver.current_context() != device._context:
            driver.push_context(device._context)
            self._pushed = True

    def __exit__(self, *_: object) -> None:
        """Pop what was pushed."""
        if self._pushed:
            self._pushed = False
            self._device._driver.pop_context()


def in_context(at: Device, call: Callable[..., Any], /, *arguments: Any) -> None:
    """Make a driver call while a device's context is current: a step of a release, mostly."""
    with at.current():
        call(*arguments)


DeviceLike: TypeAlias = Device | SupportsIndex
"""What is taken where a device is asked for: a `Device` or its number."""

LocationLike: TypeAlias = Device | Location | SupportsIndex
"""What is taken where a location is asked for: also `remap.Host()` and `remap.HostNuma(n)`."""

AccessLike: TypeAlias = Mapping[Any, Access | str]
"""What is taken as access: locations (a device, its number, `remap.Host()`) and "r", "rw" or "none" for each."""

RightLike: TypeAlias = Access | str | AccessLike
"""What is taken where memory is made: one right for all who are `accessing` it, or a right for each location."""


class _Known:
    """The device objects of one driver, by number, and the fastest of them.

    Each driver has a record of its own: a thread that was late may still be writing into that of the last one.
    """

    latest: ClassVar[_Known | None] = None

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.by_index: dict[int, Device] = {}
        self.fastest: Device | None = None

    @classmethod
    def of(cls, driver: Driver) -> _Known:
        """Return the record of a driver, a new one if the latest is another's."""
        found = cls.latest
        if found is None or found.driver is not driver:
            found = cls.latest = cls(driver)
        return found


def device(which: DeviceLike | None = None) -> Device:
    """Return a device of the current driver.

    `which` is a number; None picks the fastest by multiprocessors × cores × clock, ties to the lowest number.
    Raises `InvalidValueError` for a number that does not exist.
    """
    driver = drivers.current()
    if isinstance(which, Device):
        return _own(which, driver)
    known = _Known.of(driver)
    if which is None:
        if known.fastest is None:
            # Ties go to the lowest number (A1).
            known.fastest = max(devices(), key=lambda one: (one.properties.speed, -one.index))
        return known.fastest
    try:
        index = operator.index(which)
    except TypeError:
        raise TypeError(f"a device is a remap.Device or its number, not {which!r}") from None
    found = known.by_index.get(index)
    if found is None:
        count = driver.device_count()
        if not 0 <= index < count:
            raise InvalidValueError(
                f"device {index}",
                rule=f"the {driver.name} driver has {counted(count, 'device')}, numbered from 0",
                next_step=f"Use 0 to {count - 1}" if count > 1 else "Use 0",
            )
        found = known.by_index.setdefault(index, Device(driver, index))
    return found


def devices() -> tuple[Device, ...]:
    """Return all devices of the current driver, in the order of their numbers."""
    return tuple(device(index) for index in range(drivers.current().device_count()))


def known_devices() -> tuple[Device, ...]:
    """Return the devices of the current driver that were asked for so far; asks the driver nothing."""
    driver = drivers.opened()
    return () if driver is None else tuple(_Known.of(driver).by_index.values())


def location(where: LocationLike) -> Location:
    """Return `where` as a location, checking that a device of that number exists."""
    if isinstance(where, Location):
        return device(where.index).location if where.is_device else where
    return device(where).location


def locations(where: LocationLike | Iterable[LocationLike], what: str) -> tuple[Location, ...]:
    """Return one or several places as distinct locations, in the order given; raises for none or a repeat."""
    check_no_mapping(where, what)
    if isinstance(where, str | bytes):  # iterable, but no locations are in it
        number = str(where).rpartition(":")[2]
        step = (
            f"Write {what}={number if number.isdecimal() else 0} for that device, remap.Host() for the host"
        )
        raise TypeError(f"{what} is a device, a location or several of them, not {where!r}. {step}")
    named: tuple[Any, ...] = (
        (where,) if isinstance(where, Device | Location) or not isinstance(where, Iterable) else tuple(where)
    )
    if None in named:  # `location` would take it as the default device
        raise TypeError(
            f"{what} names devices and locations, and None is neither. Write 0 for the first device"
        )
    found = tuple(location(place) for place in named)
    if not found:
        raise InvalidValueError(f"{what} of no location", rule="name at least one device or host location")
    if len(set(found)) != len(found):
        repeated = next(place for place in found if found.count(place) > 1)
        raise InvalidValueError(f"{what} naming {repeated} twice", rule="each location counts once")
    return found


def check_no_mapping(where: Any, what: str) -> None:
    """Raise for a mapping where locations are named: what it says of each would be lost."""
    if isinstance(where, Mapping):
        step = "Pass the mapping as access=" if what == "accessing" else "Pass list(mapping)"
        raise TypeError(f"{what} names locations alone, and not a value for each: {where!r}. {step}")


def parse_handle_types(
    shareable: HandleType | str | Iterable[HandleType | str] | None,
) -> frozenset[HandleType]:
    """Return the kinds of shareable handle that were asked for; raises `InvalidValueError` for an unknown one."""
    if shareable is None:
        return frozenset()
    kinds = (shareable,) if isinstance(shareable, str) else shareable
    if not isinstance(kinds, Iterable):
        raise TypeError(
            f'shareable is "posix_fd", "fabric" or "win32", or several of them, not {shareable!r}'
        )
    try:
        return frozenset(HandleType(kind) for kind in kinds)
    except ValueError:
        rule = 'a shareable handle is "posix_fd", "fabric" or "win32"'
        raise InvalidValueError(f"shareable {shareable!r}", rule=rule) from None


def parse_access(access: AccessLike | None) -> Grants:
    """Return access rights as a driver takes them, with every location checked to exist."""
    if not access:
        return ()
    if not isinstance(access, Mapping):
        raise TypeError(f'access names a right for each location, as in {{0: "rw"}}, and is not {access!r}')
    return tuple((location(place), Access.parse(right)) for place, right in access.items())


def parse_rights(
    access: RightLike,
    accessing: LocationLike | Iterable[LocationLike] | None,
    places: tuple[Location, ...],
) -> Grants:
    """Return who gets which right: those that a mapping names, else all `accessing`, by default `places`, the one."""
    if isinstance(access, str) or not isinstance(access, Mapping):
        right = Access.parse(access)
        return tuple(
            (user, right) for user in (places if accessing is None else locations(accessing, "accessing"))
        )
    if accessing is not None:
        raise InvalidValueError(
            "access= with a right for each location, and accessing=",
            rule="both say who may touch the memory",
            next_step="Leave accessing= out",
        )
    if not access:
        raise InvalidValueError("access of no location", rule="name at least one device or host location")
    return parse_access(access)


def highest_right(access: RightLike) -> Access:
    """Return the right that all are given, or the highest of those that a mapping gives."""
    rights = access.values() if isinstance(access, Mapping) else (access,)
    return max(map(Access.parse, rights), key=list(Access).index, default=Access.NONE)


def _own(found: Device, driver: Any) -> Device:
    if found._driver is not driver:
        raise InvalidValueError(
            f"{found} of the {found._driver.name} driver",
            rule="the driver was changed since that device object was made",
            next_step=f"Ask again: remap.device({found.index})",
        )
    return found


def _larger_machine(at: Device, size: int) -> str:
    """Return the call that simulates the present devices, this one larger; alike they stay alike."""
    sizes = [one.properties.memory for one in devices()]
    count = f"devices={len(sizes)}, " * (len(sizes) != 2)
    alike = len(set(sizes)) == 1
    sizes[at.index] = size
    written = [f'"{one // MiB}MiB"' if one % MiB == 0 else f'"{one // KiB}KiB"' for one in sizes]
    memory = written[at.index] if alike else f"[{', '.join(written)}]"
    return f'remap.use("host", {count}memory={memory})'


def explain_shortage(error: OutOfMemoryError, asked: str, size: int, where: Location) -> OutOfMemoryError:
    """Reword an error where `size` bytes were not to be had at a location: what there is, and what to do about it.

    What no closing and pausing could make room for is told apart: then only a larger machine, or more devices, help.
    """
    if error.injected:
        return error.explain(asked)
    if not where.is_device:
        return error.explain(asked, next_step=error.next_step or "Close, pause or trim something there first")
    at = device(where.index)
    info = at._memory()
    if size <= info.total:
        rule = f"{format_size(info.free)} of {format_size(info.total)} are free there"
        return error.explain(asked, rule=rule, next_step="Close, pause or trim something there first")
    step = "Ask for less, or spread it over several devices (resident=)"
    if at._driver.name == "host":
        needed = size + info.total - info.free  # with what is in use there already
        step = (
            f"Ask for less, or simulate larger devices: {_larger_machine(at, 1 << (needed - 1).bit_length())}"
        )
    rule = f"the whole device has {format_size(info.total)}, and {format_size(info.free)} are free"
    return error.explain(asked, rule=rule, next_step=step)
