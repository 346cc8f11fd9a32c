"""Capture: streams whose work becomes a graph, and what is refused meanwhile (C7; traps 13, 19, 20)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import remap
from remap.drivers.graph_powers import CaptureMode, CaptureStatus
from remap.drivers.protocol import PER_THREAD_STREAM
from remap.errors import ClosedError, CudaResult, DriverError, InUseError, InvalidValueError
from remap.graphs import Allocation, GraphPool, NodeKind
from remap.sizes import MiB
from remap.testing.graph_kernels import Kernels

pytest_plugins = ["remap.testing.stage"]
PART = 4 * MiB
GRID = {"grid": PART // 256, "block": 256}


def test_work_becomes_nodes(pool: GraphPool, stream: remap.Stream, kernels: Kernels) -> None:
    """Nothing runs during a capture; the graph then does all of it in the stream's order, memory included."""
    with remap.allocate(PART) as buffer:
        buffer.fill(1)
        with remap.capture(stream) as capture:
            assert stream.capturing
            a = capture.alloc(PART)
            buffer.fill(5, stream=stream)
            kernels.add.launch(buffer, PART, 2, **GRID, stream=stream)
            kernels.add.launch(a, PART, 2, **GRID, stream=stream)
            capture.free(a)
            with pytest.raises(ClosedError, match="when the with block has ended"):
                _ = capture.graph
        assert not stream.capturing
        assert (buffer.to_host() == 1).all()
        graph = capture.graph
        kinds = [NodeKind.ALLOCATE, NodeKind.FILL, NodeKind.KERNEL, NodeKind.KERNEL, NodeKind.FREE]
        assert [node.kind for node in graph.nodes] == kinds
        assert [[one.number for one in node.after] for node in graph.nodes] == [[], [0], [1], [2], [3]]
        assert graph.allocations == (a,)
        assert graph.nodes[0] is a
        assert a.freed is graph.nodes[4]
        assert pool.footprint().used == 0
        with graph.instantiate() as executable:
            for _ in range(2):
                executable.launch(stream)
            stream.synchronize()
            assert (buffer.to_host() == 7).all()
        graph.close()


def test_allocations_of_a_capture(pool: GraphPool, stream: remap.Stream) -> None:
    """They are filled and copied in the capture, and are the nodes of the graph: what is left is found there."""
    del pool
    with remap.allocate(PART) as buffer:
        with remap.capture(stream) as capture:
            first = capture.alloc(PART)
            capture.fill(first, 3)
            capture.free(first)
            again, kept = capture.alloc(PART), capture.alloc(PART)
            capture.fill(again, np.uint8(5))  # type: ignore[arg-type]
            capture.fill(again, 6, offset=1, size=2)
            capture.copy(kept, again)
            capture.copy(buffer, kept, offset=8, size=4)
            capture.free(again)
            uses: list[Callable[[], None]] = [
                lambda: capture.free(again),
                lambda: capture.fill(again, 1),
                lambda: capture.copy(kept, again),
                lambda: capture.copy(again, buffer),
            ]
            for use in uses:
                with pytest.raises(ClosedError, match="freed it already"):
                    use()
            for value in (1.5, "1", None):
                with pytest.raises(TypeError, match="an integer from 0 to 255"):
                    capture.fill(kept, value)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="what a graph has allocated"):
                capture.free(3)  # type: ignore[arg-type]
            with pytest.raises(InvalidValueError, match="there are"):
                capture.fill(kept, 1, size=PART + 1)
            with pytest.raises(TypeError, match="not bytes"):
                capture.copy(kept, b"")  # type: ignore[arg-type]
            with pytest.raises(ClosedError, match="no launch has left it"):
                _ = kept.memory
        with capture.graph as graph:
            assert graph.allocations == (first, again, kept)
            assert [one.freed is not None for one in graph.allocations] == [True, True, False]
            buffer.fill(0)
            with graph.instantiate() as executable:
                executable.launch(stream)
                stream.synchronize()
                assert buffer.to_host()[7:13].tolist() == [0, 5, 6, 6, 5, 0]
                assert kept.memory.to_host()[:4].tolist() == [5, 6, 6, 5]
                kept.memory.close()
                buffer.close()
                with pytest.raises(ClosedError):
                    executable.launch(stream)


def test_a_copy_captured_on_a_thread_s_own_stream(pool: GraphPool) -> None:
    """The default stream of a thread is captured by its handle, and takes copies as any other does."""
    del pool
    with remap.allocate(PART) as buffer:
        buffer.fill(3)
        with remap.capture(PER_THREAD_STREAM) as capture:
            kept = capture.alloc(PART)
            capture.copy(kept, buffer)
            capture.copy(buffer, kept, offset=1, size=1)
        with capture.graph as graph, graph.instantiate() as executable, remap.Stream() as stream:
            executable.launch(stream)
            stream.synchronize()
            with kept.memory as memory:
                assert memory.to_host()[:2].tolist() == [3, 3]


