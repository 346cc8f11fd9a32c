"""Cards: one object for a notebook, in HTML without JavaScript: what it is, and a bar of the bytes behind it."""

from __future__ import annotations

from html import escape

from remap.sizes import format_size
from remap.types import Access, Facts, Held, Location

COLOURS = ("#2a9fd6", "#e8a317", "#3fa34d", "#b65fcf", "#5b6ee1", "#d64550", "#14938f", "#a0693b")
HOST = "#8a8f98"
_STRIPES = "repeating-linear-gradient(45deg,transparent 0 4px,rgba(255,255,255,.55) 4px 7px)"
_MOST = 400


def colour(place: Location) -> str:
    """Return the colour of a location, the same in every picture."""
    return COLOURS[place.index % len(COLOURS)] if place.is_device else HOST


def card(title: str, facts: Facts) -> str:
    """Return one object as HTML: its description, and its addresses as a bar."""
    held = [one for one in facts.held if one.address is not None]
    start, size = facts.reserved or (
        min((one.address or 0 for one in held), default=0),
        sum(h.size for h in held),
    )
    said = escape(title) + (f" &middot; in {escape(', '.join(facts.groups))}" if facts.groups else "")
    return f'<div class="remap"><code>{said}</code>{bar(held, start, size)}{legend(held)}</div>'


def bar(held: list[Held], start: int, size: int) -> str:
    """Return addresses from `start` on as a bar: a colour for each location, stripes where nothing may be written."""
    if not size:
        return ""
    parts: list[str] = []
    for one in sorted(held, key=lambda piece: piece.address or 0)[:_MOST]:
        left, width = ((one.address or 0) - start) / size * 100, one.size / size * 100
        writable = any(right is Access.READ_WRITE for _, right in one.rights)
        look = f"background:{'' if writable else _STRIPES + ','}{colour(one.location)}"
        rights = ", ".join(f"{place} {right}" for place, right in one.rights) or "no access"
        told = escape(f"{format_size(one.size)} at {one.address:#x} on {one.location}; {rights}")
        parts.append(
            f'<div title="{told}" style="position:absolute;top:0;bottom:0;left:{left:.4f}%;width:max(1px,{width:.4f}%);'
            f'{look}"></div>'
        )
    return (
        '<div style="position:relative;height:14px;margin:3px 0;border:1px solid #8886;background:#8882">'
        f"{''.join(parts)}</div>"
    )


def legend(held: list[Held]) -> str:
    """Return which colour is which location, with the bytes of each, aliases counted once."""
    counted: dict[object, Held] = {}
    for one in held:
        counted[object() if one.memory is None else one.memory] = one
    total: dict[Location, int] = {}
    for one in counted.values():
        total[one.location] = total.get(one.location, 0) + one.size
    parts = [
        f'<span style="display:inline-block;width:.8em;height:.8em;background:{colour(place)}"></span> '
        f"{escape(str(place))} {format_size(size)}"
        for place, size in total.items()
    ]
    more = f" &middot; {len(held) - _MOST:,} more not drawn" if len(held) > _MOST else ""
    return f"<small>{' &nbsp; '.join(parts)}{more}</small>" if parts else ""
