"""Registers: objects that are listed for as long as they live, whichever thread adds one meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Generic, TypeVar
from weakref import ref

T = TypeVar("T")


class Register(Generic[T]):
    """Objects that can be listed while they live; it keeps none alive, and takes no lock.

    Not a `WeakSet`: that one is iterated in Python, and raises `RuntimeError` where another thread adds to it.
    """

    __slots__ = ("_references",)

    def __init__(self) -> None:
        self._references: dict[int, ref[T]] = {}

    def add(self, thing: T) -> None:
        """List an object from now on; doing so again changes nothing."""
        number = id(thing)
        # Nothing of Python is called when it goes: the reference passes itself as what `pop` returns for nothing.
        self._references[number] = ref(thing, partial(self._references.pop, number))

    def __iter__(self) -> Iterator[T]:
        """Return those that live, in the order in which they were added, as they are now."""
        # One call of C, in which no other thread comes along.
        for reference in list(self._references.values()):
            thing = reference()
            if thing is not None:
                yield thing
