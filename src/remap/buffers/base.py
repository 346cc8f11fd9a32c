"""`Buffer`: one address range, backed by one or several physical allocations striped over locations.

A buffer reserves its addresses once; what stands behind them may change, the address never does (invariant 6).
Allocations are released as soon as they are mapped: the mappings alone keep the bytes (T8), so that closing is
unmapping, and nothing can be released twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from remap import drivers
from remap.device import LocationLike, device, devices, locations, parse_handle_types
from remap.errors import AccessError, DriverError, PausedError
from remap.handles import create_handle, parse_alignment, reserve_range
from remap.lifetime import Description, Release, Rollback, drain, pending
from remap.sizes import Size, parse_size, round_up
from remap.spans import Chunk, Span
from remap.types import Access, AllocationProperties, Grants, HandleType, Host, HostNuma, Location


class Buffer(Span):
    """Memory striped over its resident locations under one address. Made by `remap.allocate`.

    `generation` counts how often what stands behind the address has changed.
    """

    __slots__ = ("_chunks", "_listeners", "_paused", "_reserved", "generation", "properties")

    kind: ClassVar[str] = "buffer"

    def __init__(
        self,
        driver: Any,
        chunks: list[tuple[Location, int]],
        properties: AllocationProperties,
        grants: Grants,
        alignment: int,
    ) -> None:
        super().__init__(driver)
        self.properties = properties
        self.generation = 0
        self._paused = ""
        self._listeners: list[Callable[[Buffer], None]] = []
        self._size = sum(size for _, size in chunks)
        self._reserved = self._size
        self._rights = {place: right for place, right in grants if right.readable}
        self._chunks: list[Chunk] = []
        if self._size:  # a buffer of no bytes is valid and asks nothing of the driver
            with driver.lock, Rollback() as rollback:
                self._address = reserve_range(driver, self._size, alignment)
                rollback.undo(driver.free_range, self._address, self._size)
                at = self._address
                for place, size in chunks:
                    map_new(driver, at, size, at_place(properties, place), rollback)
                    self._chunks.append(Chunk(at, size, place))
                    at += size
                driver.set_access(self._address, self._size, grants)
        self._opened()

    @property
    def resident(self) -> tuple[Location, ...]:
        """The locations that hold the bytes, in the order in which they first appear."""
        return tuple(dict.fromkeys(chunk.location for chunk in self._chunks))

    @property
    def paused(self) -> bool:
        """Whether the buffer is paused: its address is kept, and no memory stands behind it."""
        return bool(self._paused)

    def on_change(self, listener: Callable[[Buffer], None]) -> None:
        """Call `listener(buffer)` after each change of what stands behind the address.

        For those who registered the memory with another library (NCCL, RDMA) and must register it again. It is
        called by the thread that made the change, when the change is complete; `generation` has grown then.
        """
        self._check()
        self._listeners.append(listener)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Every (address, size, location) behind this buffer, in order.

        A library that registers memory must register each by itself. Reading it lets the addresses escape.
        """
        self._check()
        self._uses.escaped = True
        return tuple(self._chunks)

    def footprint(self) -> dict[Location, int]:
        """Return the physical bytes behind this buffer by location."""
        self._check()
        total: dict[Location, int] = {}
        for chunk in self._chunks:
            total[chunk.location] = total.get(chunk.location, 0) + chunk.size
        return total

    def outcome(self) -> AllocationProperties:
        """Return the properties of the first chunk as given and not as asked for. Asks the driver."""
        self._check()
        if not self._chunks:
            return self.properties
        driver = self._driver
        with driver.lock, Rollback():
            handle = driver.retain(self._address)
            try:
                found: AllocationProperties = driver.properties_of(handle)
            finally:
                driver.release(handle)
        return found

    # -- for residency: the caller holds `_taking`, has waited, and holds the driver's lock --

    def _check_backed(self, asked: str) -> None:
        if self._paused:
            raise PausedError(
                f"{asked} of {self.describe()}",
                rule=f"it is paused ({self._paused}), and no memory stands behind its address",
                next_step="Call remap.resume(buffer) first",
            )

    def _unmap_chunks(self) -> None:
        """Unmap all chunks, run by run; the mappings were all that kept their memory."""
        for address, size in runs(self._chunks):
            self._driver.unmap(address, size)

    def _map_chunks(self, chunks: list[Chunk], rollback: Rollback) -> None:
        """Map new memory for `chunks`, with the buffer's rights; `rollback` unmaps it if its block fails."""
        for chunk in chunks:
            map_new(
                self._driver, chunk.address, chunk.size, at_place(self.properties, chunk.location), rollback
            )
        grants = tuple(self._rights.items())
        if grants:
            for address, size in runs(chunks):
                self._driver.set_access(address, size, grants)

    def _changed(self) -> None:
        """Count a change of what stands behind the address, and tell those who asked; call without the lock."""
        self.generation += 1
        for listener in list(self._listeners):
            listener(self)

    def _detach(self) -> Release:
        if not self._reserved:
            return Release(0, [])
        driver = self._driver
        steps = [
            (driver.unmap, (self._address, self._reserved)),
            (driver.free_range, (self._address, self._reserved)),
        ]
        return Release(0, steps, self._wait_on_close())

    def describe(self) -> Description:
        """Return what this buffer is."""
        places = ", ".join(str(place) for place in self.resident)
        count = len(self._chunks)
        detail = f"{count} chunk{'s' * (count != 1)} on {places}" if count else "nothing behind it"
        return Description(self.kind, self.serial, self._size, self._address, detail)


