"""`resume`: memory is created, mapped and filled for every buffer first, and only then are backups given back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

from remap import drivers
from remap.buffers.base import Buffer
from remap.ends import End
from remap.errors import ClosedError, InvalidValueError, OutOfMemoryError
from remap.lifetime import Rollback, drain, end_block, undo
from remap.residency.families import carried, carriers, forget_sole
from remap.residency.feed import Worker
from remap.residency.flow import Flow
from remap.residency.portions import Carried, Portion, at_first, cut
from remap.residency.present import current_pool
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
from remap.sizes import counted, format_size
from remap.types import Location, MemoryInfo

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

    What a listener (`on_change`) raises is raised when all have been told: everything is awake then, and with
    `events=True` it has arrived.
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
    tell(woken, changed)
    return woken


def tell(woken: Moved | Waking, changed: Iterable[Buffer]) -> None:
    """Tell the listeners of buffers that have woken.

    If one of them raises, nobody gets what is under way, so that is waited for first.
    """
    try:
        announce(changed)
    except Exception as error:
        if isinstance(woken, Waking):
            end_block(error, woken.close)
        raise


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
                    attempt = _Attempt(driver, asked, before, start, keep_host, progress, poison)
                    woken = attempt.in_order() if events else attempt.at_once()
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
    return woken, asked


class _Attempt:
    """One attempt to wake buffers that are held: all of them, or none."""

    def __init__(
        self,
        driver: Any,
        buffers: list[Buffer],
        before: Mapping[Location, MemoryInfo],
        start: float,
        keep_host: bool,
        progress: Progress | None,
        poison: bool,
    ) -> None:
        self._driver = driver
        self._buffers = buffers
        self._before = before
        self._start = start
        self._keep_host = keep_host
        self._progress = progress
        self._poison = poison
        self._pool = current_pool(driver)
        self._backups = [asleep(buffer) for buffer in buffers]
        forget_sole(buffers)
        self._portions = cut(buffers, self._backups)
        self._total = sum(portion.copied for portion in self._portions)

    def at_once(self) -> Moved:
        """Bring everything, and give the backups back."""
        with Rollback() as rollback:
            self._unmap_stale()
            rollback.undo(_say_stale, self._backups)
            with Flow(self._driver, self._total, self._progress) as flow:
                self._bring(self._created(rollback), flow, rollback, wait=True)
                self._say_awake(rollback)
        # Before memory goes back in the background: that would hold up what is asked of the driver.
        moved = self.measure()
        drop_all(self._backups, self._keep_host)
        return moved

    def in_order(self) -> Waking:
        """Create everything, bring what has to be there at once, and let a thread bring the rest."""
        worker: Worker | None = None
        waking: Waking | None = None
        try:
            worker = Worker()
            with Rollback() as rollback:
                self._unmap_stale()
                rollback.undo(_say_stale, self._backups)
                with Flow(self._driver, self._total, None) as flow:
                    for portion in self._portions:
                        portion.prepare(self._driver, flow, rollback, self._poison)
                    first = self._portions[: at_first(self._portions)]
                    self._bring(first, flow, rollback, wait=False)
                    self._say_awake(rollback)
                    rest, end = flow.hand_over(), End(self._driver)
                    rollback.undo(end.destroy, rest.close)
                    rollback.undo(rest.wait)
                    flow.forget()
                    waking = Waking(
                        self._driver, rest, end, self._portions, self._backups, self._keep_host, self._poison,
                        self.measure,
                    )  # fmt: skip
                waking._owns = True  # from here on nothing is taken back
            waking._start(worker)
        except BaseException as error:
            if waking is not None and waking._owns:  # an interrupt: all are awake, and go on when asked to
                waking._feed.hold_up(error)
            elif waking is not None:
                undo(error, waking.disown)
            if worker is not None:
                worker.stop()
            raise
        return waking

    def measure(self) -> Moved:
        """Return what is done, in the figures of this moment."""
        found = free_memory_now(self._before)
        figures = self._pool.statistics()
        return Moved(
            len(self._buffers), self._total, 0, growth(self._before, found), found, time.perf_counter() - self._start,
            figures.held + figures.leaving, figures.notes,
        )  # fmt: skip

    def _unmap_stale(self) -> None:
        """Unmap what a pause could not."""
        for buffer, backup in zip(self._buffers, self._backups, strict=True):
            if backup.stale:
                with self._driver.lock:
                    buffer._unmap_chunks()
                    backup.stale = False

    def _created(self, rollback: Rollback) -> Iterator[Portion]:
        """Yield the portions, each created beside the copies of those before it."""
        for portion in self._portions:
            portion.create(self._driver, rollback)
            yield portion

    def _bring(self, portions: Iterable[Portion], flow: Flow, rollback: Rollback, *, wait: bool) -> None:
        """Bring portions, `wait` for their copies, and lower the rights of what forks share behind them."""
        driver = self._driver
        jobs = FileJobs(driver, self._pool, flow, out=False)
        for portion in portions:
            portion.bring(driver, flow, jobs, rollback, self._poison)
            portion.release(driver)
            portion.done = True
        jobs.run(self._keep_host)
        carried_once = [portion for portion in self._portions if isinstance(portion, Carried)]
        if carried_once or wait:
            flow.finish()
        for portion in carried_once:
            portion.lower(driver)

    def _say_awake(self, rollback: Rollback) -> None:
        rollback.undo(_put_to_sleep, self._buffers, self._backups)
        with self._driver.lock:  # nothing can fail any more
            for buffer in self._buffers:
                buffer._paused = ""
                buffer._backup = None


def _say_stale(backups: Iterable[Asleep]) -> None:
    """Let the next resume unmap first what this one had mapped: undoing that may fail, too."""
    for backup in backups:
        backup.stale = True


def _put_to_sleep(buffers: Iterable[Buffer], backups: Iterable[Asleep]) -> None:
    """Take back that buffers are awake, for an interrupt in the middle of saying so."""
    for buffer, backup in zip(buffers, backups, strict=True):
        buffer._paused, buffer._backup = backup.told, backup
        buffer._arriving = buffer._coming = None


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
