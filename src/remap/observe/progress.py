"""`progress_bar`: how far a move has got, in a notebook, on a terminal, and nowhere else.

remap.pause(buffers, progress=remap.progress_bar("going to sleep"))
"""

from __future__ import annotations

import sys
import time
from html import escape
from importlib import import_module
from typing import Any

from remap.observe.reading import printable
from remap.sizes import format_size

_OFTEN = 0.1  # seconds between two pictures
_CELLS = 30


class ProgressBar:
    """What `progress=` of a call can be, for one call after another. Made by `progress_bar`.

    `done` and `total` are the bytes of the call under way, or of the latest.
    """

    def __init__(self, label: str = "") -> None:
        self.label = label
        self.done: int = 0
        self.total: int = 0
        self._began = self._shown = self._seconds = 0.0
        self._handle: Any = None  # of a notebook's output

    def __call__(self, done: int, total: int) -> None:
        """Note how far it is, and show it ten times a second and at the end."""
        now = time.perf_counter()
        if done <= self.done or total != self.total:
            self._began, self._shown, self._handle = now, 0.0, None
        self.done, self.total, self._seconds = done, total, now - self._began
        if done >= total or now - self._shown >= _OFTEN:
            self._shown = now
            self._show()

    def _show(self) -> None:
        if self._handle is not None:
            self._handle.update(self)
        elif _in_a_notebook():
            self._handle = import_module("IPython.display").display(self, display_id=True)
        elif sys.stderr is not None and sys.stderr.isatty():
            end = "\n" if self.done >= self.total else ""
            sys.stderr.write(f"\r\x1b[K{self}{end}")
            sys.stderr.flush()

    def __str__(self) -> str:
        """Return it as one line of text."""
        full = _CELLS * self.done // self.total if self.total else _CELLS
        return f"{self._said()} [{'=' * full}{' ' * (_CELLS - full)}]"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return it for a notebook, without JavaScript."""
        value = f'<progress max="{max(self.total, 1)}" value="{self.done if self.total else 1}"></progress>'
        return f'<div class="remap">{value} {escape(self._said())}</div>'

    def _said(self) -> str:
        said = f"{format_size(self.done)} of {format_size(self.total)}"
        if self._seconds:
            said += f", {self.done / self._seconds / 1e9:.1f} GB/s"
        return f"{printable(self.label)}: {said}" if self.label else said


def progress_bar(label: str = "") -> ProgressBar:
    """Return what shows how far a call has got, to be passed as its `progress=`.

    In a notebook it is one output that changes, on a terminal one line of the error output; elsewhere nothing is shown.
    """
    return ProgressBar(label)


def _in_a_notebook() -> bool:
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")  # a terminal's IPython has none
