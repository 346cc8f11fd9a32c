"""How commands print: labelled steps, wrapped to the width at hand, and bars that show what lies where."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from remap.sizes import format_size
from remap.types import Location

_INDENT = 12
_WIDEST_BAR = 48
_STYLES = (
    "black on cyan",
    "black on yellow",
    "black on green",
    "black on magenta",
    "white on blue",
    "white on red",
)


class Report:
    """Prints steps one below the other. Colour and escape codes appear on a terminal only."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, markup=False, emoji=False)
        if (
            self._console.width < 1
        ):  # COLUMNS=0, as some terminals without a size say; Rich would print nothing
            self._console.width = 80

    def say(self, line: str, style: str = "") -> None:
        """Print a line from the left edge."""
        for part in textwrap.wrap(line, max(self._console.width, 20), break_on_hyphens=False) or [""]:
            self._put(Text(part, style))

    def step(self, label: str, lines: str | Iterable[str | Text]) -> None:
        """Print a label, and beside it lines of text (wrapped) and finished lines (as they are)."""
        first = Text(f"{label:<{_INDENT}}", "bold")
        for line in (lines,) if isinstance(lines, str) else lines:
            for part in self._parts(line):
                self._put(Text.assemble(first, part))
                first = Text(" " * _INDENT)

    def bar(self, runs: Sequence[tuple[Location, int]]) -> Text:
        """Return consecutive runs of bytes as one bar: a character is an equal share, and names its location."""
        total = sum(size for _, size in runs)
        width = self.bar_width
        cells: list[Location] = []
        index, end = 0, runs[0][1] if runs else 0
        for cell in range(width if total else 0):
            middle = (2 * cell + 1) * total // (2 * width)
            while middle >= end:
                index += 1
                end += runs[index][1]
            cells.append(runs[index][0])
        parts = [(symbol(place) * len(list(same)), _style(place)) for place, same in groupby(cells)]
        return Text.assemble("[", *parts, "]")

    @property
    def bar_width(self) -> int:
        """The characters inside a bar."""
        return max(min(self._console.width - _INDENT - 2, _WIDEST_BAR), 8)

    @property
    def text_width(self) -> int:
        """The characters of a line beside the labels."""
        return max(self._console.width - _INDENT, 20)

    def _parts(self, line: str | Text) -> list[Text]:
        if isinstance(line, Text):
            return [line]
        width = self.text_width
        # Continuation lines are set in, so that they are not taken for lines of their own.
        wrapped = textwrap.wrap(
            line, width, break_long_words=False, break_on_hyphens=False, subsequent_indent="  "
        )
        return [Text(part) for part in wrapped or [""]]

    def _put(self, text: Text) -> None:
        text.rstrip()
        self._console.print(text, soft_wrap=True)


def symbol(place: Location) -> str:
    """Return the one character that stands for a location in a bar: the last digit of a device's number, or h."""
    return str(place.index % 10) if place.is_device else "h"


def legend(runs: Sequence[tuple[Location, int]]) -> str:
    """Return what each character of a bar stands for, with the bytes of each location and their sum."""
    totals: dict[Location, int] = {}
    for place, size in runs:
        totals[place] = totals.get(place, 0) + size
    shares = " + ".join(f"{symbol(place)} is {place}: {format_size(size)}" for place, size in totals.items())
    return f"{shares} = {format_size(sum(totals.values()))}"


def _style(place: Location) -> str:
    return _STYLES[place.index % len(_STYLES)] if place.is_device else "black on white"
