"""Leaks: what is still alive, how big it is, where it was made, and what to do about it."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, SupportsIndex

from remap import lifetime
from remap.lifetime import Resource
from remap.observe.snapshot import Item, Snapshot, item_of
from remap.sites import sites
from remap.sizes import counted, format_size
from remap.types import Location


@dataclass(frozen=True, slots=True, repr=False)
class Leaks:
    """The objects that live, oldest first: true if there are any. Printing it says what each is, and the cure.

    It goes through them as a sequence does: each is an `Item` as snapshots have them.
    """

    items: tuple[Item, ...]

    @property
    def footprint(self) -> dict[Location, int]:
        """The physical bytes that they hold by location, aliases counted once; pools are not counted."""
        seen: dict[int, tuple[Location, int]] = {}
        for item in self.items:
            for piece in item.pieces:
                if piece.source != "foreign":
                    seen[piece.memory] = (piece.location, piece.size)
        total: dict[Location, int] = {}
        for place, size in seen.values():
            total[place] = total.get(place, 0) + size
        return total

    def __bool__(self) -> bool:
        """Tell whether anything is alive."""
        return bool(self.items)

    def __len__(self) -> int:
        """Return how many objects are alive."""
        return len(self.items)

    def __iter__(self) -> Iterator[Item]:
        """Go through the objects, oldest first."""
        return iter(self.items)

    def __getitem__(self, index: SupportsIndex) -> Item:
        """Return one of the objects."""
        return self.items[index]

    def __repr__(self) -> str:
        """Return how many there are: what each is, is what `print` says."""
        return f"<remap.Leaks of {counted(len(self.items), 'object')}>"

    def __str__(self) -> str:
        """Return one line for each object, the sum, and the cure."""
        if not self.items:
            return "nothing is alive"
        lines = [f"{item}, made {_made(item)}" for item in self.items]
        held = (
            " + ".join(f"{format_size(size)} on {place}" for place, size in self.footprint.items())
            or "no memory"
        )
        lines.append(f"{counted(len(self.items), 'object')} alive, holding {held}")
        if any(item.site for item in self.items):
            lines.append("Close them, or use them in a with statement")
        else:
            lines.append("REMAP_TRACEBACK=1 or remap.record_sites() tells where they are made")
        return "\n".join(lines)


def leaks(since: Iterable[int] | Leaks | Snapshot | None = None) -> Leaks:
    """Return what is alive. Runs Python's garbage collector and gives back what was collected unclosed.

    `since` is an earlier result, or a snapshot, whose objects are left out; or their serial numbers.
    """
    given: Any = since
    if isinstance(given, str) or not isinstance(given, Iterable | Snapshot | None):
        raise TypeError(f"since= is what remap.leaks or remap.snapshot returned before, not {since!r}")
    lifetime.collect()
    known = {item.serial for item in since.items} if isinstance(since, Leaks | Snapshot) else set(since or ())
    numbers: dict[object, int] = {}
    return Leaks(tuple(item_of(thing, numbers) for thing in lifetime.live() if thing.serial not in known))


@contextmanager
def no_leaks() -> Generator[None]:
    """Raise `AssertionError`, naming them, if objects that were made in the block are alive after it. For tests.

    Not a warning: Python and pytest ignore a `ResourceWarning` unless they are told otherwise. A block that fails by
    itself raises that alone, since what its traceback holds is alive.
    """
    before = [thing.serial for thing in lifetime.live(Resource)]
    yield
    found = leaks(before)
    if found:
        raise AssertionError(f"alive after the block: {found}")


def record_sites(frames: int = 8) -> None:
    """Record from now on where each object is made: up to `frames` frames of the program; 0 ends it.

    `REMAP_TRACEBACK=8` asks for the same from the beginning. It costs nothing when off, and a few microseconds
    an object when on. Leaks, snapshots and the warnings about unclosed objects then say where.
    """
    sites.depth = max(frames, 0)


def _made(item: Item) -> str:
    return "at " + "\n    called from ".join(item.site) if item.site else "somewhere"
