"""Snapshots in files: JSON with a version, and everything checked on the way back in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from remap.errors import InvalidValueError
from remap.observe.reading import (
    Fields,
    FileLike,
    check_list,
    check_number,
    check_text,
    parse_json,
    read_text,
)
from remap.observe.snapshot import DeviceState, Item, Piece, Snapshot
from remap.types import Access, Location, LocationKind

FORMAT, VERSION = "remap snapshot", 1
_SOURCES = ("own", "pool", "graph", "foreign")
_PLACES = {"device": LocationKind.DEVICE, "host node": LocationKind.HOST_NUMA}


def to_json(snapshot: Snapshot) -> str:
    """Return a snapshot as JSON text."""
    return json.dumps(as_values(snapshot), separators=(",", ":"), ensure_ascii=False)


def as_values(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as values that JSON can hold; pieces are lists, since there may be 100,000 of them."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "taken": snapshot.taken,
        "process": snapshot.process,
        "driver": snapshot.driver,
        "driver_version": snapshot.driver_version,
        "devices": [
            {name: getattr(one, name) for name in DeviceState.__dataclass_fields__}
            for one in snapshot.devices
        ],
        "items": [
            {
                "kind": item.kind,
                "serial": item.serial,
                "size": item.size,
                "address": item.address,
                "detail": item.detail,
                "reserved": item.reserved,
                "pieces": [
                    [
                        piece.address,
                        piece.size,
                        str(piece.location),
                        piece.memory,
                        [[str(place), str(right)] for place, right in piece.rights],
                        piece.source,
                    ]
                    for piece in item.pieces
                ],
                "paused": item.paused,
                "shared": item.shared,
                "kept": item.kept,
                "groups": item.groups,
                "site": item.site,
            }
            for item in snapshot.items
        ],
    }


def from_json(text: str) -> Snapshot:
    """Return the snapshot that JSON text holds; raises `InvalidValueError` naming what is wrong with it."""
    fields = Fields(parse_json(text, "a snapshot"), "a snapshot")
    if not fields.says("format", FORMAT):
        raise InvalidValueError(
            "a snapshot",
            rule=f"the file is not of the format {FORMAT!r}",
            next_step="remap.snapshot().save(path) writes one; a trace is read by: remap trace FILE",
        )
    version = fields.number("version")
    if version != VERSION:
        raise InvalidValueError(
            f"a snapshot of version {version}",
            rule=f"this remap reads version {VERSION}",
            next_step="Read it with the remap that wrote it",
        )
    return Snapshot(
        fields.text("taken"),
        fields.number("process"),
        fields.text("driver"),
        fields.text("driver_version"),
        fields.each("devices", _device),
        fields.each("items", _item),
    )


def save(snapshot: Snapshot, path: FileLike) -> Path:
    """Write a snapshot as a page or as JSON, by the ending of the name."""
    target = Path(path)
    text = snapshot.to_html() if target.suffix.lower() in (".html", ".htm") else to_json(snapshot)
    target.write_text(text, encoding="utf-8")
    return target


def load(path: FileLike) -> Snapshot:
    """Read a snapshot from a file of up to 256 MiB."""
    return from_json(read_text(path, "snapshot"))


def _device(value: Any, what: str) -> DeviceState:
    fields = Fields(value, what)
    return DeviceState(
        fields.number("index"),
        fields.text("name"),
        fields.maybe_number("free"),
        fields.maybe_number("total"),
        *(fields.number(name) for name in ("pool_reserved", "pool_used", "graph_reserved", "graph_used")),
    )


def _item(value: Any, what: str) -> Item:
    fields = Fields(value, what)
    reserved = value.get("reserved")
    if reserved is not None:
        address, size = check_list(reserved, f"{what}: reserved", 2)
        reserved = (check_number(address, f"{what}: reserved"), check_number(size, f"{what}: reserved"))
    return Item(
        fields.text("kind"),
        fields.number("serial"),
        fields.number("size"),
        fields.maybe_number("address"),
        fields.text("detail"),
        reserved,
        fields.each("pieces", _piece),
        fields.text("paused"),
        fields.flag("shared"),
        fields.number("kept"),
        fields.each("groups", check_text),
        fields.each("site", check_text),
    )


def _piece(value: Any, what: str) -> Piece:
    address, size, place, memory, rights, source = check_list(value, what, 6)
    if source not in _SOURCES:
        raise InvalidValueError(f"{what}: source {source!r}", rule=f"it is one of {', '.join(_SOURCES)}")
    return Piece(
        None if address is None else check_number(address, what),
        check_number(size, what),
        parse_location(place, what),
        check_number(memory, what),
        tuple(_right(entry, what) for entry in check_list(rights, what)),
        source,
    )


def _right(value: Any, what: str) -> tuple[Location, Access]:
    place, right = check_list(value, what, 2)
    return parse_location(place, what), Access.parse(check_text(right, what))


def parse_location(value: Any, what: str) -> Location:
    """Return a location by its name: `device 0`, `host`, `host node 1`."""
    text = check_text(value, what)
    if text == "host":
        return Location(LocationKind.HOST)
    kind, _, number = text.rpartition(" ")
    if kind not in _PLACES or not (number.isascii() and number.isdigit() and len(number) < 7):
        raise InvalidValueError(
            f"{what}: location {text!r}", rule='locations are "device 0", "host", "host node 0"'
        )
    return Location(_PLACES[kind], int(number))
