"""The host memory that backups live in: one pool per process, page-locked, near the device, and given back on time.

Fresh host memory is slow: its pages are touched at about a tenth of the link's speed, and then have to be locked. So
there is a choice that cannot be had both ways. Memory that is given back at each resume costs the touching again at
the next pause (the default); memory that is kept, with `resume(keep_host=True)` or `host_pool(prepare=)`, makes every
pause run at the speed of the link.

The pool is one long range of addresses for each NUMA node, in slabs of 32 MiB that are touched, locked and given back
as a whole, several at a time in background threads, in the order of addresses: a backup copies into the first ones
while the next are locked, and those after them touched. An extent is a piece of the range, so that it is contiguous.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

from remap import drivers, lifetime
from remap.drivers.powers import SupportsPinned
from remap.errors import CudaResult, InvalidValueError, RemapError, driver_error
from remap.forks import in_child
from remap.locations import Device, device
from remap.residency import pages
from remap.residency.arenas import SLAB, Arena, Extent, Job, PageChoice, Slab, no_memory
from remap.sizes import Size, format_size, parse_size, round_up

_WORKERS = min(16, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class HostPoolFigures:
    """What the pool holds, in bytes.

    `held` is all memory taken from the machine: `used` by backups and staging, and `ready` for the next. `leaving`
    is being given back in the background, and not counted in `held`. `pinned` of `held` is page-locked. `peak` is
    the most that was ever held. `notes` say what could not be had: page-locking, for one.
    """

    held: int
    used: int
    ready: int
    leaving: int
    pinned: int
    peak: int
    limit: int | None
    prepared: int
    notes: tuple[str, ...]


class HostPool:
    """Host memory for backups. Made by `remap.host_pool`, one for each process."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        # One at a time: the driver locks no faster from several threads, and copies would have to wait for all of them.
        self._locking = threading.Lock()
        self._arenas: dict[int, Arena] = {}
        self._limit: int | None = None
        self._prepared = 0
        self._held = self._leaving = self._peak = self._used = 0
        self._notes: dict[str, None] = {}
        self._choice = PageChoice()

    @property
    def limit(self) -> int | None:
        """The most bytes that may be held; None leaves it to what the machine can give."""
        return self._limit

    def statistics(self) -> HostPoolFigures:
        """Return the figures of this moment."""
        with self._lock:
            held = [slab for arena in self._arenas.values() for slab in arena.slabs if slab.held]
            ready = sum(SLAB for slab in held if not slab.users)
            pinned = sum(SLAB for slab in held if slab.pinned)
            return HostPoolFigures(
                self._held, self._used, ready, self._leaving, pinned, self._peak, self._limit, self._prepared,
                tuple(self._notes),
            )  # fmt: skip

    def trim(self) -> int:
        """Give back all memory that no backup uses, what was prepared or kept included; return its bytes.

        Waits until the machine has it.
        """
        with self._lock:
            self._prepared = 0
            free = [slab for slab in self._free() if slab.held]
            for slab in free:
                slab.kept = False
            self._shed()
        self.wait()
        return len(free) * SLAB

    def wait(self) -> None:
        """Wait until everything is done that is being prepared or given back in the background."""
        with self._lock:
            jobs = [slab.job for arena in self._arenas.values() for slab in arena.slabs if slab.job]
        for job in jobs:
            _settled(job)

    def configure(self, limit: Size | None, prepare: Size | None) -> None:
        """Set what is asked for; what is None stays. Preparing goes on in the background; `wait()` waits for it."""
        most = None if limit is None else parse_size(limit, "limit")
        ready = None if prepare is None else parse_size(prepare, "prepare")
        with self._lock:
            bound = self._limit if most is None else most
            least = self._prepared if ready is None else ready
            if bound is not None and least > bound:
                raise InvalidValueError(
                    f"{format_size(least)} of host memory prepared", rule=f"the limit is {format_size(bound)}"
                )
            missing = round_up(max(least - self._held, 0), SLAB) // SLAB
            if missing:
                # Before either is noted: a failure changes nothing.
                self._check_room(missing * SLAB, "preparing", bound)
                arena = self._arena(device())
                every = (arena.slab(index) for index in count())
                fresh = list(islice((slab for slab in every if not slab.held), missing))
                arena.open_up(fresh)
                # Large pages, if they take longer: it happens in the background, and once.
                self._commit(arena, fresh, large=True)
            self._limit, self._prepared = bound, least
            self._shed()

    def take(self, sizes: Sequence[int], at: Device) -> list[Extent]:
        """Return an extent for each size, near a device; their memory may still be on its way (`Slab.ready`).

        All or none. Raises `OutOfMemoryError` beyond the limit, or where the machine has no more to give.
        """
        with self._lock:
            arena = self._arena(at)
            extents: list[Extent] = []
            try:
                for size in sizes:
                    extent = arena.place(size, self)
                    for slab in extent.slabs:
                        slab.users += 1
                    extents.append(extent)  # after that: an interrupt that comes here takes both back
                needed = {slab.address: slab for extent in extents for slab in extent.slabs if not slab.held}
                self._check_room(len(needed) * SLAB, f"a backup of {format_size(sum(sizes))}", self._limit)
                arena.open_up(needed.values())
                used = sum(extent.size for extent in extents)
                self._commit(arena, [needed[address] for address in sorted(needed)])
                self._used += used
            except BaseException:
                for extent in extents:
                    arena.free(extent)
                    for slab in extent.slabs:
                        slab.users -= 1
                raise
        return extents

    def give(self, extent: Extent, keep: bool) -> None:
        """Take an extent back; its slabs go back to the machine in the background, unless they are to be kept."""
        self.give_all([extent], keep)

    def give_all(self, extents: Iterable[Extent], keep: bool) -> None:
        """Take extents back as `give` does, and decide once for all of them what goes."""
        with self._lock:
            for extent in extents:
                extent.arena.free(extent)
                self._used -= extent.size
                for slab in extent.slabs:
                    slab.users -= 1
                    slab.kept = keep
            self._shed()

    def close(self) -> None:
        """Give everything back, and wait for it; nothing uses the pool any more."""
        self.trim()
        with self._lock:
            for arena in self._arenas.values():
                for slab in arena.slabs:
                    self._unlock(slab)
                arena.give_back()
            self._arenas.clear()

    # -- under the lock --

    def _arena(self, at: Device) -> Arena:
        node = at.properties.numa_node
        found = self._arenas.get(-1 if node is None else node)
        if found is None:
            node = -1 if node is None else node
            found = self._arenas[node] = Arena(node, at)
        return found

    def _free(self) -> Iterator[Slab]:
        return (slab for arena in self._arenas.values() for slab in arena.slabs if not slab.users)

    def _check_room(self, more: int, asked: str, limit: int | None) -> None:
        """Raise unless `more` bytes may be held; memory that only waits for use elsewhere makes room first."""
        if not more:
            return
        rule = ""
        if limit is not None and self._held + more > limit:
            busy = sum(SLAB for a in self._arenas.values() for slab in a.slabs if slab.users and slab.held)
            if busy + more <= limit:
                self._release([s for s in self._free() if s.held][-(-(self._held + more - limit) // SLAB) :])
                return
            rule = f"the pool's limit is {format_size(limit)}, of which {format_size(busy)} are in use"
        elif more > (left := pages.available()):
            rule = f"the machine has {format_size(left)} left"
        if rule:
            raise driver_error(
                "mmap",
                CudaResult.OUT_OF_MEMORY,
                asked=f"{format_size(more)} of host memory for {asked}",
                rule=rule,
                next_step='Raise the limit with remap.host_pool(limit=), or pause with keep="disk" or keep=None',
            )

    def _commit(self, arena: Arena, slabs: list[Slab], large: bool | None = None) -> None:
        jobs: list[tuple[Slab, Callable[[], None]]] = []
        for slab in slabs:
            slab.held, slab.kept = True, False
            self._held += SLAB
            before = slab.job
            if before is not None and slab.leaving and before.cancel():
                # It had not gone yet, and may still be on its way.
                slab.leaving, slab.job = False, slab.filling
                slab.turn -= 1
                self._leaving -= SLAB
                continue
            slab.turn += 1
            jobs.append((slab, partial(self._fill, arena, slab, before, large, slab.turn)))
        self._peak = max(self._peak, self._held)
        _start(jobs, _WORKERS)

    def _shed(self) -> None:
        """Give back what is free, not kept, and beyond what is to be prepared: the highest addresses first."""
        free = [slab for slab in self._free() if slab.held and not slab.kept]
        spare = max(self._held - round_up(self._prepared, SLAB), 0) // SLAB
        if spare and free:
            self._release(free[-spare:])

    def _release(self, slabs: list[Slab]) -> None:
        jobs: list[tuple[Slab, Callable[[], None]]] = []
        for slab in slabs:
            slab.held, slab.leaving = False, True
            self._held -= SLAB
            self._leaving += SLAB
            slab.filling = slab.job
            slab.turn += 1
            jobs.append((slab, partial(self._drop, slab, slab.job)))
        _start(jobs, 1)

    # -- in the background --

    def _fill(self, arena: Arena, slab: Slab, before: Job | None, large: bool | None, turn: int) -> None:
        if before is not None:
            _settled(before)
        large = arena.pages_of(slab, self._choice, large)
        start = time.perf_counter()
        try:
            pages.touch(slab.address, SLAB)
        except OSError as error:
            pages.discard(slab.address, SLAB)
            with self._lock:
                if slab.turn == turn:  # else it is counted as gone already
                    slab.held = False
                    self._held -= SLAB
            raise no_memory(SLAB, error) from error
        if isinstance(self._driver, SupportsPinned) and not slab.pinned:
            try:
                with self._locking, arena.device.current():
                    self._driver.register_pinned(slab.address, SLAB)
                slab.pinned = True
            except RemapError as error:  # slower, but as right
                self._notes[f"host memory could not be page-locked, so copies are slower: {error}"] = None
        self._choice.note(large, time.perf_counter() - start)

    def _drop(self, slab: Slab, before: Job | None) -> None:
        if before is not None:
            _settled(before)
        self._unlock(slab)
        if not slab.pinned:  # else the device goes on writing to these very pages, whatever comes to be here
            pages.discard(slab.address, SLAB)
        with self._lock:
            slab.leaving = False
            self._leaving -= SLAB

    def _unlock(self, slab: Slab) -> None:
        """Let a slab be pageable again; one for which that fails stays `pinned`."""
        if slab.pinned and isinstance(self._driver, SupportsPinned):
            try:
                with slab.device.current():
                    self._driver.unregister_pinned(slab.address)
                slab.pinned = False
            except RemapError as error:
                self._notes[f"host memory could not be unlocked, and stays: {error}"] = None


class _Pools:
    """The pool of this process, for the present driver; a forked child begins with none."""

    def __init__(self) -> None:
        self.pool: HostPool | None = None
        self.epoch = 0
        self.lock = threading.Lock()


_pools = _Pools()


def current_pool(driver: Any) -> HostPool:
    """Return the pool for a driver, a new one where there is none."""
    with _pools.lock:
        pool = _pools.pool
        if pool is None or pool._driver is not driver or _pools.epoch != lifetime.epoch():
            pool = _pools.pool = HostPool(driver)
            _pools.epoch = lifetime.epoch()
        return pool


def host_pool(*, limit: Size | None = None, prepare: Size | None = None) -> HostPool:
    """Return the pool of host memory of this process, after setting what is given.

    `limit` bounds the bytes it may hold. `prepare` bytes are got ready in the background, near the fastest device
    (touched by several threads, in large pages where the system has them, and page-locked), and kept from then on:
    pauses that fit into them run at the speed of the link from the first one on. `prepare=0` ends that. Raises
    `OutOfMemoryError` where the machine cannot give so much.
    """
    pool = current_pool(drivers.current())
    if limit is not None or prepare is not None:
        pool.configure(limit, prepare)
    return pool


def _leave(driver: Any) -> None:
    """Give the pool back before its driver goes; nothing can use it then."""
    with _pools.lock:
        pool, _pools.pool = _pools.pool, None
    if pool is not None and pool._driver is driver and _pools.epoch == lifetime.epoch():
        pool.close()


def _start(jobs: list[tuple[Slab, Callable[[], None]]], workers: int) -> None:
    """Run jobs in threads that end with the last of them; each slab knows its newest."""
    if not jobs:
        return
    executor = ThreadPoolExecutor(min(workers, len(jobs)), thread_name_prefix="remap-host-memory")
    for slab, job in jobs:
        slab.job = executor.submit(job)
    executor.shutdown(wait=False)


def _settled(job: Job) -> None:
    """Wait for a job, however it ends."""
    with suppress(CancelledError):
        job.exception()


def _renew() -> None:
    _pools.lock = threading.Lock()


in_child(_renew)
drivers.on_leave(_leave)
