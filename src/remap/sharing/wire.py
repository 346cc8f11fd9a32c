"""The messages between a broker and its clients: JSON fields, then bytes.

JSON because it is in the standard library of every version, in other languages too, bounded by the size of a message,
and can be read in a trace; the descriptor follows as it is, after a zero byte, which JSON never holds. Rejected:
msgpack and msgspec, a dependency for a few short fields a message, and pickle, which runs what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from remap.errors import (
    AccessError,
    BufferNotFoundError,
    DescriptorError,
    InUseError,
    InvalidValueError,
    RemapError,
    ShareError,
)
from remap.types import Access

VERSION = 1

LONGEST_NAME = 200

LONGEST_WAIT = 24 * 3600.0
"""How many seconds a client may wait for a buffer."""

LONGEST_PATIENCE = 0.1
"""How many seconds an open may take until others have closed. Other threads of the client are kept waiting so long."""

_JSON = json.JSONEncoder(separators=(",", ":"))

_ERRORS: dict[str, type[RemapError]] = {
    kind.__name__: kind
    for kind in (
        AccessError,
        BufferNotFoundError,
        DescriptorError,
        InUseError,
        InvalidValueError,
        ShareError,
    )
}


def encode(fields: Mapping[str, Any], blob: bytes = b"") -> bytes:
    """Return a message."""
    return _JSON.encode(fields).encode() + b"\0" + blob


class Fields:
    """The fields of a message that arrived. Every reader of one checks its type and its bounds."""

    def __init__(self, values: dict[str, object], blob: bytes) -> None:
        self._values = values
        self.blob = blob

    @classmethod
    def decode(cls, message: bytes) -> Fields:
        """Take a message apart; raises `ShareError` for what is none."""
        head, separator, blob = message.partition(b"\0")
        try:
            values: object = json.loads(head)
        except (ValueError, RecursionError) as error:
            raise ShareError("a message", rule=f"its fields are not JSON: {error}") from None
        if not separator or not isinstance(values, dict):
            raise ShareError("a message", rule="it is not made of fields and bytes")
        return cls(cast("dict[str, object]", values), blob)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a field that is text of at most 1000 characters."""
        value = self._values.get(name, default)
        if not isinstance(value, str) or len(value) > 1000:
            raise ShareError(f"the field {name}", rule="it must be text")
        return value

    def number(self, name: str, most: float, default: float | None = None) -> float:
        """Return a field that is a number from 0 to `most`."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise ShareError(f"the field {name}", rule=f"it must be a number from 0 to {most}")
        return value

    def flag(self, name: str) -> bool:
        """Return a field that is true or false, false if it is not there."""
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            raise ShareError(f"the field {name}", rule="it must be true or false")
        return value

    def access(self, name: str, default: Access | None = None) -> Access:
        """Return a field that is a right."""
        try:
            return Access.parse(self.text(name, default))
        except InvalidValueError as error:
            raise ShareError(f"the field {name}", rule=error.rule) from None

    def value(self, name: str) -> Any:
        """Return a field as it came. Only clients read those, and they trust their broker."""
        return self._values.get(name)

    def items(self, name: str) -> list[dict[str, Any]]:
        """Return a field that is a list of objects. Only clients read those, and they trust their broker."""
        value = self._values.get(name, [])
        if not isinstance(value, list):
            raise ShareError(f"the field {name}", rule="it must be a list")
        return [cast("dict[str, Any]", one) for one in cast("list[object]", value) if isinstance(one, dict)]

    @property
    def failed(self) -> bool:
        """Whether the message carries an error."""
        return bool(self.text("error", ""))

    def raise_error(self) -> None:
        """Raise the error that the message carries, if it carries one."""
        kind = self.text("error", "")
        if kind:
            made = _ERRORS.get(kind, ShareError)
            raise made(self.text("asked", ""), rule=self.text("rule", ""), next_step=self.text("next", ""))


def error_fields(error: RemapError) -> dict[str, str]:
    """Return the fields by which `raise_error` raises the same error at the other end."""
    kind = next((name for name, one in _ERRORS.items() if type(error) is one), "ShareError")
    parts = {"asked": error.asked, "rule": error.rule, "next": error.next_step}
    return {"error": kind, **{name: part[:1000] for name, part in parts.items()}}


def check_version(request: Fields) -> None:
    """Raise `ShareError` unless a client speaks as this broker does."""
    version = request.number("version", 1 << 16)
    if version != VERSION:
        raise ShareError(
            f"a client of version {version:g}",
            rule=f"this broker speaks version {VERSION}",
            next_step="Use the same release of remap at both ends",
        )


def check_name(name: str) -> str:
    """Return the name of a buffer; raises `InvalidValueError` for an empty, long or unprintable one."""
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise InvalidValueError(
            f"a buffer named {name[:40]!r}",
            rule=f"a name has 1 to {LONGEST_NAME} printable characters",
        )
    return name


@dataclass(frozen=True, slots=True)
class NamedBuffer:
    """What a broker says of a buffer: its size in bytes, where it lies, and which processes have it open."""

    name: str
    size: int
    chunks: int
    locations: tuple[str, ...]
    driver: str
    identity: bytes
    since: float
    writer: int | None
    readers: tuple[int, ...]
    open: int


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """What a broker says of itself; `survives_restart` tells whether a service manager keeps its buffers.

    The connection that asks is one of the `clients`.
    """

    process: int
    path: str
    started: float
    clients: int
    waiting: int
    requests: int
    buffers: int
    bytes: int
    survives_restart: bool
