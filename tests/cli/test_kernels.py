"""`remap demo kernels`: three kernels on whichever driver, and one mistake that the host driver finds."""

from __future__ import annotations

import os
import subprocess
import sys


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the demo in a process of its own."""
    command = [sys.executable, "-W", "error", "-c", "from remap.cli import main; main()", "demo", "kernels"]
    command += arguments
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_all_results_are_numpys() -> None:
    """Reduction, transpose and stencil agree with NumPy bit for bit, with ragged edges."""
    done = run("--rows", "61", "--cols", "95")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("as NumPy, bit for bit") == 3
    assert done.stdout.endswith("PASS\n")
    if os.environ["REMAP_DRIVER"] == "host":
        assert "no barrier between" in " ".join(done.stdout.split())


def test_misuse_and_waiving() -> None:
    """A size that is none is misuse; a device that does not exist is an error without a traceback."""
    assert run("--rows", "0").returncode == 64
    done = run("--device", "99")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
