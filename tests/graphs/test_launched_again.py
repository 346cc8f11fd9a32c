"""A launch that is made again sees whatever has changed since the last one: kernels of both kinds, and graphs."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB
from remap.drivers.protocol import HostLaunch
from remap.drivers.wrappers import _Forwarding
from remap.errors import AccessError, ClosedError, ForkedError, InUseError, LaunchError, PausedError
from remap.kernels import Pointer
from remap.testing.children import run_in_child
from remap.testing.typed import gate

SIZE = 2 * MiB
KINDS = ("a kernel in Python", "a kernel in CUDA C++", "a graph")
SHAPE: dict[str, Any] = {"grid": SIZE // 256, "block": 256}


SOURCE = """
extern "C" __global__ void add_one(unsigned char *data)
{ data[(long long)blockIdx.x * blockDim.x + threadIdx.x] += 1; }
extern "C" __global__ void add(unsigned char *data, long long count, long long by)
{ long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; if (i < count) data[i] += by; }
"""


def add_one(launch: HostLaunch, data: Pointer) -> None:
    """Do what `add_one` does."""
    values = data.write("uint8", launch.config.grid[0] * launch.config.block[0])
    values += 1


def add(launch: object, data: Pointer, count: int, by: int) -> None:
    """Do what `add` does."""
    del launch
    values = data.write("uint8", int(count))
    values += np.uint8(int(by) % 256)


@remap.kernel
def add_each(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Add two arrays."""
    i = remap.index_1d()
    out[i] += x[i]


class Way:
    """One way to add 1 to every byte of `buffer` (a kernel in Python reads the ones from another buffer)."""

    def __init__(self, kind: str, held: ExitStack) -> None:
        self.kind = kind
        self.held = held
        self.module = remap.load(remap.source(SOURCE), device=0)
        self.kernel = self.module.function("add_one")
        self.kernel.host(add_one)
        self.buffer = remap.allocate(SIZE, resident=0)
        self.ones = remap.allocate(SIZE, resident=0)
        self.buffer.fill(0)
        self.ones.fill(1)
        self.arrays = (self.ones.array(), self.buffer.array())
        self.graph = remap.Graph(0)
        self.graph.launch(self.kernel, self.buffer, **SHAPE)
        self.executable = self.graph.instantiate()
        for thing in (self.module, self.buffer, self.ones, self.graph, self.executable):
            held.callback(thing.close)

    def launch(self, stream: remap.Stream | None = None) -> None:
        """Do it once."""
        if self.kind == "a graph":
            self.executable.launch(stream)
        elif self.kind == "a kernel in CUDA C++":
            self.kernel.launch(self.buffer, **SHAPE, stream=stream)
        else:
            add_each.launch(*self.arrays, **SHAPE, stream=stream)

    def stream(self) -> remap.Stream:
        """Return a stream that is closed at the end."""
        return self.held.enter_context(remap.Stream(0))

    def is_value(self, value: int) -> bool:
        """Tell whether every byte has this value, when all work is done."""
        remap.device(0).synchronize()
        return bool((self.buffer.to_host() == value).all())


@pytest.fixture(name="held")
def _held() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


@pytest.fixture(params=KINDS, name="way")
def _way(request: pytest.FixtureRequest, held: ExitStack) -> Way:
    return Way(request.param, held)


