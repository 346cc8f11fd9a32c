"""The bridge table (E1): what it names exists, and what remap calls is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import remap

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in (ROOT / "docs" / "bridge.md").read_text().splitlines()
    if line.startswith(("| `", "| all"))
]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`(remap\.[\w.]+)`", row[1])})
CALLS = {call for row in ROWS for call in re.findall(r"`((?:cu|nv)\w+)`", row[0])}


def test_the_table_is_read() -> None:
    """The table has rows of three cells, with many calls and names."""
    assert len(ROWS) > 40
    assert all(len(row) == 3 for row in ROWS)
    assert len(CALLS) > 60


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists(name: str) -> None:
    """What the table offers in place of a call can be imported, and is documented."""
    found: object = remap
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert found.__doc__, name


def test_every_call_of_the_protocol_is_in_the_table() -> None:
    """Each CUDA function that the driver protocol names has its row."""
    text = (ROOT / "src" / "remap" / "drivers" / "protocol.py").read_text()
    named = set(re.findall(r"\b(cu[A-Z]\w+)", text))
    sharing = {"cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"}  # with their own work
    plain = {"cuMemAlloc", "cuMemFree"}
    assert named - sharing - plain <= CALLS
