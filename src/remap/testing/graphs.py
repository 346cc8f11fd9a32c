"""The rules of graphs: T13 (addresses that survive), T15 (graph memory) and T16 (its addresses).

The graphs allocate 64 MiB each, the size for which the figures are known, and as many of them run as the device has
room for, up to eight.
"""

# ruff: noqa: N802 (a test carries the number of its rule)

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from remap.drivers.graph_powers import (
    CaptureMode,
    GraphFigures,
    HighMark,
    SupportsCapture,
    SupportsGraphMemory,
    SupportsGraphs,
)
from remap.drivers.powers import SupportsPools
from remap.drivers.protocol import HostLaunch, SupportsModules
from remap.errors import CudaResult
from remap.sizes import MiB
from remap.testing.bench import RW, Bench, refused
from remap.testing.kernels import Arguments, KernelOpener, PtxKernel, _store_value
from remap.types import LaunchConfig, Touched

SIZE = 64 * MiB
MOST = 8
SPIN = 100_000_000  # nanoseconds that a kernel stays on a GPU, far longer than launching all graphs takes

_ONE_THREAD = LaunchConfig((1, 1, 1), (1, 1, 1))
_SPIN_PTX = """\
.version 6.4
.target sm_75
.address_size 64

.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [nanoseconds];
    mov.u64 %rd2, %globaltimer;
again:
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra again;
    ret;
}
"""


class Holder:
    """A kernel that stays: for a set time on a driver that runs compiled code, else until `release`."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._gate = threading.Event()
        self._module: int | None = None
        self._function: int | Callable[[HostLaunch], None] = self._hold
        if isinstance(driver, SupportsModules):
            self._module = driver.load_module(_SPIN_PTX.encode() + b"\0")
            self._function = driver.get_function(self._module, "spin")

    def add(self, graph: int, after: Sequence[int]) -> int:
        """Add a launch of it to a graph."""
        arguments = Arguments(ctypes.c_uint64(SPIN))
        node: int = self._driver.graph_add_kernel(graph, after, self._function, _ONE_THREAD, arguments, ())
        return node

    def release(self) -> None:
        """Let what holds go on; on a GPU it does so by itself."""
        self._gate.set()

    def close(self) -> None:
        """Give back what loading took."""
        self.release()
        if self._module is not None:
            self._driver.unload_module(self._module)

    def _hold(self, launch: HostLaunch) -> None:
        del launch
        assert self._gate.wait(30), "nobody has released the kernel"


class Built:
    """A graph that allocates `SIZE`, holds, and frees (or does not), with its executable."""

    def __init__(self, driver: Any, holder: Holder, *, frees: bool = True) -> None:
        self._driver = driver
        self.graph: int = driver.graph_create()
        node, self.address = driver.graph_add_allocate(self.graph, [], 0, SIZE)
        held = holder.add(self.graph, [node])
        if frees:
            driver.graph_add_free(self.graph, [held], self.address)
        self.executable: int = driver.graph_instantiate(self.graph)

    def launch(self, stream: int) -> None:
        """Queue a run."""
        self._driver.graph_launch(self.executable, stream)

    def close(self) -> None:
        """Destroy both."""
        self._driver.graph_exec_destroy(self.executable)
        self._driver.graph_destroy(self.graph)


class Field:
    """What a test of graph memory works with; the footprint is 0 before and after."""

    def __init__(self, bench: Bench) -> None:
        driver = _driver(bench)
        self.bench = bench
        self.driver = driver
        self.holder = Holder(driver)
        self._built: list[Built] = []
        self._streams: list[int] = []
        driver.graph_trim(0)
        assert self.figures().reserved == 0
        self.count = min(MOST, bench.free_memory() // SIZE - 1)
        assert self.count >= 2, "the device is too small for two graphs side by side"

    def figures(self) -> GraphFigures:
        """Return the driver's figures of device 0."""
        found: GraphFigures = self.driver.graph_figures(0)
        return found

    def used(self) -> int:
        """Return the bytes associated with graphs, which all the rules here find reserved, too."""
        figures = self.figures()
        assert figures.used == figures.reserved
        return figures.used

    def build(self, *, frees: bool = True) -> Built:
        """Build and instantiate one graph."""
        built = Built(self.driver, self.holder, frees=frees)
        self._built.append(built)
        return built

    def streams(self, count: int) -> list[int]:
        """Create streams that stand apart from each other."""
        made = [self.driver.create_stream() for _ in range(count)]
        self._streams += made
        return made

    def settle(self) -> None:
        """Let everything that was launched end."""
        self.holder.release()
        self.driver.synchronize_context()

    def close(self) -> None:
        """Destroy everything, and give all memory back."""
        self.settle()
        for built in self._built:
            built.close()
        for stream in self._streams:
            self.driver.destroy_stream(stream)
        self.driver.synchronize_context()
        self.holder.close()
        self.driver.graph_trim(0)
        assert self.figures().reserved == 0


