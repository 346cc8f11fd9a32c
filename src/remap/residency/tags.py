"""Groups: buffers by tag, so that the parts of a program sleep and wake by name."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from remap.buffers.base import Buffer
from remap.buffers.sources import mapped_only
from remap.errors import ForkedError, InvalidValueError
from remap.forks import in_child
from remap.lifetime import Resource, on_creation
from remap.sizes import counted

if TYPE_CHECKING:
    from remap.locations import LocationLike
    from remap.residency.results import Moved
    from remap.residency.stores import Keep
    from remap.residency.waking import Waking


class Group:
    """The live buffers that were made inside of `remap.group(tag)`, and their forks. It keeps none of them alive.

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


_groups: dict[str, Group] = {}  # of this process, by tag; a forked child begins with none
_inherited: set[str] = set()


@contextmanager
def group(tag: str) -> Generator[Group]:
    """Gather every buffer that is made inside the block, by this thread or task, under a tag.

    The same tag again adds to the same group. Groups may be nested; a buffer is then in each of them. Typed buffers
    take mapped memory there, however small, so that they can sleep and move.
    """
    if not isinstance(tag, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"the tag of a group is text, not {type(tag)}")
    found = _groups.setdefault(tag, Group(tag))
    with on_creation(found._add), mapped_only():
        yield found


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
