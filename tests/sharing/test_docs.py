"""The pages about sharing are true: every block of Python in them runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

from remap.testing.bench import wait_until

from .support import COMMAND, LIMIT

DOCS = Path(__file__).parents[2] / "docs"


def blocks(name: str) -> list[str]:
    """Return the blocks of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.DOTALL | re.MULTILINE)


BLOCKS = blocks("sharing.md")
WORKER, TURNS, PARTS, END = blocks("how-to/keep-weights-alive.md")


def test_there_are_blocks() -> None:
    """The blocks are found."""
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(tmp_path: Path, number: int) -> None:
    """A block runs by itself, with a broker of this user at hand."""
    program = tmp_path / "block.py"
    program.write_text(BLOCKS[number])
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*COMMAND, "serve"], stdout=subprocess.PIPE, text=True, env=environment) as broker:
        assert broker.stdout is not None
        assert "serving" in broker.stdout.readline()
        try:
            done = subprocess.run(
                [sys.executable, "-W", "error", str(program)],
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT,
                env=environment,
            )
        finally:
            broker.terminate()
    assert (done.returncode, done.stderr) == (0, "")


class Machine:
    """A broker, and programs of the page that run beside it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._environment = {**os.environ, "TMPDIR": str(directory)}
        self._stack = ExitStack()
        broker = self.start([*COMMAND, "serve"])
        assert said_by(broker).startswith("serving at ")

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command, to be killed at the end if it lives."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._directory,
            env=self._environment,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def run(self, code: str) -> subprocess.Popen[str]:
        """Start a program, with warnings as errors."""
        return self.start([sys.executable, "-W", "error", "-c", code])

    def shown(self) -> str:
        """Return what the broker shows of itself."""
        command = [*COMMAND, "serve", "--status"]
        return subprocess.check_output(command, text=True, env=self._environment, timeout=LIMIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def said_by(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process says."""
    assert process.stdout is not None
    return process.stdout.readline()


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process with SIGKILL."""
    process.kill()
    assert process.wait(LIMIT) == -signal.SIGKILL


@pytest.fixture(name="machine")
def _machine(tmp_path: Path) -> Generator[Machine]:
    with Machine(tmp_path) as machine:
        yield machine


def test_weights_are_kept(machine: Machine) -> None:
    """Who does what the page says has the same bytes when the worker was killed, and none when they were given up."""
    for _ in range(2):
        worker = machine.run(WORKER)
        assert said_by(worker) == "3\n"
        shown = machine.shown()
        assert f"weights: 8 MiB on device 0; read by {worker.pid}" in shown
        assert "clients     1, 0 of them waiting" in shown, "the command itself is none"
        kill(worker)
    assert machine.run(END).wait(LIMIT) == 0
    assert "0 buffers" in machine.shown()


def test_workers_that_start_together(machine: Machine) -> None:
    """Of two workers that both found nothing, one is sooner with its weights, and both serve those."""
    workers = [machine.run(held("loaded")) for _ in range(2)]
    assert [said_by(one) for one in workers] == ["loaded\n"] * 2
    for one in workers:
        let_go(one)
    assert [said_by(one) for one in workers] == ["3\n"] * 2
    assert "1 buffer," in machine.shown()


def test_a_worker_that_dies_while_it_loads(machine: Machine) -> None:
    """A worker that is killed half way leaves nothing that the next one could take for weights."""
    worker = machine.run(held("half"))
    assert said_by(worker) == "half\n"
    kill(worker)
    assert "0 buffers" in machine.shown()
    assert said_by(machine.run(WORKER)) == "3\n"


def test_turns(machine: Machine) -> None:
    """Workers that take turns load once; the turn of one that was killed goes to the next, and half of it to nobody."""
    first = machine.run(held("first", TURNS))
    assert said_by(first) == "first\n"
    second = machine.run(held("second", TURNS))
    assert wait_until(lambda: "1 of them waiting" in machine.shown(), LIMIT)
    kill(first)
    assert said_by(second) == "second\n"
    shown = machine.shown()
    assert f"loading: 8 MiB on device 0; written by {second.pid}" in shown
    assert "weights:" not in shown
    let_go(second)
    assert second.wait(LIMIT) == 0
    assert "weights: 8 MiB on device 0; not open" in machine.shown()
    third = machine.run(held("third", TURNS))
    assert (said_by(third), third.wait(LIMIT)) == ("", 0)


def test_weights_that_hold_pointers(machine: Machine) -> None:
    """Several buffers are open where they were made, together, in the worker that made them and in the next one."""
    for _ in range(2):
        worker = machine.run(PARTS.replace("part.close()", "print(part.address, part.descriptor.address)"))
        assert "5" in said_by(worker)
        places = [said_by(worker).split() for _ in range(3)]
        assert worker.wait(LIMIT) == 0
        assert all(here == there for here, there in places)
        assert len({here for here, _ in places}) == 3


def test_parts_that_were_half_loaded(machine: Machine) -> None:
    """A worker that is killed while it loads the second part is followed by one that loads all of them."""
    code = PARTS.replace("part.fill(5)", "part.fill(4); print(name, flush=True); input()")
    worker = machine.run(code)
    assert said_by(worker) == "embedding\n"
    let_go(worker)
    assert said_by(worker) == "layers\n"
    kill(worker)
    assert said_by(machine.run(PARTS)).count("5") == 3


def held(word: str, code: str = WORKER) -> str:
    """Return a program of the page that says a word while it loads, and waits to be let go."""
    return code.replace("mine.fill(3)", f"mine.fill(3); print('{word}', flush=True); input()")


def let_go(process: subprocess.Popen[str]) -> None:
    """Let a program that was held go on."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
