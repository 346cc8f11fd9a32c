"""Memory in several processes: every way that multiprocessing has, and either end killed at any step (T14)."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import remap
from remap import MiB
from remap.testing.bench import wait_until

from . import roles
from .support import LIMIT, Child

SIZE = 4 * MiB
METHODS = ("spawn", "forkserver")


def shareable() -> remap.Buffer:
    """Allocate memory that can be exported."""
    return remap.allocate(SIZE, resident=0, shareable="posix_fd")


@pytest.mark.parametrize("method", METHODS)
def test_a_pipe(nothing_left: None, method: str) -> None:
    """Memory sent through a pipe is the same memory: each side sees what the other writes (B5)."""
    del nothing_left
    with Child(roles.importer, "rw", method=method) as child, shareable() as buffer:
        buffer.fill(1)
        child.tell(remap.export(buffer))
        assert child.hear() == ("open", SIZE)
        child.tell("read")
        assert child.hear() == (1, 1, 1, 1)
        child.tell(2)
        assert child.hear() == "written"
        assert (buffer.to_host() == 2).all()
        child.tell("end")
        assert child.hear() == "closed"
        child.end()


def test_a_reader_cannot_write() -> None:
    """In another process as here, whoever asked to read cannot write."""
    with Child(roles.importer, "r") as child, shareable() as buffer:
        child.tell(remap.export(buffer))
        child.hear()
        child.tell(2)
        with pytest.raises(remap.AccessError):
            child.hear()


@pytest.mark.parametrize("method", METHODS)
def test_a_queue_pickles_later(method: str) -> None:
    """A queue pickles on a thread of its own, when the buffer is closed already: the export holds the memory."""
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    with Child(roles.through_queue, queue, method=method) as child:
        exported = queue.get(timeout=LIMIT)
        assert child.hear() == "put"
        with remap.open(exported) as buffer:
            assert (buffer.to_host() == 9).all()
        child.tell("end")
        child.end()
    queue.close()
    queue.join_thread()


def test_an_argument_and_a_pool() -> None:
    """Memory goes as an argument of a process, and to several workers of a pool, with as many receipts."""
    context = multiprocessing.get_context("spawn")
    with shareable() as buffer:
        buffer.fill(1)
        with context.Pool(2) as pool:
            exports = [remap.export(buffer, offset=part * MiB, size=MiB) for part in range(4)]
            assert pool.map(roles.total, exports) == [MiB] * 4
            one = remap.export(buffer, receipts=3)
            assert pool.map(roles.total, [one] * 3) == [SIZE] * 3
            pool.close()
            pool.join()
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            assert executor.submit(roles.total, remap.export(buffer)).result(LIMIT) == SIZE


def test_memory_that_is_handed_on() -> None:
    """An importer can export again, close its own, and a third process reads after both are gone."""
    with Child(roles.forwarder) as middle, shareable() as buffer:
        buffer.fill(5)
        middle.tell(remap.export(buffer))
        again = middle.hear()
        middle.kill()
    with remap.open(again) as third:
        assert (third.to_host() == 5).all()
        with pytest.raises(remap.AccessError):
            remap.open(again, access="rw")


# -- who dies first --


@pytest.mark.parametrize("when", ["sent", "opened", "read"])
def test_the_exporter_is_killed(nothing_left: None, when: str) -> None:
    """An exporter killed after its memory was received does no harm, whatever the importer does next (T14, trap 37)."""
    del nothing_left
    with Child(roles.exporter, 0x5A) as child:
        exported = child.hear()
        if when == "sent":
            child.kill()
        with remap.open(exported, access="rw") as buffer:
            if when == "opened":
                child.kill()
            assert (buffer.to_host() == 0x5A).all()
            if when == "read":
                child.kill()
            buffer.fill(0x6B)
            with remap.open(exported) as again:
                assert (again.to_host() == 0x6B).all()


def test_the_exporter_died_before(nothing_left: None) -> None:
    """An importer that comes too late is told that the exporter has ended, and what to do (trap 37)."""
    del nothing_left
    with Child(roles.exporter, 1, "after sending") as child:
        child.process.join(LIMIT)
        with pytest.raises(remap.ShareError, match=r"has ended.*remap serve"):
            child.hear()


def test_the_exporter_dies_without_exporting() -> None:
    """A process that dies before it exports is seen as the end of the pipe, not waited for."""
    with Child(roles.exporter, 1, "before export") as child, pytest.raises(EOFError):
        child.hear()


@pytest.mark.parametrize("when", ["before", "sent", "opened", "reading"])
def test_the_importer_is_killed(nothing_left: None, when: str) -> None:
    """An importer killed at any step leaves the exporter, its memory and its next importer alone."""
    del nothing_left
    with shareable() as buffer:
        buffer.fill(3)
        exported = remap.export(buffer, receipts=2)
        with Child(roles.importer) as child:
            if when == "before":
                child.kill()
            else:
                child.tell(exported)
            if when in {"opened", "reading"}:
                child.hear()
            if when == "reading":
                child.tell("read")
            if when != "before":
                child.kill()
        with Child(roles.importer) as second:
            second.tell(exported)
            second.hear()
            second.tell("read")
            assert second.hear() == (3, 3, 3, 3)
        exported.close()
        assert (buffer.to_host() == 3).all()


def test_what_a_killed_exporter_left(nothing_left: None) -> None:
    """The next process that exports removes the socket that a killed one left (trap 28)."""
    del nothing_left
    from remap.sharing.sockets import private_directory, remove_stale

    with Child(roles.exporter, 1, "after sending") as child:
        child.process.join(LIMIT)
    left = list(private_directory().glob(f"lease-{child.process.pid}-*"))
    assert len(left) == 2
    remove_stale(private_directory())
    assert not any(path.exists() for path in left)


def test_nobody_is_left_behind_in_good_order() -> None:
    """A process that ends in order takes its socket away."""
    from remap.sharing.sockets import private_directory

    with Child(roles.exporter, 1) as child:
        child.hear()
        child.tell("end")
        assert child.hear() == "closed"
        child.end()
    assert not list(private_directory().glob(f"lease-{child.process.pid}-*"))


NEVER_CLOSED = """
import multiprocessing
import remap

