"""Stretches: parts of a location's memory file that are mapped for good, for memory outside of mappings and grants.

Plain memory, pools, pinned and managed memory are made of them. The CPU of this process can read and write them all:
that is how copies work, and whether a user of the driver may is another question, which its tables answer.
"""

from __future__ import annotations

from remap.drivers.host import linux
from remap.drivers.host.allocations import Allocations
from remap.drivers.host.backing import Extent, Files, give_pages
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import system_error
from remap.drivers.host.space import AddressSpace, Reservation
from remap.errors import DriverError
from remap.types import Location


class Stretch:
    """Mapped bytes of one location, which may be handed out in pieces: `free` are those that are not, in order."""

    __slots__ = ("base", "extent", "free", "location", "reservation", "size")

    def __init__(self, location: Location, reservation: Reservation, extent: Extent) -> None:
        self.location = location
        self.reservation = reservation
        self.extent = extent
        self.base = reservation.base
        self.size = reservation.end - reservation.base
        self.free: list[tuple[int, int]] = [(self.base, self.base + self.size)]

    @property
    def empty(self) -> bool:
        """Whether nothing of it is used."""
        return self.free == [(self.base, self.base + self.size)]

    def take(self, size: int) -> int:
        """Return the address of a free piece, 0 where none is large enough."""
        for index, (start, end) in enumerate(self.free):
            if end - start >= size:
                self.free[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start
        return 0

    def give(self, start: int, size: int) -> None:
        """Take a piece back, and join it with its free neighbours."""
        pieces = sorted([*self.free, (start, start + size)])
        joined = [pieces[0]]
        for piece in pieces[1:]:
            if piece[0] == joined[-1][1]:
                joined[-1] = (joined[-1][0], piece[1])
            else:
                joined.append(piece)
        self.free = joined


class Stretches:
    """The stretches of a driver. The caller holds the table lock."""

    def __init__(self, machine: Machine, allocations: Allocations, space: AddressSpace, files: Files) -> None:
        self._machine = machine
        self._allocations = allocations
        self._space = space
        self._files = files
        self._mapped: set[Stretch] = set()

    def map(self, call: str, location: Location, size: int) -> Stretch:
        """Take `size` bytes, a multiple of the page size, from a location's budget and map them."""
        budget = self._machine.budget(location)
        space = self._space
        self._allocations.take(call, location, size)
        try:
            extent = self._files.arena(location).allocate(size)
            reservation = space.reserve(size, 0, 0, call=call, listed=False)
        except OSError as error:
            budget.give(size)
            raise system_error(call, error) from error
        except DriverError:
            budget.give(size)
            raise
        try:
            linux.place(reservation.base, size, extent, linux.PROT_READ_WRITE)
        except OSError as error:
            space.free(reservation, listed=False)
            budget.give(size)
            raise system_error(call, error) from error
        stretch = Stretch(location, reservation, extent)
        self._mapped.add(stretch)
        return stretch

    def unmap(self, stretch: Stretch) -> None:
        """Give a stretch back."""
        self._mapped.discard(stretch)
        self._space.free(stretch.reservation, listed=False)
        give_pages(stretch.extent, stretch.size)
        self._machine.budget(stretch.location).give(stretch.size)

    def shut_down(self) -> None:
        """Unmap everything."""
        while self._mapped:
            stretch = self._mapped.pop()
            linux.give_back(stretch.base, stretch.size)
