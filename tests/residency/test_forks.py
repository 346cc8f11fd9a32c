"""Forks that share memory sleep, wake and move together: what is shared is kept, made and copied once (B3, B8)."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from numpy.typing import NDArray

import remap
from remap import Access, MiB, RemapError, lifetime
from remap.errors import CudaResult
from remap.testing.stage import Stage

from .support import contents, settled
from .test_faults import ABSORBED, CLEAN_UP, NOT_SWEPT

pytest_plugins = ("remap.testing.stage",)

CHUNK = 2 * MiB
PREFIX = 3 * CHUNK


class Family:
    """A cache with a prefix, forks of it that have gone on by themselves, and what all of them hold."""

    def __init__(self, forks: int = 2, **options: Any) -> None:
        root = remap.ElasticBuffer(16 * CHUNK, device=0, chunk=CHUNK, **options)
        root.resize(PREFIX)
        root.copy_from_host(contents(0, PREFIX))
        self.all = [root, *(root.fork() for _ in range(forks))]
        self.bytes = [contents(0, PREFIX)]
        for number, one in enumerate(self.all[1:], 1):
            one.resize(PREFIX + CHUNK)
            one.copy_from_host(contents(number, CHUNK), offset=PREFIX)
            self.bytes.append(np.concatenate([contents(0, PREFIX), contents(number, CHUNK)]))

    @property
    def physical(self) -> int:
        """The bytes of memory behind all of them."""
        return PREFIX + (len(self.all) - 1) * CHUNK

    def holds(self) -> bool:
        """Tell whether each has its contents."""
        return all(
            np.array_equal(one.to_host(), expected)
            for one, expected in zip(self.all, self.bytes, strict=True)
            if not one.closed
        )

    def close(self) -> None:
        """Close all of them."""
        for one in self.all:
            one.close()


@contextmanager
def family(forks: int = 2, **options: Any) -> Generator[Family]:
    """Make a family, and close it at the end."""
    made = Family(forks, **options)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("keep", ["host", "disk"])
@pytest.mark.parametrize("events", [False, True])
def test_sleeping_together(stage: Stage, keep: Any, events: bool) -> None:
    """What is shared is freed, kept and created once; awake it is shared as before, at the same addresses."""
    memory = remap.device(0).memory
    empty = memory().free
    with family(3) as made:
        addresses = [one.address for one in made.all]
        taken = empty - memory().free
        slept = remap.pause(made.all, keep)
        assert (slept.buffers, slept.bytes, slept.freed) == (4, made.physical, made.physical)
        assert abs(memory().free - (empty - taken) - made.physical) <= stage.slack
        if keep == "host":
            assert remap.host_pool().statistics().used == made.physical
        mark = stage.mark()
        if events:
            with remap.resume(made.all, events=True) as waking:
                assert made.holds()
            assert waking.result.bytes == made.physical
        else:
            assert remap.resume(made.all).bytes == made.physical
        assert stage.names_since(mark).count("create") == made.physical // CHUNK
        assert abs(empty - memory().free - taken) <= stage.slack
        assert remap.footprint(made.all) == {remap.device(0).location: made.physical}
        assert [one.address for one in made.all] == addresses
        assert made.holds()
        for one in made.all:
            assert one.shared == ((0, PREFIX),)
            for chunk in one.chunks:
                shared = chunk.address < one.address + PREFIX
                right = stage.inner.get_access(chunk.address, chunk.location)
                assert right is (Access.READ if shared else Access.READ_WRITE)
        first = made.all[1]
        first.make_private()
        first.fill(7)
        made.bytes[1] = np.full(PREFIX + CHUNK, 7, np.uint8)
        assert made.holds()
    assert abs(memory().free - empty) <= stage.slack
    assert settled()


def test_all_of_them_have_to_be_named(stage: Stage) -> None:
    """What shares memory with others is not moved alone: they would keep it. Nothing changes, asleep or awake."""
    with family() as made:
        root, one, two = made.all
        calls: list[Callable[[], object]] = [
            lambda: remap.pause(root),
            lambda: remap.pause([one, two], None),
            lambda: remap.migrate([root, two], remap.Host()),
        ]
        seen = stage.seen()
        for refused in calls:
            with pytest.raises(remap.InUseError, match="3 chunks with forks that are not named"):
                refused()
            assert stage.unchanged(seen)
        remap.pause(made.all)
        for refused in (lambda: remap.resume(one), lambda: remap.resume([root, two], events=True)):
            with pytest.raises(remap.InUseError, match="Name all that share it in one call"):
                refused()
        with pytest.raises(remap.InvalidValueError, match="kept once for all of them"):
            remap.backup(one)
        remap.resume([two, root, one])
        assert made.holds()


def test_a_fork_is_in_the_groups_of_its_source(stage: Stage) -> None:
    """A group sleeps whole, though its forks were made when its block had ended."""
    del stage
    with remap.group("kv"):
        root = remap.ElasticBuffer(8 * CHUNK, device=0, chunk=CHUNK)
        root.resize(PREFIX)
        inside = root.fork()
    fork = root.fork()
    again = fork.fork()
    assert remap.groups()["kv"].buffers == (root, inside, fork, again)
    root.close()
    assert remap.pause("kv").freed == PREFIX
    remap.resume("kv")
    for one in (inside, fork, again):
        one.close()


@pytest.mark.parametrize(
    "keeps", [("host", None, None), (None, None, "host"), (None, "disk", "host"), (None,) * 3]
)
def test_different_keeps(stage: Stage, keeps: tuple[Any, ...]) -> None:
    """What is shared is kept if one of them keeps its contents; what only others have is given up."""
    del stage
    with family() as made:
        slept = remap.pause(dict(zip(made.all, keeps, strict=True)))
        kept = PREFIX * any(keeps) + sum(CHUNK for keep in keeps[1:] if keep)
        assert (slept.freed, slept.bytes) == (made.physical, kept)
        assert remap.resume(made.all, poison=True).bytes == kept
        for one, keep, expected in zip(made.all, keeps, made.bytes, strict=True):
            shared, own = one.to_host(shape=PREFIX), one.to_host()[PREFIX:]
            assert np.array_equal(shared, expected[:PREFIX]) if any(keeps) else (shared == 0xCB).all()
            assert np.array_equal(own, expected[PREFIX:]) if keep else (own == 0xCB).all()


@pytest.mark.parametrize("gone", [(0,), (2, 1), (0, 1), (1, 0, 2)])
@pytest.mark.parametrize("collected", [False, True])
def test_some_go_while_they_sleep(stage: Stage, gone: tuple[int, ...], collected: bool) -> None:
    """Those that are left wake with their contents, whoever carried them; their host memory goes with the last."""
    empty = stage.seen()
    made = Family()
    remap.pause(made.all)
    left = [one for number, one in enumerate(made.all) if number not in gone]
    expected = [one for number, one in enumerate(made.bytes) if number not in gone]
    for number in gone:
        if collected:
            with pytest.warns(ResourceWarning, match="elastic buffer"):
                made.all[number] = None  # type: ignore[call-overload]
                gc.collect()
        else:
            made.all[number].close()
    lifetime.drain()
    if left:
        assert remap.host_pool().statistics().used >= PREFIX
        remap.resume(left)
        assert all(np.array_equal(one.to_host(), each) for one, each in zip(left, expected, strict=True))
        left[-1].make_private()
        left[-1].fill(1)
    for one in left:
        one.close()
    made.all.clear()
    lifetime.drain()
    assert remap.host_pool().statistics().used == 0
    assert settled()
    assert stage.unchanged(empty)


def test_moving_together(stage: Stage) -> None:
    """What is shared is copied once to its new place, awake, and wakes there when asleep; it is shared as before."""
    with family() as made:
        moved = remap.migrate(made.all, remap.Host())
        assert (moved.buffers, moved.bytes) == (3, made.physical)
        assert remap.footprint(made.all) == {remap.Host(): made.physical}
        assert made.holds()
        with pytest.raises(remap.AccessError, match="make_private"):
            made.all[0].fill(1, size=1)
        assert stage.inner.get_access(made.all[0].address, remap.device(0).location) is Access.READ
        remap.pause(made.all)
        assert remap.migrate(made.all, 0).bytes == 0
        remap.resume(made.all)
        assert remap.footprint(made.all) == {remap.device(0).location: made.physical}
        assert made.holds()


def test_pools_count_shared_chunks_once(stage: Stage) -> None:
    """Chunk pools count what is shared as used once: asleep not at all, awake again, and at the place it moved to."""
    del stage
    with remap.ChunkPool(0, limit=64 * MiB) as pool, family(pool=pool) as made:
        used = pool.statistics
        assert used().used == made.physical
        remap.pause(made.all)
        assert used().used == 0
        made.all[0].close()
        remap.resume(made.all[1:])
        assert used().used == made.physical
        remap.migrate(made.all[1:], remap.Host())
        assert used().used == 0
        remap.migrate(made.all[1:], 0)
        assert used().used == made.physical
        made.all[1].make_private()
        assert used().used == made.physical + PREFIX
        made.close()
        assert used().used == 0


def test_a_listener_that_closes_what_moved(stage: Stage) -> None:
    """What left a pool's location has left its figures, before anybody who is told of the move can close it."""
    del stage
    with remap.ChunkPool(0, limit=64 * MiB) as pool, family(1, pool=pool) as made:
        made.all[0].on_change(lambda _: made.close())
        other = remap.ElasticBuffer(4 * CHUNK, device=0, chunk=CHUNK, pool=pool)
        other.resize(CHUNK)
        remap.migrate(made.all, remap.Host())
        assert pool.statistics().used == CHUNK
        other.close()


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("resident", ["peer", "host", "both"])
def test_memory_that_others_fill(stage: Stage, resident: str, events: bool) -> None:
    """Who may write copies what is shared back in, wherever it lies; nobody may write it in the end."""
    places: list[Any] = (
        [remap.Host()] if resident == "host" else [p.index for p in remap.device(0).peers()][:1]
    )
    if not places:
        pytest.skip("needs two devices that reach each other")
    where = [0, *places] if resident == "both" else places
    made = remap.ElasticBuffer(8 * CHUNK, resident=where, accessing=0, chunk=CHUNK)
    made.resize(PREFIX)
    made.copy_from_host(contents(0, PREFIX))
    fork = made.fork()
    remap.pause([made, fork])
    woken = remap.resume([fork, made], events=events)
    if isinstance(woken, remap.Waking):
        woken.close()
    for one in (made, fork):
        assert np.array_equal(one.to_host(), contents(0, PREFIX))
        assert stage.inner.get_access(one._address, remap.device(0).location) is Access.READ
        one.close()


