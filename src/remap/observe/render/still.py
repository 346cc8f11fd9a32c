"""A snapshot for a notebook: HTML without JavaScript, with every stretch of addresses as a bar, and the totals."""

from __future__ import annotations

from html import escape

from remap.cards import bar, colour
from remap.observe.lanes import Lane, lanes_of
from remap.observe.snapshot import Piece, Snapshot
from remap.sizes import counted, format_size
from remap.types import Held

MOST_LANES = 60


def still(snapshot: Snapshot, *, most: int = MOST_LANES) -> str:
    """Return the snapshot as a piece of HTML that any page can hold."""
    lanes = lanes_of(snapshot)
    rows = "".join(_row(lane) for lane in lanes[:most])
    more = f"<p>… and {len(lanes) - most:,} more stretches of addresses</p>" if len(lanes) > most else ""
    shares = snapshot.shares()
    totals = " &nbsp; ".join(
        f'<span style="display:inline-block;width:.8em;height:.8em;background:{colour(place)}"></span> '
        f"{escape(str(place))} {format_size(share.footprint)}"
        for place, share in shares.items()
        if share.footprint
    )
    head = (
        f"<b>{counted(len(snapshot.items), 'object')}</b> of process {snapshot.process} on the "
        f"{escape(snapshot.driver)} driver, footprint {format_size(sum(one.footprint for one in shares.values()))}"
    )
    return f'<div class="remap">{head}<div>{totals}</div>{rows}{more}</div>'


def _row(lane: Lane) -> str:
    owner = lane.owner
    state = f", paused ({owner.paused})" if owner.paused else ""
    said = f"{owner.kind} {owner.serial} at {lane.address:#x}: {format_size(lane.size)}"
    said += f", {format_size(lane.backed)} mapped{state}" if lane.reserved else ""
    said += f", the first {format_size(lane.drawn)} drawn" if lane.drawn < lane.size else ""
    return (
        f'<div style="margin-top:6px"><code>{escape(said)}</code>'
        f"{bar([_held(piece) for _, piece, _ in lane.pieces], lane.address, lane.drawn)}</div>"
    )


def _held(piece: Piece) -> Held:
    return Held(piece.address, piece.size, piece.location, piece.memory, piece.rights, piece.source)
