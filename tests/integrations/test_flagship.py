"""The example of two models that sleep in turn: small here, on whatever driver the tests run on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SERVE = Path(__file__).parents[2] / "examples" / "sleeping_models" / "serve.py"


@pytest.mark.slow
def test_two_models_on_a_budget_for_one(torch: Any, tmp_path: Path) -> None:
    """Every token is what plain tensors give, over many sleeps, with at least three times as many sequences at once."""
    assert torch is not None
    told = tmp_path / "report.json"
    sizes = ["--requests", "18", "--longest", "192", "--quantum", "8"]
    if (
        os.environ["REMAP_DRIVER"] == "cuda"
    ):  # torch takes 20 MiB at a time there: weights that fill several of them
        sizes += ["--layers", "4", "--width", "512", "--inner", "2048", "--vocabulary", "4096"]
    command = [sys.executable, "-W", "error::RuntimeWarning", str(SERVE), *sizes, "--report", str(told)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(told.read_text())
    assert found["driver"] == os.environ["REMAP_DRIVER"]
    assert found["every token as with plain tensors"] is True
    assert found["most in use, bytes"] <= found["budget, bytes"]
    assert found["switches"] > 5
    assert found["sequences at once"] >= 3 * found["sequences at once, static caches in the same memory"]
    assert found["the median switch"]["awake_bytes"] > 0
