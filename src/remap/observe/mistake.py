"""A mistake: a small broken program, the error that it ends with, and what to do; and how it is run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mistake:
    """An error, a program that raises it, why it does, and what to do."""

    name: str
    summary: str
    program: str
    cause: str
    cure: str

    def message(self) -> str:
        """Run the program in a process of its own, and return the last thing that it says."""
        return run(self.program)


def run(program: str, patience: float = 60) -> str:
    """Run a program on the host driver and return the line that names its error, and its notes."""
    environment = {**os.environ, "REMAP_DRIVER": "host"}
    environment.pop("REMAP_TRACE", None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")  # a file, as kernels are compiled from their source
        path.write_text(program, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            timeout=patience,
            env=environment,
            check=False,
        )
    lines = [line for line in done.stderr.splitlines() if line and not line[0].isspace()]
    told = [line for line in lines if line.startswith("remap.") or "Warning: " in line]
    return (told or lines or ["it said nothing"])[-1]
