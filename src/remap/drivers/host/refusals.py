"""The errors that several parts of the host driver raise."""

from __future__ import annotations

import errno

from remap.drivers.host.work import Work
from remap.errors import CudaResult, DriverError, InUseError, driver_error
from remap.sizes import format_size


def invalid(call: str, asked: str, rule: str, next_step: str = "") -> DriverError:
    """Return the INVALID_VALUE error of a call."""
    return driver_error(call, CudaResult.INVALID_VALUE, asked=asked, rule=rule, next_step=next_step)


def in_use(what: str, work: Work) -> InUseError:
    """Return the error for taking memory away from under work that no wait orders before it."""
    return InUseError(
        f"cannot {what}",
        rule=f"{work} may still use it, since nothing has waited for that work",
        next_step="Synchronise the stream, or an event recorded after the work, first",
    )


def system_error(call: str, error: OSError) -> DriverError:
    """Return the error for a system call that failed for a reason which no rule of CUDA covers."""
    rule = f"the operating system refused: {error.strerror or error}"
    step = _LIMITS.get(error.errno or 0, "")
    return driver_error(
        call,
        304,
        "CUDA_ERROR_OPERATING_SYSTEM",
        asked=call,
        rule=rule,
        next_step=step and f"Raise the limit: {step}",
    )


_LIMITS = {errno.EFBIG: "ulimit -f", errno.EMFILE: "ulimit -n", errno.ENFILE: "sysctl fs.file-max"}
"""Where the limits are set that a process may meet here."""


def span(address: int, size: int) -> str:
    """Return a range as messages name it."""
    return f"{address:#x} + {format_size(size)}"
