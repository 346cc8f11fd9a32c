"""Host functions: Python functions that the driver calls in the order of a stream."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

from remap.drivers.cuda.bindings import cuda, failure
from remap.drivers.powers import call_host_function

_waiting: dict[int, tuple[Callable[[], None], bool]] = {}
_tokens = itertools.count(1)


def _called(token: int) -> None:
    # On a thread of the driver's.
    function, again = _waiting[token]
    if not again:
        del _waiting[token]
    call_host_function(function)


# One C function for all of them: it lives as long as the process, and so cannot go while the driver may call it.
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_called)
_CALLED = ctypes.cast(_FUNCTION, ctypes.c_void_p).value


class HostFunctionCalls:
    """`SupportsHostFunctions` of the CUDA driver."""

    def launch_host_function(self, stream: int, function: Callable[[], None]) -> None:
        err, captured = cuda.cuStreamIsCapturing(stream)
        if err:
            raise failure("cuStreamIsCapturing", err, asked="queue a host function")
        # In a graph it may be called any number of times, and nobody says when the last one has been.
        token = next(_tokens)
        _waiting[token] = function, bool(captured)
        (err,) = cuda.cuLaunchHostFunc(stream, _CALLED, token)
        if err:
            del _waiting[token]
            raise failure("cuLaunchHostFunc", err, asked="queue a host function")
