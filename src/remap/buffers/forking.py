"""Forks: buffers that share the memory behind their contents, read-only, until one takes a copy of a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from remap.buffers.growth import Change, GrowingBuffer
from remap.buffers.shares import alias, separate
from remap.errors import InUseError, InvalidValueError
from remap.lifetime import undo
from remap.locations import AccessLike
from remap.sizes import Size, format_size, parse_size
from remap.spans import Chunk
from remap.types import Location
from remap.uses import Known


class ForkingBuffer(GrowingBuffer):
    """A buffer that grows, and whose forks begin with the same memory behind them (B3, B8)."""

    _poison: bool = False

    def fork(self) -> Self:
        """Return a second buffer with the same contents, which shares the memory behind them.

        All chunks become read-only in both, for everybody; what either commits later is its own. Before writing to
        shared bytes, call `make_private` for them. The fork is in the groups that this buffer is in, since those that
        share memory sleep and move together. Waits for the work that may still write. Raises `InUseError` while
        something uses the buffer or views it, and where other processes hold its memory, and `OutOfAddressSpaceError`.
        After a failure everything is as it was.
        Source: cuMemRetainAllocationHandle, cuMemMap.
        """
        with self._change("forked"):
            twin = self._empty_twin()
            try:
                with self._excluding("forked"):
                    self._wait("forked", Known.STREAMS)
                    alias(self, twin)
                twin._opened()
            except BaseException as error:
                undo(error, twin.close)
                raise
        for told in self._heirs:
            told(twin)
        return twin

    def _empty_twin(self) -> Self:
        twin = type(self).__new__(type(self))
        GrowingBuffer.__init__(
            twin,
            self._driver,
            self._placement,
            self.capacity,
            self._sizes,
            alignment=self._alignment,
            pools=self._supply.pools,
            ahead=self._margin,
        )
        twin._rights, twin._poison = self._rights, self._poison
        twin._grant(self._granted)
        return twin

    def make_private(self, start: Size = 0, stop: Size | None = None) -> Change:
        """Let this buffer have the bytes from `start` up to `stop` for itself, so that it can write them.

        Copies the shared chunks in that range, whole ones always; where all forks have gone or have copies, nothing
        needs to be copied. Waits for work that uses the buffer, and copies before it excludes others. Raises
        `OutOfMemoryError` and `InUseError`; after a failure everything is as it was.
        """
        first = parse_size(start, "start")
        last = self._size if stop is None else parse_size(stop, "stop")
        self._check_bounds("make_private", first, last)
        with self._change("made private"):
            with self._driver.lock:
                shared = self._reclaim(self._shared_chunks(first, last))
            if shared:
                separate(self, shared)
        if shared:
            self._changed()
        return Change(mapped=sum(chunk.size for chunk in shared))

    @property
    def shared(self) -> tuple[tuple[int, int], ...]:
        """The parts that forks share, as (start, stop) offsets of whole chunks: they can be read and not written.

        What no fork has any more is this buffer's own again: asking gives it its rights back, as any write through
        remap does first. Kernels in CUDA C++, of which nobody knows what they write, come after that.
        """
        self._check()
        with self._driver.lock:
            found = self._still_shared(0, self.capacity)
        base = self._address
        parts: list[tuple[int, int]] = []
        for chunk in found:
            start = chunk.address - base
            if parts and parts[-1][1] == start:
                start = parts.pop()[0]
            parts.append((start, chunk.address - base + chunk.size))
        return tuple(parts)

    def _shared_chunks(self, start: int, stop: int) -> list[Chunk]:
        if not self._shares:
            return []
        return [
            chunk
            for chunk in self._chunks[slice(*self._touching(start, stop))]
            if chunk.address in self._shares
        ]

    def _part_writable(self, offset: int, size: int, place: Location | None = None) -> bool:
        with self._driver.lock:
            return not (self._shares and size and self._still_shared(offset, offset + size))

    def _writable_parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of a stretch of bytes that no fork has as well."""
        found: list[tuple[int, int]] = []
        with self._driver.lock:
            for chunk in self._still_shared(start, stop) if self._shares and start < stop else ():
                at = chunk.address - self._address
                if start < at:
                    found.append((start, at))
                start = at + chunk.size
        return [*found, (start, stop)] if start < stop else found

    def _still_shared(self, start: int, stop: int) -> list[Chunk]:
        """Return the chunks of a part that forks have as well; the caller holds the lock."""
        shared = self._shared_chunks(start, stop)
        busy = self._taken or self._paused or self._changing == "made private"
        return shared if busy else self._reclaim(shared)

    def _reclaim(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Give chunks that no fork has any more their rights back, and return the others; the caller holds the lock."""
        left: list[Chunk] = []
        for chunk in chunks:
            if not self._sole(chunk):
                left.append(chunk)
                continue
            if self._granted:
                self._driver.set_access(chunk.address, chunk.size, self._granted)
            del self._shares[chunk.address]
        return left

    def set_access(self, access: AccessLike) -> None:
        """Change the rights of the locations that are named, for what is committed and for what will be.

        Refused with `InUseError` while chunks are shared with forks. Otherwise as for any other memory.
        """
        with self._change("given other rights"):
            with self._driver.lock:
                self._reclaim(self._shared_chunks(0, self.capacity))
            if self._shares:
                raise InUseError(
                    f"set_access of {self.describe()}",
                    rule=f"{len(self._shares)} of its chunks are shared with forks, which need them as they are",
                    next_step="Call make_private() first, or close the forks",
                )
            self._flush()
            super().set_access(access)
            self._grant(tuple(self._rights.items()))

    # -- parts --

    def _check_bounds(self, asked: str, start: int, stop: int) -> None:
        self._check()
        if start > stop:
            raise InvalidValueError(
                f"{asked} of bytes {start} to {stop}", rule="the start is behind the stop"
            )
        if stop > self.capacity:
            raise InvalidValueError(
                f"{asked} up to byte {stop} ({format_size(stop)}) of {self.kind} {self.serial}",
                rule=f"its capacity is {format_size(self.capacity)}, reserved once",
                next_step="Make the buffer with a larger capacity=: it costs addresses only",
            )

    def _touching(self, start: int, stop: int) -> tuple[int, int]:
        """Return the indices of the chunks that have a byte between two offsets."""
        if start >= stop:
            return 0, 0
        first, last = self._index(start), self._index(stop)
        if first:
            before = self._chunks[first - 1]
            first -= before.address + before.size > self._address + start
        return first, last