def waits(act: Callable[[], object], opened: threading.Event) -> bool:
    """Tell whether a call goes on until a gate is opened, and ends then."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(0.05)
    waiting = thread.is_alive()
    opened.set()
    thread.join(30)
    assert not thread.is_alive()
    return waiting


# -- the memory --


def test_memory_that_was_closed(way: Way) -> None:
    """Closed memory is refused by name."""
    stream = way.stream()
    for _ in range(3):
        way.launch(stream)
    way.buffer.close()
    for _ in range(2):
        with pytest.raises(ClosedError, match="buffer"):
            way.launch(stream)


def test_memory_that_sleeps_wakes_and_moves(way: Way) -> None:
    """Paused memory is refused; after waking, and after a move, the launch finds it at its address."""
    stream = way.stream()
    way.launch(stream)
    for turn in range(1, 4):
        way.launch(stream)
        remap.pause(way.buffer)
        with pytest.raises(PausedError, match="resume"):
            way.launch(stream)
        remap.resume(way.buffer)
        way.launch(stream)
        remap.migrate(way.buffer, remap.Host() if turn % 2 else remap.device(0))
        way.launch(stream)
        assert way.is_value(1 + 3 * turn)


def test_rights_that_were_taken(way: Way) -> None:
    """A right that was taken away is missed, and a right that is given back is found."""
    stream = way.stream()
    for turn in range(1, 3):
        way.launch(stream)
        way.launch(stream)
        way.buffer.set_access({0: "none"})
        with pytest.raises(AccessError):
            way.launch(stream)
        way.buffer.set_access({0: "rw"})
        assert way.is_value(2 * turn)


def test_memory_that_another_thread_is_taking(way: Way) -> None:
    """While memory is being moved elsewhere a launch is refused; afterwards it goes on."""
    stream = way.stream()
    way.launch(stream)
    way.launch(stream)
    with way.buffer._taking("moved"), pytest.raises(InUseError, match="being moved"):
        way.launch(stream)
    way.launch(stream)
    assert way.is_value(3)


def test_contents_that_are_still_arriving(way: Way) -> None:
    """After an ordered resume a launch comes after the chunks that are on their way."""
    stream = way.stream()
    for turn in range(1, 4):
        way.launch(stream)
        way.launch(stream)
        remap.pause(way.buffer)
        with remap.resume(way.buffer, events=True):
            way.launch(stream)
            way.launch(stream)
        assert way.is_value(4 * turn)


# -- what is noted (invariant 7) --


@pytest.mark.parametrize("taking", [remap.pause, remap.Buffer.close], ids=["pause", "close"])
def test_taking_memory_waits_for_each_launch(way: Way, taking: Callable[[Any], object]) -> None:
    """What takes memory away waits for the last launch, and not only for the first."""
    stream = way.stream()
    way.launch(stream)
    way.launch(stream)
    with gate(stream) as opened:
        way.launch(stream)
        assert waits(partial(taking, way.buffer), opened)
    assert stream.done


def test_launches_after_a_wait_are_noted_again(way: Way) -> None:
    """A wait forgets what it has waited for; the next launch is not among that."""
    stream = way.stream()
    for _ in range(3):
        way.launch(stream)
        way.launch(stream)
        way.buffer._wait_for_work("a test")
        assert not way.buffer._uses
        assert stream.done
        with gate(stream) as opened:
            way.launch(stream)
            assert waits(partial(way.buffer._wait_for_work, "a test"), opened)


def test_other_streams_are_noted(way: Way) -> None:
    """Launches on one stream, another, and the first again are all waited for."""
    one, two = way.stream(), way.stream()
    for stream in (one, two, one, two):
        way.launch(stream)
        stream.synchronize()  # all of them write to the same memory
    for stream in (one, two):
        with gate(stream) as opened:
            way.launch(stream)
            assert waits(partial(way.buffer._wait_for_work, "a test"), opened)
    way.launch()
    assert way.is_value(7)


# -- arguments and shapes --


def test_numbers_and_shapes_of_ones_own(held: ExitStack) -> None:
    """Each launch has its own numbers and shape; another number of arguments or another type is looked at anew."""
    way = Way(KINDS[1], held)
    kernel = way.module.function("add", ["pointer", "int64", "int64"])
    kernel.host(add)
    expected = np.zeros(SIZE, np.uint8)
    for count, by in ((256, 1), (256, 2), (np.int64(100), 3), (512, np.int64(4)), (512, 5), (256, -1)):
        for _ in range(2):
            kernel.launch(way.buffer, count, by, grid=2, block=256)
            expected[: int(count)] += np.uint8(int(by) % 256)
    kernel.launch(way.buffer, 512, 7, grid=1, block=256)
    expected[: 256 if remap.driver().name == "cuda" else 512] += 7
    for wrong in (
        (way.buffer, 512),
        (way.buffer, 512, 7, 7),
        (way.buffer, 512, 7.5),
        (way.buffer, 512, 1 << 64),
    ):
        with pytest.raises(LaunchError):
            kernel.launch(*wrong, grid=1, block=256)
    with pytest.raises(LaunchError):
        kernel.launch(way.buffer, 512, 7, grid=1, block=1 << 20)
    remap.device(0).synchronize()
    assert (way.buffer.to_host() == expected).all()


@pytest.mark.parametrize("kind", KINDS[:2])
def test_shapes_that_change_in_place(kind: str, held: ExitStack) -> None:
    """A list that says the shape is read at each launch."""
    way = Way(kind, held)
    grid = [SIZE // 256]
    for _ in range(3):
        if way.kind == KINDS[0]:
            add_each.launch(*way.arrays, grid=grid, block=256)
        else:
            way.kernel.launch(way.buffer, grid=grid, block=256)
        grid[0] -= 1
    remap.device(0).synchronize()
    assert way.buffer.to_host()[-513:].tolist() == [3] + [2] * 256 + [1] * 256


def test_a_twin_that_was_registered_anew(held: ExitStack) -> None:
    """On the host driver, the twin of the moment runs; elsewhere the compiled code does."""
    way = Way(KINDS[1], held)
    way.launch()
    way.launch()
    way.kernel.host(lambda launch, data: data.write("uint8", SIZE).fill(9))
    way.launch()
    assert way.is_value(9 if remap.driver().name == "host" else 3)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_arguments_are_not_kept_alive(kind: str, held: ExitStack) -> None:
    """What a launch was made on goes when nobody else has it."""
    way = Way(kind, held)
    buffer = remap.allocate(SIZE, resident=0)
    array = buffer.array()
    for _ in range(3):
        if way.kind == KINDS[0]:
            add_each.launch(way.arrays[0], array, **SHAPE)
        else:
            way.kernel.launch(buffer, **SHAPE)
    remap.device(0).synchronize()
    known = weakref.ref(buffer)
    with pytest.warns(ResourceWarning, match="buffer"):
        del buffer, array
        gc.collect()
    assert known() is None
    remap.collect()


# -- streams, modules, captures --


def test_a_stream_that_was_closed(way: Way) -> None:
    """A closed stream is refused, and another one in its place in memory is not taken for it."""
    stream = remap.Stream(0)
    way.launch(stream)
    way.launch(stream)
    stream.close()
    with pytest.raises(ClosedError, match="stream"):
        way.launch(stream)
    del stream
    for _ in range(5):
        with remap.Stream(0) as other:
            way.launch(other)
    assert way.is_value(7)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_code_that_was_closed(kind: str, held: ExitStack) -> None:
    """A kernel of a closed module and a closed executable are refused."""
    way = Way(kind, held)
    way.launch()
    way.launch()
    (way.executable if kind == "a graph" else way.module).close()
    with pytest.raises(ClosedError):
        way.launch()


def test_a_module_that_a_graph_uses(held: ExitStack) -> None:
    """A graph whose kernel's module was closed is refused."""
    way = Way("a graph", held)
    way.launch()
    way.launch()
    way.module.close()
    with pytest.raises(ClosedError, match="module"):
        way.launch()


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_capture_that_has_begun(kind: str, held: ExitStack) -> None:
    """On a stream that is being captured by then, the launch goes into the graph, and the graph keeps the memory."""
    way = Way(kind, held)
    stream = way.stream()
    way.launch(stream)
    way.launch(stream)
    stream.synchronize()
    with remap.capture(stream) as capture:
        way.launch(stream)
        with pytest.raises(InUseError, match="captur"):
            way.buffer.close()
    assert way.is_value(2)
    way.launch(stream)
    with capture.graph as graph, graph.instantiate() as executable:
        assert way.buffer in graph.kept()
        executable.launch(stream)
        executable.launch(stream)
        assert way.is_value(5)


