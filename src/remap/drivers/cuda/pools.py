"""The driver's calls on stream-ordered memory, from each device's own pool."""

from __future__ import annotations

from typing import Any

from remap.drivers.cuda.bindings import cuda, failure
from remap.drivers.powers import PoolFigures
from remap.errors import CudaResult
from remap.sizes import format_size

# Numbers of `CUmemPool_attribute` from cuda.h, since the enum cannot be had before the bindings are there.
_RELEASE_THRESHOLD, _RESERVED, _RESERVED_HIGH, _USED, _USED_HIGH = 4, 5, 6, 7, 8


class PoolCalls:
    """`SupportsPools` of the CUDA driver; it keeps no state."""

    def pool_allocate(self, size: int, stream: int) -> int:
        err, address = cuda.cuMemAllocAsync(size, stream)
        if err:
            rule = "the size must not be 0" if size == 0 and err == CudaResult.INVALID_VALUE else ""
            asked = f"allocate {format_size(size)} from a pool in stream order"
            raise failure("cuMemAllocAsync", err, asked=asked, rule=rule)
        return int(address)

    def pool_free(self, address: int, stream: int) -> None:
        (err,) = cuda.cuMemFreeAsync(address, stream)
        if err:
            rule = "no live allocation of a pool begins there" if err == CudaResult.INVALID_VALUE else ""
            raise failure("cuMemFreeAsync", err, asked=f"free the pool memory at {address:#x}", rule=rule)

    def pool_figures(self, device: int) -> PoolFigures:
        pool = _pool(device)
        return PoolFigures(
            used=_get(pool, _USED),
            used_high=_get(pool, _USED_HIGH),
            reserved=_get(pool, _RESERVED),
            reserved_high=_get(pool, _RESERVED_HIGH),
        )

    def pool_reset_high(self, device: int) -> None:
        pool = _pool(device)
        # Writing 0 sets a mark to the present figure, and is the only value that may be written.
        _set(pool, _USED_HIGH, 0)
        _set(pool, _RESERVED_HIGH, 0)

    def pool_trim(self, device: int, keep: int) -> None:
        (err,) = cuda.cuMemPoolTrimTo(_pool(device), keep)
        if err:
            raise failure("cuMemPoolTrimTo", err, asked=f"trim the pool of device {device}")

    def pool_retain(self, device: int, size: int) -> None:
        _set(_pool(device), _RELEASE_THRESHOLD, size)


def _pool(device: int) -> Any:
    # The current pool, not the default one: it is what cuMemAllocAsync takes from.
    err, pool = cuda.cuDeviceGetMemPool(device)
    if err:
        raise failure("cuDeviceGetMemPool", err, asked=f"the memory pool of device {device}")
    return pool


def _get(pool: Any, attribute: int) -> int:
    err, value = cuda.cuMemPoolGetAttribute(pool, cuda.CUmemPool_attribute(attribute))
    if err:
        raise failure("cuMemPoolGetAttribute", err, asked="the figures of a memory pool")
    return int(value)


def _set(pool: Any, attribute: int, value: int) -> None:
    (err,) = cuda.cuMemPoolSetAttribute(pool, cuda.CUmemPool_attribute(attribute), cuda.cuuint64_t(value))
    if err:
        raise failure("cuMemPoolSetAttribute", err, asked=f"set attribute {attribute} of a memory pool")
