"""DeviceBox: memory in the order of streams, whose end makes nobody wait (D3; trap 13)."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import ClosedError, CudaResult, InUseError, InvalidValueError, OutOfMemoryError
from remap.sizes import MiB
from remap.testing.stage import Stage
from remap.testing.typed import gate

pytest_plugins = ("remap.testing.stage",)

COUNT = 1 << 20


def settle() -> None:
    """Wait for the device, and give the pool's free memory back."""
    remap.collect()
    remap.device(0).synchronize()
    remap.DeviceBox.trim(0)


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128"])
def test_there_and_back(stage: Stage, dtype: str) -> None:
    """What from_host takes to_host gives back."""
    array = (np.random.default_rng(1).random((7, 11)) * 100).astype(dtype)
    with remap.DeviceBox.from_host(array, device=0) as box:
        assert (box.to_host() == array).all()
        box[2:4].fill(1)
        assert (box[2:4].to_host() == 1).all()
    settle()


def test_closing_never_waits(stage: Stage) -> None:
    """A box is closed while work on it is held up on two streams, and its memory stays until that has passed."""
    with remap.Stream(0) as home, remap.Stream(0) as other, gate(other) as opened:
        box = remap.DeviceBox.zeroed(COUNT, "uint8", stream=home)
        box.fill(7, stream=other)
        out = np.zeros(COUNT, "uint8")
        box.copy_to_host(out, stream=other) if remap.driver().name == "host" else None
        box.close()
        assert box.closed
        assert not other.done
        assert not home.done, "the free comes after the work of the other stream"
        opened.set()
        home.synchronize()
        other.synchronize()
        if remap.driver().name == "host":  # on CUDA a copy to pageable memory may wait, and would for ever
            assert (out == 7).all()
    settle()
    assert remap.DeviceBox.statistics(0).used == 0


def test_closing_asks_each_stream_once(stage: Stage) -> None:
    """Whether a stream is being captured is asked once for each, as every question makes a close longer."""
    with remap.Stream(0) as home, remap.Stream(0) as other:
        for streams in ((home,), (home, other)):
            box = remap.DeviceBox.zeroed(COUNT, "uint8", stream=home)
            for stream in streams:
                box.fill(7, stream=stream)
            mark = len(stage.recording.calls)
            box.close()
            asked = [call.arguments[0] for call in stage.since(mark) if call.name == "stream_capturing"]
            assert asked == [stream.handle for stream in streams]
    settle()


def test_other_streams_wait_for_the_allocation(stage: Stage) -> None:
    """Work on another stream comes after what the home stream has queued, with no word from the user."""
    with remap.Stream(0) as home, remap.Stream(0) as other, gate(home) as opened:
        box = remap.DeviceBox.zeroed(COUNT, "uint8", stream=home)
        box[:10].fill(5, stream=other)
        assert not other.done
        opened.set()
        home.join(other)
        assert box.to_host(stream=home)[:12].tolist() == [5] * 10 + [0, 0]
        box.close()
        home.synchronize()
    settle()


def test_memory_is_used_again_in_stream_order(stage: Stage) -> None:
    """A loop of boxes on one stream takes the memory of one."""
    settle()
    with remap.Stream(0) as stream:
        for value in range(20):
            with remap.DeviceBox.empty(8 * MiB, "uint8", stream=stream) as box:
                box.fill(value, stream=stream)
        assert remap.DeviceBox.statistics(0).reserved < 64 * MiB
        stream.synchronize()
    settle()


def test_foreign_streams(stage: Stage) -> None:
    """`use` orders a bare handle after the allocation and before the free."""
    driver = remap.driver()
    with remap.device(0).current():
        handle = driver.create_stream()
    with remap.Stream(0) as home, gate(home) as opened:
        box = remap.DeviceBox.zeroed(100, "uint8", stream=home)
        with box.use(handle) as address, remap.device(0).current():
            driver.fill(address, 3, 1, 100, handle)
            assert not driver.stream_done(handle)
        box.close()
        opened.set()
        home.synchronize()
    with remap.device(0).current():
        driver.synchronize_stream(handle)
        driver.destroy_stream(handle)
    settle()


def test_a_bare_handle_as_home(stage: Stage) -> None:
    """A box made on a bare handle is freed though that stream has gone meanwhile."""
    driver = remap.driver()
    with remap.device(0).current():
        handle = driver.create_stream()
    box = remap.DeviceBox.zeroed(100, "uint8", stream=handle, device=0)
    with remap.device(0).current():
        driver.synchronize_stream(handle)
        driver.destroy_stream(handle)
    box.close()
    settle()
    assert remap.DeviceBox.statistics(0).used == 0


def test_a_closed_home(stage: Stage) -> None:
    """A box outlives the stream that it was made on."""
    with remap.Stream(0) as home:
        box = remap.DeviceBox.zeroed(100, "uint8", stream=home)
    assert (box.to_host() == 0).all()
    box.close()
    settle()


def test_use_after_close(stage: Stage) -> None:
    """A closed box is refused everywhere (invariant 4)."""
    box = remap.DeviceBox.zeroed(10, device=0)
    box.close()
    box.close()
    for use in (box.to_host, lambda: box.fill(1), lambda: box.address, lambda: box.use(0).__enter__()):
        with pytest.raises(ClosedError):
            use()
    settle()


