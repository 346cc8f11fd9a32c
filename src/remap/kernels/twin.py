"""Twins: Python functions that stand for a compiled kernel on the host driver."""

from __future__ import annotations

import inspect
import math
import operator
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from remap.errors import ContextLostError, KernelError
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


def runner(twin: Twin, name: str, count: int | None = None) -> Callable[[HostLaunch], None]:
    """Return what the host driver calls for a launch of `twin`; `name` is the kernel's, for messages.

    `count` is the number of the kernel's parameters, where it is known: raises `TypeError` for a twin that does not
    take as many. What a twin raises becomes a `KernelError`, which the next wait raises: a mistake in Python has not
    touched the context. An address that the device may not use loses it, as on a GPU.
    """
    if count is not None:
        _check_count(twin, name, count)

    def run(launch: HostLaunch) -> None:
        given = [Pointer(launch, v) if isinstance(v, Address) else v for v in launch.arguments]
        try:
            twin(launch, *given)
        except (ContextLostError, KernelError):
            raise
        except Exception as error:
            raise KernelError(
                f"kernel {name}",
                rule=f"its Python twin raised {type(error).__name__}: {error} ({_line_of(twin, error)})",
                next_step="Mend the function that @kernel.host registers; memory and context are intact",
            ) from error

    run.__qualname__ = name
    return run


def _check_count(twin: Twin, name: str, count: int) -> None:
    try:
        signature = inspect.signature(twin)
    except (TypeError, ValueError):  # a builtin that does not tell
        return
    try:
        signature.bind(*[None] * (count + 1))
    except TypeError:
        said = f"takes {signature}" if signature.parameters else "takes nothing"
        raise TypeError(
            f"the Python twin of kernel {name} is called with the launch and the kernel's {count} arguments, and "
            f"{getattr(twin, '__qualname__', twin)} {said}"
        ) from None


def _line_of(twin: Twin, error: BaseException) -> str:
    """Return the file and line of a twin where it raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(twin, "__code__", None)
    own = [one for one in frames if code is not None and one.filename == code.co_filename] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"


def _count(shape: int | Sequence[int]) -> int:
    extents = shape if isinstance(shape, Sequence) else (shape,)
    return math.prod(map(operator.index, extents))
