"""Lifetimes: closing once, what is alive, finalisers that only queue, rollback, and fork.

Every object that owns something of a driver is a `Resource`. Closing it and collecting it unclosed run the same
`Release`: a record of raw driver calls that no longer needs the object. `close()` runs the record at once; a
finaliser may run on any thread, in the middle of any other call, so it only queues the record (invariant 4), and the
next public call that builds or closes something, or `collect()`, runs it. Records and rollbacks stand in `releases`,
which knows no objects; the rooms above take them from here.

Rejected: `weakref.finalize` (its callbacks run inside the collection, where neither locks nor driver calls are
safe) and finalisers that free at once (the same, and they would unmap memory under running work).
"""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, Self

from remap.blocks import Noted, block, noted
from remap.cards import card
from remap.errors import (
    ClosedError,
    ForkedError,
    InUseError,
    KernelError,
    RemapError,
    RemapWarning,
    context_renewed,
)
from remap.forks import in_child
from remap.releases import Release, Rollback, Step, call_all, end_block, queued, repeatable, undo
from remap.sites import sites
from remap.types import Description, Facts

__all__ = [
    "Description",
    "Release",
    "Resource",
    "Rollback",
    "Step",
    "call_all",
    "captures_running",
    "capturing",
    "collect",
    "drain",
    "end_block",
    "enter",
    "epoch",
    "leave",
    "live",
    "on_creation",
    "queued",
    "repeatable",
    "tell",
    "undo",
    "watchers",
]

_log = logging.getLogger("remap.objects")


