"""Invariants that hold whatever is done with a buffer: 6, 8, 9, 12, and what a lock is not held for (13)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import remap
from remap import Access, MiB, drivers
from remap.buffers.base import POISON
from remap.drivers.wrappers import Faulty
from remap.testing.bench import wait_until
from remap.testing.stage import Stage
from remap.types import AllocationProperties, Location, LocationKind

pytest_plugins = ("remap.testing.stage",)

SIZE = 4 * MiB
LIMIT = 30

# -- 6: what changes behind an address is counted, and told --


def test_changes_are_counted_and_told_when_they_are_complete(stage: Stage) -> None:
    """Each change of what stands behind the address is told once, with the memory there; the address stays (6)."""
    with remap.allocate(SIZE, resident=0) as buffer:
        address = buffer.address
        told: list[tuple[int, bool, int]] = []
        buffer.on_change(lambda one: told.append((one.generation, one.paused, len(one.chunks))))
        buffer.fill(1)
        remap.pause(buffer)
        remap.resume(buffer)
        remap.migrate(buffer, remap.Host())
        assert [generation for generation, _, _ in told] == list(range(1, len(told) + 1))
        assert told[-1] == (buffer.generation, False, 1)
        assert sum(paused for _, paused, _ in told) <= 1
        assert buffer.address == address
    assert stage.inner is not None


def test_a_change_that_fails_is_not_told(stage: Stage) -> None:
    """After a resume that failed, nothing has changed, and nobody is told (5, 6)."""
    with remap.allocate(SIZE, resident=0) as buffer:
        remap.pause(buffer)
        told: list[int] = []
        buffer.on_change(lambda one: told.append(one.generation))
        before = buffer.generation
        stage.faulty.fail("map")
        with pytest.raises(remap.DriverError):
            remap.resume(buffer)
        assert (told, buffer.generation, buffer.paused) == ([], before, True)
        stage.faulty.heal()
        remap.resume(buffer)
        assert told == [buffer.generation]


# -- 8: undefined contents --


@pytest.mark.usefixtures("stage")
def test_poison_covers_fresh_memory() -> None:
    """With `poison=True` every byte of new memory says so, in every stripe; it is on top of what was asked for (8)."""
    places = [0, *(peer.index for peer in remap.device(0).peers())]
    with remap.allocate(SIZE + 1, resident=places, accessing=places, poison=True) as buffer:
        found = buffer.to_host()
        assert found.size == buffer.size > SIZE
        assert (found == POISON).all()


@pytest.mark.usefixtures("stage")
def test_poison_covers_resumed_memory_and_no_backup() -> None:
    """A resume poisons what was given up, and leaves what was kept (8)."""
    with remap.allocate(SIZE, resident=0) as lost, remap.allocate(SIZE, resident=0) as kept:
        for buffer in (lost, kept):
            buffer.fill(1)
        remap.pause(lost, keep=None)
        remap.pause(kept, keep="host")
        remap.resume([lost, kept], poison=True)
        assert (lost.to_host() == POISON).all()
        assert (kept.to_host() == 1).all()


# -- 9: limits are checked and taken in one step --


@pytest.fixture
def switching() -> Generator[None]:
    """Let threads take turns far more often than usual, so that races happen."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("shareable", [frozenset(), frozenset({remap.HandleType.POSIX_FD})])
def test_threads_that_race_for_the_last_bytes(shareable: frozenset[remap.HandleType]) -> None:
    """However many threads ask at once, all of the memory is given out, and not a byte more (9)."""
    threads, each, granules = 8, 12, 32
    driver = drivers.open("host", devices=1, memory=granules * 2 * MiB)
    properties = AllocationProperties(Location(LocationKind.DEVICE, 0), shareable)
    start = threading.Barrier(threads)
    refusals: list[str] = []

    def ask(_: int) -> list[int]:
        got: list[int] = []
        start.wait(LIMIT)
        for _ in range(each):
            try:
                got.append(driver.create(2 * MiB, properties))
            except remap.OutOfMemoryError as error:
                refusals.append(str(error))
        return got

    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            got = [handle for some in pool.map(ask, range(threads)) for handle in some]
            assert len(got) == len(set(got)) == granules
            for handle in got:
                driver.release(handle)
    driver.shutdown()
    assert len(refusals) == 5 * (threads * each - granules)
    assert all("0 B of 64 MiB are free" in one for one in refusals)


# -- 12: access is the least that was asked for --


@pytest.mark.two_devices
@pytest.mark.parametrize("move", ["", "pause", "give other rights"])
def test_nobody_gets_a_right_unnamed(stage: Stage, move: str) -> None:
    """A location that was not named has no right, resident or not, by the driver's own word; and none later (12)."""
    home, peer = remap.device(0), remap.device(1)
    with remap.allocate(SIZE, resident=0, accessing=1) as buffer:
        if move == "pause":
            remap.pause(buffer)
            remap.resume(buffer)
        elif move:
            buffer.set_access({1: "r"})
        right = Access.READ if move == "give other rights" else Access.READ_WRITE
        assert buffer.access == {peer.location: right}
        assert [buffer.get_access(at) for at in (home, peer)] == [Access.NONE, right]
        with remap.Stream(home) as stream, pytest.raises(remap.AccessError, match="device 0"):
            buffer.fill(1, stream=stream)
    assert stage.inner is not None


