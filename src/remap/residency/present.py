"""The pool of host memory that this process has: made on first use for its driver, and closed with that."""

from __future__ import annotations

import threading
from typing import Any

from remap import drivers, lifetime
from remap.errors import InUseError
from remap.forks import in_child
from remap.residency.hostpool import HostPool
from remap.sizes import Size


class _Pools:
    """The pool of this process, for the present driver; a forked child begins with none."""

    def __init__(self) -> None:
        self.pool: HostPool | None = None
        self.lock = threading.Lock()


_pools = _Pools()


def current_pool(driver: Any) -> HostPool:
    """Return the pool for a driver, a new one where there is none; raises `InUseError` if the driver was left."""
    with _pools.lock:
        # Who leaves a driver says so first, and closes its pool then. A thread that comes late for it must not touch
        # the pool of the next one, which may have backups already.
        if id(driver) in lifetime.left:
            rule = "another thread has changed the driver, or closed it"
            raise InUseError("host memory for backups", rule=rule, next_step="Ask again, of the new driver")
        pool = _pools.pool
        if pool is not None and pool._driver is driver and not pool._closed:
            return pool
        limit = None
        if pool is not None:
            pool.close()  # an interrupt came into that before
            limit = pool.limit if pool._driver is driver else None
        _pools.pool = HostPool(driver, limit)
        return _pools.pool


def host_pool(*, limit: Size | None = None, prepare: Size | None = None) -> HostPool:
    """Return the pool of host memory of this process, after setting what is given.

    `limit` bounds the bytes it may hold: what is free beyond it goes back, kept or not. `prepare` bytes are got ready
    in the background, near the fastest device (touched by several threads, in large pages where the system has them,
    and page-locked), and kept from then on: pauses that fit into them run at the speed of the link from the first one
    on. `prepare=0` ends that. Raises `OutOfMemoryError` where the machine cannot give so much.
    """
    pool = current_pool(drivers.current())
    if limit is not None or prepare is not None:
        pool.configure(limit, prepare)
    return pool


def _leave(_: Any) -> None:
    """Give the pool back before its driver goes; nothing can use it then."""
    with _pools.lock:
        pool = _pools.pool
        if pool is not None:
            pool.close()
            _pools.pool = None


def _renew() -> None:
    _pools.pool, _pools.lock = None, threading.Lock()


in_child(_renew)
drivers.on_leave(_leave)
