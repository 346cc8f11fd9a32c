"""Plain device memory (cuMemAlloc) behind the methods of a buffer, for programs that compare the two."""

from __future__ import annotations

from typing import ClassVar

from remap.buffers.fixed import FixedMemory
from remap.errors import OutOfMemoryError
from remap.lifetime import Release, Step, drain, queued
from remap.locations import Device, DeviceLike, device, explain_shortage, in_context
from remap.sizes import Size, format_size, parse_size
from remap.types import Access


class PlainMemory(FixedMemory):
    """Memory that a device's own allocator handed out. Made by `allocate_plain`.

    It lies on one device, which alone may touch it; its address, its bytes and its right are one thing, so it can
    neither be striped nor change what stands behind it.
    """

    kind: ClassVar[str] = "plain memory"

    def __init__(self, at: Device, size: int) -> None:
        super().__init__(at._driver)
        self.device = at
        self._place = at.location
        self._size = size
        self._rights = {at.location: Access.READ_WRITE}
        if size:  # nothing is asked of the driver for no bytes
            with at.current():
                self._address = self._driver.allocate(size)
                self._open = True  # from here on an interrupt leaves it to its finaliser
        self._opened()

    def _detach(self) -> Release:
        steps: list[Step] = []
        if self._size:
            steps.append((in_context, (self.device, self._driver.free, self._address)))
        return Release(0, steps, self._wait_on_close())


def allocate_plain(size: Size, *, at: DeviceLike | None = None) -> PlainMemory:
    """Allocate `size` bytes of plain memory on a device (the fastest by default). Nothing is rounded up.

    The contents are undefined. Raises `OutOfMemoryError`. Source: cuMemAlloc.
    """
    if queued:
        drain()
    place = device(at)
    number = parse_size(size)
    try:
        return PlainMemory(place, number)
    except OutOfMemoryError as error:
        asked = f"{format_size(number)} of plain memory on {place}"
        raise explain_shortage(error, asked, number, place.location) from None
