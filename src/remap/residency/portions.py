"""Portions: what a resume brings, cut so that mapping the next goes on beside the copies of the one before."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from remap.buffers.base import POISON, Buffer
from remap.buffers.changes import shares_of
from remap.buffers.shares import Share
from remap.handles import create_handle
from remap.lifetime import Release, Rollback
from remap.locations import Device, in_context
from remap.ranges import Chunk, grant
from remap.residency.flow import Flow, actor, near
from remap.residency.stores import Asleep, FileJobs
from remap.sizes import MiB

_AT_ONCE = 64 * MiB
"""How much is mapped before its copies are queued: creating and mapping the next goes on beside them."""


class Portion:
    """A few chunks of one buffer, which are mapped in one go, and what is copied into them.

    `events` has one for each chunk, to be recorded behind its copy, or is empty. Once it is `done`, the chunks are
    mapped and their copies queued; `gone` says that the buffer was closed before that.
    """

    __slots__ = ("_handles", "backup", "buffer", "chunks", "done", "events", "gone", "offset")

    _full = False  # whether it is filled with other rights than it has in the end

    def __init__(self, buffer: Buffer, backup: Asleep, chunks: Sequence[Chunk], offset: int) -> None:
        self.buffer = buffer
        self.backup = backup
        self.chunks = chunks
        self.offset = offset
        self.events: list[int] = []
        self.done = self.gone = False
        self._handles: list[int] = []

    @property
    def needed_at_once(self) -> bool:
        """Whether it has to be there when the call returns.

        Somebody outside knows the address, and nothing would keep them from it; or it is brought by other means.
        """
        buffer = self.buffer
        if shares_of(buffer):  # forks have it mapped as well, once it is there
            return True
        known = buffer._listeners or (buffer._known_uses is not None and buffer._known_uses.escaped)
        return bool(known) or self.backup.file is not None or None in map(self._actor, self.chunks)

    def copier(self, chunk: Chunk) -> Device:
        """Return the device that copies a chunk in."""
        return self._actor(chunk) or near(chunk.location)

    @property
    def copied(self) -> int:
        """The bytes that are copied in."""
        return sum(chunk.size for chunk in self.chunks) if self.backup.keep else 0

    def create(self, driver: Any, rollback: Rollback) -> None:
        """Create the memory, which is what may be short: it raises `OutOfMemoryError` then."""
        rollback.undo(self.release, driver)
        with driver.lock:
            for chunk in self.chunks:
                properties = self.buffer.properties.at(chunk.location)
                self._handles.append(create_handle(driver, chunk.size, properties))

    def prepare(self, driver: Any, flow: Flow, rollback: Rollback, poison: bool) -> None:
        """Take all that it needs and may not get: memory, a stream, and an event for each chunk."""
        self.create(driver, rollback)
        if self.backup.file is not None or (self.backup.keep is None and not poison):
            return
        for chunk in self.chunks:
            at = self.copier(chunk)
            flow.lane(at)
            with at.current():
                event: int = driver.create_event()
            rollback.undo(in_context, at, driver.destroy_event, event)
            self.events.append(event)

    def bring(self, driver: Any, flow: Flow, jobs: FileJobs | None, rollback: Rollback, poison: bool) -> None:
        """Map the memory and queue the copies into it; whoever undoes that waits for the copies first."""
        backup, offset = self.backup, self.offset
        with driver.lock:
            self.buffer._map_chunks(self.chunks, self._handles, rollback, full=self._full)
        rollback.undo(flow.wait)
        for index, chunk in enumerate(self.chunks if backup.keep is not None or poison else ()):
            at, target = flow.reach(self.buffer, chunk, writes=True)
            if backup.file is not None:
                assert jobs is not None
                jobs.add(at, target, backup.file, offset, chunk.size)
            else:
                if backup.extent is not None:
                    lane = flow.into(at, target, chunk.size, backup.extent, offset)
                else:
                    lane = flow.fill(at, target, chunk.size, POISON)
                if self.events:
                    in_context(at, driver.record_event, self.events[index], lane)
            offset += chunk.size

    def release(self, driver: Any) -> None:
        """Release the handles: what is mapped keeps its memory, and the rest goes."""
        release = Release(1, [(driver.release, (handle,)) for handle in self._handles])
        handles, self._handles = self._handles, []
        try:
            release.run()
        except BaseException:
            if not release.begun:  # an interrupt
                self._handles = handles
            raise

    def touches(self, part: tuple[int, int] | None) -> bool:
        """Tell whether a part, (offset, size), of the buffer lies in it; None is the whole."""
        if part is None:
            return True
        start, last = self.chunks[0].address - self.buffer._address, self.chunks[-1]
        return start < part[0] + part[1] and part[0] < last.address + last.size - self.buffer._address

    def _actor(self, chunk: Chunk) -> Device | None:
        return actor(self.buffer, chunk.location, writes=True)


class Carried(Portion):
    """A few chunks that forks share, brought by the first of them: filled with its own rights, then lowered."""

    __slots__ = ()

    _full = True

    def lower(self, driver: Any) -> None:
        """Let nobody write any more; the copies have ended."""
        for run in self.buffer._granted_runs(self.chunks):
            grant(driver, *run)


class Borrowed(Portion):
    """A few chunks of one buffer that another one of the same resume carries, whose memory is mapped here as well.

    `origins` are the addresses where that one has them.
    """

    __slots__ = ("_origins",)

    def __init__(
        self, buffer: Buffer, backup: Asleep, chunks: Sequence[Chunk], origins: Sequence[int]
    ) -> None:
        super().__init__(buffer, backup, chunks, 0)
        self._origins = origins

    @property
    def copied(self) -> int:
        """Nothing: the other one copies it."""
        return 0

    def create(self, driver: Any, rollback: Rollback) -> None:
        """Create nothing: the memory is the other one's."""
        rollback.undo(self.release, driver)

    def prepare(self, driver: Any, flow: Flow, rollback: Rollback, poison: bool) -> None:
        """Take nothing: no copy is queued for it."""
        self.create(driver, rollback)

    def bring(self, driver: Any, flow: Flow, jobs: FileJobs | None, rollback: Rollback, poison: bool) -> None:
        """Map the memory here as well; the other one was brought before, and its contents are on their way."""
        with driver.lock:
            for origin in self._origins:
                self._handles.append(driver.retain(origin))
            self.buffer._map_chunks(self.chunks, self._handles, rollback)


