"""Draw the pictures of terminal output that README and documentation show: what remap itself prints, as SVG.

    python docs/pictures.py           # writes docs/pictures/*.svg

`docs/graph-memory.png` is drawn by the command itself: `remap demo graph-memory --plot docs/graph-memory.png`.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

import remap

OUT = Path(__file__).parent / "pictures"
WIDTH = 92
PICTURES = {
    "vector-add": ("demo", "vector-add", "--driver", "host", "--n", "3000000", "--accessing", "0,1"),
}


def draw(name: str, arguments: tuple[str, ...]) -> None:
    """Run a command as in a terminal of a fixed width, and keep its output as a picture."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    program = [sys.executable, "-c", "from remap.cli import main; main()"]
    done = subprocess.run([*program, *arguments], env=environment, capture_output=True, text=True, check=True)
    text = done.stdout.replace(f"{Path(remap.__file__).parent.parent}{os.sep}", "")
    text = re.sub(r"(Linux \d+\.\d+)[^, ]*", r"\1", text)  # whose kernel it was says nothing
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ remap {' '.join(arguments)}", "bold"))
    console.print(Text.from_ansi(text))
    OUT.mkdir(exist_ok=True)
    svg = console.export_svg(title="", unique_id=f"remap-{name}")
    svg = re.sub(
        r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL
    )  # fonts of other sites: nothing is fetched
    (OUT / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    for one, words in PICTURES.items():
        draw(one, words)
