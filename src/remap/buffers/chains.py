"""Chains: copies, launches and allocations put together first, and run later, on a stream or awaited.

    chain = remap.chain()
    x = chain.copy_in(array)
    y = chain.empty(array.shape, array.dtype)
    chain.launch(kernel, x, y, grid=..., block=256)
    chain.copy_out(y)
    result = await chain                    # or chain.run(stream=s).wait()

Nothing happens while a chain is put together, and it can be run any number of times, each time with memory of its own
that frees itself in the order of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from remap.buffers.box import DeviceBox
from remap.buffers.pooled import PooledStream, borrow
from remap.buffers.typed import Shape, TypedMemory, extent
from remap.drivers.powers import SupportsHostFunctions
from remap.errors import ClosedError, InvalidValueError
from remap.lifetime import undo
from remap.locations import Device, DeviceLike, device
from remap.spans import host_array
from remap.streams import Event, Queue, StreamCalls, StreamLike, as_stream

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

# Seconds between two looks at work that is awaited, in case its context is lost and nobody says so.
_LOOK = 1.0


class Launchable(Protocol):
    """What a chain can launch: kernels, of any kind."""

    @property
    def launch(self) -> Callable[..., Any]:
        """Queue the kernel with arguments, its shape, and `stream=`."""
        ...


class Later:
    """What a step of a chain will give when it runs: an argument of later steps."""

    __slots__ = ("_chain", "dtype", "index", "shape")

    def __init__(self, chain: Chain, index: int, shape: tuple[int, ...], dtype: Any) -> None:
        self._chain = chain
        self.index = index
        self.shape = shape
        self.dtype = dtype

    def __repr__(self) -> str:
        """Return what it will be."""
        return f"<later: {self.shape} of {self.dtype}, step {self.index} of a chain>"


Step: TypeAlias = "Callable[[Run], Any]"


class Chain:
    """Steps that run one after the other on one stream. Made by `remap.chain`; owns nothing."""

    def __init__(self, at: Device) -> None:
        self.device = at
        self._steps: list[Step] = []
        self._last_use: dict[int, int] = {}
        self._results: list[int] = []
        self._given: set[int] = set()

    # -- putting it together --

    def copy_in(self, array: NDArray[Any]) -> Later:
        """Allocate memory and copy a contiguous host array there, as it is when the chain runs.

        It must not change before the run has passed this step. From pageable memory the driver may make the caller
        wait for what is queued before it; from `remap.pinned` memory it does not.
        """
        host = host_array(array, "copy_in", writable=False)
        return self._later(lambda run: run.make(host.shape, host.dtype, host), host.shape, host.dtype)

    def zeroed(self, shape: Shape, dtype: DTypeLike = "float32") -> Later:
        """Allocate memory and set it to zero."""
        extents, kind, _ = extent(shape, dtype)
        return self._later(lambda run: run.make(extents, kind, 0), extents, kind)

    def empty(self, shape: Shape, dtype: DTypeLike = "float32") -> Later:
        """Allocate memory whose contents are undefined."""
        extents, kind, _ = extent(shape, dtype)
        return self._later(lambda run: run.make(extents, kind, None), extents, kind)

    def launch(self, kernel: Launchable, *arguments: Any, **shape: Any) -> None:
        """Launch a kernel, as its own `launch` does; arguments may be what earlier steps give."""
        named = self._use(arguments)

        def step(run: Run) -> None:
            kernel.launch(
                *(run.value(one) if isinstance(one, Later) else one for one in named),
                stream=run.stream,
                **shape,
            )

        self._add(step)

    def copy_out(self, what: Later | TypedMemory, out: NDArray[Any] | None = None) -> None:
        """Copy to the host; the array is one of the results, in the order of these calls.

        `out` is an array to fill: one over pinned memory lets the copy run beside other work. Without it the copy is
        made when everything has completed and the results are taken.
        """
        if not isinstance(what, Later | TypedMemory):
            given: Any = what
            raise TypeError(f"copy_out takes what a step gives, or typed memory of remap, and not {given!r}")
        self._use((what,))
        if out is not None:
            found = host_array(out, "copy_out", writable=True)
            if found.shape != what.shape or found.dtype != what.dtype:
                rule = f"what is copied has shape {what.shape} of {what.dtype}, and copies convert nothing"
                raise InvalidValueError(f"copy_out with shape {found.shape} of {found.dtype}", rule=rule)
        index = len(self._steps)
        self._results.append(index)
        self._add(
            lambda run: run.copy_out(
                what, out, isinstance(what, Later) and self._last_use[what.index] == index
            )
        )

    def give(self, what: Later) -> None:
        """Make memory of the chain one of the results: a `DeviceBox`, which is then the caller's to close.

        It comes after the last step that uses the memory.
        """
        if not isinstance(what, Later):
            given: Any = what
            raise TypeError(f"give takes what a step of the chain gives, and not {given!r}")
        self._use((what,))
        self._given.add(what.index)
        self._results.append(len(self._steps))
        self._add(lambda run: run.hand_over(what))

    def call(self, function: Callable[[Any], object]) -> None:
        """Call a function that queues work on the stream it is given, such as a library's own call.

        That is the stream that `run` was given, as it is, or a lent one of remap.
        """
        self._add(lambda run: function(run.stream))

    def _later(self, step: Step, shape: tuple[int, ...], dtype: Any) -> Later:
        self._add(step)
        return Later(self, len(self._steps) - 1, shape, dtype)

    def _add(self, step: Step) -> None:
        self._steps.append(step)

    def _use(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        for one in arguments:
            if isinstance(one, Later):
                if one._chain is not self:
                    raise InvalidValueError(
                        f"{one!r} of another chain", rule="a chain uses what its own steps give"
                    )
                if one.index in self._given:
                    raise InvalidValueError(
                        f"a use of {one!r}",
                        rule="an earlier step gave it away",
                        next_step="Call give() after the last step that uses it",
                    )
                self._last_use[one.index] = len(self._steps)
        return arguments

    # -- running it --

    def run(self, *, stream: StreamLike | None = None) -> Run:
        """Queue all steps on a stream, a lent one by default, and return the run; does not wait for the work.

        If a step fails, what the earlier ones allocated is freed in stream order, and what they queued still runs.
        Raises `InUseError` for a stream that is being captured.
        """
        return Run(self, stream)

    def __await__(self) -> Generator[Any, None, Any]:
        """Run the chain, and return its results when they are there."""
        return self.run().__await__()


class Run:
    """A chain that was queued. `wait()` or `await` gives its results: one as it is, several as a tuple, or None.

    A run that is dropped is no mistake: its work goes on, and its memory is freed behind it.
    """

    def __init__(self, chain: Chain, stream: StreamLike | None) -> None:
        self._chain = chain
        self._lent = borrow(chain.device) if stream is None else None
        self.stream: StreamLike = cast("StreamCalls", self._lent) if stream is None else stream
        self._values: dict[int, DeviceBox] = {}
        self._results: list[Any] = []
        self._copies: dict[int, DeviceBox] = {}  # by their place among the results
        self._event: Event | None = None
        self._taking = threading.Lock()
        try:
            queue = as_stream(self.stream, chain.device)
            queue.check_not_capturing("a run of a chain")
            self._device = queue.device
            for index, step in enumerate(chain._steps):
                self._take_step(index, step)
            self._event = _Named(queue).record()
        except BaseException as error:
            boxes = [one for one in self._results if isinstance(one, DeviceBox)]
            for box in (*self._values.values(), *self._copies.values(), *boxes):
                undo(error, box.close)
            raise

    def _take_step(self, index: int, step: Step) -> None:
        chain = self._chain
        value = step(self)
        if index in chain._results:
            self._results.append(value)
        elif isinstance(value, DeviceBox):
            self._values[index] = value
        for done in [made for made in self._values if chain._last_use.get(made, made) <= index]:
            self._values.pop(done).close()

    # -- what steps do --

    def make(self, shape: tuple[int, ...], dtype: Any, contents: Any) -> DeviceBox:
        """Allocate memory in the order of the stream, with contents that are queued there too."""
        made = DeviceBox._made(shape, dtype, self.stream, self._device, contents)
        made.owner._warns = False  # it frees itself in stream order when nobody has it any more
        return made

    def value(self, later: Later) -> DeviceBox:
        """Return what an earlier step gave."""
        return self._values[later.index]

    def copy_out(
        self, what: Later | TypedMemory, out: NDArray[Any] | None, last: bool
    ) -> NDArray[Any] | None:
        """Queue a copy to the host, or keep what is to be copied when everything has completed."""
        source = self.value(what) if isinstance(what, Later) else what
        if out is not None:
            source.copy_to_host(out, stream=self.stream)
        elif isinstance(what, Later) and last:
            self._copies[len(self._results)] = self._values.pop(what.index)
        else:  # others may write there after this step
            kept = self._copies[len(self._results)] = self.make(source.shape, source.dtype, None)
            if kept.nbytes:
                part = {"source_offset": source.offset, "size": kept.nbytes}
                kept.owner.copy_from(source.owner, **part, stream=self.stream)
        return out

    def hand_over(self, what: Later) -> DeviceBox:
        """Take memory out of the run, for the caller."""
        return self._values.pop(what.index)

    # -- its end --

    @property
    def done(self) -> bool:
        """Whether all of it has completed; does not wait."""
        event = self._event  # read once: another thread may take the results
        return event is None or event.done

    def wait(self) -> Any:
        """Wait until all of it has completed, and return the results, which are given once.

        Raises `ClosedError` where they were taken before. After any other failure, or an interrupt, call it again.
        """
        event = self._event
        if event is not None:
            event._check()  # in a forked child nobody lets go of the lock
        with self._taking:
            event = self._event
            if event is None:
                raise ClosedError("the results of a run", rule="they were taken before, and are given once")
            # Nothing is dropped before all of it is there: whoever is interrupted, or told of a kernel, waits again.
            event.synchronize()
            for index, box in list(self._copies.items()):
                self._results[index] = box.to_host(stream=self.stream)
                self._copies.pop(index).close()
            lent, self._lent = self._lent, None  # before the call: given back twice, it would be lent to two
            if lent is not None:
                lent.give_back()
            results, self._results, self._event = self._results, [], None
            event.close()
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def __await__(self) -> Generator[Any, None, Any]:
        """Let other tasks run until all of it has completed, and return the results."""
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        event = self._event
        if event is not None and not event.done:
            loop = asyncio.get_running_loop()
            passed = asyncio.Event()
            driver = self._chain.device._driver
            assert isinstance(driver, SupportsHostFunctions)
            # In a stream beside: on CUDA, host functions wait for each other, and what is copied out would wait, too.
            beside = borrow(self._chain.device)
            try:
                with event._named(), self._chain.device.current():
                    driver.wait_event(beside.handle, event.handle)
                    driver.launch_host_function(beside.handle, partial(_wake, loop, passed, self))
                while not passed.is_set() and not self.done:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(passed.wait(), _LOOK)
            finally:
                beside.give_back()
        return self.wait()

    def __del__(self) -> None:
        """Give the lent stream back; takes no lock and calls no driver, so it may run anywhere."""
        lent: PooledStream | None = getattr(self, "_lent", None)
        if lent is not None:
            lent.give_back()
        event: Event | None = getattr(self, "_event", None)
        if event is not None:
            event._warns = False


class _Named(StreamCalls):
    """A stream of whatever kind, for as long as a call takes: the object that it comes from keeps it."""

    def __init__(self, queue: Queue) -> None:
        self.device, self._driver, self.handle = queue.device, queue.device._driver, queue.handle


def _wake(loop: asyncio.AbstractEventLoop, passed: asyncio.Event, _run: Run) -> None:
    """Tell an event loop that a run has completed; holds the run until then, whoever else has dropped it."""
    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody awaits any more
        loop.call_soon_threadsafe(passed.set)


def chain(at: DeviceLike | None = None) -> Chain:
    """Begin a chain of copies, launches and allocations on a device, the fastest by default."""
    return Chain(device(at))
