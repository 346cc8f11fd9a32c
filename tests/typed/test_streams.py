"""Streams and events: order, fork and join, time, and the default streams (D1; trap 13)."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

import remap
from remap.buffers.pooled import borrow
from remap.drivers.powers import SupportsHostFunctions
from remap.errors import ClosedError, DriverError, InUseError, InvalidValueError
from remap.testing.bench import wait_until
from remap.testing.stage import Stage
from remap.testing.typed import gate

pytest_plugins = ("remap.testing.stage",)


def test_streams_are_concurrent(stage: Stage) -> None:
    """A stream that is held up does not hold up another."""
    with remap.Stream(0) as one, remap.Stream(0) as two, gate(one) as opened:
        assert not one.done
        two.synchronize()
        assert two.done
        opened.set()
        assert wait_until(lambda: one.done)


def test_fork_starts_where_the_parent_is(stage: Stage) -> None:
    """A fork waits for what the parent had queued, and not for what it queues later."""
    with remap.Stream(0) as parent:
        with gate(parent) as opened:
            child = parent.fork()
            assert child.device == parent.device
            assert not child.done
            opened.set()
            child.synchronize()
        with child, gate(parent):
            child.synchronize()
            assert not parent.done


@pytest.mark.parametrize("slow", [0, 1])
def test_join(stage: Stage, slow: int) -> None:
    """A join waits for all that the others have queued, given in whatever form, and the host does not wait."""
    with (
        remap.Stream(0) as parent,
        remap.Stream(0) as one,
        remap.Stream(0) as two,
        gate((one, two)[slow]) as opened,
    ):
        parent.join(one, two.handle)
        assert not parent.done
        opened.set()
        parent.synchronize()


def test_fork_and_join_order_memory(stage: Stage) -> None:
    """Work forked off and joined again sees and leaves right contents, every time."""
    with remap.Stream(0) as stream, remap.DeviceBuffer.zeroed((4, 1 << 14), "int32", device=0) as buffer:
        for turn in range(10):
            children = [stream.fork() for _ in range(4)]
            for row, child in enumerate(children):
                buffer[row].fill(turn * 10 + row, stream=child)
            stream.join(*children)
            found = buffer.to_host(stream=stream)
            assert [set(row.tolist()) for row in found] == [{turn * 10 + row} for row in range(4)]
            for child in children:
                child.close()


def test_events(stage: Stage) -> None:
    """An event is done when what it marks is; streams and the host can wait for it."""
    with remap.Stream(0) as one, remap.Stream(0) as two:
        with gate(one) as opened:
            event = one.record()
            two.wait(event)
            assert not event.done
            assert not two.done
            opened.set()
            event.synchronize()
            assert event.done
            two.synchronize()
        with gate(one):
            assert one.record(event) is event
            assert not event.done
        event.synchronize()
        event.close()
        with pytest.raises(ClosedError):
            event.synchronize()


def test_elapsed(stage: Stage) -> None:
    """Two timing events measure what lies between them; others refuse."""
    with remap.Stream(0) as stream:
        start = stream.record(timing=True)
        with gate(stream) as opened:
            end = stream.record(timing=True)
            with pytest.raises(DriverError):  # not reached
                start.elapsed(end)
            threading.Timer(0.05, opened.set).start()
            end.synchronize()
        assert 40 <= start.elapsed(end) < 30_000
        plain = stream.record()
        with pytest.raises(DriverError):
            start.elapsed(plain)
        for event in (start, end, plain):
            event.close()


def test_default_stream(stage: Stage) -> None:
    """The default stream is what None means: it takes work, is waited for and forked from, and needs no close."""
    default = remap.default_stream(0)
    assert default.device == remap.device(0)
    with remap.DeviceBuffer.zeroed(1 << 16, "uint8", device=0) as buffer:
        buffer.fill(3, stream=default)
        event = default.record()
        with default.fork() as child:
            out = np.zeros(1 << 16, "uint8")
            buffer.copy_to_host(out, stream=child)
            child.synchronize()
            assert (out == 3).all()
        default.synchronize()
        assert default.done
        assert event.done
        assert not default.capturing
        event.close()
    assert default.__cuda_stream__()[0] == 0


def test_blocking_streams_wait_for_the_default_stream(stage: Stage) -> None:
    """The legacy default stream orders itself with blocking streams, and non-blocking ones stand apart."""
    default = remap.default_stream(0)
    if default.handle == 2:
        pytest.skip("the environment asks for per-thread default streams")
    with (
        remap.Stream(0, nonblocking=False) as blocking,
        remap.Stream(0) as apart,
        remap.DeviceBuffer.zeroed(100, "uint8", device=0) as buffer,
        gate(blocking) as opened,
    ):
        buffer.fill(1, stream=default)
        assert not default.done
        apart.synchronize()
        opened.set()
        default.synchronize()


class Foreign:
    """A stream of another library."""

    def __init__(self, handle: int, version: int = 0) -> None:
        self.handle = handle
        self.version = version

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return what CUDA's protocol asks for."""
        return self.version, self.handle


