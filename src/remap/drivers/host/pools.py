"""Stream-ordered memory: each device's pool, with the order in which its memory may be used again.

Freed memory is given to an allocation that comes after the free in the order of the streams, or once the host knows
that the free is done. Where a budget is used up, an allocation waits in its stream for memory that another stream
freed. CUDA may also take memory whose free happens to be done; that depends on timing, so it is not done here.

The memory's whole history is kept while work may be under way that lived in it: a use before the allocation, after
the free, or in a stream that no wait orders, is refused and named, where a GPU would quietly read another's bytes.
"""

from __future__ import annotations

from remap.drivers.host.addresses import AddressMap
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import invalid
from remap.drivers.host.streams import Stream, Streams
from remap.drivers.host.stretches import Stretch, Stretches
from remap.drivers.host.work import Mark, Point, Region
from remap.drivers.powers import PoolFigures
from remap.errors import InUseError, OutOfMemoryError
from remap.sizes import round_up
from remap.types import AddressRange, Location, LocationKind, PointerInfo

_ALIGNMENT = 512


class _Life:
    """One allocation that a block has been: from a point in one stream to a point in the same or another."""

    __slots__ = ("allocated", "freed", "size")

    def __init__(self, size: int, allocated: Mark) -> None:
        self.size = size
        self.allocated = allocated
        self.freed: Mark | None = None


class Block(Region):
    """A part of a pool that is allocated, freed and allocated again, with the lives it has had."""

    __slots__ = ("lives", "slab")

    plain = True

    def __init__(self, base: int, size: int, identity: int, born: int, slab: Stretch) -> None:
        super().__init__(base, size, identity, born)
        self.slab = slab
        self.readers = self.writers = 1 << slab.location.index
        self.lives: list[_Life] = []

    def refusal(self, point: Point, end: int) -> str:
        """Return why work at a point in the order of the streams may not use the block up to `end`, if so."""
        for life in reversed(self.lives):
            if not point.after(life.allocated):
                continue
            if life.freed is not None and not point.before(life.freed):
                return f"the memory at {self.base:#x} was freed by {life.freed}"
            if end > self.base + life.size:
                return f"it runs over the end of the allocation of {life.size} bytes at {self.base:#x}"
            return ""
        born = self.lives[-1].allocated
        return f"the memory at {self.base:#x} is that of {born}, for which this work does not wait"


