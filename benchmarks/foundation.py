"""What remap costs over the raw driver calls, on CUDA: allocation, and a vector add over every kind of memory.

Run with `PYTHONPATH=src:. python benchmarks/foundation.py`. Expected before the first run: allocate + close at most
1.15 times the same raw calls for 2 MiB and 64 MiB; vector add on striped and chunked memory at least 0.99 of plain.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

import remap
from benchmarks.record import interleaved_us, write
from remap import GiB, MiB


def check(result: tuple[Any, ...]) -> Any:
    """Return what a raw call gave; raise for an error."""
    if int(result[0]):
        raise RuntimeError(result[0].name)
    return result[1] if len(result) == 2 else result[1:]


def raw_properties(device: int) -> Any:
    """Return the properties of plain device memory, as cuda-bindings takes them."""
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    return properties


def raw_access(device: int) -> Any:
    """Return read-write access for a device, as cuda-bindings takes it."""
    access = cu.CUmemAccessDesc()
    access.location = raw_properties(device).location
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


class RawMemory:
    """Memory mapped by raw calls: `chunks` are (device, size), `accessing` devices."""

    def __init__(self, chunks: list[tuple[int, int]], accessing: list[int]) -> None:
        self.size = sum(size for _, size in chunks)
        self.address = int(check(cu.cuMemAddressReserve(self.size, 0, 0, 0)))
        at = self.address
        for device, size in chunks:
            handle = check(cu.cuMemCreate(size, raw_properties(device), 0))
            check(cu.cuMemMap(at, size, 0, handle, 0))
            check(cu.cuMemRelease(handle))
            at += size
        check(
            cu.cuMemSetAccess(self.address, self.size, [raw_access(one) for one in accessing], len(accessing))
        )

    def close(self) -> None:
        """Unmap and free."""
        check(cu.cuMemUnmap(self.address, self.size))
        check(cu.cuMemAddressFree(self.address, self.size))


def allocation_cost() -> dict[str, Any]:
    """Time allocate + close against the same seven raw calls, taking turns."""
    properties, access = raw_properties(0), [raw_access(0)]

    def raw(size: int) -> None:
        address = check(cu.cuMemAddressReserve(size, 0, 0, 0))
        handle = check(cu.cuMemCreate(size, properties, 0))
        check(cu.cuMemMap(address, size, 0, handle, 0))
        check(cu.cuMemRelease(handle))
        check(cu.cuMemSetAccess(address, size, access, 1))
        check(cu.cuMemUnmap(address, size))
        check(cu.cuMemAddressFree(address, size))

    def allocate_and_close(size: int) -> None:
        remap.allocate(size).close()

    figures: dict[str, Any] = {}
    for size in (2 * MiB, 64 * MiB):
        times = interleaved_us({"raw": partial(raw, size), "remap": partial(allocate_and_close, size)}, 1000)
        times["ratio"] = times["remap"] / times["raw"]
        figures[f"{size // MiB} MiB, µs"] = times
    return figures


class VectorAdd:
    """A vector add kernel, and its bandwidth over three ranges of memory."""

    SOURCE = """extern "C" __global__ void add(const float *a, const float *b, float *c, long n)
    { long i = (long)blockIdx.x * blockDim.x + threadIdx.x; if (i < n) c[i] = a[i] + b[i]; }"""

    def __init__(self) -> None:
        self.module = remap.load(remap.compile(self.SOURCE))
        self.kernel = self.module.function("add")
        self.stream = remap.Stream(0)

    def bandwidth(self, a: int, b: int, c: int, count: int, repeats: int = 30) -> float:
        """Return the median GB/s over `repeats` launches, timed by events, after three to warm up."""
        times: list[float] = []
        for turn in range(repeats + 3):
            with self.stream.record(timing=True) as start:
                self.kernel.launch(
                    np.uint64(a), np.uint64(b), np.uint64(c), np.int64(count),
                    grid=-(-count // 256), block=256, stream=self.stream,
                )  # fmt: skip
                with self.stream.record(timing=True) as end:
                    end.synchronize()
                    if turn >= 3:
                        times.append(start.elapsed(end))
        return 12 * count / statistics.median(times) / 1e6


def vector_add() -> dict[str, Any]:
    """Compare the bandwidth over remap's memory of several shapes with plain memory, or with the same raw calls."""
    add, size = VectorAdd(), 1 * GiB
    two = len(remap.devices()) > 1
    shapes: dict[str, Any] = {
        "plain": lambda: None,
        "one chunk": lambda: remap.allocate(size),
        "2 MiB chunks": lambda: remap.ElasticBuffer(capacity=size, device=0, chunk=2 * MiB),
        "64 MiB chunks": lambda: remap.ElasticBuffer(capacity=size, device=0, chunk=64 * MiB),
    }
    if two:
        shapes["raw, resident 0 and 1"] = lambda: RawMemory([(0, size // 2), (1, size // 2)], [0])
        shapes["resident 0 and 1"] = lambda: remap.allocate(size, resident=[0, 1], accessing=[0])
    figures: dict[str, Any] = {}
    data = np.random.default_rng(0).random(size // 4, dtype=np.float32)
    for name, make in shapes.items():
        if name == "plain":
            addresses = [int(check(cu.cuMemAlloc(size))) for _ in range(3)]
            held: list[Any] = []
        else:
            if "MiB chunks" in name and not hasattr(remap, "ElasticBuffer"):
                continue
            held = [make() for _ in range(3)]
            for buffer in held:
                if hasattr(buffer, "resize"):
                    buffer.resize(size)
            addresses = [buffer.address for buffer in held]
        for address in addresses[:2]:
            check(cu.cuMemcpyHtoD(address, data.ctypes.data, size))
        figures[f"{name}, GB/s"] = add.bandwidth(*addresses, size // 4)
        for buffer in held:
            buffer.close()
        if not held:
            for address in addresses:
                check(cu.cuMemFree(address))
    plain = figures["plain, GB/s"]
    figures["ratios to plain"] = {
        name: value / plain for name, value in figures.items() if "chunk" in name and name.endswith("GB/s")
    }
    if two:
        figures["ratio to raw, two devices"] = (
            figures["resident 0 and 1, GB/s"] / figures["raw, resident 0 and 1, GB/s"]
        )
    return figures


if __name__ == "__main__":
    remap.use("cuda")
    with remap.device(0).current():
        write("foundation", {"allocate and close": allocation_cost(), "vector add": vector_add()})
