"""`FixedMemory`: memory whose bytes, address and rights are one thing, as all allocators but mapping give it."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from remap.errors import AccessError
from remap.lifetime import Description
from remap.locations import AccessLike, LocationLike, location
from remap.spans import Chunk, Span
from remap.types import Access, Held, Location


class FixedMemory(Span):
    """Memory that can neither change its rights nor what stands behind its address: the base of all but mappings."""

    kind: ClassVar[str] = "memory"

    _place: Location
    _counted: ClassVar[str] = "own"  # who counts the bytes: `types.Held.source`
    # Why it can neither sleep nor move; residency says so.
    _stays: ClassVar[str] = (
        "its address belongs to its bytes, so that nothing else can stand behind it (a small DeviceBuffer has memory "
        "that can sleep and move if it is made inside remap.group(tag), or with source='mapped')"
    )

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The one (address, size, location) of this memory. Reading it lets the address escape."""
        return (Chunk(self.address, self._size, self._place),) if self._size else ()

    def set_access(self, access: AccessLike) -> NoReturn:
        """Refuse: rights belong to mappings."""
        raise AccessError(
            f"change of access to {self.describe()}",
            rule="only mapped memory has rights that can be changed",
            next_step="Use remap.allocate(…), or a DeviceBuffer with source='mapped'",
        )

    def _grant_step(self, place: Location, needed: Access) -> str:
        return (
            "It has the rights that it was made with; only mapped memory (remap.allocate) can be given others"
        )

    def get_access(self, where: LocationLike) -> Access:
        """Return the right of a location; it is what it was from the beginning."""
        self._check()
        return self._right(location(where))

    def _ranges(self) -> list[tuple[int, int]]:
        return [(self._address, self._size)] if self._size else []

    def _held(self) -> tuple[Held, ...]:
        rights = tuple(self._rights.items())
        return (
            (Held(self._address, self._size, self._place, None, rights, self._counted),) if self._size else ()
        )

    def describe(self) -> Description:
        """Return what this memory is."""
        return Description(self.kind, self.serial, self._size, self._address, f"on {self._place}")
