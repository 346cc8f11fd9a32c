"""The pages about sharing are true: every block of Python in them runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .support import COMMAND, LIMIT

DOCS = Path(__file__).parents[2] / "docs"


def blocks(name: str) -> list[str]:
    """Return the blocks of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.DOTALL | re.MULTILINE)


BLOCKS = blocks("sharing.md")
WORKER, END = blocks("how-to/keep-weights-alive.md")


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


def test_weights_are_kept(tmp_path: Path) -> None:
    """Who does what the page says has the same bytes at the same address when the worker was killed; and then not."""
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "end.py").write_text(END)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    said: list[str] = []
    with subprocess.Popen([*COMMAND, "serve"], stdout=subprocess.PIPE, text=True, env=environment) as broker:
        assert broker.stdout is not None
        assert broker.stdout.readline().startswith("serving at ")
        try:
            for _ in range(2):
                with subprocess.Popen(
                    [sys.executable, "worker.py"],
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=tmp_path,
                    env=environment,
                ) as worker:
                    assert worker.stdout is not None
                    said.append(worker.stdout.readline())
                    shown = subprocess.check_output(
                        [*COMMAND, "serve", "--status"], text=True, env=environment
                    )
                    assert f"weights: 8 MiB on device 0; read by {worker.pid}" in shown
                    worker.send_signal(signal.SIGKILL)
            subprocess.run(
                [sys.executable, "-W", "error", "end.py"], cwd=tmp_path, env=environment, check=True
            )
            shown = subprocess.check_output([*COMMAND, "serve", "--status"], text=True, env=environment)
            assert "0 buffers" in shown
        finally:
            broker.terminate()
    assert said[0] == said[1]
    assert said[0].startswith("3 at 0x")
