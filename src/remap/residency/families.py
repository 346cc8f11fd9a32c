"""Forks sleep and move together: what they share is kept, made and copied once, by one of them that carries it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from remap.buffers.base import Buffer
from remap.buffers.changes import shares_of
from remap.buffers.forking import ForkingBuffer
from remap.buffers.shares import Share
from remap.residency.stores import Asleep, Keep
from remap.spans import Chunk

Carriers: TypeAlias = Mapping[Share, Buffer]
"""Which buffer carries each chunk that forks share."""


def reclaim(buffers: Iterable[Buffer]) -> None:
    """Let buffers that are awake have what no fork has any more for themselves."""
    for buffer in buffers:
        if isinstance(buffer, ForkingBuffer) and buffer._shares:
            with buffer._driver.lock:
                buffer._reclaim(buffer._shared_chunks(0, buffer.capacity))


def forget_sole(buffers: Iterable[Buffer]) -> None:
    """Do the same for buffers that sleep: nothing is mapped, so that there are no rights to be given back."""
    for buffer in buffers:
        if isinstance(buffer, ForkingBuffer) and buffer._shares:
            with buffer._driver.lock:
                for address in [at for at, share in buffer._shares.items() if share.users == 1]:
                    del buffer._shares[address]


def carriers(plans: Mapping[Buffer, Keep]) -> Carriers:
    """Return who carries each chunk that forks share: the first whose contents are kept, else the first."""
    found: dict[Share, Buffer] = {}
    for buffer, kept in plans.items():
        for share in shares_of(buffer).values():
            before = found.setdefault(share, buffer)
            if kept is not None and plans[before] is None:
                found[share] = buffer
    return found


def carried(buffer: Buffer, by: Carriers) -> Sequence[Chunk]:
    """Return the chunks of a buffer but for those that others carry."""
    shares = shares_of(buffer) if by else None
    if not shares:
        return buffer._chunks
    return [
        chunk
        for chunk in buffer._chunks
        if (share := shares.get(chunk.address)) is None or by[share] is buffer
    ]


def carried_bytes(buffers: Iterable[Buffer], by: Carriers) -> int:
    """Return the bytes behind buffers, what forks share counted once."""
    return sum(chunk.size for buffer in buffers for chunk in carried(buffer, by))


def note_sources(backups: Mapping[Buffer, Asleep], by: Carriers) -> None:
    """Let the backups of forks know where the bytes of each chunk lie."""
    places: dict[Share, tuple[Buffer, int]] = {}
    for buffer in backups if by else ():
        shares, offset = shares_of(buffer), 0
        for chunk in carried(buffer, by) if shares else ():
            if chunk.address in shares:
                places[shares[chunk.address]] = buffer, offset
            offset += chunk.size
    for buffer, backup in backups.items() if by else ():
        shares, offset = shares_of(buffer), 0
        sources: list[tuple[Asleep | None, int]] = []
        for chunk in buffer._chunks if shares else ():
            share = shares.get(chunk.address)
            if share is None or by[share] is buffer:
                sources.append((None, offset))
                offset += chunk.size
            else:
                carrier, there = places[share]
                sources.append((backups[carrier], there))
        backup.note(sources)
