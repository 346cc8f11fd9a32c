"""`SharedEvent`: work handed over between processes (B10)."""

from __future__ import annotations

import pickle
import threading

import pytest

import remap
from remap import MiB
from remap.drivers.powers import SupportsHostFunctions, SupportsSharedEvents
from remap.lifetime import live

from . import roles
from .support import LIMIT, Child

SIZE = 4 * MiB


@pytest.fixture(autouse=True)
def _has_events() -> None:
    if not isinstance(remap.driver(), SupportsSharedEvents):
        pytest.skip(f"the driver {remap.driver().name} has no shared events")


def test_the_reader_waits_for_the_writer() -> None:
    """A reader in another process does not pass before the writer's stream has got to the record."""
    driver = remap.driver()
    assert isinstance(driver, SupportsHostFunctions)
    with (
        remap.allocate(SIZE, resident=0, shareable="posix_fd") as buffer,
        remap.SharedEvent(0) as event,
        remap.Stream(0) as stream,
        Child(roles.follower) as child,
    ):
        buffer.fill(1)
        child.tell(remap.export(buffer))
        child.tell(event)
        assert child.hear() == "ready"
        for value in (2, 3):
            gate = threading.Event()
            with remap.device(0).current():
                driver.launch_host_function(stream.handle, lambda gate=gate: gate.wait(LIMIT))  # type: ignore[misc]
            buffer.fill(value, stream=stream)
            stream.record(event)
            child.tell("wait")
            assert child.hear() == "waiting"
            assert not child.link.poll(0.2), "nothing has been written yet"
            gate.set()
            assert child.hear() == value
            stream.synchronize()
        child.tell("end")
        child.end()


def test_an_event_nobody_recorded() -> None:
    """A wait for an event that was never recorded passes at once, as CUDA has it."""
    with remap.SharedEvent(0) as event, remap.Stream(0) as stream:
        stream.wait(event)
        stream.synchronize()
        event.synchronize()
        assert event.done


def test_it_is_an_event() -> None:
    """A shared event is recorded, waited for and asked here as every event is."""
    with remap.SharedEvent(0) as event, remap.Stream(0) as stream, remap.Stream(0) as other:
        assert stream.record(event) is event
        other.wait(event)
        other.synchronize()
        assert event.done
    with pytest.raises(remap.ClosedError):
        event.to_bytes()


def test_what_is_no_event() -> None:
    """Foreign bytes are refused, and plain pickle is, with the reason."""
    for data in (b"", bytes(64), b"x" * 64, b"x" * 1000):
        with pytest.raises(remap.DriverError):
            remap.SharedEvent.open(data, 0)
    with remap.SharedEvent(0) as event:
        with pytest.raises(remap.ShareError, match="multiprocessing"):
            pickle.dumps(event)
        data = event.to_bytes()
    assert len(data) == 64
    with pytest.raises(remap.DriverError):
        remap.SharedEvent.open(data, 0)


def test_a_failure_leaves_nothing() -> None:
    """An event that cannot be made is no object."""
    before = len(live())
    with pytest.raises(remap.InvalidValueError):
        remap.SharedEvent(99)
    assert len(live()) == before
