"""Where typed buffers take their memory from: plain allocations, mapped memory, or memory that is handed in (A8).

Plain memory (`cuMemAlloc`) packs small pieces together; mapped memory is made of whole granules, and can be given
rights, shared, paused and moved. So the default is plain below one granule and mapped above it, and mapped always
within `mapped_only()`, where what is allocated is to be paused or moved later.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Literal, TypeAlias

from remap.blocks import Noted, noted
from remap.buffers.base import allocate
from remap.buffers.placement import place
from remap.buffers.plain import allocate_plain
from remap.errors import InvalidValueError
from remap.locations import Device
from remap.sizes import format_size
from remap.spans import Span
from remap.types import Access

Source: TypeAlias = Literal["plain", "mapped"] | Span | None
"""What is taken as a source: a kind of memory, memory itself (its first bytes are used), or None for the default."""

_mapped_only: ContextVar[Noted[bool]] = ContextVar("remap_mapped_only", default=())
"""The blocks of `mapped_only` that this context is in."""


def mapped_only() -> AbstractContextManager[None]:
    """Let buffers that name no source take mapped memory, whatever their size. Groups use it."""
    return noted(_mapped_only, True)


def take(size: int, at: Device, source: Source) -> tuple[Span, bool]:
    """Return memory of at least `size` bytes, and whether it was allocated for this."""
    if isinstance(source, Span):
        source._check()
        if source.size < size:
            rule = f"it has {format_size(source.size)}"
            raise InvalidValueError(f"{format_size(size)} in {source.describe()}", rule=rule)
        return source, False
    if source not in (None, "plain", "mapped"):
        raise InvalidValueError(f"source {source!r}", rule='a source is "plain", "mapped" or memory of remap')
    if source is None and size:
        source = "mapped" if any(_mapped_only.get()) or size >= _granule(at) else "plain"
    if source == "mapped":
        return allocate(size, resident=at), True
    return allocate_plain(size, at=at), True


def _granule(at: Device) -> int:
    return place(at._driver, at, None, Access.READ_WRITE, None, False, False).granule
