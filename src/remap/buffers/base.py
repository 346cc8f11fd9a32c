"""`Buffer`: one address range, backed by one or several physical allocations striped over locations.

A buffer reserves its addresses once; what stands behind them may change, the address never does (invariant 6).
Allocations are released as soon as they are mapped: the mappings alone keep the bytes (T8), so that closing is
unmapping, and nothing can be released twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, ClassVar

from remap import drivers
from remap.buffers.placement import Placement, one_place, place
from remap.buffers.registrations import Registration
from remap.errors import InUseError, OutOfMemoryError, PausedError, RemapError
from remap.handles import create_handle, parse_alignment, reserve_range
from remap.hints import MOVES, hinted
from remap.launches import launches
from remap.lifetime import Description, Release, Rollback, call_all, drain, queued, undo
from remap.locations import LocationLike, RightLike
from remap.ranges import Granted, grant
from remap.sizes import Size, counted, format_size, parse_size, round_up
from remap.spans import Chunk, Span
from remap.types import Access, AllocationProperties, Facts, HandleType, Held, Location

SHARED = "it was exported or opened, and others whom remap cannot know of may still hold its memory, and go on using it"
"""Why shared memory stays where it is."""

SHARED_STEP = "Pass detach=True if nobody does, or if they may keep what they have"


@hinted(**MOVES)
class Buffer(Span):
    """Memory striped over its resident locations under one address. Made by `remap.allocate`.

    `generation` counts how often what stands behind the address has changed.
    """

    kind: ClassVar[str] = "buffer"

    generation: int = 0
    _reserved: int = 0
    _paused: str = ""
    # While it is paused, what residency keeps of it: `drop()` gives that back.
    _backup: Any = None
    # Whether others may hold memory of this buffer, once exported or opened; the wing for sharing says so.
    _shared: bool = False
    # The tags that it was made under; residency says so.
    _groups: tuple[str, ...] = ()
    # Who is to know of its forks: the groups that it is in.
    _heirs: tuple[Callable[[Buffer], None], ...] = ()
    _listeners: tuple[Callable[[Buffer], None], ...] = ()
    # Here it is always what residency brings, which can be told to `leave()` the buffer.
    _arriving: Any = None
    # Who holds the memory registered elsewhere.
    _registrations: tuple[Registration, ...] = ()

    def __init__(self, driver: Any, placement: Placement, stripe: int, alignment: int = 0) -> None:
        super().__init__(driver)
        self._chunks: list[Chunk] = []
        self._rights = placement.rights
        self.properties = placement.properties[0]
        if stripe:  # a buffer of no bytes is valid and asks nothing of the driver
            self._size = self._reserved = size = stripe * len(placement.properties)
            self._address = at = reserve_range(driver, size, alignment)
            try:  # without a lock: nobody else can see this range yet
                for properties in placement.properties:
                    create_mapped(driver, at, stripe, properties)
                    self._chunks.append(Chunk(at, stripe, properties.location))
                    at += stripe
                driver.set_access(self._address, size, placement.grants)
                self._open = True  # from here on an interrupt leaves it to its finaliser
            except BaseException as error:
                # Whatever was mapped: holes do not matter (T7).
                undo(error, driver.unmap, self._address, size)
                undo(error, driver.free_range, self._address, size)
                raise
        self._opened()

    @property
    def resident(self) -> tuple[Location, ...]:
        """The locations that hold the bytes, in the order in which they first appear."""
        return tuple(dict.fromkeys(chunk.location for chunk in self._chunks))

    @property
    def paused(self) -> bool:
        """Whether the buffer is paused: its address is kept, and no memory stands behind it."""
        return bool(self._paused)

    def on_change(self, listener: Callable[[Buffer], None]) -> None:
        """Call `listener(buffer)` after each change of what stands behind the address.

        For those who registered the memory with another library (NCCL, RDMA) and must register it again. It is
        called by the thread that made the change, when the change is complete; `generation` has grown then. What it
        raises comes out of the call that made the change, when all have been told.
        """
        self._check()
        self._listeners = (*self._listeners, listener)

    def registered(self, by: str) -> Registration:
        """Say that another library, `by` name, has registered the memory: until that is closed, it stays where it is.

        Pausing, migrating, shrinking and closing raise `InUseError` meanwhile, with the name. Deregister there, close
        what this returns, move, and register again, in a listener of `on_change`, say.
        """
        return Registration(self, by)

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """Who has registered the memory, and has not closed that yet: also what nobody else holds any more."""
        return self._registrations

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Every (address, size, location) behind this buffer, in order.

        A library that registers memory must register each by itself. Reading it lets the addresses escape. There are
        none while the buffer is paused.
        """
        self._check()
        self._await_mapping()
        self._uses.escaped = True
        return () if self._paused else tuple(self._mappings(self._chunks))

    def footprint(self) -> dict[Location, int]:
        """Return the physical bytes behind this buffer by location; none while it is paused."""
        self._check()
        total: dict[Location, int] = {}
        for chunk in self._backing():
            total[chunk.location] = total.get(chunk.location, 0) + chunk.size
        return total

    def _backing(self) -> Sequence[Chunk]:
        """Return every chunk that takes memory for this buffer, in address order; takes no lock."""
        return () if self._paused else tuple(self._chunks)

    def outcome(self) -> AllocationProperties:
        """Return the properties of the first chunk as given and not as asked for. Asks the driver."""
        self._check()
        if not self._chunks or self._paused:
            return self.properties
        self._await_mapping()
        driver = self._driver
        with driver.lock:
            handle = driver.retain(self._chunks[0].address)
            try:
                found: AllocationProperties = driver.properties_of(handle)
            finally:
                driver.release(handle)
        return found

    def _check_registrations(self, doing: str) -> None:
        if self._registrations:
            holders = ", ".join(dict.fromkeys(one.by for one in self._registrations))
            raise InUseError(
                f"{self.describe()} to be {doing}",
                rule=f"its memory is registered with {holders}, which would go on using it",
                next_step="Deregister it there, and close its Registration (buffer.registrations), first",
            )

    def _check_closable(self) -> None:
        self._check_registrations("closed")
        super()._check_closable()

    # -- for residency: the caller holds `_taking`, has waited, and holds the driver's lock --

    def _check_backed(self, asked: str) -> None:
        if self._paused:
            raise PausedError(
                f"{asked} of {self.describe()}",
                rule=f"it is paused ({self._paused}), and no memory stands behind its address",
                next_step="Call remap.resume(buffer) first",
            )

    def _ranges(self) -> list[tuple[int, int]]:
        return [] if self._paused else runs(self._mappings(self._chunks))

    def _granted_ranges(self) -> list[Granted]:
        return [] if self._paused else self._granted_runs(self._chunks)

    def _mappings(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """Return chunks as they are mapped: each once, but in rings, where all of them follow once more."""
        return chunks

    def _flush(self) -> Sequence[Chunk]:
        """Give back what is mapped and belongs to nobody yet, and return what that was."""
        return ()

    def _unmap_chunks(self) -> None:
        """Unmap all chunks, run by run; the mappings were all that kept their memory."""
        for address, size in runs(self._mappings(self._chunks)):
            self._driver.unmap(address, size)

    def _map_chunks(
        self, chunks: Sequence[Chunk], handles: Sequence[int], rollback: Rollback, *, full: bool = False
    ) -> None:
        """Map allocations for `chunks`, with their rights; `rollback` unmaps them if its block fails.

        `full` gives what forks share the buffer's own rights, to be filled. The caller releases the handles.
        """
        for chunk, handle in zip(self._mappings(chunks), cycle(handles), strict=False):
            rollback.undo(self._driver.unmap, chunk.address, chunk.size)
            self._driver.map(chunk.address, chunk.size, handle)
        for run in Buffer._granted_runs(self, chunks) if full else self._granted_runs(chunks):
            grant(self._driver, *run)

    def _granted_runs(self, chunks: Sequence[Chunk]) -> list[Granted]:
        """Return chunks in runs of the same rights, for the calls that give them those."""
        return [(address, size, self._rights) for address, size in runs(chunks)]

    def _relocated(self) -> None:
        """Count chunks that lie elsewhere now, for whoever counts them by location."""

    def _changed(self) -> None:
        """Count a change of what stands behind the address, and tell those who asked; call without the lock."""
        self.generation += 1
        launches.renew()
        call_all(partial(listener, self) for listener in self._listeners)

    # -- what it holds, and its end --

    def _facts(self) -> Facts:
        return Facts(
            (self._address, self._reserved) if self._reserved else None,
            () if self._paused else self._held(),
            self._paused,
            self._shared,
            getattr(self._backup, "host_bytes", 0),
            self._groups,
        )

    def _held(self) -> tuple[Held, ...]:
        rights = tuple(self._rights.items())
        return tuple(Held(*chunk, None, rights) for chunk in self._backing())

    def _begin_close(self) -> Release | None:
        release = super()._begin_close()
        # The backup of a buffer that is collected unclosed queues itself.
        if release is not None and self._backup is not None:
            release.steps += [(self._backup.drop, ())]  # calls nothing that an interrupt could follow
        # Copies of a resume are waited for even where the caller promises that nothing uses it: they are ours.
        if release is not None and self._arriving is not None:
            release.steps[:0] = [(self._arriving.leave, ())]
        return release

    def _detach(self) -> Release:
        if not self._reserved:
            return Release(0, [], self._wait_on_close())
        driver, where = self._driver, (self._address, self._reserved)
        wait = None if self._known_uses is None else self._wait_on_close()
        return Release(0, [(driver.unmap, where), (driver.free_range, where)], wait)

    def describe(self) -> Description:
        """Return what this buffer is."""
        places = ", ".join(str(place) for place in self.resident)
        count = len(self._chunks)
        detail = f"{counted(count, 'chunk')} on {places}" if count else "nothing behind it"
        if self._paused:
            detail += f", paused ({self._paused})"
        return Description(self.kind, self.serial, self._size, self._address, detail)


def allocate(
    size: Size,
    *,
    device: LocationLike | None = None,
    resident: LocationLike | Iterable[LocationLike] | None = None,
    accessing: LocationLike | Iterable[LocationLike] | None = None,
    access: RightLike = Access.READ_WRITE,
    alignment: Size | None = None,
    shareable: HandleType | str | Iterable[HandleType | str] | None = None,
    compressible: bool = False,
    rdma: bool = False,
    poison: bool = False,
) -> Buffer:
    """Allocate a buffer of at least `size` bytes, in equal stripes over the resident locations in the order given.

    The size is rounded up to a multiple of locations × granularity; read it back from `.size`. `resident` defaults
    to the fastest device (`device=` is short for one place), `accessing` to the resident locations; they get `access`
    ("rw" by default) and nobody else gets any. `access={0: "rw", 1: "r"}` says it of each. `alignment` is a power of
    two. `shareable` fixes now which handles the buffer can be exported as; `compressible` is a request whose outcome
    `.outcome()` reads back. The contents are undefined; `poison=True` fills them with 0xCB, to make mistakes visible.

    Raises `OutOfMemoryError`, `OutOfAddressSpaceError`, `AccessError` where an accessing device cannot reach a
    resident one, `NotSupportedError`. A failure leaves nothing behind. Source: cuMemAddressReserve, cuMemCreate,
    cuMemMap, cuMemSetAccess.
    """
    driver = drivers.current()
    if queued:
        drain()
    number = parse_size(size)
    where = resident if device is None else one_place("a buffer", device, resident)
    placement = place(driver, where, accessing, access, shareable, compressible, rdma)
    stripe = round_up(-(-number // len(placement.properties)), placement.granule)
    try:
        buffer = Buffer(driver, placement, stripe, parse_alignment(alignment) if alignment is not None else 0)
    except OutOfMemoryError as error:
        stripes = len(placement.properties)
        share = f", one of {stripes} stripes of a buffer of {format_size(stripe * stripes)}"
        raise error.explain(error.asked + share * (stripes > 1)) from None
    if poison and number and any(right.writable for right in buffer._rights.values()):
        try:
            buffer.fill(POISON)
        except BaseException as error:
            undo(error, buffer.close)
            raise
    return buffer


POISON = 0xCB
"""The byte that undefined contents are filled with on request; as floats it makes absurd numbers."""


def create_mapped(driver: Any, address: int, size: int, properties: AllocationProperties) -> None:
    """Create an allocation, map it at an address and release it, so that the mapping alone keeps it."""
    handle = create_handle(driver, size, properties)
    try:
        driver.map(address, size, handle)
    except BaseException as error:
        # An interrupt may have come with the mapping done; unmapping nothing is fine (T7).
        undo(error, driver.unmap, address, size)
        undo(error, driver.release, handle)
        raise
    try:
        driver.release(handle)
    except BaseException as error:
        undo(error, driver.unmap, address, size)
        raise


def all_mapped(driver: Any, chunks: Iterable[Chunk]) -> bool:
    """Tell whether all of some chunks are still mapped, after a failure in the middle of unmapping them."""
    try:
        for chunk in chunks:
            driver.release(driver.retain(chunk.address))
    except RemapError:
        return False
    return True


def runs(chunks: Iterable[Chunk]) -> list[tuple[int, int]]:
    """Return the (address, size) of the longest runs of chunks that touch, for calls that take several mappings."""
    found: list[tuple[int, int]] = []
    for chunk in chunks:
        if found and sum(found[-1]) == chunk.address:
            found[-1] = (found[-1][0], found[-1][1] + chunk.size)
        else:
            found.append((chunk.address, chunk.size))
    return found
