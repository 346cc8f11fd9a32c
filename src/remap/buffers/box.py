"""`DeviceBox`: typed memory that is allocated and freed in the order of a stream, and so never makes anybody wait."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from remap.buffers.fixed import FixedMemory
from remap.buffers.pooled import borrow
from remap.buffers.typed import OwnedMemory, Shape, extent, from_list, place_of
from remap.drivers.powers import PoolFigures, SupportsPools
from remap.errors import InUseError, InvalidValueError, OutOfMemoryError
from remap.lifetime import Release, captures_running, drain, queued, repeatable, undo
from remap.locations import Device, DeviceLike, device, explain_shortage
from remap.sizes import Size, format_size, parse_size
from remap.spans import host_array
from remap.streams import Event, Queue, StreamLike, as_stream
from remap.types import Access
from remap.uses import After, Known, Uses, resolve_after

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


class PoolMemory(FixedMemory):
    """Bytes of a device's memory pool, from a point in one stream, its home, to another one there.

    Work that remap queues on other streams waits for the home stream first, and the free comes after all of it; the
    host waits for none of that, unless another library has closed the home stream: then for the device. Source:
    cuMemAllocAsync, cuMemFreeAsync.
    """

    kind: ClassVar[str] = "pool memory"
    _counted: ClassVar[str] = "pool"

    def __init__(self, at: Device, size: int, home: Queue) -> None:
        super().__init__(at._driver)
        self.device = at
        self.home = home
        self._place = at.location
        self._size = size
        self._rights = {at.location: Access.READ_WRITE}
        if size:
            with home._named(), at.current():
                _check_not_capturing(home, "an allocation from the pool")
                self._address = self._driver.pool_allocate(size, home.handle)
                self._open = True  # from here on an interrupt leaves it to its finaliser
            if home.transient:  # nobody can name it later, so an event stands for it
                self._uses.add(home)
            self._arriving = _Born(home, self)
        self._opened()

    def close(self, *, after: After = Known.STREAMS) -> None:
        """Free the memory in stream order, without a wait but for streams that other libraries have closed.

        Closing again does nothing.

        The free comes after all work on it that remap saw, on whatever stream. `after=` names a stream or an event
        that it is to come after instead, or None: the caller's promise that the home stream's order is enough. Where
        the address was given away remap cannot see who uses it: let those streams `use` the memory. Raises
        `InUseError` under a capture and while arrays of other libraries view it, and `ClosedError` for a stream or an
        event that was closed; it stays open then.
        """
        if self._open and self.home.gone() and captures_running():
            raise InUseError(
                f"closing {self.kind} {self.serial}",
                rule="its stream was closed by its library, so that the device is waited for, and that would break "
                "the capture that is running",
                next_step="End the capture first",
            )
        if isinstance(after, Known):
            if self._known_uses is not None:
                self._known_uses.settle()
            super().close()
            return
        with ExitStack() as kept:

            def after_that(release: Release) -> None:
                what = resolve_after(after, self.device)
                if what is not None:
                    kept.enter_context(what._named())
                if isinstance(what, Queue):
                    _check_not_capturing(what, f"closing {self.kind} {self.serial}")
                if self._size:
                    release.steps = [(_free, (self.device, self.home, self._address, None, what, []))]

            if self._close(after_that) and self._known_uses is not None:
                self._known_uses.forget()

    @contextmanager
    def use(self, stream: StreamLike) -> Generator[int]:
        """Let a stream that remap does not see use the memory within a block; yields the address.

        What is queued there before the block ends comes after the allocation and before the free.
        """
        queue = as_stream(stream, self.device)
        token, mine = object(), self._operations
        try:
            self._begin_use("use", self.device.location, Access.READ_WRITE, token)
            with queue.device.current():
                if self._arriving is not None:
                    self._arriving.join(queue)
            yield self._address
        finally:
            try:
                if token in mine:
                    self._uses.add(queue)
            except BaseException as error:  # interrupted: the work is queued all the same
                undo(error, self._uses.add, queue)
                raise
            finally:
                mine.discard(token)

    def _check_closable(self) -> None:
        super()._check_closable()
        if not self._size:
            return
        asked = f"closing {self.kind} {self.serial}"
        with self.device.current():  # once for all that are asked
            known: Queue | None = None
            if not self.home.transient:
                with self.home.kept() as there:
                    if there:
                        _check_not_capturing(self.home, asked)
                        known = self.home
            if self._known_uses is not None:
                self._known_uses.check_not_capturing(asked, but=known)

    def _detach(self) -> Release:
        if not self._size:
            return Release(0, [])
        return Release(0, [(_free, (self.device, self.home, self._address, self._known_uses, None, []))])


class _Born:
    """The beginning of pool memory, which other streams have to wait for: `Range._arriving`."""

    __slots__ = ("_home", "_uses")

    def __init__(self, home: Queue, memory: PoolMemory) -> None:
        self._home = home
        self._uses = memory._uses if home.transient else None

    def join(self, queue: Queue, part: tuple[int, int] | None = None) -> None:
        home = self._home
        if self._uses is not None:
            self._uses.join(queue)
        elif home.gone():
            home.device.synchronize()
        elif queue.handle != home.handle or queue.device != home.device:
            with home.kept() as there:
                if there:
                    queue.follow(home)


class DeviceBox(OwnedMemory):
    """Typed memory of a device's pool: the choice for many small and short-lived arrays.

    Its home is the stream that it is made on. Closing it frees it in stream order and never waits; what is queued
    after that, anywhere, gets the memory when the work before has passed. Under a capture it is refused: use
    `remap.Graph`, whose memory belongs to the graph.
    """

    __slots__ = ()

    @classmethod
    def from_host(
        cls, array: Any, *, stream: StreamLike | None = None, device: DeviceLike | None = None
    ) -> DeviceBox:
        """Return a box with a copy of a contiguous host array; waits, and raises, as `DeviceBuffer.from_host` does."""
        host = host_array(from_list(array), "from_host", writable=False)
        return cls._made(host.shape, host.dtype, stream, device, host)

    @classmethod
    def zeroed(
        cls,
        shape: Shape,
        dtype: DTypeLike = "float32",
        *,
        stream: StreamLike | None = None,
        device: DeviceLike | None = None,
    ) -> DeviceBox:
        """Return a box of zeros. Waits until they are written, unless `stream` is given."""
        return cls._made(shape, dtype, stream, device, 0)

    @classmethod
    def empty(
        cls,
        shape: Shape,
        dtype: DTypeLike = "float32",
        *,
        stream: StreamLike | None = None,
        device: DeviceLike | None = None,
    ) -> DeviceBox:
        """Return a box whose contents are undefined; never waits."""
        return cls._made(shape, dtype, stream, device, None)

    @classmethod
    def _made(
        cls,
        shape: Shape,
        dtype: Any,
        stream: StreamLike | None,
        at: DeviceLike | None,
        contents: Any,
    ) -> DeviceBox:
        extents, kind, size = extent(shape, dtype)
        place = place_of(at, stream)
        memory = allocate_pooled(size, place, as_stream(stream, place))
        return cls(memory, kind, extents)._with(contents, stream)

    def use(self, stream: StreamLike) -> AbstractContextManager[int]:
        """Let a stream that remap does not see use the memory within a block, as `PoolMemory.use` does."""
        assert isinstance(self.owner, PoolMemory)
        return self.owner.use(stream)

    @staticmethod
    def statistics(device: DeviceLike | None = None) -> PoolFigures:
        """Return what a device's pool holds at this moment: bytes in use and reserved, now and at most."""
        place, driver = _pool_of(device)
        return driver.pool_figures(place.index)

    @staticmethod
    def trim(device: DeviceLike | None = None, *, keep: Size = 0) -> int:
        """Give memory that no box uses back to the device, down to `keep` bytes; return how many bytes that were."""
        place, driver = _pool_of(device)
        with place.current():
            before = driver.pool_figures(place.index).reserved
            driver.pool_trim(place.index, parse_size(keep, "keep"))
            return before - driver.pool_figures(place.index).reserved

    @staticmethod
    def retain(size: Size, device: DeviceLike | None = None) -> None:
        """Let a device's pool keep up to `size` free bytes across waits; at first it keeps nothing."""
        place, driver = _pool_of(device)
        driver.pool_retain(place.index, parse_size(size))


