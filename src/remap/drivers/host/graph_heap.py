"""The addresses of one graph's allocations: given when a node is added, and shared where lifetimes cannot overlap.

A new allocation may lie where others lay whose free nodes all come before it (T16). So the addresses of a graph are cut
into segments, each with the latest of the allocations that used it: the earlier ones are freed before that one begins,
since it took their place by the same rule.
"""

from __future__ import annotations

from remap.drivers.host.graph_pool import Page
from remap.drivers.host.space import AddressSpace, Reservation
from remap.sizes import round_up

_ALIGNMENT = 512


class Segment:
    """A part of a graph's addresses; `last` is the latest allocation there, if any, and `next` lies behind it."""

    __slots__ = ("base", "end", "last", "next")

    def __init__(self, base: int, end: int, last: Allocation | None, behind: Segment | None) -> None:
        self.base = base
        self.end = end
        self.last = last
        self.next = behind

    def free_before(self, before: int) -> bool:
        """Tell whether its latest allocation is always freed before a node with these ancestors (bits)."""
        last = self.last
        return last is None or (last.freed_by >= 0 and bool(before >> last.freed_by & 1))


class Allocation:
    """Memory that one node allocates. `freed_by` is the node of the same graph that frees it, -1 if none does.

    `elsewhere` says that a node of another graph frees it, so that this one cannot do so any more.
    """

    __slots__ = ("address", "elsewhere", "freed_by", "heap", "pages", "readers", "segment", "size")

    def __init__(self, heap: Heap, segment: Segment, size: int, pages: list[Page], readers: int) -> None:
        self.heap = heap
        self.segment = segment
        self.address = segment.base
        self.size = size
        self.pages = pages
        self.readers = readers  # the devices (bits) that may touch it
        self.freed_by = -1
        self.elsewhere = False


class Heap:
    """The addresses that one graph has on one device. The caller holds the table lock.

    `users` counts the graph, its executable and its live allocations: the addresses stay while there is one.
    """

    def __init__(self, space: AddressSpace, device: int, granule: int) -> None:
        self._space = space
        self._granule = granule
        self.device = device
        self.users = 1
        self.reservations: list[Reservation] = []
        self.pages: list[Page] = []
        self._page_at: dict[int, Page] = {}
        # Where the latest allocation has a free node: that node's bit, and the segments by it.
        self._freed = 0
        self._by_free: dict[int, list[Segment]] = {}
        self._tail: Segment | None = None  # what the newest reservation has left

    def allocate(self, before: int, size: int, readers: int) -> Allocation:
        """Place an allocation whose node has these ancestors (bits); raises `OutOfAddressSpaceError`."""
        length = round_up(size, _ALIGNMENT)
        segment = self._take(self._find(before, length) or self._reserve(length), length)
        first = segment.base // self._granule * self._granule
        pages = [self._page_at[address] for address in range(first, segment.end, self._granule)]
        segment.last = allocation = Allocation(self, segment, size, pages, readers)
        return allocation

    def free(self, allocation: Allocation, node: int) -> None:
        """Note the node that frees an allocation: what comes after it may have the addresses."""
        allocation.freed_by = node
        self._remember(allocation.segment)

    def _find(self, before: int, length: int) -> Segment | None:
        """Return where a run of free segments begins that is long enough: the one with the least left over."""
        best, least = None, -1
        bits = before & self._freed
        while bits:
            low = bits & -bits
            bits ^= low
            for segment in self._by_free[low.bit_length() - 1]:
                over = _room(segment, before, length) - length
                if over == 0:
                    return segment
                if over > 0 and (best is None or over < least):
                    best, least = segment, over
        if best is None and self._tail is not None and self._tail.end - self._tail.base >= length:
            return self._tail
        return best

    def _reserve(self, length: int) -> Segment:
        size = round_up(length, self._granule)
        reservation = self._space.reserve(size, 0, 0, call="cuGraphAddMemAllocNode", listed=False)
        self.reservations.append(reservation)
        for address in range(reservation.base, reservation.end, self._granule):
            page = self._page_at[address] = Page(address)
            self.pages.append(page)
        self._tail = Segment(reservation.base, reservation.end, None, None)
        return self._tail

    def _take(self, segment: Segment, length: int) -> Segment:
        """Make the first `length` bytes of a run of free segments into one segment."""
        end = segment.base + length
        self._forget(segment)
        while segment.end < end:
            behind = segment.next
            assert behind is not None  # the run was long enough
            if behind.end > end:
                behind.base = segment.end = end
            else:
                self._forget(behind)
                segment.end, segment.next = behind.end, behind.next
        if segment.end > end:
            segment.next = Segment(end, segment.end, segment.last, segment.next)
            segment.end = end
            self._remember(segment.next)
        return segment

    def _remember(self, segment: Segment) -> None:
        if segment.last is None:
            self._tail = segment
            return
        node = segment.last.freed_by
        self._freed |= 1 << node
        self._by_free.setdefault(node, []).append(segment)

    def _forget(self, segment: Segment) -> None:
        if segment.last is None:
            self._tail = None if self._tail is segment else self._tail
            return
        node = segment.last.freed_by
        self._by_free[node].remove(segment)
        if not self._by_free[node]:
            del self._by_free[node]
            self._freed &= ~(1 << node)


def _room(segment: Segment, before: int, enough: int) -> int:
    """Return how many bytes from a segment on are free before a node with these ancestors, up to `enough` or more."""
    end = segment.base
    following: Segment | None = segment
    while following is not None and end - segment.base < enough and following.free_before(before):
        end = following.end
        following = following.next
    return end - segment.base
