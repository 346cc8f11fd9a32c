"""The end of a handle that other threads may be naming at the time: the last one of them destroys it."""

from __future__ import annotations

from collections.abc import Callable
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

    def kept(self) -> Kept:
        """Keep the handle for a block; gives False where it is over, and must not be named any more."""
        return Kept(self)

    def named(self, thing: Any) -> Named:
        """Keep the handle of an object for a block that names it; raises what `thing._check` does where it is over."""
        return Named(self, thing)

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


class Kept:
    """A block that keeps a handle. A class and not a generator, as it is entered at every use."""

    __slots__ = ("_end", "_kept")

    def __init__(self, end: End) -> None:
        self._end = end
        self._kept = False

    def __enter__(self) -> bool:
        """Return whether the handle may be named."""
        end = self._end
        try:
            with end._driver.lock:
                if not end.over:
                    end._naming += 1
                    self._kept = True
        except BaseException as error:
            if self._kept:
                undo(error, end._leave)
            raise
        return self._kept

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Let go of the handle, and destroy it if that was put off until now."""
        if not self._kept:
            return
        if error is None:
            self._end._leave()
        else:
            undo(error, self._end._leave)


class Named(Kept):
    """A block that keeps the handle of an object which can be used."""

    __slots__ = ("_thing",)

    def __init__(self, end: End, thing: Any) -> None:
        super().__init__(end)
        self._thing = thing

    def __enter__(self) -> bool:
        """Raise where the object cannot be used."""
        self._thing._check()
        if not super().__enter__():  # another thread has closed it in between
            self._thing._check()
        return self._kept
