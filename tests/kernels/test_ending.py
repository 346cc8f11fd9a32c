"""The end of a program whose last kernel failed: on the host driver it does not go unsaid."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNEL = """
import numpy as np
import remap

@remap.kernel
def beyond(x: remap.Slice["float32"], y: remap.DisjointSlice["float32"]):
    i = remap.index_1d()
    y[i] = x[1000]

x = remap.DeviceBuffer.from_host(np.zeros(64, "float32"))
y = remap.DeviceBuffer.from_host(np.zeros(64, "float32"))
"""

LAUNCH = KERNEL + "beyond.launch(x, y, grid=1, block=64)\n"

WAIT = """
try:
    remap.device(0).synchronize()
except remap.KernelError:
    pass
"""

FAULT = """
from remap.drivers.host import HostDriver
from remap.types import LaunchConfig

class Nothing:
    pointers = 0
    values = ()

driver = HostDriver()
driver.push_context(driver.retain_context(0))
driver.launch(lambda launch: launch.read(5, 1), LaunchConfig((1, 1, 1), (1, 1, 1)), 0, Nothing(), None)
"""


def ended(program: str, tmp_path: Path) -> tuple[int, str, str]:
    """Run a program on the host driver, and return its status and what it said."""
    script = tmp_path / "program.py"  # the source of a kernel is read from its file
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "REMAP_DRIVER": "host"},
    )
    return done.returncode, done.stdout, done.stderr


def test_a_kernel_that_fails_last_is_told(tmp_path: Path) -> None:
    """A kernel that nothing waits for is told in a line when the program ends, and the program ends as it would."""
    status, out, said = ended(LAUNCH, tmp_path)
    assert (status, out) == (0, "")
    assert said.startswith("remap: nothing waited for a kernel that failed: kernel beyond, ")
    assert "x[1000]: the array has 64 elements" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("program", [KERNEL, LAUNCH + WAIT])
def test_what_was_told_is_not_told_again(program: str, tmp_path: Path) -> None:
    """A program whose waits have raised everything ends in silence."""
    assert ended(program, tmp_path) == (0, "", "")


def test_a_fault_that_nobody_saw_is_told(tmp_path: Path) -> None:
    """So is what loses the context; where the driver was shut down meanwhile, its work was dropped, and nothing is."""
    status, _, said = ended(FAULT, tmp_path)
    assert (status, said.count("\n")) == (0, 1)
    assert said.startswith("remap: nothing waited for a kernel that failed: kernel <lambda>")
    assert ended(FAULT + "driver.shutdown()", tmp_path) == (0, "", "")
