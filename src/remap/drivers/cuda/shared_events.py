"""Events that other processes can wait for."""

from __future__ import annotations

import ctypes
from typing import Any

from remap.drivers.cuda.bindings import cuda, failure
from remap.errors import CudaResult, driver_error

_INTERPROCESS = 2 | 4  # CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS; the second demands the first
_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


class SharedEventCalls:
    """`SupportsSharedEvents` of the CUDA driver; it keeps no state."""

    def create_shared_event(self) -> int:
        err, event = cuda.cuEventCreate(_INTERPROCESS)
        if err:
            raise failure("cuEventCreate", err, asked="create an event for several processes")
        return int(event)

    def export_event(self, event: int) -> bytes:
        err, handle = cuda.cuIpcGetEventHandle(event)
        if err:
            wrong = err in (CudaResult.INVALID_VALUE, CudaResult.INVALID_HANDLE)
            rule = "it was not created for several processes" if wrong else ""
            raise failure("cuIpcGetEventHandle", err, asked="export an event", rule=rule)
        return bytes(_content(handle))

    def import_event(self, shareable: bytes) -> int:
        # The driver would read 64 bytes whatever was given, and this comes from another process (invariant 11).
        if len(shareable) != _HANDLE_BYTES:
            asked, rule = "import an event", f"an event's handle is {_HANDLE_BYTES} bytes"
            raise driver_error("cuIpcOpenEventHandle", CudaResult.INVALID_VALUE, asked=asked, rule=rule)
        handle = cuda.CUipcEventHandle()
        _content(handle)[:] = shareable
        err, event = cuda.cuIpcOpenEventHandle(handle)
        if err:
            raise failure("cuIpcOpenEventHandle", err, asked="import an event")
        return int(event)


def _content(handle: Any) -> Any:
    """Return the bytes of a `CUipcEventHandle`, whose only field not all versions of the bindings name."""
    return (ctypes.c_char * _HANDLE_BYTES).from_address(int(handle.getPtr()))
