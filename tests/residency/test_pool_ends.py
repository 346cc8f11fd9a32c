"""The pool of host memory as it closes, is interrupted, or gets no thread: nothing is lost or touched late."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import remap
from remap import MiB, drivers, lifetime
from remap.errors import ClosedError, InUseError
from remap.residency import HostPool, pages, present
from remap.residency.arenas import SLAB
from remap.residency.jobs import Job
from remap.testing.bench import wait_until
from remap.testing.stage import Stage

from .support import SIZE, Pinning, filled, holds, interrupted, settled

pytest_plugins = ("remap.testing.stage",)

# Where an interrupt meets a generator that is being closed, Python can only print it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def everywhere(act: Callable[[], object], first: Callable[[], object] = lambda: None) -> Generator[int]:
    """Do `first`, then `act` interrupted one place later each time, until it ends by itself; yield which place."""
    for nth in range(1, 1000):
        first()
        stopped = interrupted(act, nth)
        yield nth
        if not stopped:
            assert nth > 10, "it was hardly interrupted at all"
            return
    pytest.fail("the operation has no end")


def host_only(why: str) -> None:
    """Skip on CUDA."""
    if os.environ["REMAP_DRIVER"] == "cuda":
        pytest.skip(why)


def addresses() -> int:
    """Return the bytes of addresses that this process has."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize:"))


