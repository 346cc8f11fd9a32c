"""`Memory`: all pools of this process, and the segments that their callbacks have made, on the present driver."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import Context
from typing import Any, NamedTuple

from remap import drivers, lifetime
from remap.drivers.protocol import Driver
from remap.errors import (
    ClosedError,
    CudaResult,
    DriverError,
    ForkedError,
    InUseError,
    InvalidValueError,
    OutOfMemoryError,
    RemapError,
    driver_error,
)
from remap.forks import in_child
from remap.integrations.adopted import AdoptedBuffer
from remap.integrations.functions import functions_of, options_of
from remap.integrations.layout import Record, State
from remap.integrations.table import Table
from remap.lifetime import Release, Resource, repeatable
from remap.locations import device, devices, explain_shortage
from remap.residency import group
from remap.sizes import format_size, round_up
from remap.types import Access, AllocationProperties, Location

_Allocate = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)


class Asked(NamedTuple):
    """What a pool asks for on one device: the memory, who may touch it, the granule, and chunks a segment."""

    properties: AllocationProperties
    accessing: tuple[Location, ...]
    granule: int
    chunks: int


class PoolMemory:
    """What one pool asks for, its callbacks, and its segments."""

    def __init__(
        self,
        memory: Memory,
        tag: str,
        asked: dict[int, Asked],
    ) -> None:
        self.tag = tag
        self.memory = memory
        self.asked = asked
        # Whether it sleeps while it holds nothing: segments say it of themselves, and nothing else is asked then.
        self.slept = False
        self.used = (
            False  # whether remap has made a segment itself, as it does on drivers that no framework calls
        )
        options = {at: options_of(*one) for at, one in asked.items()}
        self.number = memory.table.add_pool(tag, options)
        self.allocate_address, self.free_address = memory.table.entry(self.number)
        self._allocate, self._free = _Allocate(self.allocate_address), _Free(self.free_address)

    def allocate(self, size: int, at: int) -> AdoptedBuffer:
        """Make a segment as a framework would, and return it as a buffer. For drivers that no framework calls.

        Raises `OutOfMemoryError`.
        """
        lifetime.drain()
        address = self._allocate(size, at, 0)
        if not address and self.memory.reap():
            address = self._allocate(size, at, 0)
        if not address:
            raise self._shortage(size, at)
        self.used = True
        self.memory.adopt(self)
        found = self.memory.find(address, at)
        assert found is not None
        return found

    def _shortage(self, size: int, at: int) -> DriverError:
        """Return the error for a segment that was not to be had: what was in the way, and what helps."""
        info, margin, granule = device(at).memory(), self.memory.table.margin, self.asked[at].granule
        rule = f"{format_size(info.free)} of {format_size(info.total)} are free there"
        step = "Delete tensors there, or put another pool to sleep, first"
        if margin and round_up(size, granule) <= info.free:
            rule += f", and a margin of {format_size(margin)} is to stay free"
            step += ", or lower the margin: remap.torch.set_margin, torch_memory_saver's memory_margin_bytes"
        elif size < granule:  # many small tensors fill a small device
            rule += f", and on this driver each tensor takes whole granules of {format_size(granule)}"
            larger = format_size(2 * info.total).replace(" ", "")
            step += f', or simulate larger devices: remap.use("host", memory="{larger}", ...)'
        error = driver_error(
            "cuMemCreate",
            self.memory.table.counters(at).last_error or int(CudaResult.OUT_OF_MEMORY),
            asked=f"{format_size(size)} on device {at} for pool {self.tag!r}",
            rule=rule,
            next_step=step,
        )
        if isinstance(error, OutOfMemoryError) and size > info.total:
            return explain_shortage(error, error.asked, size, device(at).location)
        return error

    @repeatable
    def free_segment(self, segment: AdoptedBuffer) -> None:
        """Free a segment as a framework would. Doing so again frees nothing else, whatever is at its address then."""
        if not (segment.closed or segment.freed):
            segment.freed = True  # set before the call: an interrupt comes when it has returned
            self._free(segment.record.address, segment.record.requested, segment.device, 0)
        self.memory.reap()

    def free_later(self, segment: AdoptedBuffer) -> None:
        """Free a segment at the next call that opens or closes something; for finalisers (invariant 4)."""
        if lifetime.epoch() == self.memory.epoch:
            lifetime.queued.append(Release(0, [(self.free_segment, (segment,))]))


class Memory:
    """The table of the present driver, the pools by tag, and the segments that Python knows as buffers."""

    def __init__(self, driver: Driver) -> None:
        self.driver: Any = driver
        self.epoch = lifetime.epoch()
        self.table = _table(driver)
        self.lock = (
            threading.RLock()
        )  # for the lists here; never held while waiting, or while the driver works
        self.pools: dict[str, PoolMemory] = {}
        self.by_tag: dict[str, Any] = {}  # the `Pool` of each tag, which stands above this
        self._segments: dict[tuple[int, int], AdoptedBuffer] = {}
        self._captures: set[object] = set()

    def pool(self, tag: str, make: Callable[[], dict[int, Asked]]) -> PoolMemory:
        """Return the pool of a tag; `make` says what a new one asks for by device."""
        with self.lock:
            found = self.pools.get(tag)
            if found is None:
                found = self.pools[tag] = PoolMemory(self, tag, make())
        return found

    @property
    def past(self) -> str:
        """Whether it is of another process or driver by now, in a word or two; "" where it is not."""
        if self.epoch != lifetime.epoch():
            return "inherited"
        return "" if drivers.opened() is self.driver else "of an earlier driver"

    def check(self, asked: str) -> None:
        """Raise `ForkedError` in a forked child, `ClosedError` under another driver; touches nothing else of this."""
        if self.epoch != lifetime.epoch():
            raise ForkedError(
                asked,
                rule="it was made before a fork, and its memory belongs to the parent",
                next_step='Use `with remap.torch.pool("tag"):` anew in the child',
            )
        if self.past:
            raise ClosedError(
                asked,
                rule="it was made with an earlier driver, which is not in use any more",
                next_step='Use `with remap.torch.pool("tag"):` anew',
            )

    def ready(self, at: int) -> None:
        """Let callbacks wait for a device's context before they unmap."""
        one = device(at)
        with one.current():
            self.table.set_context(at, one._context)

    def adopt(self, *pools: PoolMemory) -> list[AdoptedBuffer]:
        """Return the segments of pools as buffers, oldest first; each is in the group of its pool's tag."""
        by_number = {pool.number: pool for pool in pools}
        found: list[AdoptedBuffer] = []
        with self.lock:
            for at in sorted({index for pool in pools for index in pool.asked}):
                for record in self.table.records(at):
                    pool = by_number.get(record.pool)
                    if pool is not None and record.state in (State.LIVE, State.HELD):
                        found.append(self._segment(pool, at, record))
        found.sort(key=lambda one: one.record.serial)
        return found

    def _segment(self, pool: PoolMemory, at: int, record: Record) -> AdoptedBuffer:
        known = self._segments.get((at, record.serial))
        if known is None:
            asked = pool.asked[at]
            rights = dict.fromkeys(asked.accessing, Access.READ_WRITE)

            def make() -> AdoptedBuffer:
                with group(pool.tag):
                    return AdoptedBuffer(self.driver, self.table, record, asked.properties, rights, pool.tag)

            # In no group but its own, whatever block the thread that looks is in.
            known = self._segments[at, record.serial] = Context().run(make)
        return known

    def known(self, pool: PoolMemory) -> list[AdoptedBuffer]:
        """Return the segments of a pool that are buffers already; no other one can sleep."""
        with self.lock:
            return [
                one for one in self._segments.values() if one.record.pool == pool.number and not one.closed
            ]

    def find(self, address: int, at: int | None) -> AdoptedBuffer | None:
        """Return the segment, known as a buffer, that an address lies in.

        The latest: an earlier one may have been freed by the framework, and not be reaped yet.
        """
        with self.lock:
            found = [one for one in self._segments.values() if one.covers(address, at) and not one.closed]
        return max(found, key=lambda one: one.record.serial, default=None)

    def segment_at(self, address: int, at: int | None, asked: str) -> AdoptedBuffer:
        """Return the segment that an address lies in; raises `InvalidValueError` where no pool made it."""
        self.adopt(*self.pools.values())  # what was known there may be gone, and another one in its place
        found = self.find(address, at)
        if found is None:
            raise InvalidValueError(
                f"{asked} of a tensor at {address:#x}",
                rule="it does not lie in memory of a pool",
                next_step='Make it inside of `with remap.torch.pool("tag"):`',
            )
        return found

    def reap(self) -> int:
        """Settle what the framework has freed meanwhile; return how many segments that were. May wait for work."""
        lifetime.drain()
        freed: list[tuple[tuple[int, int], AdoptedBuffer, bool]] = []
        with self.lock:
            known = {key[0] for key in self._segments}
            for at in sorted(known):
                states = {record.serial: record.state for record in self.table.records(at)}
                for key in [key for key in self._segments if key[0] == at]:
                    state = states.get(key[1])
                    if state in (None, State.PENDING, State.GONE):  # a pending one is unmapped by `drain`
                        freed.append((key, self._segments[key], state == State.GONE))
        count = 0
        for key, segment, ours in freed:
            slept = segment.paused
            try:
                (segment.give_back if ours else segment.vanish)()
            except InUseError:  # another thread moves or uses it just now: the next call finds it again
                continue
            with self.lock:
                count += self._segments.pop(key, None) is not None
                if not slept:
                    self.pools[segment.tag].slept = False
        return count + self._drain()

    @contextmanager
    def capturing(self) -> Generator[None]:
        """Let callbacks wait for nothing during a capture."""
        token = object()
        try:
            with self.lock:
                self._captures.add(token)
                self.table.set_captures(len(self._captures))
            yield
        finally:
            self._captures.discard(token)
            with self.lock:
                self.table.set_captures(len(self._captures))

    def _drain(self) -> int:
        """Give back what was freed during captures, once there is none any more that is known."""
        with self.lock:
            self.table.set_captures(
                len(self._captures)
            )  # an interrupt at the end of one may have left it out
            if self._captures:
                return 0
        count = 0
        for one in devices() if self.pools else ():
            if self.table.counters(one.index).pending:
                one.synchronize()
                count += self.table.drain(one.index)
        return count

    def adopt_all(self, tags: Iterable[str]) -> None:
        """Know the segments of several tags, as far as those are pools, as buffers: by then the groups have them."""
        self.adopt(*(self.pools[tag] for tag in tags if tag in self.pools))


