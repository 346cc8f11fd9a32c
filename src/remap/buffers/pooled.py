"""Streams that are lent: created once, handed out for a piece of work, and taken back for the next one.

They are the driver's and not the user's: they count as no live object, and go when the driver goes.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from remap import drivers
from remap.forks import in_child
from remap.lifetime import epoch
from remap.locations import Device
from remap.streams import StreamCalls


class PooledStream(StreamCalls):
    """A non-blocking stream that was lent; `give_back` ends the loan, whether its work has completed or not.

    Work of the next borrower then simply comes after it. Whoever holds it for a wait may go on doing so.
    """

    __slots__ = ("_driver", "device", "handle")

    def __init__(self, at: Device) -> None:
        self.device, self._driver = at, at._driver
        with at.current():
            self.handle: int = at._driver.create_stream(True, 0)

    def give_back(self) -> None:
        """Let others borrow it."""
        _pool.give(self)


class _Pool:
    """The streams that nobody uses at the moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Device, deque[PooledStream]] = {}
        self._epoch = epoch()

    def take(self, at: Device) -> PooledStream:
        with self._lock:
            if self._epoch != epoch():  # a forked child has none of the parent's
                self._idle.clear()
                self._epoch = epoch()
            idle = self._idle.get(at)
            if idle:
                # The one that has been idle for longest: its work is most likely done.
                return idle.popleft()
        return PooledStream(at)

    def give(self, stream: PooledStream) -> None:
        # Without the lock, as finalisers come here: each of the two steps is one under the GIL. All are kept: memory
        # may still have to wait for one, and there are never more than were lent at one time.
        self._idle.setdefault(stream.device, deque()).append(stream)

    def clear(self, driver: Any) -> None:
        with self._lock:
            streams = [one for at in list(self._idle) if at._driver is driver for one in self._idle.pop(at)]
        for one in streams:
            with one.device.current():
                driver.destroy_stream(one.handle)

    def renew(self) -> None:
        self._lock = threading.Lock()


_pool = _Pool()
drivers.on_leave(_pool.clear)
in_child(_pool.renew)


def borrow(at: Device) -> PooledStream:
    """Return a stream of a device that nobody else borrows; `give_back` follows."""
    return _pool.take(at)
