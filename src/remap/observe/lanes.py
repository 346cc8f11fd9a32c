"""Lanes: the address space as people look at it, one stretch of addresses after the other, with what lies in each."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from remap.observe.snapshot import Item, Piece, Snapshot

_SMALL_PART = 8  # what is used of a stretch is drawn larger if it is below this part of the stretch


@dataclass(slots=True)
class Lane:
    """A stretch of addresses: a reservation, or memory whose addresses nobody reserved; pieces in order of address."""

    address: int
    size: int
    owner: Item
    pieces: list[tuple[int, Piece, Item]] = field(default_factory=list[tuple[int, Piece, Item]])
    reserved: bool = True

    @property
    def items(self) -> list[Item]:
        """The objects that have something here, the owner first."""
        return list(
            {item.serial: item for item in (self.owner, *(item for _, _, item in self.pieces))}.values()
        )

    @property
    def backed(self) -> int:
        """The bytes of this lane that have memory behind them."""
        return sum(piece.size for _, piece, _ in self.pieces)

    @property
    def asleep(self) -> int:
        """The bytes from the first address on whose contents are kept elsewhere: those of a paused buffer."""
        return self.owner.size if self.owner.paused else 0

    @property
    def drawn(self) -> int:
        """How many of the bytes a picture shows: all, or, where only a little at the front is in use, that with room.

        A cache of 40 MiB in a reservation of 64 GiB would be a hairline otherwise.
        """
        used = max([offset + piece.size for offset, piece, _ in self.pieces[-1:]], default=0)
        used = max(used, self.asleep)
        if not used or used > self.size // _SMALL_PART:
            return self.size
        return 1 << (2 * used - 1).bit_length()


def lanes_of(snapshot: Snapshot) -> list[Lane]:
    """Return all lanes in order of address. Each piece that is mapped is in exactly one of them."""
    lanes = sorted(
        (
            Lane(*item.reserved, item)
            for item in snapshot.items
            if item.reserved is not None and item.reserved[1]
        ),
        key=lambda lane: lane.address,
    )
    starts = [lane.address for lane in lanes]
    loose: list[Lane] = []
    for item in snapshot.items:
        for piece in item.pieces:
            if piece.address is None:
                continue
            index = bisect_right(starts, piece.address) - 1
            if index >= 0 and piece.address < lanes[index].address + lanes[index].size:
                lane = lanes[index]
            else:
                lane = Lane(piece.address, piece.size, item, reserved=False)
                loose.append(lane)
            lane.pieces.append((piece.address - lane.address, piece, item))
    found = sorted([*lanes, *loose], key=lambda lane: lane.address)
    for lane in found:
        lane.pieces.sort(key=lambda entry: entry[0])
    return found
