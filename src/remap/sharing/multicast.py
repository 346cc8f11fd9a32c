"""`MulticastObject` and `MulticastView`: addresses at which one operation reaches the memory of many devices.

    team = MulticastObject.create(64 * MiB, devices=2)       # rounded up to the object's own granularity
    team.add(0); team.add(1)                                 # every device, before anything is bound
    team.bind(first); team.bind(second)                      # equal memory of each: the replicas
    view = team.map()                                        # what kernels use; the memory itself is mapped beside it

Between processes every rank opens the same object and does this for its own device. `SymmetricBuffer` takes all ranks
through it in step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NoReturn

from remap import drivers
from remap.drivers.multicast_power import MulticastProperties, SupportsMulticast, switched_off
from remap.errors import InUseError, InvalidValueError, NotSupportedError, not_supported
from remap.handles import PhysicalAllocation, reserve_range
from remap.lifetime import Description, Release, Resource, drain, queued, undo
from remap.locations import AccessLike, Device, DeviceLike, device, devices, parse_access, parse_handle_types
from remap.sizes import Size, check_aligned, format_size, parse_size, round_up
from remap.spans import Chunk, Span
from remap.types import Access, Facts, Grants, HandleType


class MulticastObject(Resource):
    """A team of devices, each with a replica of one range. Made by `create` and `open`. Source: cuMulticastCreate.

    `team` is the number of its devices, over all processes. Closing it gives up this process's handle; what is mapped
    or open elsewhere lives on, with the memory that was bound.
    """

    __slots__ = ("_added", "_bound", "_complete", "_handle", "granularity", "size", "team")

    kind: ClassVar[str] = "multicast object"

    def __init__(self, driver: Any, make: Callable[[], int], size: int, team: int, granularity: int) -> None:
        super().__init__(driver)
        self.size = size
        self.team = team
        self.granularity = granularity
        self._added: list[Device] = []
        self._bound: dict[Device, list[tuple[int, int]]] = {}
        self._complete = False
        self._handle = make()
        self._open = True  # from here on an interrupt leaves it to its finaliser
        self._opened()

    @classmethod
    def create(
        cls,
        size: Size,
        *,
        devices: int,
        shareable: HandleType | str | Iterable[HandleType | str] | None = None,
    ) -> MulticastObject:
        """Create an object of at least `size` bytes on each of `devices` devices.

        The size is rounded up to the object's own granularity, which is not that of memory. `shareable` fixes now as
        what it can be exported. Raises `NotSupportedError`, naming the capability, where there is no multicast, or the
        environment forbids it; then no multicast call has been made.
        """
        driver = require_multicast(None)
        if queued:
            drain()
        number = parse_size(size)
        if number == 0 or devices < 1:
            raise InvalidValueError(
                f"a multicast object of {number} bytes for {devices} devices",
                rule="it has at least one of each",
            )
        kinds = parse_handle_types(shareable)
        granule = driver.multicast_granularity(MulticastProperties(devices, number, kinds)).minimum
        number = round_up(number, granule)
        make = partial(driver.create_multicast, MulticastProperties(devices, number, kinds))
        return cls(driver, make, number, devices, granule)

    @classmethod
    def open(
        cls, shareable: int | bytes, *, size: int, devices: int, kind: HandleType = HandleType.POSIX_FD
    ) -> MulticastObject:
        """Open another process's object from what its `export` gave; a descriptor stays the caller's.

        A handle carries neither size nor team: send them along. Source: cuMemImportFromShareableHandle.
        """
        driver = require_multicast(None)
        granule = driver.multicast_granularity(MulticastProperties(devices, size, frozenset({kind}))).minimum
        check_aligned(size, granule, "size")
        return cls(driver, partial(driver.import_handle, shareable, kind), size, devices, granule)

    def export(self, kind: HandleType = HandleType.POSIX_FD) -> int | bytes:
        """Return a new descriptor, which is the caller's, or a fabric handle. Source: cuMemExportToShareableHandle."""
        self._check()
        found: int | bytes = self._driver.export_handle(self._handle, kind)
        if isinstance(found, int):
            os.set_inheritable(found, False)
        return found

    def add(self, which: DeviceLike) -> None:
        """Add a device of this process to the team, for the life of the object. Source: cuMulticastAddDevice."""
        self._check()
        one = device(which)
        require_multicast(one)
        if self._bound:
            raise self._out_of_order(f"adding {one}", "memory is bound already, so the team is complete")
        self._driver.add_multicast_device(self._handle, one.index)
        self._added.append(one)

    def complete(self) -> None:
        """Say that every device has been added, those of other processes too: they have to agree on it first.

        CUDA blocks for ever where that is not so. An object whose devices are all this process's knows by itself.
        """
        self._check()
        self._complete = True

    def bind(
        self,
        memory: PhysicalAllocation,
        *,
        offset: Size = 0,
        memory_offset: Size = 0,
        size: Size | None = None,
    ) -> None:
        """Make memory of one device of the team its replica of the range from `offset` on.

        The memory stays alive as long as it is bound. Raises `InUseError` while devices are missing, `AlignmentError`
        unless the granularity divides offsets and size, `InvalidValueError` for a range that does not fit.
        Source: cuMulticastBindMem.
        """
        self._check()
        memory._check()
        start, skip = parse_size(offset, "offset"), parse_size(memory_offset, "memory_offset")
        length = memory.size - skip if size is None else parse_size(size)
        for number, what in ((start, "offset"), (skip, "memory_offset"), (length, "size")):
            check_aligned(number, self.granularity, what)
        if length <= 0 or start + length > self.size or skip + length > memory.size:
            raise InvalidValueError(
                f"binding {format_size(max(length, 0))} at offset {format_size(start)}",
                rule=f"the object has {format_size(self.size)}, the memory {format_size(memory.size)}",
            )
        self._bind(memory._handle, device(memory.location.index), start, skip, length)

    def _bind(self, handle: int, where: Device, start: int, skip: int, length: int) -> None:
        self._check()
        self._check_complete("binding memory")
        self._driver.bind_multicast(self._handle, start, handle, skip, length)
        self._bound.setdefault(where, []).append((start, length))

    def map(self, *, access: AccessLike | None = None) -> MulticastView:
        """Map the whole object at addresses of its own, and return the view.

        `access` defaults to read and write for the devices that this process added. Raises `InUseError` while devices
        or replicas are missing, and `InvalidValueError` where the replicas of this process are unequal.
        Source: cuMemMap, cuMemSetAccess.
        """
        self._check()
        self._check_complete("mapping a multicast object")
        self._check_replicas()
        chosen: AccessLike = dict.fromkeys(self._added, Access.READ_WRITE) if access is None else access
        grants = parse_access(chosen)
        if queued:
            drain()
        return MulticastView(self, grants)

    def _check_complete(self, asked: str) -> None:
        if not self._complete and len(self._added) < self.team:
            raise self._out_of_order(
                asked,
                f"this process has added {len(self._added)} of the {self.team} devices of the team, and was not told "
                "that the others are there",
            )

    def _check_replicas(self) -> None:
        ranges = {one: sorted(self._bound.get(one, ())) for one in self._added}
        missing = [str(one) for one, bound in ranges.items() if not bound]
        if missing or not ranges:
            raise self._out_of_order(
                "mapping a multicast object", f"no memory of {', '.join(missing) or 'any device'} is bound"
            )
        first = next(iter(ranges.values()))
        for one, bound in ranges.items():
            if bound != first:
                raise InvalidValueError(
                    "a multicast object with unequal replicas",
                    rule=f"{next(iter(ranges))} has {_ranges(first)} bound, {one} has {_ranges(bound)}",
                    next_step="Bind equal ranges of every device",
                )

    def _out_of_order(self, asked: str, rule: str) -> InUseError:
        step = "The order is: add every device, complete(), bind the memory of each, map"
        return InUseError(asked, rule=rule, next_step=step)

    def _detach(self) -> Release:
        return Release(1, [(self._driver.release, (self._handle,))])

    def describe(self) -> Description:
        """Return what this object is."""
        detail = f"for {self.team} devices, {len(self._added)} of this process"
        return Description(self.kind, self.serial, self.size, None, detail)