def test_graphs_from_captures_can_be_extended(pool: GraphPool, stream: remap.Stream) -> None:
    """Nodes can be added to a captured graph, behind those that were captured."""
    del pool
    with remap.allocate(PART) as buffer:
        with remap.capture(stream) as capture:
            buffer.fill(5, stream=stream)
        with capture.graph as graph:
            a = graph.alloc(PART, after=graph.nodes)
            graph.free(a, after=[graph.copy(a, buffer, after=[a])])
            assert isinstance(graph.nodes[1], Allocation)
            with graph.instantiate() as executable:
                executable.launch(stream)
                stream.synchronize()


def test_streams_that_join(pool: GraphPool, streams: Callable[[], remap.Stream], kernels: Kernels) -> None:
    """A stream that waits for a captured one takes part until it is joined again."""
    del pool
    one, two = streams(), streams()
    with remap.allocate(PART) as left, remap.allocate(PART) as right:
        with remap.capture(one) as capture:
            left.fill(1, stream=one)
            two.wait(one)
            assert two.capturing
            right.fill(2, stream=two)
            kernels.add.launch(left, PART, 4, **GRID, stream=one)
            one.wait(two)
            right.fill(9, size=1, stream=one)
        assert not two.capturing
        with capture.graph as graph:
            assert [[node.number for node in one.after] for one in graph.nodes[:3]] == [[], [0], [0]]
            assert sorted(node.number for node in graph.nodes[3].after) == [1, 2]
            with graph.instantiate() as executable:
                executable.launch(one)
                one.synchronize()
        assert (left.to_host() == 5).all()
        assert right.to_host(shape=2).tolist() == [9, 2]


def test_unjoined_streams(pool: GraphPool, streams: Callable[[], remap.Stream]) -> None:
    """A capture whose other streams were not joined again fails at its end, and leaves no stream captured."""
    del pool
    one, two = streams(), streams()
    with remap.allocate(PART) as buffer:
        with pytest.raises(DriverError) as caught, remap.capture(one):
            buffer.fill(1, stream=one)
            two.wait(one)
            buffer.fill(2, stream=two)
        assert caught.value.name == "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
        assert not one.capturing
        assert not two.capturing
        buffer.fill(3, stream=two)
        two.synchronize()


def test_a_copy_that_is_waited_for_is_refused_before_it_is_captured(
    pool: GraphPool, stream: remap.Stream
) -> None:
    """`to_host(stream=)` would wait for a captured stream, so that it is refused, and is no node of the graph (5)."""
    del pool
    with remap.DeviceBuffer.zeroed(16, "uint8", device=0) as buffer, remap.DeviceBox.zeroed(16) as box:
        with remap.capture(stream) as capture:
            with pytest.raises(InUseError, match="captured"):
                buffer.to_host(stream=stream)
            with pytest.raises(InUseError, match="captured"):
                box.close(after=stream)
            assert not box.closed
        with capture.graph as graph:
            assert not graph.nodes


def test_waits_are_refused_with_both_intact(pool: GraphPool, stream: remap.Stream) -> None:
    """Closing, pausing, moving and waiting that would break a capture are refused; it goes on (trap 13)."""
    del pool
    escaped = remap.allocate(PART)
    assert escaped.address  # its address is known outside: only whole contexts tell when its uses end
    with remap.allocate(PART) as buffer:
        with remap.capture(stream) as capture:
            buffer.fill(5, stream=stream)
            acts: list[Callable[[], object]] = [
                buffer.close,
                lambda: remap.pause(buffer),
                lambda: remap.migrate(buffer, remap.Host()),
                stream.synchronize,
                stream.close,
                lambda: buffer.close(after=stream),
                escaped.close,
                lambda: stream.done,
            ]
            for act in acts:
                with pytest.raises(InUseError, match="captur"):
                    act()
            assert stream.capturing
            assert not buffer.closed
            assert not buffer.paused
            buffer.fill(6, size=1, stream=stream)
        with capture.graph as graph, graph.instantiate() as executable:
            executable.launch(stream)
            stream.synchronize()
            assert buffer.to_host(shape=2).tolist() == [6, 5]
    escaped.close()


