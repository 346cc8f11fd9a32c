"""A process beside this one, to share memory with."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import remap

_LIMIT = 60.0


class Partner:
    """A new process on the same driver that plays a part, a function of its end of a link; it ends with the block."""

    def __init__(self, part: Callable[[Connection], None]) -> None:
        spawn = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
        self._link, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_play, args=(theirs, remap.driver().name, part), daemon=True)
        self._process.start()
        theirs.close()  # it has its own; while this one is open, its death would not be seen

    def tell(self, what: object) -> None:
        """Send it something."""
        self._link.send(what)

    def hear(self) -> Any:
        """Return what it says next; raises `ShareError` if it says nothing in time, has ended, or met an error."""
        if not self._link.poll(_LIMIT):
            raise remap.ShareError("the other process", rule=f"it said nothing for {_LIMIT:g} s")
        try:
            answer = self._link.recv()
        except EOFError:
            raise remap.ShareError("the other process", rule="it ended early") from None
        if isinstance(answer, _Failure):
            raise remap.ShareError("the other process", rule=answer.text)
        return answer

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for its end; it ends if it still waits for something."""
        self._link.close()
        self._process.join(_LIMIT)
        self._process.kill()


class _Failure(NamedTuple):
    """What ended a part, as text: not every error can be sent."""

    text: str


def _play(link: Connection, driver: str, part: Callable[[Connection], None]) -> None:
    try:
        remap.use(driver)
        part(link)
    except EOFError:  # the other end has gone
        pass
    except Exception as error:  # noqa: BLE001 (whatever it is, the other end reports it)
        link.send(_Failure(f"{type(error).__name__}: {error}"))
