"""Traces: every driver call with arguments and result, every operation on a buffer, and the memory taken, over time.

    with remap.trace("out.json"):
        ...

writes a file that https://ui.perfetto.dev and chrome://tracing open, and that `remap trace --as c` prints as the plain
driver calls it amounts to. `REMAP_TRACE=out.json` traces a whole run, `%p` in the name being the process.
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
from functools import partial
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Self, TypeAlias

from remap import drivers, lifetime
from remap.drivers.wrappers import Call
from remap.errors import InUseError, InvalidValueError
from remap.handles import PhysicalAllocation
from remap.lifetime import Resource, end_block, undo
from remap.locations import known_devices
from remap.observe.calls import CallRecord, taps
from remap.observe.reading import FileLike
from remap.observe.snapshot import Item, item_of
from remap.sizes import counted

Note: TypeAlias = tuple[str, str, int, str, int, int]
"""What was noted of an object: what, its kind, its number, the operation, the time in ns, and the thread."""


class Trace:
    """A recording that runs from the beginning of its `with` block to the end, over all threads.

    `limit` bounds how many calls are kept (about 300 bytes each); what comes after that is only counted. Calls in
    forked children are not seen. With a path, leaving the block writes the file, whatever happened inside.
    """

    def __init__(self, path: FileLike | None = None, *, limit: int = 500_000) -> None:
        if limit < 1:
            raise InvalidValueError(f"a trace of {limit} calls", rule="it keeps at least one")
        self.path = None if path is None else Path(path)
        self.limit = limit
        self.left_out = 0
        self.start = self.stop = 0
        self.started = ""
        self.before: tuple[Item, ...] = ()
        self.contexts: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.notes: list[Note] = []
        self.driver: Any = None
        self._records: list[CallRecord] = []
        self._running = False

    @property
    def calls(self) -> tuple[Call, ...]:
        """The driver calls so far, in the order in which they ended."""
        return tuple(
            Call(name, said, named or {}, result, error, start, duration, thread)
            for name, said, named, result, error, start, duration, thread in self._records.copy()
        )

    def __repr__(self) -> str:
        """Return how much it holds, and where that is written."""
        state = " so far" if self._running else ""
        file = "" if self.path is None else f", for {self.path}"
        return f"<remap.Trace of {counted(len(self._records), 'call')}{state}{file}>"

    def __enter__(self) -> Self:
        """Begin to record."""
        if self._running or self.start:
            raise InUseError("a trace that was begun before", rule="each trace records one stretch of time")
        self._running = True
        try:
            self._begin()
        except BaseException as error:  # an interrupt
            undo(error, self.end)
            raise
        return self

    def _begin(self) -> None:
        self.started = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        drivers.on_enter.append(self._entered)
        self.driver = drivers.opened()
        if self.driver is not None:
            numbers: dict[object, int] = {}
            living = lifetime.live()
            self.before = tuple(item_of(thing, numbers) for thing in living)
            self.handles = {one._handle: one.serial for one in living if isinstance(one, PhysicalAllocation)}
            # Not devices(), which would ask the driver while another trace listens.
            self.contexts = {one._context: one.index for one in known_devices() if one._context}
        lifetime.watchers.append(self._note)
        self.start = perf_counter_ns()
        taps.listen(self._hear)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """End it, and write the file; if the block failed, and that fails, too, it is a note on the block's error."""
        self.end()
        if self.path is not None:
            end_block(error, partial(self.save, self.path))

    def end(self) -> None:
        """Stop recording. Ending again does nothing, or what an interrupt has left."""
        if not self._running:
            return
        self.stop = self.stop or perf_counter_ns()
        taps.leave(self._hear)
        if self._note in lifetime.watchers:
            lifetime.watchers.remove(self._note)
        if self._entered in drivers.on_enter:
            drivers.on_enter.remove(self._entered)
        self._running = False

    def save(self, path: FileLike) -> Path:
        """Write what was recorded so far as a Chrome trace, and return the path."""
        from remap.observe.chrome import to_json

        target = Path(path)
        target.write_text(to_json(self), encoding="utf-8")
        return target

    def _entered(self, driver: Any) -> None:
        """Note the first driver of a trace that was begun before any was open."""
        if self.driver is None:
            self.driver = driver

    def _hear(self, record: CallRecord) -> None:
        if len(self._records) < self.limit:
            self._records.append(record)
        else:
            self.left_out += 1

    def _note(self, what: str, thing: Resource, doing: str) -> None:
        if len(self.notes) < self.limit:
            self.notes.append((what, thing.kind, thing.serial, doing, perf_counter_ns(), get_ident()))


def trace(path: FileLike | None = None, *, limit: int = 500_000) -> Trace:
    """Return a trace to be used as `with remap.trace("out.json") as trace:`, which writes that file at the end.

    Without a path nothing is written until `trace.save(path)`.

    Adds about 0.8 µs to a driver call while it runs, and nothing without one. After one, a call takes some 40 ns more
    than before: Python looks methods up more slowly on an object whose attributes were ever changed as a whole.
    """
    return Trace(path, limit=limit)


def from_environment() -> None:
    """Trace the whole run into the file that `REMAP_TRACE` names; children of this process write files of their own."""
    named = os.environ["REMAP_TRACE"]
    owner = os.environ.setdefault("REMAP_TRACE_OWNER", str(os.getpid()))
    path = Path(named.replace("%p", str(os.getpid())))
    if "%p" not in named and owner != str(os.getpid()):
        path = path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")
    whole = Trace(path).__enter__()
    process = os.getpid()

    def finish() -> None:
        if os.getpid() != process:
            return
        try:
            whole.__exit__(None, None, None)
        except OSError as error:
            step = "Name a file in a directory where this process may write"
            sys.stderr.write(f"remap: REMAP_TRACE={named}: no trace was written: {error}. {step}\n")

    atexit.register(finish)
