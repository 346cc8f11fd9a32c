"""Captures that fail or are interrupted: the stream goes on, buffers close, and nothing is left (invariants 5, 7)."""

from __future__ import annotations

import pytest

import remap
from remap import MiB, lifetime
from remap.errors import CudaResult
from remap.lifetime import captures_running
from remap.testing.stage import Stage

from .test_every_interrupt import Interrupter, every

pytest_plugins = ("remap.testing.stage",)

SIZE = 2 * MiB


def captured(stream: remap.Stream, buffer: remap.Buffer) -> None:
    """Capture work with memory of its own, launch it, and give everything back."""
    with remap.capture(stream) as capture:
        buffer.fill(1, stream=stream)
        scratch = capture.alloc(SIZE)
        capture.free(scratch)
    with capture.graph as graph, graph.instantiate() as executable:
        executable.launch(stream)
        stream.synchronize()


def check(stream: remap.Stream, buffer: remap.Buffer, where: str) -> None:
    """Check that a capture which ended badly has left neither the stream nor the buffer in its grip."""
    lifetime.drain()
    if stream.capturing:  # its allocations and a capture hold each other, so that a collection finds them
        remap.collect()
    assert not stream.capturing, where
    assert not captures_running(), where
    assert not buffer._busy, where
    assert not buffer._taken, where
    buffer.fill(2, stream=stream)
    stream.synchronize()
    assert (buffer.to_host() == 2).all(), where


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a close whose wait is refused leaves it open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("result", [CudaResult.UNKNOWN, CudaResult.OUT_OF_MEMORY])
def test_every_call_of_a_capture_may_fail(stage: Stage, result: CudaResult) -> None:
    """Whichever driver call is refused, the error is raised, and the same capture works right after it (5)."""
    with remap.Stream(0) as stream, remap.allocate(SIZE, resident=0) as buffer:
        captured(stream, buffer)
        before = stage.seen()
        nth = 0
        refused: tuple[str, ...] = ("",)
        while refused:
            nth += 1
            stage.faulty.fail(nth=nth, result=result)
            try:
                captured(stream, buffer)
            except remap.RemapError:
                assert stage.faulty.refused, f"call {nth}"
            refused = stage.faulty.refused
            stage.faulty.heal()
            check(stream, buffer, f"call {nth} ({refused})")
            assert stage.seen().alive == before.alive, f"call {nth} ({refused})"
            captured(stream, buffer)
        assert nth > 10
        remap.graph_memory(0).trim()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # what an interrupt left to finalisers
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_capture_may_be_interrupted_everywhere(stage: Stage) -> None:
    """Wherever Ctrl-C comes, the stream is no longer captured afterwards, and the buffer closes (5, 7)."""
    if remap.driver().name != "host":
        pytest.skip("waits inside the CUDA driver end before a handler of Python runs")
    with remap.Stream(0) as stream, remap.allocate(SIZE, resident=0) as buffer:
        for done in every(lambda: captured(stream, buffer)):
            assert isinstance(done, Interrupter)
            check(stream, buffer, done.where)
        remap.graph_memory(0).trim()
    assert stage.inner is not None