def test_a_failing_block_leaves_no_graph(pool: GraphPool, stream: remap.Stream) -> None:
    """If the block fails its error is the one that is seen, the capture is over, and the stream goes on."""
    del pool
    with remap.allocate(PART) as buffer:
        with pytest.raises(ValueError, match="mine"), remap.capture(stream) as capture:
            capture.alloc(PART)
            buffer.fill(5, stream=stream)
            raise ValueError("mine")
        with pytest.raises(ClosedError):
            _ = capture.graph
        with pytest.raises(ClosedError):
            capture.alloc(PART)
        buffer.fill(7, stream=stream)
        stream.synchronize()
        assert (buffer.to_host() == 7).all()


def test_captured_graphs_keep_buffers_and_modules(
    pool: GraphPool, stream: remap.Stream, kernels: Kernels
) -> None:
    """What was used in a capture lives as long as the graph that it made (trap 20)."""
    del pool
    buffer = remap.allocate(PART)
    known = weakref.ref(buffer)
    with remap.capture(stream) as capture:
        kernels.add.launch(buffer, PART, 2, **GRID, stream=stream)
    del buffer
    gc.collect()
    executable = capture.graph.instantiate()
    capture.graph.close()
    del capture
    gc.collect()
    kept = known()
    assert kept is not None
    kept.fill(1)
    executable.launch(stream)
    stream.synchronize()
    assert (kept.to_host() == 3).all()
    kept.close()
    with pytest.raises(ClosedError, match="buffer"):
        executable.launch(stream)
    executable.close()


def test_memory_that_survives_a_capture(pool: GraphPool, stream: remap.Stream) -> None:
    """An allocation that a capture does not free is a buffer after a launch, as in any graph."""
    del pool
    with remap.capture(stream) as capture:
        capture.alloc(PART)
    with capture.graph as graph, graph.instantiate() as executable:
        (a,) = graph.allocations
        executable.launch(stream)
        stream.synchronize()
        a.memory.fill(4)
        assert (a.memory.to_host() == 4).all()
        a.memory.close()


def test_bad_input(pool: GraphPool, stream: remap.Stream) -> None:
    """A default stream, a mode that does not exist, 0 bytes, and capturing twice are refused."""
    del pool
    with pytest.raises(InvalidValueError, match="mode"):
        remap.capture(stream, mode="gentle")
    with pytest.raises(DriverError), remap.capture(1):
        pass
    with remap.capture(stream) as capture:
        with pytest.raises(InvalidValueError, match="at least one byte"):
            capture.alloc(0)
        with pytest.raises(InUseError), capture:
            pass
        with pytest.raises(DriverError), remap.capture(stream):
            pass
    capture.graph.close()
    with pytest.raises(InUseError, match="once"), capture:
        pass


# -- the driver's own rules --


def test_calls_that_break_a_capture(pool: GraphPool, stream: remap.Stream) -> None:
    """A wait of the driver's breaks the capture: it and the end say so, and the stream is free again."""
    del pool
    driver: Any = remap.driver()
    calls: list[Callable[[], object]] = [
        lambda: driver.synchronize_stream(stream.handle),
        lambda: driver.stream_done(stream.handle),
    ]
    with remap.device(0).current():
        for call in calls:
            driver.begin_capture(stream.handle, CaptureMode.RELAXED)
            assert driver.capture_status(stream.handle) is CaptureStatus.ACTIVE
            with pytest.raises(DriverError) as caught:
                call()
            assert caught.value.code == CudaResult.STREAM_CAPTURE_UNSUPPORTED
            assert driver.capture_status(stream.handle) is CaptureStatus.INVALIDATED
            with pytest.raises(DriverError) as ended:
                driver.end_capture(stream.handle)
            assert ended.value.code == CudaResult.STREAM_CAPTURE_INVALIDATED
            assert driver.capture_status(stream.handle) is CaptureStatus.NONE


def test_unsafe_calls_depend_on_the_mode(pool: GraphPool, stream: remap.Stream) -> None:
    """Plain allocation is refused in a thread that captures, unless the capture, or the thread, is relaxed."""
    del pool
    driver: Any = remap.driver()
    with remap.device(0).current():
        driver.begin_capture(stream.handle, CaptureMode.THREAD_LOCAL)
        before = driver.exchange_capture_mode(CaptureMode.RELAXED)
        assert before is CaptureMode.GLOBAL
        driver.free(driver.allocate(256))
        assert driver.exchange_capture_mode(before) is CaptureMode.RELAXED
        with pytest.raises(DriverError) as caught:
            driver.allocate(256)
        assert caught.value.code == CudaResult.STREAM_CAPTURE_UNSUPPORTED
        with pytest.raises(DriverError):
            driver.end_capture(stream.handle)
        driver.begin_capture(stream.handle, CaptureMode.RELAXED)
        driver.free(driver.allocate(256))
        driver.graph_destroy(driver.end_capture(stream.handle))
