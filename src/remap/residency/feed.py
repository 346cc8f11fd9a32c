"""What is left of an ordered resume when it returns: a thread maps and fills that, in order."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from remap.buffers.base import Buffer
from remap.errors import PausedError, RemapError
from remap.lifetime import Release, Rollback, Step, repeatable
from remap.residency.flow import Flow
from remap.residency.portions import Portion
from remap.sizes import counted


class Worker:
    """A thread that waits for one call to make, or for `stop`.

    It is started before there is anything to be slow: starting a thread waits until that runs, and one that goes to
    work at once keeps the interpreter's lock (5 ms a turn) from whoever started it.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # The end of the interpreter waits while it works, and not while it is idle.
        self._thread = threading.Thread(target=self._work, name="remap-resume", daemon=True)
        self._started = False
        with suppress(RuntimeError):  # no thread can be had: the caller makes the call
            self._thread.start()
            self._started = True

    def run(self, call: Callable[[], None]) -> None:
        """Make a call in the thread, which ends then; here and now where there is none."""
        _busy.add(self)
        self._calls.put(call)
        if not self._started:
            self._work()

    def stop(self) -> None:
        """End the thread if it has nothing to do."""
        self._calls.put(None)

    def _work(self) -> None:
        call = self._calls.get()
        try:
            if call is not None:
                call()
        finally:
            _busy.discard(self)


_busy: set[Worker] = set()


@atexit.register
def _finish() -> None:
    """Let those end that are at work: a thread must not be stopped in the middle of a call of a driver."""
    for worker in list(_busy):
        worker._thread.join()


class Feed:
    """What is still to be mapped and filled, in order. `start` lets a thread do it, which ends with the last of it.

    If the driver refuses something, the thread stops there, and `error` says what it was. What is done stays; the
    rest keeps its memory, created and not mapped, and its backup, and `finish` tries it again.
    """

    def __init__(self, driver: Any, flow: Flow, portions: Iterable[Portion], poison: bool) -> None:
        self._driver = driver
        self._flow = flow
        self._poison = poison
        self._left = deque(portions)
        self._turn = threading.Lock()  # held while one portion is brought
        self._news = threading.Condition()
        self._begun = False
        self._abandoned = False
        self._leaked: RemapError | None = None
        self.error: BaseException | None = None
        self.buffers = tuple(dict.fromkeys(portion.buffer for portion in self._left))

    def start(self, worker: Worker) -> None:
        """Bring everything in a thread."""
        if self._left:
            worker.run(self._work)
        else:
            worker.stop()

    def hold_up(self, error: BaseException) -> None:
        """Say why nothing was begun, so that nobody waits for it."""
        with self._news:
            if self._left and not self._begun:
                rule = f"it was interrupted before the rest was begun ({type(error).__name__})"
                self.error = RemapError("an ordered resume", rule=rule)
                self._news.notify_all()

    def wait(self, portions: Iterable[Portion], asked: str) -> None:
        """Wait on the host until portions are done; raises `PausedError` where one of them has failed."""
        missing = [portion for portion in portions if not portion.done]
        if not missing:
            return
        with self._news:
            self._news.wait_for(
                lambda: self.error is not None or all(one.done or one.gone for one in missing)
            )
        failed = [portion for portion in missing if not portion.done]
        if failed:
            buffer = failed[0].buffer
            raise PausedError(
                f"{asked} of {buffer.describe()}",
                rule=f"a part of it has not come back from its sleep: {self.error}",
                next_step="Call remap.resume(buffer) again, which brings the rest; its backup is intact",
            ) from self.error

    def finish(self) -> None:
        """Wait until everything is done; what has failed is tried again here, and raises what the driver says."""
        with self._news:
            self._news.wait_for(lambda: self.error is not None or not self._left or self._abandoned)
        if self._left and not self._abandoned:
            try:
                self._run()
            except BaseException as error:
                error.add_note(
                    f"what has come back of {counted(len(self.buffers), 'buffer')} stays; the backups are intact, and "
                    "remap.resume tries the rest again"
                )
                raise

    def leave(self, buffer: Buffer) -> None:
        """Bring nothing more of a buffer, which goes: its memory is released, and copies into it are waited for."""
        with self._turn:
            mine = [portion for portion in self._left if portion.buffer is buffer]
            for portion in mine:
                portion.gone = True
                self._left.remove(portion)
            try:
                self._flow.wait()
            finally:
                with self._news:
                    self._news.notify_all()
                Release(1, [(portion.release, (self._driver,)) for portion in mine]).run()

    def abandon(self) -> None:
        """Bring nothing more: its buffers were collected. Calls no driver, as finalisers must not."""
        self._abandoned = True

    def end(self) -> list[Step]:
        """Return what ends it: memory that was never mapped goes. Others destroy its streams, after `forget`."""
        steps: list[Step] = [(portion.release, (self._driver,)) for portion in self._left]
        return [*steps, (self._tell_leak, ())]

    @repeatable
    def forget(self) -> None:
        """Let go of the streams, which are about to be destroyed."""
        with self._turn:  # against `leave`, which waits for them
            self._flow.forget()

    def _tell_leak(self) -> None:
        if self._leaked is not None:
            raise self._leaked

    # -- in the thread --

    def _work(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 (kept in `error`, and told to whoever needs what is missing)
            error.__traceback__ = None  # it would keep everything alive that was in use there

    def _run(self) -> None:
        self._begun, self.error = True, None
        try:
            while self._bring_next():
                pass
        except BaseException as error:
            with self._news:
                self.error = error
                self._news.notify_all()
            raise

    def _bring_next(self) -> bool:
        with self._turn:
            if not self._left:
                return False
            portion = self._left[0]
            if not portion.done:  # else an interrupt came before it was taken off the list
                with Rollback() as rollback:
                    portion.bring(self._driver, self._flow, None, rollback, self._poison)
                    portion.done = True
            try:
                portion.release(self._driver)
            except RemapError as error:  # all is well but for memory that leaks: told at the end
                self._leaked = self._leaked or error
            finally:
                self._left.popleft()
                if not (self._left and self._left[0].buffer is portion.buffer):
                    portion.buffer._coming = None
                with self._news:
                    self._news.notify_all()
        return True
