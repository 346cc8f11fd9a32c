"""`RingBuffer`: the same memory mapped twice in a row, so that no window of it ever wraps."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from remap import drivers
from remap.buffers.base import Buffer
from remap.buffers.placement import Placement, place
from remap.dtypes import check_order, check_shape, parse_dtype
from remap.errors import AccessError, InvalidValueError
from remap.handles import create_handle, parse_alignment, reserve_range
from remap.lifetime import Description, Rollback, drain, queued, undo
from remap.locations import LocationLike, RightLike
from remap.ranges import Granted
from remap.sizes import Size, format_size, parse_size, round_up
from remap.spans import Chunk, host_array
from remap.streams import StreamLike
from remap.types import Access, HandleType, Held, Location

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
    can be written: `write` then does it in two pieces where it wraps. `set_access` changes the rights to both. The two
    addresses are one memory: a kernel that writes through one and reads through the other needs an alias fence in
    between (CUDA programming guide, virtual aliasing); work that is queued in stream order needs none. Source:
    cuMemMap, twice with one handle.
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
        rights = dict(placement.grants)
        if second is not None:
            rights = dict.fromkeys(rights, Access.parse(second))
        self._rights_apart = {where: right for where, right in rights.items() if right.readable}
        self._chunks = []
        self.head = 0
        self.tail = 0
        if size:
            self._reserved = 2 * size
            self._address = reserve_range(driver, self._reserved, parse_alignment(alignment))
            try:
                self._chunks = [Chunk(self._address, size, self.properties.location)]
                with Rollback() as rollback:
                    handle = create_handle(driver, size, self.properties)
                    try:
                        self._map_chunks(self._chunks, [handle], rollback)
                    finally:
                        driver.release(handle)
                    self._open = True  # from here on an interrupt leaves it to its finaliser
            except BaseException as error:
                self._open = False
                undo(
                    error, driver.unmap, self._address, self._reserved
                )  # where an interrupt kept that from happening
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
        if first == host.nbytes or self._part_writable(
            start, host.nbytes, self._actor("write", Access.READ_WRITE, stream, None)
        ):
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
        from remap.arrays import DeviceArray

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
        """The right of each location that has one to the second view."""
        return dict(self._rights_apart or {})

    @property
    def _reach(self) -> int:
        return 2 * self._size

    def _check_part(
        self, asked: str, offset: int, size: int, needed: Access, place: Location | None = None
    ) -> None:
        if offset + size <= self._size:
            return
        second, writing = self.access_to_second, needed is Access.READ_WRITE
        found = second.values() if place is None else (second.get(place, Access.NONE),)
        if not any(right.writable if writing else right.readable for right in found):
            can = "writable" if writing else "readable"
            raise AccessError(
                f"{asked} of bytes {offset} to {offset + size} of {self.describe()}",
                rule=f"the second view, from byte {self._size} on, is not {can} for {place or 'anybody'}",
                next_step="Use the first view, in two pieces where it wraps",
            )

    def _part_writable(self, offset: int, size: int, place: Location) -> bool:
        return offset + size <= self._size or self.access_to_second.get(place, Access.NONE).writable

    def _mappings(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        return [*chunks, *(Chunk(at + self._size, size, place) for at, size, place in chunks)]

    def _granted_runs(self, chunks: Sequence[Chunk]) -> list[Granted]:
        first, apart = super()._granted_runs(chunks), self._rights_apart or {}
        return [*first, *((at + self._size, size, apart) for at, size, _ in first)]

    def _held(self) -> tuple[Held, ...]:
        return tuple(
            Held(at, size, self.properties.location, self.serial, tuple(rights.items()))
            for at, size, rights in self._granted_runs(tuple(self._chunks))
        )

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
