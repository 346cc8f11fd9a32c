"""Launch a kernel: check the configuration and the arguments, queue it, and note who uses what from then on."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from remap.drivers.powers import SupportsHostFunctions, SupportsRepeats
from remap.drivers.protocol import SupportsModules
from remap.errors import InUseError, LaunchError
from remap.kernels.again import Again, Kept, Repeatable, Shape, is_foreign
from remap.kernels.image import Parameter
from remap.kernels.params import Arguments, Packer
from remap.kernels.twin import Twin, runner
from remap.launches import Changed, MemoryUse, PartUse, Repeat, Usable, check_uses, launches
from remap.lifetime import watchers
from remap.sizes import Size, format_size, parse_size
from remap.streams import Queue, Stream, StreamLike, as_stream
from remap.types import Access, Dim3, LaunchConfig, Location, Touched

if TYPE_CHECKING:
    from remap.kernels.module import Module
    from remap.locations import Device

Extent: TypeAlias = int | Sequence[int]
"""What is taken as a grid or a block: one to three extents."""

_NONE = Access.NONE
_KEPT = 256  # configurations that one kernel remembers as checked


class Prepared(NamedTuple):
    """A launch that was checked, for a graph that makes it later, any number of times.

    `packed` is given back once a node has taken the bytes over; `module` must stay open while it can be made. `memory`
    are the parts that it is known to use.
    """

    function: Any
    config: LaunchConfig
    packed: Arguments
    touches: list[Touched] | None
    module: Module
    memory: Sequence[MemoryUse] = ()


class Work(NamedTuple):
    """A launch that was checked, for a stream."""

    function: Any
    config: LaunchConfig
    queue: Queue
    packed: Arguments
    touches: list[Touched] | None


class Kernel:
    """A kernel of a module that can be launched. Made by `Module.function`, and alive as long as the module."""

    def __init__(
        self, module: Module, name: str, function: int | None, parameters: Sequence[Parameter] | None
    ) -> None:
        self.module = module
        self.name = name
        self._function = function
        self._kept = Kept()
        self._packer = Packer(name, parameters, self._host_memory_unreached)
        self._twin: Any = None
        self._checked: dict[tuple[Extent, Extent, Size], LaunchConfig] = {}
        self._shared_allowed = 0
        self._asked = f"launch of {name}"

    @property
    def parameters(self) -> tuple[Parameter, ...] | None:
        """The size and type of each parameter, as far as the image tells; None where it tells nothing."""
        return self._packer.parameters

    def host(self, twin: Twin) -> Twin:
        """Register the function that runs in this kernel's place on the host driver, and return it. A decorator.

        It is called once for each launch, with the launch and the arguments: an address is a `Pointer`, whose
        `read(dtype, shape)` and `write(dtype, shape)` return arrays straight over memory; everything else is as it
        was given. It must do what all threads of the kernel do together.

        Raises `TypeError` for a function that does not take as many arguments as the kernel has parameters, and the
        launch before them. What it raises when it runs is a `KernelError` at the next wait.
        """
        known = self._packer.parameters
        self._twin = runner(twin, self.name, None if known is None else len(known))
        self._kept.clear()
        return twin

    def launch(
        self,
        *arguments: Any,
        grid: Extent,
        block: Extent,
        shared: Size = 0,
        stream: StreamLike | None = None,
    ) -> None:
        """Queue the kernel on a stream of the module's device; does not wait.

        `grid` counts blocks, `block` counts threads in each, with one to three extents; `shared` is the dynamic
        shared memory of a block. Arguments are buffers and other memory (their address is passed), NumPy or ctypes
        scalars, and Python numbers, which take the type of the parameter. Buffers stay in use until the stream has
        passed: closing them waits.

        Raises `LaunchError` if the configuration or an argument does not fit, and `AccessError`, `PausedError`,
        `InUseError` or `ClosedError` for memory that the device may not use now; then nothing was launched.
        Source: cuLaunchKernel.
        """
        shape = (len(arguments), grid, block, shared)
        if not self._kept.again(arguments, stream, shape):
            until_unchanged(
                self._asked, partial(self._check_and_launch, arguments, grid, block, shared, stream)
            )

    def _check_and_launch(
        self,
        arguments: tuple[Any, ...],
        grid: Extent,
        block: Extent,
        shared: Size,
        stream: StreamLike | None,
    ) -> None:
        shape = (len(arguments), grid, block, shared)
        checked = launches.stamp
        module = self.module
        module._check()
        queue = module._default if stream is None else as_stream(stream, module.device)
        if queue.device is not module.device and queue.device != module.device:
            raise LaunchError(
                f"{self._asked} on a stream of {queue.device}",
                rule=f"its module is loaded on {module.device}",
                next_step="Load it on that device too: remap.load(…, device=…)",
            )
        try:
            config = self._checked.get(shape[1:]) or self._check(grid, block, shared)
        except TypeError:  # a list is no key
            config = self._check(_extents("grid", grid), _extents("block", block), shared)
            shape = (len(arguments), config.grid, config.block, shared)
        if self._function is None:
            packed = self._packer.values(arguments)
            touches = _touches(packed, module.device.location)
            work = Work(self._twin or self._no_twin(), config, queue, packed, touches)
        else:
            work = Work(self._function, config, queue, self._packer.pack(arguments), None)
        found = self._packer.repeatable(arguments, work.packed) if can_keep(queue, stream) else None
        self._launch(work, self._kept, arguments, stream, shape, found, checked)

    def _launch(
        self,
        work: Work,
        kept: Kept,
        given: tuple[Any, ...],
        stream: StreamLike | None,
        shape: Shape,
        found: Repeatable | None,
        checked: object,
        parts: Sequence[PartUse] = (),
    ) -> None:
        """Launch while nobody can take away what that uses, and keep the launch if `found` says how to repeat it."""
        packed = work.packed
        things: tuple[Usable, ...] = (self.module, *packed.spans)
        try:
            # On the host driver the numbers are in the function.
            if found is None or (self._function is None and found.numbers):
                Repeat(things, work.queue, self._asked, partial(_queue, work), checked, parts).go()
                packed.give_back()
                return
            again = Again(things, work, self._asked, self._call(work), shape, found, checked, parts)
            again.go()
        except BaseException:
            packed.give_back()
            raise
        if checked is not launches.stamp:  # what the checks have found may have changed since
            packed.give_back()
            return
        packed.spans = ()  # nothing is kept alive
        kept.keep(again, stream, given)

    def _call(self, work: Work) -> Callable[[], None]:
        """Return what makes the driver's call, again and again."""
        function, config, queue, packed, _ = work
        device = queue.device
        if self._function is None or not isinstance(device._driver, SupportsRepeats):
            return partial(_queue, work)
        with device.current():  # so that it has a context
            return device._driver.repeat_launch(device._context, function, config, queue.handle, packed)

    def _prepare(
        self, arguments: tuple[Any, ...], grid: Extent, block: Extent, shared: Size, at: Device
    ) -> Prepared:
        """Check a launch on a device as `launch` does, and return what a graph needs to make it later."""
        module = self.module
        module._check()
        if at != module.device:
            raise LaunchError(
                f"{self._asked} in a graph of {at}",
                rule=f"its module is loaded on {module.device}",
                next_step="Load it on that device too: remap.load(…, device=…)",
            )
        config = self._check(_extents("grid", grid), _extents("block", block), shared)
        if self._function is None:
            packed = self._packer.values(arguments)
            function = self._twin or self._no_twin()
        else:
            packed, function = self._packer.pack(arguments), self._function
        return self._prepared(function, config, packed, _touches(packed, at.location))

    def _prepared(
        self, function: Any, config: LaunchConfig, packed: Arguments, touches: list[Touched] | None
    ) -> Prepared:
        """Return a launch for a graph, once its memory has been seen to be usable on the module's device."""
        try:
            with self.module._driver.lock:
                check_uses((self.module, *packed.spans), self.module.device.location, self._asked)
        except BaseException:
            packed.give_back()
            raise
        return Prepared(function, config, packed, touches, self.module)

    def _host_memory_unreached(self) -> str:
        """Say why the device does not reach host memory by its own addresses; empty where it does."""
        found = self.module.device.capabilities
        return "" if found["hmm"] or found["ats"] else found["hmm"].reason

    def _no_twin(self) -> Any:
        raise LaunchError(
            f"{self._asked} on the {self.module.device._driver.name} driver",
            rule="compiled code does not run there",
            next_step="Register what it does in Python: decorate a function with @kernel.host",
        )

    def _check(self, grid: Extent, block: Extent, shared: Size) -> LaunchConfig:
        """Check a configuration against the limits of the device and the kernel, and remember it."""
        blocks, threads = _extents("grid", grid), _extents("block", block)
        shared_bytes = parse_size(shared, "shared")
        config = LaunchConfig(blocks, threads, shared_bytes)
        properties = self.module.device.properties
        self._check_extents("blocks", blocks, properties.max_grid)
        self._check_extents("threads", threads, properties.max_block)
        most_threads, most_shared = properties.max_threads_per_block, properties.shared_memory_per_block_optin
        static = 0
        driver, function = self.module.device._driver, self._function
        if function is not None and isinstance(driver, SupportsModules):
            with self.module.device.current():
                found = driver.function_attributes(function)
                most_threads, static = found["max_threads_per_block"], found["shared_bytes"]
                # Beyond what every device has, a kernel must be allowed to (CUDA programming guide, shared memory).
                extra = shared_bytes > max(self._shared_allowed, properties.shared_memory_per_block - static)
                if extra and static + shared_bytes <= most_shared:
                    driver.set_dynamic_shared_limit(function, shared_bytes)
                    self._shared_allowed = shared_bytes
        total = threads[0] * threads[1] * threads[2]
        if total > most_threads:
            raise LaunchError(
                f"{self._asked} with {total} threads a block",
                rule=f"{self.module.device} takes at most {most_threads} for this kernel",
            )
        if static + shared_bytes > most_shared:
            raise too_much_shared(self._asked, shared_bytes, static, self.module.device, most_shared)
        if len(self._checked) >= _KEPT:
            self._checked.clear()
        self._checked[grid, block, shared] = config
        return config

    def _check_extents(self, what: str, extents: Dim3, limits: Dim3) -> None:
        for axis, extent, limit in zip("xyz", extents, limits, strict=True):
            if extent < 1:
                raise LaunchError(
                    f"{self._asked} with {extent} {what} in {axis}",
                    rule="every extent is 1 or more",
                    next_step="Skip the launch where there is nothing to do",
                )
            if extent > limit:
                rule = f"{self.module.device} takes at most {limit} there"
                raise LaunchError(f"{self._asked} with {extent} {what} in {axis}", rule=rule)

    def __repr__(self) -> str:
        """Return the kernel's name and where it is from."""
        return f"<remap.Kernel {self.name} of {self.module.image.name} on {self.module.device}>"


