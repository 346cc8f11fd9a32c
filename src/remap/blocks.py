"""What `with` blocks say of all that is done inside them, in their context: this thread or task."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias, TypeVar

_Value = TypeVar("_Value")

Noted: TypeAlias = tuple[list[_Value], ...]
"""What the blocks that a context is in have noted, outermost first: one value each, and none where it has ended."""


@contextmanager
def noted(blocks: ContextVar[Noted[_Value]], value: _Value) -> Generator[None]:
    """Note a value of a block in this context, until the block ends, also in contexts that were copied from it."""
    mine = [value]
    try:
        blocks.set((*blocks.get(), mine))
        yield
    finally:
        # Before any call, in which an interrupt may come: it is over from here on, and the next one sweeps it out.
        del mine[:]
        # Not by a token: of blocks that end in another order, the last one would bring the first one's value back.
        blocks.set(tuple(one for one in blocks.get() if one))
