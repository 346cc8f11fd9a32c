"""Pause and resume: what stays, what is given back, what is refused."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB
from remap.buffers.plain import allocate_plain
from remap.testing.bench import wait_until
from remap.testing.stage import Stage

from .support import SIZE, acts, contents, filled, holds, settled

pytest_plugins = ("remap.testing.stage",)

KEEPS = ("host", "disk")


@pytest.mark.parametrize("keep", KEEPS)
def test_contents_and_addresses_stay(stage: Stage, keep: Any, tmp_path: Path) -> None:
    """Memory goes back while a buffer sleeps; address, rights and every byte are there when it wakes."""
    with filled(SIZE, 3 * SIZE, SIZE) as buffers:
        addresses, rights = [one.address for one in buffers], [one.access for one in buffers]
        held = remap.device(0).memory().free
        slept = remap.pause(buffers, keep, directory=tmp_path)
        assert remap.device(0).memory().free >= held + 5 * SIZE - stage.slack
        assert (slept.buffers, slept.bytes, slept.freed) == (3, 5 * SIZE, 5 * SIZE)
        assert abs(slept.confirmed - 5 * SIZE) <= stage.slack
        assert slept.host >= (5 * SIZE if keep == "host" else 0)
        assert all(one.paused and not one.chunks and not one.footprint() for one in buffers)
        woken = remap.resume(buffers)
        assert (woken.buffers, woken.bytes, woken.freed) == (3, 5 * SIZE, 0)
        assert abs(woken.confirmed + 5 * SIZE) <= stage.slack
        assert woken.seconds > 0
        assert woken.rate == pytest.approx(woken.bytes / woken.seconds / 1e9)
        assert [one.address for one in buffers] == addresses
        assert [one.access for one in buffers] == rights
        assert holds(buffers)
    assert not os.listdir(tmp_path)
    assert settled(), "host memory is released by default (trap 15)"


def test_contents_that_were_given_up(stage: Stage) -> None:
    """Without a backup nothing is copied; on request the memory is poisoned when it wakes (invariant 8, trap 18)."""
    with filled(SIZE, SIZE) as buffers:
        mark = stage.mark()
        slept = remap.pause(buffers, None)
        assert (slept.bytes, slept.freed) == (0, 2 * SIZE)
        remap.resume(buffers, poison=True)
        assert not {"copy_to_host", "copy_to_device"} & set(stage.names_since(mark))
        assert all((one.to_host() == 0xCB).all() for one in buffers)


@pytest.mark.parametrize("access", ["none", "r"])
@pytest.mark.parametrize("keep", KEEPS)
def test_memory_that_nobody_may_write(stage: Stage, access: str, keep: Any, tmp_path: Path) -> None:
    """A buffer that no device may write, or even read, keeps its contents and gets no further right (invariant 12)."""
    del stage
    with filled(SIZE) as buffers:
        buffers[0].set_access({0: access})
        remap.pause(buffers, keep, directory=tmp_path)
        remap.resume(buffers)
        assert buffers[0].get_access(0) == access
        buffers[0].set_access({0: "rw"})
        assert holds(buffers)


def test_every_use_of_a_paused_buffer_is_refused(stage: Stage) -> None:
    """Fills, copies, views and launches are refused with the cure, and ask nothing of the driver."""
    host = bytearray(16)
    with filled(SIZE, SIZE) as (buffer, other):
        array = buffer.array()
        remap.pause(buffer)
        uses: list[Any] = [
            lambda: buffer.fill(1),
            lambda: buffer.copy_from_host(host),
            lambda: buffer.copy_to_host(host),
            lambda: buffer.copy_from(other),
            lambda: other.copy_from(buffer),
            lambda: buffer.get_access(0),
            lambda: array.__cuda_array_interface__,
        ]
        mark = stage.mark()
        for use in uses:
            with pytest.raises(remap.PausedError, match=r"remap\.resume"):
                use()
        assert not set(stage.names_since(mark)) - {"current_context"}
        remap.resume(buffer)
        buffer.fill(1)


def test_rights_that_change_while_it_sleeps(stage: Stage) -> None:
    """A right that is changed while a buffer sleeps is what it wakes with."""
    del stage
    with filled(SIZE) as buffers:
        remap.pause(buffers)
        buffers[0].set_access({0: "r"})
        remap.resume(buffers)
        with pytest.raises(remap.AccessError):
            buffers[0].fill(1)
        assert holds(buffers)


def test_pausing_and_resuming_twice(stage: Stage) -> None:
    """The second time does nothing, but for another way of keeping, which would lose the contents: that is refused."""
    with filled(SIZE) as buffers:
        assert remap.resume(buffers).buffers == 0
        remap.pause(buffers)
        mark = stage.mark()
        assert remap.pause(buffers).buffers == 0
        assert "unmap" not in stage.names_since(mark)
        for other in ("disk", None):
            with pytest.raises(remap.PausedError, match="keep='host' already"):
                remap.pause(buffers, other)
        remap.resume(buffers)
        assert remap.resume(buffers).buffers == 0
        assert holds(buffers)


def test_several_keeps_in_one_transaction(stage: Stage, tmp_path: Path) -> None:
    """Groups and buffers, each kept in its own way, sleep in one call; a contradiction is refused before it."""
    del stage
    with remap.group("weights"):
        weights = remap.allocate(SIZE, resident=0)
    with remap.group("cache"):
        cache = remap.allocate(SIZE, resident=0)
    other = remap.allocate(SIZE, resident=0)
    for seed, one in enumerate((weights, cache, other)):
        one.copy_from_host(contents(seed))
    with pytest.raises(remap.InvalidValueError, match="named twice"):
        remap.pause({"weights": "host", weights: None})
    slept = remap.pause({"weights": "host", "cache": None, other: "disk"}, directory=tmp_path)
    assert (slept.buffers, slept.bytes, slept.freed) == (3, 2 * SIZE, 3 * SIZE)
    remap.resume(["cache", weights, other], poison=True)
    assert np.array_equal(weights.to_host(), contents(0))
    assert (cache.to_host() == 0xCB).all()
    assert np.array_equal(other.to_host(), contents(2))
    for one in (weights, cache, other):
        one.close()


@pytest.mark.parametrize("keep", [*KEEPS, None])
@pytest.mark.parametrize("how", ["closed", "collected"])
def test_ending_while_paused(stage: Stage, keep: Any, how: str, tmp_path: Path) -> None:
    """A buffer that is closed, or collected, while it sleeps drops its backup (trap 2)."""
    before = stage.seen()
    buffer = remap.allocate(SIZE, resident=0)
    remap.pause(buffer, keep, directory=tmp_path)
    if how == "closed":
        buffer.close()
    else:
        with pytest.warns(ResourceWarning, match="never closed"):
            del buffer
            gc.collect()
        remap.collect()
    assert stage.unchanged(before)
    assert settled()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("keep", KEEPS)
def test_a_backup_can_be_written(stage: Stage, keep: Any, tmp_path: Path) -> None:
    """What is written into the backup of a sleeping buffer wakes with it; while it is looked at, nothing moves."""
    del stage
    with filled(SIZE, SIZE) as buffers:
        with pytest.raises(remap.InvalidValueError, match="not paused"):
            remap.backup(buffers[0])
        remap.pause(buffers, keep, directory=tmp_path)
        view = remap.backup(buffers[1])
        assert np.array_equal(view, contents(1))
        view[100:200] = 7
        part = view[:10]
        del view
        for act in acts(lambda: remap.resume(buffers), buffers[1].close):
            with pytest.raises(remap.InUseError, match="viewed through"):
                act()
        del part
        remap.resume(buffers)
        assert (buffers[1].to_host()[100:200] == 7).all()
        buffers[1].copy_from_host(contents(1)[:200])
        assert holds(buffers)
        remap.pause(buffers, None)
        with pytest.raises(remap.InvalidValueError, match="given up"):
            remap.backup(buffers[0])
        remap.resume(buffers)


def test_what_cannot_sleep(stage: Stage) -> None:
    """Memory whose address belongs to its bytes, or whose bytes are the user's, says so; nothing has happened then."""
    del stage
    plain = allocate_plain(SIZE, at=0)
    memory, addresses = remap.create(SIZE, at=0), remap.reserve(SIZE)
    mapping = addresses.map(memory, access={0: "rw"})
    with filled(SIZE) as buffers:
        ours, yours = "its address belongs to its bytes", "the allocation behind it is yours"
        for thing, why in ((plain, ours), (memory, ours), (mapping, yours)):
            with pytest.raises(remap.InvalidValueError, match=rf"{why}.*remap\.allocate"):
                remap.pause([*buffers, thing])  # type: ignore[list-item]
        with pytest.raises(remap.InvalidValueError, match="no such group"):
            remap.pause([*buffers, "nobody"])
        with pytest.raises(remap.InvalidValueError, match="keep='moon'"):
            remap.pause(buffers, "moon")  # type: ignore[arg-type]
        with pytest.raises(remap.InvalidValueError, match="Name several buffers in a list"):
            remap.pause(buffers[0], buffers[0])  # type: ignore[arg-type]
        with (
            remap.SymmetricBuffer(remap.SingleExchange(), SIZE, device=0) as ranks,
            pytest.raises(remap.InvalidValueError, match="the other ranks would go on using"),
        ):
            remap.pause([*buffers, ranks])  # type: ignore[list-item]
        with pytest.raises(TypeError):
            remap.pause([*buffers, 7])  # type: ignore[list-item]
        assert holds(buffers)
    for one in (mapping, addresses, memory, plain):
        one.close()