def child(link):
    remap.open(link.recv())
    link.send("opened")

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=child, args=(theirs,))
    process.start()
    with remap.allocate("4MiB", shareable="posix_fd") as buffer:
        ours.send(remap.export(buffer))
        print(ours.recv())
    process.join()
    print(process.exitcode)
"""


def test_what_a_child_never_closed(tmp_path: Path) -> None:
    """A process that ends with imported memory open, or collected and not given back yet, ends without a word."""
    program = tmp_path / "never_closed.py"
    program.write_text(NEVER_CLOSED)
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        env=os.environ,
    )
    assert (done.stdout, done.stderr) == ("opened\n0\n", "")


# -- fork --

FORKED = """
import os, sys, warnings
import numpy
import remap
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork, from Python 3.12 on
    remap.use("host")
    buffer = remap.allocate("4MiB", resident=0, shareable="posix_fd")
    buffer.fill(4)
    exported = remap.export(buffer)
    received = remap.open(exported.to_bytes())
    exported = remap.export(buffer)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        kept = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n not in "012"
                and os.path.exists(f"/proc/self/fd/{n}")]
        said = [f"fds {sum('remap' in one for one in kept)}"]
        for act in (exported.to_bytes, lambda: remap.open(exported), received.to_host, lambda: remap.export(buffer)):
            try:
                act()
                said.append("nothing")
            except remap.RemapError as error:
                said.append(type(error).__name__)
        exported.close(); received.close()
        own = remap.allocate("4MiB", resident=0, shareable="posix_fd")
        own.fill(6)
        with remap.open(remap.export(own).to_bytes()) as other:
            said.append(str(int(other.to_host()[0])))
        own.close()
        os.write(writing, " ".join(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    print(os.read(reading, 1000).decode())
    with remap.open(exported.to_bytes()) as other:
        print(int(other.to_host()[0]), int(received.to_host()[0]))
    received.close(); buffer.close()
"""


def test_after_a_fork() -> None:
    """The child's exports and imports are inert and hold nothing; it can share, and the parent goes on (trap 44)."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKED],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        env=os.environ,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["fds 0 ForkedError ForkedError ForkedError ForkedError 6", "4 4"]


def test_a_forked_child_receives(nothing_left: None) -> None:
    """A child made by fork gets memory through a pipe as any other does."""
    del nothing_left
    if remap.driver().name == "cuda":
        pytest.skip("CUDA cannot be used in a forked child")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_forked_reader, args=(theirs,), daemon=True)
    process.start()
    with shareable() as buffer:
        buffer.fill(8)
        ours.send(remap.export(buffer))
        assert ours.poll(LIMIT)
        assert ours.recv() == 8
    process.join(LIMIT)
    assert wait_until(lambda: not process.is_alive())
    ours.close()
    theirs.close()


def _forked_reader(link: Any) -> None:
    with remap.open(link.recv()) as buffer:
        link.send(int(buffer.to_host()[0]))
