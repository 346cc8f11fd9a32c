"""`TypedMemory`: memory as elements of one type, with copies in the order of what was queued on it, and slices."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, TypeAlias

from remap.arrays import DeviceArray
from remap.dtypes import check_order, check_shape, check_type
from remap.errors import InvalidValueError
from remap.foreign import check_extent
from remap.lifetime import end_block, undo
from remap.locations import Device, device
from remap.sizes import counted, parse_size
from remap.spans import Span, host_array
from remap.streams import Queue, StreamCalls, StreamLike, default_handle
from remap.types import Access
from remap.uses import After, Known

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex] | str
"""What is taken as a shape: one extent, a sequence of them, or text such as "64MiB", as many elements as fill that."""


class TypedMemory(DeviceArray):
    """Contiguous elements of one type: all of some memory, or a slice of it, which keeps the owner.

    A copy with no `stream` comes after everything that remap saw being queued on the memory, on whatever stream, and
    waits until it is done. With a `stream` it is queued there, in the order of that stream alone.
    """

    __slots__ = ()

    owner: Span

    # -- parts of it --

    def __getitem__(self, key: SupportsIndex | slice) -> TypedMemory:
        """Return a part along the first axis: a slice of step 1, or one element of it, without a copy."""
        if not self.shape:
            raise InvalidValueError(
                "a part of an array of no dimensions", rule="it has a first axis only above that"
            )
        count, rest = self.shape[0], self.shape[1:]
        row = check_extent(rest, int(self.dtype.itemsize))
        if isinstance(key, slice):
            start, stop, step = key.indices(count)
            if step != 1:
                raise InvalidValueError(
                    f"a slice of step {step}",
                    rule="a part must be contiguous",
                    next_step="Copy to the host and slice there",
                )
            return self._part((max(stop - start, 0), *rest), self.offset + start * row)
        if isinstance(key, tuple):
            rule = "a part is taken along the first axis alone, so that it is contiguous"
            raise TypeError(
                f"{key} of an array of shape {self.shape}: {rule}. Copy with to_host(), and index there"
            )
        index = operator.index(key)
        if not -count <= index < count:
            raise IndexError(f"index {index} of an array of {count}")
        return self._part(rest, self.offset + index % count * row)

    def reshape(self, *shape: int) -> TypedMemory:
        """Return the same elements in another shape; raises `InvalidValueError` unless their number is the same."""
        return self._part(super().reshape(*shape).shape, self.offset)

    def view(self, dtype: DTypeLike) -> TypedMemory:
        """Return the same bytes as elements of another type.

        The last axis shrinks or grows with the size of the type. Raises `InvalidValueError` where its bytes are not
        whole elements of that type, and `AlignmentError`.
        """
        other = super().view(dtype)
        return self._part(other.shape, self.offset, other.dtype)

    def _part(self, shape: tuple[int, ...], offset: int, dtype: Any = None) -> TypedMemory:
        return TypedMemory(self.owner, self.dtype if dtype is None else dtype, shape, offset)

    # -- copies --

    def to_host(self, *, stream: StreamLike | None = None) -> NDArray[Any]:
        """Return a new NumPy array with the elements. Waits, with a `stream` for that one."""
        import numpy as np

        out = np.empty(self.shape, self.dtype)
        if self.nbytes:
            self._order("to_host", Access.READ, stream)
            self.owner._read(out, self.offset, stream, wait=True)
        return out

    def copy_to_host(self, out: Any, *, stream: StreamLike | None = None) -> None:
        """Copy the elements into a host array of the same shape and type.

        Waits, unless `stream` is given: then the array is complete once that stream has passed. Raises
        `InvalidValueError` for another shape or type, or an array that is read-only or not contiguous.
        """
        self._check_host(host_array(out, "copy_to_host", writable=True), "copy_to_host")
        if self.nbytes:
            self._order("copy_to_host", Access.READ, stream)
            self.owner.copy_to_host(out, offset=self.offset, stream=stream)

    def copy_from_host(self, array: Any, *, stream: StreamLike | None = None) -> None:
        """Copy a host array of the same shape and type, or a list of such values, into this memory.

        Waits, so that the array may change as soon as it returns, unless `stream` is given: then not before that
        stream has passed (the array is kept alive until then). Raises as `copy_to_host`.
        """
        host = host_array(from_list(array, self.dtype), "copy_from_host", writable=False)
        self._check_host(host, "copy_from_host")
        if self.nbytes:
            self._order("copy_from_host", Access.READ_WRITE, stream)
            self.owner.copy_from_host(host, offset=self.offset, stream=stream)

    def fill(self, value: Any, *, stream: StreamLike | None = None) -> None:
        """Set every element to `value`, converted to the type. Waits, unless `stream` is given.

        Raises `InvalidValueError` for several values.
        """
        import numpy as np

        one = np.asarray(value, self.dtype)
        if one.ndim:
            raise InvalidValueError(
                f"fill with {value!r}",
                rule="every element is set to one and the same value",
                next_step="Copy several of them: copy_from_host(values)",
            )
        pattern = one.tobytes()
        if not self.nbytes:
            return
        width = next((one for one in (1, 2, 4) if pattern == pattern[:one] * (len(pattern) // one)), 0)
        if not width:  # the driver fills with 1, 2 or 4 bytes
            self.copy_from_host(np.full(self.shape, one, self.dtype), stream=stream)
            return
        self._order("fill", Access.READ_WRITE, stream)
        owner, part = self.owner, (self.offset, self.nbytes)
        with owner._using("fill", Access.READ_WRITE, stream, part=part) as queue:
            number = int.from_bytes(pattern[:width], "little")
            if queue is None:
                view = np.frombuffer(_bytes_at(owner._address + self.offset, self.nbytes), f"u{width}")
                view[:] = number
            else:
                start, count = owner._address + self.offset, self.nbytes // width
                owner._driver.fill(start, number, width, count, queue.handle)

    def _order(self, asked: str, needed: Access, stream: StreamLike | None) -> None:
        """Let work on the default stream come after all that was queued on the memory; a named one keeps its own."""
        if stream is None and self.owner._known_uses:
            place = self.owner._actor(asked, needed, None, None)
            if place.is_device:
                self.owner._uses.join(Queue(default_handle(), device(place.index), None))

    def _check_host(self, array: NDArray[Any], asked: str) -> None:
        if array.shape != self.shape or array.dtype != self.dtype:
            raise InvalidValueError(
                f"{asked} with shape {array.shape} of {array.dtype}",
                rule=f"the memory has shape {self.shape} of {self.dtype}, and copies convert nothing",
                next_step="Use .view, .reshape, or a part of it",
            )


def from_list(values: Any, dtype: DTypeLike | None = None) -> Any:
    """Return a list or tuple as NumPy makes an array of it, and anything else as it is."""
    import numpy as np

    return np.asarray(values, dtype) if isinstance(values, (list, tuple)) else values


class OwnedMemory(TypedMemory):
    """Typed memory that gives back what it stands on when it is closed.

    Arrays that other libraries have made of it by DLPack, and of parts of it, keep it from closing. One that was made
    of it by `__cuda_array_interface__` does not, since nobody is told when that goes: let it go first.
    """

    __slots__ = ("_owned",)

    def __init__(
        self, owner: Span, dtype: Any = None, shape: tuple[int, ...] = (), owned: bool = True
    ) -> None:
        if not isinstance(owner, Span):  # pyright: ignore[reportUnnecessaryIsInstance]
            name = type(self).__name__
            step = f"remap.{name.lower()}(shape)"
            if hasattr(self, "from_host"):
                step = f"{name}.from_host(values), {name}.zeroed(shape) or {name}.empty(shape)"
            raise TypeError(f"{name} is not made of {owner!r} by its name alone. Call {step}")
        super().__init__(owner, dtype, shape, 0)
        self._owned = owned

    def _with(self, contents: Any, stream: StreamLike | None) -> Self:
        """Fill the memory with a byte, or copy an array in, or do neither for None; close it if that fails."""
        try:
            if isinstance(contents, int) and self.nbytes:
                self.owner.fill(contents, size=self.nbytes, stream=stream)
            elif contents is not None and self.nbytes:
                self.copy_from_host(contents, stream=stream)
        except BaseException as error:
            undo(error, self.close)
            raise
        return self

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return self.owner.closed

    def close(self, *, after: After = Known.STREAMS) -> None:
        """Give the memory back, as its owner's `close` does; memory that was handed in stays. Again does nothing."""
        if self._owned:
            self.owner.close(after=after)

    def _hand_out(self, asked: str) -> None:
        """Let the address escape. An export that lives as long as this object would never let it be closed.

        So closing waits for the devices, and does not know whether another library still has the memory.
        """
        if not self._owned:
            super()._hand_out(asked)
            return
        owner = self.owner
        with owner._driver.lock:
            owner._check_there(asked)
            owner._check_part(asked, self.offset, self.nbytes, Access.READ)
            owner._uses.escaped = True

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Close it; if the block failed, what closing raises is a note on its error."""
        end_block(error, self.close)
        if error is not None and self._owned:
            self.owner._warns = False  # as `Resource` does

    def __repr__(self) -> str:
        """Return shape, type and what it stands on."""
        state = " closed" if self.closed else ""
        return f"<remap.{type(self).__name__}{state} {self.shape} of {self.dtype} in {self.owner.describe()}>"


def extent(shape: Shape, dtype: DTypeLike) -> tuple[tuple[int, ...], Any, int]:
    """Return a shape, a type and the bytes that they take, checked; raises `InvalidValueError`, `OverflowError`.

    Text that is a size in bytes is as many elements as fill them.
    """
    try:
        kind = check_type(dtype)
    except TypeError:
        check_order("(shape, dtype)", dtype, shape)
        raise
    if isinstance(shape, str):
        size = parse_size(shape)
        if size % kind.itemsize:
            rule = f"an element of {kind} takes {counted(int(kind.itemsize), 'byte')}, and these are no whole number"
            step = "Pass the number of elements, or a size that they fill"
            raise InvalidValueError(f"{shape} of {kind}", rule=rule, next_step=step)
        shape = size // int(kind.itemsize)
    try:
        extents = check_shape(shape)
    except TypeError as error:
        raise TypeError(f"{error}. For bytes, pass their number and dtype='uint8'") from None
    return extents, kind, check_extent(extents, kind.itemsize)


def place_of(at: Any, stream: StreamLike | None) -> Device:
    """Return the device that is named, else that of the stream, else the fastest."""
    if at is None and isinstance(stream, StreamCalls):
        return stream.device
    return device(at)


def _bytes_at(address: int, size: int) -> memoryview:
    import ctypes

    return memoryview((ctypes.c_char * size).from_address(address))
