"""What paused buffers sleep on: an extent of host memory, a file, or nothing."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias

from remap import lifetime
from remap.buffers.base import Buffer
from remap.errors import InvalidValueError
from remap.lifetime import Release, Step, undo
from remap.locations import Device
from remap.residency.arenas import SLAB, Extent
from remap.residency.disk import DiskFile
from remap.residency.flow import Flow, Owner
from remap.residency.hostpool import HostPool
from remap.sizes import MiB, round_up

Keep: TypeAlias = Literal["host", "disk"] | None
"""Where the contents of a paused buffer are kept; None gives them up."""

_READERS = 4  # threads that write or read a file; the system does the rest side by side


class Asleep:
    """The backup of one paused buffer. Its `drop` is what closing the buffer runs.

    `stale` says that a part of the memory could not be unmapped: waking tries that again first. `sources` tells of each
    chunk of a buffer that shares some with forks which backup has its bytes (None for this one), and at which offset;
    it is empty where all chunks lie here, one after the other. What others have their bytes in stays until they need
    it no more, also where its own buffer is closed before.
    """

    __slots__ = ("_epoch", "_given", "_users", "extent", "file", "keep", "sources", "stale")

    sources: Sequence[tuple[Asleep | None, int]]

    # Not by a name of the module, which may be gone when the process ends.
    _process = lifetime.Resource._process

    def __init__(self, keep: Keep, extent: Extent | None = None, file: DiskFile | None = None) -> None:
        self.keep = keep
        self.extent = extent
        self.file = file
        self.stale = False
        self.sources = ()
        # Who needs it, None where nobody else does, and who gave it back. Changed by one step of the interpreter each
        # time: two threads may close two forks that sleep.
        self._users: set[int] | None = None
        self._given: dict[str, int] = {}
        self._epoch = lifetime.epoch()

    def __del__(self) -> None:
        """Queue what a buffer that was collected unclosed sleeps on, as finalisers do (invariant 4)."""
        process = self._process
        if self.extent is not None and not process.ending and self._epoch == process.epoch:
            lifetime.queued.append(Release(1, [(self.extent.pool.give, (self.extent, False))]))

    @property
    def told(self) -> str:
        """Where the contents are, for messages."""
        return {"host": "kept on the host", "disk": "kept on disk", None: "contents given up"}[self.keep]

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that the backup takes; 0 for a file, and for contents given up."""
        return self.extent.size if self.extent is not None else 0

    def note(self, sources: Sequence[tuple[Asleep | None, int]]) -> None:
        """Note where the bytes of each chunk lie."""
        self.sources = sources
        for source in {source for source, _ in sources if source is not None}:
            if source._users is None:
                source._users = {id(source)}
            source._users.add(id(self))

    def leave(self) -> Iterator[Asleep]:
        """Need nothing any more, and yield the backups that nobody needs then; doing so again yields the same."""
        if self._users is None and not self.sources:
            yield self
            return
        for one in {self, *(source for source, _ in self.sources if source is not None)}:
            if one._users is not None:
                one._users.discard(id(self))
            if not one._users and one._given.setdefault("by", id(self)) == id(self):
                yield one

    def drop(self, keep_host: bool = False) -> None:
        """Give the backup back. Dropping it again does nothing."""
        drop_all((self,), keep_host)

    def memory(self, size: int) -> mmap.mmap | int:
        """Return the backup as memory, by its address or as a mapped file; raises where nothing was kept."""
        if self.extent is not None:
            self.extent.ready()
            return self.extent.address
        if self.file is not None:
            return self.file.view()
        raise InvalidValueError(
            f"a backup of {size} bytes",
            rule="the buffer was paused with keep=None, and its contents were given up",
            next_step='Pause with keep="host" to change it while it sleeps',
        )


def drop_all(backups: Iterable[Asleep], keep_host: bool) -> None:
    """Give several backups back at once: one by one, each would be looked for in the pool and begin a thread."""
    dropped = [one for each in backups for one in each.leave()]
    extents = [one.extent for one in dropped if one.extent is not None]
    files = [one.file for one in dropped if one.file is not None]
    for pool in dict.fromkeys(extent.pool for extent in extents):
        pool.give_all([extent for extent in extents if extent.pool is pool], keep_host)
    Release(0, [(file.close, ()) for file in files]).run()
    # Last: what an interrupt has left of it is still known then, and goes with the backups.
    for one in dropped:
        one.extent = one.file = None


