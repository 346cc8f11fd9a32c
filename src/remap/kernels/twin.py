"""Twins: Python functions that stand for a compiled kernel on the host driver."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from remap.kernels.params import Address

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from remap.drivers.protocol import HostLaunch

Twin: TypeAlias = Callable[..., object]
"""A function of the launch and the kernel's arguments, in which each address is a `Pointer`."""


class Pointer:
    """An address that a kernel was given, as its Python twin sees it: memory of the device that runs the launch.

    Arrays are views straight over that memory. An address that is unmapped there, or that the device may not touch
    so, faults the launch as it would on a GPU.
    """

    __slots__ = ("_launch", "address")

    def __init__(self, launch: HostLaunch, address: int) -> None:
        self._launch = launch
        self.address = address

    def read(self, dtype: DTypeLike, shape: int | Sequence[int], offset: int = 0) -> NDArray[Any]:
        """Return a read-only array over this memory; `offset` is in bytes."""
        kind, count = np.dtype(dtype), _count(shape)
        if count == 0:
            return np.empty(shape, kind)
        memory = self._launch.read(self.address + offset, count * kind.itemsize)
        return np.frombuffer(memory, kind).reshape(shape)

    def write(self, dtype: DTypeLike, shape: int | Sequence[int], offset: int = 0) -> NDArray[Any]:
        """Return an array over this memory that can be written; `offset` is in bytes."""
        kind, count = np.dtype(dtype), _count(shape)
        if count == 0:
            return np.empty(shape, kind)
        memory = self._launch.write(self.address + offset, count * kind.itemsize)
        return np.frombuffer(memory, kind).reshape(shape)

    def __int__(self) -> int:
        """Return the address."""
        return self.address

    def __repr__(self) -> str:
        """Return the address."""
        return f"<Pointer {self.address:#x}>"


def runner(twin: Twin, name: str) -> Callable[[HostLaunch], None]:
    """Return what the host driver calls for a launch of `twin`; `name` is the kernel's, for messages."""

    def run(launch: HostLaunch) -> None:
        twin(launch, *(Pointer(launch, v) if isinstance(v, Address) else v for v in launch.arguments))

    run.__qualname__ = name
    return run


def _count(shape: int | Sequence[int]) -> int:
    return shape if isinstance(shape, int) else math.prod(shape)
