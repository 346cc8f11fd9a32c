"""Streams that end while others still ask about them (invariants 7 and 13)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import remap
from remap import MiB
from remap.drivers.wrappers import Faulty, Recording
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