def asleep(buffer: Buffer) -> Asleep:
    """Return what a paused buffer sleeps on."""
    found: Any = buffer._backup
    assert isinstance(found, Asleep)
    return found


class FileJobs(Owner):
    """Copies between device memory and files, by way of staging memory, with several threads side by side.

    Each thread has a piece of pinned memory and a stream, and does one piece after the other: read and copy, or copy
    and write. While one waits for the file, others copy.
    """

    def __init__(self, driver: Any, pool: HostPool, flow: Flow, *, out: bool) -> None:
        self._driver = driver
        self._pool = pool
        self._flow = flow
        self._out = out
        self._jobs: deque[tuple[Device, int, DiskFile, int, int]] = deque()
        self._bytes = 0
        self._stop = False
        self._staging: list[Extent] = []
        super().__init__()

    def add(self, at: Device, address: int, file: DiskFile, offset: int, size: int) -> None:
        """Note a copy to be made by `run`."""
        self._bytes += size
        self._jobs.append((at, address, file, offset, size))

    def run(self, keep_host: bool) -> None:
        """Make all copies, and report each; the first error ends the others and is raised."""
        if not self._jobs:
            return
        count = _READERS if self._bytes > _READERS * 2 * MiB else 1
        piece = min(round_up(-(-self._bytes // count), 2 * MiB), SLAB)
        self._cut(piece)
        told: SimpleQueue[int | BaseException | None] = SimpleQueue()
        staging = self._staging
        threads: list[threading.Thread] = []
        first: BaseException | None = None
        try:
            self._pool.take([piece] * min(count, len(self._jobs)), self._jobs[0][0], staging)
            threads += [
                threading.Thread(target=self._work, args=(extent, told), name="remap-disk", daemon=True)
                for extent in staging
            ]
            for thread in threads:
                thread.start()
            left = len(threads)
            while left:
                said = told.get()
                if said is None:
                    left -= 1
                elif isinstance(said, BaseException):
                    self._stop = True
                    first = first or said
                elif first is None:
                    self._flow.report(said)
        finally:
            self._stop = True
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            self._pool.give_all(staging, keep_host)
        if first is not None:
            raise first

    def _left(self) -> list[Step]:
        lent = [extent for extent in self._staging if extent.lent]
        return [(self._pool.give_all, (lent, False))] if lent else []

    def _cut(self, piece: int) -> None:
        whole, self._jobs = self._jobs, deque()
        for at, address, file, offset, size in whole:
            for start in range(0, size, piece):
                self._jobs.append((at, address + start, file, offset + start, min(piece, size - start)))

    def _work(self, extent: Extent, told: SimpleQueue[int | BaseException | None]) -> None:
        lanes: dict[int, tuple[Device, int]] = {}
        try:
            extent.ready()
            try:
                while self._jobs and not self._stop:
                    try:
                        at, address, file, offset, size = self._jobs.popleft()
                    except IndexError:  # another thread took the last one
                        break
                    if at.index not in lanes:
                        with at.current():
                            lanes[at.index] = (at, self._driver.create_stream(True, 0))
                    self._move(extent, at, lanes[at.index][1], address, file, offset, size)
                    told.put(size)
            except BaseException as error:  # the staging memory goes back: nothing may still be copied there
                for at, lane in lanes.values():
                    undo(error, self._settle, at, lane)
                raise
            finally:
                for at, lane in lanes.values():
                    with at.current():
                        self._driver.destroy_stream(lane)
        except BaseException as error:  # noqa: BLE001 (raised again by `run`, in the thread that asked)
            told.put(error)
        told.put(None)

    def _settle(self, at: Device, lane: int) -> None:
        with at.current():
            self._driver.synchronize_stream(lane)

    def _move(
        self, extent: Extent, at: Device, lane: int, address: int, file: DiskFile, offset: int, size: int
    ) -> None:
        driver = self._driver
        if not self._out:
            file.read(extent.address, offset, size)
        copy: Callable[..., None] = driver.copy_to_host if self._out else driver.copy_to_device
        with at.current():
            done = 0
            for host, length in extent.pieces(0, size):
                copy(*((host, address + done) if self._out else (address + done, host)), length, lane)
                done += length
            driver.synchronize_stream(lane)
        if self._out:
            file.write(extent.address, offset, size)
