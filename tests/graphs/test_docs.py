"""The page on graph memory: its code runs, its picture is there; and the bridge has every call of graphs (E1)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "graph-memory.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_runs(number: int) -> None:
    """Every block of code runs by itself, with warnings as errors, on the driver that is tested."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKS[number]],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_pictures_are_there() -> None:
    """Every picture that the page shows lies beside it."""
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE)
    assert pictures
    assert all((ROOT / "docs" / name).stat().st_size > 10_000 for name in pictures)


def test_every_call_of_graphs_is_in_the_bridge() -> None:
    """Each CUDA function that the powers of graphs name has its row in the bridge."""
    powers = (ROOT / "src" / "remap" / "drivers" / "graph_powers.py").read_text()
    named = set(re.findall(r"\b(cu(?:Graph|Stream|Device|Thread|Mem)[A-Z]\w+)", powers))
    bridge = (ROOT / "docs" / "bridge.md").read_text()
    assert len(named) > 25
    assert not {call for call in named if f"`{call}`" not in bridge}
