"""`remap demo pause`: contents and addresses are checked, and its endings have their exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the demo in a process of its own."""
    driver = os.environ.get("REMAP_DRIVER", "host")
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", "from remap.cli import main; main()", "demo", "pause",
         "--driver", driver, "--size", "6MiB", "--buffers", "3", *arguments],
        env={**os.environ, "COLUMNS": "300"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("keep", ["host", "disk", "nothing"])
def test_it_passes(keep: str, tmp_path: Path) -> None:
    """Every way of keeping sleeps and wakes, says what it did, and leaves no file."""
    done = demo("--keep", keep, "--directory", str(tmp_path), "--keep-host")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().endswith("PASS")
    assert "every address is what it was" in done.stdout
    assert ("every byte is what it was" in done.stdout) == (keep != "nothing")
    assert "18 MiB given back" in done.stdout
    assert ("of the link" in done.stdout) == (keep != "nothing")
    assert not os.listdir(tmp_path)


def test_misuse_and_errors(tmp_path: Path) -> None:
    """A size that is none is misuse; a directory that does not exist is an error in one line."""
    assert demo("--size", "many").returncode == 64
    done = demo("--keep", "disk", "--directory", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: a backup")
