"""Drivers that are named wrongly: who named them is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remap


@pytest.mark.parametrize("name", ["nonsense", " host", "host,cuda", "HOST"])
def test_the_environment_names_no_driver(name: str) -> None:
    """The message names the variable, since the program that fails has named no driver itself."""
    done = subprocess.run(
        [sys.executable, "-c", "import remap; remap.driver()"],
        env={**os.environ, "REMAP_DRIVER": name},
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert f"InvalidValueError: REMAP_DRIVER={name}: the drivers are cuda, host" in done.stderr


@pytest.mark.parametrize("wrong", [None, 5, object()])
def test_what_is_no_driver(wrong: Any) -> None:
    """Anything but a name or a driver is a TypeError, and the present driver stays."""
    present = remap.driver()
    with pytest.raises(TypeError, match="driver"):
        remap.use(wrong)
    assert remap.driver() is present


def test_a_shape_of_truth_values(tmp_path: Path) -> None:
    """A .npy file whose shape NumPy itself stumbles over is one message and no traceback."""
    path, good = tmp_path / "bad.npy", tmp_path / "good.npy"
    np.save(good, np.zeros(4, np.float32))
    path.write_bytes(good.read_bytes().replace(b"(4,), }   ", b"(True,), }"))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import remap.cli; remap.cli.main()",
            "demo",
            "vector-add",
            "--a",
            str(path),
            "--b",
            str(good),
        ],
        env={**os.environ, "REMAP_DRIVER": "host"},
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: read")
    assert "Traceback" not in done.stderr


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    """A path in `REMAP_TRACE` that cannot be written is one message when the run ends, which is otherwise as ever."""
    path = tmp_path / "nowhere" / "run.json"
    done = subprocess.run(
        [sys.executable, "-c", "import remap; remap.allocate(1).close(); print('done')"],
        env={**os.environ, "REMAP_DRIVER": "host", "REMAP_TRACE": str(path)},
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "done\n"
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"remap: REMAP_TRACE={path}: no trace was written: ")
    assert "Name a file in a directory where this process may write" in said
