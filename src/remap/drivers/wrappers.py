"""Two drivers that wrap another: `Recording` writes down every call, `Faulty` lets chosen calls fail.

Both hold the wrapped driver and pass everything on, so that they are what it is: they answer to the same names, hold
the same lock, and have the same optional powers (`SupportsModules`, `SupportsSharing`, …). They stack, too:
`Recording(Faulty(driver))` shows what the rooms above do when a call fails.

Every method is bound once, when the wrapper is made. Rejected: `__getattr__` for methods, which costs a failed look-up
on each call, and which `isinstance` with a protocol no longer sees since Python 3.12.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeAlias

from remap.drivers.protocol import Driver
from remap.errors import CudaResult, DriverError, InvalidValueError, driver_error, refused

_Call: TypeAlias = Callable[..., Any]


if TYPE_CHECKING:
    # The methods of a wrapper are those of an object that only exists at run time: Any as a base says so to checkers.
    _AnyDriver: TypeAlias = Any
else:
    _AnyDriver = object


class _Forwarding(_AnyDriver):  # type: ignore[misc]
    """A driver that passes every call on to `inner`, each through what `_wrap` makes of it."""

    inner: Driver

    def __init__(self, inner: Driver) -> None:
        self.inner = inner
        kind = type(inner)
        for name in dir(inner):
            if name.startswith("_") or isinstance(inspect.getattr_static(kind, name, None), property):
                continue
            call = getattr(inner, name)
            # What a wrapper itself adds stays reachable through another wrapper around it, unwrapped.
            if callable(call) and name not in _OWN_NAMES and name not in _SHORT_CUTS:
                wrapped = self._wrap(name, call)
                wrapped.__name__ = name
                self.__dict__[name] = wrapped

    def _wrap(self, name: str, call: _Call) -> _Call:
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The name of the wrapped driver: a wrapper changes nothing that anyone could ask for."""
        return self.inner.name

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The structural lock of the wrapped driver."""
        return self.inner.lock

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the wrapped driver."""
        if name == "inner" or name in _SHORT_CUTS:  # while unpickling or copying there is nothing to ask yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        """Return the wrapper and what it wraps."""
        return f"<{type(self).__name__} of {self.inner!r}>"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a driver, as it was made and as it ended.

    `error` is the CUDA name of a refusal, or the class of any other error, and None where there was none. `start` and
    `duration` are in nanoseconds of `time.perf_counter_ns`, `thread` is `threading.get_ident()` of the caller.
    """

    name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    result: Any
    error: str | None
    start: int
    duration: int
    thread: int

    def __str__(self) -> str:
        """Return the call as it is written in Python, with its outcome."""
        said = [_show(value) for value in self.arguments]
        said += [f"{key}={_show(value)}" for key, value in self.keywords.items()]
        outcome = self.error or _show(self.result)
        return f"{self.name}({', '.join(said)}) -> {outcome}"


class Recording(_Forwarding):
    """A driver that writes down every call to another one.

    A record keeps the arguments and the result, but never the error itself, whose traceback would keep the caller's
    objects alive. With `limit`, only the newest calls are kept. Costs about half a microsecond a call.
    """

    def __init__(self, inner: Driver, *, limit: int | None = None) -> None:
        self._calls: deque[tuple[Any, ...]] = deque(maxlen=limit)
        super().__init__(inner)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls so far in the order in which they ended."""
        return tuple(Call(*values) for values in self._calls.copy())

    def calls_to(self, *names: str) -> tuple[Call, ...]:
        """Return the calls of the methods `names` so far."""
        return tuple(call for call in self.calls if call.name in names)

    def forget(self) -> None:
        """Drop what was written down so far."""
        self._calls.clear()

    def _wrap(self, name: str, call: _Call) -> _Call:
        append = self._calls.append

        def recorded(*arguments: Any, **keywords: Any) -> Any:
            start = perf_counter_ns()
            try:
                result = call(*arguments, **keywords)
            except BaseException as error:
                duration = perf_counter_ns() - start
                reason = error.name if isinstance(error, DriverError) else type(error).__name__
                append((name, arguments, keywords, None, reason, start, duration, get_ident()))
                raise
            append((name, arguments, keywords, result, None, start, perf_counter_ns() - start, get_ident()))
            return result

        return recorded


