"""What the documentation names exists: links, names, commands; and what exists is documented."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

import remap
from remap.cli import cli

from .pages import DOCS, NOTEBOOKS, PAGES, ROOT, blocks, module, name_of, prose

REFERENCE = module(DOCS / "reference_pages.py")
EVERYTHING = [*PAGES, *NOTEBOOKS]


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    plain = re.sub(r"[`*_]", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


@pytest.mark.parametrize("page", EVERYTHING, ids=name_of)
def test_links_resolve(page: Path) -> None:
    """A link to a file finds it in the repository, where it can be followed, too; an anchor finds its heading."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        if anchor:
            assert anchor in {slug(line) for line in re.findall(r"^#+ (.*)", prose(there), re.MULTILINE)}, (
                target
            )


def test_every_page_is_reached() -> None:
    """Each page is linked from the first one, once, in the words of its own title or some that fit the list."""
    links = re.findall(r"^- \[[^\]]+\]\((\S+)\)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    pages = {page.relative_to(DOCS).as_posix() for page in (*PAGES[1:], *NOTEBOOKS)}
    assert sorted(links) == sorted(pages - {"index.md"})


def test_the_first_page_is_readable_anywhere() -> None:
    """It has nothing that only Sphinx understands; the site's contents are made of its lists."""
    text = (DOCS / "index.md").read_text()
    assert "```{" not in text
    made = REFERENCE.contents(text)
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert re.findall(r"^:caption: (.*)$", made, re.MULTILINE) == sections
    for page in (*PAGES[1:], *NOTEBOOKS):
        name = page.relative_to(DOCS).with_suffix("").as_posix()
        assert name == "index" or f"\n{name}\n" in made


def look_up(name: str) -> None:
    """Raise AttributeError unless a dotted name that begins with `remap` means something."""
    found: object = remap
    at = "remap"
    for part in name.split(".")[1:]:
        at = f"{at}.{part}"
        if inspect.ismodule(found):
            try:
                found = getattr(found, part)
            except AttributeError:
                found = importlib.import_module(at)
        else:
            found = inspect.getattr_static(
                found, part
            )  # looked at, not called: some mean nothing outside of kernels


@pytest.mark.parametrize("page", EVERYTHING, ids=name_of)
def test_names_exist(page: Path) -> None:
    """Every name such as `remap.Buffer.chunks` that stands in a page's text is a name of remap."""
    for name in set(re.findall(r"`(remap(?:\.\w+)+)(?:\([^`]*\))?`", prose(page))):
        if name.startswith("remap.torch") and not find_spec("torch"):
            continue
        if name != "remap.cuh":  # a file
            look_up(name)


def commands() -> Iterator[str]:
    """Yield each command that a page shows, such as `remap demo vector-add --plain`, with its page."""
    for page in PAGES:
        shown = re.findall(r"`(remap [^`\n]+)`", prose(page))
        shown += re.findall(r"^    (remap .+)$", prose(page), re.MULTILINE)
        for block in blocks(page):
            if block.language in ("console", "sh", "bash", "text", ""):
                shown += re.findall(r"^(?:\$ )?(remap .+)$", block.code, re.MULTILINE)
        yield from (f"{name_of(page)}: {one}" for one in shown)


@pytest.mark.parametrize("shown", sorted(set(commands())))
def test_commands_exist(shown: str) -> None:
    """Every command that a page shows exists, with the options it is shown with."""
    words = shown.partition(": remap ")[2].partition(" #")[0].split()
    command: click.Command = cli
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        assert words[0] in command.commands, shown
        command = command.commands[words.pop(0)]
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    for word in words:
        if word.startswith("-"):
            assert word.partition("=")[0] in options | {"--help", "-h"}, shown


def test_every_public_name_is_on_one_page() -> None:
    """The reference lists each name of `remap.__all__` once, and each of `remap.torch`."""
    pages = REFERENCE.pages()
    text = "\n".join(pages.values())
    for name in remap.__all__:
        assert len(re.findall(rf"^\.\. [\w:]+:: remap\.{name}$", text, re.MULTILINE)) == 1, name
    for name in REFERENCE.torch_names():
        assert f":: remap.torch.{name}\n" in text


@pytest.mark.parametrize("name", remap.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    """A public name has a docstring; so has every public method and property that it brings along."""
    thing = getattr(remap, name)
    if isinstance(thing, int):
        return  # a size: the reference says how many bytes
    assert inspect.getdoc(thing), name
    if not isinstance(thing, type):
        return
    for part in dir(thing):
        member = getattr(thing, part, None)
        ours = getattr(member, "__module__", "") or getattr(getattr(member, "fget", None), "__module__", "")
        if (
            not part.startswith("_")
            and (callable(member) or isinstance(member, property))
            and "remap" in ours
        ):
            assert inspect.getdoc(member), f"{name}.{part}"


def test_every_command_is_on_the_page() -> None:
    """The page of commands has each command, with what `--help` prints."""
    text = REFERENCE.pages()["commands.md"]
    for path, command in REFERENCE.commands():
        assert f"## {' '.join(path)}\n" in text
        for one in command.params:
            assert one.opts[0] in text


def test_a_room_that_nobody_lists_is_noticed() -> None:
    """A new room without a page stops the build, with the name of the file to change."""
    with pytest.raises(LookupError, match=r"reference_pages\.py"):
        REFERENCE.page_of("attic")


def test_profiles_of_drivers_are_compared(tmp_path: Path) -> None:
    """Profiles stand side by side; a rule that drivers answer differently is marked, and a cost is not."""
    for name, answer in (("a", "SUCCESS"), ("b", "UNKNOWN")):
        facts = {"about.device": name, "T1.same": 1 << 21, "T2.other": answer, "cost_us.map": answer}
        profile = {"measured": "2026-11-29", "drivers": {"host": facts}}
        (tmp_path / f"{name}.json").write_text(json.dumps(profile))
    text = REFERENCE.profiles_text(tmp_path)
    assert "| fact | a, 2026-11-29 | b, 2026-11-29 |\n" in text
    assert "| T1.same | 2,097,152 | 2,097,152 |\n" in text
    assert "| **T2.other** | SUCCESS | UNKNOWN |\n" in text
    assert "| cost_us.map | SUCCESS | UNKNOWN |\n" in text
    assert "None has been kept" in REFERENCE.profiles_text(tmp_path / "none")


TABLES = module(ROOT / "benchmarks" / "tables.py")


@pytest.mark.parametrize("name", TABLES.DOCUMENTS)
def test_figures_are_those_of_the_results(name: str) -> None:
    """Each table of figures is what `python benchmarks/tables.py` makes of the newest results (D7, D11)."""
    text = (ROOT / name).read_text()
    assert TABLES.filled(text) == text, "run benchmarks/tables.py"
    assert TABLES.NONE not in text
    for figures in re.findall(r"<!-- figures: .*?<!-- end -->", text, re.DOTALL):
        assert len(re.findall(r"^\|.*\d", figures, re.MULTILINE)) >= 2


def test_the_two_commands_of_the_readme_are_targets() -> None:
    """What the README tells a newcomer to type is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    typed = re.findall(r"^\$ make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert typed == ["demo", "test"]
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in typed)


def test_pictures_fetch_nothing() -> None:
    """Pictures name no other site, and no path of the machine that drew them."""
    pictures = sorted((DOCS / "pictures").glob("*.svg"))
    assert pictures
    for path in pictures:
        text = path.read_text()
        assert not re.search(r"url\(.?https?:|href=.https?:", text), path
        assert not re.search(r"/(home|root|work|tmp)/", text.replace("&#160;", " ")), path
