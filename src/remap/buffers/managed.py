"""Managed memory: one address for the CPU and all devices, whose pages move to whoever touches them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from remap import drivers
from remap.buffers.fixed import FixedMemory
from remap.buffers.typed import OwnedMemory, Shape, TypedMemory, extent
from remap.drivers.powers import ManagedAdvice, SupportsManaged
from remap.errors import InvalidValueError, OutOfMemoryError
from remap.lifetime import Release, Step, drain, queued
from remap.locations import Device, LocationLike, device, devices, in_context, location
from remap.sizes import format_size
from remap.streams import StreamLike
from remap.types import Access, Host, Location

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


class ManagedMemory(FixedMemory):
    """Bytes that the CPU and every device may use at one address. Source: cuMemAllocManaged."""

    kind: ClassVar[str] = "managed memory"

    def __init__(self, size: int) -> None:
        super().__init__(drivers.current())
        self.device: Device = device()
        self.device.require("managed_memory")
        self._place = Host()
        self._size = size
        self._rights = {one.location: Access.READ_WRITE for one in devices()}
        self._rights = {**self._rights, Host(): Access.READ_WRITE}
        if size:
            with self.device.current():
                self._address = self._driver.allocate_managed(size)
                self._open = True  # from here on an interrupt leaves it to its finaliser
        self._opened()

    def _detach(self) -> Release:
        steps: list[Step] = []
        if self._size:
            steps.append((in_context, (self.device, self._driver.free_managed, self._address)))
        return Release(0, steps, self._wait_on_close())


class ManagedPart(TypedMemory):
    """Typed managed memory, or a part of it: where it should be, and where it was last sent."""

    __slots__ = ()

    def prefetch(self, where: LocationLike, *, stream: StreamLike | None = None) -> None:
        """Move the pages to a location ahead of their use.

        Waits until it is done, unless `stream` is given. Source: cuMemPrefetchAsync.
        """
        place = location(where)
        if not self.nbytes:
            return
        self._order("prefetch", Access.READ, stream)
        with self.owner._using("prefetch", Access.READ, stream, part=(self.offset, self.nbytes)) as queue:
            assert queue is not None, "devices may use all managed memory, and act before the CPU"
            self._driver.prefetch(self.owner._address + self.offset, self.nbytes, place, queue.handle)

    def advise(
        self, advice: ManagedAdvice | str, where: LocationLike | None = None, *, on: bool = True
    ) -> None:
        """Tell how the pages will be used, or take that back with `on=False`.

        `advice` is "read_mostly" (every reader gets its own copy), "preferred_location" or "accessed_by" (`where` is
        mapped to it and does not fault); the last two need `where`. Source: cuMemAdvise.
        """
        try:
            kind = ManagedAdvice(advice)
        except ValueError:
            rule = f"advice is one of {', '.join(ManagedAdvice)}"
            raise InvalidValueError(f"advice {advice!r}", rule=rule) from None
        if where is None and kind is not ManagedAdvice.READ_MOSTLY:
            raise InvalidValueError(
                f"advice {kind} with no location", rule="name the location that it is about"
            )
        self.owner._check()
        if self.nbytes:
            place = location(device() if where is None else where)
            with self._home.current():
                self._driver.advise_managed(self.owner._address + self.offset, self.nbytes, kind, place, on)

    def residency(self) -> Location | None:
        """Return where all of this was last prefetched to, None where it was not, or not as a whole.

        Pages move on when someone touches them, and the driver does not tell. Source: cuMemRangeGetAttribute.
        """
        self.owner._check()
        if not self.nbytes:
            return None
        with self._home.current():
            return self._driver.prefetched_to(self.owner._address + self.offset, self.nbytes)

    @property
    def _home(self) -> Device:
        """The device whose context the calls are made in; which one makes no difference to managed memory."""
        return self.owner.accessing[0]

    @property
    def _driver(self) -> SupportsManaged:
        driver = self.owner._driver
        assert isinstance(driver, SupportsManaged), "a driver with the capability has the calls"
        return driver

    def _part(self, shape: tuple[int, ...], offset: int, dtype: Any = None) -> ManagedPart:
        return ManagedPart(self.owner, self.dtype if dtype is None else dtype, shape, offset)

    def __getitem__(self, key: Any) -> ManagedPart:
        """Return a part along the first axis, as managed memory."""
        found = super().__getitem__(key)
        assert isinstance(found, ManagedPart)
        return found


class Managed(OwnedMemory, ManagedPart):
    """Typed managed memory. `numpy()` is the memory itself, after the work that remap saw on it.

    The CPU may not look while a device works on it, unless the device allows both at once. Closing it waits for that
    work and, where the address escaped, for the devices.
    """

    __slots__ = ()


def managed(shape: Shape, dtype: DTypeLike = "float32") -> Managed:
    """Allocate managed memory; its contents are undefined.

    Raises `OutOfMemoryError`, `NotSupportedError`. Source: cuMemAllocManaged.
    """
    extents, kind, size = extent(shape, dtype)
    if queued:
        drain()
    try:
        return Managed(ManagedMemory(size), kind, extents)
    except OutOfMemoryError as error:
        raise error.explain(f"{format_size(size)} of managed memory") from None
