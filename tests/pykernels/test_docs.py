"""The page about kernels is true: its Python runs, its names exist, and remap says what it quotes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import remap

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(tmp_path: Path, number: int) -> None:
    """A block runs by itself, from a file, with warnings as errors."""
    program = tmp_path / "block.py"
    program.write_text(BLOCKS[number])
    command = [sys.executable, "-W", "error", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_exist() -> None:
    """Every name of remap that the page writes is one."""
    names = set(re.findall(r"(?<!include <)remap\.(\w+)", PAGE)) - {"cuh"}
    assert len(names) > 10
    assert not [name for name in names if not hasattr(remap, name)]


def test_every_report_is_quoted_from_the_code() -> None:
    """What the host driver reports is quoted as it is said."""
    said = "".join(path.read_text() for path in Path(remap.__path__[0], "kernels").glob("*.py"))
    for quote in (
        "read of what another thread wrote, with no barrier between",
        "read of shared memory that nothing was written to",
        "write to an element that another thread writes, too",
        "with no alias_fence() between",
        "threads with other y or z would get the same index",
        "it may be read before anything was assigned to it",
    ):
        assert quote in PAGE
        assert quote in said