def too_much_shared(asked: str, dynamic: int, static: int, device: Device, most: int) -> LaunchError:
    """Return the error for more shared memory than a block of a device has."""
    beside = f" beside {_in_full(static)} of static" if static else ""
    return LaunchError(
        f"{asked} with {_in_full(dynamic)} of dynamic shared memory a block{beside}",
        rule=f"{device} has {format_size(most)} ({most:,} bytes)",
        next_step="Let a block work on less at a time: smaller tiles, fewer threads",
    )


def _in_full(size: int) -> str:
    """Return a size as text that is exact: a byte more or less decides."""
    text = format_size(size)
    return f"{size:,} bytes" if "." in text else text


def until_unchanged(asked: str, launch: Callable[[], None]) -> None:
    """Check and launch, again where something was changed in between; the second time is mostly enough."""
    for _ in range(_TRIES):
        with suppress(Changed):
            launch()
            return
    raise InUseError(
        asked,
        rule="other threads take memory away or give it back all the time, so that no check holds until the launch",
        next_step="Launch it again",
    )


_TRIES = 1000


def _extents(what: str, given: Extent) -> Dim3:
    """Return one to three extents as three."""
    try:
        extents = [operator.index(extent) for extent in (given if isinstance(given, Sequence) else (given,))]
    except TypeError:
        extents = []
    if not 1 <= len(extents) <= 3:
        raise LaunchError(f"{what} {given!r}", rule="it is a whole number, or one to three of them")
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z


