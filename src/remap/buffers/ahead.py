"""Ahead: a thread that maps memory behind the end of a growing buffer before anybody asks for it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

from remap.buffers.base import runs
from remap.chunks.sizes import ChunkSizes
from remap.chunks.supply import Supply
from remap.errors import RemapError
from remap.handles import reclaimers
from remap.lifetime import undo
from remap.ranges import Chunk
from remap.registers import Register
from remap.types import Grants, Location


class Ahead:
    """Chunks that are mapped and belong to nobody yet: at least `margin` bytes of them, as far as memory goes.

    They follow the end of what the buffer has mapped from its first byte on; a request for a part in the middle takes
    only those that it touches, and the others stay. The thread works between `go` and the next `take`, `leaving` or
    `flush`; it begins with the first `go`, and knows nothing of the buffer, so that it cannot keep it alive. Its own
    lock is held while it maps one chunk: whoever needs the chunks waits for that one at most, and no driver call of
    others waits at all. Whoever runs out of memory takes everything back (`reclaimers`), and the thread itself never
    takes from others.
    """

    def __init__(
        self,
        supply: Supply,
        base: int,
        margin: int,
        sizes: ChunkSizes,
        places: Sequence[Location],
        grants: Grants,
    ) -> None:
        self._supply = supply
        self._driver: Any = supply.driver
        self._base = base
        self._margin = margin
        self._sizes = sizes
        self._places = places
        self.grants = grants
        self._lock = threading.Lock()
        self._ready: list[Chunk] = []
        self._bytes = 0
        self._held = True
        self._wanted = False  # somebody waits for the lock, which is not fair
        self._at = self._room = 0
        self._before: int = 0
        self._last: Location | None = None
        # SimpleQueue.put may be called anywhere, even by a finaliser.
        self._orders: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        _known.add(self)

    @property
    def bytes(self) -> int:
        """How many bytes are mapped and wait to be taken."""
        return self._bytes

    @property
    def ready(self) -> tuple[Chunk, ...]:
        """The chunks that wait to be taken, as they are at this moment; takes no lock."""
        return tuple(self._ready)

    def take(self, start: int, stop: int, new: list[Chunk]) -> None:
        """Move the chunks that have a byte between two offsets to the caller's `new` ones, and hold the thread back."""
        first, end = self._base + start, self._base + stop
        self._wanted = True
        with self._lock:
            self._wanted = False
            self._held = True
            ready = self._ready
            taken = [chunk for chunk in ready if chunk.address < end and first < chunk.address + chunk.size]
            if taken:
                at, size = ready.index(taken[0]), sum(chunk.size for chunk in taken)
                rest = [*ready[:at], *ready[at + len(taken) :]]
                # No call from here on: an interrupt finds them in one of both lists.
                new += taken
                self._ready, self._bytes = rest, self._bytes - size

    def go(self, front: int, room: int, before: int, last: Location | None) -> None:
        """Let the thread map from offset `front` up to `room`, or behind what is still there.

        `before` bytes are mapped in front of `front`, the last of them on `last`.
        """
        with self._lock:
            if not self._ready:
                self._at, self._before, self._last = front, before, last
            self._room = room
            self._held = False
            idle = self._bytes >= self._margin
        if idle:
            return
        if self._thread is None:
            self._orders = SimpleQueue()
            self._thread = threading.Thread(
                target=self._work, args=(self._orders,), name="remap ahead", daemon=True
            )
            self._thread.start()
        self._orders.put(True)

    @contextmanager
    def leaving(self) -> Generator[None]:
        """Run a block that unmaps what waits, with the thread held back; if it succeeds, nothing waits any more."""
        self._wanted = True
        with self._lock:
            self._wanted = False
            self._held = True
            yield
            self._supply.lose(self._ready)
            self._ready, self._bytes = [], 0

    def flush(self) -> list[Chunk]:
        """Give everything back that waits, hold the thread back, and return what that was."""
        self._wanted = True
        with self._lock:
            self._wanted = False
            self._held = True
            ready, self._ready, self._bytes = self._ready, [], 0
            address = 0
            try:
                for address, size in runs(ready):
                    self._driver.unmap(address, size)
                self._supply.lose(ready)
            except Exception:  # nothing from that run on has gone
                self._ready = [chunk for chunk in ready if chunk.address >= address]
                self._bytes = sum(chunk.size for chunk in self._ready)
                self._supply.lose(ready[: len(ready) - len(self._ready)])
                raise
            except BaseException as error:
                for run in runs(ready):  # an interrupt: it is done again, as unmapping nothing is fine (T7)
                    undo(error, self._driver.unmap, *run)
                undo(error, self._supply.lose, ready)
                raise
            return ready

    def end(self) -> None:
        """End the thread once it is idle; `go` would begin another."""
        if self._thread is not None:
            self._thread = None
            self._orders.put(False)

    # -- the thread --

    def _work(self, orders: SimpleQueue[bool]) -> None:
        while orders.get():
            while self._map_one():
                pass

    def _map_one(self) -> bool:
        if self._wanted:
            return False
        with self._lock:
            if self._held or self._bytes >= self._margin or self._at >= self._room:
                return False
            size = self._sizes.next(self._at, self._room, self._before)
            place = next_place(self._places, self._last)
            chunk = Chunk(self._base + self._at, size, place)
            try:
                self._map(chunk)
            except RemapError:
                # Whoever asks for this memory will meet the same error, and be told: the thread has nobody to tell.
                return False
            self._ready.append(chunk)
            self._bytes += size
            self._at += size
            self._before += size
            self._last = place
            return True

    def _map(self, chunk: Chunk) -> None:
        driver, supply = self._driver, self._supply
        handle = supply.take(chunk, background=True)
        try:
            try:
                driver.map(chunk.address, chunk.size, handle)
            finally:
                driver.release(handle)
            if self.grants:
                driver.set_access(chunk.address, chunk.size, self.grants)
        except RemapError as error:
            undo(error, driver.unmap, chunk.address, chunk.size)
            supply.lose([chunk])
            raise


_known: Register[Ahead] = Register()


def next_place(places: Sequence[Location], last: Location | None) -> Location:
    """Return the location of the chunk that follows one on `last`: each in turn, or where a buffer was moved to."""
    if last is None:
        return places[0]
    return places[(places.index(last) + 1) % len(places)] if last in places else last


def _flush_all(driver: Any, place: Location) -> int:
    """Give back what threads have mapped ahead on a location, for a request that found no memory."""
    freed = 0
    for one in _known:
        # Where it lies, and not where it was meant to lie: the buffer may have been moved.
        if one._driver is driver and any(chunk.location == place for chunk in one.ready):
            # Refused while a kernel runs that may touch anything: then there is nothing to give back.
            with suppress(RemapError):
                freed += sum(chunk.size for chunk in one.flush() if chunk.location == place)
    return freed


reclaimers.append(_flush_all)
