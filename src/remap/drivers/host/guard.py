"""What makes a driver refuse calls: shut down, lost context, forked process.

A lost context belongs to the process and not to a driver object, as on CUDA: opening another driver does not bring
it back (T10). A fork leaves both behind: the child has none of the parent's memory and may open a driver of its own.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from remap.errors import (
    ContextLostError,
    CudaResult,
    ForkedError,
    KernelError,
    RemapError,
    driver_error,
    refused,
)
from remap.forks import in_child
from remap.registers import Register


class Forkable(Protocol):
    """A part of a driver that has to be told when it wakes up in a forked child."""

    def after_fork(self) -> None:
        """Renew locks, close descriptors, touch nothing of the parent's."""
        ...


class Guard:
    """Says whether a driver still takes calls; the first thing that every call asks."""

    __slots__ = ("__weakref__", "_parts", "refusal", "reports")

    def __init__(self) -> None:
        self.refusal: Callable[[str], RemapError] | None = _process.refuse if _process.reported else None
        self._parts: list[Forkable] = []
        self.reports: deque[KernelError] = deque()  # what kernels did wrongly without harm to the context
        _process.guards.add(self)

    def check(self, call: str) -> None:
        """Raise what stands against this call, if anything does."""
        if self.refusal is not None:
            raise self.refusal(call)

    def check_open(self, call: str) -> None:
        """As `check`, for calls that need no context: they go on working when it is lost (seen on H200)."""
        refusal = self.refusal
        if refusal is not None and refusal != _process.refuse:
            raise refusal(call)

    def check_faults(self, call: str) -> None:
        """Raise if a kernel has faulted: what every wait and query ends with."""
        if _process.fault is not None:
            _process.report()
        if self.reports:
            error = self.reports.popleft()
            error._untold = self.reports
            raise error
        if self.refusal is not None:
            raise self.refusal(call)

    def untold(self) -> list[RemapError]:
        """Return the faults of kernels that no call has raised; none where the driver takes no calls any more."""
        if self.refusal is _closed or self.refusal is _forked:
            return []
        fault = None if _process.reported else _process.fault
        return [*self.reports, *([] if fault is None else [fault])]

    def close(self) -> bool:
        """Refuse every call from now on; return False if that was so already, or the process is not the opener's."""
        if self.refusal is _closed or self.refusal is _forked:
            return False
        self.refusal = _closed
        return True

    def watch_forks(self, part: Forkable) -> None:
        """Call `part.after_fork` in forked children."""
        self._parts.append(part)

    def forked(self) -> None:
        """Make the driver inert: this process is a fork of the one that opened it."""
        if self.refusal is not _closed:
            self.refusal = _forked
            for part in self._parts:
                part.after_fork()


class _Process:
    """The fault of this process, if there was one, and the guards that must know of it."""

    def __init__(self) -> None:
        self.guards: Register[Guard] = Register()
        self.lock = threading.Lock()
        self.fault: ContextLostError | None = None
        self.reported = False

    def lose(self, error: ContextLostError) -> None:
        """Record a kernel's fault; only the first one counts."""
        with self.lock:
            if self.fault is None:
                self.fault = error

    def report(self) -> None:
        """Let every call of every driver that acts in a context fail from now on.

        Called by the first wait that ends after the fault, so that which call fails first does not depend on how
        fast the kernel was.
        """
        with self.lock:
            if not self.reported:
                self.reported = True
                for guard in self.guards:
                    if guard.refusal is None:
                        guard.refusal = self.refuse

    def refuse(self, call: str) -> RemapError:
        fault = self.fault
        assert fault is not None
        rule = f"the context is lost: {fault.asked}: {fault.rule}"
        error = refused(driver_error(call, fault.code, asked=call, rule=rule))
        error.__cause__ = fault.__cause__ or fault
        return error

    def after_fork(self) -> None:
        guards, self.lock = list(self.guards), threading.Lock()
        self.guards = Register()
        self.fault, self.reported = None, False
        for guard in guards:
            guard.forked()


def lose_context(error: ContextLostError) -> None:
    """Record that a kernel faulted: waits report it from now on."""
    _process.lose(error)


def context_lost() -> bool:
    """Tell whether a kernel has faulted, reported or not; queued work is dropped from then on."""
    return _process.fault is not None


def _closed(call: str) -> RemapError:
    rule = "the host driver was shut down"
    return driver_error(
        call, CudaResult.DEINITIALIZED, asked=call, rule=rule, next_step='Open another: remap.use("host")'
    )


def _forked(call: str) -> RemapError:
    return ForkedError(
        call,
        rule=f"this driver was opened before a fork, and process {os.getpid()} is the child",
        next_step='Open another in the child: remap.use("host")',
    )


_process = _Process()
in_child(_process.after_fork)
