"""`DeviceBuffer`: elements of one type on a device, to and from NumPy in two lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remap.buffers.sources import Source, take
from remap.buffers.typed import OwnedMemory, Shape, extent, from_list, place_of
from remap.hints import hinted
from remap.locations import DeviceLike
from remap.spans import host_array
from remap.streams import StreamLike

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


@hinted(from_numpy="from_host(array)", zeros="zeroed(shape, dtype)")
class DeviceBuffer(OwnedMemory):
    """Typed memory on one device. Closing it waits for the streams that used it, as far as they have not passed yet.

    It is a `DeviceArray`: kernels take it with its length and type, other libraries without a copy. `source` names
    where the memory comes from and changes nothing else: `"plain"`, `"mapped"`, or a buffer of yours, which stays
    yours (`sources.py` has the default). `owner` is that memory.
    """

    __slots__ = ()

    @classmethod
    def from_host(
        cls,
        array: Any,
        *,
        stream: StreamLike | None = None,
        device: DeviceLike | None = None,
        source: Source = None,
    ) -> DeviceBuffer:
        """Return a buffer with a copy of a contiguous host array, of its shape and type; of a list as NumPy has it.

        Without a `stream` the copy is done when this returns, and the array may change at once. With one it is queued
        there: the array must not change before that stream has passed, and is kept alive until then. Raises
        `InvalidValueError` for an array that is not contiguous or holds Python objects, `OutOfMemoryError`.
        """
        host = host_array(from_list(array), "from_host", writable=False)
        return cls._made(host.shape, host.dtype, stream, device, source, host)

    @classmethod
    def zeroed(
        cls,
        shape: Shape,
        dtype: DTypeLike = "float32",
        *,
        stream: StreamLike | None = None,
        device: DeviceLike | None = None,
        source: Source = None,
    ) -> DeviceBuffer:
        """Return a buffer of zeros. Waits until they are written, unless `stream` is given."""
        return cls._made(shape, dtype, stream, device, source, 0)

    @classmethod
    def empty(
        cls,
        shape: Shape,
        dtype: DTypeLike = "float32",
        *,
        device: DeviceLike | None = None,
        source: Source = None,
    ) -> DeviceBuffer:
        """Return a buffer whose contents are undefined."""
        return cls._made(shape, dtype, None, device, source, None)

    @classmethod
    def _made(
        cls,
        shape: Shape,
        dtype: Any,
        stream: StreamLike | None,
        at: DeviceLike | None,
        source: Source,
        contents: Any,
    ) -> DeviceBuffer:
        extents, kind, size = extent(shape, dtype)
        memory, owned = take(size, place_of(at, stream), source)
        return cls(memory, kind, extents, owned)._with(contents, stream)
