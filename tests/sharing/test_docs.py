"""The page about sharing is true: every block of Python in it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .support import COMMAND, LIMIT

PAGE = Path(__file__).parents[2] / "docs" / "sharing.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


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
