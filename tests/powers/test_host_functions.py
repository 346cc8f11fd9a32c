"""SupportsHostFunctions: Python functions in the order of a stream."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest

from remap.drivers.powers import SupportsHostFunctions
from remap.drivers.protocol import Driver
from remap.testing.bench import wait_until

from .conftest import Desk


def powers(driver: Driver) -> SupportsHostFunctions:
    """Return the driver as one that has the power."""
    assert isinstance(driver, SupportsHostFunctions)
    return driver


def test_order(desk: Desk) -> None:
    """Functions run in the order of their stream, after the work before them, on another thread."""
    stream, seen = desk.stream(), list[tuple[int, int]]()

    def note(number: int) -> None:
        seen.append((number, threading.get_ident()))

    address = desk.driver.allocate(64)
    gate = desk.gate(stream)
    for number in range(20):
        desk.driver.fill(address, number, 1, 64, stream)
        powers(desk.driver).launch_host_function(stream, partial(note, number))
    assert not seen
    gate.set()
    desk.driver.synchronize_stream(stream)
    assert [number for number, _ in seen] == list(range(20))
    assert all(thread != threading.get_ident() for _, thread in seen)
    desk.driver.free(address)


def test_streams_are_concurrent(desk: Desk) -> None:
    """A stream that a function holds up does not hold up another (though its functions may have to wait on CUDA)."""
    first, second = desk.stream(), desk.stream()
    address = desk.driver.allocate(64)
    gate = desk.gate(first)
    desk.driver.fill(address, 1, 1, 64, second)
    desk.driver.synchronize_stream(second)
    assert not desk.driver.stream_done(first)
    gate.set()
    desk.driver.free(address)


class Thing:
    """Something that can be referred to weakly."""

    def called(self) -> None:
        """Do nothing."""


def test_the_function_lives_until_it_was_called(desk: Desk) -> None:
    """The driver alone keeps a function until its call, and lets go of it afterwards."""
    stream, thing = desk.stream(), Thing()
    reference = weakref.ref(thing)
    gate = desk.gate(stream)
    powers(desk.driver).launch_host_function(stream, thing.called)
    del thing
    gc.collect()
    assert reference() is not None
    gate.set()
    desk.driver.synchronize_stream(stream)
    assert wait_until(lambda: reference() is None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_it_raises_stops_nothing(desk: Desk) -> None:
    """An exception in a host function reaches threading.excepthook, and the stream goes on."""
    stream, seen = desk.stream(), list[int]()
    powers(desk.driver).launch_host_function(stream, lambda: seen.append(1 // 0))
    powers(desk.driver).launch_host_function(stream, lambda: seen.append(2))
    desk.driver.synchronize_stream(stream)
    assert seen == [2]
