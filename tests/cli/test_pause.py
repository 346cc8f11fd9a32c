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
    more = {"host": ["--keep-host"], "disk": ["--directory", str(tmp_path)], "nothing": []}[keep]
    done = demo("--keep", keep, *more)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().endswith("PASS")
    assert "every address is what it was" in done.stdout
    assert ("every byte is what it was" in done.stdout) == (keep != "nothing")
    assert "18 MiB given back" in done.stdout
    assert ("of the link" in done.stdout) == (keep != "nothing")
    assert not os.listdir(tmp_path)


def test_misuse_and_errors(tmp_path: Path) -> None:
    """What says nothing, or contradicts itself, is misuse; a directory that does not exist is an error in one line."""
    for more in (["--size", "many"], ["--directory", str(tmp_path)], ["--keep", "nothing", "--keep-host"]):
        done = demo(*more)
        assert done.returncode == 64
        assert more[-1].lstrip("-") in done.stderr or "--directory" in done.stderr
    done = demo("--keep", "disk", "--directory", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: a backup")
    assert "Name a directory" in done.stderr


@pytest.mark.skipif(os.environ.get("REMAP_DRIVER") == "cuda", reason="CUDA reserves more than any such limit")
@pytest.mark.parametrize("keep", ["host", "disk"])
@pytest.mark.parametrize("limit", [600_000, 1_500_000, 2_500_000, 8_000_000])
def test_little_address_space(keep: str, limit: int) -> None:
    """Under `ulimit -v` a backup takes fewer addresses, leaves some to its threads, or the error names the limit."""
    command = f"ulimit -v {limit}; exec {sys.executable} -m remap demo pause --driver host --keep {keep}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    if done.returncode == 0:
        assert done.stdout.rstrip().endswith("PASS")
    else:
        assert (done.returncode, done.stderr.count("\n"), limit < 2_500_000) == (1, 1, True)
        assert done.stderr.startswith("error: ")
