"""An ordered resume, while one thread waits for it: nobody else may take the contents for arrived."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB, drivers
from remap.drivers.wrappers import Faulty, Recording
from remap.residency.waking import Waking

SIZE = 4 * MiB


class Waiting(Faulty):
    """A driver of which waits for streams take until they are let go."""

    def __init__(self, inner: Any) -> None:
        self.waits = threading.Event()
        self.go = threading.Event()
        self.go.set()
        super().__init__(inner)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def held(*arguments: Any, **keywords: Any) -> Any:
            if name == "synchronize_stream" and threading.current_thread().name == "closer":
                self.waits.set()
                assert self.go.wait(30)
            return call(*arguments, **keywords)

        return held


@contextmanager
def closing() -> Generator[tuple[Recording, remap.Buffer]]:
    """Yield a buffer that wakes, while another thread is in the middle of waiting for its contents."""
    waiting = Waiting(drivers.open())
    driver = Recording(waiting)
    remap.use(driver)
    try:
        with remap.allocate(SIZE, shareable="posix_fd") as buffer:
            buffer.copy_from_host(contents())
            remap.pause(buffer)
            waking = remap.resume(buffer, events=True)
            assert isinstance(waking, Waking)
            waiting.go.clear()
            thread = threading.Thread(target=waking.close, name="closer")
            thread.start()
            try:
                assert waiting.waits.wait(30)
                driver.forget()
                yield driver, buffer
            finally:
                waiting.go.set()
                thread.join(30)
            assert waking.closed
            assert np.array_equal(buffer.to_host(), contents())
    finally:
        drivers.close()


def contents() -> Any:
    """Return the bytes of the buffer."""
    return np.frombuffer(np.random.default_rng(3).bytes(SIZE), np.uint8)


def test_a_copy_waits_for_what_another_thread_waits_for() -> None:
    """A copy out waits for the chunks although the resume is being closed: it read what had not arrived (14)."""
    with closing() as (driver, buffer):
        assert np.array_equal(buffer.to_host(), contents())
        assert driver.calls_to("wait_event")


@pytest.mark.parametrize("act", ["pause", "migrate", "export"])
def test_what_is_arriving_is_not_taken(act: str) -> None:
    """Pausing, moving and sharing what another thread waits for is refused: the backup would lack what was to come."""
    acts: dict[str, Callable[[remap.Buffer], object]] = {
        "pause": remap.pause,
        "migrate": lambda buffer: remap.migrate(buffer, remap.Host()),
        "export": remap.export,
    }
    with closing() as (_, buffer), pytest.raises(remap.InUseError, match="arriving"):
        acts[act](buffer)
