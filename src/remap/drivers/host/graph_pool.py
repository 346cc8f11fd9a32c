"""The physical memory of graphs: blocks of one granule, taken when a graph is launched and kept until a trim (T15).

A launch may use a block whose last use is ordered before it, by a stream, an event or a wait of the host, or has ended;
never one that an unfreed allocation lies on. So graphs in one stream share blocks, and graphs that may run at the same
time do not.

A page is a granule of a graph's addresses. It is bound to a block until a later launch finds that block taken, a trim
takes it, or the executable goes; a block may be bound to pages of many graphs at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from remap.drivers.graph_powers import GraphFigures, HighMark
from remap.drivers.host import linux
from remap.drivers.host.allocations import Allocations
from remap.drivers.host.backing import Extent, Files, give_pages
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import invalid, system_error
from remap.drivers.host.streams import Need
from remap.drivers.host.work import Clock
from remap.types import Location, LocationKind


class Block:
    """One granule of physical memory. `held` counts the unfreed allocations on it, `last` is its latest use."""

    __slots__ = ("extent", "held", "last", "pages")

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.held = 0
        self.last: Need | None = None
        self.pages: set[Page] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing that was launched can use it any more."""
        return not self.held and (self.last is None or self.last[0].completed >= self.last[1])

    def free_at(self, clock: Clock) -> bool:
        """Tell whether work that comes after `clock` may use it."""
        if self.held:
            return False
        if self.last is None:
            return True
        stream, number = self.last
        return number <= max(stream.known, stream.completed, clock.get(stream, 0))


class Page:
    """One granule of a graph's addresses, and the block that its latest launch found for it."""

    __slots__ = ("address", "block")

    def __init__(self, address: int) -> None:
        self.address = address
        self.block: Block | None = None

    def bind(self, block: Block) -> None:
        """Note another block; the kernel hears of it from whoever plans the launch."""
        if self.block is not None:
            self.block.pages.discard(self)
        self.block = block
        block.pages.add(self)


Placing = tuple[int, int, Extent]
"""An address, a size, and the part of a memory file that is to be mapped there."""


class GraphPool:
    """The blocks of one device. The caller holds the table lock, unless a method says otherwise."""

    def __init__(self, machine: Machine, allocations: Allocations, files: Files, device: int) -> None:
        self._machine = machine
        self._allocations = allocations
        self._files = files
        self._location = Location(LocationKind.DEVICE, device)
        self._granule = machine.options.granularity
        self._blocks: list[Block] = []
        self._high = dict.fromkeys(HighMark, 0)

    # -- figures --

    def figures(self) -> GraphFigures:
        """Return what is associated with graphs, and what was taken from the device."""
        used, reserved = self._used(), len(self._blocks) * self._granule
        return GraphFigures(used, self._high[HighMark.USED], reserved, self._high[HighMark.RESERVED])

    def set_high(self, mark: HighMark, value: int) -> None:
        """Reset a high mark to the present figure."""
        if value != 0:
            raise invalid(
                "cuDeviceSetGraphMemAttribute", f"{mark} high mark {value}", "it can be set to 0 only"
            )
        self._high[mark] = 0
        self._note_high()

    def _used(self) -> int:
        return sum(1 for block in self._blocks if block.pages or block.held) * self._granule

    def _note_high(self) -> None:
        now = {HighMark.USED: self._used(), HighMark.RESERVED: len(self._blocks) * self._granule}
        self._high = {mark: max(figure, now[mark]) for mark, figure in self._high.items()}

    # -- launches --

    def bind(self, call: str, pages: Sequence[Page], clock: Clock) -> tuple[list[Placing], list[Placing]]:
        """Bind pages to blocks that work after `clock` may use, taking more memory where there are too few.

        Return what is to be mapped at once, where nothing was, and what only once an earlier run has ended. Raises
        OUT_OF_MEMORY with nothing changed.
        """
        missing = [page for page in pages if page.block is None or not page.block.free_at(clock)]
        if not missing:
            return [], []
        lacking = set(missing)
        kept = {page.block for page in pages if page not in lacking}
        spare = [block for block in self._blocks if block not in kept and block.free_at(clock)]
        if len(spare) < len(missing):
            spare += self._grow(call, len(missing) - len(spare))
        at_once: list[tuple[Page, Block]] = []
        later: list[tuple[Page, Block]] = []
        for page, block in zip(missing, spare, strict=False):
            (at_once if page.block is None else later).append((page, block))
            page.bind(block)
        self._note_high()
        return self._placings(at_once), self._placings(later)

    def _grow(self, call: str, count: int) -> list[Block]:
        size = count * self._granule
        self._allocations.take(call, self._location, size)
        try:
            fd, offset = self._files.arena(self._location).allocate(size)
            grown = [Block(Extent(fd, offset + index * self._granule)) for index in range(count)]
            self._blocks += grown
        except BaseException as error:  # an interrupt, too
            self._machine.budget(self._location).give(size)
            if isinstance(error, OSError):
                raise system_error(call, error) from error
            raise
        return grown

    def _placings(self, pairs: Sequence[tuple[Page, Block]]) -> list[Placing]:
        """Return the fewest mappings that put blocks under pages."""
        found: list[Placing] = []
        for page, block in pairs:
            extent = block.extent
            if found:
                address, size, (fd, offset) = found[-1]
                if address + size == page.address and fd == extent.fd and offset + size == extent.offset:
                    found[-1] = (address, size + self._granule, Extent(fd, offset))
                    continue
            found.append((page.address, self._granule, extent))
        return found

    # -- giving back --

    def unbind(self, pages: Sequence[Page]) -> None:
        """Take pages that nothing uses from their blocks, and their memory out of the address space."""
        bound = [page for page in pages if page.block is not None]
        for page in bound:
            if page.block is not None:
                page.block.pages.discard(page)
                page.block = None
        for address, size in _ranges(bound, self._granule):
            linux.clear(address, size)

    def trim(self) -> list[tuple[Extent, int]]:
        """Drop the blocks that nothing uses, and return their memory for `give_back`."""
        idle = [block for block in self._blocks if block.idle]
        if idle:
            self.unbind(sorted({page for block in idle for page in block.pages}, key=_address))
            gone = set(idle)
            self._blocks = [block for block in self._blocks if block not in gone]
        return [(block.extent, self._granule) for block in idle]

    def give_back(self, extents: Sequence[tuple[Extent, int]]) -> None:
        """Give trimmed memory to the kernel and to the budget. Takes the lock itself: pages go back slowly."""
        for extent, size in extents:
            give_pages(extent, size)
        with self._machine.lock:
            self._machine.budget(self._location).give(sum(size for _, size in extents))


def _address(page: Page) -> int:
    return page.address


def _ranges(pages: Sequence[Page], granule: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and sum(found[-1]) == page.address:
            found[-1] = (found[-1][0], found[-1][1] + granule)
        else:
            found.append((page.address, granule))
    return found
