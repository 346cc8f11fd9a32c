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
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

import remap

OUT = Path(__file__).parent / "pictures"
WIDTH = 92
MEMORY = """
import remap

remap.use("host", devices=4, memory="256MiB")
with remap.group("weights"):
    layers = [remap.allocate("24MiB", resident=[0, 1], accessing=[0, 1]) for _ in range(2)]
remap.pause(layers[1])
cache = remap.ElasticBuffer("64GiB", device=2)
cache.resize("40MiB")
cache.commit("100MiB", "116MiB")
fork = cache.fork()
ring = remap.RingBuffer("8MiB", device=3)
remap.snapshot().save("memory.json")
"""
PICTURES = {
    "vector-add": ("demo", "vector-add", "--driver", "host", "--n", "3000000", "--accessing", "0,1"),
    "map": ("map", "memory.json"),
}


def draw(name: str, arguments: tuple[str, ...], folder: str) -> None:
    """Run a command as in a terminal of a fixed width, and keep its output as a picture."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    program = [sys.executable, "-c", "from remap.cli import main; main()"]
    words = [*program, *arguments]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, cwd=folder)
    text = done.stdout.replace(f"{Path(remap.__file__).parent.parent}{os.sep}", "")
    text = re.sub(r"process \d+", "process 1234", text)
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


def page(path: Path) -> None:
    """Write the map of the same memory as a page to look around in."""
    program = MEMORY.replace('.save("memory.json")', ".to_html()").replace(
        "remap.snapshot", "text = remap.snapshot"
    )
    done = [sys.executable, "-c", f"{program}\nimport sys\nsys.stdout.write(text)"]
    path.write_text(subprocess.run(done, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", MEMORY], check=True, cwd=folder)
        for one, words in PICTURES.items():
            draw(one, words, folder)
