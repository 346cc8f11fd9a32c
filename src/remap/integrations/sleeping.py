"""Sleeping and waking of pools by tag, each call one transaction, and what can be done with memory that sleeps."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, cast

from remap import drivers
from remap.buffers.base import Buffer
from remap.buffers.registrations import Registration
from remap.errors import InUseError, InvalidValueError, ShareError
from remap.integrations.elastic_tensor import ElasticTensor
from remap.integrations.lookup import buffer_at
from remap.integrations.memory import memory
from remap.integrations.pools import Pool, empty_caches, moving, pools
from remap.integrations.tensors import Tensor, check_tensor, has_memory, is_empty, span_of, torch
from remap.lifetime import end_block, undo
from remap.residency import Moved, Waking, groups, pause
from remap.residency import backup as backup_of
from remap.residency.results import Progress
from remap.residency.resuming import put_back, tell
from remap.residency.stores import Keep, asleep
from remap.residency.tags import known as known_group
from remap.residency.targets import announce
from remap.sharing.exchange import Exchange
from remap.uses import After, Known

Tags: TypeAlias = str | Iterable[str] | Mapping[str, Keep]
"""Which pools and groups are meant: a tag, several, or a mapping of them to what is kept of each."""


def sleep(
    tags: Tags,
    keep: Keep = "host",
    *,
    after: After = Known.STREAMS,
    progress: Progress | None = None,
    directory: str | os.PathLike[str] | None = None,
    detach: bool = False,
) -> Moved:
    """Put pools to sleep: `remap.torch.sleep({"weights": "host", "kv": None})`, all of them or none.

    First torch gives back what it caches, in the pools too, so that it cannot hand out memory that is not there; then
    `remap.pause` copies and unmaps the rest, with every other buffer of a group with that tag (ElasticTensors, say).
    `keep` and the other options are its own. Tensors, pointers and captured graphs stay valid for the time after
    `wake`, and must not be used before. What is deleted meanwhile goes at the next call of this module. A pool that
    holds nothing sleeps as well (0 buffers moved), and can be entered again when it was woken.

    Waits for all work of the devices. Raises `InUseError` while a thread is inside of a pool, the current stream is
    being captured, memory is registered with another library (`registered`), or shared with other processes
    (`detach=True` lets them keep it), and what `remap.pause` raises. After a failure everything is awake, but for what
    `remap.pause` says, and where a listener (`on_change`) has raised: then everything sleeps.
    """
    plan = _plan(tags, keep)
    check_not_capturing("sleep")
    found = memory()
    with _moving(plan, "put to sleep") as chosen:
        for pool in chosen:
            pool._warn_unused()
        found.reap()
        for pool in chosen:
            pool._drop_caches()
        empty_caches()
        found.reap()
        found.adopt_all(plan)
        known = groups()
        awake = [one for tag in plan if tag in known for one in known[tag].buffers if not one.paused]
        try:
            moved = pause(plan, after=after, progress=progress, directory=directory, detach=detach)
        except BaseException:
            if awake and all(one.paused for one in awake):  # a listener has raised, say
                for pool in chosen:
                    pool._note_sleep()
            raise
        for pool in chosen:
            pool._note_sleep()
    return moved


def wake(
    tags: str | Iterable[str] | None = None,
    *,
    wait: float = 0.0,
    order: Any = None,
    events: bool = False,
    exchange: Exchange | None = None,
    keep_host: bool = False,
    progress: Progress | None = None,
    poison: bool = False,
) -> Moved | Arriving:
    """Wake pools, all that sleep by default, with the contents that were kept; all of them or none.

    The options are those of `remap.resume`; `order` names what is needed first: a tensor, a module or an ElasticTensor,
    or several, as far as they lie in these pools. With `events=True` it returns an `Arriving` as soon as all is mapped:
    let streams wait there for what they use.

    With `exchange`, all its ranks call this together with the same tags, and wake together or not at all: a rank that
    was not short of memory sleeps again. Host memory of the backups is kept then, as with `keep_host=True`, so that
    going back to sleep asks for none. Listeners (`on_change`) are called when every rank is awake; what one of them
    raises is raised here, with everything awake and, with `events=True`, arrived.

    Raises what `remap.resume` raises, `InvalidValueError` for something in `order` of which nothing lies in these
    pools, `InUseError` while a thread is inside of a pool or the current stream is being captured, and `ShareError`
    where ranks do not agree; everything sleeps on then, and can be woken later.
    """
    if exchange is not None and events:
        raise InvalidValueError(
            "wake with exchange= and events=True", rule="ranks can only agree on what has been done"
        )
    options: dict[str, Any] = {
        "wait": wait, "keep_host": keep_host or exchange is not None, "progress": progress, "poison": poison,
    }  # fmt: skip
    if exchange is not None:
        return _together(exchange, tags, order, options)
    with _waking(tags) as (chosen, buffers):
        options["order"] = _order(order, buffers)
        moved, changed = put_back(buffers, events=events, settle=memory().reap, **options)
        for pool in chosen:
            pool._note_wake()
    tell(moved, changed)
    return Arriving(moved) if isinstance(moved, Waking) else moved


@contextmanager
def _waking(tags: str | Iterable[str] | None) -> Generator[tuple[list[Pool], list[Buffer]]]:
    """Keep everyone out of the pools of some tags, or of all that sleep; yield them, and the buffers that sleep."""
    plan = _plan(sorted(_asleep()) if tags is None else tags, None)
    for tag in plan:
        known_group(tag)
    check_not_capturing("wake")
    with _moving(plan, "woken") as chosen:
        memory().reap()
        known = groups()
        yield (
            chosen,
            [buffer for tag in plan if tag in known for buffer in known[tag].buffers if buffer.paused],
        )


def _together(
    exchange: Exchange, tags: str | Iterable[str] | None, order: Any, options: dict[str, Any]
) -> Moved:
    """Wake on all ranks, or on none: whatever goes wrong on one, the others hear of it at once."""
    names: list[str] | None = None
    failure: BaseException | None = None
    moved: Moved | Waking | None = None
    changed: list[Buffer] = []
    chosen: list[Pool] = []
    kept: dict[Buffer, Keep] = {}
    with ExitStack() as held:
        try:
            try:
                names = None if tags is None else sorted(_plan(tags, None))
                chosen, buffers = held.enter_context(_waking(names))
                kept = {buffer: _keep(buffer) for buffer in buffers}
                # Listeners are not told yet: one that registers memory would keep it from sleeping again.
                moved, changed = put_back(
                    buffers, events=False, order=_order(order, buffers), settle=memory().reap, **options
                )
            except Exception as error:  # noqa: BLE001 (the others have to know; raised below)
                failure = error
            why = b"" if failure is None else (str(failure) or "it failed").encode()[:4096]
            told = exchange.allgather(json.dumps(names).encode() + b"\0" + why)
            if failure is not None:
                raise failure
            _check_all_woke(told)
        except BaseException as error:
            awake = {one: keep for one, keep in kept.items() if not (one.closed or one.paused)}
            if awake:
                undo(error, pause, awake)
            raise
        for pool in chosen:
            pool._note_wake()
    announce(one for one in changed if not one.closed)  # tensors may be deleted while the ranks agree
    assert isinstance(moved, Moved)
    return moved


def _check_all_woke(told: Sequence[bytes]) -> None:
    """Raise the same `ShareError` on every rank, but for one that failed itself, unless all woke the same tags."""
    parts = [one.partition(b"\0") for one in told]
    texts = [(named.decode(errors="replace"), why.decode(errors="replace")) for named, _, why in parts]
    rule = "; ".join(f"rank {rank} could not: {why}" for rank, (_, why) in enumerate(texts) if why)
    if not rule and len({named for named, _ in texts}) > 1:
        rule = "all ranks name the same tags, and " + ", ".join(
            f"rank {rank} named {'all that sleep' if named == 'null' else named}"
            for rank, (named, _) in enumerate(texts)
        )
    if rule:
        raise ShareError(
            "a wake on all ranks",
            rule=rule,
            next_step="All ranks sleep again, with what they had; mend that, and wake them together again",
        )


class Arriving:
    """Pools that are mapped, and whose contents are being copied in. Made by `wake(events=True)`.

    torch knows nothing of those copies: let a stream wait with `wait_for` before it uses tensors, or wait for all with
    `wait`. Leaving the `with` block waits, too.
    """

    def __init__(self, waking: Waking) -> None:
        self.waking = waking

    def wait_for(self, *what: Any, stream: Any = None) -> None:
        """Let later work of a torch stream, the current one by default, wait for tensors, or modules' tensors.

        The host does not wait, but on the host driver, where CPU tensors are at hand at once: there it does.
        """
        spans = [span_of(tensor) for tensor in _tensors(what)]
        for event in self.waking.events:
            chunk = event.chunk
            if not any(
                start < chunk.address + chunk.size and chunk.address < start + size for start, size in spans
            ):
                continue
            if drivers.current().name != "cuda":
                event.synchronize()
                continue
            target = torch.cuda.current_stream(event.device.index) if stream is None else stream
            with event._named(), event.device.current():
                event._driver.wait_event(target.cuda_stream, event.handle)

    def wait(self) -> Moved:
        """Wait until everything has arrived, and return what was done."""
        return self.waking.wait()

    @property
    def result(self) -> Moved:
        """What was done; until everything has arrived, the figures of this moment."""
        return self.waking.result

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Wait for the rest; if the block failed, what that raises is a note on its error."""
        end_block(error, self.waking.close)


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What a pool is at one moment. `state` is "awake" or "asleep"; sizes are in bytes.

    `size` counts its segments, asleep or not, and other buffers of its group; `resident` what is backed by memory now;
    `kept` says where contents are kept, with the bytes of each; `shared` segments refuse to sleep.
    """

    tag: str
    state: str
    segments: int
    size: int
    resident: int
    kept: Mapping[str, int]
    shared: int
    devices: tuple[int, ...]


def status() -> dict[str, PoolStatus]:
    """Return what each pool, and each group with open buffers, is at this moment."""
    found = memory()
    found.reap()
    found.adopt_all(pools())
    known = groups()
    told: dict[str, PoolStatus] = {}
    for tag in sorted({*pools(), *known}):
        buffers = known[tag].buffers if tag in known else ()
        kept: dict[str, int] = {}
        for buffer in buffers:
            backup: Any = buffer._backup  # read once: it may be woken, or closed, meanwhile
            if buffer.paused and backup is not None:
                where = backup.keep or "nowhere"
                kept[where] = kept.get(where, 0) + sum(chunk.size for chunk in buffer._chunks)
        slept = pools()[tag].asleep if tag in pools() else bool(kept)
        told[tag] = PoolStatus(
            tag=tag,
            state="asleep" if slept else "awake",
            segments=len(buffers),
            size=sum(buffer.size for buffer in buffers),
            resident=sum(chunk.size for buffer in buffers for chunk in buffer._backing()),
            kept=kept,
            shared=sum(buffer._shared for buffer in buffers),
            devices=tuple(sorted({place.index for buffer in buffers for place in buffer.resident if place.is_device})),
        )  # fmt: skip
    return told


def backup(tensor: Tensor) -> Tensor:
    """Return the backup of a sleeping tensor as a CPU tensor of its shape and strides; what is written there wakes.

    Of an `ElasticTensor` it is that of the rows there are. While it or a view of it lives, its memory refuses to wake.
    A tensor of no elements has an empty one. Raises `InvalidValueError` for a tensor that is awake, lies in no pool, or
    whose contents were given up, and `TypeError` for what has no memory.
    """
    if is_empty(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    buffer = buffer_at(tensor, "the backup")
    if isinstance(tensor, ElasticTensor):
        tensor = tensor.whole[: tensor.rows]
    start, size = span_of(tensor)
    kept = torch.from_numpy(backup_of(buffer))
    if not size:  # an ElasticTensor of no rows
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = kept[start - buffer._address :][:size]
    if len(raw) < size:
        raise InvalidValueError(
            f"the backup of a tensor of {size} bytes",
            rule=f"only {len(raw)} of them had memory when it went to sleep",
            next_step="Pass the ElasticTensor itself, for the rows there are",
        )
    found = raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    # What the tensor shows of its memory: otherwise what is written here would wake as something else.
    if tensor.is_conj():
        found = found.conj()
    return torch._neg_view(found) if tensor.is_neg() else found


def buffer_of(tensor: Tensor) -> Buffer:
    """Return the segment that a tensor lies in, as a buffer: to migrate it, register it, or be told of changes.

    Other tensors may lie in it, too. It is torch's: it cannot be closed. Of an `ElasticTensor`, and of a view of one,
    it is `ElasticTensor.buffer`.
    """
    return buffer_at(tensor, "the buffer")


def registered(tensor: Tensor, by: str) -> Registration:
    """Say that another library, `by` name, has registered the segment that a tensor lies in: it stays where it is.

    Its pool refuses to sleep, with `InUseError` and the name, until what this returns is closed. To move between
    sleeps: deregister there, close, `sleep`, `wake`, and register again, in a listener of
    `buffer_of(tensor).on_change`, say, which is called when all has been done.
    """
    return buffer_of(tensor).registered(by)


def check_not_capturing(asked: str) -> None:
    """Raise `InUseError` while the current stream is being captured: a wait would break the capture (trap 13)."""
    if drivers.current().name == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InUseError(
            asked,
            rule="the current stream is being captured, and a wait would break the capture",
            next_step="End the capture first",
        )


@contextmanager
def _moving(plan: Mapping[str, Keep], doing: str) -> Generator[list[Pool]]:
    known = pools()
    chosen = [known[tag] for tag in plan if tag in known]
    with moving(chosen, doing):
        yield chosen


def _plan(tags: Tags, keep: Keep) -> dict[str, Keep]:
    if isinstance(tags, Mapping):
        return dict(cast("Mapping[str, Keep]", tags))
    return dict.fromkeys([tags] if isinstance(tags, str) else tags, keep)


def _keep(buffer: Buffer) -> Keep:
    found: Any = asleep(buffer)
    keep: Keep = found.keep
    return keep


def _asleep() -> set[str]:
    slept = {tag for tag, pool in list(pools().items()) if pool.asleep}
    return slept | {tag for tag, one in groups().items() if any(buffer.paused for buffer in one.buffers)}


def _order(what: Any, buffers: Iterable[Buffer]) -> list[Buffer]:
    """Return those of the buffers that tensors, modules and buffers, one or several, lie in, each once, in order.

    What lies elsewhere has nothing to wait for: parts of modules are left out. Raises `InvalidValueError` for a tensor
    or a module with nothing at all in them.
    """
    among = sorted(buffers, key=lambda one: one._address)
    addresses = [one._address for one in among]
    found: dict[Buffer, None] = {}
    alone = isinstance(what, torch.Tensor | torch.nn.Module | ElasticTensor | Buffer | str)
    for one in () if what is None else (what,) if alone else what:
        if isinstance(one, Buffer):
            found[one] = None
            continue
        spans = [span for tensor in _tensors((one,)) if (span := span_of(tensor))[1]]
        below = [(start, bisect_right(addresses, start) - 1) for start, _ in spans]
        mine = [among[at] for start, at in below if at >= 0 and start < addresses[at] + among[at]._reserved]
        if spans and not mine:
            raise InvalidValueError(
                f"a {type(one).__name__} in order=",
                rule="none of it lies in the memory that is to be woken",
                next_step="Name its pool, too, or leave it out of order=",
            )
        found.update(dict.fromkeys(mine))
    return list(found)


def _tensors(what: Iterable[Any]) -> Iterator[Tensor]:
    for one in what:
        if isinstance(one, torch.nn.Module):
            yield from filter(has_memory, (*one.parameters(), *one.buffers()))
        elif isinstance(one, torch.Tensor):
            check_tensor(one, "the place")
            yield one
        elif isinstance(one, ElasticTensor):
            yield one.whole
        else:
            raise TypeError(f"tensors and modules are in pools, not {type(one)}")
