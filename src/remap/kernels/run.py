"""Run a Python kernel on the host driver: batch by batch, with everything watched that a GPU does not tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from remap.kernels import ir
from remap.kernels.arguments import View
from remap.kernels.batch import Batch, Memory
from remap.kernels.frame import Frame
from remap.kernels.ir import Array
from remap.kernels.overlap import Part
from remap.kernels.shadows import GridShadow
from remap.kernels.structures import as_record

if TYPE_CHECKING:
    from remap.drivers.protocol import HostLaunch

# The threads that run together: enough to make Python's own share small, few enough for the caches.
_LANES = 1 << 17
_LANES_OF_BLOCKS = 1 << 14  # the same where blocks have shared memory, which takes more room

# glibc takes a large block from the system anew each time, until it saw one of that size freed (mallopt(3), on
# M_MMAP_THRESHOLD). The values of a batch are such blocks, and fresh pages cost more than the arithmetic.
np.empty(8 << 20, np.uint8)

Parts = dict[str, list[Part]]
"""For arrays that are watched since they share memory: the bytes of allocations behind each, by name."""


class HostRun:
    """One launch: what the host driver calls on the stream's thread."""

    def __init__(
        self,
        kernel: ir.Kernel,
        function: Callable[..., None],
        values: Sequence[Any],
        captured: Sequence[Any],
        shared_parts: Parts,
    ) -> None:
        self.__qualname__ = kernel.name
        self._kernel = kernel
        self._function = function
        self._values = values
        self._captured = captured
        self._shared_parts = shared_parts

    def __call__(self, launch: HostLaunch) -> None:
        """Run all threads of the grid."""
        kernel, config = self._kernel, launch.config
        memories = self._memories(launch)
        values = [
            _lane_value(one, kind) for one, (_, kind) in zip(self._values, kernel.parameters, strict=True)
        ]
        arguments = [
            memories.get(name, value) for value, (name, _) in zip(values, kernel.parameters, strict=True)
        ]
        captured = [
            _lane_value(one, kind) for one, (_, _, kind) in zip(self._captured, kernel.captured, strict=True)
        ]
        threads, blocks = math.prod(config.block), math.prod(config.grid)
        lanes = (
            _LANES_OF_BLOCKS if kernel.has_barrier or kernel.static_shared or kernel.dynamic_align else _LANES
        )
        step = max(lanes // threads, 1)
        with np.errstate(all="ignore"):
            for first in range(0, blocks, step):
                batch = Batch(
                    kernel.name, kernel.file, config.grid, config.block, first, min(step, blocks - first)
                )
                self._function(Frame(batch), *arguments, *captured, config.shared_bytes)

    def _memories(self, launch: HostLaunch) -> dict[str, Memory]:
        kernel, found = self._kernel, dict[str, Memory]()
        for (name, kind), view in zip(kernel.parameters, self._values, strict=True):
            if not isinstance(kind, Array):
                continue
            assert isinstance(view, View)
            writable = kind.kind == "disjoint"
            data = _data(launch, view, writable)
            memory = Memory(name[2:], data, view.shape, len(data), view.address, writable=writable)
            space = kernel.spaces.get(name)
            # All threads of a warp have one index, with which one of them writes.
            if name in kernel.unchecked or (space is not None and space.kind == "warp"):
                memory.shadow = GridShadow(len(data))
            found[name] = memory
        _watch(found, self._shared_parts)
        return found


def _data(launch: HostLaunch, view: View, writable: bool) -> Any:
    size = math.prod(view.shape) * view.dtype.itemsize
    if view.host is not None:
        return view.host.reshape(-1)
    if size == 0:
        return np.empty(0, view.dtype)
    memory = launch.write(view.address, size) if writable else launch.read(view.address, size)
    return np.frombuffer(memory, view.dtype)


def _watch(memories: dict[str, Memory], parts: Parts) -> None:
    """Let arrays that share physical memory share one shadow, with a unit for the bytes that they divide alike."""
    if not parts:
        return
    unit = math.gcd(*(memories[name].data.itemsize for name in parts))
    unit = math.gcd(unit, *(part.start for several in parts.values() for part in several))
    bases: dict[object, int] = {}
    total = 0
    for several in parts.values():
        for part in several:
            # A base for each allocation, of its own extent: what lies before the arrays costs no memory, only numbers.
            if part.identity not in bases:
                extent = max(
                    one.stop for all_ in parts.values() for one in all_ if one.identity == part.identity
                )
                bases[part.identity] = total
                total += -(-extent // unit)
    shadow = GridShadow(total)
    tags = {name: number for number, name in enumerate(parts)}
    for name, several in parts.items():
        memory = memories[name]
        size = memory.data.itemsize
        memory.shadow, memory.scale, memory.tag = shadow, size // unit, tags[name] + 1
        if len(several) == 1:
            memory.units = bases[several[0].identity] + several[0].start // unit
        else:
            memory.units = np.concatenate(
                [
                    bases[part.identity] + np.arange(part.start, part.stop, size, dtype=np.int64) // unit
                    for part in several
                ]
            )


def _lane_value(value: Any, kind: ir.Type) -> Any:
    if isinstance(kind, ir.Scalar):
        return kind.dtype.type(value)
    if isinstance(kind, ir.Record):
        return as_record(value, kind.dtype) if kind.dtype.itemsize else None
    return value
