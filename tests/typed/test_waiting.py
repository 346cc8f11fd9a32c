"""What work is known to use memory: who waits for it, also while another thread does, and what is never forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest

import remap
from remap.drivers.wrappers import _Forwarding
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
