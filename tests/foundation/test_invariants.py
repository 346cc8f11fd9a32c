"""The invariants of handles and buffers that no table shows: numbers as in the design note."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB, RemapError, lifetime
from remap.drivers.protocol import Driver
from remap.drivers.wrappers import Faulty
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

SIZE = 4 * MiB
THREADS = 8


def mapped(access: str = "rw") -> tuple[remap.PhysicalAllocation, remap.Reservation, remap.Mapping]:
    """Return an allocation, a reservation with room for two of it, and the mapping of the one into the other."""
    memory, addresses = remap.create(SIZE, at=0), remap.reserve(2 * SIZE)
    return memory, addresses, addresses.map(memory, access={0: access})


def test_an_object_never_means_another_resource(stage: Stage) -> None:
    """A closed mapping stays closed when another one takes its place, and leaves that one alone (invariant 1)."""
    del stage
    memory, addresses, old = mapped()
    old.close()
    new = addresses.map(memory, access={0: "rw"})
    new.fill(4)
    old.close()
    with pytest.raises(remap.ClosedError):
        old.fill(5)
    assert (new.to_host() == 4).all()
    for thing in (new, addresses, memory):
        thing.close()


def test_a_mapping_holds_what_it_depends_on(stage: Stage) -> None:
    """The mapping alone keeps its reservation and the bytes; nothing is collected from under it (invariant 2)."""
    memory, addresses, mapping = mapped()
    mapping.fill(3)
    memory.close()
    del memory, addresses
    gc.collect()
    mark = stage.mark()
    assert remap.collect() == 0
    assert not stage.since(mark)
    assert (mapping.to_host() == 3).all()
    addresses = mapping.reservation
    mapping.close()
    addresses.close()


def test_closing_an_allocation_keeps_what_is_mapped(stage: Stage) -> None:
    """Closing an allocation gives up the reference; its memory goes with its last mapping (invariant 3)."""
    before = stage.seen()
    memory, addresses, mapping = mapped()
    alias = addresses.map(memory, offset=SIZE, access={0: "r"})
    mapping.fill(8)
    memory.close()
    taken = before.free[0] - remap.device(0).memory().free
    assert abs(taken - SIZE) <= stage.slack
    mapping.close()
    assert (alias.to_host() == 8).all()
    alias.close()
    addresses.close()
    assert stage.unchanged(before)


def test_a_reservation_names_what_keeps_it_open(stage: Stage) -> None:
    """Closing a reservation with mappings is refused by naming each, and asks nothing of the driver (invariant 3)."""
    memory, addresses, mapping = mapped()
    alias = addresses.map(memory, offset=SIZE)
    mark = stage.mark()
    with pytest.raises(
        remap.InUseError, match=r"2 live mappings: 4 MiB at offset 0 B, 4 MiB at offset 4 MiB"
    ):
        addresses.close()
    assert not stage.since(mark)
    for thing in (mapping, alias, addresses, memory):
        thing.close()


@pytest.mark.parametrize("kind", ["allocation", "reservation", "mapping", "buffer"])
def test_what_is_collected_unclosed(stage: Stage, kind: str) -> None:
    """It warns with its name, size and cure, calls no driver then, and is given back by collect() (invariant 4)."""
    memory, addresses = remap.create(SIZE, at=0), remap.reserve(SIZE)
    before = stage.seen()
    makers: dict[str, Callable[[], lifetime.Resource]] = {
        "allocation": lambda: remap.create(SIZE, at=0),
        "reservation": lambda: remap.reserve(SIZE),
        "mapping": lambda: addresses.map(memory, access={0: "rw"}),
        "buffer": lambda: remap.allocate(SIZE, resident=0),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thing = makers[kind]()
        gc.collect()
        mark = stage.mark()
        del thing
        gc.collect()
        assert not stage.since(mark), "a finaliser called the driver"
    texts = [str(warning.message) for warning in caught if warning.category is ResourceWarning]
    assert len(texts) == 1
    assert all(word in texts[0] for word in (kind, "4 MiB", "remap.collect()", "with statement"))
    assert remap.collect() == 1
    assert stage.unchanged(before)
    addresses.close()
    memory.close()


def test_out_of_memory_says_what_and_where(stage: Stage) -> None:
    """It says what was asked, at which place, and what is free; a lack of addresses is told apart (invariant 9)."""
    before = stage.seen()
    info = remap.device(0).memory()
    for act in (
        lambda: remap.create(2 * info.total // SIZE * SIZE, at=0),
        lambda: remap.allocate(2 * info.total, resident=0),
    ):
        with pytest.raises(
            remap.OutOfMemoryError, match=r"device 0.*free.*CUDA_ERROR_OUT_OF_MEMORY"
        ) as caught:
            act()
        assert isinstance(caught.value, MemoryError)
        assert caught.value.next_step
    with pytest.raises(remap.OutOfAddressSpaceError, match=r"128 TiB of addresses: .*memory"):
        remap.reserve("128TiB")
    assert stage.unchanged(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_is_inert(stage: Stage) -> None:
    """In the child, objects refuse use, and closing them touches nothing of the parent's (invariant 10, trap 44)."""
    memory, addresses, mapping = mapped()
    buffer = remap.allocate(SIZE, resident=0)
    mapping.fill(6)
    buffer.fill(7)
    mark = stage.mark()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of threads, which is what is tested
        child = os.fork()
    if not child:
        os.write(writer, in_child([mapping, buffer, memory, addresses], stage, mark).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    assert said == "inert"
    assert (mapping.to_host() == 6).all()
    assert (buffer.to_host() == 7).all()
    for thing in (mapping, buffer, addresses, memory):
        thing.close()


def in_child(things: list[lifetime.Resource], stage: Stage, mark: int) -> str:
    """Use and close the parent's objects, and say how that went; must not raise, and not return to pytest."""
    try:
        for thing in things:
            uses: list[Callable[[], object]] = [lambda: remap.reserve(SIZE).close()]
            if isinstance(thing, remap.Mapping | remap.Buffer):
                span = thing
                uses = [lambda: span.fill(1), lambda: span.address, span.to_host]  # noqa: B023 (called at once)
            elif isinstance(thing, remap.Reservation):
                uses = [partial(map_into, thing, things[2])]
            elif isinstance(thing, remap.PhysicalAllocation):
                uses = [thing.outcome]
            for use in uses:
                try:
                    use()
                except remap.ForkedError:
                    continue
                return f"{thing!r} could be used"
        for thing in things:
            thing.close()
        calls = [str(call) for call in stage.since(mark)]
        return "inert" if not calls else f"called the driver: {calls}"
    except BaseException as error:  # noqa: BLE001 (this is another process: the parent is told)
        return f"{type(error).__name__}: {error}"


def map_into(addresses: remap.Reservation, memory: lifetime.Resource) -> object:
    """Map an allocation into a reservation."""
    assert isinstance(memory, remap.PhysicalAllocation)
    return addresses.map(memory)


# -- invariant 7: waiting --


def test_a_stream_may_be_closed_before_its_buffer(stage: Stage) -> None:
    """A stream with work on a buffer can be closed first; closing the buffer names no dead stream (invariant 7)."""
    buffer = remap.allocate(SIZE, resident=0)
    stream = remap.Stream()
    buffer.fill(5, stream=stream)
    dead = stream.handle
    stream.close()
    mark = stage.mark()
    buffer.close()
    named = [str(call) for call in stage.since(mark) if "stream" in call.name and dead in call.arguments]
    assert not named, f"asked about a stream that no longer exists: {named}"


def test_a_close_whose_wait_fails_can_be_repeated(stage: Stage) -> None:
    """When waiting for work fails, nothing is given back, the object stays open, and closing again works (3, 5, 7)."""
    before = stage.seen()
    buffer = remap.allocate(SIZE, resident=0)
    with remap.Stream() as stream:
        buffer.fill(5, stream=stream)
        stage.faulty.fail("synchronize_stream")
        with pytest.raises(remap.DriverError):
            buffer.close()
        stage.faulty.heal()
        assert not buffer.closed
        buffer.close()
    assert stage.unchanged(before)


# -- invariant 13: threads --


def together(count: int, act: Callable[[int], object]) -> list[object]:
    """Run `act(index)` on `count` threads that begin together; return what each returned, or the error it raised."""
    start = threading.Barrier(count)

    def run(index: int) -> object:
        start.wait(timeout=30)
        try:
            return act(index)
        except RemapError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


class Meeting(Faulty):
    """A driver whose structural lock lets threads in only when as many as expected have come to it."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self._changed = threading.Condition()
        self._missing = 0

    def expect(self, count: int) -> None:
        """Let the next threads that want the lock wait for each other until there are `count`."""
        with self._changed:
            self._missing = count

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The lock of the wrapped driver, behind the meeting."""
        return self._met()

    @contextmanager
    def _met(self) -> Generator[None]:
        with self._changed:
            self._missing -= 1
            self._changed.notify_all()
            # Those who never come are not waited for for ever: then the test has seen less than it might.
            self._changed.wait_for(lambda: self._missing <= 0, timeout=5)
        with self.inner.lock:
            yield


@pytest.fixture
def meeting(stage: Stage) -> Generator[Meeting]:
    """Put a driver with a meeting before its lock in front of the stage's."""
    driver = Meeting(stage.recording)
    remap.use(driver)
    yield driver
    remap.use(stage.recording)


@pytest.fixture
def switching() -> Generator[None]:
    """Let threads take turns far more often than usual, so that races happen."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("kind", ["allocation", "reservation", "mapping", "buffer"])
def test_many_closes_are_one(stage: Stage, meeting: Meeting, kind: str) -> None:
    """When threads close one object at once, it is given back once, and none fails (invariant 13)."""
    memory, addresses, mapping = mapped()
    buffer = remap.allocate(SIZE, resident=0)
    things = {"mapping": mapping, "allocation": memory, "reservation": addresses, "buffer": buffer}
    if kind == "reservation":
        mapping.close()
    mark = stage.mark()
    meeting.expect(THREADS)
    results = together(THREADS, lambda _: things[kind].close())
    assert results == [None] * THREADS
    names = Counter(name for name in stage.names_since(mark) if name in {"unmap", "release", "free_range"})
    expected = {"mapping": {"unmap"}, "allocation": {"release"}, "reservation": {"free_range"}}
    assert names == dict.fromkeys(expected.get(kind, {"unmap", "free_range"}), 1)
    for thing in things.values():
        thing.close()


def test_map_against_close(stage: Stage, meeting: Meeting) -> None:
    """When one thread maps and another closes the reservation, one wins and the other is told (invariant 13)."""
    before = stage.seen()
    for _ in range(40):
        memory, addresses = remap.create(SIZE, at=0), remap.reserve(SIZE)
        acts: list[Callable[[], object]] = [lambda: addresses.map(memory), addresses.close]  # noqa: B023
        meeting.expect(2)
        made, closed = together(2, lambda index: acts[index]())  # noqa: B023
        if isinstance(made, remap.Mapping):
            assert isinstance(closed, remap.InUseError)
            made.close()
        else:
            assert isinstance(made, remap.ClosedError)
            assert closed is None
        addresses.close()
        memory.close()
    assert stage.unchanged(before)


def test_one_place_is_mapped_once(meeting: Meeting) -> None:
    """When threads map at one place, one succeeds, and the others are told what is in the way (invariant 13)."""
    for _ in range(10):
        memory, addresses = remap.create(SIZE, at=0), remap.reserve(2 * SIZE)
        meeting.expect(THREADS)
        results = together(THREADS, lambda _: addresses.map(memory, access={0: "rw"}))  # noqa: B023
        winners = [result for result in results if isinstance(result, remap.Mapping)]
        assert len(winners) == 1
        assert sum(isinstance(result, remap.InUseError) for result in results) == THREADS - 1
        winners[0].close()
        addresses.close()
        memory.close()


@pytest.mark.usefixtures("switching")
def test_use_against_close(stage: Stage) -> None:
    """A fill that meets a close is done or refused; memory never vanishes under it (invariant 13)."""
    before = stage.seen()
    for _ in range(40):
        buffer = remap.allocate(SIZE, resident=0)
        acts: list[Callable[[], object]] = [lambda: buffer.fill(1), buffer.close]  # noqa: B023
        for result in together(2, lambda index: acts[index]()):  # noqa: B023
            assert result is None or isinstance(result, remap.ClosedError | remap.InUseError)
        buffer.close()
    assert stage.unchanged(before)


@pytest.mark.usefixtures("switching")
def test_threads_with_objects_of_their_own(stage: Stage) -> None:
    """Threads that each allocate, write, read and close see only their own bytes, and leave nothing (invariant 13)."""
    before = stage.seen()

    def work(seed: int) -> int:
        chance = random.Random(seed)
        done = 0
        for _ in range(15):
            with remap.allocate(chance.choice([1, 2]) * 2 * MiB, resident=0) as buffer:
                value = chance.randrange(256)
                buffer.fill(value)
                data = np.frombuffer(chance.randbytes(4096), np.uint8)
                buffer.copy_from_host(data, offset=chance.randrange(1, 1000))
                found = buffer.to_host()
                assert found[0] == value
                assert found[-1] == value
                done += 1
        return done

    assert together(THREADS, work) == [15] * THREADS
    assert stage.unchanged(before)


# -- invariant 14: figures --


def test_figures_are_snapshots(stage: Stage) -> None:
    """A footprint is the sum of the chunks, agrees with the driver, and is nobody's to change (invariant 14)."""
    before = stage.seen()
    places = [0, *(peer.index for peer in remap.device(0).peers())]
    buffer = remap.allocate(3 * SIZE, resident=places, accessing=[0])
    footprint = buffer.footprint()
    total: Counter[remap.Location] = Counter()
    for chunk in buffer.chunks:
        total[chunk.location] += chunk.size
    assert footprint == total
    assert sum(footprint.values()) == buffer.size
    for device, free in zip(remap.devices(), before.free, strict=True):
        taken = free - device.memory().free
        assert abs(taken - footprint.get(device.location, 0)) <= stage.slack
    footprint.clear()
    assert buffer.footprint() == total
    with pytest.raises(dataclasses.FrozenInstanceError):
        buffer.describe().size = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        buffer.access[buffer.resident[0]] = remap.Access.NONE  # type: ignore[index]
    buffer.close()