def test_waking_takes_few_calls(stage: Stage) -> None:
    """Rights go to runs of chunks, also where forks share them; what no fork has any more is as any other memory."""
    made = remap.ElasticBuffer(64 * CHUNK, device=0, chunk=CHUNK)
    made.resize(16 * CHUNK)
    fork = made.fork()
    for users in ([made, fork], [made]):
        remap.pause(users)
        mark = stage.mark()
        remap.resume(users)
        names = stage.names_since(mark)
        assert names.count("create") == 16
        assert names.count("set_access") == 2 * len(users) - 1, "carried, lowered and borrowed; or its own"
        fork.close()
    made.fill(1)
    made.close()


def test_the_backup_of_one_whose_forks_have_gone(stage: Stage) -> None:
    """It is its own again, when it sleeps with it, and when the others go while it sleeps."""
    del stage
    for early in (True, False):
        with family(1) as made:
            root, fork = made.all
            if early:
                fork.close()
            remap.pause([one for one in made.all if not one.closed])
            fork.close()
            remap.backup(root)[0] = 7
            remap.resume(root)
            root.fill(1, offset=1)
            assert root.to_host()[0] == 7


def test_waiting_for_memory(stage: Stage) -> None:
    """It is looked for as much memory as there was: a chunk that three share is needed once."""
    with family() as made:
        remap.pause(made.all)
        free = remap.device(0).memory().free
        if stage.inner.name != "host":
            pytest.skip("fills the device")
        with remap.allocate(free - made.physical + CHUNK, resident=0):
            with pytest.raises(remap.OutOfMemoryError, match="it needs 10 MiB on"):
                remap.resume(made.all)
            assert all(one.paused for one in made.all)
        remap.resume(made.all, wait=5)
        assert made.holds()


