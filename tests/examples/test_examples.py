"""The examples run, on whatever driver the tests run on, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example in a process of its own, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments], cwd=EXAMPLES, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("kind", ["plain", "mapped"])
def test_vector_add(kind: str) -> None:
    """The vector add passes on plain and on mapped memory, with nothing but the allocation changed (A8)."""
    done = run("vector_add.py", kind)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{kind} memory on the ")
    assert done.stdout.endswith("PASS\n")


def test_vector_add_says_how_to_call_it() -> None:
    """Without the name of a kind of memory, the example says what it takes."""
    done = run("vector_add.py")
    assert done.returncode == 1
    assert "plain|mapped" in done.stderr


def test_double_buffer() -> None:
    """The double-buffered example gives right results (D7)."""
    done = run("double_buffer.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("PASS\n")
