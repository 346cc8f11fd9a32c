"""Which physical memory the arguments of a launch stand on, so that two that share bytes are found, aliases included.

Two addresses may be one memory: an allocation that is mapped twice, or two halves of a ring buffer. The driver tells:
the handle of what is mapped at an address is the same for all its mappings. What it said is kept with the object that
owns the address, until that object's memory changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from remap.errors import DriverError, LaunchError
from remap.spans import Span


class Piece(NamedTuple):
    """One mapping: where it starts, its size, and what tells its allocation from all others."""

    address: int
    size: int
    identity: object


class Physical(NamedTuple):
    """The mappings behind a span; `doubled` says that one allocation is behind it more than once."""

    version: tuple[int, int]
    identities: frozenset[object]
    pieces: tuple[Piece, ...]
    doubled: bool


class Place(NamedTuple):
    """An array as far as this file is concerned; `owner` is None for memory of other libraries."""

    name: str
    owner: Span | None
    address: int
    size: int
    written: bool


def physical(span: Span) -> Physical:
    """Return what stands behind a span. Asks the driver the first time, and when it has changed."""
    version = (getattr(span, "generation", 0), span.size)
    known: Physical | None = span.__dict__.get("_physical")
    if known is not None and known.version == version:
        return known
    driver, pieces, answered = span._driver, list[Piece](), True
    places = span.accessing
    # Not every question can be asked without a context.
    with places[0].current() if places else nullcontext():
        for start, size in span._ranges():
            at = start
            while at < start + size:
                piece = _piece(driver, at)
                if piece is None:
                    piece, answered = Piece(at, start + size - at, ("address", at)), False
                pieces.append(piece)
                at = piece.address + piece.size
    identities = frozenset(piece.identity for piece in pieces)
    found = Physical(version, identities, tuple(pieces), len(identities) < len(pieces))
    if answered:  # what no device may touch yet may be given rights, which counts as no change
        span.__dict__["_physical"] = found
    return found


def _piece(driver: Any, at: int) -> Piece | None:
    """Return the mapping at an address; None where no device may touch it, and the driver does not tell."""
    try:
        found = driver.address_range(at)
    except DriverError:
        return None
    try:
        handle = driver.retain(found.base)
    except DriverError:  # plain memory: nothing else is mapped to it
        return Piece(found.base, found.size, ("address", found.base))
    driver.release(handle)
    return Piece(found.base, found.size, handle)


def share_bytes(one: Place, other: Place) -> bool:
    """Tell whether two arrays have a byte of physical memory in common."""
    if not one.size or not other.size:
        return False
    if one.address < other.address + other.size and other.address < one.address + one.size:
        return True
    if one.owner is None or other.owner is None:
        return False
    first, second = physical(one.owner), physical(other.owner)
    if first is second and not first.doubled:
        return False
    if first.identities.isdisjoint(second.identities):
        return False
    return any(
        a.identity == b.identity and a.start < b.stop and b.start < a.stop
        for a in _parts(one, first)
        for b in _parts(other, second)
    )


def covers_twice(one: Place) -> bool:
    """Tell whether an array has one physical byte at two of its elements."""
    if one.owner is None:
        return False
    found = physical(one.owner)
    if not found.doubled:
        return False
    parts = _parts(one, found)
    return any(
        a.identity == b.identity and a.start < b.stop and b.start < a.stop
        for number, a in enumerate(parts)
        for b in parts[number + 1 :]
    )


class Part(NamedTuple):
    """Bytes `start` to `stop` of one allocation, which an array has at `address`."""

    identity: object
    start: int
    stop: int
    address: int


def _parts(one: Place, found: Physical) -> list[Part]:
    parts: list[Part] = []
    for piece in found.pieces:
        first, last = max(one.address, piece.address), min(one.address + one.size, piece.address + piece.size)
        if first < last:
            parts.append(Part(piece.identity, first - piece.address, last - piece.address, first))
    return parts


def parts_of(one: Place) -> list[Part]:
    """Return the bytes of allocations behind an array, in the order of its addresses."""
    if one.owner is None:
        return [Part(("address", one.address), 0, one.size, one.address)]
    return _parts(one, physical(one.owner))


def check_disjoint(asked: str, places: Sequence[Place]) -> None:
    """Raise `LaunchError` if an array that is written shares memory with another argument, or with itself."""
    for number, one in enumerate(places):
        if not one.written:
            continue
        if covers_twice(one):
            raise LaunchError(
                f"{asked} with argument {one.name!r}",
                rule="one memory lies behind it twice, so that two threads would write one element",
                next_step=_STEP,
            )
        for place, other in enumerate(places):
            # Two that are written meet once, not twice.
            if place == number or (other.written and place < number):
                continue
            if share_bytes(one, other):
                raise LaunchError(
                    f"{asked} with arguments {one.name!r} and {other.name!r}",
                    rule=f"{one.name!r} is written, and both stand on the same memory in part",
                    next_step=_STEP,
                )


_STEP = "Use separate memory, or pass allow_overlap=True to promise that no two threads meet there"