def _touches(packed: Arguments, place: Location) -> list[Touched] | None:
    """Return what the kernel may touch: the spans it was given, or None if there is other memory among them."""
    if not packed.traceable:
        return None
    touched = [
        Touched(span._address, span.size, span._rights.get(place, _NONE).writable)
        for span in packed.spans
        if span.size
    ]
    return touched + [Touched(one.ctypes.data, one.nbytes, one.flags.writeable) for one in packed.host]


def can_keep(queue: Queue, stream: StreamLike | None) -> bool:
    """Tell whether launches on a stream can be kept: the handle goes on meaning it, or who launches has its owner."""
    return not (queue.transient or watchers) and (
        stream is None or isinstance(stream, Stream) or is_foreign(stream)
    )


def _queue(work: Work) -> None:
    """Make the driver's call, after what other libraries have queued on their arrays among the arguments."""
    function, config, queue, packed, touches = work
    device = queue.device
    driver = device._driver
    context = device._context
    if context and not (packed.streams or packed.host) and driver.current_context() == context:
        # As below, without the price of `current()`: most programs keep one context current.
        driver.launch(function, config, queue.handle, packed, touches)
        return
    with device.current():
        for stream in packed.streams:
            if stream != queue.handle:
                queue.follow(Queue(stream, device, None))
        driver.launch(function, config, queue.handle, packed, touches)
        if packed.host and isinstance(driver, SupportsHostFunctions):
            # The driver keeps this until the kernel has run, and with it the arrays.
            driver.launch_host_function(queue.handle, partial(_let_go, packed.host))


def _let_go(_arrays: object) -> None:
    """Do nothing: being kept until it is called is all that this is for."""
