"""Every error that remap raises: what was asked, the rule, and the next step.

`RemapError` is the root. `DriverError` carries a refusal of the driver with the call, the CUDA name and its
number; both drivers raise through `driver_error`, so that the same mistake has the same error on both.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import Any, Self


class RemapError(Exception):
    """The root of all errors of remap.

    `asked` says what was asked for, `rule` why it cannot be, `next_step` what to do about it; the message is the
    three in that order.
    """

    def __init__(self, asked: str, *, rule: str = "", next_step: str = "") -> None:
        super().__init__(asked)
        self.asked = asked
        self.rule = rule
        self.next_step = next_step

    def __str__(self) -> str:
        """Return the three parts as one message."""
        head = f"{self.asked}: {self.rule}" if self.rule else self.asked
        return f"{head}. {self.next_step}" if self.next_step else head

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by state, since the constructors take keywords (errors cross processes)."""
        return _rebuild, (type(self), self.args, self.__dict__)

    def explain(self, asked: str, *, rule: str = "", next_step: str = "") -> Self:
        """Reword this error in the terms of the caller, and return it to be raised again."""
        self.asked = asked
        self.rule = rule or self.rule
        self.next_step = next_step or self.next_step
        return self


def _rebuild(kind: type[RemapError], args: tuple[Any, ...], state: dict[str, Any]) -> RemapError:
    error = kind(*args)  # `args` are what each constructor takes by position
    error.__dict__.update(state)
    return error


class InvalidValueError(RemapError, ValueError):
    """An argument has a value that no call could take: a negative size, a device that does not exist."""


class AlignmentError(InvalidValueError):
    """A size, an offset or an alignment is not a multiple of the granularity, or not a power of two."""


class ClosedError(RemapError):
    """The object was closed before; it owns nothing any more."""


class InUseError(RemapError):
    """Something else still uses the object: mappings inside it, work on a stream, another operation."""


class AccessError(RemapError):
    """The location that asks has no right, or not the right that it asks for, to this memory."""


class PausedError(RemapError):
    """The buffer is paused: its address is reserved, but no memory stands behind it."""


class LaunchError(RemapError):
    """A kernel cannot be launched with this configuration or these arguments; nothing was launched."""


class KernelError(RemapError):
    """A kernel did what a GPU would do wrongly in silence: a race, a barrier that not all threads reach.

    Found by the host driver, and raised by the next wait; so is what the Python twin of a compiled kernel raises.
    Memory and context are intact; what the kernel should have written is undefined.
    """

    _untold: deque[KernelError] | None = None  # where it was kept until a wait raised it

    def leave(self) -> bool:
        """Leave it to the next wait, where the one that raised it has nobody to tell; False if none raised it."""
        if self._untold is None:
            return False
        self._untold.appendleft(self.with_traceback(None))
        return True


class CompileError(RemapError):
    """A kernel's source could not be compiled; the message carries the compiler's log."""


class ForkedError(RemapError):
    """The object was made before a fork, and this process is the child."""


class ShareError(RemapError):
    """Memory could not be handed to, or taken from, another process."""


class BufferNotFoundError(ShareError, LookupError):
    """The broker has no buffer of this name: nobody has put it there yet, or it was dropped."""


class DescriptorError(ShareError):
    """A descriptor of shared memory is malformed or does not say what the driver says."""


class DriverNotFoundError(RemapError):
    """No driver could be opened; `attempts` lists each one with its reason."""

    def __init__(self, attempts: tuple[tuple[str, str], ...], *, next_step: str = "") -> None:
        listed = "; ".join(f"{name}: {reason}" for name, reason in attempts)
        super().__init__("no driver could be opened", rule=listed, next_step=next_step)
        self.args = (attempts,)
        self.attempts = attempts


class DriverError(RemapError):
    """The driver refused a call.

    `call` is the driver function, `name` the CUDA name of the result and `code` its number. The host driver uses
    the same names and numbers.
    """

    def __init__(
        self, call: str, name: str, code: int, *, asked: str = "", rule: str = "", next_step: str = ""
    ) -> None:
        super().__init__(asked or call, rule=rule, next_step=next_step)
        self.args = (call, name, code)
        self.call = call
        self.name = name
        self.code = code

    injected: bool = False
    """Whether no driver refused the call, but a test did (`remap.drivers.wrappers.Faulty`)."""

    def __str__(self) -> str:
        """Return the message with the driver's own words at its end."""
        told = ", injected by Faulty" if self.injected else ""
        return f"{super().__str__()} [{self.call}: {self.name} ({self.code}){told}]"


class OutOfMemoryError(DriverError, MemoryError):
    """Physical memory ran out on the location that was asked (address space is another error)."""


class OutOfAddressSpaceError(DriverError, MemoryError):
    """Virtual addresses, or the kernel's table of mappings, ran out; there may be memory enough."""


class NotSupportedError(DriverError):
    """The device, the driver or the platform cannot do this; `capability` names what is missing, if it is one."""

    capability: str | None = None


class NotPermittedError(DriverError):
    """The driver could do this but the process may not."""