MAKERS: dict[str, Callable[..., remap.Buffer]] = {
    "allocate": lambda **options: remap.allocate(SIZE, **options),
    "elastic": lambda **options: remap.ElasticBuffer(2 * SIZE, **options),
    "ring": lambda **options: remap.RingBuffer(SIZE, **options),
}


@pytest.mark.two_devices
@pytest.mark.usefixtures("stage")
@pytest.mark.parametrize("kind", MAKERS)
def test_each_location_gets_the_right_it_was_named_with(kind: str) -> None:
    """A mapping in `access=` says who may do what, asleep or not; the same locations the other way round, too (12)."""
    each: list[dict[int, str]] = [{0: "rw", 1: "r"}, {0: "r", 1: "rw"}, {1: "rw"}, {0: "rw", 1: "none"}]
    for rights in each:
        with MAKERS[kind](access=rights) as buffer:
            if isinstance(buffer, remap.ElasticBuffer):
                buffer.resize(SIZE)
            wanted = [rights.get(at, "none") for at in (0, 1)]
            for _ in range(2):
                assert [buffer.get_access(at) for at in (0, 1)] == wanted
                assert [buffer.access.get(at.location, Access.NONE) for at in remap.devices()[:2]] == wanted
                remap.pause(buffer)
                remap.resume(buffer)


@pytest.mark.usefixtures("stage")
@pytest.mark.parametrize("kind", MAKERS)
def test_rights_are_not_lost(kind: str) -> None:
    """A right for each location where only locations are named is refused, and says where it belongs (12)."""
    make = MAKERS[kind]
    with pytest.raises(TypeError, match="Pass the mapping as access="):
        make(accessing={0: "r"})
    with pytest.raises(remap.InvalidValueError, match="Leave accessing= out"):
        make(accessing=0, access={0: "r"})
    with pytest.raises(remap.InvalidValueError, match="at least one"):
        make(access={})
    with pytest.raises(remap.InvalidValueError, match='"none", "r" or "rw"'):
        make(access={0: "w"})
    with pytest.raises(TypeError, match=r"Pass list\(mapping\)"):
        remap.allocate(SIZE, resident={0: "r"})


@pytest.mark.usefixtures("stage")
def test_a_mapping_begins_with_no_rights() -> None:
    """A mapping without `access=` is nobody's; its alias has its own rights, and only those (12, T6)."""
    with remap.create(SIZE, at=0) as memory, remap.reserve(2 * SIZE) as addresses:
        mine, alias = addresses.map(memory), addresses.map(memory, offset=SIZE, access={0: "r"})
        assert [one.get_access(0) for one in (mine, alias)] == [Access.NONE, Access.READ]
        for one in (mine, alias):
            with pytest.raises(remap.AccessError):
                one.fill(1)
        mine.set_access({0: "rw"})
        assert [one.get_access(0) for one in (mine, alias)] == [Access.READ_WRITE, Access.READ]
        mine.close()
        alias.close()


# -- 13: the structural lock is never held while waiting or copying --


class Waiting(Faulty):
    """A driver that says when a wait or a copy has begun."""

    def __init__(self, inner: Any) -> None:
        self.begun = threading.Event()
        super().__init__(inner)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        waits = name.startswith(("synchronize_", "copy"))

        def told(*arguments: Any, **keywords: Any) -> Any:
            if waits:
                self.begun.set()
            return call(*arguments, **keywords)

        return told


def copy_and_wait(buffer: remap.Buffer, stream: remap.Stream) -> None:
    """Copy to the host in the order of a stream, and wait for it."""
    buffer.copy_to_host(np.empty(SIZE, np.uint8), stream=stream)
    stream.synchronize()


WAITS: dict[str, Callable[[remap.Buffer, remap.Stream], object]] = {
    "closing": lambda buffer, _: buffer.close(),
    "pausing": lambda buffer, _: remap.pause(buffer),
    "moving": lambda buffer, _: remap.migrate(buffer, remap.Host()),
    "taking a right": lambda buffer, _: buffer.set_access({0: "r"}),
    "copying": copy_and_wait,
    "waiting for a stream": lambda _, stream: stream.synchronize(),
    "waiting for an event": lambda _, stream: stream.record().synchronize(),
    "waiting for a device": lambda _, __: remap.device(0).synchronize(),
    "closing a stream": lambda _, stream: stream.close(),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the event
@pytest.mark.parametrize("what", WAITS)
def test_nobody_waits_for_one_who_waits(stage: Stage, what: str) -> None:
    """While a thread waits for a stream that is held, others take the lock, allocate and close at once (13)."""
    driver = Waiting(stage.recording)
    remap.use(driver)
    gate = threading.Event()

    def others() -> None:
        with remap.allocate(SIZE, resident=0), remap.create(SIZE, at=0), driver.lock:
            pass

    try:
        with (
            remap.Stream(0) as stream,
            remap.allocate(SIZE, resident=0) as buffer,
            ThreadPoolExecutor(2) as pool,
        ):
            with remap.device(0).current():
                driver.launch_host_function(stream.handle, lambda: gate.wait(LIMIT))
            buffer.fill(1, stream=stream)
            driver.begun.clear()
            try:
                waiting = pool.submit(WAITS[what], buffer, stream)
                assert wait_until(driver.begun.is_set, LIMIT)
                pool.submit(others).result(LIMIT / 2)
                assert not waiting.done(), "it did not wait"
            finally:
                gate.set()
            waiting.result(LIMIT)
            if buffer.paused:
                remap.resume(buffer)
    finally:
        remap.collect()
        remap.use(stage.recording)
