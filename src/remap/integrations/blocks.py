"""Blocks: which pool the present thread is in, and that its blocks end in the order in which they began.

torch routes by thread, and so does this. Tasks of one thread that wait inside of a block take turns there, and one of
them would make its tensors in the other's pool: that is noticed where remap is asked for a tensor, and where the block
of one ends before that of the other.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from remap.errors import InUseError, InvalidValueError

if TYPE_CHECKING:
    from remap.integrations.pools import Pool


class _Block:
    """One stay in a pool, or, with None, in memory of torch's own."""

    __slots__ = ("pool",)

    def __init__(self, pool: Pool | None) -> None:
        self.pool = pool

    def __str__(self) -> str:
        return "a block outside of pools" if self.pool is None else f"a block of pool {self.pool.tag!r}"


class _Thread(threading.local):
    """The blocks that the present thread is in, outermost first."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []


_thread = _Thread()
_here: ContextVar[_Block | None] = ContextVar("remap_block", default=None)
"""The block that the present task has entered last: of its thread it may not be the last one."""

_STEP = "Leave a block before the next one is entered, or after that has ended: never wait (`await`) inside of one"


@contextmanager
def inside(pool: Pool | None) -> Generator[None]:
    """Note that this thread is in a pool, or outside of all, for a block.

    Raises `InUseError` where it ends and is not the innermost one of its thread; it has ended all the same.
    """
    block, blocks, outer = _Block(pool), _thread.blocks, _here.get()
    try:
        blocks.append(block)
        _here.set(block)
        yield
    finally:
        last = _thread.blocks[-1] if _thread.blocks else None
        if block in blocks:  # an interrupt may come before it is
            blocks.remove(block)
        if _here.get() is block:
            _here.set(outer)
    if last is not block:
        among = "another thread has entered it" if last is None else f"this thread has entered {last} since"
        raise InUseError(f"{block} to be left", rule=f"{among}, and torch routes by thread", next_step=_STEP)


def present() -> Pool | None:
    """Return the pool of this thread's last block; None where that is outside of all, or it is in none."""
    return _thread.blocks[-1].pool if _thread.blocks else None


def innermost(asked: str) -> Pool | None:
    """Return the pool that this thread is in, None where it is outside of all for a block.

    Raises `InvalidValueError` where it is in no block, and `InUseError` where that is a block of another task.
    """
    if not _thread.blocks:
        raise InvalidValueError(
            asked, rule="this thread is in no pool", next_step='Use `with remap.torch.pool("tag"):` around it'
        )
    last, here = _thread.blocks[-1], _here.get()
    if here is not last and here in _thread.blocks:
        raise InUseError(
            f"{asked} in {here}",
            rule=f"another task of this thread has entered {last} since, and torch routes by thread",
            next_step=_STEP,
        )
    return last.pool
