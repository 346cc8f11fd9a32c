"""Every driver call and every file call of a move fails in turn: nothing is lost, half done, or left (invariant 5)."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB, RemapError
from remap.errors import CudaResult
from remap.testing.bench import wait_until
from remap.testing.stage import Stage

from .support import SIZE, contents, filled, holds, settled

pytest_plugins = ("remap.testing.stage",)

NOT_SWEPT = {
    *("pop_context", "shutdown", "synchronize_stream", "synchronize_context", "synchronize_event"),
    *("current_context", "event_done"),
}
"""As in the foundation's sweep: what cannot be undone by anybody, and waits, which fail with what work did before; and
questions that fail only when the context is lost, of which there are most."""

ABSORBED = {
    # A figure that is left out, host memory that stays pageable, the context in a thread that gives it back.
    *("memory_info", "register_pinned", "unregister_pinned", "push_context", "retain_context"),
    *("granularity", "capabilities"),
}


TRIED_AGAIN = {"map", "set_access", "copy_to_device", "record_event"}
"""Calls of the thread that goes on with an ordered resume: closing that one makes them again."""

CLEAN_UP = {"unmap", "release", "free_range", "destroy_event", "destroy_stream", "push_context"}
"""Calls that a move makes when it cannot be taken back any more."""


@dataclass(frozen=True)
class Move:
    """A move, and whether the buffers sleep before it."""

    name: str
    act: Callable[[list[remap.Buffer], Path], Any]
    asleep: str | None = ""
    result: CudaResult = CudaResult.UNKNOWN


def resume_in_order(buffers: list[remap.Buffer]) -> None:
    """Resume with events; what could not be waited for is waited for again."""
    waking = remap.resume(buffers, events=True)
    try:
        waking.close()
    finally:
        waking.close()


MOVES = [
    Move("pause_to_host", lambda b, d: remap.pause(b, "host")),
    Move("pause_to_disk", lambda b, d: remap.pause(b, "disk", directory=d)),
    Move("pause_mixed", lambda b, d: remap.pause({b[0]: "host", b[1]: "disk", b[2]: "host"}, directory=d)),
    Move("pause_with_progress", lambda b, d: remap.pause(b, "host", progress=lambda *_: None)),
    Move("resume_from_host", lambda b, d: remap.resume(b), "host"),
    Move("resume_short_of_memory", lambda b, d: remap.resume(b), "host", CudaResult.OUT_OF_MEMORY),
    Move("resume_from_disk", lambda b, d: remap.resume(b), "disk"),
    Move("resume_in_order", lambda b, d: resume_in_order(b), "host"),
    Move("migrate_to_host", lambda b, d: remap.migrate(b, remap.Host())),
    Move(
        "migrate_short_of_memory", lambda b, d: remap.migrate(b, remap.Host()), "", CudaResult.OUT_OF_MEMORY
    ),
    Move("migrate_asleep", lambda b, d: remap.migrate(b, remap.Host()), "host"),
]


@contextmanager
def scene(move: Move, directory: Path) -> Generator[list[remap.Buffer]]:
    """Make three buffers, one of them striped and one that nobody may write."""
    peers = [0, *(peer.index for peer in remap.device(0).peers())]
    small = SIZE // 2
    with filled(small) as one, filled(small, small) as two, remap.allocate(SIZE, resident=peers) as three:
        buffers = [one[0], two[1], three]
        three.copy_from_host(contents(2, three.size))
        buffers[1].set_access({0: "r"})
        if move.asleep:
            remap.pause(buffers, move.asleep, directory=directory)  # type: ignore[arg-type]
        yield buffers


def clean_up(stage: Stage, mark: int, buffers: list[remap.Buffer]) -> None:
    """Make the clean-up calls that were refused, but for those on the buffers themselves, which nothing has left."""
    for call in stage.since(mark):
        leaked = call.error is not None and call.name in {"unmap", "release", "free_range"}
        if leaked and not any(0 <= call.arguments[0] - one._address < one.size for one in buffers):
            getattr(stage.inner, call.name)(*call.arguments)


def state(buffers: list[remap.Buffer]) -> list[tuple[Any, ...]]:
    """Return what can be told of buffers without waking them."""
    return [(one.generation, one.paused, one._paused, one.resident, dict(one.access)) for one in buffers]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_any_call_may_fail(stage: Stage, move: Move, tmp_path: Path) -> None:
    """Whichever driver call fails, a move has not happened, or it has happened whole; no byte is lost either way."""
    swept = sorted(
        name for name, call in vars(stage.faulty).items() if callable(call) and name not in NOT_SWEPT
    )
    # Those two touch, lock and give back host memory, too.
    if move.name not in {"pause_to_host", "resume_from_host"}:
        remap.host_pool(prepare=64 * MiB).wait()
    empty = stage.seen()
    failed: list[str] = []
    for nth in count(1):
        with scene(move, tmp_path) as buffers:
            remap.host_pool().wait()
            stage.recording.forget()  # what is read at each turn must not grow with them
            before, seen, mark = state(buffers), stage.seen(), stage.mark()
            stage.faulty.fail(*swept, nth=nth, result=move.result)
            error: RemapError | None = None
            try:
                move.act(buffers, tmp_path)
            except RemapError as caught:
                error = caught
            refused = stage.faulty.refused
            stage.faulty.heal()
            remap.host_pool().wait()
            if error is not None:
                assert refused, f"{move.name} failed by itself: {error}"
                if state(buffers) == before:
                    clean_up(stage, mark, buffers)
                    assert stage.unchanged(seen), f"after {refused} failed"
                    move.act(buffers, tmp_path)
                else:  # it has happened, for all of them, and said so
                    assert set(refused) <= CLEAN_UP
                    assert [one.generation for one in buffers] == [old[0] + 1 for old in before]
                    if move.name.startswith(("pause", "migrate")):
                        assert any("all the same" in note for note in error.__notes__)
                    if move.name.startswith(("migrate", "resume_in_order")):
                        clean_up(stage, mark, buffers)
            elif refused:
                absorbed = ABSORBED | TRIED_AGAIN if move.name == "resume_in_order" else ABSORBED
                assert set(refused) <= absorbed, f"{move.name} took no notice that {refused} failed"
            failed += refused
            remap.resume(buffers)
            buffers[1].set_access({0: "rw"})
            expected = [contents(seed, one.size) for seed, one in enumerate(buffers)]
            assert all(np.array_equal(a.to_host(), b) for a, b in zip(buffers, expected, strict=True))
        assert stage.unchanged(empty)
        assert remap.host_pool().statistics().used == 0
        assert not os.listdir(tmp_path)
        if not refused:
            break
    assert failed
    remap.host_pool(prepare=0)


def test_unmapping_that_fails_in_the_middle(stage: Stage) -> None:
    """Once the first memory has gone, all end paused with their backups; the rest is unmapped when they wake (5).

    What a listener raises then is a note: the failure comes first.
    """

    def fail(buffer: remap.Buffer) -> None:
        if buffer.paused:
            raise ZeroDivisionError("of a listener")

    with filled(SIZE, SIZE, SIZE) as buffers:
        buffers[1].on_change(fail)
        stage.faulty.fail("unmap", nth=2)
        with pytest.raises(remap.DriverError, match="cuMemUnmap") as caught:
            remap.pause(buffers)
        assert "3 buffers paused all the same" in caught.value.__notes__[0]
        assert caught.value.__notes__[-1] == "and then: of a listener"
        assert all(one.paused for one in buffers)
        assert all(np.array_equal(remap.backup(one), contents(seed)) for seed, one in enumerate(buffers))
        remap.resume(buffers)
        assert holds(buffers)


def test_the_first_unmapping_that_fails(stage: Stage) -> None:
    """While nothing has been given back yet, a failure leaves everything awake (invariant 5)."""
    with filled(SIZE, SIZE) as buffers:
        stage.faulty.fail("unmap")
        with pytest.raises(remap.DriverError, match="cuMemUnmap"):
            remap.pause(buffers)
        assert not any(one.paused for one in buffers)
        assert holds(buffers)
    assert settled()


def test_a_disk_that_is_too_small(stage: Stage, tmp_path: Path) -> None:
    """A file that may not grow so far refuses the pause before anything is given back."""
    before = stage.seen()
    with filled(SIZE, SIZE) as buffers:
        seen = stage.seen()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, hard))
        try:
            with pytest.raises(remap.DiskError, match="name another directory"):
                remap.pause(buffers, "disk", directory=tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert stage.unchanged(seen)
        assert holds(buffers)
        with pytest.raises(remap.DiskError, match="No such file"):
            remap.pause(buffers, "disk", directory=tmp_path / "nowhere")
        assert holds(buffers)
    assert stage.unchanged(before)
    assert not os.listdir(tmp_path)


@contextmanager
def small_disk(path: Path, size: int) -> Generator[Path]:
    """Mount a file system of `size` bytes."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_fills_up(stage: Stage, tmp_path: Path) -> None:
    """Too little space is seen first; a disk that others fill meanwhile refuses the pause in its middle."""
    # So many pieces that most have not been written when the first one is told of, and hardly any room beside them.
    with small_disk(tmp_path, 194 * MiB) as disk, filled(96 * MiB, 96 * MiB) as buffers:
        with filled(SIZE) as more, pytest.raises(remap.DiskError, match="are free there"):
            remap.pause([*buffers, *more], "disk", directory=disk)
        seen = stage.seen()

        def fill_up(_done: int, _total: int) -> None:
            if not os.listdir(disk):
                with pytest.raises(OSError, match="No space"), (disk / "other").open("wb", 0) as file:
                    while True:
                        file.write(bytes(MiB))

        with pytest.raises(remap.DiskError, match="No space left"):
            remap.pause(buffers, "disk", directory=disk, progress=fill_up)
        assert stage.unchanged(seen)
        assert not any(one.paused for one in buffers)
        assert holds(buffers)
        (disk / "other").unlink()
        remap.pause(buffers, "disk", directory=disk)
        remap.resume(buffers)
        assert holds(buffers)
        free = os.statvfs(disk)
        assert free.f_bavail == free.f_blocks, "the file's space is back"