class Resource:
    """An object that owns something of a driver until it is closed.

    A subclass calls `Resource.__init__` first and `_opened()` as the last step of its own construction; it gives
    `_detach()`, which returns the `Release` of what it owns, and may refuse to close in `_check_closable()`.
    """

    __slots__ = ("__weakref__", "_driver", "_epoch", "_open", "_site", "_warns", "serial")

    kind: ClassVar[str] = "resource"
    # For finalisers: an object may outlive the names of this module, which go when the interpreter ends.
    _process: ClassVar[_Process]
    _listed: ClassVar[dict[int, weakref.ref[Resource]]]

    def __init__(self, driver: Any) -> None:
        self._open = False
        self._warns = True  # False for what is meant to be dropped: it is given back in silence
        self._driver = driver
        self._epoch = _process.epoch
        self.serial = next(_serials)

    def _opened(self) -> None:
        self._list()
        if sites.depth:
            self._site = sites.here()
        hooks = _hooks.get()
        if hooks:
            for entry in hooks:
                for hook in entry:
                    hook(self)
        if watchers:
            tell("made", self, "")
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("made %s", self.describe())

    def _list(self) -> None:
        self._open = True
        self._listed[self.serial] = weakref.ref(self)
        if left and id(self._driver) in left:
            self._refuse_left()

    def _refuse_left(self) -> NoReturn:
        """Refuse to come to life: another thread has ended the use of the driver meanwhile."""
        rule = "another thread has changed the driver, or closed it, while this was being made"
        error = InUseError(f"a new {self.kind}", rule=rule, next_step="Make it again, of the new driver")
        self._open = False
        self._listed.pop(self.serial, None)
        undo(error, self._detach().run)
        raise error

    def _detach(self) -> Release:
        """Return what gives this object back; called once, when it has been marked closed."""
        raise NotImplementedError

    def _check_closable(self) -> None:
        """Raise `InUseError` while something still needs this object."""

    def describe(self) -> Description:
        """Return a frozen record of this object, for messages, snapshots and leak reports."""
        return Description(self.kind, self.serial, 0, None, "")

    def _facts(self) -> Facts:
        """Return what this object holds, asking no driver and letting no address escape."""
        return Facts()

    @property
    def site(self) -> tuple[str, ...]:
        """Where it was made, innermost frame first; empty unless sites were recorded then (`remap.record_sites`)."""
        return getattr(self, "_site", ())

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return not self._open

    def _check(self) -> None:
        """Raise `ClosedError` or `ForkedError` if the object cannot be used."""
        if not self._open:
            raise ClosedError(
                f"use of a closed {self.kind}",
                rule=f"{self.describe()} was closed, by close() or at the end of its with block",
                next_step="Keep it open for as long as it is used",
            )
        self._check_process()

    def _check_process(self) -> None:
        """Raise `ForkedError` in the forked child of the process that made it."""
        if self._epoch != _process.epoch:
            raise ForkedError(
                f"use of a {self.kind} made before a fork",
                rule="memory of a driver belongs to the process that made it",
                next_step="Create it in the child, or share it with remap.export and remap.open",
            )

    def close(self) -> None:
        """Give back what this object owns. Closing again does nothing.

        In the child of a fork it does nothing either: the memory is the parent's. Raises `InUseError`, and leaves
        the object open, while something else needs it.
        """
        self._close()

    def _close(self, change: Callable[[Release], None] | None = None) -> bool:
        """Close, and let `change` alter what is left to do; return whether there was anything to close."""
        release = None
        try:
            release = self._begin_close()
            if release is not None:
                if change is not None:
                    change(release)
                self._finish_close(release)
        except BaseException:
            if release is not None and not release.begun:
                self._reopen()
            raise
        return release is not None

    def _begin_close(self) -> Release | None:
        """Mark the object closed and return what is left to do; None if it was closed, or is the parent's."""
        if not self._open:
            return None
        if self._epoch != _process.epoch:
            self._open = False
            return None
        if queued:
            drain()
        closing = False
        try:
            with self._driver.lock:
                if not self._open:
                    return None
                self._check_closable()
                if not self._open:  # what was called there has closed it
                    return None
                self._open, closing = False, True
                self._listed.pop(self.serial, None)
                return self._detach()
        except BaseException:
            if closing:
                self._reopen()
            raise

    def _reopen(self) -> None:
        """Undo `_begin_close`: nothing was given back, so the object can be closed again."""
        self._open = True
        self._listed[self.serial] = weakref.ref(self)

    def _finish_close(self, release: Release) -> None:
        if watchers:
            tell("begin", self, "close")
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("closing %s", self.describe())
        try:
            release.run()
        except BaseException:
            if not release.begun:
                self._reopen()
            raise
        finally:
            if watchers:
                tell("end", self, "close")

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Close it. If the block failed, a refusal is a note on its error: what it made may be in the traceback."""
        end_block(error, self.close)
        if error is not None:
            self._warns = (
                False  # where it was refused, it goes when it is collected, and the note has said why
            )

    def __del__(self) -> None:
        """Queue what an unclosed object owns, and warn."""
        # A constructor that was refused before it called this class's own has left no `_open` behind.
        process = self._process
        if not getattr(self, "_open", False) or self._epoch != process.epoch or process.ending:
            return
        self._open = False
        self._listed.pop(self.serial, None)
        queued.append(self._detach())
        if not self._warns:
            return
        description = self.describe()
        made = f" (made at {self.site[0]})" if self.site else ""
        warnings.warn(
            f"{description}{made} was never closed; remap.collect() or the next remap call gives it back. "
            f"Close it, or use it in a with statement",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied and pickled: two objects would own one resource (invariant 1)."""
        raise TypeError(
            f"a copy of {self.describe()}: two objects would own one resource. "
            "Pass the object itself, copy what is in it, or share its memory with remap.export"
        )

    def __repr__(self) -> str:
        """Return what it is, how large and where."""
        state = " closed" if self.closed else ""
        return f"<remap.{type(self).__name__}{state} {self.describe()}>"

    def _repr_html_(self) -> str:
        """Return it for a notebook: what it is, and a bar of the bytes behind it."""
        return card(f"{type(self).__name__}: {self.describe()}", self._facts() if self._open else Facts())


class _Process:
    """What this process is: its fork epoch, whether it is ending, and how many captures run in it."""

    __slots__ = ("captures", "ending", "epoch")

    def __init__(self) -> None:
        self.epoch = 0
        self.ending = False
        self.captures = 0


