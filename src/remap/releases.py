"""Releases and rollbacks: driver calls that are still to be made, on raw values that need no object any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeAlias, TypeVar

from remap.errors import ContextLostError, InUseError, KernelError, context_lost

Step: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""One driver call of a release: a bound method and its arguments."""

_Error = TypeVar("_Error", bound=BaseException)
_Call = TypeVar("_Call", bound=Callable[..., Any])


class Release:
    """What giving an object back takes: a wait, then steps, on raw values alone.

    `order` sorts queued releases: mappings (0) go before allocations and reservations (1), whatever order the
    garbage collector found them in.
    """

    __slots__ = ("begun", "order", "steps", "wait")

    def __init__(self, order: int, steps: list[Step], wait: Callable[[], None] | None = None) -> None:
        self.order = order
        self.steps = steps
        self.wait = wait
        self.begun = False

    def run(self) -> None:
        """Wait, then take every step; raise the first error, the others as notes.

        A wait that fails, and a refusal (`InUseError`), have changed nothing and end the release there; `begun` then
        tells whether anything was given back before. What a kernel did wrongly (`KernelError`) is told by a wait whose
        work has ended: everything is given back all the same, and then it is raised. After any other failure the
        remaining steps are still taken; after an interrupt (Ctrl-C) they are queued. A lost context has given
        everything back itself, so its errors are passed over, but for the wait that was the first to see it
        (invariant 15).
        """
        first: Exception | None = None
        if self.wait is not None:
            known = context_lost()
            waiting = True
            while waiting:  # each wait tells of one kernel at most
                try:
                    self.wait()
                    waiting = False
                except ContextLostError as error:
                    first, waiting = first if known else first or error, False
                except KernelError as error:
                    first = _joined(first, error)
                except BaseException as error:
                    if first is not None:
                        error.add_note(f"and before: {first}")
                    raise
        at = 0
        try:
            for call, arguments in self.steps:
                # Set before the call: an interrupt is raised when it has returned, and nothing may go twice.
                before, self.begun = self.begun, True
                try:
                    call(*arguments)
                except ContextLostError:
                    pass
                except InUseError:
                    self.begun = before
                    raise
                except Exception as error:  # noqa: BLE001 - whatever it is, what follows has to go, too
                    first = _joined(first, error)
                at += 1
        except BaseException as error:
            if self.begun and not isinstance(error, Exception):
                left = self.steps[at:]
                if left and not _is_repeatable(left[0][0]):
                    del left[0]
                if left:
                    queued.append(Release(self.order, left))
            raise
        if first is not None:
            raise first


def _joined(first: _Error | None, error: Exception) -> _Error | Exception:
    """Return the first error, with a later one as a note."""
    if first is None:
        return error
    first.add_note(f"and then: {error}")
    return first


queued: deque[Release] = deque()
"""What finalisers and interrupts left to do; a call that opens or closes something runs `drain()` if there is any."""

_repeatables: set[Callable[..., Any]] = set()


def repeatable(call: _Call) -> _Call:
    """Mark a step that may be taken again, where an interrupt leaves it open whether it was."""
    _repeatables.add(call)
    return call


def _is_repeatable(call: Callable[..., Any]) -> bool:
    # Unmapping nothing is fine (T7). Drivers of others, and what wraps one, have no mark but the name of the protocol.
    return getattr(call, "__func__", call) in _repeatables or getattr(call, "__name__", "") == "unmap"


class Rollback:
    """Undo the steps of an operation, last first, if its block fails; do nothing if it succeeds (invariant 5).

    A failure while undoing becomes a note on the first error, which stays the one that is raised. Not an
    `ExitStack`: its callbacks run on success too, a failing one replaces the error, and one allocation would pay
    for it a tenth of what the driver takes.
    """

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def undo(self, call: Callable[..., Any], /, *arguments: Any) -> None:
        """Register the driver call that undoes the step just taken."""
        self.steps.append((call, arguments))

    def __enter__(self) -> Self:
        """Return itself, to register steps at."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Undo what was registered if the block failed."""
        if error is not None:
            for call, arguments in reversed(self.steps):
                undo(error, call, *arguments)


def end_block(error: BaseException | None, close: Callable[[], object]) -> None:
    """Close what a `with` block was about; if the block failed, what that raises is a note on its error (trap 10)."""
    if error is None:
        close()
        return
    try:
        close()
    except Exception as second:  # noqa: BLE001 - whatever it is, the block's error is the one that the caller waits for
        stays = ". It is open, and given back when it is collected" if isinstance(second, InUseError) else ""
        error.add_note(f"and then: {second}{stays}")


def call_all(calls: Iterable[Callable[[], object]], first: BaseException | None = None) -> None:
    """Make every call, whatever those before it raise; then raise the first error, with the later ones as notes.

    `first` is one that was there before the calls.
    """
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are to be called, too
            first = _joined(first, error)
    if first is not None:
        raise first


def undo(error: BaseException, call: Callable[..., Any], /, *arguments: Any) -> None:
    """Take a step back after `error`, which the caller raises again; a failure of it becomes a note there."""
    try:
        call(*arguments)
    except Exception as second:  # noqa: BLE001 - whatever it is, the first error is the one to raise
        error.add_note(f"while undoing: {second}")
