"""Spans: ranges that can be filled, copied and viewed. Mappings and all buffers are spans."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from remap.blocks import block
from remap.dtypes import check_order, parse_dtype
from remap.errors import AccessError, ContextLostError, InvalidValueError, KernelError, RemapError
from remap.exports import memory_behind
from remap.hints import hinted
from remap.launches import MemoryUse, launches
from remap.lifetime import tell, undo, watchers
from remap.locations import Device, device
from remap.ranges import Chunk, Range, words
from remap.sizes import Size, format_size, parse_byte, parse_offset
from remap.streams import Queue, Stream, StreamLike, as_stream
from remap.types import Access, Location

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from remap.arrays import DeviceArray

__all__ = ["Chunk", "Span"]


@hinted(
    data_ptr="address",
    export="remap.export(memory)",
    free="close()",
    handle="address",
    nbytes="size",
    numpy="to_host(dtype) for a copy, or array(dtype).numpy() where the CPU may look",
    ptr="address",
)
class Span(Range):
    """A range of mapped addresses that can be filled, copied and viewed: the base of mappings and of every buffer."""

    def fill(
        self, value: int, *, offset: Size = 0, size: Size | None = None, stream: StreamLike | None = None
    ) -> None:
        """Set each byte of a range to `value`, 0 to 255.

        Waits until it is done, unless `stream` is given: then the work is queued there. `offset` and `size` are bytes,
        or text such as "4MiB"; the whole by default. Raises `AccessError` if nobody may write. Source:
        cuMemsetD8Async.
        """
        value = parse_byte(value)
        offset, size = self._part("fill", offset, size)
        with self._using("fill", Access.READ_WRITE, stream, part=(offset, size)) as queue:
            if queue is None:
                ctypes.memset(self._address + offset, value, size)
            elif size:
                self._driver.fill(self._address + offset, value, 1, size, queue.handle)

    def copy_from_host(self, array: Any, *, offset: Size = 0, stream: StreamLike | None = None) -> None:
        """Copy a host array, or anything with the buffer protocol, into this memory from byte `offset` on.

        Waits until it is done, unless `stream` is given: then do not change the array before that stream has passed
        (it is kept alive until then). Raises `InvalidValueError` if it is not contiguous or does not fit. Source:
        cuMemcpyHtoDAsync.
        """
        host = host_array(array, "copy_from_host", writable=False)
        offset, size = self._part("copy_from_host", offset, host.nbytes)
        part = (offset, size)
        with self._using("copy_from_host", Access.READ_WRITE, stream, part=part, keep=host) as queue:
            if queue is None:
                ctypes.memmove(self._address + offset, host.ctypes.data, size)
            elif size:
                self._driver.copy_to_device(self._address + offset, host.ctypes.data, size, queue.handle)

    def copy_to_host(self, out: Any, *, offset: Size = 0, stream: StreamLike | None = None) -> None:
        """Copy from byte `offset` on into a host array, filling it.

        Waits until it is done, unless `stream` is given: then the array is complete once that stream has passed.
        Raises `InvalidValueError` if it is read-only, not contiguous or larger than what is there. Source:
        cuMemcpyDtoHAsync.
        """
        self._read(host_array(out, "copy_to_host", writable=True), offset, stream)

    def _read(self, host: NDArray[Any], offset: Size, stream: StreamLike | None, wait: bool = False) -> None:
        offset, size = self._part("copy_to_host", offset, host.nbytes)
        part = (offset, size)
        with self._using("copy_to_host", Access.READ, stream, part=part, keep=host, wait=wait) as queue:
            if queue is None:
                ctypes.memmove(host.ctypes.data, self._address + offset, size)
            elif size:
                self._driver.copy_to_host(host.ctypes.data, self._address + offset, size, queue.handle)

    def to_host(
        self, dtype: DTypeLike = "uint8", shape: int | Sequence[int] | None = None, *, offset: Size = 0
    ) -> NDArray[Any]:
        """Return a new NumPy array with a copy of this memory.

        `shape` defaults to as many elements as fit from byte `offset` on. Waits.
        """
        import numpy as np

        try:
            kind = parse_dtype(dtype)
        except TypeError:
            check_order("to_host(dtype, shape)", dtype, shape)
            raise
        offset = parse_offset(offset)
        if shape is None:
            if not kind.itemsize:
                raise InvalidValueError(
                    f"{kind!r} without a shape",
                    rule="its elements have no size, so that no number of them fits",
                    next_step="Name a type with a size",
                )
            shape = max(self._size - offset, 0) // kind.itemsize
        out = np.empty(shape, kind)
        self.copy_to_host(out, offset=offset)
        return out

    def copy_from(
        self,
        source: Span,
        *,
        offset: Size = 0,
        source_offset: Size = 0,
        size: Size | None = None,
        stream: StreamLike | None = None,
    ) -> None:
        """Copy bytes of another span into this one, on whatever devices either lies.

        Without `size`, all that the source has from `source_offset` on, which must fit in here from `offset` on. Waits
        until it is done, unless `stream` is given. The device that copies must be able to write here and read there.
        Raises `InvalidValueError` if it does not fit. Source: cuMemcpyDtoDAsync.
        """
        if not isinstance(source, Span):
            raise TypeError(
                f"copy_from takes a buffer or another span of remap, not {type(source)}; copy_from_host takes host "
                "arrays, and array().copy_from the arrays of other libraries"
            )
        if size is None:
            size = source.size - parse_offset(source_offset, "source_offset")
            room = self._size - parse_offset(offset)
            if size > room:
                raise InvalidValueError(
                    f"copy_from of the {format_size(size)} of {source.describe()}",
                    rule=f"they do not fit into {self.describe()}, which has {max(room, 0)} bytes from there on",
                    next_step="Pass size= to copy a part of them",
                )
        offset, size = self._part("copy_from", offset, size)
        source_offset, _ = source._part("copy_from", source_offset, size)
        part, other = (offset, size), (source_offset, size)
        with self._using(
            "copy_from", Access.READ_WRITE, stream, part=part, source=source, source_part=other
        ) as queue:
            target, origin = self._address + offset, source._address + source_offset
            if queue is None:
                ctypes.memmove(target, origin, size)
            elif size:
                self._driver.copy(target, origin, size, queue.handle)

    def array(
        self, dtype: DTypeLike = "uint8", shape: int | Sequence[int] | None = None, *, offset: Size = 0
    ) -> DeviceArray:
        """Return a view of this memory that NumPy, CuPy, torch and Numba take without a copy.

        `shape` defaults to as many elements as fit from byte `offset` on. The view keeps this object alive, and
        this object cannot be closed while another library holds what it took from the view.
        """
        from remap.arrays import DeviceArray

        try:
            return DeviceArray.over(self, dtype, shape, offset)
        except TypeError:
            check_order("array(dtype, shape)", dtype, shape)
            raise

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        """Refuse: NumPy would make an array of one Python object of it."""
        raise TypeError(
            f"{self.describe()} is no array: copy it with to_host(), or view it with array(dtype), "
            "whose numpy() is the memory itself where the CPU may look"
        )

    def _part(self, asked: str, offset: Size, size: Size | None) -> tuple[int, int]:
        """Return the offset and the size of a part, checked against this span's bounds.

        They are numbers of Python then: one of NumPy's would wrap around when it is added to an address, and is
        nothing that a C function takes.
        """
        self._check()
        offset = parse_offset(offset)
        size = self._size - offset if size is None else parse_offset(size, "size")
        if offset < 0 or size < 0 or offset + size > self._reach:
            raise InvalidValueError(
                f"{asked} of {format_size(size)} from offset {offset}",
                rule=f"the {self.kind} has {format_size(self._size)} ({self._size} bytes)",
                next_step=f"Pass at most {self._reach - offset} bytes from there on"
                if 0 <= offset < self._reach
                else "Pass an offset inside of it",
            )
        return offset, size

    @block
    def _using(
        self,
        asked: str,
        needed: Access,
        stream: StreamLike | None,
        *,
        part: tuple[int, int] | None = None,
        keep: object = None,
        source: Span | None = None,
        source_part: tuple[int, int] | None = None,
        wait: bool = False,
    ) -> Generator[Queue | None]:
        """Run a block that queues work on the memory; yields the queue, or None where the CPU does it now.

        The parts are the (offset, size) that the work touches here and in the source. Where no stream is named, or
        `wait` is set, it waits for the work.
        """
        place = self._actor(asked, needed, stream, source)
        queue = None
        if place.is_device:
            queue = as_stream(stream, device(place.index))
        # Work that an interrupt leaves behind (Ctrl-C in the wait), or a wait that fails, is still running, and uses
        # `keep`.
        left, waiting = queue, False
        token, mine = object(), self._operations
        others = mine if source is None else source._operations
        try:
            if queue is not None and isinstance(queue.owner, Stream):
                # As launches do: whoever closes the stream sees this, or has said so before the lock is taken.
                launches.under_way[token] = (queue.owner,)
            self._begin_use(asked, place, needed, token, part)
            if watchers:
                tell("begin", self, asked)
            try:
                if queue is not None and isinstance(queue.owner, Stream):
                    queue.owner._check()
                if source is not None:
                    source._begin_use(asked, place, Access.READ, token, source_part)
                if queue is None:
                    self._wait_for_work(asked)
                    if source is not None:
                        source._wait_for_work(asked)
                    yield None
                else:
                    with queue.device.current():
                        for span, touched in ((self, part), (source, source_part)):
                            # Read once: another thread drops it when everything has arrived.
                            arriving = None if span is None else span._arriving
                            if arriving is not None:
                                arriving.join(queue, touched)
                        if wait and stream is not None:
                            queue.check_not_capturing(f"{asked} of {self.describe()}")
                        yield queue
                        if stream is None or wait:
                            waiting = True
                            self._driver.synchronize_stream(queue.handle)
                            left = None
            except RemapError as error:
                if not waiting or isinstance(error, KernelError | ContextLostError):
                    left = None  # it was refused, or has ended: that is what these two tell
                raise
            finally:
                if watchers:
                    tell("end", self, asked)
        finally:
            try:
                if left is not None and token in mine:
                    self._left_in(left, keep, source)
                    if launches.recorders:
                        uses = [MemoryUse(self, place, needed, part)]
                        if source is not None:
                            uses.append(MemoryUse(source, place, Access.READ, source_part))
                        launches.record(left, [*uses, keep])
            except BaseException as error:  # interrupted: the work is queued all the same
                undo(error, self._left_in, left, keep, source)
                raise
            finally:
                try:
                    mine.discard(token)
                finally:
                    try:
                        others.discard(token)
                    finally:
                        launches.under_way.pop(token, None)

    def _left_in(self, queue: Queue, keep: object, source: Span | None) -> None:
        """Note the stream where an operation has left work."""
        memory = None if keep is None else memory_behind(keep)
        if memory is not None:  # ours: closing it waits, and no view has to be let go before
            memory._uses.add(queue)
            keep = memory
        self._uses.add(queue, keep)
        if source is not None:
            source._uses.add(queue)

    def _actor(self, asked: str, needed: Access, stream: StreamLike | None, source: Span | None) -> Location:
        """Return the location that carries an operation out: the stream's device, else one that has the rights."""
        named = getattr(stream, "device", None)
        if isinstance(named, Device):
            return named.location
        fitting = [
            place
            for place, right in self._rights.items()
            if (right.writable if needed is Access.READ_WRITE else right.readable)
            and (source is None or source._right(place).readable)
        ]
        if not fitting:
            both = f" and to {source.describe()}" if source is not None else ""
            raise AccessError(
                f"{asked} of {self.describe()}",
                rule=f"no location has {words(needed)} to it{both}",
                next_step=self._grant_step(next(iter(self._rights), device().location), needed),
            )
        # A device before the CPU: it copies faster, and in the order of a stream.
        return next((place for place in fitting if place.is_device), fitting[0])


def host_array(value: Any, asked: str, *, writable: bool) -> NDArray[Any]:
    """Return anything with the buffer protocol as a contiguous array, to copy from or, if `writable`, into.

    What else NumPy makes an array of (`__array__`) can be copied from. Raises `TypeError` for what has no bytes.
    """
    import numpy as np

    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
    elif not writable and hasattr(value, "__array__"):
        array = np.asarray(value)
    else:
        try:
            array = np.asarray(memoryview(value))
        except TypeError:
            step = "an array to be filled" if writable else "numpy.array(values, dtype)"
            said = (
                f"{asked} copies the bytes of host memory, and a {type(value).__name__} has none: pass {step}"
            )
            raise TypeError(said) from None
    if not array.flags.c_contiguous:
        raise InvalidValueError(
            f"{asked} with an array of strides {array.strides}",
            rule="the bytes are copied in one piece, so the array must be contiguous",
            next_step="Pass numpy.ascontiguousarray(array)",
        )
    if writable and not array.flags.writeable:
        raise InvalidValueError(f"{asked} into a read-only array", rule="it would be written")
    if array.dtype.hasobject:
        raise InvalidValueError(
            f"{asked} with dtype {array.dtype}", rule="Python objects have no bytes to copy"
        )
    return array