class Faulty(_Forwarding):
    """A driver that refuses the calls it is told to, and passes all others on to another one.

    A refused call does not reach the wrapped driver, so it changes nothing, as the protocol asks of every driver. A
    sticky result (ILLEGAL_ADDRESS, …) marks the context as lost for the whole process, as a real one does.
    """

    def __init__(self, inner: Driver) -> None:
        self._plans: list[_Plan] = []
        self._refused: list[str] = []
        self._counting = threading.Lock()
        super().__init__(inner)

    def fail(
        self, *calls: str, nth: int = 1, result: CudaResult = CudaResult.UNKNOWN, repeat: bool = False
    ) -> None:
        """Refuse the `nth` call from now on, counted over `calls`, or over all if none is named.

        A call is a method of the driver, "create", or the CUDA function behind it, "cuMemCreate". `repeat` refuses
        every such call after it as well. Several faults may be planned; each counts by itself. The error says that it
        was injected. Raises `InvalidValueError` for what the driver does not have: it would never strike.
        """
        asked = f"a fault at call {nth} of {', '.join(calls) or 'all'}"
        if nth < 1:
            raise InvalidValueError(asked, rule="faults are counted from 1")
        by_function: dict[str, set[str]] = {}
        for name in self.__dict__:
            by_function.setdefault(CUDA_FUNCTIONS.get(name, name), set()).add(name)
        names: set[str] = set()
        for call in calls:
            found = {call} if call in self.__dict__ else by_function.get(call)
            if not found:
                from difflib import get_close_matches

                near = get_close_matches(call, (*self.__dict__, *by_function), n=1)
                step = (
                    f"Did you mean {near[0]!r}?" if near else "Name a method of remap.drivers.protocol.Driver"
                )
                raise InvalidValueError(asked, rule=f"the driver has no call {call!r}", next_step=step)
            names |= found
        with self._counting:
            self._plans.append(_Plan(frozenset(names), result, repeat, nth))

    def heal(self) -> None:
        """Drop every planned fault, and forget which calls were refused."""
        with self._counting:
            self._plans.clear()
            self._refused.clear()

    @property
    def refused(self) -> tuple[str, ...]:
        """The methods that were refused since the last `heal()`, in order."""
        return tuple(self._refused)

    def _wrap(self, name: str, call: _Call) -> _Call:
        plans = self._plans

        def checked(*arguments: Any, **keywords: Any) -> Any:
            if plans and (result := self._strike(name)) is not None:
                raise _injected(name, result)
            return call(*arguments, **keywords)

        return checked

    def _strike(self, name: str) -> int | None:
        with self._counting:
            due = [plan for plan in self._plans if plan.counts(name)]
            if not due:
                return None
            for plan in due:
                if not plan.repeat:
                    self._plans.remove(plan)
            self._refused.append(name)
        return due[0].result


def _injected(name: str, result: int) -> DriverError:
    """Return the error of a fault. Not made where it is raised: that frame would hold it, and all that it passes."""
    error = driver_error(CUDA_FUNCTIONS.get(name, name), result, rule="a fault that a test asked for")
    error.injected = True
    return refused(error)


@dataclass(eq=False, slots=True)
class _Plan:
    """A fault that is to strike: on which methods (none: all), with what, and after how many more calls."""

    names: frozenset[str]
    result: CudaResult
    repeat: bool
    left: int = field(default=1)

    def counts(self, name: str) -> bool:
        """Count a call of the method `name`, and tell whether it is to fail."""
        if self.names and name not in self.names:
            return False
        self.left -= 1
        return self.left <= 0


# The calls that these return would go past a wrapper, so it does not have them.
_SHORT_CUTS = frozenset({"repeat_launch", "repeat_graph_launch"})

# Nothing of a driver's protocol; `dir()` finds them in a wrapper that is wrapped again.
_OWN_NAMES = frozenset({"inner", "calls", "calls_to", "forget", "fail", "heal", "refused"})

