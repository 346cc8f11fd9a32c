"""SupportsSharedEvents: events that several processes record and wait for."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Generator

import pytest

from remap.drivers.powers import SupportsSharedEvents
from remap.drivers.protocol import Driver
from remap.errors import DriverError
from remap.testing.bench import wait_until
from remap.testing.events import follow, record_and_wait

from .conftest import Desk

LIMIT = 60.0


def powers(driver: Driver) -> SupportsSharedEvents:
    """Return the driver as one that has the power."""
    assert isinstance(driver, SupportsSharedEvents)
    return driver


class Follower:
    """A process that waits for an event of this one."""

    def __init__(self, exported: bytes) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        self.process = spawn.Process(target=follow, args=(other, exported), daemon=True)
        self.process.start()
        other.close()
        assert self.hear() == "open"

    def hear(self) -> object:
        """Return what the process says."""
        assert self.pipe.poll(LIMIT), "the other process says nothing"
        return self.pipe.recv()

    def end(self) -> None:
        """Let it end."""
        self.pipe.send("end")
        self.process.join(LIMIT)
        assert self.process.exitcode == 0


@pytest.fixture(name="event")
def _event(desk: Desk) -> Generator[int]:
    event = powers(desk.driver).create_shared_event()
    yield event
    desk.driver.destroy_event(event)


def test_another_process_waits(desk: Desk, event: int) -> None:
    """Work of another process begins when the stream here has got to the record, each time anew."""
    exported = powers(desk.driver).export_event(event)
    assert len(exported) == 64
    follower, stream = Follower(exported), desk.stream()
    for _ in range(3):
        gate = desk.gate(stream)
        desk.driver.record_event(event, stream)
        follower.pipe.send("wait")
        assert follower.hear() == "queued"
        early = follower.hear() if follower.pipe.poll(0.05) else None
        assert early is None, "it did not wait"
        gate.set()
        assert follower.hear() == "passed"
        assert follower.hear() == "waited"
    follower.end()


def test_an_event_here_is_an_ordinary_event(desk: Desk, event: int) -> None:
    """Its maker records it, waits for it and asks for it as for any other."""
    assert desk.driver.event_done(event)
    stream, other = desk.stream(), desk.stream()
    gate = desk.gate(stream)
    desk.driver.record_event(event, stream)
    desk.driver.wait_event(other, event)
    assert not desk.driver.event_done(event)
    assert not desk.driver.stream_done(other)
    gate.set()
    desk.driver.synchronize_event(event)
    assert desk.driver.event_done(event)
    assert wait_until(lambda: desk.driver.stream_done(other))


def test_only_shared_events_are_exported(desk: Desk) -> None:
    """An event that was not created for it is refused."""
    event = desk.driver.create_event()
    with pytest.raises(DriverError):
        powers(desk.driver).export_event(event)
    desk.driver.destroy_event(event)


@pytest.mark.parametrize(
    "hostile",
    [b"", b"x" * 63, b"\0" * 65, os.urandom(64), b"../" * 21 + b"a"],
    ids=["nothing", "one short", "one long", "random", "path"],
)
def test_hostile_bytes(desk: Desk, hostile: bytes) -> None:
    """What no export gave is refused (invariant 11)."""
    if desk.driver.name == "cuda" and len(hostile) == 64:
        pytest.skip("the CUDA driver takes 64 bytes on trust")
    with pytest.raises(DriverError):
        powers(desk.driver).import_event(hostile)


def test_an_event_that_has_gone(desk: Desk) -> None:
    """The host driver finds no event that was destroyed, and leaves no file behind."""
    if desk.driver.name != "host":
        pytest.skip("CUDA does not say what happens then")
    event = powers(desk.driver).create_shared_event()
    exported = powers(desk.driver).export_event(event)
    desk.driver.destroy_event(event)
    with pytest.raises(DriverError, match="destroyed"):
        powers(desk.driver).import_event(exported)


def test_a_record_of_a_process_that_died(desk: Desk, event: int) -> None:
    """The host driver takes the record of a dead process for reached: its work has ended with it."""
    if desk.driver.name != "host":
        pytest.skip("CUDA does not say what happens then")
    spawn = multiprocessing.get_context("spawn")
    pipe, other = spawn.Pipe()
    child = spawn.Process(
        target=record_and_wait, args=(other, powers(desk.driver).export_event(event)), daemon=True
    )
    child.start()
    assert pipe.poll(LIMIT)
    assert pipe.recv() == "recorded"
    assert not desk.driver.event_done(event)
    child.kill()
    child.join()
    desk.driver.synchronize_event(event)
    assert desk.driver.event_done(event)