def test_a_closed_buffer_cannot_sleep(stage: Stage) -> None:
    """One closed buffer among others refuses the call, and the others stay as they are (invariants 4, 5)."""
    del stage
    closed = remap.allocate(SIZE, resident=0)
    closed.close()
    with filled(SIZE) as buffers:
        for act in acts(
            lambda: remap.pause([*buffers, closed]), lambda: remap.migrate([*buffers, closed], 0)
        ):
            with pytest.raises(remap.ClosedError):
                act()
        assert holds(buffers)


def test_shared_memory_needs_a_word(stage: Stage) -> None:
    """Memory that other processes hold sleeps only on request, since they would go on with the old one."""
    del stage
    with filled(SIZE) as buffers:
        buffers[0]._shared = True
        for act in acts(lambda: remap.pause(buffers), lambda: remap.migrate(buffers, 0)):
            with pytest.raises(remap.InUseError, match="detach=True"):
                act()
        remap.pause(buffers, detach=True)
        remap.resume(buffers)
        assert holds(buffers)


def test_cpu_views_refuse_and_device_arrays_stay(stage: Stage) -> None:
    """A buffer does not sleep under a CPU view; an array on the device may wait until it wakes (trap 26)."""
    del stage
    with remap.allocate(SIZE, resident=remap.Host(), accessing=[remap.Host(), remap.device(0)]) as buffer:
        view = buffer.array().numpy()
        view[:] = 5
        for act in acts(lambda: remap.pause(buffer), lambda: remap.migrate(buffer, remap.HostNuma(0))):
            with pytest.raises(remap.InUseError, match="viewed through"):
                act()
        assert (view == 5).all()
        del view
        array = buffer.array()
        handed = array.__cuda_array_interface__
        remap.pause(buffer)
        remap.resume(buffer)
        assert array.__cuda_array_interface__["data"] == handed["data"]
        assert (array.to_host() == 5).all()
        del array


