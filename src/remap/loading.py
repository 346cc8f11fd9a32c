"""First imports, and forks: no child of a fork is born in the middle of one.

A child inherits the modules that its parent's other threads were loading, half filled and locked for ever, so that its
own import of them would never return. Forks wait for those threads instead.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from threading import get_ident

LIMIT = 10.0
"""Seconds that a fork waits at most: a child that may hang is better than a parent that does."""


class _Loading:
    """The threads that are loading rooms of remap. They do not exclude each other, only forks."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.threads: list[int] = []

    def before_fork(self) -> None:
        """Wait until no other thread loads anything, and let none begin; a thread may fork while it loads."""
        self.changed.acquire()
        end = time.monotonic() + LIMIT
        while any(one != get_ident() for one in self.threads) and (left := end - time.monotonic()) > 0:
            self.changed.wait(left)
        if time.monotonic() >= end:
            logging.getLogger("remap").warning(
                "a fork did not wait any longer for rooms of remap to be loaded"
            )

    def after_in_parent(self) -> None:
        """Let threads load again."""
        self.changed.release()

    def after_in_child(self) -> None:
        """Begin anew, with the one thread that is left."""
        self.changed = threading.Condition()
        self.threads = [one for one in self.threads if one == get_ident()]


@contextmanager
def loading() -> Generator[None]:
    """Load rooms in this block; a fork by another thread waits for its end."""
    here = get_ident()
    try:
        with _loading.changed:
            _loading.threads.append(here)
        yield
    finally:
        with _loading.changed:
            if here in _loading.threads:
                _loading.threads.remove(here)
            _loading.changed.notify_all()


_loading = _Loading()
if hasattr(os, "register_at_fork"):
    # After logging was imported: hooks run in the opposite order, and its own takes a lock that rooms take to load.
    os.register_at_fork(
        before=_loading.before_fork,
        after_in_parent=_loading.after_in_parent,
        after_in_child=_loading.after_in_child,
    )
