"""Numba: arrays over buffers, and an external memory manager that lets Numba's arrays sleep, wake and move.

from remap.integrations import numba as remap_numba
numba.cuda.set_memory_manager(remap_numba.memory_manager("arrays"))     # before the first use of CUDA
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

from remap.buffers.base import allocate
from remap.integrations.support import missing
from remap.locations import device
from remap.residency import group
from remap.spans import Span

try:
    cuda: Any = importlib.import_module("numba.cuda")
except (ImportError, AttributeError) as _error:  # numba-cuda beside a NumPy that is too new for it
    raise missing("numba.cuda", "remap.integrations.numba", _error) from _error


def memory_manager(tag: str, **options: Any) -> type[Any]:
    """Return a class for `numba.cuda.set_memory_manager`: device arrays are buffers of the group of a tag.

    Each array has a granule (2 MiB) at least. Host memory stays Numba's own. Options are those of `remap.allocate`.
    """
    base: Any = cuda.HostOnlyCUDAMemoryManager

    class RemapMemoryManager(base):  # type: ignore[misc]
        """Numba's device memory as buffers of remap (`HostOnlyCUDAMemoryManager`)."""

        interface_version = 1

        def initialize(self) -> None:
            """Do nothing: the driver is opened by its first call."""

        def memalloc(self, size: int) -> Any:
            """Allocate on the device of this manager's context."""
            at = self.context.device.id

            def make() -> Any:
                with group(tag):
                    return allocate(max(size, 1), resident=at, **options)

            buffer = Context().run(make)
            buffer._warns = False  # Numba is its owner
            address = buffer.address
            self.allocations[address] = buffer
            return cuda.MemoryPointer(
                self.context, _pointer(address), size, finalizer=_finalizer(self.allocations, address)
            )

        def get_ipc_handle(self, memory: Any) -> Any:
            """Refuse: legacy IPC handles do not exist for mapped memory."""
            raise NotImplementedError("remap's memory has no legacy IPC handles: use remap.export(buffer)")

        def get_memory_info(self) -> Any:
            """Return free and total memory of the device."""
            found = device(self.context.device.id).memory()
            return cuda.MemoryInfo(free=found.free, total=found.total)

    return RemapMemoryManager


def array(
    buffer: Span, dtype: Any = "uint8", shape: int | Sequence[int] | None = None, *, offset: int = 0
) -> Any:
    """Return memory of a buffer as a Numba array, without a copy. It keeps the buffer alive and open."""
    return cuda.as_cuda_array(buffer.array(dtype, shape, offset=offset))


def _finalizer(allocations: Any, address: int) -> Callable[[], None]:
    def finalize() -> None:
        buffer = allocations.pop(address, None)
        if buffer is not None:
            del buffer  # collected, it is given back by the next call of remap

    return finalize


def _pointer(address: int) -> Any:
    """Return an address as Numba's driver wants it."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    return driver.CUdeviceptr(address)
