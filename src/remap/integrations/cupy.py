"""CuPy: arrays over buffers, and an allocator whose memory sleeps, wakes and moves under CuPy's arrays.

from remap.integrations import cupy as remap_cupy
with remap_cupy.allocator("arrays"):            # a context manager, or cupy.cuda.set_allocator(...) for good
    x = cupy.zeros(1 << 20)
remap.pause("arrays"); remap.resume("arrays")
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import Context
from typing import Any

from remap.buffers.base import allocate
from remap.integrations.support import missing
from remap.residency import group
from remap.spans import Span

try:
    cupy: Any = importlib.import_module("cupy")
except ImportError as _error:
    raise missing("cupy", "remap.integrations.cupy", _error) from _error


class Allocator:
    """What `cupy.cuda.set_allocator` takes: each call is a buffer of the group of a tag.

    A buffer has a granule (2 MiB) at least, so let CuPy's own pool divide them: `allocator(tag)` does. The device is
    the current one. Memory that CuPy lets go is given back by the next call that opens or closes something of remap's.
    """

    def __init__(self, tag: str, **options: Any) -> None:
        self.tag = tag
        self._options = options

    def __call__(self, size: int) -> Any:
        """Allocate; running out is CuPy's `OutOfMemoryError`."""
        at = cupy.cuda.Device().id
        if not size:
            return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, self, at), 0)

        def make() -> Any:
            with group(self.tag):
                return allocate(size, resident=at, **self._options)

        try:
            buffer = Context().run(make)
        except MemoryError as error:
            total = cupy.cuda.runtime.memGetInfo()[1]
            raise cupy.cuda.memory.OutOfMemoryError(size, total) from error
        buffer._warns = False  # CuPy is its owner
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(buffer.address, buffer.size, buffer, at), 0)


def pool(tag: str, **options: Any) -> Any:
    """Return a `cupy.cuda.MemoryPool` whose memory is buffers of a group; options are those of `remap.allocate`."""
    return cupy.cuda.MemoryPool(Allocator(tag, **options))


@contextmanager
def allocator(tag: str, **options: Any) -> Generator[Any]:
    """Let CuPy's allocations of this thread come from a pool of a group for a block; yields the pool."""
    found = pool(tag, **options)
    with cupy.cuda.using_allocator(found.malloc):
        yield found


def array(
    buffer: Span, dtype: Any = "uint8", shape: int | Sequence[int] | None = None, *, offset: int = 0
) -> Any:
    """Return memory of a buffer as a CuPy array, without a copy. It keeps the buffer alive and open."""
    return cupy.asarray(buffer.array(dtype, shape, offset=offset))