_process = Resource._process = _Process()
_serials = itertools.count(1)
_live: dict[int, weakref.ref[Resource]] = {}
Resource._listed = _live
left: dict[int, weakref.ref[Any]] = {}
"""The drivers whose use was ended, or is about to be, by identity: nothing new of theirs may come to life."""
_hooks: ContextVar[Noted[Callable[[Resource], None]]] = ContextVar("remap_hooks", default=())
watchers: list[Callable[[str, Resource, str], None]] = []
"""Those who watch the objects of all threads: each is called with "made", or "begin" and "end" of an operation by name.

Operations look whether it is empty, so that nobody pays who is not watched. A trace is a watcher.
"""


def leave(driver: Any) -> None:
    """Let nothing new of a driver come to life."""
    # The reference passes itself to the call: what `pop` returns where there is nothing.
    left[id(driver)] = weakref.ref(driver, partial(left.pop, id(driver)))


def enter(driver: Any) -> None:
    """Take a driver into use, again if it was left before."""
    left.pop(id(driver), None)


def tell(what: str, thing: Resource, doing: str) -> None:
    """Tell every watcher that an object was made, or that an operation on it begins or ends."""
    for watcher in tuple(watchers):
        watcher(what, thing, doing)


def drain() -> int:
    """Run the releases that finalisers queued, mappings first; return how many.

    Does nothing while a stream is being captured, since waiting would break the capture. What fails here can be
    raised to nobody, so it is a `RemapWarning`; what a kernel did wrongly is left to the next wait. What is refused
    (`InUseError`), or left undone by an interrupt or by a warning made an error, stays queued for a later call.
    """
    if _process.captures:
        return 0
    releases: list[Release] = []
    try:
        with suppress(IndexError):  # another thread took the last one
            while queued:
                releases.append(queued.popleft())
        for release in sorted(releases, key=attrgetter("order")):
            try:
                release.run()
                release.begun = True  # also where it had no steps
            except Exception as error:  # noqa: BLE001 - what a foreign object raises concerns no later call, either
                if isinstance(error, InUseError) and not release.begun:
                    continue
                release.begun = True  # told once, and not tried again
                if isinstance(error, KernelError) and error.leave():
                    continue
                said = error if isinstance(error, RemapError) else f"{type(error).__name__}: {error}"
                failed = f"giving back an unclosed object failed: {said}"
                warnings.warn(failed, RemapWarning, stacklevel=2)
    finally:
        queued.extend([release for release in releases if not release.begun])
    return sum(release.begun for release in releases)


def collect() -> int:
    """Run Python's garbage collector, give back what unclosed objects owned, and return how many those were.

    May wait for work that still uses their memory.
    """
    gc.collect()
    return drain()


def live(kind: type[Resource] = Resource) -> list[Resource]:
    """Return the live objects of this process, oldest first."""
    found = [reference() for reference in list(_live.values())]
    return [thing for thing in found if isinstance(thing, kind)]


def on_creation(hook: Callable[[Resource], None]) -> AbstractContextManager[None]:
    """Call `hook` with each object made in this context, until the block ends. Groups use it."""
    return noted(_hooks, hook)


def epoch() -> int:
    """Return a number that is another one in every forked child."""
    return _process.epoch


@block
def capturing() -> Generator[None]:
    """Hold queued releases back while a capture runs that remap knows of."""
    _process.captures += 1
    try:
        yield
    finally:
        _process.captures -= 1


def captures_running() -> bool:
    """Tell whether a capture runs that remap knows of."""
    return bool(_process.captures)


def _forked() -> None:
    _process.epoch += 1
    _process.captures = 0
    left.clear()
    context_renewed()
    queued.clear()
    _live.clear()


def _ending() -> None:
    _process.ending = True


in_child(_forked)
# Objects alive at exit are silent: the driver gives everything back when the process ends.
atexit.register(_ending)
