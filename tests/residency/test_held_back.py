"""An ordered resume while its thread is held back: who can go on, who waits for it, and who is refused."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import remap
from remap import drivers
from remap.drivers.wrappers import Faulty, Recording
from remap.residency.arenas import SLAB
from remap.residency.waking import Waking
from remap.testing.bench import wait_until

from .support import SIZE, acts, contents, filled

THREAD = "remap-resume"


class Gate(Faulty):
    """A driver that lets the thread of an ordered resume make its copies only when it is opened."""

    def __init__(self, inner: Any) -> None:
        self.opened = threading.Event()
        super().__init__(inner)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        checked = super()._wrap(name, call)

        def held(*arguments: Any, **keywords: Any) -> Any:
            if name == "copy_to_device" and threading.current_thread().name == THREAD:
                assert self.opened.wait(30)
            return checked(*arguments, **keywords)

        return held


@contextmanager
def behind_a_gate(*sizes: int) -> Generator[tuple[Gate, Recording, list[remap.Buffer], Waking]]:
    """Yield buffers that wake in order, of which only the first has been brought until the gate is opened."""
    gate = Gate(drivers.open())
    driver = Recording(gate)
    remap.use(driver)
    try:
        with filled(*(sizes or [SIZE] * 3)) as buffers:
            remap.pause(buffers)
            driver.forget()
            waking = remap.resume(buffers, events=True)
            try:
                yield gate, driver, buffers, waking
            finally:
                gate.opened.set()
                waking.close()
    finally:
        drivers.close()


def waits(thread: threading.Thread) -> bool:
    """Tell whether a thread has come to wait for a condition."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "wait_for":
            return True
        frame = frame.f_back
    return False


def test_the_first_can_run_while_the_rest_comes() -> None:
    """What has been brought is used at once; events of the rest have not passed, and its users wait for their part."""
    with behind_a_gate() as (gate, driver, buffers, waking), remap.Stream(0) as stream:
        waking.events[0].synchronize()
        assert np.array_equal(buffers[0].to_host(), contents(0))
        assert not waking.events[1].done
        buffers[0].fill(5, stream=stream)
        users = [
            threading.Thread(target=buffers[1].fill, args=(7,)),
            threading.Thread(target=waking.events[1].synchronize),
            threading.Thread(target=stream.wait, args=(waking.events[2],)),
            threading.Thread(target=lambda: waking.events[2].handle),
        ]
        for user in users:
            user.start()
        assert wait_until(lambda: all(waits(user) for user in users))
        assert not driver.calls_to("fill")[1:], "it filled what was not mapped"
        gate.opened.set()
        for user in users:
            user.join(30)
        names = [(call.name, *call.arguments[:1]) for call in driver.calls]
        assert names.index(("copy_to_device", buffers[1]._address)) < names.index(
            ("fill", buffers[1]._address)
        )
        waking.close()
        assert [int(one.to_host()[0]) for one in buffers[:2]] == [5, 7]
        assert np.array_equal(buffers[2].to_host(), contents(2))