def test_foreign_streams(stage: Stage) -> None:
    """Anything with `__cuda_stream__` is a stream, if its version is known."""
    with remap.Stream(0) as stream, remap.DeviceBuffer.zeroed(100, "uint8", device=0) as buffer:
        with gate(stream):
            buffer.fill(1, stream=Foreign(stream.handle))
            assert not stream.done
        assert (buffer.to_host() == 1).all()
        with pytest.raises(InvalidValueError, match="version"):
            buffer.fill(1, stream=Foreign(stream.handle, version=7))
        with pytest.raises(TypeError, match="stream"):
            buffer.fill(1, stream="fast")  # type: ignore[arg-type]


def _pass(opened: threading.Event) -> None:
    assert opened.wait(30), "nobody opened the gate"


def test_foreign_streams_that_were_closed(stage: Stage) -> None:
    """What was queued on another library's stream is waited for though that has closed the stream meanwhile."""
    driver, device = remap.driver(), remap.device(0)
    if driver.name == "cuda":
        pytest.skip("what a driver does with the handle of a destroyed stream is undefined")
    assert isinstance(driver, SupportsHostFunctions)
    opened, buffer = threading.Event(), remap.allocate("2MiB", resident=0)
    with device.current():
        handle = driver.create_stream()
        driver.launch_host_function(handle, partial(_pass, opened))
        buffer.fill(1, stream=Foreign(handle))
        driver.destroy_stream(handle)  # which does not wait
    threading.Timer(0.05, opened.set).start()
    buffer.close()
    assert opened.is_set()


def test_closed_streams(stage: Stage) -> None:
    """A closed stream takes no work."""
    stream = remap.Stream(0)
    stream.close()
    stream.close()
    for use in (
        stream.synchronize,
        stream.fork,
        stream.record,
        lambda: stream.done,
        lambda: stream.capturing,
    ):
        with pytest.raises(ClosedError):
            use()


def test_lent_streams_are_lent_again(stage: Stage) -> None:
    """A stream that was given back is the next one that is lent; while it is lent nobody else gets it."""
    one, two = borrow(remap.device(0)), borrow(remap.device(0))
    assert one.handle != two.handle
    one.synchronize()
    two.give_back()
    one.give_back()
    handles = {borrow(remap.device(0)) for _ in range(2)}
    assert {one, two} <= handles or len(handles) == 2
    for stream in handles:
        stream.give_back()


@pytest.mark.cuda
def test_a_stream_under_capture(stage: Stage) -> None:
    """A stream under capture is known as such, and refuses to be waited for; the capture goes on (trap 13)."""
    cuda = pytest.importorskip("cuda.bindings.driver")
    with remap.Stream(0) as stream, remap.device(0).current():
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        (err,) = cuda.cuStreamBeginCapture(stream.handle, mode)
        assert not err
        assert stream.capturing
        for refused in (stream.synchronize, stream.close, lambda: stream.done):
            with pytest.raises(InUseError, match="captur"):
                refused()
        err, graph = cuda.cuStreamEndCapture(stream.handle)
        assert not err, "the capture was broken"
        cuda.cuGraphDestroy(graph)
        assert not stream.capturing
