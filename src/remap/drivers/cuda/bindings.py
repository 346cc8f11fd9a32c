"""The one place that imports `cuda.bindings`: the module, starting it, and turning its results into errors."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

from remap.errors import CudaResult, DriverError, RemapError, driver_error, refused

# Compiled and untyped, and absent where nobody asked for CUDA: Any here, plain integers everywhere above.
cuda: Any = None
_absent = ""
try:
    from cuda.bindings import driver

    cuda = driver
except ImportError as error:
    _absent = str(error)

LEAST_DRIVER = 12000
"""The oldest driver, as `cuDriverGetVersion` counts, whose calls remap uses (12.0)."""


def start() -> None:
    """Load libcuda and initialise it (cuInit); raises `RemapError` with the exact reason where that fails.

    Nothing else of CUDA may be touched before this has succeeded: without a driver, cuda.core raises a SystemError
    and leaves the next driver call hanging for ever.
    """
    if cuda is None:
        raise RemapError(
            "the CUDA driver cannot be opened",
            rule=f"the Python package cuda-bindings cannot be imported ({_absent})",
            next_step="Install it with: pip install 'remap[cu13]' (or cu12, to match the driver)",
        )
    try:
        (err,) = cuda.cuInit(0)
    except RuntimeError as error:  # DynamicLibNotFoundError, and what other versions raise in its place
        where = "" if sys.platform == "linux" else f" on {sys.platform}"
        # The former's text says at length what ours says; others may say something new.
        said = "" if type(error).__name__ == "DynamicLibNotFoundError" else f" ({str(error).rstrip('. ')})"
        raise RemapError(
            "the CUDA driver cannot be opened",
            rule=f"the NVIDIA driver library (libcuda) was not found{where}{said}",
            next_step="Install the NVIDIA driver, or give the container access to the GPU",
        ) from error
    if err:
        raise _cannot_start(err)
    version = driver_version()
    if version < LEAST_DRIVER:
        raise RemapError(
            "the CUDA driver cannot be opened",
            rule=f"its version is {dotted(version)}, and remap needs {dotted(LEAST_DRIVER)} or newer",
            next_step="Update the NVIDIA driver",
        )


def _cannot_start(err: Any) -> RemapError:
    rule, step = _START_FAILURES.get(
        err.name, ("cuInit failed", "See the driver's documentation of this result")
    )
    return RemapError(
        "the CUDA driver cannot be opened", rule=f"{rule} [cuInit: {err.name} ({int(err)})]", next_step=step
    )


_START_FAILURES = {
    "CUDA_ERROR_NO_DEVICE": (
        "the driver is installed, but it sees no device",
        "Check nvidia-smi, CUDA_VISIBLE_DEVICES and the permissions of /dev/nvidia*",
    ),
    "CUDA_ERROR_INVALID_DEVICE": ("the driver finds its device unusable", "Check nvidia-smi for its state"),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "libcuda and the kernel module are of different versions",
        "Reboot or reload the module after the driver update; in a container, use the host's libcuda",
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "the forward-compatibility libcuda does not support this device",
        "Remove the cuda-compat package from the library path",
    ),
    "CUDA_ERROR_STUB_LIBRARY": (
        "libcuda is the toolkit's stub, which only serves for linking",
        "Remove the toolkit's stubs directory from the library path",
    ),
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "the system is not ready to run CUDA",
        "On machines with NVSwitch, start the fabric manager",
    ),
    "CUDA_ERROR_OPERATING_SYSTEM": (
        "the operating system refused a call of the driver",
        "Check the permissions of /dev/nvidia* and that the container was given the devices",
    ),
}


def failure(call: str, err: Any, *, asked: str = "", rule: str = "", next_step: str = "") -> DriverError:
    """Return the error for result `err` that driver function `call` has returned."""
    if err == CudaResult.INVALID_CONTEXT and not rule:
        rule = "the calling thread has no current context"
        next_step = "Retain a device's context and push it first"
    return refused(driver_error(call, int(err), err.name, asked=asked, rule=rule, next_step=next_step))


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports, such as 13000. (cuDriverGetVersion)"""
    err, version = cuda.cuDriverGetVersion()
    if err:
        raise failure("cuDriverGetVersion", err)
    return int(version)


def version_text() -> str:
    """Return the versions of driver, kernel module and bindings in one line."""
    module = kernel_module_version()
    module = f" (kernel module {module})" if module else ""
    return f"CUDA {dotted(driver_version())}{module}, cuda-bindings {metadata.version('cuda-bindings')}"


def dotted(version: int) -> str:
    """Return a CUDA version number as people write it: 12090 is 12.9."""
    return f"{version // 1000}.{version % 1000 // 10}"


def kernel_module_version() -> str:
    """Return the version of the loaded NVIDIA kernel module, empty where it cannot be read."""
    for word in kernel_module_text().split():
        if word[0].isdigit() and "." in word:
            return word
    return ""


def kernel_module_text() -> str:
    """Return what the NVIDIA kernel module says of itself, empty where it cannot be read."""
    try:
        with open("/proc/driver/nvidia/version", encoding="ascii", errors="replace") as file:
            return file.readline()
    except OSError:
        return ""
