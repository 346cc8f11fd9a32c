"""What remap costs over the raw driver calls, on CUDA: allocation, and a vector add over every kind of memory.

Run with `PYTHONPATH=src:. python benchmarks/foundation.py`. Expected before the first run: allocate + close at most
1.15 times the same raw calls for 2 MiB and 64 MiB; vector add on striped and chunked memory at least 0.99 of plain.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
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


class PlainMemory:
    """Memory of `cuMemAlloc`."""

    def __init__(self, size: int) -> None:
        self.address = int(check(cu.cuMemAlloc(size)))

    def close(self) -> None:
        """Give it back."""
        check(cu.cuMemFree(self.address))


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


class Shapes:
    """The kinds of memory to compare: each makes three ranges of `size` bytes and says how to give them back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.makers: dict[str, Callable[[], list[Any]]] = {
            "plain": lambda: [PlainMemory(size) for _ in range(3)],
            "raw, one chunk": lambda: [RawMemory([(0, size)], [0]) for _ in range(3)],
            "one chunk": lambda: [remap.allocate(size) for _ in range(3)],
            "2 MiB chunks": lambda: [self._grown(2 * MiB) for _ in range(3)],
            "64 MiB chunks": lambda: [self._grown(64 * MiB) for _ in range(3)],
        }
        if len(remap.devices()) > 1:
            stripes = [(0, size // 2), (1, size // 2)]
            self.makers["raw, resident 0 and 1"] = lambda: [RawMemory(stripes, [0]) for _ in range(3)]
            self.makers["resident 0 and 1"] = lambda: [
                remap.allocate(size, resident=[0, 1], accessing=[0]) for _ in range(3)
            ]

    def _grown(self, chunk: int) -> Any:
        buffer = remap.ElasticBuffer(capacity=self.size, device=0, chunk=chunk)
        buffer.resize(self.size)
        return buffer


def vector_add() -> dict[str, Any]:
    """Compare the bandwidth over remap's memory of several shapes with plain memory, or with the same raw calls.

    The shapes take turns for nine rounds, with new memory in each: what the GPU's clock and the places in its memory
    do hits all alike. Medians of the rounds' medians, and the least and the most of them.
    """
    add, shapes = VectorAdd(), Shapes(1 * GiB)
    size = shapes.size
    data = np.random.default_rng(0).random(size // 4, dtype=np.float32)
    source = PlainMemory(size)
    check(cu.cuMemcpyHtoD(source.address, data.ctypes.data, size))
    rates: dict[str, list[float]] = {name: [] for name in shapes.makers}
    for _ in range(9):
        for name, make in shapes.makers.items():
            held = make()
            for one in held[:2]:
                check(cu.cuMemcpyDtoD(one.address, source.address, size))
            a, b, c = (one.address for one in held)
            rates[name].append(add.bandwidth(a, b, c, size // 4))
            for one in held:
                one.close()
    source.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    figures: dict[str, Any] = {f"{name}, GB/s": value for name, value in medians.items()}
    figures["least and most, GB/s"] = {name: [min(values), max(values)] for name, values in rates.items()}
    figures["ratios to plain"] = {
        f"{name}, GB/s": value / medians["plain"] for name, value in medians.items() if "chunk" in name
    }
    figures["ratio to raw, one chunk"] = medians["one chunk"] / medians["raw, one chunk"]
    if "resident 0 and 1" in medians:
        figures["ratio to raw, two devices"] = medians["resident 0 and 1"] / medians["raw, resident 0 and 1"]
    return figures


if __name__ == "__main__":
    remap.use("cuda")
    with remap.device(0).current():
        write("foundation", {"allocate and close": allocation_cost(), "vector add": vector_add()})