class _Memories:
    """The memory of this process; a forked child, or another driver, begins with a new one."""

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self.inherited: list[Memory] = []  # those of the processes that this one was forked from
        self.tables: dict[tuple[str, int], Table] = {}
        self.lock = threading.Lock()


_memories = _Memories()


def memory() -> Memory:
    """Return the memory of the present driver."""
    driver = drivers.current()
    with _memories.lock:
        found = _memories.memory
        if found is None or found.driver is not driver or found.epoch != lifetime.epoch():
            found = _memories.memory = Memory(driver)
        return found


def _table(driver: Driver) -> Table:
    """Return the table for a kind of driver: compiling takes seconds, so drivers of one kind share it."""
    key = driver.name, lifetime.epoch()
    found = _memories.tables.get(key)
    if found is None:
        if driver.name not in ("cuda", "host"):
            raise RemapError(
                f"pools on the {driver.name} driver", rule="only cuda and host have native callbacks"
            )
        found = _memories.tables[key] = Table(functions_of(driver))
    return found


def segment_at(address: int, at: int | None, asked: str, inherited: Resource | None = None) -> AdoptedBuffer:
    """Return the segment that an address lies in; raises as `Memory.segment_at` does, and `ForkedError`.

    That is for segments of the parent of a forked child, and for `inherited`, what else of the parent's lay there: the
    child may have memory of its own at the same addresses, which comes first.
    """
    if _memories.memory is None:
        _check_inherited(address, asked, inherited)  # before a table is compiled, which takes seconds
    try:
        return memory().segment_at(address, at, asked)
    except InvalidValueError:
        _check_inherited(address, asked, inherited)
        raise


def _check_inherited(address: int, asked: str, inherited: Resource | None) -> None:
    if inherited is not None:
        inherited._check()
    # Without their locks, which other threads may have held in the parent.
    if any(one.covers(address, None) for found in _memories.inherited for one in found._segments.values()):
        raise ForkedError(
            f"{asked} of a tensor at {address:#x}",
            rule="it lies in a pool of the process that this one was forked from, and its memory is not here",
            next_step="Copy it with .clone() or .cpu() before the fork, or start this process with spawn",
        )


def _renew() -> None:
    _memories.lock = threading.Lock()
    if _memories.memory is not None:
        _memories.inherited.append(_memories.memory)
        _memories.memory = None


in_child(_renew)
