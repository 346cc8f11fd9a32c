"""The host memory that backups live in: one pool per process, page-locked, near the device, and given back on time.

Fresh host memory is slow: its pages are touched and locked first, so that a pause runs at four tenths of the speed of
the link (H200, 16 threads). That is the default, as it goes back at each resume; what is kept makes every pause run at
the speed of the link: `resume(keep_host=True)`, `host_pool(prepare=)`.

The pool is one long range of addresses for each NUMA node, in slabs of 32 MiB that are touched, locked and given back
as a whole, several at a time in background threads, in the order of addresses: a backup copies into the first ones
while the next are locked, and those after them touched. An extent is a piece of the range, so that it is contiguous.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from typing import Any

from remap import lifetime
from remap.drivers.powers import SupportsPinned
from remap.errors import ClosedError, CudaResult, ForkedError, InvalidValueError, RemapError, driver_error
from remap.locations import Device, device
from remap.residency import pages
from remap.residency.arenas import SLAB, Arena, Asked, Extent, PageChoice, Slab, no_memory
from remap.residency.jobs import Job, Task, start
from remap.residency.results import HostPoolFigures
from remap.sizes import Size, format_size, parse_size, round_up

_WORKERS = min(16, os.cpu_count() or 1)


class HostPool:
    """Host memory for backups. Made by `remap.host_pool`, one for each process, and closed with its driver."""

    def __init__(self, driver: Any, limit: int | None = None) -> None:
        self._driver = driver
        self._closed = False
        self._epoch = lifetime.epoch()
        self._guard = threading.Lock()
        # One at a time: the driver locks no faster from several threads, and copies would have to wait for all of them.
        self._locking = threading.Lock()
        self._arenas: dict[int, Arena] = {}
        self._limit = limit
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
        with self._lock():
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
        with self._lock():
            self._prepared = 0
            for slab in self._free():
                slab.kept = False
            slabs = self._shed()
        self.wait()
        return slabs * SLAB

    def wait(self) -> None:
        """Wait until everything is done that is being prepared or given back in the background."""
        with self._lock():
            slabs = [slab for arena in self._arenas.values() for slab in arena.slabs]
            # The one before as well: an interrupt may have left the newest cancelled, which waits for nothing.
            jobs = [job for slab in slabs for job in (slab.filling, slab.job) if job]
        for job in jobs:
            job.wait()

    def configure(self, limit: Size | None, prepare: Size | None) -> None:
        """Set what is asked for; what is None stays. Preparing goes on in the background; `wait()` waits for it.

        Raises `ClosedError` where another thread has changed the driver meanwhile.
        """
        most = None if limit is None else parse_size(limit, "limit")
        ready = None if prepare is None else parse_size(prepare, "prepare")
        with self._lock():
            self._check()
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
                self._commit(arena, fresh, lambda: True)
            self._limit, self._prepared = bound, least
            self._shed()

    def take(self, sizes: Sequence[int], at: Device, extents: list[Extent] | None = None) -> list[Extent]:
        """Return an extent for each size, near a device; their memory may still be on its way (`Slab.ready`).

        All or none, put into `extents`, where its owner finds them after an interrupt. Raises `OutOfMemoryError`.
        """
        with self._lock():
            self._check()
            arena = self._arena(at)
            extents = [] if extents is None else extents
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
                self._commit(arena, [needed[address] for address in sorted(needed)], self._choice.next)
                self._used += used
            except BaseException:
                for extent in extents:
                    extent.lent = False
                    arena.free(extent)
                    for slab in extent.slabs:
                        slab.users -= 1
                raise
        return extents

    def give(self, extent: Extent, keep: bool) -> None:
        """Take an extent back; its slabs go back to the machine in the background, unless they are to be kept."""
        self.give_all([extent], keep)

    def give_all(self, extents: Iterable[Extent], keep: bool) -> None:
        """Take extents back as `give` does, those that are still lent, and decide once for all of them what goes."""
        with self._lock():
            for extent in extents:
                if not extent.lent:
                    continue
                # No call before all is counted: an interrupt in it loses addresses then, and no memory.
                extent.lent = False
                self._used -= extent.size
                for slab in extent.slabs:
                    slab.users -= 1
                    slab.kept = keep
                extent.arena.free(extent)
            try:
                self._shed()
            except RuntimeError as error:  # no thread can be had: it goes with what is given back next
                self._notes[f"host memory could not be given back yet: {error}"] = None

    def close(self) -> None:
        """Give everything back, addresses too, when what goes on in the background has ended; nothing uses it any more.

        Closing again does what an interrupt has left.
        """
        with (
            self._lock()
        ):  # who looks after this is refused, and who came before has begun what is waited for
            self._closed = True
        self.wait()
        with self._lock():
            for arena in self._arenas.values():
                for slab in arena.slabs:
                    self._unlock(slab)
                arena.give_back()
            self._arenas.clear()
            self._held = self._leaving = self._prepared = 0

    def __repr__(self) -> str:
        """Return the figures in short; `statistics()` has all of them."""
        if self._epoch != lifetime.epoch():
            return "<remap.HostPool of the process that was forked>"
        found = self.statistics()
        told = f"{format_size(found.held)} held, {format_size(found.used)} used, {format_size(found.ready)} ready"
        told += f", {format_size(found.leaving)} leaving" if found.leaving else ""
        told += ", no limit" if found.limit is None else f", limit {format_size(found.limit)}"
        return f"<remap.HostPool: {told}{', closed' if self._closed else ''}>"

    def _lock(self) -> threading.Lock:
        """Return the lock; raises `ForkedError` in a forked child, where a thread may hold it that is not there."""
        if self._epoch != lifetime.epoch():
            raise ForkedError(
                "use of host memory for backups that another process holds",
                rule="its pool belongs to the process that was forked",
                next_step="Call remap.host_pool() in the child",
            )
        return self._guard

    # -- under the lock --

    def _check(self) -> None:
        if self._closed:
            rule = "its pool was closed, as another thread has changed the driver"
            raise ClosedError("host memory for backups", rule=rule, next_step="Call remap.host_pool() again")

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
                self._keep_to(limit - more, kept=True)
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

    def _keep_to(self, most: int, *, kept: bool) -> int:
        """Give back what is free, and `kept` too, until `most` bytes are held, the highest addresses first.

        Returns how many slabs that are; what is in use stays.
        """
        beyond = -(-(self._held - most) // SLAB)
        free = [slab for slab in self._free() if slab.held and (kept or not slab.kept)]
        going = free[-beyond:] if beyond > 0 else []
        self._release(going)
        return len(going)

    def _commit(self, arena: Arena, slabs: list[Slab], large: Callable[[], bool]) -> None:
        """Get slabs ready in the background; if no thread can be had, or an interrupt comes, they are not held.

        The first of each stretch to be filled asks whether its pages are to be `large`.
        """
        fresh: list[tuple[Slab, Job, Job | None]] = []
        for slab in slabs:
            slab.kept = False
            if slab.job is not None and slab.job is slab.dropping and slab.job.cancel():
                self._regain(slab)  # it had not gone yet, and may still be on its way
            else:
                fresh.append((slab, Job(), slab.job))
        tasks: list[Task] = []
        asked = -1
        for slab, job, before in fresh:
            first, asked = arena.stretch(slab) != asked, arena.stretch(slab)
            tasks.append((job, partial(self._fill, arena, slab, before, large if first else None, job)))
        try:
            for slab, job, _ in fresh:
                slab.job, slab.held = job, True
                self._held += SLAB
            self._peak = max(self._peak, self._held)
            start(tasks, _WORKERS)
        except BaseException:
            for slab, job, before in fresh:
                if job.cancel() and slab.job is job:
                    slab.job, slab.held = before, False
                    self._held -= SLAB
            raise

    def _shed(self) -> int:
        """Give back what is free and beyond the limit, or neither kept nor prepared; return how many slabs."""
        if self._closed:
            return 0
        for slab in self._free():
            if slab.job is not None and slab.job is slab.dropping and slab.job.cancelled:
                self._regain(slab)  # an interrupt came into taking it again
        gone = self._keep_to(round_up(self._prepared, SLAB), kept=False)
        return gone if self._limit is None else gone + self._keep_to(self._limit, kept=True)

    def _release(self, slabs: list[Slab]) -> None:
        """Give slabs back in the background; if no thread can be had, or an interrupt comes, they stay."""
        leaving = [(slab, Job()) for slab in slabs]
        tasks: list[Task] = [(job, partial(self._drop, slab, slab.job, job)) for slab, job in leaving]
        try:
            for slab, job in leaving:
                slab.filling, slab.job, slab.dropping, slab.held = slab.job, job, job, False
                self._held -= SLAB
                self._leaving += SLAB
            start(tasks, 1)
        except BaseException:
            for slab, job in leaving:
                if job.cancel() and slab.job is job:
                    self._regain(slab)
            raise

    def _regain(self, slab: Slab) -> None:
        """Hold a slab again whose giving back was cancelled."""
        slab.job, slab.dropping, slab.held = slab.filling, None, True
        self._held += SLAB
        self._leaving -= SLAB

    # -- in the background --

    def _fill(self, arena: Arena, slab: Slab, before: Job | None, large: Asked, job: Job) -> None:
        if before is not None:
            before.wait()
        if self._closed or slab.pinned:  # one that could not be unlocked has its pages still
            return
        kind = arena.pages_of(slab, large)
        begun = time.perf_counter()
        try:
            pages.touch(slab.address, SLAB)
        except OSError as error:
            pages.discard(slab.address, SLAB)
            with self._lock():
                if slab.job is job:  # else it is counted as gone already
                    slab.held = False
                    self._held -= SLAB
            raise no_memory(SLAB, error) from error
        if isinstance(self._driver, SupportsPinned):
            try:
                touched = time.perf_counter()
                with self._locking, arena.device.current():
                    begun += time.perf_counter() - touched  # the turn of others is not this slab's time
                    self._driver.register_pinned(slab.address, SLAB)
                slab.pinned = True
            except RemapError as error:  # slower, but as right
                self._notes[f"host memory could not be page-locked, so copies are slower: {error}"] = None
        self._choice.note(kind, time.perf_counter() - begun)

    def _drop(self, slab: Slab, before: Job | None, job: Job) -> None:
        if before is not None:
            before.wait()
        if self._closed:  # closing gives everything back, and others may have its addresses by now
            return
        self._unlock(slab)
        if not slab.pinned:  # else the device goes on writing to these very pages, whatever comes to be here
            pages.discard(slab.address, SLAB)
        with self._lock():
            if slab.dropping is job:
                slab.dropping = None
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