def test_a_box_that_was_dropped(stage: Stage) -> None:
    """A box collected unclosed warns, and is freed in stream order by the next call (invariant 4)."""
    with remap.Stream(0) as stream:
        box = remap.DeviceBox.zeroed(COUNT, "uint8", stream=stream)
        with pytest.warns(ResourceWarning, match="pool memory .* was never closed"):
            del box
            gc.collect()
        remap.collect()
        stream.synchronize()
    settle()
    assert remap.DeviceBox.statistics(0).used == 0


def test_figures_and_retention(stage: Stage) -> None:
    """Statistics are the pool's own; retained memory stays until it is trimmed."""
    settle()
    remap.DeviceBox.retain("1GiB", 0)
    try:
        box = remap.DeviceBox.empty(8 * MiB, "uint8", device=0)
        assert remap.DeviceBox.statistics(0).used >= 8 * MiB
        box.close()
        remap.device(0).synchronize()
        figures = remap.DeviceBox.statistics(0)
        assert figures.used == 0
        assert figures.reserved >= 8 * MiB
        assert remap.DeviceBox.trim(0) == figures.reserved
    finally:
        remap.DeviceBox.retain(0, 0)
    settle()


def test_empty_boxes(stage: Stage) -> None:
    """A box of no elements is valid and makes no call on memory (trap 39)."""
    stage.recording.forget()
    with remap.DeviceBox.zeroed(0, device=0) as box:
        assert box.to_host().size == 0
    assert not [
        name for name in stage.names_since(0) if name.startswith("pool") or name in {"fill", "copy_to_host"}
    ]


def test_failures(stage: Stage) -> None:
    """A failure leaves nothing behind, and says what was asked."""
    settle()
    with pytest.raises(OutOfMemoryError, match="of the pool of device 0"):
        remap.DeviceBox.empty(1 << 46, "uint8", device=0)
    stage.faulty.fail("fill")
    with pytest.raises(remap.DriverError):
        remap.DeviceBox.zeroed(10, device=0)
    with pytest.raises(InvalidValueError):
        remap.DeviceBox.from_host(np.arange(10)[::2])
    settle()
    assert remap.DeviceBox.statistics(0).used == 0


@pytest.mark.parametrize("bad", ["event", "stream", "text"])
def test_closing_after_what_cannot_be_waited_for(stage: Stage, bad: str) -> None:
    """A box stays open, and can be closed later, where `after=` names what was closed, or nothing (invariants 3, 5)."""
    settle()
    with remap.Stream(0) as home, remap.Stream(0) as other:
        after: Any = "later"
        if bad != "text":
            after = home.record() if bad == "event" else other
        box = remap.DeviceBox.empty(COUNT, "uint8", stream=home)
        if bad != "text":
            after.close()
        with pytest.raises(TypeError if bad == "text" else ClosedError):
            box.close(after=after)
        assert not box.closed
        assert remap.DeviceBox.statistics(0).used == COUNT
        box.close(after=other if bad == "event" else None)
        box.close(after=after)  # again does nothing
    settle()
    assert remap.DeviceBox.statistics(0).used == 0


def test_a_home_that_no_event_tells_of(stage: Stage) -> None:
    """A box made on a bare handle is there, and freed, where the driver refuses the event that stands for it."""
    settle()
    with remap.Stream(0) as home:
        stage.faulty.fail("create_event", result=CudaResult.OUT_OF_MEMORY)
        box = remap.DeviceBox.zeroed(100, "uint8", stream=home.handle, device=0)
        assert stage.faulty.refused == ("create_event",)
        assert not box.to_host().any()
        box.close()
    settle()
    assert remap.DeviceBox.statistics(0).used == 0


def test_foreign_arrays_of_parts_keep_it_open(stage: Stage) -> None:
    """A box of whose memory another library holds a part refuses to close; one that was only shown does not."""
    with remap.DeviceBox.zeroed(10, device=0) as box:
        assert box.__cuda_array_interface__["shape"] == (10,)
        part = box[:5]
        assert part.__cuda_array_interface__["shape"] == (5,)
        with pytest.raises(InUseError):
            box.close()
        del part
    assert box.closed
    settle()


@pytest.mark.cuda
def test_refused_under_capture(stage: Stage) -> None:
    """Neither making nor closing a box disturbs a capture: both are refused, and the capture goes on (trap 13)."""
    cuda = pytest.importorskip("cuda.bindings.driver")
    box = None
    with remap.Stream(0) as stream, remap.device(0).current():
        box = remap.DeviceBox.zeroed(10, stream=stream)
        stream.synchronize()
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        (err,) = cuda.cuStreamBeginCapture(stream.handle, mode)
        assert not err
        assert stream.capturing
        with pytest.raises(InUseError, match=r"remap\.Graph"):
            remap.DeviceBox.empty(10, stream=stream)
        with pytest.raises(InUseError):
            box.close()
        with pytest.raises(InUseError):
            stream.synchronize()
        assert not box.closed
        err, graph = cuda.cuStreamEndCapture(stream.handle)
        assert not err, "the capture was broken"
        cuda.cuGraphDestroy(graph)
        box.close()
        stream.synchronize()
    settle()