class ContextLostError(DriverError):
    """The context is lost for this process: an earlier fault, reported by this call but not caused by it.

    Source: CUDA calls such errors sticky; every later call in the context returns them too.
    """


class IllegalAddressError(ContextLostError):
    """A kernel touched an address that is unmapped or forbidden to its device; the context is lost."""


class RemapWarning(RuntimeWarning):
    """A clean-up failed where no error could be raised, or a call found nothing to do where something was meant."""


class CudaResult(IntEnum):
    """The CUDA results that remap tells apart, with CUDA's own numbers (`cuda.h`, `CUresult`)."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    DEINITIALIZED = 4
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_IMAGE = 200
    INVALID_CONTEXT = 201
    NO_BINARY_FOR_GPU = 209
    ECC_UNCORRECTABLE = 214
    INVALID_PTX = 218
    NVLINK_UNCORRECTABLE = 220
    FILE_NOT_FOUND = 301
    INVALID_HANDLE = 400
    ILLEGAL_STATE = 401
    NOT_FOUND = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    LAUNCH_OUT_OF_RESOURCES = 701
    LAUNCH_TIMEOUT = 702
    CONTEXT_IS_DESTROYED = 709
    ASSERT = 710
    HARDWARE_STACK_ERROR = 714
    ILLEGAL_INSTRUCTION = 715
    MISALIGNED_ADDRESS = 716
    INVALID_ADDRESS_SPACE = 717
    INVALID_PC = 718
    LAUNCH_FAILED = 719
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    SYSTEM_DRIVER_MISMATCH = 803
    STREAM_CAPTURE_UNSUPPORTED = 900
    STREAM_CAPTURE_INVALIDATED = 901
    CAPTURED_EVENT = 907
    UNKNOWN = 999


# Results that stay for the rest of the process once they were seen (CUDA programming guide, error handling).
STICKY = frozenset(
    {
        CudaResult.ECC_UNCORRECTABLE,
        CudaResult.NVLINK_UNCORRECTABLE,
        CudaResult.ILLEGAL_ADDRESS,
        CudaResult.LAUNCH_TIMEOUT,
        CudaResult.CONTEXT_IS_DESTROYED,
        CudaResult.ASSERT,
        CudaResult.HARDWARE_STACK_ERROR,
        CudaResult.ILLEGAL_INSTRUCTION,
        CudaResult.MISALIGNED_ADDRESS,
        CudaResult.INVALID_ADDRESS_SPACE,
        CudaResult.INVALID_PC,
        CudaResult.LAUNCH_FAILED,
    }
)

_KINDS: dict[int, type[DriverError]] = {
    CudaResult.OUT_OF_MEMORY: OutOfMemoryError,
    CudaResult.NOT_SUPPORTED: NotSupportedError,
    CudaResult.NOT_PERMITTED: NotPermittedError,
    **dict.fromkeys(STICKY, ContextLostError),
    CudaResult.ILLEGAL_ADDRESS: IllegalAddressError,
}

_seen_sticky: list[str] = []


def context_lost() -> bool:
    """Tell whether a call of this process has ended with a sticky error; what closes after it is silent about it."""
    return bool(_seen_sticky)


def refused(error: DriverError) -> DriverError:
    """Return the error that a driver's call ends with, once it is known whether the context is lost by it.

    For the one place of each driver where calls end. An error that is only made says nothing of the context: a kernel's
    fault is one before any call has reported it.
    """
    if error.code in STICKY:
        _seen_sticky.append(error.name)
    return error


def context_renewed() -> None:
    """Forget what was seen: this process is a forked child, which has contexts of its own or none."""
    _seen_sticky.clear()


_STICKY_RULE = "the context was lost to an earlier fault, reported by, not caused by, this call"
_STICKY_STEP = "End this process; memory and work of this context cannot be used again"


def driver_error(
    call: str, code: int, name: str = "", *, asked: str = "", rule: str = "", next_step: str = ""
) -> DriverError:
    """Return the error that stands for result `code` of driver function `call`.

    `name` is needed only for a code that `CudaResult` does not list.
    """
    if not name:
        name = f"CUDA_ERROR_{CudaResult(code).name}"
    # Reservation hands out addresses, not memory: the same CUDA result means another thing there (T3).
    addresses = call == "cuMemAddressReserve" and code == CudaResult.OUT_OF_MEMORY
    kind = OutOfAddressSpaceError if addresses else _KINDS.get(code, DriverError)
    if code in STICKY:
        rule, next_step = rule or _STICKY_RULE, next_step or _STICKY_STEP
    return kind(call, name, code, asked=asked, rule=rule, next_step=next_step)


def not_supported(
    call: str, asked: str, rule: str = "", next_step: str = "", *, capability: str | None = None
) -> NotSupportedError:
    """Return the error that stands for NOT_SUPPORTED; `capability` names what is missing, if it is one."""
    code = CudaResult.NOT_SUPPORTED
    name = f"CUDA_ERROR_{code.name}"
    error = NotSupportedError(call, name, code, asked=asked, rule=rule, next_step=next_step)
    error.capability = capability
    return error
