"""Groups: buffers by tag, so that the parts of a program sleep and wake by name."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ContextDecorator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from remap.arrays import DeviceArray
from remap.blocks import block
from remap.buffers.base import Buffer
from remap.buffers.shares import footprint as footprint_of
from remap.buffers.sources import mapped_only
from remap.errors import ForkedError, InvalidValueError
from remap.forks import in_child
from remap.handles import PhysicalAllocation
from remap.lifetime import Resource, on_creation
from remap.sizes import counted
from remap.spans import Span
from remap.types import Location

if TYPE_CHECKING:
    from remap.locations import LocationLike
    from remap.residency.results import Moved
    from remap.residency.stores import Keep
    from remap.residency.waking import Waking


class Group:
    """The live buffers that were made inside of `remap.group(tag)`, and their forks. It keeps none of them alive.

    Iterating over it yields them.

    Only what stands on mapped memory is in it; other memory can neither sleep nor move.
    """

    def __init__(self, tag: str) -> None:
        self.tag = tag
        # By serial; each goes with its buffer. Adding one and dropping it are atomic, on any thread, without a lock.
        self._members: dict[int, weakref.ref[Buffer]] = {}

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Its open buffers, oldest first."""
        found = (member() for member in list(self._members.values()))
        return tuple(one for one in found if one is not None and not one.closed)

    @property
    def size(self) -> int:
        """The bytes of its buffers, asleep or not."""
        return sum(buffer.size for buffer in self.buffers)

    def __iter__(self) -> Iterator[Buffer]:
        """Go through its open buffers, oldest first."""
        return iter(self.buffers)

    def footprint(self) -> dict[Location, int]:
        """Return the physical bytes behind its buffers by location: `remap.footprint`."""
        return footprint_of(self.buffers)

    def pause(self, keep: Keep = "host", **options: Any) -> Moved:
        """Pause its buffers: `remap.pause`."""
        from remap.residency.pausing import pause

        return pause(self.buffers, keep, **options)

    def resume(self, *, events: bool = False, **options: Any) -> Moved | Waking:
        """Resume its buffers: `remap.resume`."""
        from remap.residency.resuming import resume

        return resume(self.buffers, events=events, **options)

    def migrate(self, location: LocationLike, **options: Any) -> Moved:
        """Migrate its buffers: `remap.migrate`."""
        from remap.residency.migration import migrate

        return migrate(self.buffers, location, **options)

    def _add(self, thing: Resource) -> None:
        if isinstance(thing, Buffer):
            if self.tag in thing._groups:  # made in two nested blocks of this tag
                return
            # The reference passes itself to the call: what `pop` returns where there is nothing.
            self._members[thing.serial] = weakref.ref(thing, partial(self._members.pop, thing.serial))
            thing._groups = (*thing._groups, self.tag)
            thing._heirs = (*thing._heirs, self._add)

    def __repr__(self) -> str:
        """Return the tag and how many buffers there are."""
        return f"<remap.Group {self.tag!r} of {counted(len(self.buffers), 'buffer')}>"


Memory: TypeAlias = Span | PhysicalAllocation | DeviceArray | Group | str
"""What has a footprint: memory of remap, typed or not, and a group or its tag."""

_groups: dict[str, Group] = {}  # of this process, by tag; a forked child begins with none
_inherited: set[str] = set()


class GroupBlock(ContextDecorator, AbstractContextManager[Group]):
    """A block that gathers buffers under a tag: not the group, which has no right to be looked at before that."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._gathering = _gather(tag)

    def _recreate_cm(self) -> GroupBlock:  # as a decorator: for each call one of its own
        return GroupBlock(self._tag)

    def __enter__(self) -> Group:
        return self._gathering.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._gathering.__exit__(kind, error, trace)

    if not TYPE_CHECKING:  # a type checker says by itself what is not there

        def __getattr__(self, name: str) -> NoReturn:
            """Say what it is, to who takes it for the group."""
            tag = self.__dict__.get("_tag")
            named = f"remap.group({tag!r})"
            raise AttributeError(
                f"{named} is a block, `with {named} as group:`, and has no {name!r}; the group of that tag is "
                f"remap.groups()[{tag!r}], and remap.pause and others take the tag"
            )

    def __repr__(self) -> str:
        return f"<the block remap.group({self._tag!r})>"


@block
def _gather(tag: str) -> Generator[Group]:
    found = _groups.setdefault(tag, Group(tag))
    with on_creation(found._add), mapped_only():
        yield found


def group(tag: str) -> GroupBlock:
    """Gather every buffer that is made inside a block, `with remap.group(tag) as group:`, by this thread or task.

    The same tag again adds to the same group. Groups may be nested; a buffer is then in each of them. Typed buffers
    take mapped memory there, however small, so that they can sleep and move. Outside of the block the group is
    `remap.groups()[tag]`, and what takes groups takes tags.
    """
    if not isinstance(tag, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"the tag of a group is text, not {type(tag)}")
    return GroupBlock(tag)


def footprint(memory: Memory | Iterable[Memory]) -> dict[Location, int]:
    """Return the physical bytes behind memory by location; what several of them share counts once.

    `memory` is a buffer, or other memory of remap, typed or not, a group or its tag, or several of these. Paused
    buffers have nothing behind them.
    """
    alone = isinstance(memory, str | DeviceArray | Resource) or not isinstance(memory, Iterable)
    each: Any = (memory,) if alone else memory
    return footprint_of(one for what in each for one in _memory_of(what))


def _memory_of(what: Any) -> Iterable[Span | PhysicalAllocation]:
    found = known(what) if isinstance(what, str) else what.owner if isinstance(what, DeviceArray) else what
    if isinstance(found, Group):
        return found.buffers
    if isinstance(found, Span | PhysicalAllocation):
        return (found,)
    raise TypeError(f"buffers and other memory, groups and tags have a footprint, not {type(what)}")


def groups() -> dict[str, Group]:
    """Return the groups that have open buffers, by tag."""
    return {tag: one for tag, one in list(_groups.items()) if one.buffers}


def known(tag: str) -> Group:
    """Return the group of a tag; raises `InvalidValueError` if there never was one, `ForkedError` for the parent's."""
    found = _groups.get(tag)
    if found is None and tag in _inherited:
        raise ForkedError(
            f"group {tag!r} in a forked process",
            rule="its buffers were made before the fork, and belong to the parent",
            next_step="Let the parent do this, or make the memory anew in the child",
        )
    if found is None:
        names = ", ".join(repr(name) for name in list(_groups)) or "none"
        raise InvalidValueError(f"group {tag!r}", rule=f"there is no such group; those there are: {names}")
    return found


def _forked() -> None:
    _inherited.update(_groups)
    _groups.clear()


in_child(_forked)
