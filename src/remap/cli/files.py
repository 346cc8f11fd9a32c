"""The paths of commands: a file that cannot be written is refused before the work that it is to hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class OutFile(click.Path):
    """A file that will be written: no directory itself, and in one that exists."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; a path in a directory that does not exist is misuse."""
        path = super().convert(value, param, ctx)
        folder = Path(str(path)).absolute().parent
        if not folder.is_dir():
            self.fail(f"there is no directory {folder}", param, ctx)
        return path
