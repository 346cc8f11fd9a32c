"""Agreements: steps that all ranks of an exchange take together, so that where one fails, all fail alike.

A rank that fails by itself would leave the others waiting at their next step, each with another story. So after every
step that can fail each rank tells the others how it went, and all of them raise the same error if it did not go well
everywhere. What has been done until then, each rank undoes by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from remap.errors import ShareError
from remap.sharing.exchange import Exchange
from remap.sizes import counted

_LONGEST = 2000  # characters of one rank's story


class Agreement:
    """The steps towards one thing; `asked` names it in errors."""

    def __init__(self, exchange: Exchange, asked: str, timeout: float | None) -> None:
        self.exchange = exchange
        self.asked = asked
        self._timeout = timeout

    def step(self, doing: str, action: Callable[[], bytes | None]) -> list[bytes]:
        """Run `action`, and return what it returned on each rank. Waits for all of them.

        Raises the same `ShareError` on every rank if it raised on any: the first such rank's story, with the error of
        this rank as the cause where it has one. `doing` is what the step does, as in "create its memory". An exchange
        that breaks raises its own `ShareError`.
        """
        told, own = b"", None
        try:
            told = b"+" + (action() or b"")
        except BaseException as error:  # noqa: BLE001 (raised again below, once the others know)
            own = error
            told = b"-" + _story(error)
        try:
            gathered = self.exchange.allgather(told, timeout=self._timeout)
        except ShareError as error:
            if own is not None and not isinstance(own, Exception):
                raise own from error
            if own is not None:
                error.add_note(f"before that, this rank had failed to {doing}: {own}")
            raise
        if own is not None and not isinstance(own, Exception):
            raise own
        failed = {rank: one[1:] for rank, one in enumerate(gathered) if not one.startswith(b"+")}
        if failed:
            raise self.refusal(_told(doing, failed)) from own
        return [one[1:] for one in gathered]

    def refusal(self, rule: str, next_step: str = "") -> ShareError:
        """Return the error that every rank raises for a rule that all of them see broken."""
        step = "Every rank has given back what it had: mend that, and let all ranks try again"
        return ShareError(self.asked, rule=rule, next_step=next_step or step)


def _story(error: BaseException) -> bytes:
    return json.dumps([type(error).__name__, str(error)[:_LONGEST]]).encode()


def _told(doing: str, failed: dict[int, bytes]) -> str:
    rank = min(failed)
    more = len(failed) - 1
    others = f" (and {counted(more, 'more rank')})" if more else ""
    return f"rank {rank}{others} failed to {doing}: {_read(failed[rank])}"


def _read(story: bytes) -> str:
    """Return a rank's story as text, whatever it sent."""
    try:
        found: Any = json.loads(story)
    except (ValueError, RecursionError):
        found = None
    match found:
        case [str() as kind, str() as text]:
            return f"{kind}: {text}"[: _LONGEST + 100].rstrip(". ")
        case _:
            return "it does not say why"