def allocate(
    size: Size,
    *,
    resident: LocationLike | Iterable[LocationLike] | None = None,
    accessing: LocationLike | Iterable[LocationLike] | None = None,
    access: Access | str = Access.READ_WRITE,
    alignment: Size | None = None,
    shareable: HandleType | str | Iterable[HandleType | str] | None = None,
    compressible: bool = False,
    rdma: bool = False,
    poison: bool = False,
) -> Buffer:
    """Allocate a buffer of at least `size` bytes, in equal stripes over the resident locations in the order given.

    The size is rounded up to a multiple of locations × granularity; read it back from `.size`. `resident` defaults
    to the fastest device, `accessing` to the resident locations; they get `access` ("rw" by default) and nobody
    else gets any. `alignment` is a power of two. `shareable` fixes now which handles the buffer can be exported as;
    `compressible` is a request whose outcome `.outcome()` reads back. The contents are undefined; `poison=True`
    fills them with 0xCB, to make mistakes visible.

    Raises `OutOfMemoryError`, `OutOfAddressSpaceError`, `AccessError` where an accessing device cannot reach a
    resident one, `NotSupportedError`. A failure leaves nothing behind. Source: cuMemAddressReserve, cuMemCreate,
    cuMemMap, cuMemSetAccess.
    """
    driver = drivers.current()
    if pending():
        drain()
    number = parse_size(size)
    places = locations(device() if resident is None else resident, "resident")
    users = places if accessing is None else locations(accessing, "accessing")
    right = Access.parse(access)
    kinds = parse_handle_types(shareable)
    _check_reach(driver, users, places)
    properties = AllocationProperties(places[0], kinds, compressible, rdma)
    stripe = round_up(-(-number // len(places)), granule(driver, properties))
    chunks = [(place, stripe) for place in places] if stripe else []
    grants = tuple((user, right) for user in users)
    buffer = Buffer(driver, chunks, properties, grants, parse_alignment(alignment))
    if poison and number and right.writable:
        buffer.fill(POISON)
    return buffer


POISON = 0xCB
"""The byte that undefined contents are filled with on request; as floats it makes absurd numbers."""


def map_new(
    driver: Any, address: int, size: int, properties: AllocationProperties, rollback: Rollback
) -> None:
    """Create an allocation, map it at an address and release it, so that the mapping alone keeps it."""
    handle = create_handle(driver, size, properties)
    try:
        driver.map(address, size, handle)
    finally:
        driver.release(handle)
    rollback.undo(driver.unmap, address, size)


_granules: weakref.WeakKeyDictionary[Any, dict[AllocationProperties, int]] = weakref.WeakKeyDictionary()


def granule(driver: Any, properties: AllocationProperties) -> int:
    """Return the largest granularity over all locations of the driver, so that every migration is legal."""
    known = _granules.setdefault(driver, {})
    found = known.get(properties)
    if found is None:
        places = [one.location for one in devices()]
        places += [
            place for place in (Host(), *_host_nodes()) if not properties.handle_types or place != Host()
        ]
        found = max(_minimum(driver, at_place(properties, place)) for place in places)
        known[properties] = found
    return found


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


def runs(chunks: Iterable[Chunk]) -> list[tuple[int, int]]:
    """Return the (address, size) of the longest runs of chunks that touch, for calls that take several mappings."""
    found: list[tuple[int, int]] = []
    for chunk in chunks:
        if found and sum(found[-1]) == chunk.address:
            found[-1] = (found[-1][0], found[-1][1] + chunk.size)
        else:
            found.append((chunk.address, chunk.size))
    return found


def at_place(properties: AllocationProperties, place: Location) -> AllocationProperties:
    """Return the same properties for another location."""
    if properties.location == place:
        return properties
    return AllocationProperties(place, properties.handle_types, properties.compressible, properties.rdma)


def _check_reach(driver: Any, users: tuple[Location, ...], places: tuple[Location, ...]) -> None:
    """Raise before anything is allocated if a user cannot reach a place: peer capability is needed (A6)."""
    for user in users:
        for place in places:
            if user == place or not place.is_device:
                continue
            if not user.is_device:
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
