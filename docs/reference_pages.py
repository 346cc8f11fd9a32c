"""The reference, written at each build from the library itself: public names by room, and every command.

Nothing is listed by hand: a new name in `remap.__all__` appears by its room, a new command by being added to `remap`.
A room that no page takes stops the build. Needs no Sphinx, so that the tests can read what it writes.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from textwrap import indent, wrap

import click

import remap
from remap.cli import cli
from remap.observe.mistakes import MISTAKES

HERE = Path(__file__).parent
OUT = HERE / "reference"


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the reference, and the rooms whose names it lists."""

    file: str
    title: str
    rooms: tuple[str, ...]
    about: str


PAGES = (
    Page(
        "objects",
        "Allocations, reservations, mappings",
        ("handles",),
        "The four things that programs call memory, one object each. Sizes here are strict: whole granules.",
    ),
    Page(
        "buffers",
        "Buffers",
        (
            "buffers.base",
            "buffers.elastic",
            "buffers.ring",
            "buffers.shares",
            "buffers.registrations",
            "chunks",
        ),
        "Memory under one address that stays: striped, growing, sparse, or twice in a row. Sizes are rounded up.",
    ),
    Page(
        "typed",
        "Typed memory and arrays",
        ("buffers", "arrays", "exports", "foreign"),
        "Arrays of one type that own their memory, and views for NumPy, CuPy, torch and Numba. "
        "Which to take: [](../memory-kinds.md).",
    ),
    Page(
        "residency",
        "Pause, resume, migrate",
        ("residency",),
        "Give memory back and keep the address. How it behaves: [](../residency.md).",
    ),
    Page(
        "sharing",
        "Sharing between processes",
        ("sharing",),
        "Export, open, the broker and exchanges between ranks. How it behaves: [](../sharing.md).",
    ),
    Page(
        "symmetric",
        "Symmetric buffers and multicast",
        ("sharing.symmetric", "sharing.multicast", "collectives"),
        "Every rank's memory side by side. How it behaves: [](../symmetric-and-multicast.md).",
    ),
    Page(
        "graphs",
        "Graphs and their memory",
        ("graphs",),
        "Graphs that allocate, and what they hold. How it behaves: [](../graph-memory.md).",
    ),
    Page(
        "kernels",
        "Kernels and launches",
        ("kernels",),
        "Kernels in CUDA C++ and in Python. Names such as `index_1d` mean something inside of kernels only.",
    ),
    Page(
        "devices",
        "Drivers, devices, streams",
        ("drivers", "locations", "streams", "uses", "lifetime"),
        "What work runs on, and in which order.",
    ),
    Page("observe", "See it", ("observe", "sites"), "Snapshots, maps, traces and leaks."),
    Page("values", "Sizes and values", ("sizes", "types"), "Frozen values that calls take and return."),
    Page(
        "errors",
        "Errors",
        ("errors",),
        "What went wrong, which rule says so, and the next step; each with a small program that raises it, as "
        "`remap explain` shows it. What remains true after an error: [](../explain/failure-rules.md).",
    ),
)


def page_of(room: str) -> Page:
    """Return the page that lists a room: the one that names it most closely."""
    parts = room.split(".")
    for length in range(len(parts), 0, -1):
        for page in PAGES:
            if ".".join(parts[:length]) in page.rooms:
                return page
    raise LookupError(f"the room {room!r} is on no page of the reference: add it to docs/reference_pages.py")


def names_by_page() -> dict[Page, list[str]]:
    """Return every public name, under the page that lists it, in the order of the facade."""
    found: dict[Page, list[str]] = {page: [] for page in PAGES}
    for name in remap.__all__:
        found[page_of(remap._NAMES[name][0])].append(name)
    return found


