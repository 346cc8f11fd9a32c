"""`remap demo elastic`: every byte and address is checked, and its endings have their exit status."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the demo in a process of its own."""
    driver = os.environ.get("REMAP_DRIVER", "host")
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", "from remap.cli import main; main()", "demo", "elastic",
         "--driver", driver, *arguments],
        env={**os.environ, "COLUMNS": "300"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("more", [(), ("--ahead", "8MiB"), ("--sequences", "1"), ("--capacity", "30MiB")])
def test_it_passes(more: tuple[str, ...]) -> None:
    """The cache grows, is shared and shrinks; the sums of the picture add up, and no memory stays."""
    done = demo("--peak", "30MiB", "--token", "100KiB", *more)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().endswith("PASS")
    assert done.stdout.count("every byte is what was written") == 2
    assert done.stdout.count("the address is what it was") == 2
    assert "307 steps" in done.stdout
    assert "all memory is back" in done.stdout
    assert "went back to the driver" in done.stdout


def test_misuse_and_errors() -> None:
    """A size that is none is misuse, and so are sizes that do not fit into each other; no memory is an error."""
    for more in (
        ("--token", "many"),
        ("--token", "0"),
        ("--peak", "2MiB", "--capacity", "1MiB"),
        ("--peak", "0"),
    ):
        done = demo(*more)
        assert done.returncode == 64
        assert "Error: " in done.stderr
        assert more[0] in done.stderr
    done = demo("--peak", "10TiB", "--capacity", "10TiB", "--token", "1TiB")
    assert done.returncode == 1
    assert "Ask for less" in done.stderr
