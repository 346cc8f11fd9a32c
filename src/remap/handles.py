"""The four things that are called memory, each by itself: read this first.

A `PhysicalAllocation` is bytes on a device or on the host, at no address. A `Reservation` is a range of addresses
with nothing behind it. A `Mapping` joins the two. An access right says who may touch a mapping: at first nobody.

    mem = remap.create(64 * MiB, at=0)                   # bytes
    rng = remap.reserve(1 * GiB)                         # addresses
    m = rng.map(mem, offset=0, access={0: "rw"})         # bytes at addresses, and the right to use them

A mapping holds its reservation, so that nothing can be freed too early (invariant 2); a reservation with live
mappings refuses to close (invariant 3). Closing an allocation gives up the right to map it again; its bytes stay for
as long as they are mapped anywhere (T8).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from remap import drivers
from remap.errors import (
    AlignmentError,
    CudaResult,
    DriverError,
    InUseError,
    InvalidValueError,
    OutOfAddressSpaceError,
    OutOfMemoryError,
)
from remap.lifetime import Description, Release, Resource, Rollback, drain, queued, repeatable, undo
from remap.locations import (
    AccessLike,
    LocationLike,
    device,
    explain_shortage,
    location,
    parse_access,
    parse_handle_types,
)
from remap.sizes import GiB, Size, check_aligned, counted, format_size, is_power_of_two, parse_size
from remap.spans import Chunk, Span
from remap.types import AllocationProperties, Facts, Grants, HandleType, Held, Location


class PhysicalAllocation(Resource):
    """Bytes in one location, at no address yet. Made by `remap.create`. Source: cuMemCreate."""

    kind: ClassVar[str] = "physical allocation"

    def __init__(self, driver: Any, size: int, properties: AllocationProperties, *, handle: int = 0) -> None:
        super().__init__(driver)
        self.size = size
        self.properties = properties
        self._handle = handle or create_handle(driver, size, properties)
        self._open = True  # from here on an interrupt leaves it to its finaliser
        self._opened()

    @property
    def location(self) -> Location:
        """The place that holds the bytes."""
        return self.properties.location

    def outcome(self) -> AllocationProperties:
        """Return the properties as given and not as asked for: compression is a request. Asks the driver."""
        self._check()
        found: AllocationProperties = self._driver.properties_of(self._handle)
        return found

    def _detach(self) -> Release:
        return Release(1, [(self._driver.release, (self._handle,))])

    def _facts(self) -> Facts:
        return Facts(held=(Held(None, self.size, self.location, self.serial),))

    def describe(self) -> Description:
        """Return what this allocation is."""
        return Description(self.kind, self.serial, self.size, None, f"on {self.location}")


class Reservation(Resource):
    """A range of addresses that nothing else will be given. Made by `remap.reserve`. Source: cuMemAddressReserve."""

    kind: ClassVar[str] = "reservation"

    def __init__(self, driver: Any, size: int, *, alignment: int = 0, hint: int = 0) -> None:
        super().__init__(driver)
        self.size = size
        self._table = _Table()
        self.address = reserve_range(driver, size, alignment, hint)
        self._open = True  # from here on an interrupt leaves it to its finaliser
        self._opened()

    def map(
        self, allocation: PhysicalAllocation, *, offset: Size = 0, access: AccessLike | None = None
    ) -> Mapping:
        """Map a whole allocation at `offset` bytes into this range, and grant access.

        `access` maps locations to "r", "rw" or "none"; those not named get nothing. Raises `InUseError` where
        another mapping lies in the way, `AlignmentError`, `InvalidValueError` outside the range. After a failure
        nothing is mapped.
        """
        if not isinstance(allocation, PhysicalAllocation):
            raise TypeError(
                f"a mapping is of a physical allocation (remap.create), not of {type(allocation)}"
            )
        start = parse_size(offset, "offset")
        grants = parse_access(access)
        if queued:
            drain()
        with self._driver.lock, Rollback() as rollback:
            self._check()
            allocation._check()
            self._check_room(start, allocation.size)
            return self._map(allocation, start, grants, rollback)

    def _map(self, allocation: PhysicalAllocation, start: int, grants: Grants, rollback: Rollback) -> Mapping:
        driver, size, address = self._driver, allocation.size, self.address + start
        try:
            driver.map(address, size, allocation._handle)
        except DriverError as error:
            if error.code == CudaResult.INVALID_VALUE:
                check_aligned(start, driver.granularity(allocation.properties).minimum, "offset")
            raise
        except BaseException as error:
            # An interrupt may come with the mapping done, and unmapping nothing is fine (T7).
            undo(error, driver.unmap, address, size)
            raise
        # Not with `undo`, where one could come before it is noted.
        rollback.steps += [(driver.unmap, (address, size))]
        if grants:
            driver.set_access(address, size, grants)
        return Mapping(self, allocation, start, grants)

    def _check_room(self, start: int, size: int) -> None:
        if start + size > self.size:
            raise InvalidValueError(
                f"a mapping of {format_size(size)} at offset {format_size(start)}",
                rule=f"the reservation has {format_size(self.size)}",
            )
        found = self._table.overlapping(start, size)
        if found is not None:
            at, taken = found
            raise InUseError(
                f"a mapping of {format_size(size)} at offset {format_size(start)}",
                rule=f"the mapping at offset {format_size(at)} ({format_size(taken)}) lies in the way",
                next_step=f"Close it first, or use offset {at + taken} or higher",
            )

    @property
    def mappings(self) -> tuple[tuple[int, int], ...]:
        """The (offset, size) of every live mapping, in order of address."""
        return self._table.entries()

    def _check_closable(self) -> None:
        entries = self._table.entries()
        if entries:
            named = ", ".join(f"{format_size(size)} at offset {format_size(at)}" for at, size in entries[:4])
            raise InUseError(
                f"closing {self.describe()}",
                rule=f"it has {counted(len(entries), 'live mapping')}: {named}{', …' if len(entries) > 4 else ''}",
                next_step="Close what is mapped first",
            )

    def _detach(self) -> Release:
        return Release(1, [(self._driver.free_range, (self.address, self.size))])

    def _facts(self) -> Facts:
        return Facts(reserved=(self.address, self.size))

    def describe(self) -> Description:
        """Return what this reservation is."""
        return Description(
            self.kind, self.serial, self.size, self.address, counted(len(self._table), "mapping")
        )


class Mapping(Span):
    """A whole allocation at an address, and who may touch it there. Made by `Reservation.map`. Source: cuMemMap.

    One allocation may have many mappings (aliases), each with its own rights; closing one leaves the others.
    """

    kind: ClassVar[str] = "mapping"

    _stays: ClassVar[str] = "the allocation behind it is yours, and stays where it was created"

    def __init__(
        self, reservation: Reservation, allocation: PhysicalAllocation, offset: int, grants: Grants
    ) -> None:
        super().__init__(reservation._driver)
        self.reservation = reservation
        self.offset = offset
        self.location = allocation.location
        self._memory = allocation.serial  # the same for every alias
        self._address = reservation.address + offset
        self._size = allocation.size
        self._rights = {place: right for place, right in grants if right.readable}
        reservation._table.add(offset, self._size)
        self._open = True  # from here on an interrupt leaves it to its finaliser
        self._opened()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The one (address, size, location) behind this mapping."""
        return (Chunk(self.address, self._size, self.location),)

    def _ranges(self) -> list[tuple[int, int]]:
        return [(self._address, self._size)]

    def _held(self) -> tuple[Held, ...]:
        rights = tuple(self._rights.items())
        return (Held(self._address, self._size, self.location, self._memory, rights),)

    def _detach(self) -> Release:
        table = self.reservation._table
        steps = [(self._driver.unmap, (self._address, self._size)), (table.forget, (self.offset,))]
        return Release(0, steps, self._wait_on_close())

    def describe(self) -> Description:
        """Return what this mapping is."""
        rights = ", ".join(f"{place} {right}" for place, right in self._rights.items()) or "no access"
        return Description(self.kind, self.serial, self._size, self._address, f"{self.location}; {rights}")