# -- threads and processes --


def test_threads_with_no_context(way: Way) -> None:
    """Launches of several threads at once, in none of which a context is current, are all made."""
    stream = way.stream()
    way.launch(stream)
    way.launch(stream)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                way.launch(stream)
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert way.is_value(82)


class Halting(_Forwarding):
    """A driver that stops in launches while it is told to."""

    def __init__(self, inner: Any) -> None:
        self.halts = False
        self.reached, self.open = threading.Event(), threading.Event()
        super().__init__(inner)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def halting(*args: Any, **kwargs: Any) -> Any:
            if self.halts and name in ("launch", "graph_launch"):
                self.reached.set()
                assert self.open.wait(30), "nobody lets it go on"
            return call(*args, **kwargs)

        return halting


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_launch_under_way_uses_cannot_be_taken(kind: str) -> None:
    """From the look to the driver's call memory, stream and code stay: taking them is refused (invariant 13)."""
    own = remap.driver()
    driver = Halting(own)
    remap.use(driver)
    try:
        with ExitStack() as held:
            way = Way(kind, held)
            stream = way.stream()
            way.launch(stream)
            way.launch(stream)
            code = {"a graph": way.executable, "a kernel in CUDA C++": way.module}.get(kind)
            driver.halts = True
            thread = threading.Thread(target=way.launch, args=(stream,))
            thread.start()
            try:
                assert driver.reached.wait(30)
                acts: list[Callable[[], object]] = [
                    way.buffer.close,
                    partial(remap.pause, way.buffer),
                    partial(remap.migrate, way.buffer, remap.Host()),
                    partial(way.buffer.set_access, {0: "none"}),
                    stream.close,
                    *([code.close] if code is not None else []),
                ]
                for act in acts:
                    with pytest.raises(InUseError, match="under way in another thread"):
                        act()
            finally:
                driver.open.set()
                thread.join(30)
            assert not thread.is_alive()
            assert way.is_value(3)
            way.buffer.close()
    finally:
        remap.use(own)


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_forked_child(kind: str) -> None:
    """What was launched before a fork is refused in the child, and goes on in the parent (invariant 10)."""
    run_in_child(fork_and_launch, kind)


