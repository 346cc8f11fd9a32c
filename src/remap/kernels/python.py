"""`remap.kernel`: a function of Python as a kernel, compiled for the types of its arguments, run by both drivers.

One pass over the source (`statements`) gives a typed form. For CUDA it is written as CUDA C++ and compiled by NVRTC;
for the host driver as Python over NumPy arrays. Both are kept for as long as the kernel lives, and compiled images on
disk (`cache`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, overload

from remap import drivers
from remap.drivers.protocol import Driver
from remap.errors import AccessError, LaunchError
from remap.kernels.again import Kept
from remap.kernels.arguments import View, key_of, parameter_types
from remap.kernels.built import image_for
from remap.kernels.image import Image
from remap.kernels.launch import Extent, Prepared, Work, can_keep, until_unchanged
from remap.kernels.loaded import Loaded
from remap.kernels.reading import Source
from remap.kernels.statements import type_kernel
from remap.kernels.variant import Variant
from remap.launches import MemoryUse, PartUse, launches
from remap.locations import Device
from remap.locations import device as find_device
from remap.registers import Register
from remap.sizes import Size
from remap.spans import Span
from remap.streams import StreamCalls, StreamLike, as_stream
from remap.types import Access, LaunchConfig, Touched


class PythonKernel:
    """A kernel that is written in Python. Made by `remap.kernel`."""

    def __init__(self, function: Callable[..., object], fma: bool) -> None:
        if not callable(function):
            raise TypeError(f"remap.kernel takes a function written in Python, and not {function!r}")
        self.function = function
        self.name = self.__name__ = getattr(function, "__name__", repr(function))
        self.__doc__ = function.__doc__
        self._fma = fma
        self._source: Source | None = None
        self._variants: dict[tuple[Any, ...], list[Variant]] = {}
        self._lock = threading.RLock()
        self._kept = Kept()
        _kernels.add(self)

    def __call__(self, *_: object, **__: object) -> None:
        """Raise `LaunchError`: a kernel is launched, not called."""
        raise _launched_only(f"call of kernel {self.name}")

    def __getitem__(self, _: object) -> NoReturn:
        """Raise `LaunchError`: grid and block are arguments of `launch`."""
        raise _launched_only(f"kernel {self.name}[…]")

    def launch(
        self,
        *arguments: Any,
        grid: Extent,
        block: Extent,
        shared: Size = 0,
        stream: StreamLike | None = None,
        allow_overlap: bool = False,
    ) -> None:
        """Queue the kernel on a stream; does not wait.

        `grid` counts blocks, `block` counts threads in each, with one to three extents; `shared` is the dynamic shared
        memory of a block. Runs on the stream's device, else on the first one that may touch the first array. Arrays go
        as (address, length), numbers and structures by value, captured values as they are now. Buffers stay in use
        until the stream has passed.

        Raises, before anything is launched: `CompileError` (with the line) for what a kernel cannot have; `LaunchError`
        where configuration or arguments do not fit, where a `DisjointSlice` shares memory with another argument
        (aliases included; `allow_overlap=True` is your promise that no two threads meet there), or where an index would
        not belong to one thread; `AccessError`, `PausedError`, `InUseError`, `ClosedError` for memory that may not be
        used now. The host driver reports races and the like as `KernelError` at the next wait. Source: cuLaunchKernel.
        """
        shape = (len(arguments), grid, block, shared, allow_overlap)
        if not self._kept.again(arguments, stream, shape):
            launch = partial(self._check_and_launch, arguments, grid, block, shared, stream, allow_overlap)
            until_unchanged(f"launch of {self.name}", launch)

    def _check_and_launch(
        self,
        arguments: tuple[Any, ...],
        grid: Extent,
        block: Extent,
        shared: Size,
        stream: StreamLike | None,
        allow_overlap: bool,
    ) -> None:
        checked = launches.stamp
        variants = self._variants.get(tuple(map(key_of, arguments)))
        variant = variants[0] if variants is not None else self._variant(arguments)
        if variant.looks_outside:
            variant = self._variant(arguments)
        views = variant.views(arguments, stream)
        at = stream.device if isinstance(stream, StreamCalls) else _device_of(views)
        loaded = variant.loaded.get(at) or variant.load(at)
        queue = loaded.module._default if stream is None else as_stream(stream, at)
        config = self._config(loaded, grid, block, shared)
        variant.check_arrays(views, arguments, at, config, allow_overlap)
        # Before the values from outside are taken: what changes in between is seen the next time.
        found = variant.repeatable(arguments) if can_keep(queue, stream) else None
        if loaded.function is None:
            function, packed, touches = variant.on_host(arguments, views, allow_overlap)
            work = Work(function, config, queue, packed, touches)
        else:
            work = Work(loaded.function, config, queue, variant.pack(arguments, views), None)
        shape = (len(arguments), _hashable(grid), _hashable(block), shared, allow_overlap)
        parts: list[PartUse] = []
        if found is not None or launches.recorders:  # else nobody asks for them
            parts = [(weakref.ref(owner), needed, part) for owner, needed, part in _uses(variant, views)]
        loaded.kernel._launch(work, self._kept, arguments, stream, shape, found, checked, parts)

    def _prepare(
        self, arguments: tuple[Any, ...], grid: Extent, block: Extent, shared: Size, at: Device
    ) -> Prepared:
        """Check a launch on a device as `launch` does, and return what a graph needs to make it later."""
        variant = self._variant(arguments)
        views = variant.views(arguments, None)
        loaded = variant.loaded.get(at) or variant.load(at)
        config = self._config(loaded, grid, block, shared)
        variant.check_arrays(views, arguments, at, config, allow_overlap=False)
        touches: list[Touched] | None = None
        function: Any = loaded.function
        if function is None:
            function, packed, touches = variant.on_host(arguments, views, allow_overlap=False)
        else:
            packed = variant.pack(arguments, views)
        prepared = loaded.kernel._prepared(function, config, packed, touches)
        uses = _uses(variant, views)
        memory = [MemoryUse(owner, at.location, needed, part) for owner, needed, part in uses]
        return prepared._replace(memory=memory)

    def _config(self, loaded: Loaded, grid: Extent, block: Extent, shared: Size) -> LaunchConfig:
        try:
            return loaded.configs.get((grid, block, shared)) or loaded.check(grid, block, shared)
        except TypeError:  # a list is no key
            return loaded.check(_hashable(grid), _hashable(block), shared)

    # -- looking inside --

    def source(self, *arguments: Any) -> str:
        """Return the CUDA C++ that this becomes for arguments of these types; NumPy arrays may stand for others."""
        return self._variant(arguments).cpp()

    def compile(self, *arguments: Any, arch: str | None = None) -> Image:
        """Return the image for arguments of these types, as `source`; with `arch` ("sm_90") it needs no GPU."""
        if arch is not None and not isinstance(arch, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f'an architecture is a text such as "sm_90", and not {arch!r}')
        return image_for(
            self._variant(arguments).cpp(), self.name, self._fma, find_device() if arch is None else arch
        )

    def layout(self, *arguments: Any) -> str:
        """Return how arguments of these types are passed: offset, size and type of each value, captured ones last."""
        return self._variant(arguments).describe()

    def __repr__(self) -> str:
        """Return the name."""
        return f"<remap.PythonKernel {self.name}>"

    def _variant(self, arguments: tuple[Any, ...]) -> Variant:
        """Return the variant for the types of these arguments and of what is captured now."""
        key = tuple(map(key_of, arguments))
        with self._lock:
            for one in self._variants.get(key, ()):
                if one.fits():
                    return one
            if self._source is None:
                self._source = Source(self.function)
            types = parameter_types(self._source, arguments)
            with self._source.shallow():
                made = Variant(self._source, *type_kernel(self._source, types, self._fma))
            # Replaced, never changed: launches of other threads may be reading it.
            self._variants[key] = [*self._variants.get(key, ()), made]
            return made

    def _leave(self, driver: Driver) -> None:
        """Forget what was loaded on a driver that goes away, and has been closed."""
        with self._lock:
            self._kept.clear()
            for variant in (one for several in self._variants.values() for one in several):
                for at in [at for at in variant.loaded if at._driver is driver]:
                    variant.loaded.pop(at)


@overload
def kernel(function: Callable[..., object], /) -> PythonKernel: ...
@overload
def kernel(*, fma: bool = ...) -> Callable[[Callable[..., object]], PythonKernel]: ...
def kernel(function: Callable[..., object] | None = None, /, *, fma: bool = False) -> Any:
    """Make a kernel of a Python function. A decorator.

    Parameters that are arrays are annotated with `remap.Slice` (read) or `remap.DisjointSlice` (each thread writes its
    own element); all others go by value. The function is read, not run: it is compiled at the first launch for the
    types of the arguments, with NumPy's types for every expression. Products and sums are rounded apart, so that both
    drivers give the same bits; `fma=True` lets the compiler join them, which is faster and may differ in the last one.
    """
    if function is None:
        return partial(PythonKernel, fma=fma)
    return PythonKernel(function, fma)


_kernels: Register[PythonKernel] = Register()


def _leave(driver: Driver) -> None:
    for one in _kernels:
        one._leave(driver)


drivers.on_leave(_leave)  # after that of `built`, which closes the code


def _device_of(views: dict[int, View]) -> Device:
    """Return the device on which a launch runs when nobody says: the first that may touch the first array."""
    for view in views.values():
        owner = view.owner
        if owner is not None:
            for place, right in owner._rights.items():
                if right.readable and place.is_device:
                    return find_device(place.index)
            owner._check()
            raise AccessError(
                "a launch",
                rule=f"no device has access to {owner.describe()}",
                next_step=owner._grant_step(find_device().location, Access.READ_WRITE),
            )
    return find_device()


def _uses(variant: Variant, views: dict[int, View]) -> list[tuple[Span, Access, tuple[int, int]]]:
    """Return which part, (offset, size), of what memory of ours a launch reads or writes."""
    return [
        (
            one.owner,
            Access.READ_WRITE if one.written else Access.READ,
            (one.address - one.owner._address, one.size),
        )
        for one in variant.places(views)
        if one.owner is not None
    ]


def _launched_only(asked: str) -> LaunchError:
    rule = "a kernel runs for a grid of threads"
    return LaunchError(asked, rule=rule, next_step="Use .launch(…, grid=…, block=…)")


def _hashable(extent: Extent) -> Extent:
    return tuple(extent) if isinstance(extent, Sequence) else extent
