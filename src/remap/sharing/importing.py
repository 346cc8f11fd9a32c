"""`open`: memory of another process as a buffer here, checked against what its descriptor and the driver say.

Rights between processes are cooperative: an importer gets the right it asks for, and not more than it was offered, but
whoever holds a handle can map it read-write; the driver knows of no other kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from remap import drivers
from remap.buffers.base import Buffer
from remap.buffers.placement import check_reach
from remap.drivers.protocol import Driver, SupportsSharing
from remap.errors import (
    AccessError,
    ContextLostError,
    CudaResult,
    DescriptorError,
    DriverError,
    NotSupportedError,
    ShareError,
)
from remap.handles import reserve_range
from remap.lifetime import Release, Step, drain, live, queued, undo
from remap.locations import (
    AccessLike,
    LocationLike,
    RightLike,
    highest_right,
    location,
    locations,
    parse_access,
    parse_rights,
)
from remap.sharing.channel import Fds
from remap.sharing.descriptor import Descriptor, SharedChunk
from remap.sharing.exported import PATIENCE, Exported, receive
from remap.sizes import MiB, format_size
from remap.spans import Chunk
from remap.types import Access, AllocationProperties, Facts, Held, Location, LocationKind

_HEEDED = 32 * MiB
"""How much is reserved to get a certain address: where CUDA puts less, a hint does not decide (`reserve_range`)."""

_WRITE_STEP = 'Open it again with access="rw", which its exporter must have offered: export(..., access="rw")'

_ONE_PLACE = (
    "Both were made at that address, one after the other: whoever shares several keeps all of them open until the last "
    "is shared. Or leave same_address out"
)


class ImportedBuffer(Buffer):
    """Memory of another process, mapped here. Made by `remap.open` and by a broker's client.

    It stands alone: other imports of the same memory, and the exporter's buffer, can be closed without touching it, and
    the memory lives as long as any of them. A slice is mapped with the whole chunks it lies in, so `chunks` and
    `footprint()` count those. It holds its handles, so that it can be exported again.
    """

    kind: ClassVar[str] = "imported buffer"

    def __init__(
        self,
        driver: Any,
        descriptor: Descriptor,
        handles: Fds | tuple[bytes, ...],
        access: RightLike,
        accessing: LocationLike | Iterable[LocationLike] | None,
        *,
        same_address: bool = False,
        hint: int = 0,
        on_close: tuple[Step, ...] = (),
        write_step: str = "",
    ) -> None:
        # Not Buffer.__init__, which creates memory of its own.
        super(Buffer, self).__init__(driver)
        self.descriptor = descriptor
        self.generation = descriptor.generation
        self._identity = descriptor.identity
        self._shared = True
        self._handles = handles
        self._on_close = on_close
        self._write_step = write_step or _WRITE_STEP
        self._most = highest_right(access)
        self._rights: Mapping[Location, Access] = {}
        self._chunks: list[Chunk] = []
        self._size = descriptor.size
        self._reserved = self._mapped = self._base = 0
        place = descriptor.chunks[0].location if descriptor.chunks else locations(0, "resident")[0]
        self.properties = _properties(descriptor, place)
        if descriptor.chunks:
            try:  # no lock: nobody else can see this range yet
                self._map(accessing, access, same_address, hint)
                self._open = True  # from here on an interrupt leaves it to its finaliser
            except BaseException as error:
                if self._reserved:  # whatever was mapped: holes do not matter (T7)
                    undo(error, driver.unmap, self._base, descriptor.mapped_size)
                    undo(error, driver.free_range, self._base, self._reserved)
                raise
        self._opened()

    @property
    def identity(self) -> bytes:
        """What tells this memory from all other: the same in every process that has it."""
        return self._identity

    def _facts(self) -> Facts:
        return replace(super()._facts(), reserved=(self._base, self._reserved) if self._reserved else None)

    def _held(self) -> tuple[Held, ...]:
        return tuple(one._replace(source="foreign") for one in super()._held())

    def _map(
        self,
        accessing: LocationLike | Iterable[LocationLike] | None,
        access: RightLike,
        same_address: bool,
        hint: int,
    ) -> None:
        driver, shared = self._driver, self.descriptor
        numbers = self._handles.numbers if isinstance(self._handles, Fds) else self._handles
        imported: list[tuple[int, SharedChunk]] = []
        try:
            for number, chunk in zip(numbers, shared.chunks, strict=True):
                handle = driver.import_handle(number, shared.kind)
                imported.append((handle, chunk))
                place = checked_place(driver, handle, chunk, shared)
                self._chunks.append(Chunk(0, chunk.size, place))
            places = tuple(dict.fromkeys(chunk.location for chunk in self._chunks))
            grants = parse_rights(access, accessing, places)
            check_reach(driver, [user for user, _ in grants], places)
            total = shared.mapped_size
            self._base, self._reserved = self._reserve(total, same_address, hint)
            self._mapped, self._address = total, self._base + shared.offset
            at = self._base
            for index, (handle, chunk) in enumerate(imported):
                map_whole(driver, at, chunk.size, handle)
                self._chunks[index] = self._chunks[index]._replace(address=at)
                at += chunk.size
            driver.set_access(self._base, total, grants)
            self._rights = {user: right for user, right in grants if right.readable}
        except BaseException as error:
            for handle, _ in imported:
                undo(error, driver.release, handle)
            raise
        # The mappings alone keep the memory, as in every buffer.
        for handle, _ in imported:
            driver.release(handle)

    def _reserve(self, total: int, same_address: bool, hint: int) -> tuple[int, int]:
        """Return reserved addresses and their size, which is more than is needed where a place is wanted."""
        wanted = self.descriptor.address - self.descriptor.offset if same_address else hint
        refused: DriverError | None = None
        elsewhere = False
        for size in dict.fromkeys((total, max(total, _HEEDED))) if wanted > 0 else ():
            try:
                found = reserve_range(self._driver, size, 0, wanted)
            except ContextLostError:
                raise
            except DriverError as error:  # no room for so much, or a hint that the driver does not like
                refused = error
                continue
            if found == wanted:
                return found, size
            self._driver.free_range(found, size)
            elsewhere = True
        if same_address:
            if refused is not None and not elsewhere:
                raise refused
            raise _taken(self._driver, wanted, total)
        return reserve_range(self._driver, total), total

    def _grant_step(self, place: Location, needed: Access) -> str:
        if needed.writable and not self._most.writable:
            return self._write_step
        return super()._grant_step(place, needed)

    def set_access(self, access: AccessLike) -> None:
        """Change rights, as of any mapped memory, up to what it was opened with; raises `AccessError` beyond."""
        order = list(Access)
        for place, right in parse_access(access):
            if order.index(right) > order.index(self._most):
                raise AccessError(
                    f'"{right}" access of {place} to {self.describe()}',
                    rule=f'it was opened with access="{self._most}"',
                    next_step=self._write_step,
                )
        super().set_access(access)

    def _handles_again(self, first: int, count: int) -> Fds | tuple[bytes, ...] | None:
        """Return handles for some chunks, to export them again; None if the memory behind them was changed."""
        if len(self._handles) < first + count:
            return None
        if isinstance(self._handles, tuple):
            return self._handles[first : first + count]
        return self._handles.duplicate(first, count)

    def _changed(self) -> None:
        # Other memory stands behind the address now, and it is nobody else's.
        if isinstance(self._handles, Fds):
            self._handles.close()
        self._handles, self._shared = (), False
        super()._changed()

    def _detach(self) -> Release:
        steps: list[Step] = []
        if self._reserved:
            steps.append((self._driver.unmap, (self._base, self._mapped)))
            steps.append((self._driver.free_range, (self._base, self._reserved)))
        if isinstance(self._handles, Fds):
            steps.append((self._handles.close, ()))
        return Release(0, [*steps, *self._on_close], self._wait_on_close())


def open(  # users write remap.open
    source: Exported | bytes,
    *,
    access: RightLike = Access.READ,
    accessing: LocationLike | Iterable[LocationLike] | None = None,
    same_address: bool = False,
    timeout: float = PATIENCE,
) -> ImportedBuffer:
    """Map memory that another process exported, and return it as a buffer.

    `source` is what `remap.export` gave, after its journey through `multiprocessing`, or the bytes of its
    `to_bytes()`. `access` is "r" or "rw"; `accessing` names the locations that get it, by default those that hold the
    bytes; `access={0: "rw", 1: "r"}` says it of each. With `same_address` the memory is mapped where the exporter has
    it, for programs that keep pointers in it.

    Opening waits for no work: what is written when is for the two processes to agree on (`SharedEvent`, or a message
    sent after a wait). Raises `DescriptorError` if the description is malformed or is not what the driver says,
    `ShareError` if the exporter has gone before its memory was received, does not answer within `timeout` seconds, or
    the address is taken, `AccessError` for a right that was not offered. A failure leaves nothing behind. Source:
    cuMemImportFromShareableHandle, cuMemMap, cuMemSetAccess.
    """
    if queued:
        drain()
    if isinstance(source, bytes | bytearray | memoryview):
        with receive(bytes(source), timeout=timeout) as received:
            return open(received, access=access, accessing=accessing, same_address=same_address)
    if not isinstance(source, Exported):
        raise TypeError(
            f"remap.open takes what remap.export returned, or its to_bytes(), not {source!r}; a buffer that a broker "
            "keeps is opened by its name: remap.connect().open(name)"
        )
    descriptor = source.descriptor
    return import_memory(
        descriptor, source.handles(), access=access, accessing=accessing, same_address=same_address
    )


def import_memory(
    descriptor: Descriptor,
    handles: Fds | tuple[bytes, ...],
    *,
    access: RightLike,
    accessing: LocationLike | Iterable[LocationLike] | None = None,
    same_address: bool = False,
    hint: int = 0,
    on_close: tuple[Step, ...] = (),
    write_step: str = "",
) -> ImportedBuffer:
    """Map memory by its descriptor and one handle for each chunk; takes ownership of descriptors of files.

    `hint` is an address where it may lie, but need not. `on_close` are steps that its closing takes after the memory is
    unmapped. `write_step` says what to do where it was opened for reading and is to be written.
    """
    try:
        driver = drivers.current()
        _check_offer(driver, descriptor, highest_right(access))
        if len(handles) != len(descriptor.chunks):
            raise DescriptorError(
                f"{len(handles)} handles for {len(descriptor.chunks)} chunks",
                rule="each chunk has one of its own",
            )
        return ImportedBuffer(
            driver,
            descriptor,
            handles,
            access,
            accessing,
            same_address=same_address,
            hint=hint,
            on_close=on_close,
            write_step=write_step,
        )
    except BaseException:
        if isinstance(handles, Fds):
            handles.close()
        raise


def _taken(driver: Any, wanted: int, total: int) -> ShareError:
    """Return the error for memory that cannot be mapped where its exporter has it, with what of remap's lies there."""
    rule = "something else of this process lies there"
    step = "Map shared memory before other memory is allocated, or leave same_address out"
    with driver.lock:
        for thing in live():
            said = thing.describe()
            address, size = thing._facts().reserved or (said.address or 0, said.size)
            if address < wanted + total and wanted < address + size:
                rule = f"{rule}: {said}"
                if isinstance(thing, ImportedBuffer) and thing._address == thing.descriptor.address:
                    step = _ONE_PLACE
                break
    return ShareError(
        f"{format_size(total)} at {wanted:#x}, where the exporter has it", rule=rule, next_step=step
    )


