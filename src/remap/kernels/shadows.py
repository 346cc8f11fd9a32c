# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# (what NumPy gives for values of any type has no type that a checker could know)
"""Who wrote and who read each element, so that two threads that meet without an order between them are found.

A barrier orders the threads of a block: each has a number of barriers behind it, its *epoch*. Two accesses to an
element, one of them a write, by two threads, are a race unless both threads are of one block and a barrier lies
between: then the earlier access has the smaller epoch.
What is found does not depend on the order in which the host happens to
run the threads. Atomic operations do not race with each other.

Accesses come for many threads at once (`lanes`), as positions and who is there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

_ATOMIC = (1 << 31) - 2  # in the place of a thread's number
_MANY = (1 << 31) - 1


class Found(NamedTuple):
    """A race: which of the lanes met it, and what it is."""

    lane: int
    what: str
    other: int  # the other thread, -1 if there is none, or if they are many


class BlockShadow:
    """The accesses to shared memory of a batch of blocks; a stamp is an epoch and a thread of the block."""

    def __init__(self, count: int) -> None:
        self._written: Any = np.full(count, -1, np.int64)
        self._read: Any = np.full(count, -1, np.int64)

    def read(self, at: Any, mine: Any, base: Any) -> Found | None:
        """Note reads; `mine` is each lane's stamp, `base` the stamp of its epoch with thread 0."""
        written = self._written.take(at)
        bad = (written >= base) & (written != mine)
        if bad.any():
            return _found(bad, written, "read of what another thread wrote, with no barrier between")
        if written.min(initial=0) < 0:
            return Found(int(np.argmin(written)), "read of shared memory that nothing was written to", -1)
        before = self._read.take(at)
        self._read[at] = mine
        many = (self._read.take(at) != mine) | ((before >= base) & (before != mine))
        if many.any():
            self._read[at[many]] = (base if np.ndim(base) == 0 else base[many]) | _MANY
        return None

    def write(self, at: Any, mine: Any, base: Any) -> Found | None:
        """Note writes."""
        found = self._meet(at, mine, base, atomic=False)
        if found is not None:
            return found
        self._written[at] = mine
        back = self._written.take(at)
        bad = back != mine
        return _found(bad, back, "write to an element that another thread writes, too") if bad.any() else None

    def atomic(self, at: Any, mine: Any, base: Any) -> Found | None:
        """Note atomic operations, which read too."""
        found = self._meet(at, mine, base, atomic=True)
        if found is not None:
            return found
        written = self._written.take(at)
        if written.min(initial=0) < 0:
            return Found(int(np.argmin(written)), "read of shared memory that nothing was written to", -1)
        self._written[at] = base | _ATOMIC
        return None

    def _meet(self, at: Any, mine: Any, base: Any, atomic: bool) -> Found | None:
        written = self._written.take(at)
        bad = (written >= base) & (written != mine)
        if atomic:
            bad &= written != (base | _ATOMIC)
        if bad.any():
            return _found(
                bad, written, "write to an element that another thread wrote, with no barrier between"
            )
        read = self._read.take(at)
        bad = (read >= base) & (read != mine)
        if bad.any():
            return _found(bad, read, "write to an element that another thread reads, with no barrier between")
        return None


def _found(bad: Any, stamps: Any, what: str) -> Found:
    lane = int(bad.argmax())
    other = int(stamps[lane]) & 0xFFFFFFFF
    return Found(lane, what, -1 if other >= _ATOMIC else other)


class Who(NamedTuple):
    """The lanes of an access to memory of the device: threads counted from 1 over the grid, blocks, epochs, fences."""

    thread: Any
    block: Any
    epoch: Any
    fence: Any
    block_threads: int


class GridShadow:
    """The accesses to memory of the device during one launch; `tag` tells the addresses of aliased memory apart."""

    def __init__(self, count: int) -> None:
        # Zeros cost nothing until they are touched, so threads are counted from 1.
        self._writer: Any = np.zeros(count, np.int64)
        self._reader: Any = np.zeros(count, np.int64)
        self._write_epoch: Any = np.zeros(count, np.int32)
        self._read_epoch: Any = np.zeros(count, np.int32)
        self._tag: Any = np.zeros(count, np.int8)
        self._fence: Any = np.zeros(count, np.int32)

    def read(self, at: Any, who: Who, tag: int) -> Found | None:
        """Note reads."""
        writer = self._writer[at]
        bad = self._unordered(writer, self._write_epoch[at], who)
        if bad.any():
            return _met(bad, writer, "read of what another thread wrote, with nothing to order the two")
        found = self._unfenced(at, writer, who, tag, "read")
        if found is not None:
            return found
        before, epoch = self._reader[at], self._read_epoch[at]
        self._reader[at] = who.thread
        many = (self._reader[at] != who.thread) | self._unordered(before, epoch, who)
        self._read_epoch[at] = who.epoch
        if many.any():
            self._reader[at[many]] = -2
        return None

    def write(self, at: Any, who: Who, tag: int) -> Found | None:
        """Note writes."""
        found = self._meet(at, who, tag, atomic=False)
        if found is not None:
            return found
        self._writer[at] = who.thread
        back = self._writer[at]
        bad = back != who.thread
        if bad.any():
            return _met(bad, back, "write to an element that another thread writes, too")
        self._write_epoch[at], self._tag[at], self._fence[at] = who.epoch, tag, who.fence
        return None

    def atomic(self, at: Any, who: Who, tag: int) -> Found | None:
        """Note atomic operations."""
        found = self._meet(at, who, tag, atomic=True)
        if found is not None:
            return found
        self._writer[at] = -1
        self._write_epoch[at], self._tag[at], self._fence[at] = who.epoch, tag, who.fence
        return None

    def _meet(self, at: Any, who: Who, tag: int, atomic: bool) -> Found | None:
        writer = self._writer[at]
        bad = self._unordered(writer, self._write_epoch[at], who)
        if atomic:
            bad &= writer != -1
        if bad.any():
            return _met(
                bad, writer, "write to an element that another thread wrote, with nothing to order the two"
            )
        reader = self._reader[at]
        bad = self._unordered(reader, self._read_epoch[at], who)
        if bad.any():
            return _met(
                bad, reader, "write to an element that another thread reads, with nothing to order the two"
            )
        return None if atomic else self._unfenced(at, writer, who, tag, "write")

    def _unordered(self, other: Any, epoch: Any, who: Who) -> Any:
        same_block = (other > 0) & ((other - 1) // who.block_threads == who.block)
        return (other != 0) & (other != who.thread) & ~(same_block & (epoch < who.epoch))

    def _unfenced(self, at: Any, writer: Any, who: Who, tag: int, verb: str) -> Found | None:
        bad = (writer != 0) & (self._tag[at] != tag) & (self._fence[at] >= who.fence)
        if bad.any():
            what = (
                f"{verb} through another address than what was written through, with no alias_fence() between"
            )
            return _met(bad, writer, what)
        return None


def _met(bad: Any, others: Any, what: str) -> Found:
    lane = int(bad.argmax())
    other = int(others[lane])
    return Found(lane, what, other - 1 if other > 0 else -1)