class GraphRules:
    """One test or a few for each rule; part of `DriverConformance`, which gives the fixtures."""

    # -- T15: what graphs take --

    def test_T15_graphs_in_one_stream_share_memory(self, bench: Bench) -> None:
        """Nothing is taken before a launch, then one graph's worth whatever follows in the stream, until a trim."""
        with _field(bench) as field:
            graphs = [field.build() for _ in range(field.count)]
            assert field.used() == 0
            assert len({graph.address for graph in graphs}) == field.count
            (stream,) = field.streams(1)
            for graph in graphs:
                graph.launch(stream)
                assert field.used() == SIZE
            field.settle()
            assert field.used() == SIZE
            field.driver.graph_trim(0)
            assert field.used() == 0
            assert field.figures().used_high >= SIZE
            assert field.figures().reserved_high >= SIZE

    def test_T15_graphs_in_several_streams_do_not(self, bench: Bench) -> None:
        """Runs that may overlap have memory of their own, which stays until a trim; free memory falls by as much."""
        with _field(bench) as field:
            graphs = [field.build() for _ in range(field.count)]
            streams = field.streams(field.count)
            free = bench.free_memory()
            for number, (graph, stream) in enumerate(zip(graphs, streams, strict=True), 1):
                graph.launch(stream)
                assert field.used() == number * SIZE
            assert bench.free_memory() <= free - field.count * SIZE + bench.slack
            field.settle()
            assert field.used() == field.count * SIZE
            field.driver.graph_trim(0)
            assert field.used() == 0

    def test_T15_runs_ordered_by_an_event_may_share_memory(self, bench: Bench) -> None:
        """A stream that waits for an event after another graph's run may use that graph's memory.

        The host driver does; H200 was seen to take memory of its own for the second run.
        """
        with _field(bench) as field:
            graphs = [field.build() for _ in range(2)]
            first, second = field.streams(2)
            event = field.driver.create_event()
            graphs[0].launch(first)
            field.driver.record_event(event, first)
            field.driver.wait_event(second, event)
            graphs[1].launch(second)
            shared = field.driver.name == "host"
            assert field.used() in ({SIZE} if shared else {SIZE, 2 * SIZE})
            field.settle()
            field.driver.destroy_event(event)

    def test_T15_unfreed_allocations_hold_memory(self, bench: Bench) -> None:
        """What a graph does not free is held through trims; freed, it stays the graph's until a trim."""
        with _field(bench) as field:
            graphs = [field.build(frees=False) for _ in range(field.count)]
            (stream,) = field.streams(1)
            for number, graph in enumerate(graphs, 1):
                graph.launch(stream)
                assert field.used() == number * SIZE
            field.settle()
            field.driver.graph_trim(0)
            assert field.used() == field.count * SIZE
            with refused(CudaResult.INVALID_VALUE):
                graphs[0].launch(stream)
            for number, graph in enumerate(graphs):
                bench.fill(graph.address, number, SIZE)
            for number, graph in enumerate(graphs):
                assert bench.holds(graph.address, SIZE, number)
                field.driver.free(graph.address)
            assert field.used() == field.count * SIZE
            field.driver.graph_trim(0)
            assert field.used() == 0
            graphs[0].launch(stream)  # its allocation was freed, and the trim has left it instantiated
            assert field.used() == SIZE
            field.settle()
            field.driver.free(graphs[0].address)

    def test_T15_freed_in_stream_order(self, bench: Bench) -> None:
        """Memory freed in the order of a stream serves the next graph there, and the same graph again."""
        with _field(bench) as field:
            first, second = field.build(frees=False), field.build(frees=False)
            assert isinstance(field.driver, SupportsPools)
            (stream,) = field.streams(1)
            for graph in (first, second, first):
                graph.launch(stream)
                assert field.used() == SIZE
                field.driver.pool_free(graph.address, stream)
            field.settle()

    def test_T15_high_marks(self, bench: Bench) -> None:
        """Each high mark is set to 0 by itself, and to nothing else."""
        with _field(bench) as field:
            (stream,) = field.streams(1)
            field.build().launch(stream)
            field.settle()
            field.driver.graph_trim(0)
            for mark in HighMark:
                for value in (1, SIZE):
                    with refused(CudaResult.INVALID_VALUE):
                        field.driver.graph_set_high(0, mark, value)
            field.driver.graph_set_high(0, HighMark.USED, 0)
            assert field.figures().used_high == 0
            assert field.figures().reserved_high >= SIZE
            field.driver.graph_set_high(0, HighMark.RESERVED, 0)
            assert field.figures().reserved_high == 0

    # -- T16: addresses, and what is refused --

    def test_T16_a_later_allocation_takes_the_address(self, bench: Bench) -> None:
        """An allocation that comes after a free has the freed one's address; one that does not has another."""
        with _graph(bench) as (driver, graph):
            first, address = driver.graph_add_allocate(graph, [], 0, SIZE)
            _, apart = driver.graph_add_allocate(graph, [], 0, SIZE)
            free = driver.graph_add_free(graph, [first], address)
            _, beside = driver.graph_add_allocate(graph, [], 0, SIZE)
            _, again = driver.graph_add_allocate(graph, [free], 0, SIZE)
            assert again == address
            assert len({address, apart, beside}) == 3

    def test_T16_refused_frees(self, bench: Bench) -> None:
        """A free node for what is freed already, or for what no graph has allocated → INVALID_VALUE."""
        with _graph(bench) as (driver, graph):
            node, address = driver.graph_add_allocate(graph, [], 0, SIZE)
            free = driver.graph_add_free(graph, [node], address)
            with refused(CudaResult.INVALID_VALUE):
                driver.graph_add_free(graph, [free], address)
            plain = driver.allocate(SIZE // 8)
            for foreign in (plain, bench.region().address, address + 4096):
                with refused(CudaResult.INVALID_VALUE):
                    driver.graph_add_free(graph, [free], foreign)
            driver.free(plain)

    def test_T16_graphs_with_memory_are_not_copied(self, bench: Bench) -> None:
        """Cloning such a graph, or instantiating it while it has an executable → NOT_SUPPORTED."""
        with _graph(bench) as (driver, graph):
            node, address = driver.graph_add_allocate(graph, [], 0, SIZE)
            driver.graph_add_free(graph, [node], address)
            with refused(CudaResult.NOT_SUPPORTED):
                driver.graph_clone(graph)
            executable = driver.graph_instantiate(graph)
            with refused(CudaResult.NOT_SUPPORTED):
                driver.graph_instantiate(graph)
            driver.graph_exec_destroy(executable)
            driver.graph_exec_destroy(driver.graph_instantiate(graph))

    # -- T13: captures, and graphs over memory that is replaced --

    def test_T13_an_event_of_a_capture_is_part_of_the_graph(self, bench: Bench) -> None:
        """The host cannot wait for an event that was last recorded in a capture, also when that has ended."""
        if not isinstance(bench.driver, SupportsGraphs) or not isinstance(bench.driver, SupportsCapture):
            pytest.skip("the driver has no graphs")
        driver: Any = bench.driver
        stream, event = driver.create_stream(True), driver.create_event()
        driver.begin_capture(stream, CaptureMode.RELAXED)
        driver.record_event(event, stream)
        graph = driver.end_capture(stream)
        with refused(CudaResult.INVALID_VALUE):
            driver.synchronize_event(event)
        driver.record_event(event, stream)
        driver.synchronize_event(event)
        driver.graph_destroy(graph)
        driver.destroy_event(event)
        driver.destroy_stream(stream)

    @pytest.mark.parametrize("made", ["node by node", "by capture"])
    def test_T13_a_graph_survives_re_backing(self, bench: Bench, kernel: KernelOpener, made: str) -> None:
        """An instantiated graph goes on when the memory under its kernel's address is unmapped and made anew."""
        if not isinstance(bench.driver, SupportsGraphs) or not isinstance(bench.driver, SupportsCapture):
            pytest.skip("the driver has no graphs")
        driver: Any = bench.driver
        region = bench.region()
        bench.fill(region.address, 0, region.size)
        store = kernel(driver)
        stream = driver.create_stream()
        if made == "by capture":
            driver.begin_capture(stream, CaptureMode.RELAXED)
            store.store(region.address, 7, stream)
            graph = driver.end_capture(stream)
        else:
            graph = driver.graph_create()
            function = store._function if isinstance(store, PtxKernel) else _store_value
            arguments = Arguments(ctypes.c_uint64(region.address), ctypes.c_uint32(7))
            touched = [Touched(region.address, 4)]
            driver.graph_add_kernel(graph, [], function, _ONE_THREAD, arguments, touched)
        executable = driver.graph_instantiate(graph)
        for _ in range(3):
            driver.graph_launch(executable, stream)
            driver.synchronize_stream(stream)
            assert bench.read(region.address, 4).tolist() == [7, 0, 0, 0]
            driver.unmap(region.address, region.size)
            driver.map(region.address, region.size, bench.create())
            bench.grant(region.address, region.size, RW)
            bench.fill(region.address, 0, region.size)
        driver.graph_exec_destroy(executable)
        driver.graph_destroy(graph)
        driver.destroy_stream(stream)
        driver.synchronize_context()
        store.close()


@contextmanager
def _field(bench: Bench) -> Generator[Field]:
    field = Field(bench)
    try:
        yield field
    finally:
        field.close()


@contextmanager
def _graph(bench: Bench) -> Generator[tuple[Any, int]]:
    driver = _driver(bench)
    graph = driver.graph_create()
    try:
        yield driver, graph
    finally:
        driver.graph_destroy(graph)
        driver.graph_trim(0)


def _driver(bench: Bench) -> Any:
    if not isinstance(bench.driver, SupportsGraphMemory) or not isinstance(bench.driver, SupportsGraphs):
        pytest.skip("the driver has no graph memory")
    return bench.driver
