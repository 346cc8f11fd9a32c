"""The kernels that tests of graphs launch: one that adds, and one that stays until it is released."""

from __future__ import annotations

import threading

import remap
from remap.kernels import Kernel, Pointer

SOURCE = """
extern "C" __global__ void add(unsigned char *data, long long count, long long by)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) data[i] += by;
}
extern "C" __global__ void hold(long long ticks)
{
    long long start = clock64();
    while (clock64() - start < ticks) { }
}
"""
HOLD_MS = 200  # how long a kernel holds on a GPU, where nothing can release it


class Kernels:
    """`add` adds to bytes; `hold` stays until `release` on the host driver, and a set time on a GPU."""

    def __init__(self, module: remap.Module) -> None:
        self.module = module
        self.add: Kernel = module.function("add")
        self.hold: Kernel = module.function("hold")
        self.gate = threading.Event()
        self.add.host(_add)
        self.hold.host(self._hold)
        self.ticks = HOLD_MS * module.device.properties.clock_khz

    def _hold(self, launch: object, ticks: int) -> None:
        del launch, ticks
        assert self.gate.wait(30), "nobody has released the kernel"

    def release(self) -> None:
        """Let kernels that hold go on, on the host driver."""
        self.gate.set()


def _add(launch: object, data: Pointer, count: int, by: int) -> None:
    del launch
    values = data.write("uint8", int(count))
    values += by
