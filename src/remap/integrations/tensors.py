"""Tensors over memory of remap: the one place where torch is imported, and where an address becomes a tensor."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from remap import dlpack, drivers
from remap.errors import InvalidValueError
from remap.foreign import check_extent
from remap.integrations.support import missing
from remap.locations import device

try:
    torch: Any = importlib.import_module("torch")
except ImportError as _error:
    raise missing("torch", "remap.torch", _error) from _error

Tensor: TypeAlias = Any
"""A `torch.Tensor`; torch is optional, so its types are not known here."""


class Bytes:
    """Bytes at an address, for NumPy to make an array of; holds whoever keeps the memory. Nothing looks at them."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
        }


def tensor_at(driver: Any, device: int, holder: Bytes | NDArray[np.uint8]) -> Tensor:
    """Return a tensor of bytes over memory that need not be mapped yet; it keeps `holder` alive.

    Its storage is just these bytes: torch copies storages where it saves or pickles a tensor.

    Not by the array interface, which asks the driver about the address: DLPack says what it is.
    """
    array = np.asarray(holder)
    if driver.name != "cuda":
        return torch.from_numpy(array)
    return torch.from_dlpack(dlpack.export(array, (dlpack.CUDA, device), None))


def shaped(raw: Tensor, dtype: Any, shape: Sequence[int]) -> Tensor:
    """Return bytes as elements of a type in a contiguous shape."""
    return raw.view(dtype).view(tuple(shape))


def type_of(dtype: Any) -> Any:
    """Return a type of torch's for whatever torch takes for one, None and `float` among it, and for its name."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if isinstance(named, torch.dtype):
        return named
    try:
        return torch.empty(0, dtype=dtype, device="meta").dtype
    except TypeError:
        raise TypeError(
            f"a tensor of dtype {dtype!r}: torch takes types of its own, and Python's int, float and bool. "
            'Pass one as torch.float32 is, or its name, "float32"'
        ) from None


def has_memory(tensor: Tensor) -> bool:
    """Tell whether a tensor is one span of memory; sparse, nested and lazy ones are not."""
    return not torch.nn.parameter.is_lazy(tensor) and tensor.layout is torch.strided and not tensor.is_nested


def is_empty(tensor: Any) -> bool:
    """Tell whether something is a tensor of no elements, which may lie nowhere."""
    return isinstance(tensor, torch.Tensor) and has_memory(tensor) and not tensor.numel()


def check_tensor(tensor: Any, asked: str) -> None:
    """Raise `TypeError` for what is no tensor, or one that is no span of memory."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{asked} of {type(tensor)}: only tensors and ElasticTensors lie in memory of remap")
    if not has_memory(tensor):
        raise TypeError(
            f"{asked} of a {type(tensor).__name__} of layout {tensor.layout}: it is not one span of memory. "
            "Name the tensors that it is made of: values(), say"
        )


def whole_number(value: Any, what: str) -> int:
    """Return an integer of any kind as Python's own; raises `TypeError` for all else, text and bool among it."""
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} {value!r}: it is a whole number") from None


def extents_of(shape: Sequence[Any]) -> tuple[int, ...]:
    """Return what `empty(2, 3)` or `empty((2, 3))` was given, as a shape; raises `TypeError` for what is none."""
    first: Any = shape[0] if len(shape) == 1 else None
    whole = hasattr(first, "__iter__") and not isinstance(first, str | bytes)
    return tuple(whole_number(one, "extent") for one in (first if whole else shape))


def size_of(dtype: Any, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor; raises `InvalidValueError` for a negative extent, and `SizeOverflowError`."""
    if any(extent < 0 for extent in shape):
        raise InvalidValueError(f"shape {tuple(shape)}", rule="an extent is 0 or more")
    return check_extent(tuple(shape), dtype.itemsize)


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte in memory, and how many bytes it spans from there.

    Strides are positive or 0 in torch, so the first element is the lowest.
    """
    if not tensor.numel():
        return tensor.untyped_storage().data_ptr(), 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
    return start, (last + 1) * tensor.element_size()


def device_of(tensor: Tensor) -> int | None:
    """Return the number of a tensor's CUDA device, None for the CPU, where the host driver's devices are."""
    return tensor.device.index if tensor.device.type == "cuda" else None


def device_number(one: Any) -> int:
    """Return the number of a device: remap's, torch's, a number, or a name such as "cuda:1".

    None, and a name without a number, is the device that is current for torch where CUDA is the driver, and remap's
    default elsewhere. Raises `InvalidValueError` for a name of what the driver's memory is not ("meta", say).
    """
    on_cuda = drivers.current().name == "cuda"
    if isinstance(one, str | torch.device):
        named = torch.device(one)
        if named.type not in (("cuda",) if on_cuda else ("cuda", "cpu")):
            raise InvalidValueError(
                f"memory of remap on torch's device {str(named)!r}",
                rule="the driver in use is CUDA"
                if on_cuda
                else "the driver in use simulates devices for CPU torch",
                next_step="Name a device by its number, or leave it out",
            )
        one = named.index
    if one is None and on_cuda:
        return int(torch.cuda.current_device())
    return device(one).index
