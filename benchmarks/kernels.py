"""Kernels in Python: threads a second on the host driver; bandwidth and launch overhead on CUDA.

Run with `PYTHONPATH=src:. python benchmarks/kernels.py [host|cuda]`. Expected before the first run. Host driver:
at least 1.5 million threads a second for a vector add with all checks on, at least 0.5 million for a reduction of 256
threads with its barriers, and the vector add at least at 0.5 of NumPy's speed, also by processor time, which says more
where other programs run. H200: bandwidth of a vector add at least
0.97 of the same kernel in CUDA C++; a launch with two arrays, in Python or in CUDA C++, at most 1.5 times `launch` of
cuda.core with the same four values.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import remap
from benchmarks.record import interleaved_us, write


@remap.kernel
def add(a: remap.Slice, b: remap.Slice, out: remap.DisjointSlice) -> None:
    """Add two vectors."""
    i = remap.index_1d()
    out[i] = a[i] + b[i]


@remap.kernel
def gather(a: remap.Slice, where: remap.Slice, out: remap.DisjointSlice) -> None:
    """Read where another array says, so that no index is known before and every one is checked."""
    i = remap.index_1d()
    if i < len(out):
        out[i] = a[where[i]] * 2


@remap.kernel
def reduction(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Sum up 256 elements a block."""
    part = remap.shared_array(256, np.float32)
    t = remap.thread.x
    part[t] = x[remap.index_1d()]
    remap.barrier()
    half = 128
    while half > 0:
        if t < half:
            part[t] += part[t + half]
        remap.barrier()
        half //= 2
    if t == 0:
        remap.unchecked(out)[remap.block.x] = part[0]


