"""Contexts: one primary context for each device, counted, and each thread's stack of current ones."""

from __future__ import annotations

import threading

from remap.drivers.host.devices import Devices
from remap.drivers.host.machine import Machine
from remap.errors import CudaResult, DriverError, driver_error


class Contexts:
    """Which contexts live, and which one is current where. A context's handle is its device's number plus one."""

    def __init__(self, machine: Machine, devices: Devices) -> None:
        self._machine = machine
        self._devices = devices
        self._references = [0] * machine.options.devices
        self._local = threading.local()

    def retain(self, device: int) -> int:
        """Add a reference to a device's context and return it."""
        self._devices.check("cuDevicePrimaryCtxRetain", device)
        with self._machine.lock:
            self._references[device] += 1
        return device + 1

    def release(self, device: int) -> bool:
        """Drop a reference; return True if it was the last, so that what lives in the context has to go."""
        call = "cuDevicePrimaryCtxRelease"
        self._devices.check(call, device)
        with self._machine.lock:
            if not self._references[device]:
                rule = "it was not retained, or was released before"
                raise driver_error(
                    call, CudaResult.INVALID_CONTEXT, asked=f"the context of device {device}", rule=rule
                )
            self._references[device] -= 1
            return not self._references[device]

    def current(self) -> int:
        """Return the calling thread's current context, 0 where there is none."""
        stack = self._stack()
        return stack[-1] if stack else 0

    def push(self, context: int) -> None:
        """Make a context current for the calling thread."""
        # A context that was released may be pushed; using it then fails, as on CUDA.
        if not 1 <= context <= len(self._references):
            rule = "there is no such context"
            raise driver_error(
                "cuCtxPushCurrent", CudaResult.INVALID_VALUE, asked=f"context {context}", rule=rule
            )
        self._stack().append(context)

    def pop(self) -> int:
        """Make the previous context current again and return the one that was."""
        stack = self._stack()
        if not stack:
            raise _none("cuCtxPopCurrent")
        return stack.pop()

    def device(self, call: str) -> int:
        """Return the device of the current context, or raise INVALID_CONTEXT (T11)."""
        stack = self._stack()
        if not stack:
            raise _none(call)
        device = stack[-1] - 1
        if not self._references[device]:
            rule = f"the current context, of device {device}, was released for the last time"
            raise driver_error(call, CudaResult.CONTEXT_IS_DESTROYED, asked=call, rule=rule)
        return device

    def _stack(self) -> list[int]:
        try:
            stack: list[int] = self._local.stack
        except AttributeError:
            stack = self._local.stack = []
        return stack


def _none(call: str) -> DriverError:
    return driver_error(
        call,
        CudaResult.INVALID_CONTEXT,
        asked=call,
        rule="the calling thread has no current context",
        next_step="Retain a device's context and push it first",
    )
