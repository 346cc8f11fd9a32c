"""Write the newest measured figures into the tables of the documentation.

    python benchmarks/tables.py            # changes docs/memory-kinds.md and docs/memory-hierarchy.md

Each table stands between `<!-- figures: NAME -->` and `<!-- end -->`, and is made anew from benchmarks/results. It
needs neither a driver nor remap.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NONE = "not measured yet"


def newest(name: str, where: str) -> dict[str, Any] | None:
    """Return the newest results of a benchmark on a machine, by the date in the name; None where there are none."""
    found = sorted(RESULTS.glob(f"{name}-{where}*.json"), key=lambda path: path.stem[-10:])
    return json.loads(found[-1].read_text()) if found else None


def size(count: int) -> str:
    """Return bytes as people write them, a dash for 0."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}" if count % unit == 0 else f"{count / unit:.1f} {name}"
    return f"{count} B" if count else "–"


def dated(results: dict[str, Any]) -> str:
    """Return the line that says where and when figures were measured."""
    about = results["about"]
    return f"Measured on {about['date']}: {about['devices'][0]}, {about['driver_version']}."


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def kinds(results: dict[str, Any]) -> str:
    """Return microseconds of a pass by kind and size, and why kinds are missing."""
    passes = results["figures"]["pass_us"]
    names = list(dict.fromkeys(kind for one in passes.values() for kind in one))
    rows = [[kind, *(f"{one[kind]:g}" for one in passes.values())] for kind in names]
    text = table(["one pass, µs", *passes], rows)
    missing = results["figures"]["missing"]
    if missing:
        text += "\n\nNot to be had on that machine: "
        text += "; ".join(f"{name} ({why})" for name, why in missing.items()) + "."
    return text


def releases(results: dict[str, Any]) -> str:
    """Return microseconds of a close."""
    return table(["close, µs", "median"], [[k, f"{v:g}"] for k, v in results["figures"]["close_us"].items()])


def levels(results: dict[str, Any]) -> str:
    """Return size and latency of each level of memory."""
    figures = results["figures"]
    rows = [
        [name, size(count), f"{figures['cycles'].get(name, '–')}", f"{figures['ns'].get(name, '–')}"]
        for name, count in figures["bytes"].items()
    ]
    return table(["level", "size", "latency, cycles", "latency, ns"], rows)


TABLES = {
    "kinds-h200": ("typed", "h200", kinds),
    "kinds-host": ("typed", "host", kinds),
    "releases-h200": ("typed", "h200", releases),
    "releases-host": ("typed", "host", releases),
    "levels-h200": ("hierarchy", "h200", levels),
}
DOCUMENTS = ("docs/memory-kinds.md", "docs/memory-hierarchy.md")


def filled(text: str) -> str:
    """Return a document with its tables made anew."""

    def fill(match: re.Match[str]) -> str:
        name, where, make = TABLES[match[1]]
        results = newest(name, where)
        body = NONE if results is None else f"{make(results)}\n\n{dated(results)}"
        return f"<!-- figures: {match[1]} -->\n{body}\n<!-- end -->"

    return re.sub(r"<!-- figures: (\S+) -->.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main() -> None:
    """Fill the documents."""
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
