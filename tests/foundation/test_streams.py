"""Streams that end while others still ask about them (invariants 7 and 13)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import remap
from remap import MiB
from remap.drivers.wrappers import Faulty, Recording
from remap.errors import InUseError
from remap.launches import Repeat
from remap.streams import as_stream
from remap.testing.bench import wait_until
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

SIZE = 4 * MiB
LIMIT = 30


class Counting(Faulty):
    """A driver that counts the waits for streams as they begin."""

    waits: int = 0

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            if name == "synchronize_stream":
                self.waits += 1
            return call(*arguments, **keywords)

        return counted


@pytest.fixture
def counting(stage: Stage) -> Generator[Counting]:
    """Put a driver that counts before the stage's."""
    driver = Counting(stage.recording)
    remap.use(driver)
    yield driver
    remap.use(stage.recording)


class Halting(Faulty):
    """A driver that holds fills back until they are let."""

    def __init__(self, inner: Any) -> None:
        self.come, self.let = threading.Event(), threading.Event()
        super().__init__(inner)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def halting(*arguments: Any, **keywords: Any) -> Any:
            if name == "fill":
                self.come.set()
                assert self.let.wait(LIMIT)
            return call(*arguments, **keywords)

        return halting


def test_a_stream_stays_while_work_is_being_queued(stage: Stage) -> None:
    """It is not closed between the look at it and the work: nobody would wait for that (invariants 7 and 13)."""
    driver = Halting(stage.recording)
    remap.use(driver)
    try:
        with (
            remap.allocate(SIZE, resident=0) as buffer,
            remap.Stream(0) as stream,
            ThreadPoolExecutor(1) as pool,
        ):
            filling = pool.submit(buffer.fill, 1, stream=stream)
            try:
                assert driver.come.wait(LIMIT)
                with pytest.raises(remap.InUseError, match="under way in another thread"):
                    stream.close()
                assert not stream.closed
            finally:
                driver.let.set()
            filling.result(LIMIT)
    finally:
        remap.use(stage.recording)


class Meeting(remap.Stream):
    """A stream that another thread begins to launch on just as it is about to be closed."""

    meet: Callable[[], None]

    def _check_closable(self) -> None:
        super()._check_closable()
        self.meet()


