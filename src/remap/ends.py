"""The end of a handle that other threads may be naming at the time: the last one of them destroys it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from remap.releases import undo


class End:
    """Whether a handle of a driver is over, and who names it at this moment.

    Whoever names a handle that another may destroy does so in a block of `kept`. Rejected: letting the one who closes
    wait for those blocks, as an interrupt that loses the count would then block it for ever; here it leaks the handle.
    """

    __slots__ = ("_destroy", "_driver", "_naming", "over")

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._naming = 0
        self._destroy: Callable[[], None] | None = None
        self.over = False

    @contextmanager
    def kept(self) -> Generator[bool]:
        """Keep the handle for a block; yields False where it is over, and must not be named any more."""
        kept = False
        try:
            with self._driver.lock:
                if not self.over:
                    self._naming += 1
                    kept = True
            yield kept
        except BaseException as error:
            if kept:
                undo(error, self._leave)
            raise
        if kept:
            self._leave()

    def destroy(self, call: Callable[[], None]) -> None:
        """Destroy the handle, whose work is done, with `call`: now, or when the last block that keeps it ends."""
        with self._driver.lock:
            self.over = True
            if self._naming:
                self._destroy = call
                return
        call()

    def _leave(self) -> None:
        with self._driver.lock:
            self._naming -= 1
            last = None if self._naming else self._destroy
        if last is not None:
            last()
