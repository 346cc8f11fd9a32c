"""`remap.torch`: tensors in memory that sleeps, wakes, grows in place and is shared, under pointers that stay.

    with remap.torch.pool("weights"):            # torch's allocations of this thread, by tag
        model = Model().cuda()
    remap.torch.sleep({"weights": "host"})       # memory given back, contents kept; addresses stay
    remap.torch.wake("weights", wait=30)

No compiler and no LD_PRELOAD: torch asks two natively compiled callbacks (`native`) for its segments, through
`torch.cuda.MemPool`. What torch does not route there: allocations of threads that did not enter the pool, autograd's
own among them (enter it in a hook, or switch its threads off with `torch.autograd.set_multithreading_enabled`), memory
of libraries that allocate by themselves (cuBLAS workspaces come through torch, NCCL buffers do not), and devices that
had no context yet (name them in `devices=`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from remap import dlpack, drivers
from remap.errors import AccessError, InvalidValueError
from remap.exports import Export
from remap.integrations.adopted import AdoptedBuffer
from remap.integrations.blocks import innermost
from remap.integrations.elastic_tensor import ElasticTensor
from remap.integrations.lookup import buffer_at
from remap.integrations.memory import memory
from remap.integrations.options import PoolOptions, Release, options_from
from remap.integrations.pools import Pool, outside, pool_of, pools
from remap.integrations.sleeping import (
    Arriving,
    PoolStatus,
    backup,
    buffer_of,
    registered,
    sleep,
    status,
    wake,
)
from remap.integrations.tensors import (
    Bytes,
    Tensor,
    device_number,
    device_of,
    extents_of,
    has_memory,
    is_empty,
    size_of,
    span_of,
    tensor_at,
    type_of,
)
from remap.integrations.tensors import torch as _torch
from remap.locations import DeviceLike, LocationLike, RightLike
from remap.locations import device as _device
from remap.sharing.export import export as _export
from remap.sharing.exported import Exported
from remap.sharing.importing import open as _open
from remap.sizes import Size, parse_size
from remap.spans import Span
from remap.types import Access, HandleType

__all__ = [
    "Arriving",
    "ElasticTensor",
    "ExportedTensor",
    "Pool",
    "PoolStatus",
    "backup",
    "buffer_of",
    "empty",
    "empty_like",
    "export",
    "graph",
    "move_in",
    "open",
    "outside",
    "pool",
    "pools",
    "registered",
    "set_margin",
    "sleep",
    "status",
    "tensor",
    "wake",
]


def pool(
    tag: str,
    *,
    devices: Sequence[int] | None = None,
    shareable: HandleType | str | Sequence[HandleType | str] | None = None,
    rdma: bool = False,
    chunks: int = 1,
    release: Release = "pool",
    accessing: Sequence[int] = (),
) -> AbstractContextManager[Pool]:
    """Route this thread's allocations into the pool of a tag, for a block: `with remap.torch.pool("weights"):`.

    Blocks nest, and threads may be in pools at the same time, the same one included. They end in the order in which
    they began: one that is not the innermost of its thread raises `InUseError` when it ends. `devices` are those to
    route on, by default all on which this process has a context. Tensors outlive the block. Memory that holds no
    tensor any more stays for the next block, until the pool sleeps or is trimmed; with `release="region"` it goes
    back with the block, and so does what torch caches elsewhere, as `torch.cuda.empty_cache()` has it.

    `shareable` and `rdma` make memory that other processes, NCCL, UCX and NIXL can register; fabric is left out of
    several kinds where its probe fails. A segment is `chunks` physical allocations: with 1, whoever looks its address
    up sees all of it. `accessing` are devices that may touch the memory beside its own, by default all peers on which
    this process has a context when the pool is made. The options belong to the tag from its first use on; with none
    named, the pool is taken as it is.

    Raises `PausedError` while the pool sleeps, `InvalidValueError` for other options than it was made with, and
    `NotSupportedError` where torch has no pools, before anything is allocated. Running out of memory inside is torch's
    `OutOfMemoryError`; inside of a block torch does not give back what it caches outside, so call
    `torch.cuda.empty_cache()` before it where memory is short.
    """
    options = options_from(shareable, rdma, chunks, release, accessing)
    return pool_of(tag, options, asked=options != PoolOptions()).entered(devices)


def graph(graph: Any, tag: str, **options: Any) -> AbstractContextManager[Pool]:
    """Capture a `torch.cuda.CUDAGraph` with its memory in the pool of a tag: `torch.cuda.graph` with its options."""
    return pool_of(tag, PoolOptions(), asked=False).graph(graph, **options)


def empty(*shape: int | Sequence[int], dtype: Any = None, device: DeviceLike | None = None) -> Tensor:
    """Return a new tensor in the pool that this thread is in: `Pool.empty`. Works with CPU torch, too.

    Inside of `outside` it is an ordinary one.
    """
    return _empty("empty", *shape, dtype=dtype, device=device)


def empty_like(other: Tensor) -> Tensor:
    """Return a new contiguous tensor like another one, in the pool that this thread is in."""
    return _empty("empty_like", tuple(other.shape), dtype=other.dtype, device=device_of(other))


def _empty(asked: str, *shape: int | Sequence[int], dtype: Any, device: DeviceLike | None) -> Tensor:
    found = innermost(asked)
    if found is not None:
        return found.empty(*shape, dtype=dtype, device=device)
    if drivers.current().name != "cuda":
        return _torch.empty(*shape, dtype=type_of(dtype))
    at = _torch.cuda.current_device() if device is None else device_number(device)
    return _torch.empty(*shape, dtype=type_of(dtype), device=_torch.device("cuda", at))


def move_in(module: Any) -> Any:
    """Move a module's parameters and buffers into the pool that this thread is in, and return the module.

    For modules that were made outside, and for CPU torch, which makes them outside in any case. It works as `module.to`
    does: parameters stay the objects they are, and gradients go along. What is on the CPU moves to the current GPU,
    where the driver is CUDA. Inside of `outside` it moves them out. Raises what `empty` raises.
    """
    if not isinstance(module, _torch.nn.Module):
        raise TypeError(
            f"move_in of {type(module)}: it takes a module. A tensor moves by empty_like(x).copy_(x)"
        )
    moved: dict[
        int, tuple[Tensor, Tensor]
    ] = {}  # by what it was, which must live for as long as its number counts

    def move(tensor: Tensor) -> Tensor:
        if not has_memory(tensor):
            return tensor
        if id(tensor) not in moved:
            strides = _torch.empty_like(
                tensor, device="meta"
            ).stride()  # dense, and in the order they were in
            made = _empty("move_in", tensor.numel(), dtype=tensor.dtype, device=device_of(tensor))
            with _torch.no_grad():
                moved[id(tensor)] = tensor, made.as_strided(tensor.shape, strides).copy_(tensor)
        return moved[id(tensor)][1]

    return module._apply(move)


def tensor(
    buffer: Span,
    dtype: Any = None,
    shape: int | Sequence[int] | None = None,
    *,
    offset: int = 0,
    access: Access | str = Access.READ_WRITE,
) -> Tensor:
    """Return memory of a buffer as a tensor, without a copy; `shape` defaults to as many elements as fit.

    It keeps the buffer alive, and the buffer refuses to close while it lives. A CPU tensor keeps it from sleeping, too,
    as the CPU would crash where a GPU array merely has to wait. torch has no read-only tensors: memory that may only be
    read needs `access="r"`, the promise that nobody writes to the tensor, which would end the process. Raises
    `AccessError` without it, and `ExportError` where torch cannot look there.
    """
    if not isinstance(buffer, Span):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"a tensor of {type(buffer)}: it shows memory of a buffer. For values there is torch.tensor"
        )
    kind = type_of(dtype)
    if shape is None:
        shape = (max(buffer.size - offset, 0) // kind.itemsize,)
    extents = extents_of((shape,))
    size = size_of(kind, extents)
    if offset % kind.itemsize:
        raise InvalidValueError(
            f"a tensor of {kind} at offset {offset}", rule=f"it is no multiple of {kind.itemsize}"
        )
    array = buffer.array("uint8", size, offset=offset)
    where, number = array.__dlpack_device__()
    at = None if where == dlpack.CPU else number
    if not size:
        return _torch.empty(extents, dtype=kind, device=_device_at(at))
    places = array._cpu_places() if at is None else [_device(at).location]
    if Access.parse(access).writable and not array._writable(places):
        raise AccessError(
            f"a tensor of {buffer.describe()}",
            rule="it may only be read, and torch has no read-only tensors: a write would end the process",
            next_step='Pass access="r", and never write to it, or open the memory with access="rw"',
        )
    return _torch.from_dlpack(array).view(kind).view(extents)


def _device_at(number: int | None) -> Any:
    return _torch.device("cpu") if number is None else _torch.device("cuda", number)


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor on its way to other processes: its memory, and how to read it. Travels through `multiprocessing`.

    A tensor of no elements has no memory.
    """

    memory: Exported | None
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def close(self) -> None:
        """End it, as `Exported.close` does."""
        if self.memory is not None:
            self.memory.close()


