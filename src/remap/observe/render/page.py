"""A snapshot as one page that needs no other file and no network; `page.html` and `page.js` beside this are its form.

What comes from the program (names, groups, places in its source) is data in the page, never markup: it is JSON in a
script element of no executable type, and reaches the page as text.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from remap.cards import colour
from remap.observe.lanes import Lane, lanes_of
from remap.observe.snapshot import Item, Snapshot, sum_by_location
from remap.sizes import counted, format_size


def page(snapshot: Snapshot) -> str:
    """Return the page as HTML."""
    here = resources.files("remap.observe.render")
    # "<" can end a script element early, or begin a comment in it; as an escape it cannot.
    data = json.dumps(_data(snapshot), separators=(",", ":")).replace("<", "\\u003c")
    form, _, rest = here.joinpath("page.html").read_text("utf-8").partition("@data@")
    before, _, after = rest.partition("@script@")
    return f"{form}{data}{before}{here.joinpath('page.js').read_text('utf-8')}{after}"


def _data(snapshot: Snapshot) -> dict[str, Any]:
    tables = _Tables(snapshot)
    lanes = [tables.lane(lane) for lane in lanes_of(snapshot)]
    return {
        "about": f"{counted(len(snapshot.items), 'object')} of process {snapshot.process} "
        f"on the {snapshot.driver} driver ({snapshot.driver_version}), {snapshot.taken[:19].replace('T', ' ')} UTC.",
        "lanes": lanes,
        "items": [_item(item, at) for at, item in enumerate(snapshot.items)],
        "places": [{"name": str(place), "colour": colour(place)} for place in tables.places],
        "loose": [
            [piece.size, tables.places[piece.location], piece.memory]
            for item in snapshot.items
            for piece in item.pieces
            if piece.address is None and piece.memory not in tables.mapped
        ],
        "rights": list(tables.rights),
        "aliases": {memory: times for memory, times in tables.mapped.items() if times > 1},
        "totals": _totals(snapshot),
    }


class _Tables:
    """What the lanes of a page name by number: places, objects and rights; and how often they map each memory."""

    def __init__(self, snapshot: Snapshot) -> None:
        places = list(snapshot.shares())
        places += sorted({piece.location for item in snapshot.items for piece in item.pieces} - set(places))
        self.places = {place: at for at, place in enumerate(places)}
        self.numbers = {item.serial: index for index, item in enumerate(snapshot.items)}
        self.rights: dict[str, int] = {"": 0}
        self.mapped: dict[int, int] = {}

    def lane(self, lane: Lane) -> dict[str, Any]:
        """Return a lane, and count what it maps."""
        pieces: list[list[Any]] = []
        for offset, piece, item in lane.pieces:
            said = ", ".join(f"{place} {right}" for place, right in piece.rights)
            self.mapped[piece.memory] = self.mapped.get(piece.memory, 0) + 1
            pieces.append(
                [
                    offset,
                    piece.size,
                    self.places[piece.location],
                    piece.memory,
                    str(piece.right),
                    self.numbers[item.serial],
                    self.rights.setdefault(said, len(self.rights)),
                ]
            )
        owner = lane.owner
        return {
            "address": str(lane.address),
            "size": lane.size,
            "drawn": lane.drawn,
            "asleep": lane.asleep,
            "owner": self.numbers[owner.serial],
            "title": _title(owner),
            "state": _state(owner),
            "backed": lane.backed,
            "site": owner.site[0] if owner.site else "",
            "pieces": pieces,
        }


def _totals(snapshot: Snapshot) -> list[dict[str, Any]]:
    state = {one.location: one for one in snapshot.devices}
    return [
        {
            "name": str(place),
            "mapped": share.mapped,
            "aliases": share.aliases,
            "unmapped": share.unmapped,
            "pools": share.pools,
            "graphs": share.graphs,
            "footprint": share.footprint,
            **({"used": state[place].used, "total": state[place].total} if place in state else {}),
        }
        for place, share in snapshot.shares().items()
    ]


def _item(item: Item, index: int) -> dict[str, Any]:
    held = ", ".join(
        f"{format_size(size)} on {place}" for place, size in sum_by_location(item.pieces).items()
    )
    rights = dict.fromkeys(f"{place} {right}" for piece in item.pieces[:100] for place, right in piece.rights)
    address = None if item.address is None else str(item.address)
    said = {
        "title": _title(item),
        "memory": held,
        "rights": ", ".join(rights),
        "state": _state(item) or item.detail,
        "site": item.site[0] if item.site else "",
    }
    where = "" if item.address is None else f"{item.address:#x}"
    text = " ".join([*said.values(), where, item.detail, *item.groups]).lower()
    return {**said, "index": index, "size": item.size, "address": address, "text": text}


def _title(item: Item) -> str:
    return f"{item.kind} {item.serial}"


def _state(item: Item) -> str:
    parts = [f"paused, {item.paused}"] if item.paused else []
    parts += ["shared with other processes"] if item.shared else []
    parts += [f"in {', '.join(item.groups)}"] if item.groups else []
    return "; ".join(parts)
