"""What only the host driver sees: uses of graph memory that no wait orders, and what its parts do at their limits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import remap
from remap.errors import CudaResult, DriverError, InUseError
from remap.graphs import GraphPool
from remap.sizes import GiB, MiB
from remap.testing.children import run_in_child
from remap.testing.graph_kernels import Kernels

pytest_plugins = ["remap.testing.stage"]
pytestmark = pytest.mark.skipif(
    os.environ.get("REMAP_DRIVER", "host") != "host", reason="hardware cannot tell"
)
SIZE = 4 * MiB


def test_uses_before_the_launch(pool: GraphPool, streams: Callable[[], remap.Stream]) -> None:
    """A copy in a stream that does not wait for the launch is refused, whether or not the launch is done by chance."""
    del pool
    driver: Any = remap.driver()
    one, two = streams(), streams()
    with remap.Graph(0) as graph:
        a = graph.alloc(SIZE)
        with graph.instantiate() as executable:
            executable.launch(one)
            with pytest.raises(DriverError, match="no launch that this work waits for"):
                a.memory.fill(1, stream=two)
            two.wait(one)
            a.memory.fill(1, stream=two)
            # The fill comes before no point of the first stream.
            with remap.device(0).current(), pytest.raises(InUseError, match="nothing has waited"):
                driver.pool_free(a.address, one.handle)
            a.memory.close()


def test_uses_after_the_free(pool: GraphPool, stream: remap.Stream, kernels: Kernels) -> None:
    """Work queued before a free in its stream may use the memory, work queued after it is refused."""
    del pool
    driver: Any = remap.driver()
    with remap.Graph(0) as graph:
        a = graph.alloc(SIZE)
        with graph.instantiate() as executable:
            executable.launch(stream)
            address = a.address
            kernels.add.launch(a.memory, SIZE, 1, grid=1, block=1, stream=stream)
            a.memory.free(stream)
            with remap.device(0).current():
                with pytest.raises(DriverError, match="was freed by"):
                    driver.fill(address, 1, 1, 16, stream.handle)
                calls: list[Callable[[], object]] = [
                    lambda: driver.free(address),
                    lambda: driver.pool_free(address, stream.handle),
                ]
                for call in calls:
                    with pytest.raises(DriverError) as caught:
                        call()
                    assert caught.value.code == CudaResult.INVALID_VALUE
            stream.synchronize()  # the kernel before the free has found its memory


def test_memory_within_a_run_is_nobody_elses(pool: GraphPool, stream: remap.Stream) -> None:
    """Memory that a graph frees itself cannot be used from outside, whether the graph runs or not."""
    del pool
    driver: Any = remap.driver()
    with remap.Graph(0) as graph:
        a = graph.alloc(SIZE)
        graph.free(a, after=[graph.fill(a, 1, after=[a])])
        with graph.instantiate() as executable, remap.device(0).current():
            for _ in range(2):
                with pytest.raises(DriverError, match="nothing is mapped"):
                    driver.fill(a.address, 1, 1, 16, stream.handle)
                executable.launch(stream)
                stream.synchronize()


def test_a_kernel_of_a_graph_that_strays() -> None:
    """A node that touches memory it was not given loses the context, as a kernel does (T10)."""
    run_in_child(stray)


def stray() -> None:
    """Launch a graph whose kernel writes past its allocation."""
    remap.use("host")
    with remap.load(remap.source('extern "C" __global__ void f(unsigned char *p) {}')) as module:
        kernel = module.function("f")

        @kernel.host
        def twin(launch: object, data: remap.Pointer) -> None:
            del launch
            data.write("uint8", 16, offset=SIZE)[:] = 1

        graph = remap.Graph(0)
        a = graph.alloc(SIZE)
        graph.free(a, after=[graph.launch(kernel, a, grid=1, block=1, after=[a])])
        stream = remap.Stream(0)
        graph.instantiate().launch(stream)
        with pytest.raises(remap.IllegalAddressError, match="kernel"):
            stream.synchronize()


def test_addresses_are_given_back(pool: GraphPool) -> None:
    """Graphs that were closed leave no address space taken, however many there were."""
    del pool
    driver: Any = remap.driver().inner.inner  # type: ignore[attr-defined]
    tables = driver._graph_memory._heaps, driver._graphs._graphs, driver._executables._executables
    before = [len(table) for table in tables]
    for _ in range(200):
        with remap.Graph(0) as graph:
            a = graph.alloc(64 * MiB)
            graph.free(a, after=[a])
            graph.instantiate().close()
    assert [len(table) for table in tables] == before


def test_closing_while_it_runs(pool: GraphPool, stream: remap.Stream, kernels: Kernels) -> None:
    """The driver's own destroy does not wait: the run ends on its memory, which is given up afterwards."""
    driver: Any = remap.driver()
    with remap.device(0).current():
        graph = driver.graph_create()
        node, address = driver.graph_add_allocate(graph, [], 0, SIZE)
        prepared = kernels.hold._prepare((1,), 1, 1, 0, remap.device(0))
        held = driver.graph_add_kernel(graph, [node], prepared.function, prepared.config, prepared.packed, [])
        filled = driver.graph_add_fill(graph, [held], address, 1, 1, SIZE)
        driver.graph_add_free(graph, [filled], address)
        executable = driver.graph_instantiate(graph)
        driver.graph_launch(executable, stream.handle)
        driver.graph_exec_destroy(executable)
        driver.graph_destroy(graph)
        pool.trim()
        assert pool.footprint().used == SIZE
        kernels.release()
        stream.synchronize()
        assert pool.footprint().used == 0
        assert pool.trim() == SIZE


