"""The memory hierarchy: each level's size as the device tells it, and its latency by chasing pointers.

Run with `PYTHONPATH=src:. python benchmarks/hierarchy.py`; `python benchmarks/tables.py` then writes the figures into
docs/memory-hierarchy.md. One thread follows a random cycle of indices through an array that fits into the level, each
load waiting for the one before. Expected on an H200 before the first run, in cycles: shared memory about 30, L1 about
40, L2 200 to 300, device memory 500 to 900; pinned host memory and a peer's memory 1 to 2 µs. The host driver has no
such levels: there only sizes are written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import remap
from benchmarks.record import write
from remap import KiB, MiB

STEPS = 4096
STRIDE = 64  # bytes from one element of the cycle to the next, so that each is in a sector of its own

SOURCE = """
extern "C" __global__ void chase(const unsigned int *next, unsigned int *out, long long *clocks, int steps)
{
    unsigned int at = 0;
    for (int i = 0; i < steps; ++i) at = next[at];      // into the caches, as far as they reach
    long long start = clock64();
    for (int i = 0; i < steps; ++i) at = next[at];
    clocks[0] = clock64() - start;
    out[0] = at;
}

extern "C" __global__ void chase_global(const unsigned int *next, unsigned int *out, long long *clocks, int steps)
{
    unsigned int at = 0;
    for (int i = 0; i < steps; ++i) asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(next + at));
    long long start = clock64();
    for (int i = 0; i < steps; ++i) asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(next + at));
    clocks[0] = clock64() - start;
    out[0] = at;
}

extern "C" __global__ void chase_cold(const unsigned int *next, unsigned int *out, long long *clocks, int steps)
{
    unsigned int at = out[0];      // goes on where the last kernel ended: nothing is met twice
    long long start = clock64();
    for (int i = 0; i < steps; ++i) asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(next + at));
    clocks[0] = clock64() - start;
    out[0] = at;
}

extern "C" __global__ void chase_shared(const unsigned int *next, unsigned int *out, long long *clocks, int steps)
{
    __shared__ unsigned int mine[2048];
    for (int i = 0; i < 2048; ++i) mine[i] = next[i] % 2048;
    unsigned int at = 0;
    long long start = clock64();
    for (int i = 0; i < steps; ++i) at = mine[at];
    clocks[0] = clock64() - start;
    out[0] = at;
}

extern "C" __global__ void add_registers(const unsigned int *next, unsigned int *out, long long *clocks, int steps)
{
    unsigned int at = next[0];
    long long start = clock64();
    for (int i = 0; i < steps; ++i) asm volatile("mad.lo.u32 %0, %0, %0, 1;" : "+r"(at));
    clocks[0] = clock64() - start;
    out[0] = at;
}
"""

LEVELS = (
    # name, function, bytes that are walked through, where they lie
    ("registers", "add_registers", 4 * KiB, "device"),
    ("shared memory", "chase_shared", 8 * KiB, "device"),
    ("L1 cache", "chase", 16 * KiB, "device"),
    ("L2 cache", "chase_global", 4 * MiB, "device"),
    ("device memory", "chase_cold", 512 * MiB, "device"),
    ("a peer's memory", "chase_cold", 512 * MiB, "peer"),
    ("pinned host memory", "chase_cold", 64 * MiB, "host"),
)


def cycle(size: int, stride: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return an array of `size` bytes in which following the indices visits every `stride` bytes once, at random."""
    step = stride // 4
    order = np.random.default_rng(0).permutation(size // stride).astype(np.uint32) * step
    order = np.roll(order, -int(np.flatnonzero(order == 0)[0]))  # it begins at 0
    found = np.zeros(size // 4, np.uint32)
    found[order] = np.roll(order, -1)
    return found


def clock_khz() -> int:
    """Return the clock of the device in kHz, in which latencies in cycles become nanoseconds."""
    return remap.device(0).properties.clock_khz


def latency(module: remap.Module, function: str, size: int, where: str) -> float:
    """Return the cycles of one step: the median of nine kernels."""
    stride = 4 if function == "chase_shared" else STRIDE
    array = cycle(size, stride)
    if where == "host":
        memory: Any = remap.pinned(array.size, "uint32")
        memory.copy_from_host(array)
    elif where == "peer":
        peer = remap.device(0).peers()[0]
        buffer = remap.allocate(size, resident=peer, accessing=[0, peer.index])
        buffer.copy_from_host(array)
        memory = buffer
    else:
        memory = remap.DeviceBuffer.from_host(array, device=0)
    steps = STEPS if function != "add_registers" else 1 << 16
    with (
        remap.DeviceBuffer.zeroed(1, "int64", device=0) as clocks,
        remap.DeviceBuffer.zeroed(1, "uint32", device=0) as out,
    ):
        kernel = module.function(function)
        found: list[float] = []
        for turn in range(10):
            kernel.launch(memory, out, clocks, np.int32(steps), grid=1, block=1)
            if turn:
                found.append(int(clocks.to_host()[0]) / steps)
    memory.close()
    return round(float(np.median(found)), 1)


def sizes() -> dict[str, int]:
    """Return the bytes of each level, as the device tells them."""
    properties = remap.device(0).properties
    found = {
        "registers": 0,
        "shared memory": properties.shared_memory_per_block_optin,
        "L1 cache": 0,
        "L2 cache": properties.l2_cache,
        "device memory": properties.memory,
        "a peer's memory": properties.memory if remap.device(0).peers() else 0,
        "pinned host memory": 0,
    }
    if remap.driver().name == "cuda":
        from cuda.bindings import driver as cu

        names = cu.CUdevice_attribute
        for level, name in (
            ("registers", names.CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR),
            ("L1 cache", names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
        ):
            err, value = cu.cuDeviceGetAttribute(name, 0)
            if not int(err):
                found[level] = int(value) * (4 if level == "registers" else 1)
    return found


def main() -> None:
    """Measure what can be measured here, and write it."""
    cycles: dict[str, float] = {}
    if remap.driver().name == "cuda":
        with remap.load(remap.compile(SOURCE), device=0) as module:
            for name, function, size, where in LEVELS:
                if where != "peer" or remap.device(0).peers():
                    cycles[name] = latency(module, function, size, where)
    nanoseconds = {name: round(value * 1e6 / clock_khz(), 1) for name, value in cycles.items()}
    write("hierarchy", {"bytes": sizes(), "cycles": cycles, "ns": nanoseconds, "clock_khz": clock_khz()})


if __name__ == "__main__":
    main()
