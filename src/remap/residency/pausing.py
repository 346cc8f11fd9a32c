"""`pause`: everything is copied out first, and only then is memory given back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remap import drivers
from remap.buffers.base import Buffer, all_mapped
from remap.buffers.changes import shares_of
from remap.errors import InvalidValueError, PausedError
from remap.lifetime import Rollback, drain
from remap.locations import device
from remap.residency.arenas import Extent
from remap.residency.disk import DiskFile, backup_directory, check_space
from remap.residency.families import Carriers, carried, carried_bytes, carriers, note_sources, reclaim
from remap.residency.flow import Flow, near
from remap.residency.present import current_pool
from remap.residency.results import Moved, Progress
from remap.residency.stores import Asleep, FileJobs, Keep, asleep
from remap.residency.targets import (
    Targets,
    announce,
    check_forks,
    check_seconds,
    chosen,
    each,
    free_memory,
    free_memory_now,
    growth,
    held,
    wait_for_work,
)
from remap.sizes import counted
from remap.types import Location
from remap.uses import After, Known


def pause(
    buffers: Targets,
    keep: Keep = "host",
    *,
    wait: float = 0.0,
    after: After = Known.STREAMS,
    progress: Progress | None = None,
    keep_host: bool = False,
    directory: str | os.PathLike[str] | None = None,
    detach: bool = False,
) -> Moved:
    """Give the memory of buffers back, and keep their addresses and, with `keep`, their contents.

    `buffers` is a buffer, a group or its tag, several of them, or a mapping of them to what is kept of each:
    `remap.pause({"weights": "host", "kv": None})` is one transaction. `keep` is "host" (pinned host memory, see
    `remap.host_pool`), "disk" (a file without a name in `directory`, by default the system's for temporary files) or
    None (the contents are given up, and undefined after `resume`). A mapping says it for each, and takes no `keep`
    beside it. `keep_host=True` keeps the staging memory of "disk" for the next time.

    Waits for the work that may still use the buffers, as closing does; `after=` names a stream or an event instead, or
    None: the caller's promise. Until it is resumed, a buffer refuses every use with `PausedError`; its arrays,
    pointers and captured graphs stay valid for the time after that. A buffer that is paused already is left alone,
    if it is kept in the same way, and in the `directory` that is named; else this raises `PausedError`.

    A failure before the first memory is given back changes nothing. After it, all buffers of the call end paused with
    their backups intact, and the error says so. Raises `InUseError` if a CPU view, or another thread in the middle of a
    call, uses a buffer and has not let go after `wait` seconds, while a stream to be waited for is being captured,
    where forks that share memory with a buffer are not named in the same call, and at once for memory that other
    processes share unless `detach=True`; `OutOfMemoryError` where host memory is short, `DiskError`,
    `PausedError`. On a device that shares its memory with the CPU, "host" would free nothing: the buffers stay mapped,
    and the result says so.
    """
    start = time.perf_counter()
    drain()
    driver = drivers.current()
    pool = current_pool(driver)
    check_seconds(wait, "pause")
    asked = each(buffers)
    plans: dict[Buffer, Keep] = {}

    def choose() -> None:
        """Take the members of groups anew: while it waits, a fork of one may have been made, or one closed."""
        plans.clear()
        plans.update(chosen(asked, keep))
        for buffer in [
            one
            for one, kept in plans.items()
            if not (one.closed or one._taken) and _is_paused(one, kept, directory)
        ]:
            del plans[buffer]

    choose()
    for buffer in plans:
        buffer._check()
    notes: list[str] = []
    if directory is not None and "disk" not in chosen(asked, keep).values():
        notes.append('directory= says where keep="disk" puts contents, and nothing was to be kept so')
    with held(plans, "paused", detach=detach, deadline=start + wait, again=choose):
        # Those that another thread has paused meanwhile.
        for buffer in [one for one, kept in plans.items() if _is_paused(one, kept, directory)]:
            del plans[buffer]
        staying = _sharing_memory(buffer for buffer, kept in plans.items() if kept == "host")
        for buffer in staying:
            notes.append(
                f"{buffer.describe()} stays mapped: its device shares memory with the CPU, nothing would be freed"
            )
            del plans[buffer]
        if staying:
            check_forks(plans, "paused")
        wait_for_work(plans, after, "paused")
        reclaim(plans)
        by = carriers(plans)
        before = free_memory(plans)
        backups: dict[Buffer, Asleep] = {}
        with Rollback() as rollback:
            _save(driver, plans, by, backups, rollback, progress, keep_host, backup_directory(directory))
            failure = _release(driver, backups)
    announce(plans, failure)
    after_it = free_memory_now(before)
    figures = pool.statistics()
    return Moved(
        buffers=len(plans),
        bytes=carried_bytes((buffer for buffer, kept in plans.items() if kept is not None), by),
        freed=carried_bytes(plans, by),
        confirmed=growth(before, after_it),
        free=after_it,
        seconds=time.perf_counter() - start,
        host=figures.held + figures.leaving,
        notes=(*notes, *figures.notes),
    )


def backup(buffer: Buffer) -> NDArray[np.uint8]:
    """Return the contents of a paused buffer as a NumPy array of bytes; what is written there wakes with it.

    While the array or a view of it lives, the buffer refuses to resume and to close. Raises `InvalidValueError` for a
    buffer that is not paused, was paused with keep=None, or shares chunks with forks, whose contents are kept once.
    """
    if not isinstance(buffer, Buffer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"a buffer that stands on mapped memory has a backup, not {type(buffer)}")
    with buffer._driver.lock:
        buffer._check()
        if buffer._taken:
            buffer._check_free("looked at in its backup")
        if not buffer._paused:
            raise InvalidValueError(
                f"the backup of {buffer.describe()}",
                rule="it is not paused",
                next_step='Pause it first: remap.pause(buffer, keep="host")',
            )
        elsewhere = any(source is not None for source, _ in asleep(buffer).sources)
        if elsewhere or any(share.users > 1 for share in shares_of(buffer).values()):
            raise InvalidValueError(
                f"the backup of {buffer.describe()}",
                rule="it shares chunks with forks, and what is shared was kept once for all of them",
                next_step="Call make_private() before it is paused, or change it when it is awake",
            )
        view = _BackupView(buffer, asleep(buffer))
    return np.asarray(view)


class _BackupView:
    """Counts as an array that looks at the buffer, while anything made of it lives."""

    def __init__(self, buffer: Buffer, found: Asleep) -> None:
        size = _bytes(buffer)
        self._buffer = buffer
        self._file: Any = None
        memory = found.memory(size) if size else 0
        if not isinstance(memory, int):
            self._file = memory  # holds the mapping of the file
            memory = np.frombuffer(memory, np.uint8).ctypes.data
        self.__array_interface__ = {
            "version": 3,
            "data": (memory, False),
            "shape": (size,),
            "typestr": "|u1",
        }
        self._tokens = [_tokens(buffer, name) for name in ("_exports", "_views")]
        for tokens in self._tokens:
            tokens.add(id(self) | 1 << 63)

    def __del__(self) -> None:
        for tokens in getattr(self, "_tokens", ()):
            tokens.discard(id(self) | 1 << 63)


def _tokens(buffer: Buffer, name: str) -> set[int]:
    if getattr(buffer, name) is None:
        setattr(buffer, name, set())
    found: set[int] = getattr(buffer, name)
    return found


def _save(
    driver: Any,
    plans: Mapping[Buffer, Keep],
    by: Carriers,
    backups: dict[Buffer, Asleep],
    rollback: Rollback,
    progress: Progress | None,
    keep_host: bool,
    directory: Any,
) -> None:
    """Copy everything out, into backups that `rollback` drops."""
    pool = current_pool(driver)
    to_host = [buffer for buffer, kept in plans.items() if kept == "host"]
    to_disk = [buffer for buffer, kept in plans.items() if kept == "disk"]
    for buffer in plans:
        backups[buffer] = Asleep(plans[buffer])
        rollback.undo(_drop_unused, buffer, backups[buffer])
    note_sources(backups, by)
    if to_disk:
        check_space(directory, carried_bytes(to_disk, by))
    by_place: dict[Location | None, list[Buffer]] = {}
    for buffer in to_host:
        by_place.setdefault(buffer._chunks[0].location if buffer._chunks else None, []).append(buffer)
    for place, some in by_place.items():
        sizes = [carried_bytes((buffer,), by) for buffer in some]
        extents: list[Extent] = []
        rollback.undo(pool.give_all, extents, False)
        pool.take(sizes, device() if place is None else near(place), extents)
        for buffer, extent in zip(some, extents, strict=True):
            backups[buffer].extent = extent
    total = carried_bytes((*to_host, *to_disk), by)
    with Flow(driver, total, progress) as flow:
        for buffer in to_host:
            room, offset = backups[buffer].extent, 0
            assert room is not None
            for chunk in carried(buffer, by):
                at, source = flow.reach(buffer, chunk, writes=False)
                flow.out(at, source, chunk.size, room, offset)
                offset += chunk.size
        jobs = FileJobs(driver, pool, flow, out=True)
        for buffer in to_disk:
            file, offset = DiskFile(directory, carried_bytes((buffer,), by)), 0
            backups[buffer].file = file
            for chunk in carried(buffer, by):
                at, source = flow.reach(buffer, chunk, writes=False)
                jobs.add(at, source, file, offset, chunk.size)
                offset += chunk.size
        jobs.run(keep_host)
        flow.finish()


def _drop_unused(buffer: Buffer, backup: Asleep) -> None:
    if buffer._backup is not backup:  # whatever happened in between, a buffer that sleeps on it keeps it
        backup.drop()


def _release(driver: Any, backups: Mapping[Buffer, Asleep]) -> BaseException | None:
    """Give the memory back; return the error of what could not be unmapped, raise it if nothing has been yet."""
    first: BaseException | None = None
    left = list(backups.items())[::-1]
    while left:
        buffer, backup = left[-1]
        before = buffer._paused, buffer._backup, buffer._shared
        try:
            with driver.lock:
                # Set before the call: an interrupt is raised when it has returned, and the backup is all there is then.
                buffer._paused, buffer._backup, buffer._shared = backup.told, backup, False
                backup.stale = True
                buffer._unmap_chunks()
                backup.stale = False
        except BaseException as error:
            if len(left) == len(backups) and all_mapped(driver, buffer._chunks):
                buffer._paused, buffer._backup, buffer._shared = before
                backup.stale = False
                raise
            if first is None:
                first = error
                first.add_note(
                    f"{counted(len(backups), 'buffer')} paused all the same, with the backup intact; what could "
                    "not be unmapped is tried again when they are resumed"
                )
            else:
                first.add_note(f"and then: {error}")
            if not isinstance(error, Exception):
                continue  # an interrupt, wherever it came: the buffer is done again
        del left[-1]
    return first


def _is_paused(buffer: Buffer, kept: Keep, directory: str | os.PathLike[str] | None) -> bool:
    """Tell whether a buffer is paused already; raises `PausedError` if it is kept in another way, or elsewhere."""
    if not buffer._paused:
        return False
    backup = asleep(buffer)
    asked = f"pause of {buffer.describe()} with keep={kept!r}"
    rule = ""
    if backup.keep != kept:
        rule = f"it is paused with keep={backup.keep!r} already"
    elif directory is not None and backup.file is not None:
        there = backup.file.directory
        if Path(directory).resolve() != there.resolve():
            asked += f" in {os.fspath(directory)}"
            rule = f"it is paused with its contents in {there} already"
    if rule:
        raise PausedError(asked, rule=rule, next_step="Resume it first")
    return True


def _sharing_memory(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Return the buffers all of whose memory is that of devices that share it with the CPU."""
    integrated: dict[Location, bool] = {}

    def shares(place: Location) -> bool:
        if place not in integrated:
            integrated[place] = place.is_device and device(place.index).properties.integrated
        return integrated[place]

    return [
        buffer
        for buffer in buffers
        if buffer._chunks and all(shares(chunk.location) for chunk in buffer._chunks)
    ]


def _bytes(buffer: Buffer) -> int:
    return sum(chunk.size for chunk in buffer._chunks)
