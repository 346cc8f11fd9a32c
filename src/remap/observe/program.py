"""A recorded run as a program of plain driver calls: what is called, with which names for which handles and addresses.

Written once for both languages; `Writer` says how each spells it. What a trace does not hold is a comment: the code
and arguments of kernels, calls that were refused, and what was made before the trace began. Queries are left out, and
contexts are made current where a call needs one and not where the run happened to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from remap.errors import InvalidValueError, RemapError
from remap.observe.chrome import ReadCall, ReadTrace

Argument: TypeAlias = str | int


class Writer(Protocol):
    """How one language spells a program."""

    def call(self, function: str, arguments: list[Argument], made: tuple[str, str] | None = None) -> None:
        """Write a checked call; `made` is the C type and the name of what it returns."""
        ...

    def comment(self, text: str) -> None:
        """Write a remark."""
        ...

    def memory(self, properties: dict[str, Any]) -> str:
        """Return an expression for the properties of an allocation."""
        ...

    def rights(self, address: str, size: int, grants: list[Any]) -> None:
        """Write cuMemSetAccess for locations and their rights."""
        ...

    def host(self, size: int) -> str:
        """Return an expression for host memory of at least `size` bytes, whose contents do not matter."""
        ...

    def text(self) -> str:
        """Return the whole program."""
        ...


class UnknownError(RemapError):
    """A call names something that was made before the trace began."""


class Program:
    """Turns calls into statements, and remembers the name of everything that they make."""

    def __init__(self, writer: Writer, trace: ReadTrace) -> None:
        self.write = writer
        self._names: dict[tuple[str, int], str] = {}
        self._count: dict[str, int] = {}
        self._ranges: list[tuple[int, int, str]] = []
        self._contexts: dict[int, int] = dict(trace.contexts)  # handle: device
        self._made: set[int] = set()
        self._current: dict[int, list[int]] = {}
        self._now = -1
        self._steps: dict[str, Callable[..., None]] = {
            name[len("_do_") :]: getattr(self, name) for name in dir(self) if name.startswith("_do_")
        }

    def run(self, calls: tuple[ReadCall, ...]) -> None:
        """Write every call; one that another call of the driver made is part of that one."""
        ends: dict[int, float] = {}
        for call in calls:
            if call.start < ends.get(call.thread, -1.0):
                continue
            if self._take(call):
                ends[call.thread] = call.start + call.duration

    def _take(self, call: ReadCall) -> bool:
        step = self._steps.get(call.method)
        if step is None:
            if call.method not in _QUERIES:
                self._remark(call, ": not shown as a call")
            return call.method not in _QUERIES
        if call.error:
            self._remark(call, f" was refused: {call.error}")
            return True
        try:
            step(call, *call.arguments)
        except UnknownError:
            self._remark(call, ": of what was made before the trace began")
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidValueError(
                f"call of {call.method} in the trace",
                rule=f"its arguments are not what that call takes ({error})",
            ) from error
        return True

    def _remark(self, call: ReadCall, text: str) -> None:
        """Write a remark about a call; whatever the trace holds, it stays one line that nothing ends early."""
        clean = "".join(letter if letter.isprintable() else "?" for letter in f"{_said(call)}{text}")
        self.write.comment(clean.replace("*/", "* /").replace("/*", "/ *"))

    # -- names --

    def _new(self, kind: str, letter: str, value: Any) -> str:
        number = self._count.get(letter, 0)
        self._count[letter] = number + 1
        self._names[kind, int(value)] = name = f"{letter}{number}"
        return name

    def _name(self, kind: str, value: int) -> str:
        try:
            return self._names[kind, int(value)]
        except KeyError:
            raise UnknownError(f"{kind} {value}") from None

    def _range(self, address: int, size: int, letter: str) -> str:
        name = self._new("address", letter, address)
        at = bisect_right(self._ranges, (address, 0, ""))
        self._ranges.insert(at, (int(address), int(size), name))
        return name

    def _address(self, value: int) -> str:
        at = bisect_right(self._ranges, (int(value), 1 << 64, "")) - 1
        if at < 0 or value >= self._ranges[at][0] + self._ranges[at][1]:
            raise UnknownError(f"address {value:#x}")
        start, _, name = self._ranges[at]
        return name if value == start else f"{name} + {value - start:#x}"

    def _gone(self, address: int) -> None:
        self._ranges = [entry for entry in self._ranges if entry[0] != address]

    def _stream(self, handle: int) -> Argument:
        return _DEFAULT_STREAMS[handle] if 0 <= handle <= 2 else self._name("stream", handle)

    # -- contexts --

    def _here(self, call: ReadCall) -> None:
        """Make the context current that was current for the thread of a call."""
        stack = self._current.get(call.thread)
        if not stack or stack[-1] not in self._contexts:
            raise UnknownError("context")
        device = self._contexts[stack[-1]]
        self._retain(device)
        if self._now != device:
            self.write.call("cuCtxSetCurrent", [f"ctx{device}"])
            self._now = device

    def _retain(self, device: int) -> None:
        if device not in self._made:
            self._made.add(device)
            self.write.call("cuDevicePrimaryCtxRetain", [int(device)], ("CUcontext", f"ctx{int(device)}"))

    def _do_retain_context(self, call: ReadCall, device: int) -> None:
        self._contexts[int(call.result)] = int(device)
        self._retain(device)

    def _do_current_context(self, call: ReadCall) -> None:
        if call.result:
            self._current.setdefault(call.thread, []).clear()
            self._current[call.thread].append(int(call.result))

    def _do_push_context(self, call: ReadCall, context: int) -> None:
        self._current.setdefault(call.thread, []).append(int(context))

    def _do_pop_context(self, call: ReadCall) -> None:
        if self._current.get(call.thread):
            self._current[call.thread].pop()

    def _do_synchronize_context(self, call: ReadCall) -> None:
        self._here(call)
        self.write.call("cuCtxSynchronize", [])

    # -- physical memory, addresses, mappings, rights --

    def _do_create(self, call: ReadCall, size: int, properties: dict[str, Any]) -> None:
        place = str(properties["location"])
        if place.startswith("device "):
            self._retain(int(place[7:]))
        asked = self.write.memory(properties)
        name = self._new("memory", "mem", call.result)
        self.write.call("cuMemCreate", [int(size), asked, 0], ("CUmemGenericAllocationHandle", name))

    def _do_retain(self, call: ReadCall, address: int) -> None:
        where = self._address(address)
        name = self._new("memory", "mem", call.result)
        self.write.call(
            "cuMemRetainAllocationHandle", [f"(void *)({where})"], ("CUmemGenericAllocationHandle", name)
        )

    def _do_release(self, call: ReadCall, handle: int) -> None:
        self.write.call("cuMemRelease", [self._name("memory", handle)])

    def _do_reserve(self, call: ReadCall, size: int, alignment: int = 0, hint: int = 0) -> None:
        name = self._range(call.result, size, "va")
        self.write.call("cuMemAddressReserve", [int(size), int(alignment), 0, 0], ("CUdeviceptr", name))

    def _do_free_range(self, call: ReadCall, address: int, size: int) -> None:
        self.write.call("cuMemAddressFree", [self._address(address), int(size)])
        self._gone(address)

    def _do_map(self, call: ReadCall, address: int, size: int, handle: int, offset: int = 0) -> None:
        arguments: list[Argument] = [
            self._address(address),
            int(size),
            int(offset),
            self._name("memory", handle),
            0,
        ]
        self.write.call("cuMemMap", arguments)

    def _do_unmap(self, call: ReadCall, address: int, size: int) -> None:
        self.write.call("cuMemUnmap", [self._address(address), int(size)])

    def _do_set_access(self, call: ReadCall, address: int, size: int, grants: list[Any]) -> None:
        self.write.rights(self._address(address), int(size), grants)

    # -- plain, pinned, managed and pool memory --

    def _take_memory(
        self, call: ReadCall, function: str, size: int, letter: str, rest: list[Argument]
    ) -> None:
        self._here(call)
        kind = "CUdeviceptr"
        self.write.call(function, [int(size), *rest], (kind, self._range(call.result, size, letter)))

    def _give_back(self, call: ReadCall, function: str, address: int, rest: list[Argument]) -> None:
        where = self._address(address)
        self._here(call)
        self.write.call(function, [where, *rest])
        self._gone(address)

    def _do_allocate(self, call: ReadCall, size: int) -> None:
        self._take_memory(call, "cuMemAlloc", size, "plain", [])

    def _do_free(self, call: ReadCall, address: int) -> None:
        self._give_back(call, "cuMemFree", address, [])

    def _do_allocate_managed(self, call: ReadCall, size: int) -> None:
        self._take_memory(call, "cuMemAllocManaged", size, "managed", ["CU_MEM_ATTACH_GLOBAL"])

    def _do_free_managed(self, call: ReadCall, address: int) -> None:
        self._give_back(call, "cuMemFree", address, [])

    def _do_pool_allocate(self, call: ReadCall, size: int, stream: int) -> None:
        queue = self._stream(stream)
        self._take_memory(call, "cuMemAllocAsync", size, "pooled", [queue])

    def _do_pool_free(self, call: ReadCall, address: int, stream: int) -> None:
        self._give_back(call, "cuMemFreeAsync", address, [self._stream(stream)])

    # -- copies and fills --

    def _do_copy_to_device(self, call: ReadCall, address: int, source: int, size: int, stream: int) -> None:
        where, queue = self._address(address), self._stream(stream)
        self._here(call)
        self.write.call("cuMemcpyHtoDAsync", [where, self.write.host(size), int(size), queue])

    def _do_copy_to_host(self, call: ReadCall, target: int, address: int, size: int, stream: int) -> None:
        where, queue = self._address(address), self._stream(stream)
        self._here(call)
        self.write.call("cuMemcpyDtoHAsync", [self.write.host(size), where, int(size), queue])

    def _do_copy(self, call: ReadCall, target: int, source: int, size: int, stream: int) -> None:
        to, origin, queue = self._address(target), self._address(source), self._stream(stream)
        self._here(call)
        self.write.call("cuMemcpyDtoDAsync", [to, origin, int(size), queue])

    def _do_fill(self, call: ReadCall, address: int, value: int, width: int, count: int, stream: int) -> None:
        where, queue = self._address(address), self._stream(stream)
        self._here(call)
        self.write.call(f"cuMemsetD{8 * int(width)}Async", [where, int(value), int(count), queue])

    # -- streams and events --

    def _do_create_stream(self, call: ReadCall, nonblocking: bool = True, priority: int = 0) -> None:
        self._here(call)
        flags = "CU_STREAM_NON_BLOCKING" if nonblocking else "CU_STREAM_DEFAULT"
        name = self._new("stream", "stream", call.result)
        self.write.call("cuStreamCreateWithPriority", [flags, int(priority)], ("CUstream", name))

    def _on_stream(self, call: ReadCall, function: str, stream: int) -> None:
        queue = self._stream(stream)
        if queue in _DEFAULT_STREAMS:  # the default streams are the current context's
            self._here(call)
        self.write.call(function, [queue])

    def _do_destroy_stream(self, call: ReadCall, stream: int) -> None:
        self._on_stream(call, "cuStreamDestroy", stream)

    def _do_synchronize_stream(self, call: ReadCall, stream: int) -> None:
        self._on_stream(call, "cuStreamSynchronize", stream)

    def _do_create_event(self, call: ReadCall, timing: bool = False) -> None:
        self._here(call)
        flags = "CU_EVENT_DEFAULT" if timing else "CU_EVENT_DISABLE_TIMING"
        self.write.call("cuEventCreate", [flags], ("CUevent", self._new("event", "event", call.result)))

    def _do_destroy_event(self, call: ReadCall, event: int) -> None:
        self.write.call("cuEventDestroy", [self._name("event", event)])

    def _do_record_event(self, call: ReadCall, event: int, stream: int) -> None:
        name, queue = self._name("event", event), self._stream(stream)
        self._here(call)
        self.write.call("cuEventRecord", [name, queue])

    def _do_wait_event(self, call: ReadCall, stream: int, event: int) -> None:
        name, queue = self._name("event", event), self._stream(stream)
        self._here(call)
        self.write.call("cuStreamWaitEvent", [queue, name, 0])

    def _do_synchronize_event(self, call: ReadCall, event: int) -> None:
        self.write.call("cuEventSynchronize", [self._name("event", event)])


_DEFAULT_STREAMS: tuple[Argument, ...] = (0, "CU_STREAM_LEGACY", "CU_STREAM_PER_THREAD")

_QUERIES = frozenset(
    {
        "address_range",
        "can_access_peer",
        "capabilities",
        "capture_status",
        "device_count",
        "device_properties",
        "elapsed",
        "event_done",
        "function_attributes",
        "get_access",
        "granularity",
        "graph_figures",
        "graph_nodes",
        "memory_info",
        "multicast_granularity",
        "pointer_info",
        "pool_figures",
        "prefetched_to",
        "properties_of",
        "stream_capturing",
        "stream_done",
        "version",
    }
)


def _said(call: ReadCall) -> str:
    """Return a call as text, its arguments cut where they are long."""
    said = [hex(one) if isinstance(one, int) and one > 0xFFFF_FFFF else str(one) for one in call.arguments]
    text = ", ".join(said)
    return f"{call.method[:60]}({text if len(text) <= 100 else text[:97] + '...'})"


def write_program(trace: ReadTrace, writer: Writer) -> str:
    """Return a trace as a program in the language of the writer."""
    Program(writer, trace).run(trace.calls)
    if trace.left_out:
        writer.comment(f"the trace ends here: it left {trace.left_out} calls out")
    return writer.text()
