"""The same launch again: what was checked once for some arrays, a stream and a shape need not be checked again.

A program launches its kernels on the same arrays over and over, and a launch should cost little more than the driver's
own call. So the last launch of each kernel on some arrays is kept, packed, with what its checks depended on: whatever
has changed since sends the launch back to the checks. Arrays are known by their identity, and forgotten when they go,
so that nothing is kept alive.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from remap.arrays import DeviceArray
from remap.kernels.loaded import Loaded
from remap.kernels.params import Arguments
from remap.lifetime import epoch
from remap.spans import Span
from remap.streams import Queue, Stream
from remap.types import LaunchConfig, Touched

Shape: TypeAlias = tuple[Any, Any, Any, bool]
"""Grid, block, dynamic shared memory, and whether arguments may overlap."""

Packed: TypeAlias = tuple[int, type, struct.Struct, int]
"""A number among the arguments: its place, its type, how it is packed, and where."""


class Again:
    """A launch that was made once, and can be made again."""

    __slots__ = (
        "_all",
        "_arguments",
        "_call",
        "_config",
        "_context",
        "_current_context",
        "_epoch",
        "_function",
        "_handle",
        "_key",
        "_lock",
        "_packing",
        "_queue",
        "_references",
        "_scalars",
        "_spans",
        "_stream",
        "_touches",
        "shape",
    )

    def __init__(
        self,
        loaded: Loaded,
        shape: Shape,
        config: LaunchConfig,
        queue: Queue,
        packed: Arguments,
        function: Any,
        touches: list[Touched] | None,
        scalars: Sequence[Packed],
        references: Sequence[weakref.ref[Any]],
    ) -> None:
        device = queue.device
        self.shape = shape
        self._references = references  # a weak reference calls only while it lives itself
        self._stream = queue.owner if isinstance(queue.owner, Stream) else None
        self._current_context = device._driver.current_context
        self._call = device._driver.launch
        self._handle = queue.handle
        self._context = device._context
        self._lock = device._driver.lock
        self._epoch = epoch()
        self._function = function
        self._config = config
        self._queue = queue
        self._key = (device.index, queue.handle)
        self._arguments = packed
        self._touches = touches
        self._scalars = scalars
        self._packing = threading.Lock()
        self._all = tuple(dict.fromkeys(packed.spans))
        # Rights are changed by putting another table in their place, and what stands behind a buffer by counting on.
        self._spans: tuple[tuple[Any, Any, tuple[int, str] | None], ...] = tuple(
            (span, span._rights, _version(span)) for span in self._all
        )
        loaded.module._uses.add(queue)

    def go(self, given: tuple[Any, ...]) -> bool:
        """Launch, if nothing has changed that the checks depended on; else return False, and nothing has happened."""
        if not self._scalars:
            return self._launch()
        # The numbers are put into the one copy of the arguments, so that one thread at a time can do this.
        if not self._packing.acquire(blocking=False):
            return False
        try:
            return self._pack(given) and self._launch()
        finally:
            self._packing.release()

    def _launch(self) -> bool:
        stream, lock = self._stream, self._lock
        if (stream is not None and not stream._open) or self._epoch != epoch():
            return False
        begun = 0
        with lock:
            for span, rights, version in self._spans:
                if span._rights is not rights or not span._open or span._taken or span._arriving is not None:
                    break
                if version is not None and version != (span.generation, span._paused):
                    break
                span._busy += 1
                begun += 1
            else:
                begun = -1
        if begun >= 0:
            self._end(self._all[:begun])
            return False
        try:
            # Where another context is current, the way with all checks makes the right one current.
            if self._current_context() != self._context:
                return False
            self._call(self._function, self._config, self._handle, self._arguments, self._touches)
            key, queue = self._key, self._queue
            for span in self._all:
                uses = span._known_uses
                (span._uses if uses is None else uses)._streams[key] = queue
        finally:
            with lock:
                for span in self._all:
                    span._busy -= 1
        return True

    def _pack(self, given: tuple[Any, ...]) -> bool:
        content = self._arguments.content
        for index, kind, layout, offset in self._scalars:
            value = given[index]
            if type(value) is not kind:
                return False
            try:
                layout.pack_into(content, offset, value)
            except struct.error:  # it does not fit, which the checks will say
                return False
        return True

    def _end(self, spans: Sequence[Span]) -> None:
        with self._lock:
            for span in spans:
                span._busy -= 1


def _version(span: Any) -> tuple[int, str] | None:
    """Return what changes with what stands behind a buffer; None for memory that stays what it is."""
    generation = getattr(span, "generation", None)
    return None if generation is None else (generation, span._paused)


def references_to(things: Sequence[Any], forget: Callable[[], object]) -> list[weakref.ref[Any]]:
    """Return weak references that call `forget` as soon as one of the things goes."""

    def gone(_: object) -> None:
        forget()

    return [weakref.ref(thing, gone) for thing in things if thing is not None]


def can_repeat(arrays: Sequence[Any]) -> bool:
    """Tell whether launches on these arrays can be kept: all are ours, and no memory has parts that differ."""
    plain: object = Span._check_part
    return all(
        isinstance(one, DeviceArray) and getattr(type(one.owner), "_check_part", None) is plain
        for one in arrays
    )