def allocate_pooled(size: int, at: Device, home: Queue) -> PoolMemory:
    """Allocate bytes of a device's pool in the order of a stream; raises `OutOfMemoryError`, `NotSupportedError`."""
    if queued:
        drain()
    _pool_of(at)
    if home.device != at:
        raise InvalidValueError(
            f"pool memory of {at} on a stream of {home.device}",
            rule="memory of a pool is allocated in the order of a stream of its own device",
            next_step="Pass a stream of that device, or its device=",
        )
    try:
        return PoolMemory(at, size, home)
    except OutOfMemoryError as error:
        raise explain_shortage(error, f"{format_size(size)} of the pool of {at}", size, at.location) from None


def _pool_of(which: DeviceLike | None) -> tuple[Device, SupportsPools]:
    place = device(which)
    place.require("memory_pools")
    assert isinstance(place._driver, SupportsPools), "a driver with the capability has the calls"
    return place, place._driver


def _check_not_capturing(queue: Queue, asked: str) -> None:
    try:
        queue.check_not_capturing(asked)
    except InUseError as error:
        step = "Allocate before the capture, or use remap.Graph, whose memory belongs to the graph"
        raise error.explain(asked, next_step=step) from None


@repeatable
def _free(
    at: Device,
    home: Queue,
    address: int,
    uses: Uses | None,
    after: Queue | Event | None,
    done: list[bool],
) -> None:
    """Free memory in its home stream, or in a lent one where that has gone, after the work of all others.

    Doing so again, after an interrupt, frees it unless that was `done`, or begun.
    """
    if done:
        return
    driver: Any = at._driver
    if home.gone():
        at.synchronize()
    with home.kept() as there:
        lent = None if there and not home.transient else borrow(at)
        try:
            if lent is not None:
                home = Queue(lent.handle, at, lent)
            if uses is not None:
                uses.join(home)
            with at.current():
                if isinstance(after, Event):
                    driver.wait_event(home.handle, after.handle)
                elif after is not None:
                    home.follow(after)
                # Before the call: an interrupt comes as it returns, and nothing may go twice.
                done[:] = [True]
                try:
                    driver.pool_free(address, home.handle)
                except InUseError:  # nothing was changed, and it is tried again
                    done.clear()
                    raise
        finally:
            if lent is not None:
                lent.give_back()
    if uses is not None:
        uses.forget()
