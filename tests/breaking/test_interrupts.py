"""Ctrl-C in the middle: what was queued is still known, what was not given back still can be."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Generator

import numpy as np
import pytest

import remap
from remap import MiB, drivers, lifetime
from remap.drivers.powers import SupportsHostFunctions
from remap.drivers.wrappers import Faulty
from remap.errors import CudaResult, driver_error
from remap.lifetime import Release

SIZE = 4 * MiB


class Interrupted(BaseException):
    """What the handler of the signal raises, as Python's own does for Ctrl-C."""


@pytest.fixture
def interrupts() -> Generator[None]:
    """Let SIGALRM raise in the main thread, as SIGINT does."""

    def stop(_number: int, _frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_copy_is_still_known() -> None:
    """A copy whose wait is interrupted goes on; closing waits for it, and the array stays until then (5, 7)."""
    if remap.driver().name != "host":
        pytest.skip("a wait inside the CUDA driver ends before a handler of Python runs")
    hold, held = threading.Event(), threading.Event()

    def wait() -> None:
        held.set()
        hold.wait(60)

    driver = remap.driver()
    with remap.allocate(SIZE) as buffer:
        with remap.device(0).current():
            driver.launch_host_function(0, wait)  # type: ignore[attr-defined]
        out = np.zeros(SIZE, np.uint8)
        holders = sys.getrefcount(out)
        try:
            assert held.wait(30)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupted):
                buffer.copy_to_host(out)
            assert sys.getrefcount(out) > holders, "nobody keeps the array that the queued copy writes into"
        finally:
            hold.set()
    assert buffer.closed


@pytest.mark.parametrize("call", ["copy_to_host", "copy_from_host"])
def test_a_copy_whose_wait_fails_is_still_known(call: str) -> None:
    """The wait fails, and the copy goes on: closing waits for it, and the array stays until then (5, 7).

    The array went, and the copy wrote over what came to lie there.
    """
    driver = Faulty(drivers.open())
    if not isinstance(driver, SupportsHostFunctions):
        pytest.skip("nothing holds the stream up")
    remap.use(driver)
    hold = threading.Event()
    try:
        with remap.allocate(SIZE, resident=0) as buffer:
            with remap.device(0).current():
                driver.launch_host_function(0, lambda: hold.wait(60))
            array = np.zeros(SIZE, np.uint8)
            holders = sys.getrefcount(array)
            driver.fail("synchronize_stream", result=CudaResult.UNKNOWN)
            with pytest.raises(remap.DriverError):
                getattr(buffer, call)(array)
            assert sys.getrefcount(array) > holders, "nobody keeps the array that the queued copy uses"
            hold.set()
        assert buffer.closed
    finally:
        hold.set()
        drivers.close()


def test_an_interrupted_release_is_not_repeated() -> None:
    """An interrupt raised as a driver call returns leaves the object closed: nothing goes twice (invariant 3)."""
    calls: list[str] = []

    def give_back() -> None:
        calls.append("release")
        raise Interrupted

    release = Release(0, [(give_back, ())])
    with pytest.raises(Interrupted):
        release.run()
    assert release.begun


def test_an_interrupted_clean_up_loses_nothing() -> None:
    """What a clean-up of collected objects had not begun when it was interrupted is done by the next (invariant 4)."""
    taken: list[int] = []

    def stop() -> None:
        raise Interrupted

    lifetime.queued.extend([Release(0, [(stop, ())]), Release(0, [(taken.append, (1,))])])
    with pytest.raises(Interrupted):
        lifetime.drain()
    assert lifetime.drain() == 1
    assert taken == [1]


def test_a_failure_made_an_error_loses_nothing() -> None:
    """Under `-W error` the report of one failed clean-up does not keep the others from being done (invariant 4)."""
    taken: list[int] = []

    def fail() -> None:
        raise driver_error("cuMemUnmap", 1)

    lifetime.queued.extend([Release(0, [(fail, ())]), Release(0, [(taken.append, (1,))])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(remap.RemapWarning):
            lifetime.drain()
    assert lifetime.drain() == 1
    assert taken == [1]


def test_a_refused_clean_up_is_tried_again() -> None:
    """A clean-up that is refused has changed nothing: it stays queued, in silence, and is done later (invariant 4)."""
    taken: list[int] = []
    refusing = [True]

    def unmap() -> None:
        if refusing:
            raise remap.InUseError("unmapping", rule="work is queued")
        taken.append(1)

    lifetime.queued.append(Release(0, [(unmap, ())]))
    assert lifetime.drain() == 0
    refusing.clear()
    assert lifetime.drain() == 1
    assert taken == [1]
