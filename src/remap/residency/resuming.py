"""`resume`: memory is created, mapped and filled for every buffer first, and only then are backups given back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

from remap import drivers
from remap.buffers.base import Buffer
from remap.buffers.changes import shares_of
from remap.buffers.shares import Share
from remap.ends import End
from remap.errors import ClosedError, InvalidValueError, OutOfMemoryError
from remap.lifetime import Rollback, drain, undo
from remap.locations import in_context
from remap.ranges import Chunk
from remap.residency.families import carried, carriers, forget_sole
from remap.residency.feed import Borrowed, Carried, Portion, Worker
from remap.residency.flow import Flow
from remap.residency.hostpool import current_pool
from remap.residency.results import Moved, Progress
from remap.residency.stores import Asleep, FileJobs, Keep, asleep, drop_all
from remap.residency.targets import (
    Targets,
    announce,
    check_seconds,
    free_memory,
    free_memory_now,
    growth,
    held,
    named,
)
from remap.residency.waking import Arrival, Waking
from remap.sizes import MiB, counted, format_size
from remap.types import Location, MemoryInfo

_AT_ONCE = 64 * MiB
"""How much is mapped before its copies are queued: creating and mapping the next goes on beside them."""

_LONGEST_WAIT = 0.05


@overload
def resume(
    buffers: Targets,
    *,
    wait: float = ...,
    order: Targets | None = ...,
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
    order: Targets | None = ...,
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
    order: Targets | None = ...,
    events: bool,
    keep_host: bool = ...,
    progress: Progress | None = ...,
    poison: bool = ...,
) -> Moved | Waking: ...
def resume(
    buffers: Targets,
    *,
    wait: float = 0.0,
    order: Targets | None = None,
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
    resumed later; `wait` seconds are waited for others to give memory back, before that. So it is with `DiskError`, and
    `InUseError` where another thread uses a buffer, or forks that share its memory are not named.

    `order` names what is needed first, in that order, by the same names as `buffers`. With `events=True` it creates all
    memory, maps what is needed first and queues its copies, and returns a `Waking`: a thread maps and queues the rest,
    each use through remap waits for the chunks it touches, `Waking.events` has an event for each chunk, and closing it
    waits for the rest. Buffers whose addresses were given away are mapped before it returns, and what is read from a
    file has arrived.
    """
    asked = named(buffers, "resumed")
    for buffer in asked:
        buffer._check()
    woken, changed = put_back(
        asked,
        wait=wait,
        order=order,
        events=events,
        keep_host=keep_host,
        progress=progress,
        poison=poison,
    )
    announce(changed)
    return woken


def put_back(
    buffers: Sequence[Buffer],
    *,
    wait: float,
    order: Targets | None,
    events: bool,
    keep_host: bool,
    progress: Progress | None,
    poison: bool,
    settle: Callable[[], object] = drain,
) -> tuple[Moved | Waking, list[Buffer]]:
    """Do what `resume` does and tell no listeners; return who has changed, too.

    For callers who may have to take it back: listeners are told when it is final. Buffers that are closed meanwhile are
    left out, as if they had been closed right after it; `resume` refuses those that were closed before it was called.
    `settle` is called now and then while it waits: it gives back what others have let go of.
    """
    start = time.perf_counter()
    drain()
    driver = drivers.current()
    if events and progress is not None:
        raise InvalidValueError(
            "resume with events=True and progress=", rule="it returns before there is progress to tell of",
            next_step="Look at Waking.events",
        )  # fmt: skip
    check_seconds(wait, "resume")
    plans = _ordered(buffers, () if order is None else order)
    for buffer in plans:
        if isinstance(buffer._arriving, Arrival):
            buffer._arriving.waking.go_on()
    deadline = start + wait
    pause = 0.001
    while True:
        plans = [buffer for buffer in plans if not buffer.closed]
        try:
            # What another thread moves is refused there, whatever state it is in.
            with held([buffer for buffer in plans if buffer._paused or buffer._taken], "resumed"):
                asked = [buffer for buffer in plans if buffer._paused]
                before = free_memory(asked)
                try:
                    waking = _wake(driver, asked, before, start, events, keep_host, progress, poison)
                except OutOfMemoryError as error:
                    if time.perf_counter() >= deadline:
                        raise _explained(error, asked, before) from None
                else:
                    break
        except ClosedError:
            if any(buffer.closed for buffer in plans):
                continue
            raise
        # Held by nobody while it waits: closing one of the buffers, for instance, must stay possible.
        _wait_for_memory(asked, deadline, pause, settle)
        pause = min(2 * pause, _LONGEST_WAIT)
    return waking, asked


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
    forget_sole(buffers)
    portions = _portions(buffers, backups)
    total = sum(
        chunk.size
        for portion in portions
        if portion.backup.keep and not isinstance(portion, Borrowed)
        for chunk in portion.chunks
    )

    def measure() -> Moved:
        found = free_memory_now(before)
        figures = pool.statistics()
        return Moved(
            len(buffers), total, 0, growth(before, found), found, time.perf_counter() - start,
            figures.held + figures.leaving, figures.notes,
        )  # fmt: skip

    worker: Worker | None = None
    waking: Waking | None = None
    try:
        if events:
            worker = Worker()
        with Rollback() as rollback:
            for buffer, backup in zip(buffers, backups, strict=True):
                if backup.stale:
                    with driver.lock:
                        buffer._unmap_chunks()
                        backup.stale = False
            with Flow(driver, total, progress) as flow:
                jobs = FileJobs(driver, pool, flow, out=False)
                if events:
                    for portion in portions:
                        _prepare(driver, portion, flow, rollback, poison)
                for portion in portions[: _at_first(portions)] if events else portions:
                    if not events:  # beside the copies of those before it
                        _create(driver, portion, rollback)
                    portion.bring(driver, flow, jobs, rollback, poison)
                    portion.release(driver)
                    portion.done = True
                jobs.run(keep_host)
                carried_once = [portion for portion in portions if isinstance(portion, Carried)]
                if carried_once or not events:
                    flow.finish()
                for portion in carried_once:
                    portion.lower(driver)
                rollback.undo(_put_to_sleep, buffers, backups)
                with driver.lock:  # nothing can fail any more
                    for buffer in buffers:
                        buffer._paused = ""
                        buffer._backup = None
                if events:
                    rest, end = flow.hand_over(), End(driver)
                    rollback.undo(end.destroy, rest.close)
                    rollback.undo(rest.wait)
                    flow.forget()
                    waking = Waking(driver, rest, end, portions, backups, keep_host, poison, measure)
            if waking is not None:
                waking._owns = True  # from here on nothing is taken back
        if waking is not None and worker is not None:
            waking._start(worker)
            return waking
    except BaseException as error:
        if waking is not None and waking._owns:  # an interrupt: all are awake, and go on when asked to
            waking._feed.hold_up(error)
        elif waking is not None:
            undo(error, waking.disown)
        if worker is not None:
            worker.stop()
        raise
    # Before memory goes back in the background: that would hold up what is asked of the driver.
    moved = measure()
    drop_all(backups, keep_host)
    return moved


