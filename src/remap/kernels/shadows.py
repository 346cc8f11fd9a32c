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

# In the place of a thread's number in its block. With one thread alone, the bit of atomics stands beside its number.
_BY_ATOMIC = 1 << 30
_ATOMIC = (1 << 31) - 2  # several threads
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
        bad = (written >= base) & (written != mine) & (written != mine | _BY_ATOMIC)
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
        written = self._written.take(at)
        if written.min(initial=0) < 0:
            found = self._meet(at, mine, base, atomic=True)
            return found or Found(
                int(np.argmin(written)), "read of shared memory that nothing was written to", -1
            )
        return self.exchange(at, mine, base)

    def exchange(self, at: Any, mine: Any, base: Any) -> Found | None:
        """Note atomic exchanges. One may be the first to write: what it stores is as good as any other value."""
        found = self._meet(at, mine, base, atomic=True)
        if found is not None:
            return found
        before = self._written.take(at)
        alone = mine | _BY_ATOMIC
        self._written[at] = alone
        several = (self._written.take(at) != alone) | (
            (before >= base) & (before != mine) & (before != alone)
        )
        if several.any():
            self._written[at[several]] = (base if np.ndim(base) == 0 else base[several]) | _ATOMIC
        plain = before == mine  # the thread's own plain write, which still has no order with others
        if plain.any():
            self._written[at[plain]] = before[plain]
        return None

    def _meet(self, at: Any, mine: Any, base: Any, atomic: bool) -> Found | None:
        written = self._written.take(at)
        bad = (written >= base) & (written != mine) & (written != mine | _BY_ATOMIC)
        if atomic:
            bad &= (written & _BY_ATOMIC) == 0
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
    return Found(lane, what, -1 if other >= _ATOMIC else other & ~_BY_ATOMIC)


class Who(NamedTuple):
    """The lanes of an access to memory of the device: threads counted from 1 over the grid, blocks, epochs, fences."""

    thread: Any
    block: Any
    epoch: Any
    fence: Any
    block_threads: int


class GridShadow:
    """The accesses to memory of the device during one launch; `tag` tells the addresses of aliased memory apart.

    Who wrote and who read is a thread counted from 1, -1 for threads of several blocks, -2 - b for several of block b.
    """

    def __init__(self, count: int) -> None:
        # Zeros cost nothing until they are touched, so threads are counted from 1.
        self._writer: Any = np.zeros(count, np.int64)
        self._reader: Any = np.zeros(count, np.int64)
        self._write_epoch: Any = np.zeros(count, np.int32)
        self._read_epoch: Any = np.zeros(count, np.int32)
        self._atomic: Any = np.zeros(count, np.bool_)
        self._plain: Any = np.zeros(count, np.int32)  # the block of the last plain write, from 1
        self._tag: Any = np.zeros(count, np.int8)
        self._fence: Any = np.zeros(count, np.int32)

    def read(self, at: Any, who: Who, tag: int) -> Found | None:
        """Note reads."""
        writer = self._writer[at]
        bad = _unordered(writer, self._write_epoch[at], who)
        if bad.any():
            return _met(bad, writer, "read of what another thread wrote, with nothing to order the two")
        found = self._unfenced(at, writer, who, tag, "read")
        if found is None:
            _join(self._reader, self._read_epoch, at, who)
        return found

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
        self._atomic[at], self._plain[at] = False, who.block + 1
        return None

    def atomic(self, at: Any, who: Who, tag: int) -> Found | None:
        """Note atomic operations."""
        found = self._meet(at, who, tag, atomic=True)
        if found is not None:
            return found
        # A thread's own plain write still has no order with others, so it stays what is known.
        plain = (self._writer[at] == who.thread) & ~self._atomic[at] & (self._write_epoch[at] == who.epoch)
        _join(self._writer, self._write_epoch, at, who)
        self._tag[at], self._fence[at], self._atomic[at] = tag, who.fence, ~plain
        return None

    exchange = atomic  # memory of the device has contents

    def _meet(self, at: Any, who: Who, tag: int, atomic: bool) -> Found | None:
        writer = self._writer[at]
        bad = _unordered(writer, self._write_epoch[at], who)
        if atomic:
            # An atomic operation of the block that wrote may have come since; nothing orders other blocks all the same.
            plain = self._plain[at]
            bad = (bad & ~self._atomic[at]) | ((plain != 0) & (plain != who.block + 1))
        if bad.any():
            return _met(
                bad, writer, "write to an element that another thread wrote, with nothing to order the two"
            )
        reader = self._reader[at]
        bad = _unordered(reader, self._read_epoch[at], who)
        if bad.any():
            return _met(
                bad, reader, "write to an element that another thread reads, with nothing to order the two"
            )
        return None if atomic else self._unfenced(at, writer, who, tag, "write")

    def _unfenced(self, at: Any, writer: Any, who: Who, tag: int, verb: str) -> Found | None:
        bad = (writer != 0) & (self._tag[at] != tag) & (self._fence[at] >= who.fence)
        if bad.any():
            what = (
                f"{verb} through another address than what was written through, with no alias_fence() between"
            )
            return _met(bad, writer, what)
        return None


def _blocks(others: Any, who: Who) -> Any:
    """Return the block of each one who came before, negative for none and for several."""
    return np.where(others > 0, (others - 1) // who.block_threads, -2 - others)


def _unordered(others: Any, epoch: Any, who: Who) -> Any:
    """Tell where another thread came before that no barrier of its block puts before this one."""
    behind = (epoch < who.epoch) & (_blocks(others, who) == who.block)
    return (others != 0) & (others != who.thread) & ~behind


def _join(others: Any, epochs: Any, at: Any, who: Who) -> None:
    """Note who comes, together with whoever is there and not ordered before; several may come to one element."""
    before = others[at]
    stays = _unordered(before, epochs[at], who)
    others[at], epochs[at] = who.thread, who.epoch
    lost = stays | (others[at] != who.thread)
    if not lost.any():
        return
    others[at[lost]] = 0
    shared = others[at] == 0
    at, block, before, stays = at[shared], who.block[shared], before[shared], stays[shared]
    mine = -2 - block
    others[at] = mine
    mixed = (others[at] != mine) | (stays & (_blocks(before, who) != block))
    others[at[mixed]] = -1


def _met(bad: Any, others: Any, what: str) -> Found:
    lane = int(bad.argmax())
    other = int(others[lane])
    return Found(lane, what, other - 1 if other > 0 else -1)
