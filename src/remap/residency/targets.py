"""What a move is asked of: buffers, groups and tags, checked before anything happens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeAlias, cast

from remap.arrays import DeviceArray
from remap.blocks import block
from remap.buffers.base import SHARED, SHARED_STEP, Buffer
from remap.buffers.changes import shares_of
from remap.buffers.shares import Share
from remap.errors import InUseError, InvalidValueError, RemapError
from remap.lifetime import Resource, call_all
from remap.locations import device
from remap.residency.stores import Keep
from remap.residency.tags import Group, known
from remap.residency.waking import Arrival
from remap.sizes import counted
from remap.types import Location, MemoryInfo
from remap.uses import After, Known, wait_after, wait_for_all

Target: TypeAlias = Buffer | DeviceArray | Group | str
Targets: TypeAlias = Target | Iterable[Target] | Mapping[Any, Keep]
"""What can be paused: a buffer, typed memory on one, a group or its tag, several, or a mapping to what is kept."""


_LOOK = 0.001
"""How long it is waited before it is looked again whether buffers are in use: calls on them are short, and many."""


def chosen(what: Targets, keep: Keep) -> dict[Buffer, Keep]:
    """Return the buffers that are meant, in order, each with what is kept of it.

    Raises `InvalidValueError` for what cannot sleep or move, for a buffer that is named with two different keeps, and
    for a mapping with a `keep` beside it that is not the default.
    """
    found: dict[Buffer, Keep] = {}
    pairs: list[tuple[Any, Keep]]
    if isinstance(what, Mapping):
        if keep != "host":
            raise InvalidValueError(
                f"keep={keep!r} beside a mapping",
                rule="the mapping says of each what is kept",
                next_step="Leave keep= out, or name the buffers in a list",
            )
        pairs = list(cast("Mapping[Any, Keep]", what).items())
    else:
        pairs = [(one, keep) for one in each(what)]
    for target, kept in pairs:
        if kept not in ("host", "disk", None):
            given: Any = kept
            step = (
                "Name several buffers in a list" if isinstance(given, (Resource, DeviceArray, Group)) else ""
            )
            raise InvalidValueError(f"keep={kept!r}", rule='it is "host", "disk" or None', next_step=step)
        for buffer in _buffers(target):
            if found.setdefault(buffer, kept) != kept:
                raise InvalidValueError(
                    f"{buffer.describe()} with keep={found[buffer]!r} and keep={kept!r}",
                    rule="it is named twice, and one call can keep it in one way only",
                )
    return found


def named(what: Targets, doing: str) -> list[Buffer]:
    """Return the buffers that are meant, in order, where there is nothing to keep; `doing` is a past participle.

    Raises `InvalidValueError` for what cannot sleep or move, and for a mapping, whose keeps would mean nothing.
    """
    if isinstance(what, Mapping):
        raise InvalidValueError(
            f"a mapping to be {doing}",
            rule="only remap.pause takes what is to be kept of each",
            next_step="Name buffers, groups or tags alone: list(mapping)",
        )
    return list(chosen(what, None))


def check_seconds(wait: float, asked: str) -> None:
    """Raise `InvalidValueError` unless it is a time that can be waited."""
    if not wait >= 0:  # NaN, too, which no deadline ever reaches
        raise InvalidValueError(f"{asked} with wait={wait}", rule="it is a number of seconds, 0 or more")


def each(what: Targets) -> Collection[Any]:
    """Return what is named, one by one; a mapping as it is."""
    if isinstance(what, str | Group | Resource | DeviceArray) or not hasattr(what, "__iter__"):
        return (what,)
    found: Any = what
    return found if isinstance(what, Mapping) else list(found)


def _buffers(target: Any) -> tuple[Buffer, ...]:
    if isinstance(target, str):
        target = known(target)
    if isinstance(target, DeviceArray):  # typed memory, or a view: what sleeps is all that it stands on
        target = target.owner
    if isinstance(target, Group):
        return target.buffers
    if isinstance(target, Buffer):
        return (target,)
    if isinstance(target, Resource):
        raise InvalidValueError(
            f"{target.describe()} to sleep or move",
            rule=getattr(
                target, "_stays", "its address belongs to its bytes, so that nothing else can stand behind it"
            ),
            next_step="Use remap.allocate, or another buffer that stands on mapped memory of its own",
        )
    raise TypeError(f"buffers, groups and tags can sleep and move, not {type(target)}")


@block
def held(
    buffers: Collection[Buffer],
    doing: str,
    *,
    detach: bool = False,
    deadline: float = 0.0,
    again: Callable[[], object] | None = None,
) -> Generator[None]:
    """Keep everyone else from the buffers for a block.

    Raises `InUseError` if something uses one of them, at the deadline still; none of them is held while it waits, and
    `again` may change which they are before they are tried again. It does not wait for other processes to let go,
    which nobody here can see.
    """
    # Not an `ExitStack`: an interrupt in the middle of it would leave them held until cycles are collected.
    taken: list[AbstractContextManager[None]] = []
    try:
        while True:
            try:
                for buffer in buffers:
                    _take(buffer, doing, detach, taken)
                check_forks(buffers, doing)
                break
            except InUseError:
                shared = not detach and any(buffer._shared for buffer in buffers)
                if shared or time.perf_counter() >= deadline:
                    raise
                while taken:
                    taken.pop().__exit__(None, None, None)
            time.sleep(_LOOK)
            if again is not None:
                again()
        yield
    finally:
        try:
            while taken:
                taken.pop().__exit__(None, None, None)
        finally:
            while taken:  # an interrupt came
                taken.pop().__exit__(None, None, None)


def _take(buffer: Buffer, doing: str, detach: bool, taken: list[AbstractContextManager[None]]) -> None:
    if isinstance(buffer._arriving, Arrival):
        buffer._arriving.waking.settle()
    one = buffer._taking(doing)
    one.__enter__()
    taken.append(one)
    if isinstance(buffer._arriving, Arrival):
        raise InUseError(
            f"{buffer.describe()} to be {doing}",
            rule="its contents are still arriving, and another thread waits for them",
            next_step="Let that end first",
        )
    buffer._check_registrations(doing)
    if buffer._shared and not detach:
        raise InUseError(
            f"{buffer.describe()} to be {doing}",
            rule=SHARED,
            next_step=SHARED_STEP,
        )


def check_forks(buffers: Iterable[Buffer], doing: str) -> None:
    """Raise `InUseError` unless all that share memory are there; the others would keep it, and go on using it."""
    shares = {buffer: found.values() for buffer in buffers if (found := shares_of(buffer))}
    named: Counter[Share] = Counter()
    for some in shares.values():
        named.update(some)
    for buffer, some in shares.items():
        missing = sum(named[share] < share.users for share in some)
        if missing:
            raise InUseError(
                f"{buffer.describe()} to be {doing}",
                rule=f"it shares {counted(missing, 'chunk')} with forks that are not named, and would keep the memory",
                next_step="Name all that share it in one call (the group that they are in, say), call make_private() "
                "first, which copies what is shared, or close the forks",
            )


def wait_for_work(buffers: Iterable[Buffer], after: After, doing: str) -> None:
    """Wait for the work that may still use the buffers (invariant 7)."""
    if isinstance(after, Known):
        uses = [
            (buffer._known_uses, buffer.accessing, f"{buffer.describe()} to be {doing}")
            for buffer in buffers
            if buffer._known_uses
        ]
        wait_for_all(uses)
        return
    wait_after(after, device(), f"buffers to be {doing}")


def free_memory(buffers: Iterable[Buffer]) -> dict[Location, MemoryInfo]:
    """Return the memory of each device that buffers lie on."""
    places = dict.fromkeys(chunk.location for buffer in buffers for chunk in buffer._chunks)
    return {place: device(place.index).memory() for place in places if place.is_device}


def free_memory_now(before: Mapping[Location, MemoryInfo]) -> dict[Location, MemoryInfo]:
    """Return the memory of the same devices, when all is done: a figure that cannot be had is left out then."""
    found: dict[Location, MemoryInfo] = {}
    for place in before:
        with suppress(RemapError):
            found[place] = device(place.index).memory()
    return found


def growth(before: Mapping[Location, MemoryInfo], after: Mapping[Location, MemoryInfo]) -> int:
    """Return by how many bytes free memory has grown, over all devices."""
    return sum(info.free - before[place].free for place, info in after.items() if place in before)


def announce(buffers: Iterable[Buffer], failure: BaseException | None = None) -> None:
    """Tell the listeners of every buffer of its change; the first error is raised when all have been told.

    That is `failure` where there is one, of a change that was made all the same.
    """
    call_all((buffer._changed for buffer in buffers), failure)
