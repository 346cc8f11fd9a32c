"""What a pool is made with, and what that means on each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from remap.buffers.placement import granule
from remap.drivers.multicast_power import MulticastProperties, SupportsMulticast
from remap.errors import InvalidValueError
from remap.integrations import routing
from remap.integrations.layout import MOST_ACCESSING
from remap.integrations.memory import Asked
from remap.locations import device, parse_handle_types
from remap.types import AllocationProperties, HandleType, Host

Release: TypeAlias = Literal["pool", "region"]
"""When memory that holds no tensor any more goes back: with the pool's sleep or trim, or with each region."""


class PoolOptions(NamedTuple):
    """What a pool was made with."""

    shareable: frozenset[HandleType] = frozenset()
    rdma: bool = False
    chunks: int = 1
    release: Release = "pool"
    accessing: tuple[int, ...] = ()


def options_from(
    shareable: HandleType | str | Sequence[HandleType | str] | None,
    rdma: bool,
    chunks: int,
    release: Release,
    accessing: Sequence[int],
) -> PoolOptions:
    """Return checked options."""
    if chunks < 1:
        raise InvalidValueError(f"chunks={chunks}", rule="a segment has at least one")
    if release not in ("pool", "region"):
        raise InvalidValueError(f"release={release!r}", rule='it is "pool" or "region"')
    users = tuple(device(one).index for one in accessing)
    return PoolOptions(parse_handle_types(shareable), rdma, chunks, release, users)


def asked_of(driver: Any, options: PoolOptions) -> dict[int, Asked]:
    """Return what a pool with these options asks for on each device."""
    whole: object = driver
    multicast = whole if isinstance(whole, SupportsMulticast) else None
    count = driver.device_count()
    # Torch copies between devices as if all of them could touch everything.
    users = options.accessing or (routing.initialized_devices() if driver.name == "cuda" else ())
    found: dict[int, Asked] = {}
    for at in range(count):
        kinds = _possible(options.shareable, at)
        properties = AllocationProperties(device(at).location, kinds, rdma=options.rdma)
        size = granule(driver, properties)
        if kinds and multicast is not None and device(at).capabilities["multicast"]:
            wanted = MulticastProperties(count, size, kinds)
            size = max(size, multicast.multicast_granularity(wanted).minimum)
        peers = [user for user in users if user != at and driver.can_access_peer(user, at)]
        accessing = [device(one).location for one in (at, *peers)]
        if driver.name == "host" and device(at).capabilities["coherent"]:
            accessing.append(Host())  # CPU torch is who uses it
        found[at] = Asked(properties, tuple(accessing[:MOST_ACCESSING]), size, options.chunks)
    return found


def _possible(kinds: frozenset[HandleType], at: int) -> frozenset[HandleType]:
    """Return the handle types without fabric where its probe fails, if another one is left."""
    if HandleType.FABRIC in kinds and len(kinds) > 1 and not device(at).capabilities["fabric"]:
        return kinds - {HandleType.FABRIC}
    for kind in kinds:
        device(at).require(str(kind))
    return kinds
