"""Run a function in a process of its own: for what loses the context, and for what must die.

The process is spawned, never forked: a CUDA context does not survive a fork. So the function and its arguments have
to be importable from the child: functions of installed modules, not methods of a test class.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

LIMIT = 90.0
"""How many seconds a child may take; opening CUDA on a cold machine alone can take several."""


def run_in_child(function: Callable[..., Any], /, *arguments: Any, limit: float = LIMIT) -> Any:
    """Return what `function(*arguments)` returns in a new process.

    Raises `AssertionError` with the child's traceback if it raises, dies without an answer, or takes longer than
    `limit` seconds (then it is killed).
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_answer, args=(sender, function, arguments), daemon=True)
    child.start()
    sender.close()  # the child has its own; while ours is open, its death would not be seen
    try:
        assert receiver.poll(limit), f"{function.__name__} took more than {limit} s in its own process"
        try:
            succeeded, answer = receiver.recv()
        except EOFError:
            child.join(limit)
            raise AssertionError(f"{function.__name__} died in its own process: {child.exitcode}") from None
    finally:
        # Nobody needs the child after its answer, and one with a lost context may not end by itself.
        child.join(5.0)
        if child.is_alive():
            child.kill()
            child.join()
        child.close()
        receiver.close()
    assert succeeded, f"{function.__name__} failed in its own process:\n{answer}"
    return answer


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer = (True, function(*arguments))
    except BaseException:  # noqa: BLE001 (whatever it was, the parent is to show it)
        answer = (False, traceback.format_exc())
    with suppress(BrokenPipeError):  # the parent gave up
        sender.send(answer)
    sender.close()
