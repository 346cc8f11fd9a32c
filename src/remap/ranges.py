"""Ranges: mapped addresses, who may touch them, which work still uses them, and what keeps them from being taken away.

Operations that use the memory go on side by side; those that would take it away (closing, and what residency adds)
exclude them and each other: the second one raises `InUseError` (invariant 13).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

from remap.blocks import block
from remap.errors import AccessError, ForkedError, InUseError, InvalidValueError, PausedError
from remap.launches import launches
from remap.lifetime import Release, Resource, Rollback, tell, undo, watchers
from remap.locations import AccessLike, Device, LocationLike, device, location, parse_access
from remap.sizes import counted
from remap.streams import Event, Queue, StreamLike
from remap.types import Access, Facts, Grants, Held, Location
from remap.uses import After, Known, Uses, wait_after

_log = logging.getLogger("remap.operations")


class Chunk(NamedTuple):
    """One physical allocation's share of a span: where it starts, its bytes, and the location that holds them."""

    address: int
    size: int
    location: Location


class Arriving(Protocol):
    """Contents that are still being copied into a range."""

    def join(self, queue: Queue, part: tuple[int, int] | None = None) -> None:
        """Let later work of a stream wait for a part, (offset, size), or for the whole; the host does not wait."""
        ...


class Coming(Protocol):
    """Memory that another thread is still mapping into a range."""

    def wait(self) -> None:
        """Wait on the host until all of it is mapped; raises `PausedError` if that has failed."""
        ...

    def leave(self) -> None:
        """Map nothing more into the range, which goes."""
        ...