def _portions(buffers: Sequence[Buffer], backups: Sequence[Asleep]) -> list[Portion]:
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


def _create(driver: Any, portion: Portion, rollback: Rollback) -> None:
    rollback.undo(portion.release, driver)
    portion.create(driver)


def _prepare(driver: Any, portion: Portion, flow: Flow, rollback: Rollback, poison: bool) -> None:
    """Take all that a portion needs and may not get: memory, a stream, and an event for each chunk."""
    _create(driver, portion, rollback)
    if (
        isinstance(portion, Borrowed)
        or portion.backup.file is not None
        or (portion.backup.keep is None and not poison)
    ):
        return
    for chunk in portion.chunks:
        at = portion.copier(chunk)
        flow.lane(at)
        with at.current():
            event: int = driver.create_event()
        rollback.undo(in_context, at, driver.destroy_event, event)
        portion.events.append(event)


def _at_first(portions: Sequence[Portion]) -> int:
    """Return how many portions an ordered resume brings before it returns: the first, and what is needed at once."""
    needed = [index for index, portion in enumerate(portions) if portion.needed_at_once]
    return max([1, *[index + 1 for index in needed]])


def _put_to_sleep(buffers: Iterable[Buffer], backups: Iterable[Asleep]) -> None:
    """Take back that buffers are awake, for an interrupt in the middle of saying so."""
    for buffer, backup in zip(buffers, backups, strict=True):
        buffer._paused, buffer._backup = backup.told, backup
        buffer._arriving = buffer._coming = None


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


def _ordered(plans: Collection[Buffer], order: Targets) -> list[Buffer]:
    """Return the buffers, those of `order` first; raises `InvalidValueError` for one that is not among them."""
    first = named(order, "resumed first")
    for buffer in first:
        if buffer not in plans:
            raise InvalidValueError(
                f"{buffer.describe()} in order=",
                rule="it is not among what is to be resumed",
                next_step="Name it there too, or leave it out of order=",
            )
    return list(dict.fromkeys([*first, *plans]))


def _wait_for_memory(
    buffers: list[Buffer], deadline: float, pause: float, settle: Callable[[], object]
) -> None:
    """Sleep until as much memory is free as is needed, asking now and then, or until the deadline."""
    needed = _needed(buffers)
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_WAIT)
        settle()
        waiting = [buffer for buffer in buffers if not buffer.closed]
        if len(waiting) < len(buffers):
            buffers, needed = waiting, _needed(waiting)
        free = free_memory(buffers)
        if all(info.free >= needed.get(place, 0) for place, info in free.items()):
            return


def _needed(buffers: Iterable[Buffer]) -> dict[Location, int]:
    """Return how many bytes stand behind the buffers when they are awake, at each place."""
    needed: dict[Location, int] = {}
    plans: dict[Buffer, Keep] = dict.fromkeys(buffers)
    by = carriers(plans)
    for buffer in plans:
        for chunk in carried(buffer, by):
            needed[chunk.location] = needed.get(chunk.location, 0) + chunk.size
    return needed


def _explained(
    error: OutOfMemoryError, buffers: Sequence[Buffer], before: Mapping[Location, MemoryInfo]
) -> OutOfMemoryError:
    """Reword an error of one chunk, in the middle of an attempt that was undone, in terms of the whole call."""
    if error.call != "cuMemCreate" or not before:
        return error  # of host memory, for one
    needed = _needed(buffers)
    place = max(before, key=lambda one: needed[one] - before[one].free)
    what = buffers[0].describe() if len(buffers) == 1 else counted(len(buffers), "buffer")
    info = before[place]
    return error.explain(
        f"resume of {what}",
        rule=f"it needs {format_size(needed[place])} on {place}, and {format_size(info.free)} of "
        f"{format_size(info.total)} are free there",
        next_step="Close, pause or trim something there first, or let it wait for others who do: wait=seconds",
    )