def test_a_file_that_cannot_be_read(stage: Stage, tmp_path: Path) -> None:
    """A backup that cannot be read leaves everything paused; what others sleep on is intact."""
    with filled(SIZE, SIZE) as buffers:
        remap.pause(buffers[0], "host")
        remap.pause(buffers[1], "disk", directory=tmp_path)
        seen = stage.seen()
        file = next(link for link in Path("/proc/self/fd").iterdir() if _is_ours(link, tmp_path))
        os.truncate(file, SIZE // 2)
        with pytest.raises(remap.DiskError, match="ends after"):
            remap.resume(buffers)
        assert stage.unchanged(seen)
        assert all(one.paused for one in buffers)
        remap.resume(buffers[0])
        assert holds(buffers[:1])


def _is_ours(link: Path, directory: Path) -> bool:
    try:
        return str(directory) in os.readlink(link)
    except OSError:
        return False


KILLED = """
import sys, remap
buffers = [remap.allocate("8MiB", resident=0) for _ in range(3)]
while True:
    remap.pause({buffers[0]: "host", buffers[1]: "disk", buffers[2]: "disk"}, directory=sys.argv[1])
    print("asleep", flush=True)
    remap.resume(buffers, events=True).close()
    remap.pause(buffers)
    waking = remap.resume(buffers, events=True)
    print("waking", flush=True)
    waking.close()
"""


@pytest.mark.alone
@pytest.mark.parametrize("turns", [1, 2, 5])
def test_killed_in_the_middle(stage: Stage, turns: int, tmp_path: Path) -> None:
    """A process that is killed while it moves leaves no file, no disk space and no memory of the GPU behind."""
    before, disk = stage.seen(), os.statvfs(tmp_path).f_bfree
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert child.stdout is not None
    for turn in range(turns):
        assert child.stdout.readline() == ("waking\n" if turn % 2 else "asleep\n")
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not os.listdir(tmp_path)
    assert stage.unchanged(before)
    assert wait_until(
        lambda: os.statvfs(tmp_path).f_bfree >= disk - 16 * MiB // os.statvfs(tmp_path).f_frsize
    )


def test_a_resume_that_cannot_be_undone_is_tried_again(stage: Stage) -> None:
    """What one unmapping has left mapped, as a failed resume was undone, is unmapped by the next resume (5)."""
    with filled(SIZE, SIZE) as buffers:
        remap.pause(buffers)
        stage.faulty.fail("copy_to_device", nth=2)
        stage.faulty.fail("unmap")
        with pytest.raises(RemapError) as caught:
            remap.resume(buffers)
        assert "while undoing" in caught.value.__notes__[0]
        stage.faulty.heal()
        remap.resume(buffers)
        assert holds(buffers)
