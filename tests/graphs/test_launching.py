"""Launching: results, order, memory that is left and freed, and what is refused (C2, C6, C7; T15)."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

import remap
from remap.errors import ClosedError, InUseError, LaunchError, NotSupportedError, OutOfMemoryError
from remap.graphs import Allocation, GraphPool
from remap.sizes import MiB
from remap.testing.graph_kernels import Kernels
from remap.testing.stage import Stage

pytest_plugins = ["remap.testing.stage"]
SIZE = 64 * MiB
PART = 4 * MiB


def test_work_in_the_order_of_its_dependencies(
    pool: GraphPool, stream: remap.Stream, kernels: Kernels
) -> None:
    """Fill, kernel and copies run one after the other, as often as the graph is launched."""
    del pool
    values = np.arange(256, dtype=np.uint8)
    out = np.zeros(256, np.uint8)
    with remap.Graph(0) as graph:
        a = graph.alloc(PART)
        copied = graph.copy(a, values, after=[a])
        added = graph.launch(kernels.add, a, 256, 3, grid=1, block=256, after=[copied])
        done = graph.copy(out, a, size=256, after=[added])
        graph.free(a, after=[done])
        with graph.instantiate() as executable:
            executable.upload(stream)
            for turn in range(3):
                values[:] = np.arange(256) + turn  # read at each launch
                executable.launch(stream)
                stream.synchronize()
                assert (out == values + 3).all()


def test_edges_added_later_count(pool: GraphPool, stream: remap.Stream) -> None:
    """A node that was told afterwards to come after another does so."""
    del pool
    out = np.zeros(4, np.uint8)
    with remap.Graph(0) as graph, remap.allocate(PART) as buffer:
        read = graph.copy(out, buffer, size=4)
        written = graph.fill(buffer, 9)
        graph.order(written, read)
        assert read.after == (written,)
        with graph.instantiate() as executable:
            executable.launch(stream)
            stream.synchronize()
    assert out.tolist() == [9] * 4


def test_the_footprint_stays_flat(pool: GraphPool, stream: remap.Stream, kernels: Kernels) -> None:
    """1,000 launches of a graph that allocates hold no more than one does, and every figure is the driver's own."""
    driver: Any = remap.driver()
    with remap.Graph(0) as graph:
        a = graph.alloc(SIZE)
        graph.free(a, after=[graph.launch(kernels.add, a, 1, 1, grid=1, block=1, after=[a])])
        with graph.instantiate() as executable:
            assert pool.footprint().used == 0
            for _ in range(1000):
                executable.launch(stream)
                figures = pool.footprint()
                assert (figures.used, figures.reserved) == (SIZE, SIZE)
            stream.synchronize()
            assert driver.graph_figures(0) == pool.footprint()
            assert pool.trim() == SIZE
            assert pool.footprint() == remap.graphs.GraphFigures(0, SIZE, 0, SIZE)
            pool.reset_high()
            assert pool.footprint() == remap.graphs.GraphFigures(0, 0, 0, 0)


# -- memory that launches leave --


def _leaving(graph: remap.Graph, value: int = 5) -> Allocation:
    a = graph.alloc(PART)
    graph.fill(a, value, after=[a])
    return a


