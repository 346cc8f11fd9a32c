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
    lanes = lanes_of(snapshot)
    numbers = {item.serial: index for index, item in enumerate(snapshot.items)}
    places = list(snapshot.shares())
    places += sorted({piece.location for item in snapshot.items for piece in item.pieces} - set(places))
    index = {place: at for at, place in enumerate(places)}
    rights: dict[str, int] = {"": 0}
    mapped: dict[int, int] = {}

    def lane_of(lane: Lane) -> dict[str, Any]:
        pieces: list[list[Any]] = []
        for offset, piece, item in lane.pieces:
            said = ", ".join(f"{place} {right}" for place, right in piece.rights)
            mapped[piece.memory] = mapped.get(piece.memory, 0) + 1
            pieces.append(
                [
                    offset,
                    piece.size,
                    index[piece.location],
                    piece.memory,
                    str(piece.right),
                    numbers[item.serial],
                    rights.setdefault(said, len(rights)),
                ]
            )
        owner = lane.owner
        return {
            "address": str(lane.address),
            "size": lane.size,
            "drawn": lane.drawn,
            "asleep": lane.asleep,
            "owner": numbers[owner.serial],
            "title": _title(owner),
            "state": _state(owner),
            "backed": lane.backed,
            "site": owner.site[0] if owner.site else "",
            "pieces": pieces,
        }

    drawn = [lane_of(lane) for lane in lanes]
    loose = [
        [piece.size, index[piece.location], piece.memory]
        for item in snapshot.items
        for piece in item.pieces
        if piece.address is None and piece.memory not in mapped
    ]
    state = {one.location: one for one in snapshot.devices}
    return {
        "about": f"{counted(len(snapshot.items), 'object')} of process {snapshot.process} "
        f"on the {snapshot.driver} driver ({snapshot.driver_version}), {snapshot.taken[:19].replace('T', ' ')} UTC.",
        "lanes": drawn,
        "items": [_item(item, at) for at, item in enumerate(snapshot.items)],
        "places": [{"name": str(place), "colour": colour(place)} for place in places],
        "loose": loose,
        "rights": list(rights),
        "aliases": {memory: times for memory, times in mapped.items() if times > 1},
        "totals": [
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
        ],
    }


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
