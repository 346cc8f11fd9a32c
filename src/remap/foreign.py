"""Arrays of other libraries as remap sees them: where the bytes are, what they mean, and who keeps them alive."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from remap import dlpack, drivers
from remap.dtypes import ADDED, parse_dtype
from remap.errors import DriverError, InvalidValueError
from remap.locations import Device, device
from remap.sizes import LARGEST
from remap.streams import Queue, StreamLike, as_stream
from remap.types import Host, Location
from remap.uses import Uses

if TYPE_CHECKING:
    from numpy.typing import NDArray

NEWEST_INTERFACE = 3


class SizeOverflowError(InvalidValueError, OverflowError):
    """The extents of an array multiply to more bytes than any address space has."""


class ForeignArray:
    """An array that another library owns. Made by `remap.as_array` and `remap.from_dlpack`.

    `strides` are in bytes. `location` is the device that the memory can be used on, or the host. `owner` keeps the
    memory for as long as this object lives.
    """

    __slots__ = ("__weakref__", "address", "dtype", "location", "owner", "read_only", "shape", "strides")

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: Any,
        strides: tuple[int, ...] | None,
        location: Location,
        read_only: bool,
        owner: object,
    ) -> None:
        self.address = address
        self.shape = shape
        self.dtype = dtype
        check_extent(shape, dtype.itemsize)
        self.strides = contiguous_strides(shape, dtype.itemsize) if strides is None else strides
        self.location = location
        self.read_only = read_only
        self.owner = owner

    @property
    def size(self) -> int:
        """The number of elements."""
        return check_extent(self.shape, 1)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements; a strided array's memory spans more."""
        return self.size * int(self.dtype.itemsize)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after the other, the last index changing fastest."""
        if self.size == 0:
            return True
        plain = contiguous_strides(self.shape, self.dtype.itemsize)
        # The stride of an axis with one element is never used.
        return all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, plain, strict=True))

    def numpy(self) -> NDArray[Any]:
        """Return the same memory as a NumPy array, which keeps it alive; raises `InvalidValueError` off the host."""
        import numpy as np

        if self.location.is_device:
            raise InvalidValueError(
                f"a NumPy view of an array on {self.location}",
                rule="NumPy reads host memory only",
                next_step="Copy it into memory of remap, and that to the host",
            )
        if self.size == 0:
            return np.empty(self.shape, self.dtype)
        view: NDArray[Any] = np.asarray(_Interface(self))
        return (
            view if view.dtype == self.dtype else view.view(self.dtype)
        )  # the interface has NumPy's own types only

    def __repr__(self) -> str:
        """Return shape, type and place."""
        return f"<remap.ForeignArray {self.shape} of {self.dtype} on {self.location} at {self.address:#x}>"


class _Interface:
    """Shows a host array to NumPy, and keeps it alive for the NumPy array."""

    def __init__(self, array: ForeignArray) -> None:
        import numpy as np

        self._array = array
        kind = np.dtype(f"u{array.dtype.itemsize}") if array.dtype.name in ADDED else array.dtype
        self.__array_interface__ = {
            "version": 3,
            "data": (array.address, array.read_only),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": kind.str,
            "descr": kind.descr,
        }


def as_array(value: Any, *, stream: StreamLike | None = None) -> ForeignArray:
    """Return an array of another library without a copy.

    Takes NumPy arrays, whatever has the DLPack methods or `__cuda_array_interface__`, and host objects with the
    buffer protocol. Later work of `stream` (the default one) is ordered after what the producer has queued; the host
    does not wait, unless the memory is the host's. Raises `TypeError` for other objects, and `InvalidValueError` for
    what cannot be described.
    """
    import numpy as np

    if isinstance(value, np.ndarray):
        return _host_array(cast("NDArray[Any]", value))
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        try:
            return from_dlpack(value, stream=stream)
        except (BufferError, InvalidValueError):  # a type that DLPack lacks, say
            # No name for the error here: it would keep this frame alive, and with it the array.
            interface = getattr(value, "__cuda_array_interface__", None)
            if interface is None:
                raise
            return _from_interface(value, interface, stream)
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_interface(value, interface, stream)
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(
            f"an array has __dlpack__, __cuda_array_interface__ or the buffer protocol, not {type(value)}"
        ) from None
    return _host_array(np.asarray(view))


def from_dlpack(value: Any, *, stream: StreamLike | None = None) -> ForeignArray:
    """Take an array over by DLPack, without a copy: an object with `__dlpack__`, or a capsule.

    Later work of `stream` (the default one) is ordered after what the producer has queued; a bare capsule's producer
    has seen to that when it made it. Raises `InvalidValueError` for a capsule that was used before, is none of
    DLPack's or is of a version that remap does not read, and for memory on a device that CUDA does not know.
    """

    def accept(tensor: dlpack.Tensor) -> ForeignArray:
        dtype = parse_dtype(tensor.typestr)
        strides = None if tensor.strides is None else tuple(step * dtype.itemsize for step in tensor.strides)
        place = _location(tensor.device)
        return ForeignArray(tensor.address, tensor.shape, dtype, strides, place, tensor.read_only, None)

    capsule = value if dlpack.is_capsule(value) else _ask(value, stream)
    taken, claim = dlpack.take(capsule, accept)
    taken.owner = claim
    return taken


def _ask(value: Any, stream: StreamLike | None) -> Any:
    if not hasattr(value, "__dlpack_device__"):
        raise TypeError(f"from_dlpack takes a capsule, or an object with __dlpack__, not {type(value)}")
    kind, index = (int(part) for part in value.__dlpack_device__())
    location = _location((kind, index))
    options: dict[str, Any] = {}
    if location.is_device:
        # DLPack forbids 0: the legacy default stream is 1.
        options["stream"] = as_stream(stream, device(location.index)).handle or 1
    try:
        return value.__dlpack__(max_version=dlpack.NEWEST, **options)
    except TypeError:  # made before DLPack had versions
        return value.__dlpack__(**options)


def _location(where: tuple[int, int]) -> Location:
    kind, index = where
    if kind in (dlpack.CPU, dlpack.CUDA_HOST):
        return Host()
    if kind not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        raise InvalidValueError(
            f"an array on a device of DLPack's kind {kind}", rule="remap takes those of the CPU and of CUDA"
        )
    if drivers.current().name != "cuda":
        raise InvalidValueError(
            f"an array on CUDA device {index}",
            rule=f"the {drivers.current().name} driver cannot reach memory of CUDA",
            next_step="Choose the CUDA driver, or move the array to the CPU",
        )
    return device(index).location


def _host_array(array: NDArray[Any]) -> ForeignArray:
    if array.dtype.hasobject:
        raise InvalidValueError(f"an array of {array.dtype}", rule="Python objects have no bytes to use")
    read_only = not array.flags.writeable
    return ForeignArray(array.ctypes.data, array.shape, array.dtype, array.strides, Host(), read_only, array)


def _from_interface(value: Any, interface: Any, stream: StreamLike | None) -> ForeignArray:
    """Read a CUDA array interface, versions 0 to 3, and order `stream` after the one that it names."""
    import numpy as np

    if not isinstance(interface, Mapping):
        raise _malformed("it is not a dictionary")
    entries: Mapping[str, Any] = interface  # pyright: ignore[reportUnknownVariableType]
    try:
        version = operator.index(entries["version"])
        shape = tuple(operator.index(extent) for extent in entries["shape"])
        pointer, read_only = entries["data"]
        address = operator.index(pointer or 0)
        typestr = entries["typestr"]
        if not isinstance(typestr, str):  # NumPy would take None for a double
            raise TypeError(f"typestr is {typestr!r}")
        dtype = np.dtype(typestr)
        described: Any = entries.get("descr")
        if dtype.kind == "V" and described and described != [("", dtype.str)]:
            dtype, size = np.dtype(described), dtype.itemsize
            if dtype.itemsize != size:
                raise ValueError(f"descr has {dtype.itemsize} bytes, and typestr {size}")
        given: Sequence[Any] | None = entries.get("strides")
        strides = None if given is None else tuple(operator.index(step) for step in given)
        handle = None if entries.get("stream") is None else operator.index(entries["stream"])
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(f"a field is missing or wrong ({type(error).__name__}: {error})") from error
    if not 0 <= version <= NEWEST_INTERFACE:
        raise _malformed(f"its version is {version}, and remap reads up to {NEWEST_INTERFACE}")
    if entries.get("mask") is not None:
        raise _malformed("it has a mask, and remap takes plain memory only")
    if any(extent < 0 for extent in shape) or (strides is not None and len(strides) != len(shape)):
        raise _malformed(f"shape {shape} and strides {strides} do not describe an array")
    if dtype.hasobject or dtype.itemsize == 0:
        raise _malformed(f"its type is {dtype}, which has no bytes to use")
    if handle is not None and handle <= 0:
        raise _malformed(f"it names stream {handle}, and streams there are numbered from 1")
    place = _place_of(address) if 0 not in shape else device()
    if handle is not None:
        pending = Uses()
        pending.add(Queue(handle, place, value))
        try:
            pending.join(as_stream(stream, place))
        finally:
            pending.forget()
    return ForeignArray(address, shape, dtype, strides, place.location, bool(read_only), value)


def _place_of(address: int) -> Device:
    driver = drivers.current()
    try:
        index = driver.pointer_info(address).device
    except DriverError as error:
        raise _malformed(f"the {driver.name} driver knows no memory at address {address:#x}") from error
    return device(index if index >= 0 else None)  # -1: memory that lies on the host


def _malformed(rule: str) -> InvalidValueError:
    return InvalidValueError("a __cuda_array_interface__", rule=rule)


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of an array whose last index changes fastest."""
    strides: list[int] = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def check_extent(shape: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes of an array; raises `SizeOverflowError` where no address space could hold them."""
    total = itemsize
    for extent in shape:
        total *= extent
    if total > LARGEST:
        raise SizeOverflowError(
            f"an array of shape {shape} with {itemsize} bytes an element",
            rule="it would have more than 2**63 - 1 bytes",
        )
    return total
