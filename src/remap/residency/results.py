"""What a move did and what the pool holds, as frozen figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from remap.sizes import counted, format_size
from remap.types import Location, MemoryInfo

Progress: TypeAlias = Callable[[int, int], None]
"""What is called with (bytes done, bytes in all) while a move goes on, by the thread that asked for it.

If it raises before anything was given back, the move ends there and everything is as it was.
"""


@dataclass(frozen=True, slots=True)
class Moved:
    """What one call of `pause`, `resume` or `migrate` did.

    `freed` are the bytes of our own mappings that were given back; another process, or another mapping, may still
    hold them. `free` is what the driver then reports of each device, for the whole machine, and `confirmed` by how
    much that has grown since the call began (negative where memory was taken). `host` are the bytes of host memory
    that remap holds now, backups and what is kept ready. `notes` say what was not as wished for.
    """

    buffers: int
    bytes: int
    freed: int
    confirmed: int
    free: Mapping[Location, MemoryInfo]
    seconds: float
    host: int
    notes: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """The bytes moved in a second, in GB/s (10⁹ bytes)."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        """Return the figures as one sentence."""
        moved = f"{format_size(self.bytes)} copied in " if self.bytes else ""
        rate = f" ({self.rate:.3g} GB/s)" if self.bytes else ""
        told = [f"{counted(self.buffers, 'buffer')}, {moved}{self.seconds:.3g} s{rate}"]
        if self.freed:
            told.append(f"{format_size(self.freed)} given back")
        if self.host:
            told.append(f"{format_size(self.host)} of host memory held")
        return "; ".join((*told, *self.notes))


@dataclass(frozen=True, slots=True)
class HostPoolFigures:
    """What the pool holds, in bytes.

    `held` is all memory taken from the machine: `used` by backups and staging, and `ready` for the next. `leaving`
    is being given back in the background, and not counted in `held`. `pinned` of `held` is page-locked. `peak` is
    the most that was ever held. `notes` say what could not be had: page-locking, for one.
    """

    held: int
    used: int
    ready: int
    leaving: int
    pinned: int
    peak: int
    limit: int | None
    prepared: int
    notes: tuple[str, ...]
