"""Work in the background: jobs that can be waited for and cancelled, done by threads that end with the last of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

_LOOK = 0.05


class Job:
    """Something that is done once, or cancelled before it is begun.

    Not a `concurrent.futures.Future`: an interrupt that comes as its lock was just taken locks it for ever.
    """

    __slots__ = ("_ended", "_error", "_fate", "_over")

    def __init__(self) -> None:
        self._fate: dict[str, str] = {}  # one entry, which is looked for and put there in one step
        self._over = False
        self._ended = threading.Lock()
        self._ended.acquire()
        self._error: BaseException | None = None

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled, and will not be done."""
        return self._fate.get("is") == "cancelled"

    def cancel(self) -> bool:
        """Keep it from being done; return False if it is under way, or was done."""
        return self._fate.setdefault("is", "cancelled") == "cancelled"

    def run(self, call: Callable[[], None]) -> None:
        """Do it, unless it was cancelled."""
        if self._fate.setdefault("is", "begun") == "cancelled":
            return
        try:
            call()
        except BaseException as error:  # noqa: BLE001 (raised again by whoever asks for the result)
            self._error = error
        self._over = True
        self._ended.release()

    def wait(self) -> None:
        """Wait until it is over, however it ends."""
        while not self._over and not self.cancelled:
            # Looked at again now and then: nobody wakes who waits for what is cancelled, or behind who was interrupted.
            if self._ended.acquire(timeout=_LOOK):
                self._ended.release()

    def result(self) -> None:
        """Wait until it is over; raise what it has raised."""
        self.wait()
        if self._error is not None:
            raise self._error


Task: TypeAlias = tuple[Job, Callable[[], None]]
"""A job and what it takes."""


def start(tasks: list[Task], workers: int) -> None:
    """Do tasks in threads that end with the last of them; raises `RuntimeError` if not even one can be had."""
    left = deque(tasks)
    for number in range(min(workers, len(tasks))):
        try:
            threading.Thread(target=_work, args=(left,), name="remap-host-memory", daemon=False).start()
        except RuntimeError as error:
            # An interrupt in the middle comes out as one, too.
            if not number or error.__context__ is not None:
                raise
            break


def _work(left: deque[Task]) -> None:
    with suppress(IndexError):  # another thread took the last one
        while True:
            job, call = left.popleft()
            job.run(call)
