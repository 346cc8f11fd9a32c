"""The driver's calls on work: contexts, streams, events, modules and launches."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remap.drivers.cuda.bindings import cuda, failure
from remap.errors import CudaResult, DriverError, driver_error
from remap.types import LaunchConfig, PackedArguments, Touched

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_LOG_BYTES = 8192


class WorkCalls:
    """The half of the CUDA driver that deals with work; it keeps count of the contexts that it retains."""

    def __init__(self) -> None:
        self._retained: Counter[int] = Counter()
        self._counting = threading.Lock()

    # -- contexts --

    def retain_context(self, device: int) -> int:
        err, context = cuda.cuDevicePrimaryCtxRetain(device)
        if err:
            raise failure("cuDevicePrimaryCtxRetain", err, asked=f"retain the context of device {device}")
        with self._counting:
            self._retained[device] += 1
        return int(context)

    def release_context(self, device: int) -> None:
        with self._counting:
            ours = self._retained[device] > 0
            self._retained[device] -= ours
        # Beyond our own count, the driver would take away a reference that a framework holds.
        if not ours:
            asked = f"release the context of device {device}"
            rule = "each retain can be released once"
            raise driver_error(
                "cuDevicePrimaryCtxRelease", CudaResult.INVALID_CONTEXT, asked=asked, rule=rule
            )
        (err,) = cuda.cuDevicePrimaryCtxRelease(device)
        if err:
            raise failure("cuDevicePrimaryCtxRelease", err, asked=f"release the context of device {device}")

    def release_all_contexts(self) -> None:
        """Drop every reference to a context that is still held; failures have nobody left to hear them."""
        with self._counting:
            left = list(self._retained.elements())
            self._retained.clear()
        for device in left:
            cuda.cuDevicePrimaryCtxRelease(device)

    def current_context(self) -> int:
        err, context = cuda.cuCtxGetCurrent()
        if err:
            raise failure("cuCtxGetCurrent", err)
        return int(context)

    def push_context(self, context: int) -> None:
        (err,) = cuda.cuCtxPushCurrent(context)
        if err:
            raise failure("cuCtxPushCurrent", err)

    def pop_context(self) -> int:
        err, context = cuda.cuCtxPopCurrent()
        if err:
            raise failure("cuCtxPopCurrent", err)
        return int(context)

    def synchronize_context(self) -> None:
        (err,) = cuda.cuCtxSynchronize()
        if err:
            raise failure("cuCtxSynchronize", err, asked="wait for the context")

    # -- streams --

    def create_stream(self, nonblocking: bool = True, priority: int = 0) -> int:
        err, stream = cuda.cuStreamCreateWithPriority(_NON_BLOCKING if nonblocking else 0, priority)
        if err:
            raise failure("cuStreamCreateWithPriority", err, asked="create a stream")
        return int(stream)

    def destroy_stream(self, stream: int) -> None:
        (err,) = cuda.cuStreamDestroy(stream)
        if err:
            raise failure("cuStreamDestroy", err, asked="destroy a stream")

    def synchronize_stream(self, stream: int) -> None:
        (err,) = cuda.cuStreamSynchronize(stream)
        if err:
            raise failure("cuStreamSynchronize", err, asked="wait for a stream")

    def stream_done(self, stream: int) -> bool:
        (err,) = cuda.cuStreamQuery(stream)
        if err and err != CudaResult.NOT_READY:
            raise failure("cuStreamQuery", err, asked="ask whether a stream is done")
        return not err

    def stream_capturing(self, stream: int) -> bool:
        err, status = cuda.cuStreamIsCapturing(stream)
        if err:
            raise failure("cuStreamIsCapturing", err, asked="ask whether a stream is being captured")
        return bool(status)

    def wait_event(self, stream: int, event: int) -> None:
        (err,) = cuda.cuStreamWaitEvent(stream, event, 0)
        if err:
            raise failure("cuStreamWaitEvent", err, asked="let a stream wait for an event")

    # -- events --

    def create_event(self, timing: bool = False) -> int:
        err, event = cuda.cuEventCreate(0 if timing else _DISABLE_TIMING)
        if err:
            raise failure("cuEventCreate", err, asked="create an event")
        return int(event)

    def destroy_event(self, event: int) -> None:
        (err,) = cuda.cuEventDestroy(event)
        if err:
            raise failure("cuEventDestroy", err, asked="destroy an event")

    def record_event(self, event: int, stream: int) -> None:
        (err,) = cuda.cuEventRecord(event, stream)
        if err:
            raise failure("cuEventRecord", err, asked="record an event")

    def synchronize_event(self, event: int) -> None:
        (err,) = cuda.cuEventSynchronize(event)
        if err:
            raise failure("cuEventSynchronize", err, asked="wait for an event")

    def event_done(self, event: int) -> bool:
        (err,) = cuda.cuEventQuery(event)
        if err and err != CudaResult.NOT_READY:
            raise failure("cuEventQuery", err, asked="ask whether an event is done")
        return not err

    def elapsed(self, start: int, end: int) -> float:
        err, milliseconds = cuda.cuEventElapsedTime(start, end)
        if err:
            rule = "both must have been made with timing and have completed"
            raise failure("cuEventElapsedTime", err, asked="measure between two events", rule=rule)
        return float(milliseconds)

    # -- modules --

    def load_module(self, image: bytes) -> int:
        # With a buffer for the log, since INVALID_PTX alone tells nobody which line is wrong.
        log = bytearray(_LOG_BYTES)
        names = cuda.CUjit_option
        options = [names.CU_JIT_ERROR_LOG_BUFFER, names.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        # PTX is a C string: the driver reads it up to its NUL.
        text = image if image[:4] in _BINARY_MAGICS else image.rstrip(b"\0") + b"\0"
        err, module = cuda.cuModuleLoadDataEx(text, len(options), options, [log, len(log)])
        if err:
            told = log.split(b"\0", 1)[0].decode(errors="replace").strip()
            raise failure("cuModuleLoadDataEx", err, asked="load a module", rule=told)
        return int(module)

    def unload_module(self, module: int) -> None:
        (err,) = cuda.cuModuleUnload(module)
        if err:
            raise failure("cuModuleUnload", err, asked="unload a module")

    def get_function(self, module: int, name: str) -> int:
        err, function = cuda.cuModuleGetFunction(module, name.encode())
        if err:
            raise failure("cuModuleGetFunction", err, asked=f"function {name!r} of a module")
        return int(function)

    def function_attributes(self, function: int) -> Mapping[str, int]:
        names = cuda.CUfunction_attribute
        found: dict[str, int] = {}
        for key, name in (
            ("max_threads_per_block", names.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
            ("shared_bytes", names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES),
            ("registers", names.CU_FUNC_ATTRIBUTE_NUM_REGS),
            ("binary_version", names.CU_FUNC_ATTRIBUTE_BINARY_VERSION),
            ("ptx_version", names.CU_FUNC_ATTRIBUTE_PTX_VERSION),
        ):
            err, value = cuda.cuFuncGetAttribute(name, function)
            if err:
                raise failure("cuFuncGetAttribute", err, asked=f"{key} of a function")
            found[key] = int(value)
        return found

    def parameter_sizes(self, function: int) -> tuple[int, ...] | None:
        """Return the size of each parameter of a function, None where the driver is older than 12.4.

        (cuFuncGetParamInfo)
        """
        sizes: list[int] = []
        while True:
            try:
                err, _offset, size = cuda.cuFuncGetParamInfo(function, len(sizes))
            except RuntimeError:  # this is how the bindings report a call that the driver does not have
                return None
            if err == CudaResult.INVALID_VALUE:
                return tuple(sizes)  # past the last one
            if err:
                raise failure("cuFuncGetParamInfo", err, asked="the parameters of a function")
            sizes.append(int(size))

    def set_dynamic_shared_limit(self, function: int, size: int) -> None:
        name = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (err,) = cuda.cuFuncSetAttribute(function, name, size)
        if err:
            asked = f"allow {size} bytes of dynamic shared memory"
            raise failure("cuFuncSetAttribute", err, asked=asked)

    def launch(
        self,
        function: int | Callable[..., None],
        config: LaunchConfig,
        stream: int,
        arguments: PackedArguments,
        touches: Sequence[Touched] | None,
    ) -> None:
        x, y, z = config.grid
        width, height, depth = config.block
        (err,) = cuda.cuLaunchKernel(
            function, x, y, z, width, height, depth, config.shared_bytes, stream, arguments.pointers, 0
        )
        if err:
            raise launch_failed(config, err)


def launch_failed(config: LaunchConfig, err: Any) -> DriverError:
    """Return the error for a launch that failed."""
    return failure("cuLaunchKernel", err, asked=f"launch {config.grid} blocks of {config.block} threads")


_BINARY_MAGICS = (b"\x7fELF", b"\x50\xed\x55\xba")
