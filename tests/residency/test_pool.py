"""The pool of host memory: its limit, what is prepared or kept, and that the rest is given back."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB, drivers
from remap.residency import pages
from remap.residency.arenas import SLAB, STRETCH, PageChoice
from remap.residency.hostpool import _WORKERS as WORKERS
from remap.residency.hostpool import HostPool
from remap.testing.stage import Stage

from .support import SIZE, Pinning, contents, filled, holds, settled

pytest_plugins = ("remap.testing.stage",)


@pytest.fixture(name="pool")
def _pool(stage: Stage) -> Generator[HostPool]:
    del stage
    pool = remap.host_pool()
    pool.trim()
    yield pool
    pool.trim()
    pool.configure(1 << 60, 0)


def test_memory_is_given_back_or_kept(pool: HostPool) -> None:
    """After a resume host memory is released, unless that call asks to keep it; trim gives it back (traps 6, 15)."""
    with filled(SIZE, 2 * SIZE) as buffers:
        assert remap.pause(buffers).host == SLAB
        woken = remap.resume(buffers, keep_host=True)
        figures = pool.statistics()
        assert (woken.host, figures.held, figures.ready, figures.used) == (SLAB, SLAB, SLAB, 0)
        remap.pause(buffers)
        assert pool.statistics().used == 3 * SIZE
        assert pool.statistics().held == SLAB, "what was kept is used again"
        remap.resume(buffers)
        assert settled(), "an option of one call is none of the next"
        remap.pause(buffers)
        remap.resume(buffers, keep_host=True)
        assert pool.trim() == SLAB
        assert pool.statistics().held == 0
        assert holds(buffers)


def test_prepared_memory(pool: HostPool) -> None:
    """What is prepared is there before the first pause, and stays after it, until nothing is to be prepared."""
    remap.host_pool(prepare=3 * SLAB - 5)
    pool.wait()
    figures = pool.statistics()
    assert (figures.held, figures.ready, figures.prepared) == (3 * SLAB, 3 * SLAB, 3 * SLAB - 5)
    with filled(SLAB, SLAB) as buffers:
        remap.pause(buffers)
        assert pool.statistics().held == 3 * SLAB
        remap.resume(buffers)
        pool.wait()
        assert pool.statistics().ready == 3 * SLAB
        assert holds(buffers)
    remap.host_pool(prepare=0)
    assert settled()


def test_the_limit(pool: HostPool) -> None:
    """Beyond the limit a pause is refused with its figures and the ways out; nothing has happened then (9)."""
    remap.host_pool(limit=2 * SLAB)
    with filled(SLAB, SLAB, 2 * MiB) as buffers:
        with pytest.raises(remap.OutOfMemoryError, match=r"limit is 64 MiB.*keep=\"disk\""):
            remap.pause(buffers)
        assert pool.statistics().held == 0
        assert holds(buffers)
        remap.pause(buffers[:2])
        with pytest.raises(remap.OutOfMemoryError, match="64 MiB are in use"):
            remap.pause(buffers[2])
        remap.resume(buffers[0])
        remap.pause(buffers[2])
        remap.resume(buffers)
        assert holds(buffers)
    with pytest.raises(remap.InvalidValueError, match="limit"):
        remap.host_pool(prepare=4 * SLAB)
    assert pool.statistics().prepared == 0


def test_ready_memory_makes_room(pool: HostPool) -> None:
    """Memory that only waits for use does not count against a pause under the limit."""
    remap.host_pool(limit=2 * SLAB)
    with filled(SLAB, SLAB) as buffers:
        remap.pause(buffers)
        remap.resume(buffers[0], keep_host=True)
        remap.resume(buffers[1], keep_host=True)
        with filled(2 * SLAB) as (larger,):
            remap.pause(larger)
            assert pool.statistics().held <= 2 * SLAB
            remap.resume(larger)


@pytest.mark.parametrize("limit", [5 * SLAB, 7 * SLAB])
def test_as_much_ready_memory_goes_as_must(pool: HostPool, limit: int) -> None:
    """What was kept at low addresses makes room as well, and no more of it than is needed: the limit holds (9)."""
    remap.host_pool(limit=limit)
    with filled(SLAB, SLAB, SLAB, SLAB) as buffers, remap.allocate(4 * SLAB, resident=0) as larger:
        remap.pause(buffers)
        remap.resume(buffers[:3], keep_host=True)
        for buffer in buffers[:3]:
            buffer.close()
        figures = pool.statistics()
        assert (figures.held, figures.used, figures.ready) == (4 * SLAB, SLAB, 3 * SLAB)
        remap.pause(larger)  # too long for the gap that they left
        figures = pool.statistics()
        assert (figures.held, figures.used) == (limit, 5 * SLAB)


@pytest.mark.parametrize("when", ["kept", "used"])
def test_a_lower_limit(pool: HostPool, when: str) -> None:
    """A limit below what is held gives back what no backup uses, kept or not, and the rest as soon as it is free."""
    with filled(SLAB, SLAB, SLAB) as buffers:
        remap.pause(buffers)
        if when == "used":
            remap.host_pool(limit=SLAB)
            assert pool.statistics().held == 3 * SLAB
        remap.resume(buffers, keep_host=True)
        if when == "kept":
            assert pool.statistics().held == 3 * SLAB
            remap.host_pool(limit=SLAB)
        figures = pool.statistics()
        assert (figures.held, figures.ready) == (SLAB, SLAB)
        assert holds(buffers)


def test_a_machine_without_so_much(pool: HostPool) -> None:
    """More than the machine has is refused before any of it is touched."""
    with pytest.raises(remap.OutOfMemoryError, match="the machine has"):
        remap.host_pool(prepare="1000TiB")
    pool.configure(None, 0)
    assert pool.statistics().held == 0


def test_memory_that_cannot_be_locked(stage: Stage, pool: HostPool) -> None:
    """Where pages cannot be locked, copies are slower and as right, and the result says so (trap 17)."""
    if not hasattr(stage.inner, "register_pinned"):
        pytest.skip("the driver has no pinned memory")
    stage.faulty.fail("register_pinned", repeat=True)
    with filled(SIZE) as buffers:
        slept = remap.pause(buffers)
        assert any("could not be page-locked" in note for note in slept.notes)
        assert pool.statistics().pinned == 0
        remap.resume(buffers)
        assert holds(buffers)
    stage.faulty.heal()


def test_a_pool_goes_with_its_driver(stage: Stage) -> None:
    """When another driver takes over, the pool of the old one is given back, and the new one begins with none."""
    with filled(SIZE) as buffers:
        remap.pause(buffers)
        remap.resume(buffers, keep_host=True)
    old = remap.host_pool()
    assert old.statistics().held == SLAB
    remap.use(stage.inner)
    try:
        assert old.statistics().held == 0
        assert remap.host_pool() is not old
        assert remap.host_pool().statistics().held == 0
    finally:
        remap.use(stage.recording)


def test_memory_that_cannot_be_unlocked_stays(stage: Stage) -> None:
    """Host memory whose unlocking failed keeps its pages, which the device may still write to, and serves again."""
    pool = remap.host_pool()
    with filled(SIZE) as buffers:
        remap.pause(buffers)
        address = buffers[0]._backup.extent.address
        stage.faulty.fail("unregister_pinned")
        remap.resume(buffers)
        pool.wait()
        stage.faulty.heal()
        assert any("could not be unlocked" in note for note in pool.statistics().notes)
        marked = stage.mark()
        remap.pause(buffers)
        assert buffers[0]._backup.extent.address == address
        assert "register_pinned" not in stage.names_since(marked), "it is still locked"
        assert np.array_equal(remap.backup(buffers[0]), contents(0))
        remap.resume(buffers)
        assert holds(buffers)
    pool.wait()


@pytest.mark.parametrize("repeat", [False, True])
def test_a_pool_goes_and_memory_cannot_be_unlocked(stage: Stage, repeat: bool) -> None:
    """The addresses of what is still locked go to nobody else: the device would copy to and from the old pages."""
    with filled(SLAB, SLAB, SLAB) as buffers:
        remap.pause(buffers)
        slabs = [buffer._backup.extent.address for buffer in buffers]
        remap.resume(buffers)
    pool = remap.host_pool()
    pool.wait()
    with filled(SLAB, SLAB, SLAB) as buffers:
        remap.pause(buffers)
        assert [buffer._backup.extent.address for buffer in buffers] == slabs
        stage.faulty.fail("unregister_pinned", nth=2, repeat=repeat)
        remap.resume(buffers)
    remap.use(stage.inner)  # which closes the pool, where unlocking is tried again
    stage.faulty.heal()
    locked = [slab for slab in slabs if _is_taken(slab)]
    assert len(locked) == (2 if repeat else 0)
    driver: Any = stage.inner
    for slab in locked:
        with remap.device().current():
            driver.unregister_pinned(slab)
        pages.give_back(slab, SLAB)
    remap.use(stage.recording)


def _is_taken(address: int) -> bool:
    """Tell whether something of this process lies at an address."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        pytest.skip(f"what lies where cannot be read: {error}")
    ranges = [[int(number, 16) for number in line.split()[0].split("-")] for line in lines]
    return any(start <= address < end for start, end in ranges)