@remap.kernel
def nothing(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Do as little as a kernel of two arrays can."""
    i = remap.index_1d()
    out[i] = x[i]


SOURCE = """
extern "C" __global__ void add(const float *a, const float *b, float *c, long long n)
{ long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; if (i < n) c[i] = a[i] + b[i]; }
extern "C" __global__ void nothing(const float *a, long long n, float *b, long long m)
{ long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; if (i < n && i < m) b[i] = a[i]; }
"""


def median_s(call: Callable[[], object], repeats: int = 15) -> float:
    """Return the median time of a call in seconds, after two to warm up."""
    times: list[float] = []
    for turn in range(repeats + 2):
        start = time.perf_counter()
        call()
        if turn > 1:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def in_turn(ways: dict[str, Callable[[], object]], clock: Callable[[], float]) -> dict[str, float]:
    """Return the median time of each way by a clock, the ways taking turns so that drift hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(50):
        for name, way in ways.items():
            start = clock()
            way()
            times[name].append(clock() - start)
    return {name: statistics.median(values[5:]) for name, values in times.items()}


def on_host() -> dict[str, Any]:
    """Measure threads a second, launch and wait included."""
    count = 1 << 22
    random = np.random.default_rng(0)
    a, b = random.random(count, dtype=np.float32), random.random(count, dtype=np.float32)
    where = random.integers(0, count, count, dtype=np.int32)
    out = np.empty_like(a)
    at = remap.device()
    with (
        remap.DeviceBuffer.from_host(a) as x,
        remap.DeviceBuffer.from_host(b) as y,
        remap.DeviceBuffer.from_host(where) as w,
        remap.DeviceBuffer.zeroed(count) as z,
        remap.DeviceBuffer.zeroed(count // 256) as sums,
    ):

        def run(kernel: remap.PythonKernel, *arguments: Any) -> float:
            def once() -> None:
                kernel.launch(*arguments, grid=count // 256, block=256)
                at.synchronize()

            return median_s(once)

        adding = run(add, x, y, z)
        assert np.array_equal(z.to_host(), a + b)

        def once() -> None:
            add.launch(x, y, z, grid=count // 256, block=256)
            at.synchronize()

        ways = {"remap": once, "NumPy": lambda: np.add(a, b, out=out)}
        walls, busy = in_turn(ways, time.perf_counter), in_turn(ways, time.process_time)
        return {
            "vector add, million threads/s": count / adding / 1e6,
            "vector add by NumPy, million elements/s": count / walls["NumPy"] / 1e6,
            "ratio to NumPy": walls["NumPy"] / walls["remap"],
            "ratio to NumPy, processor time": busy["NumPy"] / busy["remap"],
            "gather, million threads/s": count / run(gather, x, w, z) / 1e6,
            "reduction of 256, million threads/s": count / run(reduction, x, sums) / 1e6,
        }


def bandwidth(launch: Callable[[remap.Stream], None], size: int, repeats: int = 30) -> float:
    """Return the median GB/s of launches that move `size` bytes each, timed by events."""
    times: list[float] = []
    with remap.Stream(0) as stream:
        for turn in range(repeats + 3):
            with stream.record(timing=True) as start:
                launch(stream)
                with stream.record(timing=True) as end:
                    end.synchronize()
                    if turn >= 3:
                        times.append(start.elapsed(end))
    return size / statistics.median(times) / 1e6


def on_cuda() -> dict[str, Any]:
    """Measure bandwidth against CUDA C++, and launches against cuda.core."""
    count = 1 << 28
    shape: dict[str, Any] = {"grid": count // 256, "block": 256}
    figures: dict[str, Any] = {}
    random = np.random.default_rng(0).random(count, dtype=np.float32)
    with (
        remap.load(remap.compile(SOURCE)) as module,
        remap.DeviceBuffer.from_host(random) as a,
        remap.DeviceBuffer.from_host(random[::-1].copy()) as b,
        remap.DeviceBuffer.zeroed(count) as c,
    ):
        plain = module.function("add")
        python = bandwidth(lambda stream: add.launch(a, b, c, **shape, stream=stream), 12 * count)
        cpp = bandwidth(lambda stream: plain.launch(a, b, c, count, **shape, stream=stream), 12 * count)
        python_again = bandwidth(lambda stream: add.launch(a, b, c, **shape, stream=stream), 12 * count)
        figures["vector add"] = {
            "Python, GB/s": max(python, python_again),
            "CUDA C++, GB/s": cpp,
            "ratio": max(python, python_again) / cpp,
        }
        figures["launch with two arrays, µs"] = launches(module)
    return figures


def launches(module: remap.Module) -> dict[str, Any]:
    """Time launches, the ways taking turns; the stream is emptied now and then, so that none waits for room."""
    from cuda.bindings import driver as cu
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    device = Device(0)
    device.set_current()
    theirs = device.create_stream()
    core = ObjectCode.from_cubin(module.image.data).get_kernel("nothing")
    config = LaunchConfig(grid=1, block=32)
    plain = module.function("nothing")
    with (
        remap.Stream(0) as stream,
        remap.DeviceBuffer.zeroed(32) as x,
        remap.DeviceBuffer.zeroed(32) as y,
    ):
        first, second = x.address, y.address
        one, other = np.uint64(first), np.uint64(second)
        length = np.int64(32)
        raw: Any = cu.cuLaunchKernel
        packed = plain._packer.pack((x, 32, y, 32))
        shape = (1, 1, 1, 32, 1, 1, 0)

        def empty() -> None:
            stream.synchronize()
            theirs.sync()

        ways: dict[str, Callable[[], object]] = {
            "cuLaunchKernel": lambda: raw(plain._function, *shape, stream.handle, packed.pointers, 0),
            "cuda.core": lambda: launch(theirs, config, core, one, length, other, length),
            "remap, Python kernel": lambda: nothing.launch(x, y, grid=1, block=32, stream=stream),
            "remap, CUDA C++": lambda: plain.launch(x, 32, y, 32, grid=1, block=32, stream=stream),
        }
        rounds: list[dict[str, float]] = []
        for _ in range(40):
            empty()
            rounds.append(interleaved_us(ways, 100))
        empty()
    times = {name: statistics.median(one[name] for one in rounds) for name in ways}
    return {
        **times,
        "ratio of Python kernels to cuda.core": times["remap, Python kernel"] / times["cuda.core"],
        "ratio of CUDA C++ kernels to cuda.core": times["remap, CUDA C++"] / times["cuda.core"],
    }


if __name__ == "__main__":
    driver = remap.use(sys.argv[1] if len(sys.argv) > 1 else "host")
    if driver.name == "cuda":
        with remap.device(0).current():
            write("kernels", on_cuda())
    else:
        write("kernels", on_host())
