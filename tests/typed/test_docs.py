"""The pages on memory: their code runs, and their tables are the newest figures."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KINDS = (ROOT / "docs" / "memory-kinds.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", KINDS, re.DOTALL)


def tables() -> Any:
    """Return the module that fills the tables."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_runs(number: int, tmp_path: Path) -> None:
    """Every block of code runs by itself, with warnings as errors, on the driver that is tested."""
    program = tmp_path / "program.py"  # a file: kernels are compiled from their source
    program.write_text(BLOCKS[number])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_tables_are_the_newest_figures() -> None:
    """The tables say what the newest results say: `python benchmarks/tables.py` fills them."""
    module = tables()
    for name in module.DOCUMENTS:
        text = (ROOT / name).read_text()
        assert module.filled(text) == text, f"run benchmarks/tables.py: {name} is out of date"


def test_every_kind_of_memory_is_on_the_page() -> None:
    """The page names each kind that requirement D7 does, and what makes it."""
    for word in ("DeviceBuffer", "DeviceBox", "remap.pinned", "remap.managed", "HMM", "ATS", "remap.advise"):
        assert word in KINDS