class _Table:
    """The live mappings of one reservation by offset. A release refers to this and not to the reservation."""

    __slots__ = ("_sizes", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def add(self, start: int, size: int) -> None:
        at = bisect_right(self._starts, start)
        # No calls from here on, between which a signal's handler could raise: both know of it, or neither.
        self._sizes[start] = size
        self._starts[at:at] = (start,)

    @repeatable
    def forget(self, start: int) -> None:
        at = bisect_right(self._starts, start) - 1
        if start in self._sizes:  # forgetting again does nothing
            del self._starts[at]
            del self._sizes[start]

    def overlapping(self, start: int, size: int) -> tuple[int, int] | None:
        """Return (offset, size) of the first mapping that shares a byte with the range, or None."""
        first = bisect_right(self._starts, start)
        for at in self._starts[max(first - 1, 0) : first + 1]:
            if at < start + size and start < at + self._sizes[at]:
                return at, self._sizes[at]
        return None

    def entries(self) -> tuple[tuple[int, int], ...]:
        return tuple((at, self._sizes[at]) for at in self._starts)

    def __len__(self) -> int:
        return len(self._starts)


def create(
    size: Size,
    *,
    at: LocationLike | None = None,
    shareable: HandleType | str | Iterable[HandleType | str] | None = None,
    compressible: bool = False,
    rdma: bool = False,
) -> PhysicalAllocation:
    """Create a physical allocation of exactly `size` bytes.

    `at` is a device (the fastest by default), `remap.Host()` or `remap.HostNuma(n)`. `shareable` fixes now which
    handles it can be exported as. Raises `AlignmentError` unless the size is a multiple of the granularity,
    `OutOfMemoryError`, `NotSupportedError`. The contents are undefined. Source: cuMemCreate.
    """
    driver = drivers.current()
    if queued:
        drain()
    number = parse_size(size)
    place = location(device() if at is None else at)
    properties = AllocationProperties(place, parse_handle_types(shareable), compressible, rdma)
    if number == 0:
        raise InvalidValueError("an allocation of 0 bytes", rule="an allocation has at least one granule")
    check_aligned(number, driver.granularity(properties).minimum, "size")
    return PhysicalAllocation(driver, number, properties)


def reserve(size: Size, *, alignment: Size | None = None, hint: int = 0) -> Reservation:
    """Reserve a range of `size` bytes of addresses.

    `alignment` is a power of two; `hint` an address, rounded down to the alignment, that is taken if it is free, and
    passed over if not. Raises `AlignmentError` unless the size is a multiple of the granularity, and
    `OutOfAddressSpaceError`. Source: cuMemAddressReserve.
    """
    driver = drivers.current()
    if queued:
        drain()
    number = parse_size(size)
    if number == 0:
        raise InvalidValueError("a reservation of 0 bytes", rule="a reservation has at least one granule")
    granularity = driver.granularity(AllocationProperties(device().location)).minimum
    check_aligned(number, granularity, "size")
    aligned = parse_alignment(alignment)
    # A driver refuses a hint that it could not follow (seen on H200), but a hint is not a demand.
    near = parse_size(hint, "hint") // max(aligned, granularity) * max(aligned, granularity)
    return Reservation(driver, number, alignment=aligned, hint=near)


def parse_alignment(alignment: Size | None) -> int:
    """Return an alignment in bytes, 0 for none; raises `AlignmentError` unless it is a power of two."""
    if alignment is None:
        return 0
    number = parse_size(alignment, "alignment")
    if not is_power_of_two(number):
        raise AlignmentError(f"alignment {number}", rule="an alignment is a power of two")
    return number


reclaimers: list[Callable[[Any, Location], int]] = []
"""What the rooms above hold back for later (pools, memory mapped ahead of its use), as calls that give it back.

Each takes the driver and the location where memory ran out, and returns how many bytes it freed there.
"""


def create_handle(driver: Any, size: int, properties: AllocationProperties, purpose: str = "") -> int:
    """Create an allocation and return its handle; an out-of-memory error says who asked and what is free.

    Where memory runs out, what `reclaimers` can give back is given back, and the driver asked once more.
    """
    try:
        try:
            handle: int = driver.create(size, properties)
        except OutOfMemoryError:
            if not sum([reclaim(driver, properties.location) for reclaim in reclaimers]):
                raise
            handle = driver.create(size, properties)
    except OutOfMemoryError as error:
        place = properties.location
        asked = f"{format_size(size)} of memory on {place}{purpose}"
        raise explain_shortage(error, asked, size, place) from None
    return handle


def reserve_range(driver: Any, size: int, alignment: int = 0, hint: int = 0) -> int:
    """Reserve addresses and return the first; an error says that addresses ran out, and not memory.

    CUDA takes reservations below 32 MiB out of a range that it holds already, whatever the hint, unless an alignment
    asks for more than that range gives (seen on H200 with 1 GiB). So a hint at a multiple of 1 GiB is asked for with
    that alignment.
    """
    if hint:  # a wish: where there is no room for it, any other place will do
        try:
            address: int = driver.reserve(size, alignment if hint % GiB else max(alignment, GiB), hint)
            return address  # with no call after it: an interrupt would lose the range
        except OutOfAddressSpaceError:
            pass
    try:
        address = driver.reserve(size, alignment)
    except OutOfAddressSpaceError as error:
        raise error.explain(
            f"a reservation of {format_size(size)} of addresses",
            rule=error.rule or "the address space has no such range free (memory is not the limit here)",
            next_step=error.next_step or "Ask for less, close reservations, or raise the limit (ulimit -v)",
        ) from None
    return address