class MulticastView(Span):
    """Multicast addresses, for the `multimem` instructions of kernels. Made by `MulticastObject.map`.

    Nothing else means anything there: no copy, no fill, no array, no plain load or store. The memory of each device is
    used at its own addresses, with a fence between the two within one kernel.
    """

    kind: ClassVar[str] = "multicast view"

    def __init__(self, team: MulticastObject, grants: Grants) -> None:
        driver = team._driver
        super().__init__(driver)
        self._size = size = team.size
        self._rights = {place: right for place, right in grants if right.readable}
        with driver.lock:
            team._check()
            self._address = address = reserve_range(driver, size, team.granularity)
            try:
                driver.map(address, size, team._handle)
                driver.set_access(address, size, grants)
                self._open = True  # from here on an interrupt leaves it to its finaliser
            except BaseException as error:
                undo(error, driver.unmap, address, size)
                undo(error, driver.free_range, address, size)
                raise
        self._opened()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """None: the bytes are the replicas, which have addresses of their own."""
        self._check()
        return ()

    def _ranges(self) -> list[tuple[int, int]]:
        return [(self._address, self._size)]

    @contextmanager
    def _using(self, asked: str, *_: object, **__: object) -> Generator[None]:
        self._refuse(asked)
        yield

    def array(self, *_: object, **__: object) -> NoReturn:
        """Refuse: other libraries would load and store there."""
        self._refuse("array")

    def _refuse(self, asked: str) -> NoReturn:
        self._check()
        raise InvalidValueError(
            f"{asked} of {self.describe()}",
            rule="at multicast addresses only multimem instructions of kernels mean anything",
            next_step="Use the memory at its own addresses (symmetric.local, symmetric.rank(i))",
        )

    def _detach(self) -> Release:
        driver = self._driver
        steps = [
            (driver.unmap, (self._address, self._size)),
            (driver.free_range, (self._address, self._size)),
        ]
        return Release(0, steps, self._wait_on_close())

    def _facts(self) -> Facts:
        return Facts(reserved=(self._address, self._size))

    def describe(self) -> Description:
        """Return what this view is."""
        return Description(self.kind, self.serial, self._size, self._address, "multimem instructions only")


def why_no_multicast(one: Device) -> str:
    """Return why a device cannot be in a team, nothing where it can; makes no multicast call."""
    if not isinstance(one._driver, SupportsMulticast):
        return f"the {one._driver.name} driver has no multicast"
    return switched_off() or one.capabilities["multicast"].reason


def require_multicast(one: Device | None) -> Any:
    """Return the driver; raise `NotSupportedError` unless a device (any, if None) can be in a team."""
    candidates = devices() if one is None else (one,)
    reasons = [why_no_multicast(each) for each in candidates]
    if all(reasons):
        raise no_multicast(str(candidates[0]), reasons[0])
    return drivers.current()


def no_multicast(where: str, reason: str) -> NotSupportedError:
    """Return the error for multicast that is missing somewhere."""
    return not_supported("cuMulticastCreate", f"multicast on {where}", reason, capability="multicast")


def _ranges(bound: list[tuple[int, int]]) -> str:
    return ", ".join(f"{format_size(size)} at {format_size(at)}" for at, size in bound) or "nothing"