ESCAPES: dict[str, Callable[[remap.Buffer], object]] = {
    "address": lambda one: one.address,
    "chunks": lambda one: one.chunks,
    "array": lambda one: one.array().__cuda_array_interface__,
    "array_address": lambda one: one.array().address,
    "set_access": lambda one: one.set_access({0: "r"}),
    "get_access": lambda one: one.get_access(0),
    "outcome": lambda one: one.outcome(),
    "copy": lambda one: one.to_host(),
    "close": lambda one: one.close(),
    "pause": remap.pause,
    "migrate": lambda one: remap.migrate(one, remap.Host()),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_who_needs_the_whole_waits_for_it(name: str) -> None:
    """Whatever leads to a buffer that is still being mapped waits until it is."""
    with behind_a_gate() as (gate, _, buffers, waking):
        seen: list[bool] = []

        def use() -> None:
            ESCAPES[name](buffers[1])
            seen.append(buffers[1]._coming is None)

        user = threading.Thread(target=use)
        user.start()
        assert wait_until(lambda: waits(user))
        gate.opened.set()
        user.join(30)
        assert seen == [True]
        waking.close()
        if name == "pause":
            remap.resume(buffers[1])
        left = [0, 2] if name == "close" else [0, 1, 2]
        assert all(np.array_equal(buffers[one].to_host(), contents(one)) for one in left)


def test_an_interrupted_wait() -> None:
    """Ctrl-C while waiting for what is still to be mapped ends the use, and nothing else."""
    with behind_a_gate() as (_, _, buffers, waking):
        main = threading.main_thread()

        def interrupt() -> None:
            assert wait_until(lambda: waits(main))
            signal.pthread_kill(main.ident or 0, signal.SIGINT)  # interrupt_main() would not end the wait

        for act in acts(lambda: buffers[2].fill(1), waking.close):
            helper = threading.Thread(target=interrupt)
            helper.start()
            with pytest.raises(KeyboardInterrupt):
                act()
            helper.join(30)
        assert not buffers[2]._busy
        assert not waking.closed
    assert waking.closed


def test_a_child_keeps_off() -> None:
    """A forked child waits for no thread that it does not have: it is refused."""
    with behind_a_gate() as (_, _, buffers, _), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads: that is the point
        child = os.fork()
        if not child:
            told = 0
            try:
                for act in acts(lambda: buffers[2].address, lambda: buffers[2].fill(1), buffers[2].close):
                    try:
                        act()
                    except remap.ForkedError:
                        told += 1
            finally:
                os._exit(told)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 2


def closes(thread: threading.Thread, waking: Waking) -> bool:
    """Tell whether a thread is in the middle of closing a resume."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code is type(waking).close.__code__:
            return True
        frame = frame.f_back
    return False


def test_who_closes_it_second_waits_as_well() -> None:
    """Closing has waited for everything when it returns, also where another thread is at it."""
    with behind_a_gate() as (gate, _, _, waking):
        seen: list[bool] = []

        def close() -> None:
            waking.close()
            seen.append(waking.closed)

        first, second = threading.Thread(target=close), threading.Thread(target=close)
        first.start()
        assert wait_until(lambda: waits(first))
        assert waking.result.seconds < waking.result.seconds, "until it is closed, figures are of the moment"
        second.start()
        assert wait_until(lambda: not second.is_alive() or closes(second, waking))
        gate.opened.set()
        first.join(30)
        second.join(30)
        assert seen == [True, True]
        assert waking.result is waking.result


def test_a_child_closes_what_its_parent_is_closing() -> None:
    """It does nothing in the child, and waits for no lock that a thread of the parent holds."""
    with behind_a_gate() as (gate, _, _, waking), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        closer = threading.Thread(target=waking.close)
        closer.start()
        assert wait_until(lambda: waits(closer))
        child = os.fork()
        if not child:
            signal.alarm(30)  # it would wait for ever
            try:
                waking.close()
            finally:
                os._exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        gate.opened.set()
        closer.join(30)


class Lingering(Faulty):
    """A driver on which the thread called "user" comes to wait for a stream, and does so only when it is let."""

    def __init__(self, inner: Any) -> None:
        self.come, self.let = threading.Event(), threading.Event()
        super().__init__(inner)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        checked = super()._wrap(name, call)

        def lingering(*arguments: Any, **keywords: Any) -> Any:
            if name.startswith("synchronize_") and threading.current_thread().name == "user":
                self.come.set()
                assert self.let.wait(30)
            return checked(*arguments, **keywords)

        return lingering


@pytest.mark.parametrize("use", ["buffer", "event"])
def test_streams_and_events_outlive_who_waits_for_them(use: str) -> None:
    """Closing destroys no stream and no event that another thread is about to wait for."""
    driver = Lingering(drivers.open())
    remap.use(driver)
    try:
        with filled(SIZE) as buffers:
            remap.pause(buffers)
            waking = remap.resume(buffers, events=True)
            errors: list[BaseException] = []

            def wait() -> None:
                try:
                    if use == "buffer":
                        buffers[0].set_access({0: "r"})
                    else:
                        waking.events[0].synchronize()
                except BaseException as error:  # noqa: BLE001 (told to the test)
                    errors.append(error)

            user = threading.Thread(target=wait, name="user")
            user.start()
            assert driver.come.wait(30)
            waking.close()
            driver.let.set()
            user.join(30)
            assert errors == []
    finally:
        drivers.close()


class Paced(Faulty):
    """A driver that locks the last of some slabs of host memory, by address, only when the first copy is queued."""

    def __init__(self, inner: Any, slabs: int) -> None:
        self._last = slabs - 1
        self._copied = threading.Event()
        super().__init__(inner)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        checked = super()._wrap(name, call)

        def paced(*arguments: Any, **keywords: Any) -> Any:
            if name == "register_pinned" and self._is_last(arguments[0]):
                assert self._copied.wait(30), "everything is locked before anything is copied"
            if name == "copy_to_host":
                self._copied.set()
            return checked(*arguments, **keywords)

        return paced

    def _is_last(self, address: int) -> bool:
        arenas = remap.host_pool()._arenas.values()
        return any((address - arena.base) // SLAB == self._last for arena in arenas)


def test_host_memory_is_prepared_beside_the_copies() -> None:
    """The first pause copies into the first slabs while later ones are still touched and locked (trap 16)."""
    inner: Any = drivers.open()
    if not hasattr(inner, "register_pinned"):
        pytest.skip("the driver has no pinned memory")
    driver = Recording(Paced(inner, 4))
    remap.use(driver)
    try:
        with filled(4 * SLAB) as buffers:
            assert not remap.pause(buffers).notes
            assert len(driver.calls_to("register_pinned")) == 4
            remap.resume(buffers)
            assert np.array_equal(buffers[0].to_host(), contents(0, 4 * SLAB))
    finally:
        drivers.close()
