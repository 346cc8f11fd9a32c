"""Graph memory that is empty before and after, streams, and the kernels that the tests launch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import remap
from remap.graphs import GraphPool
from remap.kernels import Kernel, Pointer
from remap.testing.stage import Stage

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
HOLD_MS = 100  # how long a kernel holds on a GPU, where nothing can release it


@pytest.fixture
def pool(stage: Stage) -> Iterator[GraphPool]:
    """Give the graph memory of device 0, which nothing is in, and where the test must leave nothing."""
    del stage  # it looks at what is left after this fixture
    found = remap.graph_memory(0)
    found.trim()
    found.reset_high()
    assert found.footprint() == remap.graphs.GraphFigures(0, 0, 0, 0)
    yield found
    remap.device(0).synchronize()
    remap.collect()
    found.trim()
    figures = found.footprint()
    assert (figures.used, figures.reserved) == (0, 0), "the test has left graph memory behind"


@pytest.fixture
def streams(pool: GraphPool) -> Iterator[Callable[[], remap.Stream]]:
    """Give what makes streams that are closed at the end."""
    del pool
    with ExitStack() as held:
        yield lambda: held.enter_context(remap.Stream(0))


@pytest.fixture
def stream(streams: Callable[[], remap.Stream]) -> remap.Stream:
    """Give one stream."""
    return streams()


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


@pytest.fixture
def kernels(pool: GraphPool) -> Iterator[Kernels]:
    """Give the kernels, loaded on device 0."""
    del pool
    with remap.load(remap.source(SOURCE), device=0) as module:
        found = Kernels(module)
        yield found
        found.release()
        remap.device(0).synchronize()
