"""Hints: names that an object does not have, and what stands for them in remap.

`hinted` gives them to a class. Who asks for such a name gets the `AttributeError` that is due, with the hint in it, so
that `hasattr`, copies and pickles go on as if there were nothing.

Rejected: `__getattr__`, with which every attribute that an object does have takes 80 ns to read instead of 10 (Python
3.11), launches included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

Kind = TypeVar("Kind", bound=type[Any])


MOVES = {
    "migrate": "remap.migrate(buffer, location)",
    "pause": "remap.pause(buffer)",
    "resume": "remap.resume(buffer)",
}
"""Verbs of residency, which are functions: buffers know nothing above them."""


class _Hint:
    """Stands in a class where objects have nothing."""

    __slots__ = ("_instead", "_name")

    def __init__(self, name: str, instead: str) -> None:
        self._name = name
        self._instead = instead

    def __get__(self, thing: object, kind: type[Any]) -> NoReturn:
        said = f"{kind.__name__!r} object has no attribute {self._name!r}: use {self._instead}"
        # With an object, Python would add the most similar of its names, private ones included.
        raise AttributeError(said, name=self._name, obj=None)

    def __repr__(self) -> str:
        return f"<not here: use {self._instead}>"


def hinted(**names: str) -> Callable[[Kind], Kind]:
    """Return a decorator that lets objects of a class name what stands for attributes that they do not have."""

    def give(kind: Kind) -> Kind:
        for name, instead in names.items():
            setattr(kind, name, _Hint(name, instead))
        setattr(kind, "__dir__", _names)  # noqa: B010 (a type checker takes it for a method)
        return kind

    return give


def _names(thing: object) -> list[str]:
    """Return the attributes of an object, without hints."""
    kinds = type(thing).__mro__
    return [
        name
        for name in object.__dir__(thing)
        if not isinstance(next((vars(kind)[name] for kind in kinds if name in vars(kind)), None), _Hint)
    ]