MOVES: dict[str, tuple[Any, Callable[[list[Any], Path], Any]]] = {
    "pause": ("", lambda b, d: remap.pause(b)),
    "pause to disk": ("", lambda b, d: remap.pause(b, "disk", directory=d)),
    "resume": ("host", lambda b, d: remap.resume(b)),
    "resume from disk": ("disk", lambda b, d: remap.resume(b)),
    "resume short of memory": ("host", lambda b, d: remap.resume(b)),
    "migrate": ("", lambda b, d: remap.migrate(b, remap.Host())),
    "migrate asleep": ("host", lambda b, d: remap.migrate(b, remap.Host())),
}


@pytest.mark.parametrize("move", MOVES)
def test_any_call_may_fail(stage: Stage, move: str, tmp_path: Path) -> None:
    """Whichever driver call fails, a family has not moved, or all of it has; no byte is lost, and nothing stays (5)."""
    asleep, act = MOVES[move]
    result = CudaResult.OUT_OF_MEMORY if "short" in move else CudaResult.UNKNOWN
    swept = sorted(
        name for name, call in vars(stage.faulty).items() if callable(call) and name not in NOT_SWEPT
    )
    remap.host_pool(prepare=64 * MiB).wait()
    empty = stage.seen()
    for nth in count(1):
        with family() as made:
            if asleep:
                remap.pause(made.all, asleep, directory=tmp_path)
            before = [(one.generation, one.paused, one.resident) for one in made.all]
            seen, mark = stage.seen(), stage.mark()
            stage.faulty.fail(*swept, nth=nth, result=result)
            error: RemapError | None = None
            try:
                act(made.all, tmp_path)
            except RemapError as caught:
                error = caught
            refused = stage.faulty.refused
            stage.faulty.heal()
            addresses = [one._address for one in made.all]
            for call in stage.since(mark) if error is not None else ():
                lost = call.error is not None and call.name in {"unmap", "release", "free_range"}
                if lost and not any(0 <= call.arguments[0] - one < 16 * CHUNK for one in addresses):
                    getattr(stage.inner, call.name)(*call.arguments)
            now = [(one.generation, one.paused, one.resident) for one in made.all]
            if error is None:
                assert set(refused) <= ABSORBED, f"{move} took no notice that {refused} failed"
            elif now == before:
                assert stage.unchanged(seen), f"after {refused} failed"
            else:
                assert set(refused) <= CLEAN_UP
                assert [one[0] for one in now] == [old[0] + 1 for old in before]
            remap.resume(made.all)
            assert made.holds()
            for one in made.all:
                one.make_private()
                one.fill(1)
        assert stage.unchanged(empty), f"after {refused} failed"
        assert remap.host_pool().statistics().used == 0
        if not refused:
            break
    remap.host_pool(prepare=0)