def cut(buffers: Sequence[Buffer], backups: Sequence[Asleep]) -> list[Portion]:
    """Return buffers in portions, in order. What forks share is brought by the first of them, and then borrowed."""
    found: list[Portion] = []
    origins: dict[Share, int] = {}
    for buffer, backup in zip(buffers, backups, strict=True):
        if backup.sources:
            found += _portions_of_fork(buffer, backup, origins)
            continue
        offset = 0
        for some in _slices(buffer._chunks):
            found.append(Portion(buffer, backup, some, offset))
            offset += sum(chunk.size for chunk in some)
    return found


def _portions_of_fork(buffer: Buffer, backup: Asleep, origins: dict[Share, int]) -> Iterator[Portion]:
    """Yield portions of a buffer that shares; `origins` are the addresses where what is shared is brought first."""
    shares = shares_of(buffer)
    some: list[Chunk] = []
    kind: type[Portion] = Portion
    source, start, end = backup, 0, 0
    for chunk, (noted, offset) in zip(buffer._chunks, backup.sources, strict=True):
        share = shares.get(chunk.address)
        mine = share is None or origins.setdefault(share, chunk.address) == chunk.address
        own: type[Portion] = (Portion if share is None else Carried) if mine else Borrowed
        place = noted or backup
        if some and ((own, place, offset) != (kind, source, end) or end - start >= _AT_ONCE):
            yield _portion(kind, buffer, source, some, start, shares, origins)
            some = []
        if not some:
            kind, source, start = own, place, offset
        some.append(chunk)
        end = offset + chunk.size
    if some:
        yield _portion(kind, buffer, source, some, start, shares, origins)


def _portion(
    kind: type[Portion],
    buffer: Buffer,
    source: Asleep,
    chunks: list[Chunk],
    offset: int,
    shares: Mapping[int, Share],
    origins: Mapping[Share, int],
) -> Portion:
    if kind is Borrowed:
        return Borrowed(buffer, source, chunks, [origins[shares[chunk.address]] for chunk in chunks])
    return kind(buffer, source, chunks, offset)


def _slices(chunks: Iterable[Chunk]) -> Generator[list[Chunk]]:
    """Yield chunks in order, a few at a time."""
    some: list[Chunk] = []
    size = 0
    for chunk in chunks:
        some.append(chunk)
        size += chunk.size
        if size >= _AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def at_first(portions: Sequence[Portion]) -> int:
    """Return how many portions an ordered resume brings before it returns: the first, and what is needed at once."""
    needed = [index for index, portion in enumerate(portions) if portion.needed_at_once]
    return max([1, *[index + 1 for index in needed]])
