"""A snapshot in the terminal: each stretch of addresses as a bar, with legend, scale, and totals that add up.

A character stands for an equal share of its bar; its digit names the device that holds the bytes, so that nothing is
lost where there is no colour. Below a bar in which not everything may be written stands a second line with the rights.
"""

from __future__ import annotations

import io
import textwrap
from bisect import bisect_right
from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.text import Text

from remap.observe.lanes import Lane, lanes_of
from remap.observe.reading import printable
from remap.observe.snapshot import Piece, Share, Snapshot, sum_by_location
from remap.sizes import counted, format_size
from remap.types import Access, Location

MOST_LANES = 40
_NARROWEST = 20
_STYLES = (
    "black on cyan",
    "black on yellow",
    "black on green",
    "black on magenta",
    "white on blue",
    "white on red",
)
_HOLE, _PAUSED, _ON = ".", "z", ">"
_RIGHTS = {Access.READ_WRITE: "w", Access.READ: "r", Access.NONE: "x"}


def show(snapshot: Snapshot, console: Console | None = None, *, most: int = MOST_LANES) -> None:
    """Print the map. Colour appears on a terminal only; `most` bounds how many stretches are drawn."""
    to = console or Console(highlight=False, markup=False, emoji=False)
    for line in lines(snapshot, max(to.width, _NARROWEST), most=most):
        line.rstrip()
        to.print(line, soft_wrap=True)


def as_text(snapshot: Snapshot, width: int = 100, *, most: int = MOST_LANES) -> str:
    """Return the map as plain text."""
    to = Console(
        file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False, emoji=False
    )
    show(snapshot, to, most=most)
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue().rstrip("\n")


def lines(snapshot: Snapshot, width: int, *, most: int = MOST_LANES) -> Iterator[Text]:
    """Yield the map line by line."""
    yield from _wrapped(
        f"process {snapshot.process} on the {snapshot.driver} driver, {snapshot.taken[:19].replace('T', ' ')} UTC",
        width,
    )
    lanes = lanes_of(snapshot)
    if not lanes:
        yield Text("no addresses are in use")
    for lane in lanes[:most]:
        yield Text()
        yield from _lane(lane, width)
    if len(lanes) > most:
        rest = lanes[most:]
        backed = format_size(sum(lane.backed for lane in rest))
        yield Text()
        yield from _wrapped(
            f"… and {len(rest):,} more stretches of addresses with {backed} behind them", width
        )
    yield Text()
    yield from _legend(lanes[:most], width)
    yield Text()
    yield from _totals(snapshot, width)


