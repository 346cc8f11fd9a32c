"""`DeviceArray`: a span's memory seen as an array, which other libraries take without a copy.

CuPy, Numba and torch take it through `__cuda_array_interface__` or DLPack, NumPy through `numpy()` or DLPack where the
CPU may look. Whoever took it keeps the memory alive, and while anyone has it the span refuses to close or pause.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from remap import dlpack
from remap.dtypes import ADDED, check_shape, check_type
from remap.errors import AccessError, AlignmentError, InvalidValueError
from remap.exports import Export, ExportError, Memory
from remap.foreign import NEWEST_INTERFACE, as_array, check_extent, contiguous_strides
from remap.hints import MOVES, hinted
from remap.locations import Device, device
from remap.sizes import Size, parse_offset
from remap.streams import Queue, StreamLike, default_handle
from remap.types import Access, Host, Location

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


@hinted(data_ptr="address", export="remap.export(array)", ptr="address", **MOVES)
class DeviceArray:
    """Memory of a buffer or a mapping as elements of one type in a contiguous shape. Made by `.array()`.

    It keeps `owner` alive. Attributes that tell what it is go on working when the owner is closed; everything that
    leads to the memory raises `ClosedError` then.
    """

    __slots__ = ("__weakref__", "_handed_out", "_stream", "dtype", "offset", "owner", "shape")

    def __init__(self, owner: Memory, dtype: Any, shape: tuple[int, ...], offset: int) -> None:
        self.owner = owner
        self.dtype = dtype
        self.shape = shape
        self.offset = offset
        self._handed_out: Export | None = None
        self._stream: Queue | None = None

    @classmethod
    def over(
        cls,
        owner: Memory,
        dtype: DTypeLike = "uint8",
        shape: int | Sequence[int] | None = None,
        offset: Size = 0,
    ) -> DeviceArray:
        """Return the array of `shape` and `dtype` that begins `offset` bytes into the memory.

        `shape` defaults to as many elements as fit. Raises `InvalidValueError` for a type without bytes, a negative
        extent or an array that does not fit, `AlignmentError` for an offset that would make the elements unaligned,
        and `SizeOverflowError` (an `OverflowError`).
        """
        kind = check_type(dtype)
        start = parse_offset(offset)
        owner._check()
        if not 0 <= start <= owner._reach:
            raise InvalidValueError(f"an array at offset {start}", rule=f"the memory has {owner._size} bytes")
        # A thread loads an element whole, up to 16 bytes at once, from a multiple of its size.
        unit = min(kind.itemsize & -kind.itemsize, 16)
        if start % unit:
            raise AlignmentError(
                f"an array of {kind} at offset {start}", rule=f"the offset must be a multiple of {unit} bytes"
            )
        extents = check_shape(max(owner._size - start, 0) // kind.itemsize if shape is None else shape)
        total = check_extent(extents, kind.itemsize)
        if start + total > owner._reach:
            raise InvalidValueError(
                f"an array of shape {extents} of {kind} ({total} bytes) at offset {start}",
                rule=f"it does not fit into the {owner._size} bytes of {owner.describe()}",
            )
        return cls(owner, kind, extents, start)

    # -- what it is --

    @property
    def address(self) -> int:
        """The address of the first element. Reading it lets the address escape, as a span's does."""
        self.owner._check()
        self.owner._await_mapping()
        self.owner._uses.escaped = True
        return self.owner._address + self.offset

    @property
    def strides(self) -> tuple[int, ...]:
        """The bytes from one element to the next along each axis; the last axis is contiguous."""
        return contiguous_strides(self.shape, self.dtype.itemsize)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return check_extent(self.shape, 1)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return check_extent(self.shape, int(self.dtype.itemsize))

    def __len__(self) -> int:
        """Return the length of the first axis."""
        if not self.shape:
            raise TypeError("an array of no dimensions has no length")
        return self.shape[0]

    def reshape(self, *shape: int) -> DeviceArray:
        """Return the same elements in another shape; raises `InvalidValueError` unless their number is the same."""
        extents = check_shape(shape)
        if check_extent(extents, 1) != self.size:
            raise InvalidValueError(f"shape {extents}", rule=f"the array has {self.size} elements")
        return DeviceArray(self.owner, self.dtype, extents, self.offset)

    def view(self, dtype: DTypeLike) -> DeviceArray:
        """Return the same bytes as elements of another type.

        The last axis shrinks or grows with the size of the type. Raises `InvalidValueError` where its bytes are not
        whole elements of that type, and `AlignmentError`.
        """
        kind = check_type(dtype)
        extents = self.shape
        if kind.itemsize != self.dtype.itemsize:
            last = extents[-1] * self.dtype.itemsize if extents else self.dtype.itemsize
            if not extents or last % kind.itemsize:
                raise InvalidValueError(
                    f"a view of shape {extents} of {self.dtype} as {kind}",
                    rule=f"the last axis has {last} bytes, which are not whole elements of {kind.itemsize} bytes",
                )
            extents = (*extents[:-1], last // kind.itemsize)
        return DeviceArray.over(self.owner, kind, extents, self.offset)

    # -- copies --

    def to_host(self) -> NDArray[Any]:
        """Return a new NumPy array with a copy of the elements. Waits."""
        import numpy as np

        out = np.empty(self.shape, self.dtype)
        self.owner.copy_to_host(out, offset=self.offset)
        return out

    def copy_from(self, source: Any, *, stream: StreamLike | None = None) -> None:
        """Copy the elements of another array, of whatever library, into this one.

        The source is anything that `as_array` takes, contiguous, with the same shape and type. Waits until it is done,
        unless `stream` is given; the source is kept alive until then. Raises `InvalidValueError`, and `AccessError`
        where no device has the right to write here.
        """
        given = source if isinstance(source, DeviceArray) else as_array(source, stream=stream)
        if given.shape != self.shape or given.dtype != self.dtype:
            raise InvalidValueError(
                f"copy of shape {given.shape} of {given.dtype}",
                rule=f"the array has shape {self.shape} of {self.dtype}, and copies convert nothing",
            )
        if isinstance(given, DeviceArray):
            where = {"offset": self.offset, "source_offset": given.offset, "size": self.nbytes}
            self.owner.copy_from(given.owner, **where, stream=stream)
            return
        if not given.contiguous:
            raise InvalidValueError(
                f"copy of an array of strides {given.strides}",
                rule="the bytes are copied in one piece, so the array must be contiguous",
                next_step="Make a contiguous copy first",
            )
        if not given.location.is_device:
            self.owner.copy_from_host(given.numpy(), offset=self.offset, stream=stream)
            return
        part = (self.offset, self.nbytes)
        with self.owner._using("copy_from", Access.READ_WRITE, stream, part=part, keep=given) as queue:
            if queue is None:
                raise AccessError(
                    "copy_from of device memory",
                    rule=f"only the CPU may write to {self.owner.describe()}",
                    next_step="Grant a device access to it",
                )
            if given.nbytes:
                target = self.owner._address + self.offset
                self.owner._driver.copy(target, given.address, given.nbytes, queue.handle)

    # -- handing it to others --

    def numpy(self) -> NDArray[Any]:
        """Return the memory itself as a NumPy array, where the CPU may look.

        Waits for the work that remap knows to use the memory. The NumPy array is read-only where the CPU has no right
        to write; it keeps the memory alive, and while it or a view of it lives the owner cannot be closed. Raises
        `AccessError` where the CPU has no right (`to_host()` copies), `PausedError`.
        """
        self.owner._check()
        with self.owner._driver.lock:  # nobody takes the right away between the look at it and the view
            self.owner._check_there("view by NumPy")
            places = self._cpu_places()
            if not places:
                raise AccessError(
                    f"a NumPy view of {self.owner.describe()}",
                    rule="the CPU has no access to it",
                    next_step=f"Copy with to_host(), or let the CPU look. {self._look_step()}",
                )
            export = self._export("view by NumPy", read_only=not self._writable(places), cpu=True)
        self.owner._wait_for_work("view by NumPy")
        return export.numpy(self.dtype, self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return `numpy()` for `numpy.asarray`, which would make an array of one object of this otherwise."""
        import numpy as np

        view = self.numpy()
        if copy:
            return np.array(view, dtype)
        if copy is False and dtype is not None and np.dtype(dtype) != self.dtype:
            raise ValueError(f"a view of {self.dtype} as {dtype} needs a copy, and copy=False forbids it")
        return np.asarray(view, dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface, version 3; missing (`AttributeError`) where no device may touch the memory.

        `stream` names one stream in which all pending work has been joined, None if there is none. The memory counts
        as handed out for as long as this object lives; libraries hold it together with what they make of it. Of memory
        that closes by itself (`DeviceBuffer`, `DeviceBox`) only the address escapes.
        """
        owner = self.owner
        owner._check()
        owner._await_mapping()  # before the lock is taken, and before it says which streams are behind it
        users = owner.accessing
        if not users:
            raise AttributeError("no device has access to this memory, so it has no __cuda_array_interface__")
        if self.dtype.name in ADDED:
            raise AttributeError(
                f"__cuda_array_interface__ has no {self.dtype}: take it by DLPack, or view its bits"
            )
        writable = self._writable([one.location for one in users])
        self._hand_out("CUDA array interface")
        described = {"descr": self.dtype.descr} if self.dtype.fields else {}
        return {
            **described,
            "version": NEWEST_INTERFACE,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if self.size else 0, not writable),
            "strides": None,
            "stream": self._join_pending(users),
        }

    def _hand_out(self, asked: str) -> None:
        """Count as an export for as long as this object lives: nothing else of the interface is there to go."""
        if self._handed_out is None:
            self._handed_out = self._export(asked)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's kind and index of the device; raises `ExportError` where there is none to name."""
        places = self._dlpack_places()
        if not places:
            raise self._no_dlpack()
        return places[0]

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule, as consumers ask for it.

        Pending work is joined to the consumer's `stream` (1 or None is the legacy default stream, 2 the per-thread
        one, -1 asks for no order); for the CPU it is waited for. The capsule is versioned, and can then be read-only,
        if `max_version` allows. With `dl_device` the CPU, or `copy=True` there, the bytes are copied to the host where
        the CPU may not look. Raises `ExportError`, which is a `BufferError`.
        """
        _check_dlpack_type(self.dtype)
        self.owner._await_mapping()
        places = self._dlpack_places()
        wanted = dl_device or (places[0] if places else None)
        cpu = (dlpack.CPU, 0)
        if wanted is not None and wanted in places and not copy:
            _check_dlpack_stream(wanted, stream)
            with self.owner._driver.lock:  # as in numpy()
                looking = self._cpu_places() if wanted == cpu else [device(wanted[1]).location]
                if not any(self.owner._rights.get(place, Access.NONE).readable for place in looking):
                    raise self._no_dlpack()
                writable = self._writable(looking)
                if not writable and not dlpack.versioned(max_version):
                    raise ExportError(
                        "a DLPack capsule of read-only memory",
                        rule="capsules without a version cannot say that they are read-only",
                        next_step="Use a consumer that asks for DLPack 1.0 (and NumPy 2.1 or newer here), or copy",
                    )
                export = self._export("DLPack", read_only=not writable, cpu=wanted == cpu)
            if wanted == cpu:
                self.owner._wait_for_work("DLPack")
            elif stream != -1:
                self.owner._uses.join(Queue(stream or 1, device(wanted[1]), None))
            kind = ADDED.get(self.dtype.name)
            array = export.numpy(f"u{self.dtype.itemsize}" if kind else self.dtype, self.shape)
            return dlpack.export(array, wanted, max_version, kind)
        if wanted == cpu and copy is not False:
            kind, array = ADDED.get(self.dtype.name), self.to_host()
            array = array.view(f"u{self.dtype.itemsize}") if kind else array
            return dlpack.export(array, cpu, max_version, kind, copied=True)
        if wanted is None:
            raise self._no_dlpack()
        raise ExportError(
            f"a DLPack capsule on device {wanted}" + (" with copy=True" if copy else ""),
            rule=f"the memory can be handed out on {list(places)} (DLPack's kind and index)",
            next_step="Copy it there first" if not copy else "Copy it with copy_from",
        )

    def _dlpack_places(self) -> tuple[tuple[int, int], ...]:
        """Return where the memory can be handed out without a copy, the place that holds it first."""
        with self.owner._driver.lock:
            self.owner._check_there("a DLPack capsule")
        # A simulated device is none that a consumer of DLPack could know.
        cuda = self.owner._driver.name == "cuda"
        places = [(dlpack.CUDA, one.index) for one in self.owner.accessing if cuda]
        residence = next((chunk.location for chunk in self.owner.chunks), None)
        if residence is not None and residence.is_device:
            places.sort(key=lambda place: place[1] != residence.index)
        if self._cpu_places():
            on_host = residence is not None and not residence.is_device
            places.insert(0 if on_host else len(places), (dlpack.CPU, 0))
        return tuple(places)

    def _no_dlpack(self) -> ExportError:
        return ExportError(
            f"a DLPack capsule of {self.owner.describe()}",
            rule=f"the CPU has no access to it, and no CUDA device (the driver is {self.owner._driver.name})",
            next_step="Copy with to_host(), or as dl_device=(1, 0) does, or let the CPU look. "
            + self._look_step(),
        )

    def _look_step(self) -> str:
        """Say how the CPU gets to look at the memory: by a right, where it can have one there."""
        places = {held.location for held in self.owner._held() if held.location.is_device}
        if not all(device(place.index).capabilities["coherent"] for place in places):
            return "Allocate with resident=remap.Host(), accessing=[remap.Host(), 0]"
        most = max(self.owner._rights.values(), key=list(Access).index, default=Access.READ_WRITE)
        return self.owner._grant_step(Host(), most)

    def _writable(self, places: Iterable[Location]) -> bool:
        """Tell whether any of several locations may write this part of the memory."""
        owner = self.owner
        return any(
            owner._rights.get(place, Access.NONE).writable
            and owner._part_writable(self.offset, self.nbytes, place)
            for place in places
        )

    def _cpu_places(self) -> list[Location]:
        """Return the host locations that have a right: the CPU looks from wherever it runs."""
        return [place for place in self.owner._rights if not place.is_device]

    def _join_pending(self, users: Sequence[Device]) -> int | None:
        """Return the handle of one stream that is behind all pending work, None if nothing is pending."""
        uses = self.owner._uses
        uses.settle()
        target = uses.latest()
        if target is None and not uses.pending:
            return None
        if target is None or target.over or target.device not in users:
            target = Queue(default_handle(), users[0], None)
        uses.join(target)
        self._stream = target  # holds the stream object, so that the handle stays what it is
        return target.handle or 1  # the interface forbids 0; the legacy default stream is 1

    def _export(self, asked: str, *, read_only: bool = False, cpu: bool = False) -> Export:
        return Export(self.owner, self.offset, self.nbytes, asked, read_only=read_only, cpu=cpu)

    def __repr__(self) -> str:
        """Return shape, type and owner."""
        return f"<remap.DeviceArray {self.shape} of {self.dtype} in {self.owner.describe()}>"


def _check_dlpack_type(kind: Any) -> None:
    if kind.name not in ADDED and (kind.kind not in "iufcb" or not kind.isnative):
        raise ExportError(
            f"a DLPack capsule of {kind}",
            rule="DLPack describes numbers and booleans in the machine's byte order only",
            next_step="View it as such a type first: array.view(...)",
        )


def _check_dlpack_stream(place: tuple[int, int], stream: int | None) -> None:
    if place[0] == dlpack.CPU and stream not in (None, -1):
        raise ExportError(f"a DLPack capsule for stream {stream}", rule="the CPU has no streams")
    if stream is not None and stream != -1 and stream <= 0:
        raise ExportError(
            f"a DLPack capsule for stream {stream}",
            rule="1 is the legacy default stream, 2 the per-thread one, -1 none; 0 would be ambiguous",
        )