class _Pool:
    """The memory of one device's pool."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self.slabs: list[Stretch] = []
        # Freed blocks of which the host does not yet know that nothing uses them any more.
        self.freed: list[Block] = []
        self.threshold = 0
        self.used = self.used_high = 0
        self.reserved = self.reserved_high = 0

    def count(self, used: int, reserved: int = 0) -> None:
        self.used += used
        self.reserved += reserved
        self.used_high = max(self.used_high, self.used)
        self.reserved_high = max(self.reserved_high, self.reserved)


class Pools:
    """The pools of all devices, and the calls on them."""

    def __init__(self, machine: Machine, streams: Streams, stretches: Stretches) -> None:
        self._machine = machine
        self._streams = streams
        self._stretches = stretches
        locations = [Location(LocationKind.DEVICE, device) for device in range(machine.options.devices)]
        self._pools = [_Pool(location) for location in locations]
        # Freed blocks stay in here until their addresses are used again, for the sake of the messages.
        self.blocks: AddressMap[Block] = AddressMap()

    # -- the calls --

    def allocate(self, size: int, stream_handle: int) -> int:
        """Allocate memory of the stream's device for work that comes after this point in the stream."""
        call = "cuMemAllocAsync"
        stream = self._streams.find(call, stream_handle)
        if size <= 0:
            raise invalid(call, f"size {size}", "sizes are positive")
        with self._machine.lock:
            pool = self._pools[stream.device]
            # So that others can be seen not to wait for it.
            self._streams.submit(stream, "a pool allocation", None)
            block = self._find(call, pool, round_up(size, _ALIGNMENT), stream)
            mark = Mark(
                stream, stream.submitted, self._streams.point(stream).clock, f"an allocation in {stream}"
            )
            block.lives = [life for life in block.lives if life.freed and not life.freed.settled]
            block.lives.append(_Life(size, mark))
            pool.count(block.end - block.base)
            return block.base

    def free(self, address: int, stream_handle: int) -> None:
        """Free memory for whatever comes after this point in the stream."""
        call = "cuMemFreeAsync"
        stream = self._streams.find(call, stream_handle)
        with self._machine.lock:
            block = self._live(call, address)
            point = self._streams.point(stream)
            self._check_ordered(block, stream, point)
            number = stream.submitted
            if stream.blocking:  # stands for all that the default stream waits for
                number = self._streams.submit(stream, "a pool free", None).number
            told = f"a free in {stream} (after work {number} of it)"
            self._end(block, Mark(stream, number, point.clock, told))

    def figures(self, device: int) -> PoolFigures:
        """Return what a device's pool holds."""
        with self._machine.lock:
            pool = self._pools[device]
            return PoolFigures(pool.used, pool.used_high, pool.reserved, pool.reserved_high)

    def reset_high(self, device: int) -> None:
        """Set the high marks to the present figures."""
        with self._machine.lock:
            pool = self._pools[device]
            pool.used_high, pool.reserved_high = pool.used, pool.reserved

    def trim(self, device: int, keep: int) -> None:
        """Give back what is not used, down to `keep` bytes."""
        with self._machine.lock:
            self._trim(self._pools[device], keep)

    def retain(self, device: int, size: int) -> None:
        """Let synchronisations leave up to `size` bytes."""
        if size < 0:
            raise invalid("cuMemPoolSetAttribute", f"{size} bytes", "sizes are 0 or more")
        self._pools[device].threshold = size

    # -- for the other parts of the driver --

    def after_wait(self) -> None:
        """Trim the pools to their thresholds: what every synchronisation ends with."""
        for pool in self._pools:
            if pool.reserved > pool.threshold:
                with self._machine.lock:
                    self._trim(pool, pool.threshold)

    def owns(self, address: int) -> bool:
        """Tell whether a live allocation of a pool begins at an address."""
        block = self.blocks.starting_at(address)
        return block is not None and block.lives[-1].freed is None

    def device_of(self, address: int) -> int:
        """Return the device of the live allocation at an address."""
        return self._live("cuMemFree", address).slab.location.index

    def address_range(self, address: int) -> AddressRange | None:
        """Return the live allocation that holds an address."""
        with self._machine.lock:
            block = self._at(address)
            return None if block is None else AddressRange(block.base, block.lives[-1].size)

    def pointer_info(self, address: int) -> PointerInfo | None:
        """Return what is known of an address."""
        with self._machine.lock:
            block = self._at(address)
            if block is None:
                return None
            device = block.slab.location.index
            return PointerInfo(block.base, block.lives[-1].size, block.identity, device)

    # -- the memory --

    def _at(self, address: int) -> Block | None:
        block = self.blocks.at(address)
        if block is None or block.lives[-1].freed or address >= block.base + block.lives[-1].size:
            return None
        return block

    def _live(self, call: str, address: int) -> Block:
        block = self.blocks.starting_at(address)
        if block is None:
            raise invalid(call, f"address {address:#x}", "no allocation of a pool begins there")
        if block.lives[-1].freed is not None:
            raise invalid(call, f"address {address:#x}", f"it was freed by {block.lives[-1].freed}")
        return block

    def _check_ordered(self, block: Block, stream: Stream, point: Point) -> None:
        """Raise `InUseError` if anything that uses the block is not ordered before a free at this point."""
        life = block.lives[-1]
        first = "" if point.after(life.allocated) else str(life.allocated)
        for log in (block.writes, block.reads):
            for work in log.values() if log else ():
                if not (work.ordered or work.stream is stream or point.covers(work.stream, work.number)):
                    first = str(work)
        if first:
            raise InUseError(
                f"cannot free the pool memory at {block.base:#x} in {stream}",
                rule=f"{first} may still use it, and {stream} does not wait for that",
                next_step="Let the stream wait for the other one first, or for an event recorded there",
            )

    def _end(self, block: Block, mark: Mark) -> None:
        pool = self._pools[block.slab.location.index]
        block.lives[-1].freed = mark
        pool.freed.append(block)
        pool.used -= block.end - block.base

    def _find(self, call: str, pool: _Pool, size: int, stream: Stream) -> Block:
        """Return a block of at least `size` bytes that work after this point in the stream may use."""
        point = self._streams.point(stream)
        block = self._reusable(pool, size, point)
        if block is None:
            self._settle(pool)
            block = self._carve(pool, size)
        if block is None:
            try:
                block = self._grow(call, pool, size)
            except OutOfMemoryError:
                self._trim(pool, 0)
                try:
                    block = self._grow(call, pool, size)
                except OutOfMemoryError:
                    block = self._wait_for_freed(pool, size, stream)
                    if block is None:
                        raise
        return block

    def _reusable(self, pool: _Pool, size: int, point: Point | None) -> Block | None:
        """Return the smallest freed block that is large enough and whose free comes before the point, if any."""
        fitting = [
            block
            for block in pool.freed
            if block.end - block.base >= size
            and (point is None or (block.lives[-1].freed is not None and point.after(block.lives[-1].freed)))
        ]
        if not fitting:
            return None
        block = min(fitting, key=lambda one: one.end - one.base)
        pool.freed.remove(block)
        return block

    def _wait_for_freed(self, pool: _Pool, size: int, stream: Stream) -> Block | None:
        """Return a block that another stream freed, for which the stream then waits."""
        block = self._reusable(pool, size, None)
        if block is not None:
            freed = block.lives[-1].freed
            assert freed is not None
            self._streams.submit(stream, "a wait for freed memory", None, needs=freed.needs())
            freed.join_into(stream)
        return block

    def _carve(self, pool: _Pool, size: int) -> Block | None:
        """Cut a new block out of a slab that has room for it."""
        for slab in pool.slabs:
            base = slab.take(size)
            if base:
                for old in self.blocks.overlapping(base, base + size):
                    self.blocks.remove(old)
                block = Block(base, size, next(self._machine.handles), self._machine.tick, slab)
                self.blocks.insert(block)
                return block
        return None

    def _grow(self, call: str, pool: _Pool, size: int) -> Block:
        slab = self._stretches.map(call, pool.location, round_up(size, self._machine.options.granularity))
        pool.slabs.append(slab)
        pool.count(0, slab.size)
        block = self._carve(pool, size)
        assert block is not None
        return block

    def _settle(self, pool: _Pool) -> None:
        """Give the freed blocks that nothing can use any more back to their slabs."""
        left: list[Block] = []
        for block in pool.freed:
            freed = block.lives[-1].freed
            if freed is not None and freed.settled:
                block.slab.give(block.base, block.end - block.base)
            else:
                left.append(block)
        pool.freed = left

    def _trim(self, pool: _Pool, keep: int) -> None:
        self._settle(pool)
        for slab in [slab for slab in pool.slabs if slab.empty]:
            if pool.reserved <= keep:
                break
            for block in self.blocks.overlapping(slab.base, slab.base + slab.size):
                self.blocks.remove(block)
            pool.slabs.remove(slab)
            pool.reserved -= slab.size
            self._stretches.unmap(slab)
