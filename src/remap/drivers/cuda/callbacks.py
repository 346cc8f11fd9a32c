"""Host functions: Python functions that the driver calls in the order of a stream."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import threading
import time
from collections.abc import Callable

from remap.drivers.cuda.bindings import cuda, failure
from remap.drivers.powers import call_host_function
from remap.errors import context_lost
from remap.forks import in_child

_waiting: dict[int, tuple[Callable[[], None], bool]] = {}
_tokens = itertools.count(1)


def _called(token: int) -> None:
    # On a thread of the driver's.
    function, again = _waiting[token]
    call_host_function(function)
    if not again:
        del _waiting[token]


# One C function for all of them: it lives as long as the process, and so cannot go while the driver may call it.
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_called)
_CALLED = ctypes.cast(_FUNCTION, ctypes.c_void_p).value


def _let_them_end() -> None:
    """Wait, when the process ends, for functions that are still to be called.

    A thread that is not Python's and comes while Python ends never returns, and with it goes the driver's thread, whose
    end the driver then waits for. Where nobody calls them, as after a fault, there is a limit.
    """
    end, pause = time.monotonic() + _PATIENCE, threading.Event()
    while not context_lost() and time.monotonic() < end:
        if not any(not again for _, again in list(_waiting.values())):
            pause.wait(_RETURN)
            return
        pause.wait(_RETURN)


_PATIENCE = 5.0
_RETURN = 0.002  # seconds in which the driver's thread is back from Python

atexit.register(_let_them_end)
in_child(_waiting.clear)


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
