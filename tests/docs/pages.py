"""The pages of the documentation, and the code that stands in them."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "reference")]

_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block of code of a page."""

    page: str
    number: int
    language: str
    code: str

    def __str__(self) -> str:
        """Return a name for a report."""
        return f"{self.page}-{self.number}"


def name_of(path: Path) -> str:
    """Return a page's path as a person says it."""
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    """Return the blocks of code of a page."""
    found = _BLOCK.finditer(path.read_text())
    return [Block(name_of(path), number, one[1], one[2]) for number, one in enumerate(found)]


def prose(path: Path) -> str:
    """Return a page without its blocks of code; of a notebook, its cells of text."""
    if path.suffix == ".ipynb":
        return "\n\n".join("".join(one["source"]) for one in cells(path) if one["cell_type"] == "markdown")
    return _BLOCK.sub("", path.read_text())


def cells(notebook: Path) -> list[dict[str, Any]]:
    """Return the cells of a notebook."""
    found: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return found


def module(path: Path) -> Any:
    """Return a module that is in no package."""
    import sys

    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem]
