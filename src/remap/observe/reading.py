"""Files that were written by someone else: JSON of bounded size, every field checked before it is believed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from remap.errors import InvalidValueError
from remap.sizes import LARGEST, MiB, format_size

FileLike: TypeAlias = str | os.PathLike[str]
"""What is taken where a file is asked for: a path."""

LONGEST_TEXT = 4096
T = TypeVar("T")


def read_text(path: FileLike, what: str, limit: int = 256 * MiB) -> str:
    """Return a file's text; raises `InvalidValueError` for one above `limit` bytes, or one that is no UTF-8."""
    with Path(path).open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise InvalidValueError(f"{what} {path}", rule=f"it is larger than {format_size(limit)}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"{what} {path}", rule=f"it is not text ({error.reason})") from None


def parse_json(text: str, what: str) -> Any:
    """Return what JSON text says; raises `InvalidValueError` for text that is truncated, or nested beyond reason."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(what, rule=f"it is not JSON ({error})", next_step="Write it again") from None


def printable(text: str) -> str:
    """Return text for a terminal: characters that would steer it, or hide, are spelled out."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


class Fields:
    """One JSON object, read field by field; each raises `InvalidValueError` naming the field that is wrong."""

    __slots__ = ("_values", "what")

    def __init__(self, values: Any, what: str) -> None:
        if not isinstance(values, dict):
            raise InvalidValueError(what, rule="it is not a JSON object")
        self._values: dict[Any, Any] = values
        self.what = what

    def says(self, name: str, text: str) -> bool:
        """Tell whether a field is there and is this text."""
        return self._values.get(name) == text

    def text(self, name: str) -> str:
        """Return a text of bounded length."""
        return check_text(self._values.get(name), f"{self.what}: {name}")

    def number(self, name: str) -> int:
        """Return a whole number from 0 to 2**63 - 1."""
        return check_number(self._values.get(name), f"{self.what}: {name}")

    def maybe_number(self, name: str) -> int | None:
        """Return a whole number, or None where there is null or nothing."""
        return None if self._values.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise InvalidValueError(f"{self.what}: {name}", rule="it is neither true nor false")
        return value

    def each(self, name: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
        """Return a list, each of its entries as `read(entry, what)` takes it."""
        found = check_list(self._values.get(name), f"{self.what}: {name}")
        return tuple(read(entry, f"{self.what}: {name}[{index}]") for index, entry in enumerate(found))


def check_text(value: Any, what: str) -> str:
    """Return a text of bounded length."""
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise InvalidValueError(what, rule=f"it is not a text of up to {LONGEST_TEXT} characters")
    return value


def check_number(value: Any, what: str) -> int:
    """Return a whole number from 0 to 2**63 - 1."""
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise InvalidValueError(what, rule="it is not a whole number from 0 to 2**63 - 1")
    return value


def check_list(value: Any, what: str, length: int | None = None) -> list[Any]:
    """Return a list, of a given length if one is named."""
    if not isinstance(value, list):
        raise InvalidValueError(what, rule="it is not a list")
    found: list[Any] = value  # pyright: ignore[reportUnknownVariableType] # mypy knows that it is one
    if length is not None and len(found) != length:
        raise InvalidValueError(what, rule=f"it has {len(found)} entries, and not {length}")
    return found