class Forks(RuleBasedStateMachine):
    """Up to five caches that fork, grow, write, sleep, wake, move and end in any order, against bytes."""

    places: ClassVar[list[Any]] = []
    directory = tempfile.gettempdir()

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[remap.ElasticBuffer, NDArray[np.uint8]]] = []
        self.asleep = False

    @rule(options=st.sampled_from([1, 3]))
    def make(self, options: int) -> None:
        """Make one more, if all are awake."""
        if len(self.made) < 5 and not self.asleep:
            buffer = remap.ElasticBuffer(8 * CHUNK, device=0, chunk=CHUNK)
            buffer.resize(options * CHUNK - 5)
            buffer.fill(options)
            self.made.append((buffer, np.full(buffer.size, options, np.uint8)))

    @rule(which=st.integers(0, 4))
    def fork(self, which: int) -> None:
        """Fork one."""
        if which < len(self.made) < 5 and not self.asleep:
            buffer, held = self.made[which]
            self.made.append((buffer.fork(), held.copy()))

    @rule(which=st.integers(0, 4), size=st.integers(1, 6 * CHUNK), value=st.integers(0, 255))
    def resize(self, which: int, size: int, value: int) -> None:
        """Grow one, and write what is new, or shrink it."""
        if which < len(self.made) and not self.asleep:
            buffer, held = self.made[which]
            old = buffer.size
            buffer.resize(size)
            if size > old:
                buffer.make_private(old, size)
                buffer.fill(value, offset=old)
                held = np.concatenate([held, np.full(size - old, value, np.uint8)])
            self.made[which] = buffer, held[:size]

    @rule(which=st.integers(0, 4), start=st.integers(0, 3 * CHUNK), value=st.integers(0, 255))
    def write(self, which: int, start: int, value: int) -> None:
        """Make a part of one its own, and write it."""
        if which < len(self.made) and not self.asleep:
            buffer, held = self.made[which]
            start = min(start, buffer.size - 1)
            buffer.make_private(start, buffer.size)
            buffer.fill(value, offset=start)
            held[start:] = value

    @rule(keep=st.sampled_from(["host", "disk"]))
    def sleep(self, keep: Any) -> None:
        """Let all of them sleep."""
        if not self.asleep and self.made:
            slept = remap.pause([one for one, _ in self.made], keep, directory=self.directory)
            assert slept.bytes == slept.freed
            self.asleep = True

    @rule(events=st.booleans())
    def wake(self, events: bool) -> None:
        """Wake all of them."""
        if self.asleep:
            waking: Any = remap.resume([one for one, _ in reversed(self.made)], events=events)
            if events:
                waking.close()
            self.asleep = False

    @rule(place=st.integers(0, 7))
    def migrate(self, place: int) -> None:
        """Move all of them, asleep or awake."""
        remap.migrate([one for one, _ in self.made], self.places[place % len(self.places)])

    @rule(which=st.integers(0, 4))
    def close(self, which: int) -> None:
        """Close one, asleep or awake."""
        if which < len(self.made):
            self.made.pop(which)[0].close()

    @invariant()
    def right(self) -> None:
        """Those that are awake have their bytes."""
        for buffer, held in () if self.asleep else self.made:
            assert np.array_equal(buffer.to_host(), held)

    def teardown(self) -> None:
        """Close all; nothing stays."""
        for buffer, _ in self.made:
            buffer.close()
        assert remap.host_pool().statistics().used == 0


def test_any_sequence(stage: Stage) -> None:
    """Whatever forks, sleeps, wakes, moves and goes in whatever order: every byte is right, and nothing is left."""
    empty = stage.seen()
    Forks.places = [remap.device(0).location, remap.Host()]
    Forks.places += [peer.location for peer in remap.device(0).peers()][:1]
    run_state_machine_as_test(
        Forks, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )
    remap.host_pool().trim()
    assert stage.unchanged(empty)