class Range(Resource):
    """Mapped addresses with access rights and the uses that are made of them; `Span` adds what can be done there."""

    # Defaults on the class and not in a constructor: most spans never leave them.
    _address: int = 0
    _size: int = 0
    _rights: Mapping[Location, Access]
    # The same of the part that has rights of its own, if one has: a ring's second view, the memory of other ranks; and
    # the most that anybody can be given there.
    _rights_apart: Mapping[Location, Access] | None = None
    _most_apart: Access = Access.READ_WRITE
    _known_uses: Uses | None = None
    # A token for each operation that is under way.
    _busy: set[object] | None = None
    _taken: str = ""
    # A token for each array that another library holds. Adding and dropping one is atomic, so a finaliser can do it on
    # any thread without a lock.
    _exports: set[int] | None = None
    # What tells this memory from all other in whatever process has it; made when it is shared for the first time.
    _identity: bytes = b""
    # Those of them through which the CPU looks: it would crash where a device array merely has to wait for `resume`.
    _views: set[int] | None = None
    # Copies still on their way into the memory (an ordered resume): `join(queue)` lets a stream wait for them.
    _arriving: Arriving | None = None
    # Memory that the same resume still has to map. Uses on streams wait in `join`, what else needs it waits for all.
    _coming: Coming | None = None

    # -- what it is --

    @property
    def address(self) -> int:
        """The first address, the same for the whole life of this object.

        Reading it lets the address escape: from then on remap cannot know who uses it, and closing waits for the
        contexts of all accessing devices unless `after=` says otherwise.
        """
        self._check()
        self._await_mapping()
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

    def _facts(self) -> Facts:
        return Facts(held=self._held())

    def _held(self) -> tuple[Held, ...]:
        """Return the bytes behind this range, which asks no driver and lets no address escape."""
        return ()

    # -- who may touch it --

    def set_access(self, access: AccessLike) -> None:
        """Change the rights of the locations that are named; the others keep theirs.

        Taking a right away excludes other operations and waits, as `close()` does, for the work that may still use it.
        Raises `InUseError` while operations are under way, or while the CPU looks at the memory through arrays of
        other libraries and would lose a right: it would crash there. After a failure all rights are as they were.
        Source: cuMemSetAccess.
        """
        grants = parse_access(access)
        if not grants:
            raise InvalidValueError("a change of access that names no location", rule="name at least one")
        self._await_mapping()
        losing = _lost(self._rights, grants) + _lost(self._rights_apart or {}, self._capped(grants))
        if not losing:
            with self._driver.lock:
                self._check()
                if self._taken:  # its mappings come and go, and these rights would be for the old ones
                    self._check_free("given other rights")
                self._grant_rights(grants)
            return
        blind = any(not place.is_device for place in losing)
        # Not self._taking: what an elastic buffer excludes there, it has excluded already.
        with Range._taking(self, "given fewer rights", blind):
            self._wait_for_work("change of access")
            with self._driver.lock:
                self._grant_rights(grants)

    def _grant_rights(self, grants: Grants) -> None:
        """Give rights to all that is mapped, or to nothing; the caller holds the lock."""
        capped = self._capped(grants)
        with Rollback() as rollback:
            for address, size, rights in self._granted_ranges():
                given = grants if rights is self._rights else capped
                before = tuple((place, rights.get(place, Access.NONE)) for place, _ in grants)
                try:
                    self._driver.set_access(address, size, given)
                except BaseException as error:
                    # CUDA applies the locations before the one that it refuses (seen on H200).
                    if len(grants) > 1:
                        undo(error, self._driver.set_access, address, size, before)
                    raise
                rollback.undo(self._driver.set_access, address, size, before)
            apart = self._rights_apart
            # Both at once: nobody sees the rights of one part without those of the other.
            self._rights, self._rights_apart = (
                _merged(self._rights, grants),
                None if apart is None else _merged(apart, capped),
            )

    def _capped(self, grants: Grants) -> Grants:
        """Return what the part with rights of its own is given."""
        if self._most_apart.writable:
            return grants
        return tuple((place, min(right, self._most_apart, key=_order)) for place, right in grants)

    def get_access(self, where: LocationLike) -> Access:
        """Return the right of a location at the first address, asking the driver. Source: cuMemGetAccess."""
        self._check()
        self._check_backed("get_access")
        self._await_mapping()
        found: Access = self._driver.get_access(self._address, location(where))
        return found

    def _ranges(self) -> list[tuple[int, int]]:
        """Return the (address, size) of the ranges that are mapped, each as long as it can be."""
        raise NotImplementedError

    def _granted_ranges(self) -> list[Granted]:
        """Return the same in parts with one table of rights each."""
        return [(address, size, self._rights) for address, size in self._ranges()]

    # -- uses --

    @property
    def _uses(self) -> Uses:
        uses = self._known_uses
        if uses is None:
            with self._driver.lock:  # two threads may come first at the same time
                uses = self._known_uses
                if uses is None:
                    uses = self._known_uses = Uses()
        return uses

    def _check_backed(self, asked: str) -> None:
        """Raise `PausedError` if no memory stands behind the range; a mapping always has it."""

    def _check_there(self, asked: str) -> None:
        """Raise unless memory stands behind the range, and nobody takes it away; the caller holds the lock."""
        self._check()
        if self._taken:
            raise InUseError(
                f"{asked} of {self.describe()}",
                rule=f"it is being {self._taken} by another thread",
                next_step="Let that end first",
            )
        self._check_backed(asked)

    def _check_part(
        self, asked: str, offset: int, size: int, needed: Access, place: Location | None = None
    ) -> None:
        """Raise if a part cannot be used so, where parts differ: holes, chunks shared with others, a second view.

        `place` is who uses it, None for anybody; its right to the whole is checked by itself. The caller holds the
        lock.
        """

    def _part_writable(self, offset: int, size: int, place: Location) -> bool:
        """Tell whether a location that may write the whole may write a part; the caller holds no lock."""
        return True

    @property
    def _reach(self) -> int:
        """How many bytes from the address on can be used: more than the size where memory is mapped twice."""
        return self._size

    def _right(self, place: Location) -> Access:
        return self._rights.get(place, Access.NONE)

    def _grant_step(self, place: Location, needed: Access) -> str:
        """Say how a location gets a right to this memory."""
        named = place.index if place.is_device else place
        return f'Grant it: set_access({{{named!r}: "{needed}"}}), or access= when the memory is mapped'

    def _check_use(
        self, asked: str, place: Location, needed: Access = Access.READ, part: tuple[int, int] | None = None
    ) -> None:
        """Raise unless a location can use the memory now, or its part; the caller holds the lock."""
        self._check_there(asked)
        right = self._right(place)
        if not (right.writable if needed is Access.READ_WRITE else right.readable):
            raise AccessError(
                f"{asked} by {place}",
                rule=f"it has {words(right)} to {self.describe()}",
                next_step=self._grant_step(place, needed),
            )
        if part is not None:
            self._check_part(asked, *part, needed, place)

    @property
    def _operations(self) -> set[object]:
        """A token for each operation that is under way.

        Whoever begins one has this set at hand first, and ends it with nothing but `discard`: an interrupt comes where
        a function of Python begins, and what is under way for ever could not even be closed.
        """
        found = self._busy
        if found is None:
            with self._driver.lock:
                found = self._busy
                if found is None:
                    found = self._busy = set()
        return found

    def _begin_use(
        self, asked: str, place: Location, needed: Access, token: object, part: tuple[int, int] | None = None
    ) -> None:
        """Begin an operation on the memory by one location, which is under way until its token is discarded.

        `part` is the (offset, size) that it touches, None where that is not known. Launches are begun otherwise: see
        `remap.launches`.
        """
        operations = self._operations
        with self._driver.lock:
            self._check_use(asked, place, needed, part)
            operations.add(token)

    def _await_mapping(self) -> None:
        """Wait on the host while an ordered resume still maps a part of it; the caller holds no lock."""
        coming = self._coming  # read once: another thread drops it when everything is mapped
        if coming is not None:
            self._check()
            coming.wait()

    def _wait_for_work(self, asked: str) -> None:
        self._await_mapping()
        if self._known_uses:
            self._known_uses.wait(self.accessing, f"{asked} of {self.describe()}")

    @block
    def _taking(self, doing: str, blind: bool = True) -> Generator[None]:
        """Exclude all other operations for a block that takes the memory away; `doing` is a past participle.

        The addresses stay, so that device arrays of other libraries may, too; only closing refuses those. Arrays
        through which the CPU looks are refused if it would be `blind` then.
        """
        begun = False
        try:
            with self._driver.lock:
                self._check()
                self._check_free(doing, self._views if blind else None)
                # Set inside the block, and reset without a call: an interrupt comes where a call returns, leaving a
                # lock included, and what is taken for ever could not even be closed.
                self._taken, begun = doing, True
            if watchers:
                tell("begin", self, doing)
            _log.debug("%s %d is being %s", self.kind, self.serial, doing)
            try:
                yield
            finally:
                # What was checked for launches in the middle of it was true of neither before nor after.
                launches.renew()
                if watchers:
                    tell("end", self, doing)
        finally:
            if begun:
                self._taken = ""

    def _check_free(self, doing: str, views: set[int] | None = None) -> None:
        """Raise `InUseError` if anything uses the memory at this moment, or looks at it through one of `views`.

        The caller holds the lock, and says in `_taken`, or by closing, that nobody may use it from now on.
        """
        if self._taken or self._busy:
            rule = (
                f"it is being {self._taken}"
                if self._taken
                else f"{counted(len(self._operations), 'operation')} on it still under way"
            )
            raise InUseError(f"{self.describe()} to be {doing}", rule=rule, next_step="Let them end first")
        if views:
            raise InUseError(
                f"{self.describe()} to be {doing}",
                rule=f"it is still viewed through {counted(len(views), 'array')} of other libraries",
                next_step="Delete what views it first",
            )
        if self._known_uses is not None:
            launches.check_none(self._known_uses, self, doing)

    def _check_closable(self) -> None:
        if self._taken or self._busy or self._exports or self._known_uses is not None:
            self._check_free("closed", self._exports)

    def close(self, *, after: After = Known.STREAMS) -> None:
        """Unmap and give the memory back. Closing again does nothing.

        Waits on the host for the work that may still use it: by default for all streams that remap knows to use it
        and, once the address escaped, for the contexts of the accessing devices. `after=` names a stream or an
        event to wait for instead, or None: the caller's promise that there is no such work. Raises `InUseError`,
        and stays open, while arrays of other libraries view it or a stream to be waited for is being captured.
        """
        if self._coming is not None and self._open:
            with suppress(PausedError, ForkedError):  # what has not come back goes, too
                self._await_mapping()
        instead = None if isinstance(after, Known) else partial(self._wait_instead, after)
        if self._close(instead) and self._known_uses is not None:
            self._known_uses.forget()

    def _wait_instead(self, after: StreamLike | Event | None, release: Release) -> None:
        """Let a release wait for what the caller names."""
        accessing = self.accessing
        at, asked = accessing[0] if accessing else device(), f"closing {self.describe()}"
        release.wait = partial(wait_after, after, at, asked)

    def _wait_on_close(self) -> Callable[[], None] | None:
        uses = self._known_uses
        return uses.waiter(self.accessing, f"closing {self.kind} {self.serial}") if uses else None


Granted: TypeAlias = tuple[int, int, Mapping[Location, Access]]
"""A part of a range, mapped with one table of rights: (address, size, rights)."""


def grant(driver: Any, address: int, size: int, rights: Mapping[Location, Access]) -> None:
    """Give a mapped part the rights that it is to have."""
    if rights:
        driver.set_access(address, size, tuple(rights.items()))


def _lost(rights: Mapping[Location, Access], grants: Grants) -> list[Location]:
    """Return the locations that would have less than they have."""
    return [place for place, right in grants if _order(right) < _order(rights.get(place, Access.NONE))]


def _merged(rights: Mapping[Location, Access], grants: Grants) -> Mapping[Location, Access]:
    return {place: right for place, right in {**rights, **dict(grants)}.items() if right.readable}


_order = list(Access).index


def words(right: Access) -> str:
    """Return an access right in words."""
    return _WORDS[right]


_WORDS = {Access.NONE: "no access", Access.READ: "read access", Access.READ_WRITE: "read-write access"}
