"""`RingBuffer`: the same memory mapped twice in a row, so that no window of it ever wraps."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from remap import drivers
from remap.buffers.base import Buffer
from remap.buffers.placement import Placement, place
from remap.dtypes import check_order, parse_dtype
from remap.errors import AccessError, InvalidValueError
from remap.handles import create_handle, parse_alignment, reserve_range
from remap.launches import launches
from remap.lifetime import Description, Rollback, drain, queued, undo
from remap.locations import AccessLike, LocationLike, RightLike, parse_access
from remap.sizes import Size, format_size, parse_size, round_up
from remap.spans import Chunk, host_array
from remap.streams import StreamLike
from remap.types import Access, Grants, HandleType, Held, Location

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import DTypeLike, NDArray

    from remap.arrays import DeviceArray


class RingBuffer(Buffer):
    """One allocation at two neighbouring addresses: byte `size + i` is byte `i` again.

    The size is rounded up to a granule. Any stretch of up to `size` bytes is contiguous, wherever it begins, so a
    `window` is an array like any other. `write` and `read` move two cursors, `head` and `tail`, which count the bytes
    since the beginning and never go back; kernels that fill a window themselves move them with `produced` and
    `consumed`. The cursors are not locked: one thread writes and one reads.

    `second` is the access right to the second view, the same as to the first by default. With "r" only the first view
    can be written: `write` then does it in two pieces where it wraps. The two addresses are one memory: a kernel that
    writes through one and reads through the other needs an alias fence in between (CUDA programming guide, virtual
    aliasing); work that is queued in stream order needs none. Source: cuMemMap, twice with one handle.
    """

    kind: ClassVar[str] = "ring buffer"

    def __init__(
        self,
        size: Size,
        *,
        device: LocationLike | None = None,
        accessing: LocationLike | Iterable[LocationLike] | None = None,
        access: RightLike = Access.READ_WRITE,
        second: Access | str | None = None,
        shareable: HandleType | str | Iterable[HandleType | str] | None = None,
        alignment: Size | None = None,
    ) -> None:
        driver = drivers.current()
        if queued:
            drain()
        placement = place(driver, device, accessing, access, shareable, False, False)
        _check_one(placement)
        super(Buffer, self).__init__(driver)
        self._size = size = round_up(parse_size(size, "size"), placement.granule)
        self._rights = placement.rights
        self.properties = placement.properties[0]
        self._second: dict[Location, Access] = dict(placement.grants)
        if second is not None:
            self._second = dict.fromkeys(self._second, Access.parse(second))
        self._chunks = []
        self.head = 0
        self.tail = 0
        if size:
            self._reserved = 2 * size
            self._address = reserve_range(driver, self._reserved, parse_alignment(alignment))
            self._chunks = [Chunk(self._address, size, self.properties.location)]
            try:
                with Rollback() as rollback:
                    handle = create_handle(driver, size, self.properties)
                    try:
                        self._map_chunks(self._chunks, [handle], rollback)
                    finally:
                        driver.release(handle)
            except BaseException as error:
                undo(error, driver.free_range, self._address, self._reserved)
                raise
        self._opened()

    # -- cursors --

    @property
    def filled(self) -> int:
        """The bytes that were written and not yet read."""
        return self.head - self.tail

    @property
    def free(self) -> int:
        """The bytes that can be written now."""
        return self._size - self.filled

    def write(self, data: Any, *, stream: StreamLike | None = None) -> int:
        """Copy a host array in behind `head`, move `head` on, and return how many bytes that were.

        Waits unless `stream` is given, as `copy_from_host`. Raises `InvalidValueError`, with nothing written, where
        there is not so much room.
        """
        host = host_array(data, "write", writable=False).reshape(-1).view("uint8")
        if host.nbytes > self.free:
            raise InvalidValueError(
                f"write of {host.nbytes} bytes to {self.describe()}",
                rule=f"{self.free} bytes are free, {self.filled} wait to be read",
                next_step="Read first, or write less",
            )
        start = self.head % self._size if self._size else 0
        first = min(host.nbytes, self._size - start)
        if first == host.nbytes or self._part_writable(start, host.nbytes):
            self.copy_from_host(host, offset=start, stream=stream)
        else:
            self.copy_from_host(host[:first], offset=start, stream=stream)
            self.copy_from_host(host[first:], stream=stream)
        self.head += host.nbytes
        return int(host.nbytes)

    def read(self, count: Size | None = None) -> NDArray[Any]:
        """Return the next `count` bytes as a new array, and move `tail` on; all there are by default. Waits."""
        import numpy as np

        number = self.filled if count is None else parse_size(count, "count")
        self._check_filled("read", number)
        out = np.empty(number, np.uint8)
        self.copy_to_host(out, offset=self.tail % self._size if self._size else 0)
        self.tail += number
        return out

    def produced(self, count: Size) -> None:
        """Move `head` on by bytes that were written into a window."""
        self._check()
        number = parse_size(count, "count")
        if number > self.free:
            raise InvalidValueError(
                f"{number} bytes produced",
                rule=f"{self.free} bytes of {self.describe()} were free",
                next_step="Produce no more than that, or read first",
            )
        self.head += number

    def consumed(self, count: Size) -> None:
        """Move `tail` on by bytes that were read out of a window."""
        number = parse_size(count, "count")
        self._check_filled("consume", number)
        self.tail += number

    def _check_filled(self, asked: str, count: int) -> None:
        self._check()
        if count > self.filled:
            raise InvalidValueError(
                f"{asked} {count} bytes of {self.describe()}",
                rule=f"{self.filled} bytes wait to be read",
                next_step=f"{asked.capitalize()} no more than that, or write first",
            )

    def window(self, position: int, shape: int | Sequence[int], dtype: DTypeLike = "uint8") -> DeviceArray:
        """Return elements from a byte position on as one array, which does not wrap.

        `position` counts from the beginning as the cursors do, and is taken modulo the size: `window(ring.head, n)` is
        where the next n bytes go, `window(ring.tail, n)` where the oldest n are. Raises `InvalidValueError` for more
        than the size, and `AlignmentError` where elements would be unaligned.
        """
        from remap.arrays import DeviceArray, check_shape

        order = "window(position, shape, dtype)"
        try:
            start = operator.index(position)
        except TypeError:
            said = f"a position is a number of bytes, not {position!r}"
            raise TypeError(f"{said}: the order is {order}") from None
        try:
            extents = check_shape(shape)
            size = math.prod(extents) * parse_dtype(dtype).itemsize
        except TypeError:
            check_order(order, dtype, shape)
            raise
        if size > self._size:
            raise InvalidValueError(
                f"a window of {size} bytes",
                rule=f"the ring has {format_size(self._size)}, and a longer one would meet itself",
            )
        return DeviceArray.over(self, dtype, extents, start % self._size if self._size else 0)

    # -- the two views --

    @property
    def access_to_second(self) -> dict[Location, Access]:
        """The right of each location to the second view."""
        return dict(self._second)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Both mappings as (address, size, location). Reading it lets the addresses escape."""
        return tuple(
            Chunk(chunk.address + view, chunk.size, chunk.location)
            for view in (0, self._size)
            for chunk in super(RingBuffer, self).chunks
        )

    def set_access(self, access: AccessLike) -> None:
        """Change the rights of the locations that are named, to both views."""
        second = self._second
        super().set_access(access)
        self._second = {**second, **dict(parse_access(access))}
        launches.renew()  # what looked in between has seen the old rights of the second view

    @property
    def _reach(self) -> int:
        return 2 * self._size

    def _ranges(self) -> list[tuple[int, int]]:
        return [] if self._paused or not self._size else [(self._address, 2 * self._size)]

    def _check_part(self, asked: str, offset: int, size: int, needed: Access) -> None:
        if needed is Access.READ_WRITE and not self._part_writable(offset, size):
            raise AccessError(
                f"{asked} of bytes {offset} to {offset + size} of {self.describe()}",
                rule=f"the second view, from byte {self._size} on, is not writable",
                next_step="Write through the first view, in two pieces where it wraps",
            )
        if offset + size > self._size and not any(right.readable for right in self._second.values()):
            raise AccessError(
                f"{asked} of bytes {offset} to {offset + size} of {self.describe()}",
                rule=f"nobody has access to the second view, from byte {self._size} on",
            )

    def _part_writable(self, offset: int, size: int) -> bool:
        return offset + size <= self._size or all(right.writable for right in self._second.values())

    def _held(self) -> tuple[Held, ...]:
        views = ((0, tuple(self._rights.items())), (self._size, tuple(self._second.items())))
        return tuple(
            Held(at + view, size, place, self.serial, rights)
            for view, rights in views
            for at, size, place in tuple(self._chunks)
        )

    def _map_chunks(
        self, chunks: Sequence[Chunk], handles: Sequence[int], rollback: Rollback, *, full: bool = False
    ) -> None:
        del full  # nothing of a ring is shared with forks
        driver, ring = self._driver, self._size
        for chunk, handle in zip(chunks, handles, strict=True):
            for view in (0, ring):
                rollback.undo(driver.unmap, chunk.address + view, chunk.size)
                driver.map(chunk.address + view, chunk.size, handle)
            for view, rights in ((0, self._rights), (ring, self._second)):
                grants: Grants = tuple((place, right) for place, right in rights.items() if right.readable)
                if grants:
                    driver.set_access(chunk.address + view, chunk.size, grants)

    def _unmap_chunks(self) -> None:
        if self._reserved:
            self._driver.unmap(self._address, self._reserved)

    def describe(self) -> Description:
        """Return what this ring is."""
        detail = f"on {self.properties.location}, mapped twice"
        return Description(self.kind, self.serial, self._size, self._address, detail)


def _check_one(placement: Placement) -> None:
    if len(placement.properties) > 1:
        raise InvalidValueError(
            "a ring buffer on several devices",
            rule="it is one allocation, which lies in one place",
            next_step="Name one device, and give the others access with accessing=",
        )
