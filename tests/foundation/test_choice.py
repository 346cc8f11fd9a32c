"""The choice of a driver while other threads use the present one (invariant 13), and forks while rooms are loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import remap
from remap import MiB, drivers, lifetime
from remap.drivers.wrappers import Faulty

LIMIT = 30


class Halting(Faulty):
    """A driver of which one chosen call waits, when it has been made, until the test goes on."""

    def __init__(self, inner: Any) -> None:
        self.call = ""
        self.reached, self.go_on = threading.Event(), threading.Event()
        super().__init__(inner)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **keywords: Any) -> Any:
            result = call(*arguments, **keywords)
            if self.call == name:
                self.call = ""
                self.reached.set()
                assert self.go_on.wait(LIMIT)
            return result

        return made


@pytest.fixture
def halting() -> Generator[Halting]:
    """Let the tests use a driver of which a call can be held; leave the process with none."""
    driver = Halting(drivers.open())
    remap.use(driver)
    yield driver
    driver.go_on.set()
    drivers.close()


def meanwhile(halting: Halting, call: str, act: Callable[[], object], other: Callable[[], object]) -> object:
    """Begin `act` on a thread, do `other` while it is held at a call, and return what it returned or raised."""
    halting.call = call
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(act)
        try:
            assert halting.reached.wait(LIMIT)
            other()
        finally:
            halting.go_on.set()
        return held.exception(LIMIT) or held.result()


def present() -> str:
    """Return the name of the driver that the tests run on."""
    return os.environ["REMAP_DRIVER"]


@pytest.mark.parametrize("call", ["reserve", "create", "map", "set_access"])
@pytest.mark.parametrize("change", ["use", "close"])
def test_what_is_made_during_a_change_of_drivers(halting: Halting, call: str, change: str) -> None:
    """A buffer that is being made when the driver goes is refused, and never one of a driver that is shut (13)."""
    changes: dict[str, Callable[[], object]] = {"use": lambda: remap.use(present()), "close": drivers.close}
    outcome = meanwhile(halting, call, lambda: remap.allocate(2 * MiB), changes[change])
    assert isinstance(outcome, remap.RemapError)
    assert not lifetime.live()
    with remap.allocate(2 * MiB) as buffer:
        buffer.fill(1)


def test_what_is_made_while_a_driver_object_takes_over(halting: Halting) -> None:
    """Also where the next driver is an object, such as a wrapper around this one, nothing of it is made late (13).

    It was, and once asleep it lost its backup with the host memory of its driver.
    """
    outcome = meanwhile(
        halting, "set_access", lambda: remap.allocate(2 * MiB), lambda: remap.use(Faulty(halting))
    )
    assert isinstance(outcome, remap.InUseError)
    assert not lifetime.live()
    assert remap.use(halting) is halting  # back again
    remap.allocate(2 * MiB).close()


def test_what_was_made_first_keeps_its_driver(halting: Halting) -> None:
    """Where the buffer is there first, the change is refused, and changes nothing (13)."""
    with remap.allocate(2 * MiB) as buffer:
        with pytest.raises(remap.InUseError, match="alive"):
            remap.use(present())
        assert remap.driver() is halting
        buffer.fill(1)
        remap.allocate(2 * MiB).close()


def test_a_late_thread_leaves_nothing_of_the_old_driver(halting: Halting) -> None:
    """A device that a thread looks up in the old driver as it goes is not found in the new one (13)."""

    def other() -> None:
        remap.use(present())
        with pytest.raises(remap.InvalidValueError):
            remap.device(99)

    meanwhile(halting, "device_count", lambda: remap.device(0), other)
    assert all(device._driver is remap.driver() for device in remap.devices())


@pytest.mark.skipif(present() != "host", reason="the granularity of the host driver can be chosen")
def test_a_late_thread_leaves_no_sizes_of_the_old_driver(halting: Halting) -> None:
    """What a thread works out for the old driver is not taken for the new one, which may have larger granules (13)."""

    def other() -> None:
        remap.use(drivers.open("host", granularity=4 * MiB))  # an object: the old driver is not shut
        with pytest.raises(remap.InvalidValueError):
            remap.allocate(1, resident=99)

    late = meanwhile(halting, "granularity", lambda: remap.allocate(1, resident=0), other)
    with remap.allocate(1, resident=0) as buffer:
        assert buffer.size == 4 * MiB
    if isinstance(late, remap.Buffer):
        late.close()
    halting.shutdown()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_in_the_middle_of_a_first_import() -> None:
    """A child that is forked while another thread loads remap's rooms can use them (invariant 10)."""
    program = """
import os, signal, sys, threading
import remap

loading, forking = threading.Event(), threading.Event()

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "remap.handles" and not forking.is_set():
            loading.set()
            assert forking.wait(30)

sys.meta_path.insert(0, Slow())
os.register_at_fork(before=forking.set)
thread = threading.Thread(target=lambda: remap.allocate)
thread.start()
assert loading.wait(30)
child = os.fork()
if not child:
    signal.alarm(20)
    remap.allocate(1).close()
    os._exit(0)
thread.join()
assert os.waitpid(child, 0)[1] == 0
"""
    environment = {**os.environ, "REMAP_DRIVER": "host"}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], check=True, timeout=2 * LIMIT, env=environment
    )
