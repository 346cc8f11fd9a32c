"""Buffers under instantiated graphs that are paused, resumed and moved between launches (T13; trap 19)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import remap
from remap.errors import PausedError
from remap.graphs import Executable, Graph, GraphPool
from remap.sizes import MiB
from remap.testing.graph_kernels import Kernels

pytest_plugins = ["remap.testing.stage"]
SIZE = 4 * MiB


def _by_nodes(kernels: Kernels, buffer: remap.Buffer, stream: remap.Stream) -> Graph:
    del stream
    graph = remap.Graph(0)
    graph.launch(kernels.add, buffer, SIZE, 1, grid=SIZE // 256, block=256)
    return graph


def _by_capture(kernels: Kernels, buffer: remap.Buffer, stream: remap.Stream) -> Graph:
    with remap.capture(stream) as capture:
        kernels.add.launch(buffer, SIZE, 1, grid=SIZE // 256, block=256, stream=stream)
    return capture.graph


@pytest.mark.parametrize("make", [_by_nodes, _by_capture])
def test_a_graph_goes_on_over_memory_that_moves(
    pool: GraphPool,
    stream: remap.Stream,
    kernels: Kernels,
    make: Callable[[Kernels, remap.Buffer, remap.Stream], Graph],
) -> None:
    """Pause and resume, and a move to the host and back, keep the address: the graph gives right results after each.

    While the buffer is paused a launch is refused, and says what to do.
    """
    del pool
    with remap.allocate(SIZE) as buffer:
        buffer.fill(10)
        graph = make(kernels, buffer, stream)
        expected = 10
        with graph.instantiate() as executable:

            def run() -> None:
                nonlocal expected
                executable.launch(stream)
                expected += 1

            run()
            remap.pause(buffer)  # waits for the run: the graph's launch has noted its stream
            with pytest.raises(PausedError, match="resume"):
                executable.launch(stream)
            remap.resume(buffer)
            run()
            remap.migrate(buffer, remap.Host())
            run()
            remap.pause(buffer)
            remap.resume(buffer)
            run()
            remap.migrate(buffer, remap.device(0))
            run()
            stream.synchronize()
            assert (buffer.to_host() == expected).all()
            assert expected == 15
        graph.close()


def test_pausing_waits_for_a_run(pool: GraphPool, stream: remap.Stream, kernels: Kernels) -> None:
    """A buffer that a run still uses is paused when the run is over, with what it wrote (invariant 7, trap 11)."""
    del pool
    with remap.allocate(SIZE) as buffer, remap.Graph(0) as graph:
        held = graph.launch(kernels.hold, kernels.ticks, grid=1, block=1)
        graph.fill(buffer, 77, after=[held])
        with graph.instantiate() as executable:
            executable.launch(stream)
            paused = threading.Event()

            def pause() -> None:
                remap.pause(buffer)
                paused.set()

            thread = threading.Thread(target=pause)
            thread.start()
            if remap.driver().name == "host":
                assert not paused.wait(0.05)
            kernels.release()
            thread.join(30)
            assert paused.is_set()
            remap.resume(buffer)
            assert (buffer.to_host() == 77).all()


def test_many_cycles(pool: GraphPool, stream: remap.Stream, kernels: Kernels) -> None:
    """Twenty cycles of launch, pause and resume neither leak nor lose anything."""
    del pool
    with remap.allocate(SIZE) as buffer:
        buffer.fill(0)
        with _by_nodes(kernels, buffer, stream) as graph, graph.instantiate() as executable:
            assert isinstance(executable, Executable)
            for _ in range(20):
                executable.launch(stream)
                remap.pause(buffer)
                remap.resume(buffer)
            assert (buffer.to_host() == 20).all()