CUDA_FUNCTIONS = {
    "add_multicast_device": "cuMulticastAddDevice",
    "address_range": "cuMemGetAddressRange",
    "advise_managed": "cuMemAdvise",
    "allocate": "cuMemAlloc",
    "allocate_managed": "cuMemAllocManaged",
    "allocate_pinned": "cuMemHostAlloc",
    "begin_capture": "cuStreamBeginCapture",
    "bind_multicast": "cuMulticastBindMem",
    "can_access_peer": "cuDeviceCanAccessPeer",
    "copy": "cuMemcpyDtoDAsync",
    "copy_to_device": "cuMemcpyHtoDAsync",
    "copy_to_host": "cuMemcpyDtoHAsync",
    "create": "cuMemCreate",
    "create_event": "cuEventCreate",
    "create_multicast": "cuMulticastCreate",
    "create_shared_event": "cuEventCreate",
    "create_stream": "cuStreamCreateWithPriority",
    "destroy_event": "cuEventDestroy",
    "destroy_stream": "cuStreamDestroy",
    "device_count": "cuDeviceGetCount",
    "device_pointer": "cuMemHostGetDevicePointer",
    "elapsed": "cuEventElapsedTime",
    "end_capture": "cuStreamEndCapture",
    "event_done": "cuEventQuery",
    "export_event": "cuIpcGetEventHandle",
    "export_handle": "cuMemExportToShareableHandle",
    "fill": "cuMemsetD8Async",
    "free": "cuMemFree",
    "free_managed": "cuMemFree",
    "free_pinned": "cuMemFreeHost",
    "free_range": "cuMemAddressFree",
    "get_access": "cuMemGetAccess",
    "get_function": "cuModuleGetFunction",
    "granularity": "cuMemGetAllocationGranularity",
    "graph_add_allocate": "cuGraphAddMemAllocNode",
    "graph_add_copy": "cuGraphAddMemcpyNode",
    "graph_add_fill": "cuGraphAddMemsetNode",
    "graph_add_free": "cuGraphAddMemFreeNode",
    "graph_add_kernel": "cuGraphAddKernelNode",
    "graph_clone": "cuGraphClone",
    "graph_create": "cuGraphCreate",
    "graph_destroy": "cuGraphDestroy",
    "graph_exec_destroy": "cuGraphExecDestroy",
    "graph_instantiate": "cuGraphInstantiate",
    "graph_launch": "cuGraphLaunch",
    "graph_trim": "cuDeviceGraphMemTrim",
    "graph_update": "cuGraphExecUpdate",
    "graph_upload": "cuGraphUpload",
    "import_event": "cuIpcOpenEventHandle",
    "import_handle": "cuMemImportFromShareableHandle",
    "launch": "cuLaunchKernel",
    "launch_host_function": "cuLaunchHostFunc",
    "load_module": "cuModuleLoadDataEx",
    "map": "cuMemMap",
    "memory_info": "cuMemGetInfo",
    "multicast_granularity": "cuMulticastGetGranularity",
    "pointer_info": "cuPointerGetAttribute",
    "pool_allocate": "cuMemAllocAsync",
    "pool_free": "cuMemFreeAsync",
    "pool_trim": "cuMemPoolTrimTo",
    "prefetch": "cuMemPrefetchAsync",
    "properties_of": "cuMemGetAllocationPropertiesFromHandle",
    "record_event": "cuEventRecord",
    "register_pinned": "cuMemHostRegister",
    "release": "cuMemRelease",
    "reserve": "cuMemAddressReserve",
    "retain": "cuMemRetainAllocationHandle",
    "retain_context": "cuDevicePrimaryCtxRetain",
    "set_access": "cuMemSetAccess",
    "stream_capturing": "cuStreamIsCapturing",
    "stream_done": "cuStreamQuery",
    "synchronize_context": "cuCtxSynchronize",
    "synchronize_event": "cuEventSynchronize",
    "synchronize_stream": "cuStreamSynchronize",
    "unbind_multicast": "cuMulticastUnbind",
    "unload_module": "cuModuleUnload",
    "unmap": "cuMemUnmap",
    "unregister_pinned": "cuMemHostUnregister",
    "wait_event": "cuStreamWaitEvent",
}
"""The CUDA functions behind the methods that tests let fail: an injected error names them as a real one does."""


def _show(value: Any) -> str:
    """Return a value for a reader: large numbers are addresses, long values are cut."""
    if isinstance(value, int) and value > 0xFFFF_FFFF:
        return hex(value)
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