def test_no_bytes(stage: Stage) -> None:
    """A buffer of no bytes sleeps and wakes, and asks the driver for nothing (trap 39)."""
    with remap.allocate(0, resident=0) as buffer:
        mark = stage.mark()
        assert remap.pause(buffer).bytes == 0
        assert buffer.paused
        remap.resume(buffer)
        assert not buffer.paused
        assert remap.pause([]).buffers == 0
        assert remap.resume([]).buffers == 0
        assert not {"create", "map", "unmap"} & set(stage.names_since(mark))


def test_generation_and_listeners(stage: Stage) -> None:
    """Each move counts, and tells those who asked when it is complete; a listener that fails stops no other (6)."""
    del stage
    told: list[tuple[int, bool]] = []
    with filled(SIZE, SIZE) as buffers:

        def fail(_: remap.Buffer) -> None:
            raise ZeroDivisionError

        def listen(buffer: remap.Buffer) -> None:
            told.append((buffer.generation, buffer.paused))
            if not buffer.paused:
                buffer.fill(3)  # it can be used by then

        buffers[0].on_change(fail)
        for buffer in buffers:
            buffer.on_change(listen)
        with pytest.raises(ZeroDivisionError):
            remap.pause(buffers)
        with pytest.raises(ZeroDivisionError):
            remap.resume(buffers)
        assert told == [(1, True), (1, True), (2, False), (2, False)]
        assert all((one.to_host() == 3).all() for one in buffers)
        assert [one.generation for one in buffers] == [2, 2]


