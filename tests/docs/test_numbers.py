"""The numbers of invariants, rows and traps: each is cited by a test, and none is cited that means nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .pages import DOCS, ROOT

TESTS = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "src" / "remap" / "testing").rglob("*.py")]
LISTS = r"\d+(?:(?:, | and | to |–| … )\d+)*"


def listed(page: str, pattern: str) -> set[str]:
    """Return the numbers that a page explains."""
    return set(re.findall(pattern, (DOCS / page).read_text(), re.MULTILINE))


def cited(text: str, word: str) -> Iterator[str]:
    """Yield the numbers that a text cites behind a word."""
    for numbers in re.findall(rf"\b{word}s? ({LISTS})", text, re.IGNORECASE):
        yield from re.findall(r"\d+", numbers)


def rows_in(text: str) -> Iterator[str]:
    """Yield the rows that a text cites, those inside of a span of them as well."""
    for letter, first, last in re.findall(r"\b([A-E])(\d{1,2})\b(?:(?: to | … |–)\1(\d{1,2})\b)?", text):
        yield from (f"{letter}{number}" for number in range(int(first), int(last or first) + 1))


INVARIANTS = listed("design.md", r"^(\d+)\. ")
TRAPS = listed("numbers.md", r"^- \*\*(\d+)\*\*")
ROWS = listed("numbers.md", r"^- \*\*([A-E]\d+)\*\*")


def test_every_number_is_cited() -> None:
    """A test says of each invariant, row and trap that it checks it."""
    texts = [path.read_text() for path in TESTS if path != Path(__file__)]
    assert (len(INVARIANTS), len(TRAPS), len(ROWS)) == (15, 44, 41)
    assert not INVARIANTS - {number for text in texts for number in cited(text, "invariant")}
    assert not TRAPS - {number for text in texts for number in cited(text, "trap")}
    assert not ROWS - {row for text in texts for row in rows_in(text)}


@pytest.mark.parametrize(("word", "known"), [("invariant", INVARIANTS), ("trap", TRAPS)])
def test_no_number_means_nothing(word: str, known: set[str]) -> None:
    """What code and tests cite is explained."""
    code = [*(ROOT / "src" / "remap").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    assert not {number for path in code for number in cited(path.read_text(), word)} - known
