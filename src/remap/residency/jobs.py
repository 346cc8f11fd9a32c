"""Work in the background: jobs that can be waited for and cancelled, done by threads that end with the last of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TypeAlias

Job: TypeAlias = Future[None]
"""Tells that something was done, or how it failed."""

Task: TypeAlias = tuple[Job, Callable[[], None]]
"""A job and what it takes."""


def start(tasks: list[Task], workers: int) -> None:
    """Do tasks in threads that end with the last of them; raises `RuntimeError` if not even one can be had."""
    left = deque(tasks)
    for number in range(min(workers, len(tasks))):
        try:
            threading.Thread(target=_work, args=(left,), name="remap-host-memory", daemon=False).start()
        except RuntimeError:
            if not number:
                raise
            break


def _work(left: deque[Task]) -> None:
    with suppress(IndexError):  # another thread took the last one
        while True:
            _do(*left.popleft())


def _do(job: Job, call: Callable[[], None]) -> None:
    if not job.set_running_or_notify_cancel():
        return
    try:
        call()
    except BaseException as error:  # noqa: BLE001 (raised again by whoever waits for it)
        job.set_exception(error)
    else:
        job.set_result(None)


def settled(job: Job) -> None:
    """Wait for a job, however it ends."""
    with suppress(CancelledError):
        job.exception()
