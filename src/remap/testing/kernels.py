"""The one kernel that the suite needs: it writes four bytes to an address.

On a driver that loads modules it is PTX text, which needs no compiler and runs on every GPU since sm_75. On any
other it is a Python callable, as the host driver takes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol, TypeAlias

from remap.drivers.protocol import DEFAULT_STREAM, Driver, HostLaunch, SupportsModules
from remap.types import LaunchConfig, Touched

PTX = """\
.version 6.4
.target sm_75
.address_size 64

.visible .entry store_value(.param .u64 target, .param .u32 value)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [target];
    ld.param.u32 %r1, [value];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], %r1;
    ret;
}
"""

_ONE_THREAD = LaunchConfig((1, 1, 1), (1, 1, 1))


class StoreKernel(Protocol):
    """A kernel that writes a 32-bit value to an address, loaded on one driver."""

    def store(self, address: int, value: int, stream: int = DEFAULT_STREAM) -> None:
        """Queue one launch that writes `value` to `address`."""
        ...

    def close(self) -> None:
        """Give back what loading took; the caller has waited for the launches."""
        ...


KernelOpener: TypeAlias = Callable[[Driver], StoreKernel]
"""What makes a `StoreKernel` for a driver in whose current context it is to run; importable, for child processes."""


def open_kernel(driver: Driver) -> StoreKernel:
    """Return the kernel for `driver`: PTX where it loads modules, else a Python callable."""
    return PtxKernel(driver) if isinstance(driver, SupportsModules) else PythonKernel(driver)


class PtxKernel:
    """The kernel as a PTX module."""

    def __init__(self, driver: Driver) -> None:
        if not isinstance(driver, SupportsModules):
            raise TypeError(f"the driver {driver.name} loads no modules")
        self._driver: Driver = driver
        self._modules: SupportsModules = driver
        self._module = driver.load_module(PTX.encode() + b"\0")  # the driver takes PTX as a C string
        self._function = driver.get_function(self._module, "store_value")

    def store(self, address: int, value: int, stream: int = DEFAULT_STREAM) -> None:
        """Queue one launch that writes `value` to `address`."""
        _launch(self._driver, self._function, address, value, stream)

    def close(self) -> None:
        """Unload the module."""
        self._modules.unload_module(self._module)


class PythonKernel:
    """The kernel as a Python callable that the driver runs on the stream's thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def store(self, address: int, value: int, stream: int = DEFAULT_STREAM) -> None:
        """Queue one launch that writes `value` to `address`."""
        _launch(self._driver, _store_value, address, value, stream)

    def close(self) -> None:
        """Do nothing: a callable is not loaded."""


class Arguments:
    """Kernel arguments in the form that both kinds of driver take (`PackedArguments`)."""

    def __init__(self, *values: ctypes.c_uint64 | ctypes.c_uint32) -> None:
        self._values = values
        self._pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))

    @property
    def pointers(self) -> int:
        """The address of the array of pointers to the values."""
        return ctypes.addressof(self._pointers)

    @property
    def values(self) -> tuple[object, ...]:
        """The values as Python integers."""
        return tuple(value.value for value in self._values)


def _launch(
    driver: Driver, function: int | Callable[..., None], address: int, value: int, stream: int
) -> None:
    arguments = Arguments(ctypes.c_uint64(address), ctypes.c_uint32(value))
    driver.launch(function, _ONE_THREAD, stream, arguments, [Touched(address, 4, writes=True)])


def _store_value(launch: HostLaunch) -> None:
    address, value = launch.arguments
    assert isinstance(address, int)
    assert isinstance(value, int)
    launch.write(address, 4)[:] = value.to_bytes(4, "little")
