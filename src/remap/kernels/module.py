"""Load images on a device, and find the kernels in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from remap.drivers.protocol import SupportsModules
from remap.errors import CudaResult, DriverError, driver_error
from remap.kernels import nvrtc
from remap.kernels.compile import architecture_for
from remap.kernels.compile import compile as compile_source
from remap.kernels.image import Entry, Image, ImageKind, Parameter, unmangled
from remap.kernels.launch import Kernel
from remap.kernels.params import parse_parameters
from remap.launches import launches
from remap.lifetime import Description, Release, Resource, Step
from remap.locations import Device, DeviceLike, in_context
from remap.locations import device as find_device
from remap.streams import as_stream
from remap.types import Location
from remap.uses import Uses


def load(what: Image | str | os.PathLike[str], *, device: DeviceLike | None = None) -> Module:
    """Load an image, or the file of one, on a device (the fastest by default) and return the module.

    Takes cubins, fatbins, PTX and CUDA C++ source, told apart by their bytes. Source is compiled for the device. The
    host driver takes every image and compiles none: there a kernel runs through its Python twin. Where nothing is
    compiled, or NVRTC is not installed, a PTX file of the same name beside a source file is loaded in its place.

    Raises `DriverError`: FILE_NOT_FOUND, INVALID_IMAGE, or NO_BINARY_FOR_GPU if nothing in it runs on the device;
    `CompileError` if source cannot be compiled. Source: cuModuleLoadDataEx.
    """
    if isinstance(what, Image):
        return Module(what, device)
    image, at = Image.from_file(what), find_device(device)
    beside = Path(what).with_suffix(".ptx")
    if image.kind is ImageKind.SOURCE and beside.exists():
        # PTX tells the parameters too, so that the host driver can check them.
        is_compiled = isinstance(at._driver, SupportsModules) and nvrtc.available()
        image = image if is_compiled else Image.from_file(beside)
    return Module(image, at)


class Module(Resource):
    """An image that is loaded on one device. Made by `load`.

    Closing waits for the kernels that were launched from it, then unloads the code.
    """

    __slots__ = ("_default", "_handle", "_kernels", "_uses", "device", "image")

    kind: ClassVar[str] = "module"

    def __init__(self, image: Image, at: DeviceLike | None = None) -> None:
        self.device: Device = find_device(at)
        super().__init__(self.device._driver)
        self._kernels: dict[tuple[str, tuple[Parameter, ...] | None], Kernel] = {}
        self._uses = Uses()
        self._default = as_stream(None, self.device)
        self._handle: int | None = None
        self.image = image
        driver = self.device._driver
        if isinstance(driver, SupportsModules):
            self.image = self._runnable(image)
            with self.device.current():
                self._handle = self._load(driver)
                self._open = True  # from here on an interrupt leaves it to its finaliser
        self._opened()

    def function(self, name: str, parameters: Sequence[str] | None = None) -> Kernel:
        """Return a kernel by its unmangled name, a template instance by its expression.

        `parameters` names the types of its parameters (`"pointer"`, `"int64"`, `"float32"`, …) where the image does
        not tell them, or to check them. Raises `DriverError` (NOT_FOUND) listing what there is.
        Source: cuModuleGetFunction.
        """
        self._check()
        declared = parse_parameters(parameters) if parameters is not None else None
        found = self._kernels.get((name, declared))
        if found is None:
            found = self._kernels.setdefault((name, declared), self._find(name, declared))
        return found

    @property
    def functions(self) -> tuple[str, ...] | None:
        """The unmangled names of the kernels inside; None where the image does not tell them."""
        entries = self.image.entries
        return None if entries is None else tuple(entry.name for entry in entries)

    @property
    def code(self) -> str:
        """Which code of the image runs here: `sm_90`, or `sm_90, which the driver made from compute_75`."""
        self._check()
        driver = self.device._driver
        if self._handle is None or not isinstance(driver, SupportsModules):
            return "Python"
        entries = self.image.entries
        if not entries:
            return f"{self.image.kind}"
        with self.device.current():
            found = driver.function_attributes(driver.get_function(self._handle, entries[0].symbol))
        machine = f"sm_{found['binary_version']}"
        if any(one.rstrip("af") == machine for one in self.image.architectures):
            return machine
        return f"{machine}, which the driver made from compute_{found['ptx_version']}"

    def describe(self) -> Description:
        """Return what this module is."""
        return Description(
            self.kind, self.serial, len(self.image.data), None, f"{self.image.name} on {self.device}"
        )

    def _runnable(self, image: Image) -> Image:
        """Return the image with code for this device; raises if it has none."""
        capability = self.device.properties.compute_capability
        if image.kind is ImageKind.SOURCE:
            return compile_source(image.data.decode(), arch=architecture_for(capability), name=image.name)
        if not image.runs_on(capability):
            raise driver_error(
                "cuModuleLoadDataEx",
                CudaResult.NO_BINARY_FOR_GPU,
                asked=f"load {image.name} on {self.device} ({self.device.name})",
                rule=f"the {image.kind} is for {', '.join(image.architectures)}, "
                f"and the device is sm_{capability[0]}{capability[1]}",
                next_step=f'Compile it with arch="sm_{capability[0]}{capability[1]}"',
            )
        return image

    def _load(self, driver: SupportsModules) -> int:
        try:
            return driver.load_module(self.image.data)
        except DriverError as error:
            if error.name == "CUDA_ERROR_UNSUPPORTED_PTX_VERSION":
                error.next_step = (
                    'The compiler is newer than the driver: compile for machine code, arch="sm_…"'
                )
            raise error.explain(f"load {self.image.name} on {self.device} ({self.device.name})") from None

    def _find(self, name: str, declared: tuple[Parameter, ...] | None) -> Kernel:
        entries = self.image.entries
        entry = Entry(name) if entries is None else self._named(name, entries)
        driver = self.device._driver
        parameters = declared if declared is not None else entry.parameters
        if self._handle is None or not isinstance(driver, SupportsModules):
            return Kernel(self, name, None, parameters)
        with self.device.current():
            function = driver.get_function(self._handle, entry.symbol)
            if parameters is None and isinstance(driver, _TellsParameters):
                sizes = driver.parameter_sizes(function)
                parameters = None if sizes is None else tuple(Parameter(size) for size in sizes)
        return Kernel(self, name, function, parameters)

    def _named(self, name: str, entries: tuple[Entry, ...]) -> Entry:
        fitting = [one for one in entries if name in (one.symbol, one.expression)]
        fitting = fitting or [one for one in entries if unmangled(one.symbol) == name]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            symbols = ", ".join(one.symbol for one in fitting)
            rule, step = "several kernels have this name", f"Ask for one of: {symbols}"
        else:
            rule = f"{self.image.name} has no such kernel"
            step = f"It has: {', '.join(one.name for one in entries) or 'none'}"
        raise driver_error(
            "cuModuleGetFunction",
            CudaResult.NOT_FOUND,
            asked=f"function {name!r} of a module",
            rule=rule,
            next_step=step,
        )

    def _check_closable(self) -> None:
        launches.check_none(self._uses, self, "closed")

    def _check_use(self, asked: str, place: Location) -> None:
        self._check()

    def _detach(self) -> Release:
        wait = self._uses.waiter((self.device,), f"closing {self.describe()}")
        steps: list[Step] = []
        if self._handle is not None:
            steps.append((in_context, (self.device, self._driver.unload_module, self._handle)))
        return Release(1, steps, wait)


@runtime_checkable
class _TellsParameters(Protocol):
    """A driver that knows the parameters of a loaded function."""

    def parameter_sizes(self, function: int) -> tuple[int, ...] | None:
        """Return the size of each parameter, None where the driver is too old. (cuFuncGetParamInfo)"""
        ...
