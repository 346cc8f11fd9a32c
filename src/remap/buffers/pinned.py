"""Pinned memory: host memory that stays in place, so that devices copy it at link speed and reach it themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from remap import drivers
from remap.buffers.fixed import FixedMemory
from remap.buffers.typed import OwnedMemory, Shape, extent
from remap.drivers.powers import SupportsPinned
from remap.errors import InUseError, OutOfMemoryError, not_supported
from remap.lifetime import Release, Rollback, Step, drain, queued
from remap.locations import Device, device, devices, in_context
from remap.sizes import format_size
from remap.spans import Span, host_array
from remap.streams import StreamLike
from remap.types import Access, Host, Location

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


class PinnedMemory(FixedMemory):
    """Page-locked host memory that the CPU and every device may use, at one address.

    `array` is memory of the caller's that is to be pinned where it is; it is held until this is closed. Source:
    cuMemHostAlloc, cuMemHostRegister.
    """

    kind: ClassVar[str] = "pinned memory"

    def __init__(self, size: int, array: NDArray[Any] | None = None) -> None:
        driver = drivers.current()
        super().__init__(driver)
        self.device: Device = device()
        self._place = Host()
        self._size = size
        self._array = array
        right = Access.READ if array is not None and not array.flags.writeable else Access.READ_WRITE
        self._rights = {Host(): right, **{one.location: right for one in devices()}}
        self._steps: list[Step] = []
        if size:
            self._pin(driver)
        self._opened()

    def _pin(self, driver: Any) -> None:
        if not isinstance(driver, SupportsPinned):
            raise not_supported("cuMemHostAlloc", "pinned memory", "this driver has none")
        array = self._array
        with self.device.current(), Rollback() as rollback:
            if array is None:
                self._address = driver.allocate_pinned(self._size)
                end: Step = (driver.free_pinned, (self._address,))
            else:
                self._address = array.ctypes.data
                driver.register_pinned(self._address, self._size)
                end = (_unregister, (driver, self._address, array))
            rollback.steps += [end]  # not with `undo`, where an interrupt could come before it is noted
            # One address for all, as on every 64-bit Linux; elsewhere kernels would be given the wrong one.
            if driver.device_pointer(self._address) != self._address:
                rule = "devices reach it at another address than the CPU"
                raise not_supported("cuMemHostGetDevicePointer", "pinned memory", rule)
            self._steps = [(in_context, (self.device, end[0], *end[1]))]
            self._open = True  # from here on an interrupt leaves it to its finaliser

    def _actor(self, asked: str, needed: Access, stream: StreamLike | None, source: Span | None) -> Location:
        """Return the CPU where no stream is named and it may: it copies its own memory with less ado."""
        if stream is None and (source is None or source._right(Host()).readable):
            return Host()
        return super()._actor(asked, needed, stream, source)

    def _detach(self) -> Release:
        return Release(0, self._steps, self._wait_on_close())


class Pinned(OwnedMemory):
    """Typed pinned memory. `numpy()` is the memory itself; give that to copies, and they run at link speed.

    Closing it waits for the work that remap saw using it and, where its address escaped (`numpy()` counts), for the
    devices. Pinning is slow (2 to 15 GB/s were measured), so keep it and use it again.
    """

    __slots__ = ()


_locked: list[NDArray[Any]] = []
"""Arrays that could not be unlocked. The driver goes on taking their addresses for the pages that it locked, so that
whatever came to lie there next would be copied to and from these pages: they stay for ever."""


def _unregister(driver: SupportsPinned, address: int, array: NDArray[Any]) -> None:
    try:
        driver.unregister_pinned(address)
    except InUseError:  # nothing was changed, and closing can be tried again
        raise
    except BaseException:
        _locked.append(array)
        raise


def pinned(shape: Shape, dtype: DTypeLike = "float32") -> Pinned:
    """Allocate pinned host memory, of a shape or of a size such as "64MiB"; its contents are undefined.

    Raises `OutOfMemoryError`. Source: cuMemHostAlloc.
    """
    extents, kind, size = extent(shape, dtype)
    if queued:
        drain()
    try:
        return Pinned(PinnedMemory(size), kind, extents)
    except OutOfMemoryError as error:
        raise error.explain(
            f"{format_size(size)} of pinned memory",
            rule=error.rule or "the host has not as much that may be locked (ulimit -l)",
            next_step=error.next_step or "Use less, or pageable memory",
        ) from None


def register(array: NDArray[Any]) -> Pinned:
    """Pin a contiguous NumPy array where it is, until the result is closed; the array is held until then.

    Devices may write it if it can be written here. Raises `InvalidValueError` for one that is not contiguous, and
    `DriverError` for memory that is pinned already. An array that closing fails to unlock is kept for ever. Source:
    cuMemHostRegister.
    """
    host = host_array(array, "register", writable=False)
    extents, kind, size = extent(host.shape, host.dtype)
    if queued:
        drain()
    return Pinned(PinnedMemory(size, host), kind, extents)
