"""`with` blocks: generators whose end an interrupt cannot keep from coming, and what a block says to all inside it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, _GeneratorContextManager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeAlias, TypeVar

_Value = TypeVar("_Value")
_Asked = ParamSpec("_Asked")


class _Block(_GeneratorContextManager[_Value]):
    def __enter__(self) -> _Value:
        try:
            return super().__enter__()
        except BaseException:
            self.gen.close()
            raise


def block(function: Callable[_Asked, Generator[_Value]]) -> Callable[_Asked, AbstractContextManager[_Value]]:
    """Make a context manager of a generator, as `contextlib.contextmanager` does, which ends where it cannot begin.

    An interrupt may come when the generator has begun, and before the block has. Then it would stay begun for as long
    as the traceback lives, which an interactive Python keeps: memory that is "being paused" could not even be closed.
    """

    @wraps(function)
    def made(*arguments: _Asked.args, **keywords: _Asked.kwargs) -> AbstractContextManager[_Value]:
        return _Block(function, arguments, keywords)

    return made


Noted: TypeAlias = tuple[list[_Value], ...]
"""What the blocks that a context is in have noted, outermost first: one value each, and none where it has ended."""


@block
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
