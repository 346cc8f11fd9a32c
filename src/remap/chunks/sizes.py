"""Chunk sizes: how large the physical allocations of a growing buffer are.

Granting access costs about 32 µs for each mapping, whatever its size up to 64 MiB, so a buffer that grows in small
steps maps larger chunks than it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from remap.errors import InvalidValueError
from remap.sizes import MiB, Size, check_aligned, parse_size

ChunkLike: TypeAlias = Size | Literal["exact", "geometric"]
"""What is taken as `chunk=`: a size, "exact" or "geometric"."""

LARGEST_CHUNK = 64 * MiB  # beyond it, mapping costs more per chunk and no less per byte


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """How a range is cut into chunks. Made by `parse_chunk`.

    "exact" takes one chunk for each request. "fixed" takes chunks of `unit` bytes, which begin at multiples of it.
    "geometric" takes what was asked for or a quarter of what is mapped in front of it, whichever is more, from one
    granule up to `largest`: growing in small steps then maps rarely, and takes at most a quarter too much.
    """

    kind: Literal["exact", "fixed", "geometric"]
    unit: int
    largest: int

    def cut(self, start: int, stop: int, room: int, before: int, *, tight: bool = False) -> list[int]:
        """Return the sizes of chunks that lie one after the other from `start` on, and cover the bytes up to `stop`.

        They end at `room` at the latest; `before` bytes are mapped right in front. `tight` takes no more than needed.
        """
        if self.kind == "exact":
            return [stop - start]
        sizes: list[int] = []
        at = start
        while at < stop:
            size = self.unit
            if self.kind == "geometric":
                size = max(_power_below(before // 4), _power_below(stop - at))
                size = max(min(size, self.largest) // self.unit * self.unit, self.unit)
            size = min(size, (stop if tight and self.kind == "geometric" else room) - at)
            sizes.append(size)
            at += size
            before += size
        return sizes

    def next(self, at: int, room: int, before: int) -> int:
        """Return the size of the next chunk where nothing in particular was asked for."""
        if self.kind == "exact":
            return min(self.largest, room - at)
        return self.cut(at, min(at + self.unit, room), room, before)[0]


def parse_chunk(chunk: ChunkLike | None, granule: int, *, shareable: bool = False) -> ChunkSizes:
    """Return what `chunk=` means; raises `AlignmentError` for a size that is no multiple of the granule.

    None is "geometric", or "exact" for shareable memory, where each chunk costs its importers a handle.
    """
    if chunk is None:
        chunk = "exact" if shareable else "geometric"
    largest = max(LARGEST_CHUNK // granule * granule, granule)
    if chunk == "exact":
        return ChunkSizes("exact", granule, largest)
    if chunk == "geometric":
        return ChunkSizes("geometric", granule, largest)
    size = parse_size(chunk, "chunk")
    if size == 0:
        raise InvalidValueError(
            "chunk 0", rule='it is "exact", "geometric" or a size of one granule and more'
        )
    return ChunkSizes("fixed", check_aligned(size, granule, "chunk"), largest)


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number > 0 else 0
