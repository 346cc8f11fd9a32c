"""What work is known to use memory: who waits for it, also while another thread does, and what is never forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest

import remap
from remap.drivers.protocol import PER_THREAD_STREAM
from remap.drivers.wrappers import _Forwarding
from remap.errors import CudaResult, InUseError
from remap.testing.bench import wait_until
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

LIMIT = 30.0


class Halting(_Forwarding):
    """A driver in which other threads than the main one stop in calls of some methods, until they are let on."""

    def __init__(self, inner: Any, *names: str) -> None:
        self._names = names
        self.arrived: list[str] = []
        self.open = threading.Event()
        super().__init__(inner)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def halting(*args: Any, **kwargs: Any) -> Any:
            if name in self._names and threading.current_thread() is not threading.main_thread():
                self.arrived.append(name)
                assert self.open.wait(LIMIT), "nobody lets it go on"
            return call(*args, **kwargs)

        return halting


@contextmanager
def halting(stage: Stage, *names: str) -> Generator[Halting]:
    """Use a driver that halts for a block, which closes everything that it makes."""
    driver = Halting(stage.recording, *names)
    remap.use(driver)
    try:
        yield driver
    finally:
        driver.open.set()
        remap.use(stage.recording)


class Beside:
    """A call in a thread of its own: `end` waits for it, and returns what it returned or raised."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act
        self._found: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._act()
        except Exception as error:  # noqa: BLE001 (it is what the test looks at)
            self._found = error

    def end(self) -> Any:
        """Wait for it."""
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        return self._found


# -- while another thread waits --


@pytest.mark.parametrize("bare", [False, True], ids=["a stream", "a bare handle"])
def test_a_second_reader_waits_as_the_first_does(stage: Stage, bare: bool) -> None:
    """Two threads read what a stream still writes: both wait for it, though one has begun to (invariants 7, 13)."""
    with (
        halting(stage, "synchronize_stream", "synchronize_event") as driver,
        remap.Stream(0) as stream,
        remap.pinned(16, "uint8") as memory,
    ):
        memory.fill(7, stream=stream.handle if bare else stream)
        readers = []
        for number in (1, 2):
            readers.append(Beside(memory.to_host))
            assert wait_until(lambda: len(driver.arrived) == number), "it does not wait"  # noqa: B023
        driver.open.set()
        assert [set(one.end().tolist()) for one in readers] == [{7}, {7}]


def test_work_that_is_waited_for_is_pending_for_all(stage: Stage) -> None:
    """While a thread waits for a stream, arrays that are handed out name it all the same (invariant 7)."""
    with (
        halting(stage, "synchronize_stream") as driver,
        remap.Stream(0) as stream,
        remap.pinned(16, "uint8") as memory,
    ):
        memory.fill(7, stream=stream)
        reader = Beside(memory.to_host)
        assert wait_until(lambda: bool(driver.arrived))
        assert memory[:8].__cuda_array_interface__["stream"] == stream.handle
        driver.open.set()
        assert set(reader.end().tolist()) == {7}


@pytest.mark.parametrize("bare", [False, True], ids=["a stream", "a bare handle"])
def test_what_is_queued_during_a_wait_is_known_after_it(stage: Stage, bare: bool) -> None:
    """A wait ends, and what another thread has queued meanwhile on the same stream is not forgotten (invariant 7)."""
    call = "synchronize_event" if bare else "synchronize_stream"
    with halting(stage, call) as driver, remap.Stream(0) as stream, remap.pinned(16, "uint8") as memory:
        where: Any = stream.handle if bare else stream
        memory.fill(1, stream=where)
        reader = Beside(memory.to_host)
        assert wait_until(lambda: bool(driver.arrived))
        memory.fill(2, stream=where)
        driver.open.set()
        reader.end()
        mark = stage.mark()
        assert set(memory.to_host().tolist()) == {2}
        assert call in stage.names_since(mark)
        mark = stage.mark()
        memory.to_host()
        assert call not in stage.names_since(mark), "it was waited for"


@pytest.mark.parametrize("act", ["close", "pause", "migrate"])
def test_a_copy_that_is_waited_for_is_an_operation(stage: Stage, act: str) -> None:
    """`to_host(stream=)` is under way until its wait has ended: nobody takes the memory away beside it (7, 13)."""
    if act == "migrate" and len(remap.devices()) < 2:
        pytest.skip("there is one device")
    with (
        halting(stage, "synchronize_stream") as driver,
        remap.Stream(0) as stream,
        remap.DeviceBuffer.zeroed(16, "uint8", device=0, source="mapped") as memory,
    ):
        memory.fill(7, stream=stream)
        acts: dict[str, Callable[[], object]] = {
            "close": memory.close,
            "pause": lambda: remap.pause(memory),
            "migrate": lambda: remap.migrate(memory, 1),
        }
        reader = Beside(lambda: memory.to_host(stream=stream))
        assert wait_until(lambda: bool(driver.arrived))
        with pytest.raises(InUseError, match="1 operation on it still under way"):
            acts[act]()
        driver.open.set()
        assert set(reader.end().tolist()) == {7}