def test_no_room_for_more_data(pool: HostPool) -> None:
    """Where the system counts memory before it is touched, a backup is refused there, and nothing is changed (5)."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with filled(SIZE) as buffers:
        remap.pause(buffers)
        remap.resume(buffers)
        pool.trim()
        (arena,) = pool._arenas.values()
        opened = arena._open
        resource.setrlimit(resource.RLIMIT_DATA, (used + SLAB, hard))
        try:
            with pytest.raises(remap.OutOfMemoryError, match="of host memory for a backup"):
                pool.take([64 * SLAB], remap.device(0))
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        figures = pool.statistics()
        assert (figures.held, figures.used) == (0, 0)
        assert arena._open == opened
        remap.pause(buffers)
        remap.resume(buffers)
        assert holds(buffers)


@pytest.mark.parametrize("faster", [True, False])
def test_pages_are_those_that_are_sooner_ready(faster: bool) -> None:
    """Large pages come first, then the small are tried; the faster are taken then, the others tried now and again."""
    choice = PageChoice()
    assert [choice.next() for _ in range(3)] == [True, False, True]
    for large in (True, False):
        choice.note(large, 1.0 if large is faster else 2.0)
    later = [choice.next() for _ in range(64)]
    assert later.count(not faster) == 4
    for _ in range(8):  # it changes its mind when the times do
        choice.note(faster, 3.0)
    assert choice.large is not faster


def test_a_stretch_has_one_kind_of_pages(pool: HostPool) -> None:
    """Whoever asks decides for the slabs around it, and for them alone, until somebody asks again."""
    with pool._lock():
        arena = pool._arena(remap.device(0))
        first, beside, behind = (arena.slab(index) for index in (STRETCH, STRETCH + 1, 2 * STRETCH))
    assert arena.pages_of(first, None), "large ones are what it begins with"
    assert not arena.pages_of(first, lambda: False)
    assert not arena.pages_of(beside, None)
    assert arena.pages_of(behind, None)
    assert arena.pages_of(beside, lambda: True)
    assert arena.pages_of(first, None)


@pytest.mark.parametrize("again", [False, True])
def test_memory_that_could_not_be_had_and_is_given_back(stage: Stage, again: bool) -> None:
    """It is counted as gone once, also where that is found out only after it was given back, or taken again."""
    if not hasattr(stage.inner, "register_pinned"):
        pytest.skip("the driver has no pinned memory, and nothing holds the threads back that touch it")
    driver = Pinning(drivers.open())
    remap.use(driver)
    try:
        pool = remap.host_pool()
        several = pool.take([SLAB] * (WORKERS + 1), remap.device(0))  # the last waits for a thread
        last = several.pop()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p

        def put(file: int, flags: int) -> None:
            where = ctypes.c_void_p(last.address)
            got = libc.mmap(
                where,
                ctypes.c_size_t(SLAB),
                mmap.PROT_READ | mmap.PROT_WRITE,
                flags | 0x10,
                file,
                ctypes.c_long(0),
            )
            assert got == last.address

        empty = os.memfd_create("empty")
        put(empty, mmap.MAP_SHARED)  # there is no memory behind it, and none can be had
        pool.give(last, False)
        if again:
            (last,) = pool.take([SLAB], remap.device(0))
        driver.let.set()
        for extent in several:
            extent.ready()
        pool.wait()
        held = len(several) * SLAB
        assert pool.statistics().held == held
        if again:
            with pytest.raises(remap.OutOfMemoryError):
                last.ready()
            pool.give(last, False)
        put(-1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        os.close(empty)
        for extent in several:
            pool.give(extent, False)
        pool.wait()
        figures = pool.statistics()
        assert (figures.held, figures.used, figures.leaving) == (0, 0, 0)
    finally:
        driver.let.set()
        drivers.close()
        remap.use(stage.recording)
