"""What other processes do in the tests of shared events: importable, so that they can be spawned."""

from __future__ import annotations

from multiprocessing.connection import Connection

import remap
from remap.drivers.powers import SupportsHostFunctions, SupportsSharedEvents


def follow(pipe: Connection, exported: bytes) -> None:
    """Open an event, let a stream wait for it each time that the other end says so, and report when it has passed."""
    driver = remap.driver()
    assert isinstance(driver, SupportsSharedEvents)
    with remap.device(0).current():
        event, stream = driver.import_event(exported), driver.create_stream()
        pipe.send("open")
        while pipe.recv() == "wait":
            driver.wait_event(stream, event)
            assert isinstance(driver, SupportsHostFunctions)
            driver.launch_host_function(stream, lambda: pipe.send("passed"))
            pipe.send("queued")
            driver.synchronize_stream(stream)
            driver.synchronize_event(event)
            assert driver.event_done(event)
            pipe.send("waited")
        driver.destroy_event(event)
        driver.destroy_stream(stream)


def record_and_wait(pipe: Connection, exported: bytes) -> None:
    """Record an event behind work that goes on until the other end says something; made to be killed meanwhile."""
    driver = remap.driver()
    assert isinstance(driver, SupportsSharedEvents)
    driver.push_context(driver.retain_context(0))
    event, stream = driver.import_event(exported), driver.create_stream()
    assert isinstance(driver, SupportsHostFunctions)
    driver.launch_host_function(stream, lambda: wait(pipe))
    driver.record_event(event, stream)
    pipe.send("recorded")
    driver.synchronize_stream(stream)


def wait(pipe: Connection) -> None:
    """Wait until the other end says something."""
    pipe.recv()