def test_a_copy_that_is_waited_for_waits_for_its_stream_alone(stage: Stage) -> None:
    """`to_host(stream=)` waits for that stream, and leaves what others have queued to the next wait."""
    with (
        remap.Stream(0) as stream,
        remap.Stream(0) as other,
        remap.DeviceBuffer.zeroed(16, "uint8", device=0) as memory,
    ):
        memory.fill(7, stream=other)
        stream.join(other)
        mark = stage.mark()
        assert set(memory.to_host(stream=stream).tolist()) == {7}
        waited = [call.arguments[0] for call in stage.since(mark) if call.name == "synchronize_stream"]
        assert waited == [stream.handle]


# -- bare handles --


@pytest.mark.parametrize("call", ["create_event", "record_event"])
def test_work_that_no_event_tells_of(stage: Stage, call: str) -> None:
    """Where a bare handle is refused its event, the work is queued all the same, and its device waited for (7)."""
    with remap.Stream(0) as stream:
        memory = remap.DeviceBuffer.zeroed(16, "uint8", device=0)
        stage.faulty.fail(call, result=CudaResult.OUT_OF_MEMORY)
        memory.fill(7, stream=stream.handle)
        assert stage.faulty.refused == (call,)
        mark = stage.mark()
        memory.close()
        assert "synchronize_context" in stage.names_since(mark)


def test_the_default_streams_of_threads_are_several(stage: Stage) -> None:
    """Two threads queue work on their own default streams, which have one handle: both are waited for (7)."""
    memory = remap.DeviceBuffer.zeroed(16, "uint8", device=0)
    both = threading.Barrier(2)

    def fill() -> None:
        memory.fill(7, stream=PER_THREAD_STREAM)
        both.wait(LIMIT)  # a thread that has ended may leave its number to the next one

    for one in [Beside(fill), Beside(fill)]:
        assert one.end() is None
    mark = stage.mark()
    memory.close()
    assert stage.names_since(mark).count("synchronize_event") == 2


# -- handles that are named --


@pytest.mark.parametrize(
    ("act", "call"),
    [
        (remap.Stream.synchronize, "synchronize_stream"),
        (lambda stream: stream.done, "stream_done"),
        (lambda stream: stream.capturing, "stream_capturing"),
        (lambda stream: stream.record().close(), "record_event"),
        (lambda stream: stream.wait(0), "wait_event"),
        (lambda stream: remap.default_stream(0).wait(stream), "record_event"),
    ],
    ids=["synchronize", "done", "capturing", "record", "wait", "waited for"],
)
def test_a_stream_that_is_closed_while_it_is_named(
    stage: Stage, act: Callable[[remap.Stream], object], call: str
) -> None:
    """Its handle is destroyed when the last one has named it: CUDA takes one that has gone for an address (7, 13)."""
    with halting(stage, call) as driver:
        stream = remap.Stream(0)
        other = Beside(lambda: act(stream))
        assert wait_until(lambda: bool(driver.arrived))
        stream.close()
        assert not stage.recording.calls_to("destroy_stream")
        driver.open.set()
        assert not isinstance(other.end(), Exception)
        assert len(stage.recording.calls_to("destroy_stream")) == 1


@pytest.mark.parametrize(
    ("act", "call"),
    [
        (remap.Event.synchronize, "synchronize_event"),
        (lambda event: event.done, "event_done"),
        (lambda event: remap.default_stream(0).wait(event), "wait_event"),
        (lambda event: remap.default_stream(0).record(event), "record_event"),
    ],
    ids=["synchronize", "done", "wait", "record"],
)
def test_an_event_that_is_closed_while_it_is_named(
    stage: Stage, act: Callable[[remap.Event], object], call: str
) -> None:
    """As a stream, it is destroyed when the last one has named it (invariants 7, 13)."""
    with halting(stage, call) as driver:
        event = remap.default_stream(0).record()
        other = Beside(lambda: act(event))
        assert wait_until(lambda: bool(driver.arrived))
        event.close()
        assert not stage.recording.calls_to("destroy_event")
        driver.open.set()
        assert not isinstance(other.end(), Exception)
        assert len(stage.recording.calls_to("destroy_event")) == 1


def test_an_event_that_cannot_be_recorded(stage: Stage) -> None:
    """What `record` has made for it is closed again (invariant 5)."""
    before = stage.seen()
    stage.faulty.fail("record_event")
    with pytest.raises(remap.DriverError):
        remap.default_stream(0).record()
    assert stage.unchanged(before)
