"""The map in the terminal: legible without colour and at 60 columns, with legend, scale, and totals that add up."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import remap
from remap import MiB
from remap.cli import run
from remap.observe.render.terminal import as_text, show
from remap.sizes import format_size, parse_size


@pytest.mark.parametrize("width", [20, 60, 100, 200])
def test_no_line_is_wider_than_the_terminal(program: Any, width: int) -> None:
    """Every line fits, the narrowest terminal included."""
    text = as_text(remap.snapshot(), width)
    assert max(map(len, text.splitlines())) <= max(width, 20)


def test_what_a_bar_shows(program: Any) -> None:
    """Holes, locations and rights are characters, so that they are there without colour."""
    lines = as_text(remap.snapshot(), 34).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("reservation"))
    bar = next(index for index, line in enumerate(lines[start:], start) if line.startswith("["))
    digit = str(remap.device().index)
    # 32 characters for 32 MiB: 4 MiB mapped at 0, at 8 and at 16 MiB.
    hole, piece = "." * 4, digit * 4
    assert lines[bar] == f"[{piece}{hole}{piece}{hole}{piece}{'.' * 12}]"
    assert lines[bar + 1].rstrip() == " wwww    rrrr    xxxx"


def test_legend_and_scale(program: Any) -> None:
    """The legend names every sign that is used, and how much a character is."""
    remap.pause(program.buffer)
    text = " ".join(as_text(remap.snapshot()).split())
    for said in (
        "0 device 0",
        ". nothing behind it",
        "z paused",
        "r read only",
        "x no access",
        "a character is",
    ):
        assert said in text


def test_totals_add_up(program: Any) -> None:
    """The terms of each sum give the footprint that stands behind the equals sign, and that is the snapshot's."""
    snapshot = remap.snapshot()
    text = as_text(snapshot, 200)
    place = remap.device().location
    line = next(line for line in text.splitlines() if line.startswith(f"{place}: "))
    terms, _, total = line.partition(": ")[2].partition(" = ")
    found = 0
    for sign, size in re.findall(r"(?:^|([+-]) )[a-z ]+?(\d[\d.]* [A-Za-z]+)", terms):
        found += (-1 if sign == "-" else 1) * parse_size(size)
    assert format_size(found) == total == format_size(snapshot.footprint()[place])


def test_many_stretches_are_counted_if_not_drawn() -> None:
    """Beyond `most`, stretches are not drawn, but their number and bytes are named and the totals hold them."""
    buffers = [remap.allocate(2 * MiB) for _ in range(5)]
    text = as_text(remap.snapshot(), most=2)
    for one in buffers:
        one.close()
    assert text.count("[") == 2
    assert "3 more stretches of addresses with 6 MiB behind them" in text
    assert "mapped 10 MiB" in text


def test_colour_only_on_a_terminal(program: Any) -> None:
    """Escape codes appear where the output is a terminal, and nowhere else."""
    snapshot = remap.snapshot()
    plain, coloured = io.StringIO(), io.StringIO()
    show(snapshot, Console(file=plain, width=80))
    show(snapshot, Console(file=coloured, width=80, force_terminal=True, color_system="standard"))
    assert "\x1b[" not in plain.getvalue()
    assert "\x1b[" in coloured.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured.getvalue()).split() == plain.getvalue().split()


def test_nothing_at_all() -> None:
    """An empty program has a map, too."""
    empty = dataclasses.replace(remap.snapshot(), items=())
    assert "no addresses are in use" in as_text(empty, 60)


def test_markup_in_names_is_text() -> None:
    """What looks like markup in a group's name is printed as it is."""
    with remap.group("[red]x[/red]"), remap.allocate(2 * MiB):
        assert "[red]x[/red]" in as_text(remap.snapshot())


STEERING = "\x1b]0;title\x07\x1b[2J\r\u202e"


def test_nothing_steers_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Characters of a file that would steer the terminal, or turn text around, are spelled out (11)."""
    first, second, trace = (str(tmp_path / name) for name in ("first.json", "second.json", "trace.json"))
    remap.snapshot().save(first)
    with remap.trace(trace), remap.group(STEERING), remap.allocate(2 * MiB):
        taken = remap.snapshot()
    items = tuple(dataclasses.replace(item, kind=STEERING, site=(STEERING,)) for item in taken.items)
    dataclasses.replace(taken, items=items, driver=STEERING, taken=STEERING).save(second)
    document = json.loads(Path(trace).read_text())
    document["otherData"].update(started=STEERING, driver=STEERING)
    for event in document["traceEvents"]:
        event.get("args", {}).update(method=STEERING)
    Path(trace).write_text(json.dumps(document))
    for words in (["map", second], ["map", second, "--since", first], ["trace", trace]):
        assert run(words) == 0
        said = capsys.readouterr().out
        assert "\\x1b]0;title\\x07" in "".join(said.split())
        assert not any(one in said for one in "\x1b\x07\r\u202e")


def test_the_command(
    program: Any, tmp_path: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`remap map` draws a file, writes a page, and shows what changed; a wrong file is one message and status 1."""
    monkeypatch.setenv("COLUMNS", "60")
    first, second, page = (f"{tmp_path}/{name}" for name in ("a.json", "b.json", "map.html"))
    remap.snapshot().save(first)
    program.ring.close()
    remap.snapshot().save(second)
    assert run(["map", first]) == 0
    assert "ring buffer" in capsys.readouterr().out
    assert run(["map", second, "--since", first]) == 0
    assert f"- ring buffer {program.ring.serial}" in capsys.readouterr().out
    assert run(["map", first, "--html", page]) == 0
    assert run(["map", page]) == 1
    assert "it is not JSON" in capsys.readouterr().err
    assert run(["map", f"{tmp_path}/none"]) == 1


def test_a_little_at_the_front_of_much() -> None:
    """A buffer that can grow far is drawn as far as it has grown, with room, and the bar says that it goes on."""
    with remap.ElasticBuffer("64GiB") as cache:
        cache.resize("8MiB")
        lines = as_text(remap.snapshot(), 34).splitlines()
        bar = next(line for line in lines if line.startswith("["))
        digit = str(remap.device().index)
        assert bar == f"[{digit * 16}{'.' * 16}>"
        text = " ".join(" ".join(lines).split())
        assert "64 GiB" in text
        assert "the first 16 MiB drawn" in text
        assert "> goes on, empty" in text
        assert "a character is 512 KiB" in text


def test_what_sleeps_is_drawn_where_it_will_be() -> None:
    """A paused buffer is z where its contents will be, not over all addresses that it could grow into."""
    with remap.ElasticBuffer("64MiB") as cache:
        cache.resize("16MiB")
        remap.pause(cache)
        lines = as_text(remap.snapshot(), 34).splitlines()
        assert f"[{'z' * 8}{'.' * 24}]" in lines
        assert "  16 MiB asleep, kept on the host" in lines


def test_imported_memory_is_told_apart() -> None:
    """What was imported is no part of the sums, as its maker counts it; a line says how much is mapped here."""
    held = sum(remap.snapshot().footprint().values())  # by pools of the driver's, for one
    with (
        remap.allocate(4 * MiB, shareable="posix_fd") as made,
        remap.open(remap.export(made).to_bytes()) as imported,
    ):
        lines = as_text(remap.snapshot()).splitlines()
        assert f"imported: {format_size(imported.size)}, counted where it was made" in lines
        assert lines[-1] == f"all: 2 objects, footprint {format_size(made.size + held)}"
    assert "imported" not in as_text(remap.snapshot())
