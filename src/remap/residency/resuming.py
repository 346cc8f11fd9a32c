"""`resume`: memory is created, mapped and filled for every buffer first, and only then are backups given back."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Literal, overload

from remap import drivers
from remap.buffers.base import POISON, Buffer
from remap.errors import InvalidValueError, OutOfMemoryError
from remap.lifetime import Rollback, drain
from remap.locations import Device
from remap.ranges import Chunk
from remap.residency.flow import Flow, window_on
from remap.residency.hostpool import current_pool
from remap.residency.results import Moved, Progress
from remap.residency.stores import Asleep, FileJobs, asleep
from remap.residency.targets import (
    Targets,
    actor,
    announce,
    chosen,
    free_memory,
    free_memory_now,
    growth,
    held,
    near,
)
from remap.residency.waking import Mark, Waking
from remap.sizes import MiB

_AT_ONCE = 64 * MiB
"""How much is mapped before its copies are queued: creating and mapping the next goes on beside them."""

_LONGEST_WAIT = 0.05


@overload
def resume(
    buffers: Targets,
    *,
    wait: float = ...,
    order: Sequence[Buffer] | None = ...,
    events: Literal[False] = ...,
    keep_host: bool = ...,
    progress: Progress | None = ...,
    poison: bool = ...,
) -> Moved: ...
@overload
def resume(
    buffers: Targets,
    *,
    wait: float = ...,
    order: Sequence[Buffer] | None = ...,
    events: Literal[True],
    keep_host: bool = ...,
    progress: Progress | None = ...,
    poison: bool = ...,
) -> Waking: ...
@overload
def resume(
    buffers: Targets,
    *,
    wait: float = ...,
    order: Sequence[Buffer] | None = ...,
    events: bool,
    keep_host: bool = ...,
    progress: Progress | None = ...,
    poison: bool = ...,
) -> Moved | Waking: ...
def resume(
    buffers: Targets,
    *,
    wait: float = 0.0,
    order: Sequence[Buffer] | None = None,
    events: bool = False,
    keep_host: bool = False,
    progress: Progress | None = None,
    poison: bool = False,
) -> Moved | Waking:
    """Put memory behind paused buffers again, at the same addresses, with the same rights and the kept contents.

    When it returns, the buffers can be used. What was paused with keep=None has undefined contents (`poison=True`
    fills it with 0xCB). A buffer that is not paused is left alone. Host memory of the backups goes back to the machine
    in the background; `keep_host=True` keeps it for the next pause.

    If there is not enough memory it raises `OutOfMemoryError`, everything stays paused with its backup, and can be
    resumed later; `wait` seconds are waited for others to give memory back, before that. The same holds for every
    other failure.

    `order` names the buffers that are needed first. With `events=True` it returns a `Waking` as soon as everything is
    mapped and the copies are queued: each use through remap then waits for the chunks it touches, `Waking.events` has
    an event for each chunk, and closing it waits for the rest. What is read from a file has arrived by then.
    """
    start = time.perf_counter()
    drain()
    driver = drivers.current()
    if events and progress is not None:
        raise InvalidValueError(
            "resume with events=True and progress=", rule="it returns before there is progress to tell of",
            next_step="Look at Waking.events",
        )  # fmt: skip
    if not wait >= 0:  # NaN, too, which no deadline ever reaches
        raise InvalidValueError(f"resume with wait={wait}", rule="it is a number of seconds, 0 or more")
    plans = _ordered(chosen(buffers, None), order or ())
    for buffer in plans:
        buffer._check()
    deadline = start + wait
    pause = 0.001
    while True:
        # What another thread moves is refused there, whatever state it is in.
        with held([buffer for buffer in plans if buffer._paused or buffer._taken], "resumed"):
            asked = [buffer for buffer in plans if buffer._paused]
            before = free_memory(asked)
            try:
                waking = _wake(driver, asked, before, start, events, keep_host, progress, poison)
            except OutOfMemoryError:
                if time.perf_counter() >= deadline:
                    raise
            else:
                break
        # Held by nobody while it waits: closing one of the buffers, for instance, must stay possible.
        _wait_for_memory(asked, deadline, pause)
        pause = min(2 * pause, _LONGEST_WAIT)
    announce(asked)
    return waking


def _wake(
    driver: Any,
    buffers: list[Buffer],
    before: Any,
    start: float,
    events: bool,
    keep_host: bool,
    progress: Progress | None,
    poison: bool,
) -> Moved | Waking:
    pool = current_pool(driver)
    backups = [asleep(buffer) for buffer in buffers]
    total = sum(
        chunk.size
        for buffer, backup in zip(buffers, backups, strict=True)
        if backup.keep
        for chunk in buffer._chunks
    )

    def measure() -> Moved:
        found = free_memory_now(before)
        figures = pool.statistics()
        return Moved(
            len(buffers), total, 0, growth(before, found), found, time.perf_counter() - start,
            figures.held + figures.leaving, figures.notes,
        )  # fmt: skip

    marks: list[Mark] = []
    with Rollback() as rollback:
        # One stream brings the chunks in the order of use; two leave no gap between them.
        with Flow(driver, total, progress, lanes=1 if events else 2) as flow:
            jobs = FileJobs(driver, pool, flow, out=False)
            for buffer, backup in zip(buffers, backups, strict=True):
                _bring(driver, buffer, backup, flow, jobs, rollback, marks if events else None, poison)
            jobs.run(keep_host)
            if not events:
                flow.finish()
            lanes = flow.give_away() if events else []
        with driver.lock:  # nothing can fail any more
            for buffer in buffers:
                buffer._paused = ""
                buffer._backup = None
    if events:
        return Waking(driver, lanes, marks, backups, keep_host, measure)
    for backup in backups:
        backup.drop(keep_host)
    return measure()


def _bring(
    driver: Any,
    buffer: Buffer,
    backup: Asleep,
    flow: Flow,
    jobs: FileJobs,
    rollback: Rollback,
    marks: list[Mark] | None,
    poison: bool,
) -> None:
    """Map one buffer, and queue the copies into it as soon as there is something to copy into."""
    if backup.stale:
        with driver.lock:
            buffer._unmap_chunks()
            backup.stale = False
    offset = 0
    for some in _slices(buffer._chunks):
        with driver.lock:
            buffer._map_chunks(some, rollback)
        if backup.keep is None and not poison:
            continue
        for chunk in some:
            at, target = _target(flow, driver, buffer, chunk)
            if backup.file is not None:
                jobs.add(at, target, backup.file, offset, chunk.size)
            else:
                if backup.extent is not None:
                    lane = flow.into(at, target, chunk.size, backup.extent, offset)
                else:
                    lane = flow.fill(at, target, chunk.size, POISON)
                if marks is not None:
                    marks.append(_mark(driver, buffer, chunk, at, lane, rollback))
            offset += chunk.size


def _mark(driver: Any, buffer: Buffer, chunk: Chunk, at: Device, lane: int, rollback: Rollback) -> Mark:
    with at.current():
        event: int = driver.create_event()
        rollback.undo(driver.destroy_event, event)
        driver.record_event(event, lane)
    return Mark(buffer, chunk, at, lane, event)


def _target(flow: Flow, driver: Any, buffer: Buffer, chunk: Chunk) -> tuple[Device, int]:
    """Return the device that copies a chunk in, and the address at which it writes it."""
    at = actor(buffer, chunk.location, writes=True)
    if at is not None:
        return at, chunk.address
    at = near(chunk.location)
    window = window_on(driver, chunk.address, chunk.size, at)
    flow.afterwards(window.close)
    return at, window.address


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


def _ordered(plans: Iterable[Buffer], order: Sequence[Buffer]) -> list[Buffer]:
    """Return the buffers, those of `order` first."""
    found = list(plans)
    first = [buffer for buffer in order if buffer in found]
    return first + [buffer for buffer in found if buffer not in first]


def _wait_for_memory(buffers: list[Buffer], deadline: float, pause: float) -> None:
    """Sleep until as much memory is free as is needed, asking now and then, or until the deadline."""
    needed: dict[Any, int] = {}
    for buffer in buffers:
        for chunk in buffer._chunks:
            needed[chunk.location] = needed.get(chunk.location, 0) + chunk.size
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_WAIT)
        free = free_memory([buffer for buffer in buffers if not buffer.closed])
        if all(info.free >= needed.get(place, 0) for place, info in free.items()):
            return
