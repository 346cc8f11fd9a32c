"""Simulated machines for a block: what is left in them is closed, and the machine before comes back as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest

import remap
from remap import MiB, drivers, lifetime
from remap.drivers.graph_powers import CaptureMode, SupportsCapture
from remap.testing import simulated

SIZE = 4 * MiB


def test_the_machine_before_comes_back() -> None:
    """After the block the same driver is used as before it, with its options and whatever is wrapped around it."""
    before, devices = remap.driver(), remap.devices()
    with simulated(devices=3, memory=["64MiB", "32MiB", "8MiB"]) as driver:
        assert remap.driver() is driver
        assert [one.memory().total >> 20 for one in remap.devices()] == [64, 32, 8]
        with simulated(devices=1):
            assert len(remap.devices()) == 1
        assert remap.driver() is driver
        inside = remap.device(2)
    assert remap.driver() is before
    assert remap.devices() == devices
    with remap.allocate(SIZE) as buffer:
        buffer.fill(1)
    assert repr(inside) == "<remap.Device 2 of the host driver: the host driver was shut down>"
    with pytest.raises(remap.DriverError, match=r'was shut down\. Open another: remap\.use\("host"\)'):
        inside.memory()


def test_without_a_machine_before() -> None:
    """Where no driver was open, none is afterwards."""
    present = drivers.current()
    drivers.close(shutdown=False)
    try:
        with simulated():
            remap.allocate(SIZE).close()
        assert drivers.opened() is None
    finally:
        remap.use(present)


def test_what_is_left_open_is_closed_and_told() -> None:
    """A block that ends with objects alive closes them and says so; the next machine is not refused."""
    kept: list[Any] = []
    told = r"2 objects left open, and closed: stream .*; buffer .* of 4 MiB"
    with pytest.warns(remap.RemapWarning, match=told), simulated():
        kept += [remap.Stream(), remap.allocate(SIZE, resident=0)]
        kept[1].fill(1, stream=kept[0])
    assert all(one.closed for one in kept)
    with simulated():
        pass


def test_a_block_that_fails_keeps_its_error() -> None:
    """What a failed block has left is closed, and a note on its error (the objects are in the traceback)."""
    made: list[Any] = []
    with pytest.raises(ZeroDivisionError) as caught, simulated() as driver:
        assert isinstance(driver, SupportsCapture)
        made += [remap.allocate(SIZE), remap.Stream()]
        with remap.device().current():
            driver.begin_capture(made[1].handle, CaptureMode.THREAD_LOCAL)
        raise ZeroDivisionError
    assert all(one.closed for one in made)
    notes = caught.value.__notes__
    assert [note.split()[4] for note in notes] == ["buffer", "stream"]


def test_what_others_look_at_stays_until_they_go() -> None:
    """Memory in use by an array of another library cannot be closed: it stays readable, and goes with the array."""
    host = remap.Host()
    with pytest.warns(remap.RemapWarning, match="left open"), simulated() as driver:
        buffer = remap.allocate(SIZE, resident=host, accessing=[host, 0])
        buffer.fill(7)
        view = buffer.array().numpy()
        registered = remap.allocate(SIZE)
        registered.registered("another library")
    assert remap.driver() is not driver
    assert buffer not in lifetime.live()
    assert registered.closed
    assert (view == 7).all()
    remap.use(remap.driver())
    del view
    buffer.close()
    assert driver.device_count() > 0, "it is not shut down, since somebody looked"


def test_a_machine_that_is_refused_leaves_nothing() -> None:
    """While an object of the present driver lives, the block is refused, and the object goes on."""
    with remap.allocate(SIZE) as buffer:
        with pytest.raises(remap.InUseError, match=r"alive: buffer .*remap\.testing\.plugin"), simulated():
            pass
        buffer.fill(1)


def test_a_driver_that_was_shut_down_is_refused() -> None:
    """A driver ends when another is named; to use it again is refused at once, also inside of a wrapper."""
    from remap.drivers.wrappers import Faulty

    with simulated(devices=3) as ended:
        wrapper = Faulty(ended)
        remap.use("host", devices=1)
        for one in (ended, wrapper):
            with pytest.raises(remap.InvalidValueError, match=r"was shut down.*simulated"):
                remap.use(one)
        assert len(remap.devices()) == 1
        drivers.close()
        wrapper = Faulty(drivers.open("host"))
        remap.use(wrapper)
        drivers.close()
        with pytest.raises(remap.InvalidValueError, match="was shut down"):
            remap.use(wrapper.inner)
        last = remap.use("host")
    with pytest.raises(remap.DriverError, match="was shut down"):
        last.device_count()


def test_wrong_options_change_nothing() -> None:
    """A machine that cannot be leaves the present one."""
    before = remap.driver()
    with pytest.raises(remap.InvalidValueError, match=re.escape("device=")), simulated(device=3):
        pass
    assert remap.driver() is before