def torch_names() -> list[str]:
    """Return the public names of `remap.torch`, read from its source, as torch may not be here."""
    source = (HERE.parent / "src" / "remap" / "integrations" / "torch.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    raise LookupError("integrations/torch.py has no __all__")


def commands(
    command: click.Command = cli, path: tuple[str, ...] = ("remap",)
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command with the words that call it, the groups before their members."""
    yield path, command
    if isinstance(command, click.Group):
        for name, one in command.commands.items():
            yield from commands(one, (*path, name))


def mistake(name: str, says: Mapping[str, str]) -> str:
    """Return what `remap explain` says of an error, to stand below its docstring."""
    one = MISTAKES.get(name)
    if one is None:
        return ""
    parts = [one.cause, ".. code-block:: python", indent(one.program.strip(), "   ")]
    if name in says:
        said = "\n".join(wrap(says[name], 76, break_on_hyphens=False))
        parts += [".. code-block:: text", indent(said, "   ")]
    return indent("\n\n".join(["", *parts, f"**Cure.** {one.cure}"]), "   ")


def directive(name: str, says: Mapping[str, str]) -> str:
    """Return the directive that documents one public name."""
    thing = getattr(remap, name)
    if isinstance(thing, int) and not isinstance(thing, bool):
        return f".. py:data:: remap.{name}\n   :value: {thing}\n\n   {thing:,} bytes."
    if not isinstance(thing, type):
        if callable(thing):
            return f".. autofunction:: remap.{name}"
        return f".. py:data:: remap.{name}\n\n   {(thing.__doc__ or '').splitlines()[0]}"
    if issubclass(thing, BaseException) and not issubclass(thing, Warning):  # autodoc stumbles over a warning
        return f".. autoexception:: remap.{name}\n   :show-inheritance:\n{mistake(name, says)}"
    lines = [f".. autoclass:: remap.{name}"]
    lines.append("   :inherited-members: object, int, str, tuple, Enum, Protocol, Generic")
    if issubclass(thing, Enum):
        lines.append("   :undoc-members:")
    return "\n".join(lines)


def page_text(page: Page, names: list[str], says: Mapping[str, str]) -> str:
    """Return one page in Markdown."""
    blocks = "\n\n".join(directive(name, says) for name in names)
    return f"# {page.title}\n\n{page.about}\n\n```{{eval-rst}}\n{blocks}\n```\n"


def torch_text() -> str:
    """Return the page of `remap.torch`."""
    blocks = "\n\n".join(f".. autodata:: remap.torch.{name}" for name in torch_names())
    return f"# remap.torch\n\nTensors in memory of remap; needs torch.\n\n```{{eval-rst}}\n{blocks}\n```\n"


def commands_text() -> str:
    """Return the page of the commands: what `--help` prints."""
    parts = [
        "# Commands\n\nExit statuses: 0 for success, 1 for failure or an error, 2 for waived (what was asked for needs "
        "something that is not here), 64 for misuse of the command. `REMAP_DEBUG=1` adds to an error where it "
        "comes from.\n"
    ]
    for path, command in commands():
        context: click.Context | None = None
        for word in path:
            context = click.Context(
                command, info_name=word, parent=context, max_content_width=88, terminal_width=88
            )
        assert context is not None
        title = " ".join(path)
        parts.append(f"## {title}\n\n```text\n{command.get_help(context).strip()}\n```\n")
    return "\n".join(parts)


def profiles_text(folder: Path) -> str:
    """Return the page that sets side by side what `remap doctor --facts` measured of drivers."""
    measured: dict[str, dict[str, object]] = {}
    for path in sorted(folder.glob("*.json")):
        profile = json.loads(path.read_text())
        for facts in profile["drivers"].values():
            measured[f"{facts['about.device']}, {profile['measured']}"] = facts
    text = [
        "# Profiles of drivers\n\nWhat `remap doctor --facts` measured, rule by rule; the rules are explained in "
        "[what the driver does](../explain/driver-facts.md). Where drivers differ, the row is bold.\n"
    ]
    if not measured:
        return "\n".join([*text, "None has been kept yet."])
    text += [f"| fact | {' | '.join(measured)} |", "|---" * (1 + len(measured)) + "|"]
    for name in dict.fromkeys(name for facts in measured.values() for name in facts):
        values = [_cell(facts[name]) if name in facts else "–" for facts in measured.values()]
        answers = set(values) - {"–"}  # what an older remap did not measure tells nothing
        mark = "**" if len(answers) > 1 and not name.startswith(("about.", "cost_us.")) else ""
        text.append(f"| {mark}{name}{mark} | {' | '.join(values)} |")
    return "\n".join(text) + "\n"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " and ".join(map(_cell, value))
    said = f"{value:,}" if isinstance(value, int) else str(value)
    return said.replace("|", "/")


def pages(says: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return every page of the reference: file name, and text. `says` are the messages of the errors' programs."""
    found = {
        page.file: page_text(page, names, says or {}) for page, names in names_by_page().items() if names
    }
    found["torch"] = torch_text()
    found["commands"] = commands_text()
    found["profiles"] = profiles_text(HERE.parent / "profiles")
    entries = "\n".join(found)
    found["index"] = f"# Reference\n\n```{{toctree}}\n{entries}\n```\n"
    return {f"{name}.md": text for name, text in found.items()}


def contents(text: str) -> str:
    """Return a table of contents for each section of a page that lists links."""
    parts: list[str] = []
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        links = re.findall(r"^- \[[^\]]+\]\((\S+)\.(?:md|ipynb)\)$", body, re.MULTILINE)
        if title == "Look up":
            links.insert(1, "reference/index")
        entries = "\n".join(links)
        parts.append(f"\n```{{toctree}}\n:caption: {title}\n:maxdepth: 1\n:hidden:\n\n{entries}\n```\n")
    return "".join(parts)


def write() -> None:
    """Write the pages; one that is as it was is left alone, so that Sphinx does not read it again."""
    OUT.mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as runs:  # each in a process of its own
        says = dict(zip(MISTAKES, runs.map(lambda one: one.message(), MISTAKES.values()), strict=True))
    wanted = pages(says)
    for path in OUT.iterdir():
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        path = OUT / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
