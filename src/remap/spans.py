"""Spans: ranges of mapped addresses that can be filled, copied and viewed. Mappings and all buffers are spans.

A span knows who may touch it, which queued work may still use it (`Uses`), and who looks at it through an array.
Operations that use the memory go on side by side; those that would take it away (closing, and what residency adds)
exclude them and each other: the second one raises `InUseError` (invariant 13).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from remap.locations import Device, device
from remap.errors import AccessError, InUseError, InvalidValueError
from remap.lifetime import Resource
from remap.sizes import format_size
from remap.streams import After, Known, Queue, StreamLike, Uses, as_stream, wait_after
from remap.types import Access, Location

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from remap.arrays import DeviceArray


class Chunk(NamedTuple):
    """One physical allocation's share of a span: where it starts, its bytes, and the location that holds them."""

    address: int
    size: int
    location: Location


class Span(Resource):
    """A range of mapped addresses with access rights: the base of `Mapping` and of every buffer."""

    # Defaults on the class and not in a constructor: most spans never leave them.
    _address: int = 0
    _size: int = 0
    _rights: dict[Location, Access]
    _known_uses: Uses | None = None
    _busy: int = 0
    _taken: str = ""
    # A token for each array that another library holds. Adding and dropping one is atomic, so a finaliser can do it on
    # any thread without a lock.
    _exports: set[int] | None = None

    # -- what it is --

    @property
    def address(self) -> int:
        """The first address, the same for the whole life of this object.

        Reading it lets the address escape: from then on remap cannot know who uses it, and closing waits for the
        contexts of all accessing devices unless `after=` says otherwise (invariant 7).
        """
        self._check()
        self._uses.escaped = True
        return self._address

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self._size

    @property
    def access(self) -> Mapping[Location, Access]:
        """The right of each location that has one."""
        return MappingProxyType(dict(self._rights))

    @property
    def accessing(self) -> tuple[Device, ...]:
        """The devices that may touch this memory, in the order in which they were named."""
        return tuple(
            device(place.index) for place, right in self._rights.items() if place.is_device and right.readable
        )

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Every (address, size, location) behind this range, in order. Reading it lets the addresses escape."""
        raise NotImplementedError

    # -- what can be done with it --

    def fill(
        self, value: int, *, offset: int = 0, size: int | None = None, stream: StreamLike | None = None
    ) -> None:
        """Set each byte of a range to `value`, 0 to 255.

        Waits until it is done, unless `stream` is given: then the work is queued there. `offset` and `size` are in
        bytes; the whole by default. Raises `AccessError` if nobody may write. Source: cuMemsetD8Async.
        """
        if not 0 <= value <= 255:
            raise InvalidValueError(f"fill with {value}", rule="a byte is 0 to 255")
        size = self._part("fill", offset, size)
        with self._using("fill", Access.READ_WRITE, stream) as queue:
            if size and queue is None:
                ctypes.memset(self._address + offset, value, size)
            elif size:
                self._driver.fill(self._address + offset, value, 1, size, queue.handle)  # type: ignore[union-attr]

    def copy_from_host(self, array: Any, *, offset: int = 0, stream: StreamLike | None = None) -> None:
        """Copy a host array, or anything with the buffer protocol, into this memory from byte `offset` on.

        Waits until it is done, unless `stream` is given: then do not change the array before that stream has passed
        (it is kept alive until then). Raises `InvalidValueError` if it is not contiguous or does not fit. Source:
        cuMemcpyHtoDAsync.
        """
        host = _host_array(array, "copy_from_host", writable=False)
        size = self._part("copy_from_host", offset, host.nbytes)
        with self._using("copy_from_host", Access.READ_WRITE, stream, keep=host) as queue:
            if size and queue is None:
                ctypes.memmove(self._address + offset, host.ctypes.data, size)
            elif size:
                self._driver.copy_to_device(self._address + offset, host.ctypes.data, size, queue.handle)  # type: ignore[union-attr]

    def copy_to_host(self, out: Any, *, offset: int = 0, stream: StreamLike | None = None) -> None:
        """Copy from byte `offset` on into a host array, filling it.

        Waits until it is done, unless `stream` is given: then the array is complete once that stream has passed.
        Raises `InvalidValueError` if it is read-only, not contiguous or larger than what is there. Source:
        cuMemcpyDtoHAsync.
        """
        host = _host_array(out, "copy_to_host", writable=True)
        size = self._part("copy_to_host", offset, host.nbytes)
        with self._using("copy_to_host", Access.READ, stream, keep=host) as queue:
            if size and queue is None:
                ctypes.memmove(host.ctypes.data, self._address + offset, size)
            elif size:
                self._driver.copy_to_host(host.ctypes.data, self._address + offset, size, queue.handle)  # type: ignore[union-attr]

    def to_host(
        self, dtype: DTypeLike = "uint8", shape: int | Sequence[int] | None = None, *, offset: int = 0
    ) -> NDArray[Any]:
        """Return a new NumPy array with a copy of this memory.

        `shape` defaults to as many elements as fit from byte `offset` on. Waits.
        """
        import numpy as np

        kind = np.dtype(dtype)
        if shape is None:
            shape = max(self._size - offset, 0) // kind.itemsize
        out = np.empty(shape, kind)
        self.copy_to_host(out, offset=offset)
        return out

    def copy_from(
        self,
        source: Span,
        *,
        offset: int = 0,
        source_offset: int = 0,
        size: int | None = None,
        stream: StreamLike | None = None,
    ) -> None:
        """Copy bytes of another span into this one, on whatever devices either lies.

        Waits until it is done, unless `stream` is given. The device that copies must be able to write here and read
        there. Source: cuMemcpyDtoDAsync.
        """
        if size is None:
            size = min(self._size - offset, source.size - source_offset)
        size = self._part("copy_from", offset, size)
        source._part("copy_from", source_offset, size)
        with self._using("copy_from", Access.READ_WRITE, stream, source=source) as queue:
            target, origin = self._address + offset, source._address + source_offset
            if size and queue is None:
                ctypes.memmove(target, origin, size)
            elif size:
                self._driver.copy(target, origin, size, queue.handle)  # type: ignore[union-attr]

    def array(
        self, dtype: DTypeLike = "uint8", shape: int | Sequence[int] | None = None, *, offset: int = 0
    ) -> DeviceArray:
        """Return a view of this memory that NumPy, CuPy, torch and Numba take without a copy.

        `shape` defaults to as many elements as fit from byte `offset` on. The view keeps this object alive, and
        this object cannot be closed while another library holds what it took from the view.
        """
        from remap.arrays import DeviceArray

        return DeviceArray.over(self, dtype, shape, offset)

    # -- for the rooms above --

    @property
    def _uses(self) -> Uses:
        uses = self._known_uses
        if uses is None:
            with self._driver.lock:  # two threads may come first at the same time
                uses = self._known_uses
                if uses is None:
                    uses = self._known_uses = Uses()
        return uses

    def _part(self, asked: str, offset: int, size: int | None) -> int:
        """Return the size of a part, checked against this span's bounds."""
        self._check()
        if size is None:
            size = self._size - offset
        if offset < 0 or size < 0 or offset + size > self._size:
            raise InvalidValueError(
                f"{asked} of {format_size(size)} from offset {offset}",
                rule=f"the {self.kind} has {format_size(self._size)} ({self._size} bytes)",
            )
        return size

    def _check_backed(self, asked: str) -> None:
        """Raise `PausedError` if no memory stands behind the range; a mapping always has it."""

    def _right(self, place: Location) -> Access:
        return self._rights.get(place, Access.NONE)

    def _begin_use(self, asked: str, place: Location, needed: Access) -> None:
        """Begin an operation on the memory by one location; every one is followed by `_end_use`."""
        with self._driver.lock:
            self._check()
            if self._taken:
                raise InUseError(
                    f"{asked} of {self.describe()}",
                    rule=f"it is being {self._taken} by another thread",
                    next_step="Let that end first",
                )
            self._check_backed(asked)
            right = self._right(place)
            if not (right.writable if needed is Access.READ_WRITE else right.readable):
                raise AccessError(
                    f"{asked} by {place}",
                    rule=f"it has {_words(right)} to {self.describe()}",
                    next_step=f'Grant it with access={{{place}: "{needed}"}}',
                )
            self._busy += 1

    def _end_use(self, queue: Queue | None, keep: object = None) -> None:
        """End an operation; `queue` is where work was left queued, None where it has completed."""
        try:
            if queue is not None:
                self._uses.add(queue, keep)
        finally:
            with self._driver.lock:
                self._busy -= 1

    @contextmanager
    def _using(
        self,
        asked: str,
        needed: Access,
        stream: StreamLike | None,
        *,
        keep: object = None,
        source: Span | None = None,
    ) -> Generator[Queue | None]:
        """Run a block that queues work on the memory; yields the queue, or None where the CPU does it now."""
        place = self._actor(asked, needed, stream, source)
        queue = None
        if place.is_device:
            queue = as_stream(stream, device(place.index))
        left = queue if stream is not None else None
        self._begin_use(asked, place, needed)
        done = False
        try:
            if source is not None:
                source._begin_use(asked, place, Access.READ)
            try:
                if queue is None:
                    self._wait_for_work(asked)
                    if source is not None:
                        source._wait_for_work(asked)
                    yield None
                else:
                    with queue.device.current():
                        yield queue
                        if stream is None:
                            self._driver.synchronize_stream(queue.handle)
                done = True
            finally:
                if source is not None:
                    source._end_use(left if done else None)
        finally:
            self._end_use(left if done else None, keep)

    def _actor(self, asked: str, needed: Access, stream: StreamLike | None, source: Span | None) -> Location:
        """Return the location that carries an operation out: the stream's device, else one that has the rights."""
        named = getattr(stream, "device", None)
        if isinstance(named, Device):
            return named.location
        fitting = [
            place
            for place, right in self._rights.items()
            if (right.writable if needed is Access.READ_WRITE else right.readable)
            and (source is None or source._right(place).readable)
        ]
        if not fitting:
            both = f" and to {source.describe()}" if source is not None else ""
            raise AccessError(
                f"{asked} of {self.describe()}",
                rule=f"no location has {_words(needed)} to it{both}",
                next_step="Grant it with set_access, or when the memory is mapped",
            )
        # A device before the CPU: it copies faster, and in the order of a stream.
        return next((place for place in fitting if place.is_device), fitting[0])

    def _wait_for_work(self, asked: str) -> None:
        if self._known_uses:
            self._known_uses.wait(self.accessing, f"{asked} of {self.describe()}")

    @contextmanager
    def _taking(self, doing: str) -> Generator[None]:
        """Exclude all other operations for a block that takes the memory away; `doing` is a past participle."""
        with self._driver.lock:
            self._check()
            self._check_free(doing)
            self._taken = doing
        try:
            yield
        finally:
            with self._driver.lock:
                self._taken = ""

    def _check_free(self, doing: str) -> None:
        """Raise `InUseError` if anything uses the memory at this moment, or looks at it through an array."""
        if self._taken or self._busy:
            rule = (
                f"it is being {self._taken}"
                if self._taken
                else f"{self._busy} operations on it are under way"
            )
            raise InUseError(f"{self.describe()} to be {doing}", rule=rule, next_step="Let them end first")
        if self._exports:
            raise InUseError(
                f"{self.describe()} to be {doing}",
                rule=f"{len(self._exports)} arrays of other libraries still view it",
                next_step="Delete them first",
            )

    def _check_closable(self) -> None:
        if self._taken or self._busy or self._exports:
            self._check_free("closed")

    def close(self, *, after: After = Known.STREAMS) -> None:
        """Unmap and give the memory back. Closing again does nothing.

        Waits on the host for the work that may still use it: by default for all streams that remap knows to use it
        and, once the address escaped, for the contexts of the accessing devices. `after=` names a stream or an
        event to wait for instead, or None: the caller's promise that there is no such work. Raises `InUseError`,
        and stays open, while arrays of other libraries view it or a stream to be waited for is being captured.
        """
        release = self._begin_close()
        if release is None:
            return
        if not isinstance(after, Known):
            accessing, asked = self.accessing, f"closing {self.describe()}"
            release.wait = lambda: wait_after(after, accessing[0] if accessing else device(), asked)
        self._finish_close(release)
        if self._known_uses is not None:
            self._known_uses.forget()

    def _wait_on_close(self) -> Callable[[], None] | None:
        uses = self._known_uses
        return uses.waiter(self.accessing, f"closing {self.kind} {self.serial}") if uses else None


def _words(right: Access) -> str:
    return {Access.NONE: "no access", Access.READ: "read access", Access.READ_WRITE: "read-write access"}[
        right
    ]


def _host_array(value: Any, asked: str, *, writable: bool) -> NDArray[Any]:
    import numpy as np

    is_array = isinstance(value, np.ndarray)
    array: NDArray[Any] = cast("NDArray[Any]", value) if is_array else np.asarray(memoryview(value))
    if not array.flags.c_contiguous:
        raise InvalidValueError(
            f"{asked} with an array of strides {array.strides}",
            rule="the bytes are copied in one piece, so the array must be contiguous",
            next_step="Pass numpy.ascontiguousarray(array)",
        )
    if writable and not array.flags.writeable:
        raise InvalidValueError(f"{asked} into a read-only array", rule="it would be written")
    if array.dtype.hasobject:
        raise InvalidValueError(
            f"{asked} with dtype {array.dtype}", rule="Python objects have no bytes to copy"
        )
    return array
