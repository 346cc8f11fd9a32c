"""`SymmetricBuffer`: the memory of all ranks side by side in one range, on every rank.

sym = remap.SymmetricBuffer(exchange, 64 * MiB)     # every rank calls it, and all of them succeed or none
sym.local.fill(exchange.rank)                       # this rank's memory
exchange.barrier()                                  # who writes says so; memory alone has no order
sym.rank(1).to_host()                               # rank 1's memory, with no copy in between
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

from remap import drivers
from remap.errors import AccessError, InUseError, InvalidValueError
from remap.lifetime import Description, Release, Rollback, Step, drain, queued, tell, watchers
from remap.locations import AccessLike, Device, DeviceLike
from remap.ranges import Granted
from remap.sharing.agreement import Agreement
from remap.sharing.exchange import Exchange
from remap.sharing.gathering import Gathered, gather, join_team
from remap.sharing.multicast import MulticastView, no_multicast
from remap.sharing.settling import Plan, Wish, settle
from remap.sizes import Size
from remap.spans import Chunk, Span
from remap.types import Access, Facts, HandleType, Held, Location
from remap.uses import After, Known


class SymmetricBuffer(Span):
    """One range with the memory of every rank, in the order of ranks: rank i's begins at i × `rank_size`.

    The whole is a span: kernels take it, `array()` sees all ranks as one array, and copies cross them. `rank(i)` and
    `local` are parts of it. The memory stays where it is: pausing and migrating are refused, since the other ranks
    would go on using the old memory.
    """

    kind: ClassVar[str] = "symmetric buffer"
    _stays: ClassVar[str] = (
        "the other ranks would go on using the memory that it has now"  # told by `remap.pause`
    )

    # What closing the view with the whole has left to do.
    _view_release: Release | None = None

    def __init__(
        self,
        exchange: Exchange,
        size: Size,
        *,
        device: DeviceLike | None = None,
        access: Access | str = Access.READ_WRITE,
        handle: HandleType | str | None = None,
        multicast: bool | None = False,
        timeout: float | None = None,
    ) -> None:
        """Create `size` bytes on each rank, and map all of them here. Every rank calls this, with the same size.

        `device` holds this rank's memory and reaches the others' (the fastest by default: name one where ranks share
        a machine). `access` is the right to the other ranks' memory, and the most that `set_access` gives there; one's
        own is read-write at first. `handle` says how memory travels: by default as fabric handles if every rank can,
        else as file descriptors on one host.

        `multicast` asks for a multicast view beside the range: True needs it, None takes it where every rank has it.
        It is off by default, as joining a team can hang machines whose fabric is not set up.

        Waits for the other ranks, `timeout` seconds in each step (the exchange's own by default). Raises the same
        `ShareError` on every rank if one fails, at whatever step, in which case nothing is left behind on any. The
        size is rounded up: read `rank_size`. Source: cuMemExportToShareableHandle, cuMemImportFromShareableHandle.
        """
        if queued:
            drain()
        driver: Any = drivers.current()
        super().__init__(driver)
        agreement = Agreement(exchange, f"a symmetric buffer over {exchange.size} ranks", timeout)
        wish = Wish(size, device, access, handle, multicast)
        self.exchange = exchange
        with Rollback() as rollback:  # whatever fails, this rank keeps nothing
            plan, found, view = _build(driver, agreement, wish, rollback)
            self.device: Device = plan.device
            self.handle = plan.kind
            self.rank_size = plan.stride
            self._view = view
            self._why_no_view = plan.why_no_multicast
            self._address = found.address
            self._size = plan.stride * exchange.size
            self._chunks = found.chunks
            self._rights = {plan.device.location: Access.READ_WRITE}
            self._rights_apart = {plan.device.location: plan.access}
            self._most_apart = plan.access
            self._open = True  # from here on an interrupt leaves it to its finaliser
        self._opened()

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.exchange.size

    @property
    def local(self) -> RankView:
        """This rank's own memory."""
        return RankView(self, self.exchange.rank)

    def rank(self, number: int) -> RankView:
        """Return the memory of one rank, as it lies in the range."""
        if not 0 <= number < self.ranks:
            raise InvalidValueError(f"rank {number}", rule=f"the ranks are 0 to {self.ranks - 1}")
        return RankView(self, number)

    @property
    def multicast(self) -> MulticastView:
        """The multicast view: at offset x of it, operations reach offset x of every rank's memory.

        Raises `NotSupportedError`, with the reason, where there is none.
        """
        self._check()
        if self._view is None:
            raise no_multicast(str(self.device), self._why_no_view)
        return self._view

    @property
    def has_multicast(self) -> bool:
        """Whether there is a multicast view."""
        return self._view is not None

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The (address, size, location) of each rank's memory. Reading it lets the addresses escape."""
        self._check()
        self._uses.escaped = True
        return self._chunks

    def footprint(self) -> dict[Location, int]:
        """Return the physical bytes of this rank's own memory by location: each rank counts its own."""
        self._check()
        own = self._chunks[self.exchange.rank]
        return {own.location: own.size}

    def close(self, *, after: After = Known.STREAMS) -> None:
        """Unmap all ranks' memory here and give this rank's up. Closing again does nothing.

        Each rank may close when it likes: the others keep what they have mapped, and this rank's memory lives until
        the last of them has closed. It waits for no rank, only for this one's own work, as closing a buffer does.
        """
        super().close(after=after)
        view = self._view
        if view is not None and view.closed and view._known_uses is not None:
            view._known_uses.forget()

    def _begin_close(self) -> Release | None:
        """Begin to close the view, too: both go, or both stay."""
        self._view_release = None
        release = super()._begin_close()
        if release is None or self._view is None:
            return release
        try:
            self._view_release = part = self._view._begin_close()
            if part is not None:
                release.wait = _both(part.wait, release.wait)
                release.steps[:0] = part.steps
        except BaseException:
            self._reopen()
            raise
        return release

    def _reopen(self) -> None:
        super()._reopen()
        if self._view is not None and self._view_release is not None:
            self._view._reopen()
            self._view_release = None

    def _finish_close(self, release: Release) -> None:
        view = self._view if self._view_release is not None else None
        if view is not None and watchers:
            tell("begin", view, "close")
        try:
            super()._finish_close(release)
        finally:
            if view is not None and watchers:
                tell("end", view, "close")

    def _ranges(self) -> list[tuple[int, int]]:
        return [(self._address, self._size)]

    def _granted_ranges(self) -> list[Granted]:
        return [(at, size, self._rights_to(rank)) for rank, (at, size, _) in enumerate(self._chunks)]

    def _rights_to(self, rank: int) -> Mapping[Location, Access]:
        """Return who may touch the memory of one rank."""
        apart = self._rights_apart
        return self._rights if rank == self.exchange.rank or apart is None else apart

    def _check_part(
        self, asked: str, offset: int, size: int, needed: Access, place: Location | None = None
    ) -> None:
        if needed.writable and not self._part_writable(offset, size):
            raise AccessError(
                f"{asked} of {size} bytes from offset {offset} of {self.describe()}",
                rule=f'the memory of other ranks was mapped with access="{self._most_apart}"',
                next_step='Write to .local, or make it with access="rw"',
            )

    def _part_writable(self, offset: int, size: int, place: Location | None = None) -> bool:
        start = self.exchange.rank * self.rank_size
        return self._most_apart.writable or (start <= offset and offset + size <= start + self.rank_size)

    def _detach(self) -> Release:
        driver = self._driver
        steps: list[Step] = [
            (driver.unmap, (self._address, self._size)),
            (driver.free_range, (self._address, self._size)),
        ]
        return Release(0, steps, self._wait_on_close())

    def _facts(self) -> Facts:
        return Facts(reserved=(self._address, self._size), held=self._held())

    def _held(self) -> tuple[Held, ...]:
        own = self.exchange.rank
        return tuple(
            Held(*chunk, None, tuple(self._rights_to(rank).items()), "own" if rank == own else "foreign")
            for rank, chunk in enumerate(self._chunks)
        )

    def describe(self) -> Description:
        """Return what this buffer is."""
        detail = f"rank {self.exchange.rank} of {self.ranks}"
        return Description(self.kind, self.serial, self._size, self._address, detail)


def _both(one: Callable[[], None] | None, other: Callable[[], None] | None) -> Callable[[], None]:
    """Return a wait for what two releases wait for."""
    waits = [wait for wait in (one, other) if wait is not None]

    def wait() -> None:
        for each in waits:
            each()

    return wait


def _build(
    driver: Any, agreement: Agreement, wish: Wish, rollback: Rollback
) -> tuple[Plan, Gathered, MulticastView | None]:
    """Take all ranks through the steps; `rollback` gives back what this one has if its block fails."""
    plan = settle(driver, agreement, wish)
    found = gather(driver, agreement, plan, rollback)
    try:
        view = join_team(driver, agreement, plan, found, rollback) if plan.multicast else None
    finally:
        driver.release(found.own)  # the mapping alone keeps it, as in every buffer, and so does the team
    return plan, found, view


def _of_whole(name: str) -> Any:
    """Return an attribute that is the whole buffer's, to read and to set."""
    return property(
        lambda self: getattr(self.whole, name), lambda self, value: setattr(self.whole, name, value)
    )


class RankView(Span):
    """One rank's memory in a symmetric buffer: filled, copied and viewed like any, and closed with the whole.

    It has no life of its own: who uses it uses the buffer, which waits for that before it closes.
    """

    kind: ClassVar[str] = "memory of one rank"

    # What says whether and how the memory is used is the whole buffer's.
    _open: Any = _of_whole("_open")
    _rights: Any = _of_whole("_rights")
    _known_uses: Any = _of_whole("_known_uses")
    _busy: Any = _of_whole("_busy")
    _taken: Any = _of_whole("_taken")
    _exports: Any = _of_whole("_exports")
    _views: Any = _of_whole("_views")
    _identity: Any = _of_whole("_identity")

    def __init__(self, whole: SymmetricBuffer, rank: int) -> None:
        # Not Resource's constructor: nothing is owned here, so that nothing can be left open.
        self.whole = whole
        self.number = rank
        self.serial = whole.serial
        self._driver = whole._driver
        self._epoch = whole._epoch
        self._start = rank * whole.rank_size
        self._address = whole._address + self._start
        self._size = whole.rank_size

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The one (address, size, location) of this rank's memory. Reading it lets the address escape."""
        return self.whole.chunks[self.number : self.number + 1]

    @property
    def access(self) -> Mapping[Location, Access]:
        """The right of each location that has one to this rank's memory."""
        return MappingProxyType(dict(self.whole._rights_to(self.number)))

    def set_access(self, access: AccessLike) -> NoReturn:
        """Refuse: rights are those of the whole buffer."""
        raise InvalidValueError(
            f"other rights to {self.describe()}",
            rule="they were agreed on for the whole buffer",
            next_step="Call set_access of the symmetric buffer, or make it with access=",
        )

    def _ranges(self) -> list[tuple[int, int]]:
        return [(self._address, self._size)]

    def _check_part(
        self, asked: str, offset: int, size: int, needed: Access, place: Location | None = None
    ) -> None:
        self.whole._check_part(asked, self._start + offset, size, needed)

    def _part_writable(self, offset: int, size: int, place: Location | None = None) -> bool:
        return self.whole._part_writable(self._start + offset, size)

    def _begin_close(self) -> NoReturn:
        raise InUseError(
            f"closing {self.describe()} by itself",
            rule="it is a part of a symmetric buffer",
            next_step="Close the symmetric buffer",
        )

    def describe(self) -> Description:
        """Return what this is."""
        detail = f"rank {self.number} of a symmetric buffer"
        return Description(self.kind, self.serial, self._size, self._address, detail)

    def __del__(self) -> None:
        """Do nothing: the buffer has its own."""