@pytest.mark.parametrize("keep", KEEPS)
def test_progress(stage: Stage, keep: Any, tmp_path: Path) -> None:
    """Progress grows from some bytes to all of them; raising there leaves everything as it was (invariant 5)."""
    with filled(SIZE, 2 * SIZE) as buffers:
        moves: list[Callable[[Any], object]] = [
            lambda call: remap.pause(buffers, keep, directory=tmp_path, progress=call),
            lambda call: remap.resume(buffers, progress=call),
        ]
        for act in moves:
            paused = buffers[0].paused
            before = stage.seen()
            with pytest.raises(KeyboardInterrupt):
                act(_interrupt)
            assert stage.unchanged(before)
            assert [one.paused for one in buffers] == [paused, paused]
            told: list[tuple[int, int]] = []
            act(lambda done, total, told=told: told.append((done, total)))
            assert [total for _, total in told] == [3 * SIZE] * len(told)
            assert [done for done, _ in told] == sorted({done for done, _ in told})
            assert told[-1][0] == 3 * SIZE
        assert holds(buffers)


def _interrupt(_done: int, _total: int) -> None:
    raise KeyboardInterrupt


def test_resume_when_memory_is_short(stage: Stage) -> None:
    """It raises, everything stays paused with its backup, and can be resumed later, or waits for memory (trap 1)."""
    with filled(SIZE, SIZE) as buffers:
        remap.pause(buffers)
        before = stage.seen()
        stage.faulty.fail("create", nth=2, result=remap.errors.CudaResult.OUT_OF_MEMORY)
        with pytest.raises(remap.OutOfMemoryError, match="free there"):
            remap.resume(buffers)
        assert all(one.paused for one in buffers)
        assert stage.unchanged(before)
        stage.faulty.fail("create", nth=2, result=remap.errors.CudaResult.OUT_OF_MEMORY)
        remap.resume(buffers, wait=5)  # the second attempt has it
        assert holds(buffers)


def test_waiting_for_memory_ends(stage: Stage) -> None:
    """A wait for memory that nobody gives back ends with the error, without spinning; one that gets it wakes."""
    if stage.inner.name == "cuda":
        pytest.skip("taking all memory of a GPU disturbs who else uses it")
    with filled(SIZE, SIZE) as buffers:
        remap.pause(buffers)
        free = remap.device(0).memory().free
        hog = remap.create(free // (2 * MiB) * (2 * MiB), at=0)
        mark = stage.mark()
        with pytest.raises(remap.OutOfMemoryError):
            remap.resume(buffers, wait=0.2)
        assert len(stage.names_since(mark)) < 300, "it spins"
        waiter = threading.Thread(target=remap.resume, args=(buffers,), kwargs={"wait": 30})
        mark = stage.mark()
        waiter.start()
        assert wait_until(lambda: "create" in stage.names_since(mark))
        hog.close()
        waiter.join(30)
        assert not waiter.is_alive()
        assert holds(buffers)


def test_memory_that_the_cpu_shares(stage: Stage) -> None:
    """Where CPU and GPU share memory, a backup on the host would free nothing: that is said, and the rest sleeps."""
    if stage.inner.name == "cuda":
        pytest.skip("needs a device that shares its memory")
    script = """
import remap
remap.use("host", coherent=True)
with remap.allocate("4MiB") as a, remap.allocate("4MiB") as b:
    a.fill(1)
    slept = remap.pause({a: "host", b: None})
    print(slept.buffers, slept.freed, a.paused, b.paused, int(a.to_host()[0]), slept.notes[0])
    remap.resume([a, b])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"1 {SIZE} False True 1 buffer")
    assert "nothing would be freed" in done.stdout


def test_a_forked_child_has_no_pool_of_its_parents(stage: Stage) -> None:
    """In a forked child a sleeping buffer is inert, and its host memory is not touched (invariant 10)."""
    if stage.inner.name == "cuda":
        pytest.skip("CUDA does not survive a fork")
    with filled(SIZE) as buffers:
        remap.pause(buffers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads
            child = os.fork()
        if child == 0:
            try:
                try:
                    remap.resume(buffers)
                except remap.ForkedError:
                    buffers[0].close()
                    os._exit(0 if remap.host_pool().statistics().held == 0 else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        remap.resume(buffers)
        assert holds(buffers)