def fork_and_launch(kind: str) -> None:
    """Launch, fork, and launch on both sides."""
    with ExitStack() as held:
        way = Way(kind, held)
        way.launch()
        way.launch()
        child = os.fork()
        if not child:
            try:
                way.launch()
            except ForkedError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        way.launch()
        assert way.is_value(3)


# -- elastic memory, whose parts differ --


def test_parts_that_were_given_back() -> None:
    """A part that was given back is refused, also where the launch was made before; what grows disturbs nothing."""
    with (
        remap.ElasticBuffer(capacity="64MiB", device=0) as buffer,
        remap.DeviceBuffer.zeroed(100, "uint8") as ones,
    ):
        buffer.resize(4 * MiB)
        buffer.fill(0)
        ones.fill(1)
        near, far = buffer.array("uint8", 100), buffer.array("uint8", 100, offset=3 * MiB)
        for turn in range(1, 4):
            for out in (near, far):
                add_each.launch(ones, out, grid=1, block=128)
                add_each.launch(ones, out, grid=1, block=128)
            assert near.to_host().tolist() == [3 * turn - 1] * 100
            buffer.resize(8 * MiB)
            buffer.resize(1 * MiB)
            add_each.launch(ones, near, grid=1, block=128)
            with pytest.raises(remap.RemapError, match="not committed"):
                add_each.launch(ones, far, grid=1, block=128)
            buffer.resize(4 * MiB)
        remap.device(0).synchronize()


def test_parts_that_are_shared_with_a_fork() -> None:
    """A part that a fork shares by then is not written."""
    with (
        remap.ElasticBuffer(capacity="64MiB", device=0) as buffer,
        remap.DeviceBuffer.zeroed(100, "uint8") as ones,
    ):
        buffer.resize(4 * MiB)
        buffer.fill(0)
        out = buffer.array("uint8", 100)
        add_each.launch(ones, out, grid=1, block=128)
        add_each.launch(ones, out, grid=1, block=128)
        with buffer.fork(), pytest.raises(AccessError):
            add_each.launch(ones, out, grid=1, block=128)
        buffer.make_private()
        add_each.launch(ones, out, grid=1, block=128)
        remap.device(0).synchronize()


def test_rights_that_a_graph_needs_to_write() -> None:
    """A launch is refused where a node would write what may be read only, which would cost the context."""

    @remap.kernel
    def add_one(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = x[i] + 1

    with remap.allocate(SIZE, resident=0) as source, remap.allocate(SIZE, resident=0) as target:
        source.fill(1)
        x, out = source.array("int32", 8), target.array("int32", 8)
        builds: list[Callable[[remap.Graph], object]] = [
            lambda graph: graph.fill(target, 5),
            lambda graph: graph.copy(target, source),
            lambda graph: graph.launch(add_one, x, out, grid=1, block=8),
        ]
        for build in builds:
            with remap.Graph(0) as graph:
                build(graph)
                with graph.instantiate() as executable:
                    executable.launch()
                    source.set_access({0: "r"})
                    executable.launch()
                    target.set_access({0: "r"})
                    with pytest.raises(AccessError, match="read access"):
                        executable.launch()
                    target.set_access({0: "rw"})
                    source.set_access({0: "rw"})
                    executable.launch()
        remap.device(0).synchronize()