@pytest.mark.parametrize("kept", [True, False])
def test_a_launch_that_meets_a_stream_being_closed(kept: bool) -> None:
    """It is refused: the wait of whoever closes the stream would not see it (invariant 7)."""

    @remap.kernel
    def count(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = out[i] + 1

    with remap.allocate(SIZE, resident=0) as buffer, ThreadPoolExecutor(1) as pool:
        out = buffer.array("int32", 8)
        buffer.fill(0)
        threads: list[int] = []
        launched: list[Future[None]] = []
        stream = Meeting(0)

        def launch() -> None:
            threads.append(threading.get_ident())
            count.launch(out, grid=1, block=8, stream=stream)

        def looks() -> bool:
            frame = sys._current_frames().get(threads[0]) if threads else None
            return frame is not None and frame.f_code is Repeat._look.__code__

        def meet() -> None:
            launched.append(pool.submit(launch))
            assert wait_until(looks, LIMIT), "it has not come to wait for the lock"

        stream.meet = meet
        count.launch(out, grid=1, block=8, stream=stream if kept else None)
        stream.close()
        with pytest.raises(remap.ClosedError):
            launched[0].result(LIMIT)
        assert out.to_host().tolist() == [1] * 8


def test_a_stream_that_is_being_closed_is_not_over(counting: Counting) -> None:
    """While closing a stream still waits, whoever needs its work done waits as well (invariant 7)."""
    gate = threading.Event()
    buffer, stream = remap.allocate(SIZE, resident=0), remap.Stream(0)
    with remap.device(0).current():
        counting.launch_host_function(stream.handle, lambda: gate.wait(LIMIT))
    buffer.fill(1, stream=stream)
    with ThreadPoolExecutor(2) as pool:
        try:
            closing = pool.submit(stream.close)
            assert wait_until(lambda: counting.waits == 1)
            taking = pool.submit(buffer.close)
            assert wait_until(lambda: counting.waits == 2 or taking.done())
        finally:
            gate.set()
        closing.result(LIMIT)
        taking.result(LIMIT)
    assert counting.waits == 2
    assert buffer.closed


def test_a_handle_stays_while_it_is_named(stage: Stage) -> None:
    """A stream that another thread asks about is destroyed when that has been answered, and not before (13)."""
    stream = remap.Stream(0)
    queue = as_stream(stream, remap.device(0))
    recording: Recording = stage.recording
    with queue.kept() as first, queue.kept() as second:
        assert first
        assert second
        stream.close()
        assert queue.over
        assert not recording.calls_to("destroy_stream")
        with queue.kept() as third:
            assert not third
        assert not recording.calls_to("destroy_stream")
    assert [call.arguments for call in recording.calls_to("destroy_stream")] == [(stream.handle,)]


class Library:
    """A stream of another library, which can be closed, and does something each time it is asked for its handle."""

    def __init__(self, stream: remap.Stream, first: Callable[[], object] = lambda: None) -> None:
        self.stream = stream
        self.first = first

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return what CUDA's protocol asks for; raises once it was closed."""
        self.first()
        return self.stream.__cuda_stream__()


@pytest.mark.parametrize("way", ["close", "pause", "order", "box", "home", "array"])
def test_a_stream_that_another_library_closed(stage: Stage, way: str) -> None:
    """Its handle is not named again: the driver would take it for an address. The device is waited for instead."""
    with remap.allocate(SIZE, resident=0) as buffer:
        stream, other = remap.Stream(0), remap.Stream(0)
        handle, theirs = stream.handle, Library(stream)
        box = remap.DeviceBox.empty(8, device=0, stream=theirs if way == "home" else other)
        box.fill(1, stream=theirs)
        buffer.fill(1, stream=theirs)
        stream.close()
        others = [
            remap.Stream(0) for _ in range(4)
        ]  # one of them may get the handle, so that no other one does
        marked = stage.mark()
        if way == "close":
            buffer.close()
        elif way == "pause":
            remap.pause(buffer)
        elif way == "order":
            buffer._uses.join(as_stream(other, remap.device(0)))
        elif way == "array":
            assert buffer.array("u1", 8).__cuda_array_interface__["stream"] != handle
        else:
            box.close()
        calls = list(stage.since(marked))
        named = [call.name for call in calls if handle in call.arguments]
        box.close()
        for one in (other, *others):
            one.close()
    assert not [name for name in named if "stream" in name or "event" in name or "pool" in name], named
    assert "synchronize_context" in [call.name for call in calls]


def test_a_library_that_closes_the_box_it_is_asked_about(stage: Stage) -> None:
    """Nothing is freed twice: what is made in between has its own memory."""
    with remap.Stream(0) as stream:
        theirs = Library(stream)
        box = remap.DeviceBox.empty(MiB, "u1", device=0, stream=stream)
        box.fill(1, stream=theirs)
        made: list[remap.DeviceBox] = []

        def act() -> None:
            theirs.first = lambda: None
            box.close()
            made.append(remap.DeviceBox.zeroed(MiB, "u1", device=0, stream=stream))

        theirs.first = act
        box.close()
        with remap.DeviceBox.zeroed(MiB, "u1", device=0, stream=stream) as another:
            another.fill(9)
            assert not made[0].to_host().any()
        made[0].close()


def test_a_library_that_waits_for_another_thread(stage: Stage) -> None:
    """It is asked under no lock of ours, so whoever it waits for may use remap meanwhile (invariant 13)."""
    with remap.Stream(0) as stream, ThreadPoolExecutor(1) as executor:
        theirs = Library(stream)
        box = remap.DeviceBox.empty(8, device=0, stream=stream)
        box.fill(1, stream=theirs)
        other = remap.allocate(SIZE, resident=0)
        theirs.first = lambda: executor.submit(other.close).result(LIMIT)
        box.close()
        assert other.closed


@pytest.mark.parametrize("way", ["close", "box", "order"])
def test_a_library_that_closed_a_stream_and_captures_another(stage: Stage, way: str) -> None:
    """Waiting for the whole device would break the capture: refused, and both go on."""
    with remap.allocate(SIZE, resident=0) as buffer, remap.Stream(0) as captured, remap.Stream(0) as other:
        stream = remap.Stream(0)
        theirs = Library(stream)
        box = remap.DeviceBox.empty(8, device=0, stream=other)
        box.fill(1, stream=theirs)
        buffer.fill(1, stream=theirs)
        stream.close()
        with remap.capture(captured) as capture, pytest.raises(InUseError, match="closed by its library"):
            if way == "close":
                buffer.close()
            elif way == "box":
                box.close()
            else:
                buffer._uses.join(as_stream(other, remap.device(0)))
        capture.graph.close()
        box.close()


def test_a_free_of_graph_memory_that_is_refused(stage: Stage) -> None:
    """What would wait for the device under a capture is refused; the memory stays open, and is freed after it."""
    with remap.Stream(0) as captured, remap.Stream(0) as other, remap.Graph(0) as graph:
        allocation = graph.alloc(SIZE)
        with graph.instantiate() as executable:
            executable.launch(other)
            memory, stream = allocation.memory, remap.Stream(0)
            stream.wait(other)
            memory.fill(1, stream=Library(stream))
            stream.close()
            with remap.capture(captured) as capture, pytest.raises(InUseError, match="closed by its library"):
                memory.free(other)
            capture.graph.close()
            assert not memory.closed
            memory.free(other)
            assert memory.closed
            other.synchronize()
    remap.graph_memory(0).trim()


def test_a_closed_box_under_a_capture(stage: Stage) -> None:
    """Closing it again does nothing, even where its home stream was closed by its library (invariant 3)."""
    with remap.Stream(0) as captured:
        stream = remap.Stream(0)
        box = remap.DeviceBox.empty(8, device=0, stream=Library(stream))
        stream.close()
        box.close()
        with remap.capture(captured) as capture:
            box.close()
        capture.graph.close()