def test_unfreed_memory_is_a_buffer(pool: GraphPool, stream: remap.Stream, kernels: Kernels) -> None:
    """What a graph leaves allocated holds its bytes, is used like a buffer, and keeps the graph from running again."""
    with remap.Graph(0) as graph:
        a = _leaving(graph)
        with graph.instantiate() as executable:
            with pytest.raises(ClosedError, match="no launch has left it"):
                _ = a.memory
            executable.launch(stream)
            memory = a.memory
            assert (memory.size, memory.device) == (PART, remap.device(0))
            kernels.add.launch(memory, PART, 2, grid=PART // 256, block=256, stream=stream)
            stream.synchronize()
            pool.trim()
            assert (memory.to_host() == 7).all()
            with pytest.raises(InUseError, match="lives on from an earlier launch"):
                executable.launch(stream)
            memory.close()
            with pytest.raises(ClosedError):
                memory.to_host()
            executable.launch(stream)
            stream.synchronize()
            assert a.memory is not memory  # one object, one resource (invariant 1)
            assert (a.memory.to_host() == 5).all()
            a.memory.close()


def test_freed_in_stream_order(pool: GraphPool, stream: remap.Stream) -> None:
    """Memory freed in the order of a stream serves the next launch there, and the host does not wait."""
    with remap.Graph(0) as graph:
        a = _leaving(graph)
        with graph.instantiate() as executable:
            executable.launch(stream)
            used = pool.footprint().used
            for _ in range(20):
                a.memory.free(stream)
                executable.launch(stream)
                assert pool.footprint().used == used
            a.memory.free(stream)
            stream.synchronize()


def test_memory_that_a_launch_frees_ends_in_silence(pool: GraphPool, stream: remap.Stream) -> None:
    """Launched again on a bare handle, it drops the event behind the first run, which no user has seen (4)."""
    del pool
    with remap.Graph(0) as graph:
        a = graph.alloc(PART)
        with graph.instantiate(auto_free=True) as executable, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                executable.launch(stream.handle)
                stream.synchronize()
                gc.collect()
            assert not told
        a.memory.close()


def test_auto_free(pool: GraphPool, stream: remap.Stream) -> None:
    """With auto_free a launch frees what the one before left; the last one's is still to be freed."""
    with remap.Graph(0) as graph:
        a = _leaving(graph)
        with graph.instantiate(auto_free=True) as executable:
            executable.launch(stream)
            first, used = a.memory, pool.footprint().used
            for _ in range(5):
                executable.launch(stream)
                assert pool.footprint().used == used
            stream.synchronize()
            assert first.closed
            assert (a.memory.to_host() == 5).all()
            a.memory.close()


def test_freed_by_a_node_of_another_graph(pool: GraphPool, stream: remap.Stream) -> None:
    """A graph may free what another has left; its launch needs that to live, and ends it (C7)."""
    del pool
    out = np.zeros(PART, np.uint8)
    with remap.Graph(0) as first, remap.Graph(0) as second:
        a = _leaving(first, 6)
        copied = second.copy(out, a)
        second.free(a, after=[copied])
        with pytest.raises(ClosedError, match="another graph frees it"), remap.Graph(0) as third:
            third.free(a)
        with first.instantiate() as leaves, second.instantiate() as frees:
            with pytest.raises(ClosedError, match="no launch has left it"):
                frees.launch(stream)
            for _ in range(2):
                leaves.launch(stream)
                memory = a.memory
                frees.launch(stream)
                assert memory.closed
                stream.synchronize()
                assert (out == 6).all()
                out[:] = 0


# -- what is refused --


def test_closed_executable(pool: GraphPool, stream: remap.Stream) -> None:
    """A closed executable is not launched; closing again does nothing, and the graph can be instantiated anew."""
    del pool
    with remap.Graph(0) as graph:
        a = graph.alloc(PART)
        graph.free(a, after=[a])
        executable = graph.instantiate()
        executable.launch(stream)
        executable.close()
        executable.close()
        acts: list[Callable[[], object]] = [
            executable.launch,
            executable.upload,
            lambda: executable.update(graph),
        ]
        for act in acts:
            with pytest.raises(ClosedError):
                act()
        graph.instantiate().close()


def test_closing_waits_for_runs(pool: GraphPool, stream: remap.Stream, kernels: Kernels) -> None:
    """Closing an executable, or a buffer that it uses, waits for the run (invariant 7)."""
    del pool
    buffer = remap.allocate(PART)
    with remap.Graph(0) as graph:
        held = graph.launch(kernels.hold, kernels.ticks, grid=1, block=1)
        graph.fill(buffer, 1, after=[held])
        executable = graph.instantiate()
        executable.launch(stream)
        closed = threading.Event()

        def close() -> None:
            buffer.close()
            executable.close()
            closed.set()

        thread = threading.Thread(target=close)
        thread.start()
        if remap.driver().name == "host":
            assert not closed.wait(0.05)
        kernels.release()
        thread.join(30)
        assert closed.is_set()
        assert stream.done


def test_a_graph_bigger_than_memory(pool: GraphPool, stream: remap.Stream) -> None:
    """Too much memory is refused when it is known, at the latest by the launch, and nothing is left behind."""
    if remap.driver().name == "cuda":
        pytest.skip("it would fill the GPU; the host driver shows it")
    share = remap.device(0).memory().total // 3 // (2 * MiB) * 2 * MiB
    with remap.Graph(0) as graph, pytest.raises(OutOfMemoryError):
        allocations = [graph.alloc(share) for _ in range(4)]
        graph.join(after=allocations)
        with graph.instantiate() as executable:
            executable.launch(stream)
    pool.trim()
    assert (pool.footprint().used, pool.footprint().reserved) == (0, 0)


def test_failing_host_functions(pool: GraphPool, stream: remap.Stream) -> None:
    """What a host function raises ends nothing, and is raised by the next launch, which launches nothing."""
    del pool
    calls: list[int] = []

    def count(by: int) -> None:
        calls.append(by)
        if len(calls) == 1:
            raise ValueError("the first call fails")

    with remap.Graph(0) as graph:
        graph.host(count, 3)
        with graph.instantiate() as executable:
            executable.launch(stream)
            stream.synchronize()
            with pytest.raises(LaunchError, match="ValueError: the first call fails") as caught:
                executable.launch(stream)
            assert isinstance(caught.value.__cause__, ValueError)
            executable.launch(stream)
            stream.synchronize()
    assert calls == [3, 3]


def test_driver_failure_at_launch(stage: Stage, pool: GraphPool, stream: remap.Stream) -> None:
    """A launch that the driver refuses leaves memory, buffers and the executable as they were (invariant 5)."""
    del pool
    with remap.Graph(0) as graph, remap.allocate(PART) as buffer:
        a = _leaving(graph)
        graph.copy(buffer, a, after=list(graph.nodes))
        with graph.instantiate() as executable:
            stage.faulty.fail("graph_launch")
            with pytest.raises(remap.DriverError):
                executable.launch(stream)
            with pytest.raises(ClosedError):
                _ = a.memory
            executable.launch(stream)
            stream.synchronize()
            assert (buffer.to_host() == 5).all()
            a.memory.close()


# -- graphs within graphs --


def test_update(pool: GraphPool, stream: remap.Stream) -> None:
    """An executable takes over a graph of the same shape; another shape, or memory nodes, are refused."""
    del pool
    with (
        remap.Graph(0) as one,
        remap.Graph(0) as two,
        remap.Graph(0) as other,
        remap.allocate(PART) as buffer,
    ):
        one.fill(buffer, 1)
        two.fill(buffer, 2)
        other.fill(buffer, 3, after=[other.fill(buffer, 4)])
        with one.instantiate() as executable:
            executable.launch(stream)
            executable.update(two)
            executable.launch(stream)
            stream.synchronize()
            assert (buffer.to_host() == 2).all()
            with pytest.raises(remap.DriverError, match=r"same shape|other nodes"):
                executable.update(other)
            other.free(other.alloc(PART), after=other.nodes[-1:])
            with pytest.raises(NotSupportedError, match="memory nodes"):
                executable.update(other)
            executable.launch(stream)
            stream.synchronize()
            assert (buffer.to_host() == 2).all()


def test_children_and_clones(pool: GraphPool, stream: remap.Stream, kernels: Kernels) -> None:
    """A child is a copy of a graph as one node; a clone goes its own way; both keep what they use alive."""
    del pool
    buffer = remap.allocate(PART)
    with remap.Graph(0) as whole:
        with remap.Graph(0) as part:
            part.launch(kernels.add, buffer, 16, 2, grid=1, block=16)
            start = whole.fill(buffer, 1)
            child = whole.child(part, after=[start])
            whole.child(part, after=[child])
            part.launch(kernels.add, buffer, 16, 100, grid=1, block=16)  # too late for the children
        clone = whole.clone()
        whole.fill(buffer, 50, after=whole.nodes[-1:])
        assert [len(whole), len(clone)] == [4, 3]
        with clone.instantiate() as executable:
            executable.launch(stream)
            stream.synchronize()
            assert buffer.to_host(shape=16).tolist() == [5] * 16
        clone.close()
    buffer.close()


def test_removed_nodes(pool: GraphPool, stream: remap.Stream) -> None:
    """A node that was removed does not run, and its edges have gone with it."""
    del pool
    with remap.Graph(0) as graph, remap.allocate(PART) as buffer:
        first = graph.fill(buffer, 1)
        second = graph.fill(buffer, 2, after=[first])
        graph.remove(second)
        graph.order(graph.join(after=[]), first)
        assert len(graph) == 2
        with graph.instantiate() as executable:
            executable.launch(stream)
            stream.synchronize()
        assert (buffer.to_host() == 1).all()


CONDITIONS = """
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value);
extern "C" __global__ void count_down(unsigned long long handle, unsigned char *data)
{
    data[0] -= 1;
    cudaGraphSetConditional(handle, data[0] > 0);
}
"""


def test_conditions(pool: GraphPool, stream: remap.Stream) -> None:
    """A loop runs its body while a kernel says so, a branch if the condition holds; bodies refuse memory nodes."""
    del pool
    with (
        remap.load(remap.source(CONDITIONS)) as module,
        remap.Graph(0) as graph,
        remap.allocate(PART) as buffer,
    ):
        kernel = module.function("count_down")

        @kernel.host
        def count_down(launch: object, condition: remap.graphs.Condition, data: remap.Pointer) -> None:
            del launch
            left = data.write("uint8", 1)
            left -= 1
            condition.set(int(left[0] > 0))

        start = graph.fill(buffer, 7)
        going = graph.condition(1)
        loop = graph.loop(going, after=[start])
        assert loop.body is not None
        loop.body.launch(kernel, going, buffer, grid=1, block=1)
        never = graph.when(graph.condition(0), after=[loop])
        always = graph.when(graph.condition(1), after=[loop])
        assert never.body is not None
        assert always.body is not None
        never.body.fill(buffer, 99, offset=1)
        always.body.fill(buffer, 3, offset=2, size=1)
        body = always.body
        acts: list[Callable[[], object]] = [
            lambda: body.alloc(PART),
            lambda: body.host(print),
            lambda: body.free(cast("Any", always)),
        ]
        for act in acts:
            with pytest.raises(NotSupportedError, match="body of a conditional"):
                act()
        assert "repeats its body while" in str(graph)
        with graph.instantiate() as executable:
            for _ in range(2):
                executable.launch(stream)
                stream.synchronize()
                assert buffer.to_host(shape=4).tolist() == [0, 7, 3, 7]


def test_branches_run_side_by_side(pool: GraphPool, stream: remap.Stream) -> None:
    """Nodes that do not come after each other run at the same time where the driver can: on the host they must."""
    if remap.driver().name != "host":
        pytest.skip("on a GPU it depends on what else runs")
    del pool
    meet = threading.Barrier(4)
    after: list[str] = []
    with remap.Graph(0) as graph:
        branches = [graph.host(meet.wait, 30) for _ in range(4)]
        graph.host(after.append, "all", after=branches)
        with graph.instantiate() as executable:
            for _ in range(3):
                executable.launch(stream)
            stream.synchronize()
    assert after == ["all"] * 3


def test_runs_of_one_executable_follow_each_other(
    pool: GraphPool, streams: Callable[[], remap.Stream], kernels: Kernels
) -> None:
    """A second run of an executable waits for the first, in whatever stream it was launched, and takes no more."""
    one, two = streams(), streams()
    seen: list[str] = []
    with remap.Graph(0) as graph:
        a = graph.alloc(PART)
        begun = graph.host(seen.append, "begun", after=[a])
        held = graph.launch(kernels.hold, kernels.ticks, grid=1, block=1, after=[begun])
        graph.free(a, after=[graph.host(seen.append, "ended", after=[held])])
        with graph.instantiate() as executable:
            executable.launch(one)
            used = pool.footprint().used
            executable.launch(two)
            assert pool.footprint().used == used
            kernels.release()
            one.synchronize()
            two.synchronize()
    assert seen == ["begun", "ended"] * 2
