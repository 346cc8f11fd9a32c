"""`AdoptedBuffer`: memory that a framework's allocation callback has made, as a buffer."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar

from remap.buffers.base import Buffer
from remap.errors import InUseError
from remap.integrations.layout import Record, State
from remap.integrations.table import Table
from remap.lifetime import Description, Release
from remap.spans import Chunk
from remap.types import Access, AllocationProperties, Location
from remap.uses import Uses


class AdoptedBuffer(Buffer):
    """One segment of a framework's memory. Made by a pool; it lives as long as the framework keeps the segment.

    While remap takes the memory away, and for as long as it sleeps, the record in the table is held: the framework's
    free callback then only marks it, and `Memory.reap` gives it back. Otherwise the callback unmaps it.
    """

    kind: ClassVar[str] = "pool segment"

    def __init__(
        self,
        driver: Any,
        table: Table,
        record: Record,
        properties: AllocationProperties,
        rights: dict[Location, Access],
        tag: str,
    ) -> None:
        # Not Buffer.__init__, which creates memory of its own.
        super(Buffer, self).__init__(driver)
        self.tag = tag
        self.record = record
        self.device = properties.location.index
        self.properties = properties
        self._table = table
        self._owned = False  # whether closing gives the memory back; the framework does otherwise
        self._gone = False
        self.freed = False  # whether remap itself told the callback that nobody needs it
        self._warns = False
        self._rights = rights
        self._address, self._size = record.address, record.size
        self._reserved = record.size
        self._chunks = [
            Chunk(record.address + start, min(record.chunk, record.size - start), properties.location)
            for start in range(0, record.size, record.chunk)
        ]
        self._known_uses = Uses()
        self._known_uses.escaped = True  # the framework has used it all along
        self._opened()

    @contextmanager
    def _taking(self, doing: str, blind: bool = True) -> Generator[None]:
        """Hold the record while the memory is taken away, and for as long as the buffer is paused after that."""
        with super()._taking(doing, blind):
            if not (self._paused or self._hold()):
                raise InUseError(
                    f"{self.describe()} to be {doing}",
                    rule="the framework has just given it back",
                    next_step="Try again",
                )
            try:
                yield
            finally:
                if not self._paused:
                    self._table.let_go(self.device, self.record)

    def _hold(self) -> bool:
        """Take the record over; False if the framework has given the memory back."""
        held = self._table.hold(self.device, self.record)
        if not held and self._table.let_go(self.device, self.record) is State.LIVE:
            held = self._table.hold(self.device, self.record)  # an interrupt had left it held
        return held

    def _check_closable(self) -> None:
        if not self._gone:
            raise InUseError(
                f"{self.describe()} to be closed",
                rule="it belongs to the framework that allocated it",
                next_step="Delete the tensors that lie in it, and leave or trim the pool",
            )
        super()._check_closable()

    def _detach(self) -> Release:
        if self._owned:
            return super()._detach()
        return Release(0, [])

    def give_back(self) -> None:
        """Give back what the framework freed while remap held it, its backup included."""
        self._owned = self._gone = True
        # Whoever still views it, or has it registered, does so with memory that its own framework has freed.
        self._exports, self._registrations = None, ()
        if self._paused:
            self.close(after=None)
        else:
            self.close()
        self._table.forget(self.device, self.record)

    def vanish(self) -> None:
        """Note that the framework's callback has unmapped it."""
        self._gone = True
        self._exports, self._registrations = None, ()
        self.close(after=None)

    def covers(self, address: int, device: int | None) -> bool:
        """Tell whether an address, on a device or on any, lies in it."""
        return (device is None or device == self.device) and 0 <= address - self._address < self._size

    def describe(self) -> Description:
        """Return what this segment is."""
        found = super().describe()
        return Description(
            self.kind, found.serial, found.size, found.address, f"of {self.tag!r}, {found.detail}"
        )