def export(tensor: Tensor, *, access: Access | str = Access.READ_WRITE, **options: Any) -> ExportedTensor:
    """Export a tensor of a shareable pool for other processes to `remap.torch.open`: type, shape and strides go along.

    From then on its segment refuses to sleep, since others would go on using the old memory; `sleep(detach=True)` lets
    them. Other options are those of `remap.export`. Raises `InvalidValueError` for views of an `ElasticTensor`, and for
    lazy conjugates and negatives, which are no memory.
    """
    if is_empty(tensor):
        return _exported(tensor, None)
    buffer = buffer_at(tensor, "the export")
    if not isinstance(buffer, AdoptedBuffer):
        raise InvalidValueError(
            "the export of rows of an ElasticTensor",
            rule="its memory has no handles for other processes",
            next_step='Copy them into a tensor of `with remap.torch.pool("tag", shareable="posix_fd"):`',
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidValueError(
            "the export of a lazy conjugate or negative",
            rule="the memory holds the values without that",
            next_step="Export what it is a view of, and take the view in the other process",
        )
    start, size = span_of(tensor)
    exported = _export(buffer, offset=start - buffer._address, size=size, access=access, **options)
    return _exported(tensor, exported)


def _exported(tensor: Tensor, memory: Exported | None) -> ExportedTensor:
    name = str(tensor.dtype).removeprefix("torch.")
    return ExportedTensor(memory, name, tuple(tensor.shape), tuple(tensor.stride()))


def open(
    exported: ExportedTensor,
    *,
    access: RightLike = Access.READ,
    accessing: LocationLike | Sequence[LocationLike] | None = None,
    **options: Any,
) -> Tensor:
    """Return a tensor of another process, in its own memory; it keeps that memory for as long as it lives.

    Reading is the default right; with "r", do not write: torch has no read-only tensors, and the device would fault.
    """
    kind = type_of(exported.dtype)
    if exported.memory is None:
        at = device_number(None) if drivers.current().name == "cuda" else None
        return _torch.empty_strided(exported.shape, exported.strides, dtype=kind, device=_device_at(at))
    buffer = _open(exported.memory, access=access, accessing=accessing, **options)
    buffer._warns = False  # the tensor is its owner
    raw = _from_any_rights(buffer)
    return raw.view(kind).as_strided(exported.shape, exported.strides)


def _from_any_rights(buffer: Any) -> Tensor:
    """Return a buffer's bytes as a tensor whatever the right: torch refuses what is read-only."""
    held = Export(buffer, 0, buffer.size, "a tensor", cpu=buffer._driver.name != "cuda")
    holder = Bytes(buffer._address, buffer.size, held)
    return tensor_at(buffer._driver, buffer.accessing[0].index if buffer.accessing else 0, holder)


def set_margin(size: Size) -> None:
    """Let allocations of pools fail that would leave less than `size` bytes of the device free; 0 ends that."""
    found = memory()
    found.table.set_margin(parse_size(size, "margin"))


def __dir__() -> list[str]:
    """Return what is public, for completion."""
    return [*__all__]