def _lane(lane: Lane, width: int) -> Iterator[Text]:
    owner = lane.owner
    title = f"{owner.kind} {owner.serial}"
    others = len(lane.items) - 1
    if others:
        title += f" with {others} {'mapping' if others == 1 else 'mappings'}"
    about = [f"{lane.address:#x}", format_size(lane.size)]
    if lane.reserved:
        about.append(f"{format_size(lane.backed)} mapped")
    about += [f"paused, {owner.paused}"] if owner.paused else []
    about += [f"the first {format_size(lane.drawn)} drawn"] if lane.drawn < lane.size else []
    about += ["shared"] if owner.shared else []
    about += [f"in {', '.join(owner.groups)}"] if owner.groups else []
    yield from _wrapped(f"{title}: {'; '.join(about)}", width, "bold")
    if owner.site:
        yield from _wrapped(f"  made at {owner.site[0]}", width, "dim")
    cells = width - 2
    found = list(_cells(lane, cells))
    asleep = -(-lane.asleep * cells // lane.drawn)
    yield _bar([_place(piece, at < asleep) for at, piece in enumerate(found)], lane.drawn < lane.size)
    rights = "".join(_RIGHTS[piece.right] if piece else " " for piece in found)
    if set(rights) - {"w", " "}:
        yield Text(f" {rights}")
    yield from _wrapped(_held(lane), width)


def _cells(lane: Lane, count: int) -> Iterator[Piece | None]:
    """Yield for each cell the piece at its beginning, or the first one that begins within it, or None."""
    starts = [offset for offset, _, _ in lane.pieces]
    for cell in range(count):
        start, stop = cell * lane.drawn // count, (cell + 1) * lane.drawn // count
        index = bisect_right(starts, start) - 1
        if index >= 0 and starts[index] + lane.pieces[index][1].size > start:
            yield lane.pieces[index][1]
        elif index + 1 < len(starts) and starts[index + 1] < max(stop, start + 1):
            yield lane.pieces[index + 1][1]
        else:
            yield None


def _place(piece: Piece | None, asleep: bool) -> tuple[str, str]:
    if piece is None:
        return (_PAUSED if asleep else _HOLE, "dim")
    return symbol(piece.location), style(piece.location)


def _bar(cells: list[tuple[str, str]], goes_on: bool) -> Text:
    parts = [
        ("".join(mark for mark, _ in same), look) for look, same in groupby(cells, key=lambda cell: cell[1])
    ]
    return Text.assemble("[", *parts, _ON if goes_on else "]")


def _held(lane: Lane) -> str:
    if lane.asleep and not lane.pieces:
        return f"  {format_size(lane.asleep)} asleep, {lane.owner.paused}"
    held = sum_by_location(piece for _, piece, _ in lane.pieces)
    said = (
        " + ".join(f"{format_size(size)} on {place}" for place, size in held.items()) or "nothing behind it"
    )
    aliases = lane.backed - sum(held.values())
    return f"  {said}" + (f"; {format_size(aliases)} of it mapped again" if aliases else "")


def _legend(lanes: list[Lane], width: int) -> Iterator[Text]:
    places = sorted({piece.location for lane in lanes for _, piece, _ in lane.pieces})
    parts = [f"{symbol(place)} {place}" for place in places]
    parts += [f"{_HOLE} nothing behind it"] if any(lane.backed < lane.size for lane in lanes) else []
    parts += [f"{_PAUSED} paused"] if any(lane.asleep for lane in lanes) else []
    parts += [f"{_ON} goes on, empty"] if any(lane.drawn < lane.size for lane in lanes) else []
    rights = {piece.right for lane in lanes for _, piece, _ in lane.pieces}
    if rights - {Access.READ_WRITE}:
        parts.append("below: w may be written, r read only, x no access")
    if lanes:
        cells = width - 2
        scales = sorted({-(-lane.drawn // cells) for lane in lanes})
        least, most = format_size(scales[0]), format_size(scales[-1])
        parts.append(f"a character is {least if least == most else f'{least} to {most}'}")
    yield from _wrapped("legend: " + "; ".join(parts), width)


def _totals(snapshot: Snapshot, width: int) -> Iterator[Text]:
    shares = snapshot.shares()
    state = {one.location: one for one in snapshot.devices}
    for place, share in shares.items():
        if place not in state and not share.footprint:
            continue
        yield from _wrapped(f"{place}: {_sum(share)}", width)
        one = state.get(place)
        if one is not None and one.used is not None and one.total is not None:
            other = one.used - share.footprint
            yield from _wrapped(
                f"  {format_size(one.used)} of {format_size(one.total)} in use there: these and "
                f"{format_size(other)} of contexts and others"
                if other >= 0
                else f"  {format_size(one.used)} of {format_size(one.total)} in use there",
                width,
            )
    total = sum(share.footprint for share in shares.values())
    theirs = {
        piece.memory: piece.size
        for item in snapshot.items
        for piece in item.pieces
        if piece.source == "foreign"
    }
    if theirs:
        size = format_size(sum(theirs.values()))
        yield from _wrapped(f"imported: {size}, counted where it was made", width)
    kept = f"; backups take {format_size(snapshot.kept)} of host memory" if snapshot.kept else ""
    yield from _wrapped(
        f"all: {counted(len(snapshot.items), 'object')}, footprint {format_size(total)}{kept}", width
    )


def _sum(share: Share) -> str:
    parts = [f"mapped {format_size(share.mapped)}"]
    for sign, name, size in (
        ("-", "mapped again", share.aliases),
        ("+", "mapped nowhere", share.unmapped),
        ("+", "pool", share.pools),
        ("+", "graphs", share.graphs),
    ):
        if size:
            parts.append(f"{sign} {name} {format_size(size)}")
    return f"{' '.join(parts)} = {format_size(share.footprint)}"


def symbol(place: Location) -> str:
    """Return the one character that stands for a location: the last digit of a device's number, or h."""
    return str(place.index % 10) if place.is_device else "h"


def style(place: Location) -> str:
    """Return the colours of a location."""
    return _STYLES[place.index % len(_STYLES)] if place.is_device else "black on white"


def _wrapped(line: str, width: int, look: str = "") -> Iterator[Text]:
    indent = " " * (len(line) - len(line.lstrip()))
    parts = textwrap.wrap(
        printable(line.strip()),
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )
    for part in parts or [""]:
        yield Text(part, look)