@contextmanager
def no_threads() -> Generator[None]:
    """Let no thread be started: each would need a stack for which there are no addresses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = threading.stack_size(256 * MiB)
    resource.setrlimit(resource.RLIMIT_AS, (addresses() + 64 * MiB, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        threading.stack_size(before)


def test_a_closed_pool_refuses(stage: Stage) -> None:
    """Who got the pool just before its driver was changed is refused, and what comes late touches nothing."""
    pool = remap.host_pool(prepare=SLAB)
    pool.wait()
    (arena,) = pool._arenas.values()
    slab = arena.slabs[0]
    remap.use(stage.inner)
    try:
        with pytest.raises(ClosedError, match=r"remap\.host_pool\(\) again"):
            pool.configure(None, SLAB)
        with pytest.raises(ClosedError):
            pool.take([SLAB], remap.device(0))
        assert pool.trim() == pool.statistics().held == 0
        assert "closed" in repr(pool)
        assert remap.host_pool() is not pool
        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        where = ctypes.c_void_p(slab.address)  # not taken from anybody: MAP_FIXED_NOREPLACE
        flags = 0x02 | 0x20 | 0x100000
        got = libc.mmap(where, ctypes.c_size_t(SLAB), 3, flags, -1, ctypes.c_long(0))
        if got != slab.address:
            pytest.skip("something else came to lie where the pool was")
        ctypes.memset(slab.address, 7, SLAB)
        pool._drop(slab, None, Job())
        pool._fill(arena, slab, None, None, Job())
        assert ctypes.string_at(slab.address, SLAB) == bytes([7]) * SLAB
        pages.give_back(slab.address, SLAB)
    finally:
        remap.use(stage.recording)


def test_a_pool_that_is_closing_refuses(stage: Stage) -> None:
    """While closing waits for what goes on in the background, nothing new is begun."""
    if not hasattr(stage.inner, "register_pinned"):
        pytest.skip("the driver has no pinned memory, and nothing holds the threads back that touch it")
    driver = Pinning(drivers.open())
    remap.use(driver)
    try:
        pool = remap.host_pool(prepare=SLAB)
        closing = threading.Thread(target=drivers.close)
        closing.start()
        assert wait_until(lambda: pool._closed)
        with pytest.raises(ClosedError):
            pool.configure(None, 2 * SLAB)
        with pytest.raises(ClosedError):
            pool.take([SLAB], remap.device(0))
        driver.let.set()
        closing.join()
        figures = pool.statistics()
        assert (figures.held, figures.leaving, pool._arenas) == (0, 0, {})
    finally:
        driver.let.set()
        remap.use(stage.recording)


def test_a_driver_that_is_left_gets_no_pool(stage: Stage) -> None:
    """Nobody would close it."""
    remap.use(stage.inner)
    driver = remap.driver()
    try:
        lifetime.leave(driver)
        with pytest.raises(InUseError, match="another thread has changed the driver"):
            remap.host_pool()
        lifetime.enter(driver)
        assert remap.host_pool() is remap.host_pool()
    finally:
        lifetime.enter(driver)
        remap.use(stage.recording)


def test_a_thread_that_comes_late_leaves_the_next_pool_alone(stage: Stage) -> None:
    """Who asks for the pool of the driver before is refused, and the backups in the present one stay."""
    remap.use(stage.inner)
    try:
        with remap.allocate(SLAB) as buffer:
            buffer.fill(7)
            remap.pause(buffer)
            with pytest.raises(InUseError, match="another thread has changed the driver"):
                present.current_pool(stage.recording)
            remap.resume(buffer)
            assert (buffer.to_host() == 7).all()
    finally:
        remap.use(stage.recording)


def test_an_interrupt_as_the_pool_closes(stage: Stage) -> None:
    """Wherever it comes, the next change of drivers gives all memory and addresses back; the limit stays till then."""
    host_only("the places are those of Python, the same for both drivers; each would take time of a GPU")
    remap.use(stage.inner)
    ways: list[Any] = [stage.inner, stage.recording]
    pools: list[HostPool] = []

    def prepare() -> None:
        pools[:] = [remap.host_pool(limit="1GiB", prepare=SLAB)]
        pools[0].wait()

    before = addresses()
    for _ in everywhere(lambda: remap.use(ways[1]), prepare):
        if remap.driver() is ways[0] and present._pools.pool is not None:
            assert remap.host_pool().limit == 1 << 30
        remap.use(ways[1])
        ways.reverse()
        (pool,) = pools
        assert present._pools.pool is None
        assert (pool._arenas, pool.statistics().held) == ({}, 0)
        assert addresses() - before < 64 * SLAB  # threads take some
    remap.use(stage.recording)


def test_an_interrupt_as_memory_goes(stage: Stage) -> None:
    """Wherever it comes into a trim, the next one gives everything back."""
    host_only("the places are those of Python, the same for both drivers; each would take time of a GPU")
    pool = remap.host_pool()

    def prepare() -> None:
        remap.host_pool(prepare=SLAB)
        pool.wait()

    for nth in everywhere(pool.trim, prepare):
        pool.trim()
        figures = pool.statistics()
        assert (figures.held, figures.leaving, figures.pinned) == (0, 0, 0), f"place {nth}"


def test_an_interrupt_as_memory_comes(stage: Stage) -> None:
    """Wherever it comes into preparing, what is held and what is leaving are counted once, and can be had again."""
    host_only("the places are those of Python, the same for both drivers; each would take time of a GPU")
    pool = remap.host_pool()
    for nth in everywhere(lambda: remap.host_pool(prepare=SLAB)):
        (extent,) = pool.take([SLAB], remap.device(0))
        extent.ready()
        pool.give(extent, False)
        pool.trim()
        figures = pool.statistics()
        assert (figures.held, figures.leaving, figures.used) == (0, 0, 0), f"place {nth}"


def test_no_thread_can_be_had(stage: Stage) -> None:
    """Then a pause and a trim fail and change nothing, and what backups give back stays until the next time."""
    host_only("CUDA starts threads and takes addresses of its own as it goes")
    pool = remap.host_pool(prepare=SLAB)  # its addresses are reserved from here on
    pool.trim()
    with filled(SIZE) as buffers:
        with no_threads(), pytest.raises(RuntimeError, match="thread"):
            remap.pause(buffers)
        assert holds(buffers)
        assert pool.statistics().held == pool.statistics().leaving == 0
        (extent,) = pool.take([SLAB], remap.device(0))
        extent.ready()
        with no_threads():
            pool.give(extent, False)
            figures = pool.statistics()
            assert (figures.held, figures.ready, figures.leaving) == (SLAB, SLAB, 0)
            assert any("given back yet" in note for note in figures.notes)
            with pytest.raises(RuntimeError, match="thread"):
                pool.trim()
            assert pool.statistics().held == SLAB
        assert pool.trim() == SLAB
        remap.pause(buffers)
        remap.resume(buffers)
        assert holds(buffers)
    assert settled()


def test_memory_that_is_still_locked_is_not_discarded(stage: Stage) -> None:
    """What could not be unlocked keeps its pages, whatever is wrong with them when it is to be used again."""
    if not hasattr(stage.inner, "register_pinned"):
        pytest.skip("the driver has no pinned memory")
    pool = remap.host_pool()
    pool.trim()
    (extent,) = pool.take([SLAB], remap.device(0))
    extent.ready()
    stage.faulty.fail("unregister_pinned")
    pool.give(extent, False)
    pool.wait()
    ctypes.memset(extent.address, 7, SLAB)
    libc: Any = ctypes.CDLL(None, use_errno=True)
    where, size = ctypes.c_void_p(extent.address), ctypes.c_size_t(SLAB)
    assert not libc.mprotect(where, size, 1)  # so that touching it would fail
    (again,) = pool.take([SLAB], remap.device(0))
    assert again.address == extent.address
    again.ready()
    assert not libc.mprotect(where, size, 3)
    assert ctypes.string_at(extent.address, SLAB) == bytes([7]) * SLAB
    pool.give(again, False)
    assert settled()


def test_it_tells_its_figures(stage: Stage) -> None:
    """Its text has what it holds, for backups and for the next, and its limit."""
    pool = remap.host_pool(limit="1GiB")
    pool.trim()
    with filled(SIZE) as buffers:
        remap.pause(buffers)
        assert repr(pool) == "<remap.HostPool: 32 MiB held, 4 MiB used, 0 B ready, limit 1 GiB>"
        remap.resume(buffers)
    pool.configure(1 << 60, 0)


def test_a_forked_child_is_told_whose_pool_it_has(stage: Stage) -> None:
    """The parent's pool and what wakes there are refused, also where a thread held the lock at the fork (10)."""
    if stage.inner.name == "cuda":
        pytest.skip("CUDA does not survive a fork")
    pool = remap.host_pool()
    with filled(SIZE, SIZE) as buffers:
        remap.pause(buffers)
        waking = remap.resume(buffers, events=True)
        asks: list[Callable[[], object]] = [
            waking.wait, lambda: waking.result, pool.statistics, pool.trim, pool.wait, pool.close,
            lambda: pool.configure(None, 0), lambda: pool.take([1], remap.device(0)), lambda: pool.give_all([], False),
        ]  # fmt: skip
        with pool._lock(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                told = "forked" in repr(pool)
                for ask in asks:
                    try:
                        ask()
                        told = False
                    except remap.ForkedError:
                        pass
                os._exit(0 if told else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert waking.wait().buffers == 2
        assert holds(buffers)
