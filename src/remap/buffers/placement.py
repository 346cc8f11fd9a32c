"""Placements: what the options of an allocation amount to, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from remap.errors import AccessError, DriverError, InvalidValueError
from remap.locations import (
    LocationLike,
    RightLike,
    check_no_mapping,
    device,
    devices,
    locations,
    parse_handle_types,
    parse_rights,
)
from remap.types import Access, AllocationProperties, Grants, HandleType, Host, HostNuma, Location


@dataclass(frozen=True, slots=True)
class Placement:
    """What the options of an allocation amount to: what to create, in order, and who may touch it."""

    properties: tuple[AllocationProperties, ...]
    grants: Grants
    rights: Mapping[Location, Access]
    granule: int


class _Placements:
    """The placements already worked out for one driver. Programs allocate with few sets of options, many times.

    Each driver has a record of its own: a thread that was late may still be writing into that of the last one.
    """

    LIMIT: ClassVar[int] = 256
    latest: ClassVar[_Placements | None] = None

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.known: dict[Any, Placement] = {}

    @classmethod
    def of(cls, driver: Any) -> dict[Any, Placement]:
        """Return what is known for a driver."""
        found = cls.latest
        if found is None or found.driver is not driver or len(found.known) > cls.LIMIT:
            found = cls.latest = cls(driver)
        return found.known


def place(
    driver: Any,
    resident: LocationLike | Iterable[LocationLike] | None,
    accessing: LocationLike | Iterable[LocationLike] | None,
    access: RightLike,
    shareable: HandleType | str | Iterable[HandleType | str] | None,
    compressible: bool,
    rdma: bool,
) -> Placement:
    """Check the options of an allocation and return what they amount to; raises before anything is allocated."""
    if not isinstance(access, str) and isinstance(access, Mapping):
        grants = parse_rights(access, accessing, ())
        users = tuple(user for user, _ in grants)
        reached = place(driver, resident, users, Access.NONE, shareable, compressible, rdma)
        return replace(reached, grants=grants, rights=_readable(grants))
    known = _Placements.of(driver)
    key: Any = (resident, accessing, access, shareable, compressible, rdma)
    try:
        found = known.get(key)
    except TypeError:  # lists and sets have no hash
        check_no_mapping(resident, "resident")
        check_no_mapping(accessing, "accessing")
        key = tuple(_hashable(part) for part in key)
        found = known.get(key)
    if found is None:
        found = known[key] = _place(driver, *key)
    return found


def one_place(
    what: str, device: LocationLike | None, resident: LocationLike | Iterable[LocationLike] | None
) -> LocationLike | Iterable[LocationLike] | None:
    """Return what `device=`, the short word for one place, and `resident=` name; raises where both are given."""
    if device is None:
        return resident
    if resident is not None:
        raise InvalidValueError(f"{what} with device= and resident=", rule="both say where it lies: give one")
    return locations((device,), "device")


def _hashable(part: Any) -> Any:
    return part if isinstance(part, str) or not hasattr(part, "__iter__") else tuple(part)


def _place(
    driver: Any,
    resident: LocationLike | Iterable[LocationLike] | None,
    accessing: LocationLike | Iterable[LocationLike] | None,
    access: Access | str,
    shareable: HandleType | str | Iterable[HandleType | str] | None,
    compressible: bool,
    rdma: bool,
) -> Placement:
    places = locations(device() if resident is None else resident, "resident")
    grants = parse_rights(access, accessing, places)
    kinds = parse_handle_types(shareable)
    check_reach(driver, [user for user, _ in grants], places)
    properties = tuple(AllocationProperties(one, kinds, compressible, rdma) for one in places)
    return Placement(properties, grants, _readable(grants), granule(driver, properties[0]))


def _readable(grants: Grants) -> dict[Location, Access]:
    return {user: right for user, right in grants if right.readable}


def granule(driver: Any, properties: AllocationProperties) -> int:
    """Return the largest granularity over all locations of the driver, so that every migration is legal."""
    places = [one.location for one in devices()]
    places += [place for place in (Host(), *_host_nodes()) if not properties.handle_types or place != Host()]
    return max(_minimum(driver, properties.at(place)) for place in places)


def _minimum(driver: Any, properties: AllocationProperties) -> int:
    try:
        return int(driver.granularity(properties).minimum)
    except DriverError:
        if properties.location.is_device:
            raise
        return 1  # host memory of this kind does not exist here, so nothing will migrate there


def _host_nodes() -> list[Location]:
    nodes = {one.properties.numa_node for one in devices()}
    return [HostNuma(node) for node in sorted(node for node in nodes if node is not None and node >= 0)]


def check_reach(driver: Any, users: Iterable[Location], places: tuple[Location, ...]) -> None:
    """Raise before anything is allocated if a user cannot reach a place: peer capability is needed (A6)."""
    for user in users:
        for place in places:
            if user == place or not place.is_device:
                continue
            if not user.is_device:
                if device(place.index).capabilities["coherent"]:
                    continue
                raise AccessError(
                    f"access of {user} to memory on {place}",
                    rule="the CPU cannot be granted access to device memory here",
                    next_step="Copy with to_host(), or make the memory resident on remap.Host()",
                )
            if not driver.can_access_peer(user.index, place.index):
                raise AccessError(
                    f"access of {user} to memory on {place}",
                    rule=f"{user} cannot reach {place} (cuDeviceCanAccessPeer says no)",
                    next_step=f"Devices that {user} reaches: {_reached(user)}",
                )


def _reached(user: Location) -> str:
    return ", ".join(str(one) for one in device(user.index).peers()) or "none"