def _check_offer(driver: Any, descriptor: Descriptor, right: Access) -> None:
    if driver.name != descriptor.driver:
        raise ShareError(
            f"memory of the {descriptor.driver} driver",
            rule=f"this process uses the {driver.name} driver, which cannot map it",
            next_step=f'Call remap.use("{descriptor.driver}"), or set REMAP_DRIVER for both',
        )
    if not isinstance(driver, SupportsSharing):
        raise ShareError(f"memory of another process on the {driver.name} driver", rule="it shares no memory")
    if right is Access.NONE or (right.writable and not descriptor.access.writable):
        raise AccessError(
            f'shared memory with access "{right}"',
            rule=f'its exporter offers "{descriptor.access}"',
            next_step='Ask for access="r", or export it with access="rw"',
        )


def check_shares(driver: Driver, asked: str) -> None:
    """Raise `ShareError` unless the driver shares memory."""
    if not isinstance(driver, SupportsSharing):
        raise ShareError(
            f"{asked} on the {driver.name} driver", rule="it shares no memory with other processes"
        )


def _properties(descriptor: Descriptor, place: Location) -> AllocationProperties:
    return AllocationProperties(place, frozenset({descriptor.kind}), descriptor.compressible, descriptor.rdma)


def checked_place(driver: Any, handle: int, chunk: SharedChunk, descriptor: Descriptor) -> Location:
    """Return the location that holds a chunk, by the driver's word; raises `DescriptorError` if the exporter lied.

    Devices are numbered by each process for itself (CUDA_VISIBLE_DEVICES), so there the driver's number is taken.
    """
    said = chunk.location
    try:
        found: Location = driver.properties_of(handle).location
    except NotSupportedError:  # a driver that does not say so of what was imported
        found = location(said)
    if found.kind is not said.kind or (found.kind is LocationKind.HOST_NUMA and found != said):
        raise DescriptorError(
            f"a chunk of shared memory on {said}", rule=f"the driver says that it is on {found}"
        )
    granule = driver.granularity(_properties(descriptor, found)).minimum
    if chunk.size % granule:
        raise DescriptorError(
            f"a chunk of {chunk.size} bytes",
            rule=f"on {found} chunks are multiples of {format_size(granule)}",
        )
    return found


def map_whole(driver: Any, address: int, size: int, handle: int) -> None:
    """Map an allocation of another process; raises `DescriptorError` if it has not the size that was claimed."""
    try:
        driver.map(address, size, handle)
    except DriverError as error:
        if error.code != CudaResult.NOT_SUPPORTED:
            raise
        raise DescriptorError(
            f"a chunk of {format_size(size)}", rule="the memory behind its handle has another size"
        ) from error
