"""Which parts of buffers a graph uses, and how: looked at again before each launch, as before a direct use."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np
import pytest

import remap
from remap import MiB
from remap.errors import AccessError, ClosedError, InvalidValueError, PausedError, RemapError
from remap.graphs import Graph, GraphPool
from remap.sharing.exchange import SingleExchange
from remap.testing.graph_kernels import Kernels

pytest_plugins = ["remap.testing.stage"]
CHUNK = 2 * MiB
SIZE = 2 * CHUNK
THREES = 0x03030303


@remap.kernel
def put(out: remap.DisjointSlice) -> None:
    """Write threes."""
    i = remap.index_1d()
    out[i] = 50529027


@remap.kernel
def double(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Write twice what was read."""
    i = remap.index_1d()
    out[i] = x[i] * 2


class Bench(NamedTuple):
    """An elastic buffer of two chunks, what is copied into it (threes), and a stream."""

    buffer: remap.ElasticBuffer
    source: remap.Buffer
    stream: remap.Stream

    def array(self, size: int = SIZE) -> remap.DeviceArray:
        """Return the first bytes as integers."""
        return self.buffer.array("int32", size // 4)

    def launch(self, stream: remap.Stream, size: int = SIZE) -> None:
        """Let the kernel write the first bytes."""
        put.launch(self.array(size), grid=size // 1024, block=256, stream=stream)


@pytest.fixture
def bench(pool: GraphPool, stream: remap.Stream) -> Iterator[Bench]:
    """Give a buffer, a source and a stream."""
    del pool
    with (
        remap.ElasticBuffer("64MiB", device=0, chunk=CHUNK) as buffer,
        remap.allocate(SIZE, device=0) as source,
    ):
        buffer.resize(SIZE)
        source.fill(3)
        yield Bench(buffer, source, stream)


# -- how a graph writes threes into the first bytes --


def _captured_kernel(bench: Bench, size: int) -> Graph:
    with remap.capture(bench.stream) as capture:
        bench.launch(bench.stream, size)
    return capture.graph


def _captured_repeat(bench: Bench, size: int) -> Graph:
    out = bench.array(size)

    def launch() -> None:
        put.launch(out, grid=size // 1024, block=256, stream=bench.stream)

    launch()
    with remap.capture(bench.stream) as capture:
        launch()
    launch()
    bench.stream.synchronize()
    return capture.graph


def _captured_fill(bench: Bench, size: int) -> Graph:
    with remap.capture(bench.stream) as capture:
        bench.buffer.fill(3, size=size, stream=bench.stream)
    return capture.graph


def _captured_copy(bench: Bench, size: int) -> Graph:
    with remap.capture(bench.stream) as capture:
        bench.buffer.copy_from(bench.source, size=size, stream=bench.stream)
    return capture.graph


def _captured_beside(bench: Bench, size: int) -> Graph:
    with remap.Stream(0) as beside:
        with remap.capture(bench.stream) as capture:
            beside.wait(bench.stream)
            bench.array(size).copy_from(bench.source.array("int32", size // 4), stream=beside)
            bench.stream.wait(beside)
        return capture.graph


def _node_kernel(bench: Bench, size: int) -> Graph:
    graph = remap.Graph(0)
    graph.launch(put, bench.array(size), grid=size // 1024, block=256)
    return graph


def _node_fill(bench: Bench, size: int) -> Graph:
    graph = remap.Graph(0)
    first = graph.fill(bench.buffer, 3, size=size // 2)
    graph.fill(bench.buffer, 3, offset=size // 2, size=size // 2, after=[first])
    return graph


def _node_copy(bench: Bench, size: int) -> Graph:
    graph = remap.Graph(0)
    graph.copy(bench.buffer, bench.source, size=size)
    return graph


def _child(bench: Bench, size: int) -> Graph:
    graph = remap.Graph(0)
    with _captured_fill(bench, size) as child:
        graph.child(child)
    return graph


def _clone(bench: Bench, size: int) -> Graph:
    with _node_copy(bench, size) as graph:
        return graph.clone()


def _body(bench: Bench, size: int) -> Graph:
    graph = remap.Graph(0)
    body = graph.when(graph.condition(1)).body
    assert body is not None
    body.fill(bench.buffer, 3, size=size)
    return graph


Make = Callable[[Bench, int], Graph]
WAYS: list[Make] = [
    _captured_kernel,
    _captured_repeat,
    _captured_fill,
    _captured_copy,
    _captured_beside,
    _node_kernel,
    _node_fill,
    _node_copy,
    _child,
    _clone,
    _body,
]
every_way = pytest.mark.parametrize("make", WAYS)


# -- what comes in between, what it is called, and the cure --


@contextmanager
def _forked(buffer: remap.ElasticBuffer) -> Generator[Callable[[], object]]:
    with buffer.fork():
        yield buffer.make_private


@contextmanager
def _shrunk(buffer: remap.ElasticBuffer) -> Generator[Callable[[], object]]:
    buffer.resize(CHUNK)
    yield lambda: buffer.commit(CHUNK, SIZE)


@contextmanager
def _decommitted(buffer: remap.ElasticBuffer) -> Generator[Callable[[], object]]:
    buffer.decommit(0, CHUNK)
    yield lambda: buffer.commit(0, CHUNK)


@contextmanager
def _lowered(buffer: remap.ElasticBuffer) -> Generator[Callable[[], object]]:
    buffer.set_access({0: "r"})
    yield lambda: buffer.set_access({0: "rw"})


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (_forked, AccessError, rf"shared with a fork.*make_private\(0, {SIZE}\)"),
        (_shrunk, InvalidValueError, rf"not committed.*commit\({CHUNK}, {SIZE}\)"),
        (_decommitted, InvalidValueError, rf"not committed.*commit\(0, {CHUNK}\)"),
        (_lowered, AccessError, "read access.*set_access"),
    ],
)
@every_way
def test_what_a_graph_may_not_use_any_more(
    bench: Bench,
    make: Make,
    change: Callable[[remap.ElasticBuffer], AbstractContextManager[Callable[[], object]]],
    error: type[RemapError],
    says: str,
) -> None:
    """A launch is refused as a direct use would be, with nothing launched and the context intact, until it is cured."""
    buffer, stream = bench.buffer, bench.stream
    with make(bench, SIZE) as graph, graph.instantiate() as executable:
        buffer.fill(1)
        executable.launch(stream)
        stream.synchronize()
        assert (buffer.to_host() == 3).all()
        buffer.fill(1)
        with change(buffer) as cure:
            for _ in range(2):
                with pytest.raises(error, match=says):
                    executable.launch(stream)
            stream.synchronize()
            start, stop = buffer.extents[0]
            assert (buffer.to_host(shape=stop - start, offset=start) == 1).all()
            bench.source.fill(3)  # the context goes on
            cure()
            executable.launch(stream)
            stream.synchronize()
            assert (buffer.to_host() == 3).all()


@every_way
def test_the_part_that_a_graph_uses_is_all_that_counts(bench: Bench, make: Make) -> None:
    """The graph goes on where only other parts are given back or shared, and over growth, sleep and moves."""
    buffer, stream = bench.buffer, bench.stream
    with make(bench, CHUNK) as graph, graph.instantiate() as executable:

        def run() -> None:
            buffer.fill(1, size=CHUNK)
            executable.launch(stream)
            stream.synchronize()
            assert (buffer.to_host(shape=CHUNK) == 3).all()

        run()
        buffer.resize(CHUNK)
        run()
        buffer.resize(2 * SIZE)
        run()
        buffer.decommit(CHUNK, SIZE)
        run()
        with buffer.fork():
            buffer.make_private(0, CHUNK)
            run()
        remap.pause(buffer)
        with pytest.raises(PausedError):
            executable.launch(stream)
        remap.resume(buffer)
        run()
        remap.migrate(buffer, remap.Host())
        run()
        remap.migrate(buffer, remap.device(0))
        run()


def test_shared_parts_may_be_read(bench: Bench) -> None:
    """A graph that only reads goes on over chunks that forks share, in this buffer and in the fork."""
    buffer, stream = bench.buffer, bench.stream
    with remap.allocate(SIZE, device=0) as target:
        x, out = bench.array(), target.array("int32", SIZE // 4)

        def read() -> Graph:
            with remap.capture(stream) as capture:
                target.copy_from(buffer, stream=stream)
                double.launch(x, out, grid=SIZE // 1024, block=256, stream=stream)
            capture.graph.copy(target, buffer, size=CHUNK)
            return capture.graph

        buffer.fill(2)
        with read() as graph, graph.instantiate() as executable, buffer.fork():
            for _ in range(2):
                executable.launch(stream)
                stream.synchronize()
            assert (target.to_host(shape=CHUNK, offset=CHUNK) == 4).all()
            buffer.resize(CHUNK)
            with pytest.raises(InvalidValueError, match="not committed"):
                executable.launch(stream)


def test_an_update_takes_the_parts_along(bench: Bench) -> None:
    """After an update the parts of the new nodes count, and those of the old ones do not."""
    buffer, stream = bench.buffer, bench.stream
    with (
        remap.ElasticBuffer("64MiB", device=0, chunk=CHUNK) as other,
        _node_kernel(bench, SIZE) as graph,
        graph.instantiate() as executable,
    ):
        other.resize(SIZE)
        executable.launch(stream)
        with _node_kernel(bench._replace(buffer=other), SIZE) as instead:
            executable.update(instead)
        buffer.resize(CHUNK)
        executable.launch(stream)
        other.resize(CHUNK)
        with pytest.raises(InvalidValueError, match="not committed"):
            executable.launch(stream)
        other.resize(SIZE)
        executable.launch(stream)
        stream.synchronize()
        assert (other.to_host() == 3).all()


def test_each_capture_has_its_own_work(bench: Bench, streams: Callable[[], remap.Stream]) -> None:
    """Work of another capture, and what a stream did before it joined, is no part of the graph."""
    buffer, one, two, free = bench.buffer, bench.stream, streams(), streams()
    with remap.capture(one) as first:
        with remap.capture(two) as second:
            buffer.fill(3, size=CHUNK, stream=one)
            buffer.fill(3, offset=CHUNK, size=CHUNK, stream=two)
        buffer.fill(1, offset=CHUNK, size=CHUNK, stream=free)
        free.wait(one)
        buffer.fill(3, size=1, stream=free)
        one.wait(free)
    for stream in (one, two, free):
        stream.synchronize()
    with (
        first.graph as graph,
        second.graph as other,
        graph.instantiate() as low,
        other.instantiate() as high,
    ):
        buffer.fill(1)
        buffer.resize(CHUNK)
        with pytest.raises(InvalidValueError, match="not committed"):
            high.launch(two)
        low.launch(one)
        one.synchronize()
        assert (buffer.to_host() == 3).all()


def test_a_stream_by_its_handle(bench: Bench) -> None:
    """A capture of a bare handle knows the parts, and keeps their memory alive."""
    stream = bench.stream
    buffer = remap.ElasticBuffer(SIZE, device=0, chunk=CHUNK)
    buffer.resize(SIZE)
    kept = weakref.ref(buffer)
    with remap.capture(stream.handle) as capture:
        buffer.fill(3, stream=stream.handle)
    graph = capture.graph
    del buffer
    del capture
    gc.collect()
    with graph, graph.instantiate() as executable:
        found = kept()
        assert found is not None
        with found.fork(), pytest.raises(AccessError, match="shared with a fork"):
            executable.launch(stream)
        found.close()


def test_an_executable_is_not_captured(bench: Bench) -> None:
    """A launch on a captured stream is refused, by each way to it, and the capture goes on and works (invariant 7)."""
    buffer, stream = bench.buffer, bench.stream
    with remap.Graph(0) as graph:
        graph.fill(buffer, 1)
        with graph.instantiate() as executable:
            executable.launch(stream)  # which is kept
            with remap.capture(stream) as capture:
                for given in (stream, stream.handle):
                    with pytest.raises(remap.InUseError, match=r"is being captured.*Graph\.child"):
                        executable.launch(given)
                buffer.fill(3, stream=stream)
    with capture.graph as captured, captured.instantiate() as filled:
        filled.launch(stream)
        stream.synchronize()
        assert (buffer.to_host() == 3).all()


def test_a_failed_capture_leaves_nothing(bench: Bench) -> None:
    """A capture that fails keeps nothing of what it has seen, and the next one begins anew."""
    buffer, stream = bench.buffer, bench.stream
    with pytest.raises(ValueError, match="mine"), remap.capture(stream) as capture:
        buffer.fill(3, stream=stream)
        raise ValueError("mine")
    with remap.capture(stream) as second:
        buffer.fill(3, size=CHUNK, stream=stream)
    del capture
    with second.graph as graph, graph.instantiate() as executable:
        buffer.resize(CHUNK)
        executable.launch(stream)
        stream.synchronize()
        assert (buffer.to_host() == 3).all()


def test_the_second_view_of_a_ring(bench: Bench) -> None:
    """Parts of a ring reach into its second view, and a right that is gone is missed there, too."""
    stream = bench.stream
    with remap.RingBuffer(CHUNK, device=0) as ring:
        window = ring.window(CHUNK - 1024, 512, "int32")
        with remap.capture(stream) as capture:
            put.launch(window, grid=2, block=256, stream=stream)
        with capture.graph as graph, graph.instantiate() as executable:
            executable.launch(stream)
            stream.synchronize()
            assert (window.to_host() == THREES).all()
            ring.set_access({0: "r"})
            with pytest.raises(AccessError, match="read access"):
                executable.launch(stream)
            ring.set_access({0: "rw"})
            executable.launch(stream)
            stream.synchronize()


def test_a_rank_of_a_symmetric_buffer(bench: Bench) -> None:
    """A rank's memory is a part of the whole, whose rights and whose end it has."""
    if not remap.device(0).capabilities["posix_fd"]:
        pytest.skip(f"device 0 shares no memory: {remap.device(0).capabilities['posix_fd'].reason}")
    stream = bench.stream
    with remap.SymmetricBuffer(SingleExchange(), CHUNK) as whole:
        with remap.capture(stream) as capture:
            whole.local.fill(3, stream=stream)
        with capture.graph as graph, graph.instantiate() as executable:
            executable.launch(stream)
            stream.synchronize()
            assert (whole.to_host() == 3).all()
            whole.set_access({0: "r"})
            with pytest.raises(AccessError, match="read access"):
                executable.launch(stream)
            whole.set_access({0: "rw"})
            executable.launch(stream)
            whole.close()
            with pytest.raises(ClosedError):
                executable.launch(stream)


def test_nobody_knows_what_compiled_kernels_touch(bench: Bench, kernels: Kernels) -> None:
    """A kernel in CUDA C++ may be given a buffer of which it uses a part: the graph goes on when the rest is gone."""
    buffer, stream = bench.buffer, bench.stream
    buffer.fill(1)
    with remap.capture(stream) as capture:
        kernels.add.launch(buffer, CHUNK, 2, grid=CHUNK // 256, block=256, stream=stream)
    with capture.graph as graph, graph.instantiate() as executable:
        buffer.resize(CHUNK)
        executable.launch(stream)
        stream.synchronize()
        assert (buffer.to_host() == 3).all()


def test_captured_copies_keep_the_array(bench: Bench) -> None:
    """An array of the host that is copied at each launch lives as long as the graph."""
    buffer, stream = bench.buffer, bench.stream
    array = np.full(SIZE, 3, np.uint8)
    known = weakref.ref(array)
    with remap.capture(stream) as capture:
        buffer.copy_from_host(array, stream=stream)
    del array
    remap.pause(buffer)  # waits, and lets go of what earlier work has used
    remap.resume(buffer)
    gc.collect()
    with capture.graph as graph, graph.instantiate() as executable:
        assert known() is not None
        executable.launch(stream)
        stream.synchronize()
        assert (buffer.to_host() == 3).all()
