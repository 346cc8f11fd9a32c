"""Children of multiprocessing import their roles by name, from the root of the repository."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import remap

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(autouse=True)
def _shares() -> None:
    if not remap.device(0).capabilities["posix_fd"]:
        pytest.skip(f"device 0 shares no memory: {remap.device(0).capabilities['posix_fd'].reason}")