def one_place(graph: remap.Graph, count: int) -> None:
    """Add allocations that all take the same address, one after the other."""
    after: list[Any] = []
    for _ in range(count // 4):
        a = graph.alloc(4096, after=after)
        filled = graph.fill(a, 1, after=[a])
        joined = graph.join(after=[filled])
        after = [graph.free(a, after=[joined, a])]


def own_places(graph: remap.Graph, count: int) -> None:
    """Add allocations that all live at once, each filled in the middle."""
    for _ in range(count // 2):
        a = graph.alloc(4096)
        graph.fill(a, 1, offset=1024, size=512, after=[a])


def side_by_side(graph: remap.Graph, count: int) -> None:
    """Add allocations that nothing orders, each with its use and its free."""
    for _ in range(count // 4):
        a = graph.alloc(4096)
        graph.free(a, after=[graph.join(after=[graph.fill(a, 1, after=[a])])])


@pytest.mark.alone
@pytest.mark.parametrize("fill", [one_place, own_places, side_by_side])
def test_cost_of_building(pool: GraphPool, fill: Callable[[remap.Graph, int], None]) -> None:
    """A graph of 10,000 nodes is built and instantiated in well under 2 s, at a cost a node that stays flat."""
    del pool
    import time

    def build(count: int) -> float:
        start = time.process_time()  # of this process alone, whatever else the machine does
        with remap.Graph(0) as graph:
            fill(graph, count)
            assert len(graph) == count
            graph.instantiate().close()
            return (time.process_time() - start) / count

    small = min(build(1000) for _ in range(3))
    large = min(build(10_000) for _ in range(2))
    assert large * 10_000 < 2.0
    # Quadratic growth would make it ten times; memory that is farther away makes it up to three, on a busy machine.
    assert large < 5 * small, f"{small * 1e6:.0f} µs a node for 1,000, {large * 1e6:.0f} µs for 10,000"


def test_address_space_is_no_memory(pool: GraphPool) -> None:
    """Graphs may together have many times more addresses than the device has memory; each launch takes its own."""
    graphs = [remap.Graph(0) for _ in range(32)]
    for graph in graphs:
        a = graph.alloc(128 * MiB)
        graph.free(a, after=[a])
    assert sum(graph.describe().size for graph in graphs) == 4 * GiB
    executables = [graph.instantiate() for graph in graphs]
    with remap.Stream(0) as stream:
        for executable in executables:
            executable.launch(stream)
        stream.synchronize()
        assert pool.footprint().used_high == 128 * MiB
    for one in (*executables, *graphs):
        one.close()
