"""Memory that is mapped ahead of growth: how much, who gets it back, and when the thread ends."""

from __future__ import annotations

import threading
from functools import partial

import pytest

import remap
from remap import MiB
from remap.buffers.growth import Change
from remap.testing.bench import wait_until
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

CREATES = {"create", "map", "set_access"}


def waiting(buffer: remap.ElasticBuffer) -> int:
    """Return the bytes that are mapped ahead."""
    assert buffer._ahead is not None
    return buffer._ahead.bytes


def has_ready(buffer: remap.ElasticBuffer, size: int) -> bool:
    """Tell whether that many bytes are mapped ahead."""
    return waiting(buffer) == size


def threads() -> int:
    """Return how many threads map ahead."""
    return sum(thread.name == "remap ahead" for thread in threading.enumerate())


@pytest.mark.parametrize("chunk", ["geometric", "exact", 4 * MiB])
def test_growth_within_what_is_ready_asks_nothing(stage: Stage, chunk: str | int) -> None:
    """The thread maps at least `ahead` bytes behind the end; growing by less makes no driver call of its own."""
    with remap.ElasticBuffer("512MiB", device=0, ahead=16 * MiB, chunk=chunk) as buffer:
        assert waiting(buffer) == 0, "nothing before the first growth"
        buffer.resize(2 * MiB)
        for size in range(10 * MiB, 200 * MiB, 10 * MiB):
            assert wait_until(lambda: waiting(buffer) >= 16 * MiB)
            mark = stage.mark()
            buffer.resize(size)
            mine = [call for call in stage.since(mark) if call.thread == threading.get_ident()]
            assert not CREATES & {call.name for call in mine}
        buffer.fill(5)
        assert (buffer.to_host() == 5).all()
        assert wait_until(lambda: waiting(buffer) >= 16 * MiB)
        assert waiting(buffer) < 16 * MiB + 64 * MiB, "one chunk too much at most"


def test_growing_faster_than_the_thread(stage: Stage) -> None:
    """A caller that outruns the thread maps the rest itself, at once or later, and ends with the same memory."""
    del stage
    with remap.ElasticBuffer("256MiB", device=0, ahead=8 * MiB) as buffer:
        for size in range(1, 160 * MiB, 3 * MiB):
            buffer.resize(size)
        buffer.fill(1)
        assert wait_until(lambda: waiting(buffer) >= 8 * MiB)
        addresses = [chunk.address for chunk in buffer.chunks]
        assert addresses == sorted(addresses)
        ends = [chunk.address + chunk.size for chunk in buffer.chunks]
        assert addresses[1:] == ends[:-1]
        buffer.resize(buffer.capacity)
        assert waiting(buffer) == 0


def test_shrinking_gives_back_what_was_mapped_ahead(stage: Stage) -> None:
    """A shrink gives back, and reports, what waits as well; the thread begins again with the next growth (trap 7)."""
    memory = remap.device(0).memory
    with remap.ElasticBuffer("256MiB", device=0, ahead=16 * MiB, chunk=2 * MiB) as buffer:
        before = memory().free
        buffer.resize(8 * MiB)
        assert wait_until(lambda: waiting(buffer) == 16 * MiB)
        assert buffer.resize(7 * MiB) == Change(freed=16 * MiB)
        assert waiting(buffer) == 0
        assert before - memory().free == 8 * MiB
        buffer.resize(8 * MiB + 1)
        assert wait_until(lambda: waiting(buffer) == 16 * MiB)
    assert stage.unchanged(stage.seen())


def test_what_is_mapped_ahead_is_counted_and_named(stage: Stage) -> None:
    """Footprint, snapshots and leaks count what waits, as the device does, and say that it is mapped ahead."""
    del stage
    memory, here = remap.device(0).memory, remap.device(0).location
    known, before = remap.leaks(), memory().free
    with remap.ElasticBuffer("256MiB", device=0, ahead=16 * MiB, chunk=2 * MiB) as buffer:
        buffer.resize(1)
        buffer.commit(100 * MiB, 102 * MiB)
        assert wait_until(lambda: waiting(buffer) == 16 * MiB)
        assert before - memory().free == 20 * MiB
        assert buffer.footprint() == remap.footprint(buffer) == {here: 20 * MiB}
        assert remap.leaks(known).footprint == {here: 20 * MiB}
        item = remap.snapshot().find(buffer.serial)
        assert item is not None
        assert item.held == 20 * MiB
        assert [piece.address for piece in item.pieces] == sorted(piece.address or 0 for piece in item.pieces)
        assert item.detail == "capacity 256 MiB, 2 chunks, 16 MiB mapped ahead"
        remap.pause(buffer)
        assert buffer.footprint() == {}
        assert "ahead" not in str(buffer.describe())


def test_whoever_needs_memory_gets_what_waits(stage: Stage) -> None:
    """A request that finds no memory takes back what was mapped ahead; the thread never takes from others."""
    if stage.inner.name == "cuda":
        pytest.skip("it would fill the GPU; the host driver shows it")
    memory = remap.device(0).memory
    with remap.ElasticBuffer("512MiB", device=0, ahead=32 * MiB, chunk=2 * MiB) as buffer:
        buffer.resize(2 * MiB)
        assert wait_until(lambda: waiting(buffer) == 32 * MiB)
        with remap.create(memory().free + 30 * MiB, at=0):
            assert waiting(buffer) == 0
            assert memory().free == 2 * MiB
            buffer.resize(4 * MiB)  # the last two MiB
            with pytest.raises(remap.OutOfMemoryError):
                buffer.resize(6 * MiB)
            assert (buffer.size, waiting(buffer)) == (4 * MiB, 0)
        buffer.resize(6 * MiB)
        assert wait_until(lambda: waiting(buffer) == 32 * MiB)


def test_rights_hold_for_what_is_mapped_ahead(stage: Stage) -> None:
    """What waited when rights changed has the new ones when it is used (invariant 12)."""
    here = remap.device(0).location
    with remap.ElasticBuffer("64MiB", device=0, ahead=16 * MiB, chunk=2 * MiB) as buffer:
        buffer.resize(2 * MiB)
        assert wait_until(lambda: waiting(buffer) == 16 * MiB)
        buffer.set_access({0: "r"})
        buffer.resize(20 * MiB)
        assert {stage.inner.get_access(chunk.address, here) for chunk in buffer.chunks} == {remap.Access.READ}


def test_forks_sleep_and_sparse_use_beside_the_thread(stage: Stage) -> None:
    """Forks, pauses and far parts work whatever the thread has just mapped."""
    del stage
    with remap.ElasticBuffer("256MiB", device=0, ahead=16 * MiB) as buffer:
        buffer.resize(3 * MiB)
        buffer.fill(1)
        buffer.commit(12 * MiB, 40 * MiB)
        buffer.fill(2, offset=12 * MiB, size=28 * MiB)
        with buffer.fork() as twin:
            twin.resize(64 * MiB)
            twin.make_private()
            twin.fill(7)
        buffer.make_private()
        buffer.resize(50 * MiB)
        remap.pause(buffer)
        remap.resume(buffer)
        buffer.decommit(0, MiB)
        buffer.resize(60 * MiB)
        assert (buffer.to_host(shape=28 * MiB, offset=12 * MiB) == 2).all()


def offsets(buffer: remap.ElasticBuffer) -> list[int]:
    """Return where the chunks begin, in MiB."""
    return [(chunk.address - buffer._address) // MiB for chunk in buffer._chunks]


def test_a_part_far_behind_takes_nothing_of_what_waits(stage: Stage) -> None:
    """What waits goes to whoever needs those bytes: no chunk is kept in which nothing was ever committed."""
    del stage
    here = remap.device(0).location
    with remap.ElasticBuffer("256MiB", device=0, ahead=4 * MiB, chunk=2 * MiB) as buffer:
        for at in (100, 104, 108):
            assert buffer.commit(at * MiB, (at + 2) * MiB) == Change(mapped=2 * MiB)
            assert wait_until(lambda: waiting(buffer) == 4 * MiB)
        assert offsets(buffer) == [100, 104, 108]
        assert buffer.footprint() == {here: 10 * MiB}
        buffer.decommit(100 * MiB, 110 * MiB)
        assert buffer.footprint() == {}


@pytest.mark.parametrize("chunk", ["geometric", "exact", 2 * MiB])
def test_a_part_in_the_middle_of_what_waits(stage: Stage, chunk: str | int) -> None:
    """It takes the chunks that it touches; those before it and behind it wait on, for those who touch them."""
    with remap.ElasticBuffer("256MiB", device=0, ahead=16 * MiB, chunk=chunk) as buffer:
        buffer.resize(2 * MiB)
        assert wait_until(lambda: waiting(buffer) >= 16 * MiB)
        ready = [chunk.address - buffer._address for chunk in buffer._ahead.ready] if buffer._ahead else []
        mark, before = stage.mark(), waiting(buffer)
        at = ready[len(ready) // 2]
        taken = buffer.commit(at, at + 1).mapped
        assert not CREATES & {call.name for call in stage.since(mark) if call.thread == threading.get_ident()}
        assert waiting(buffer) == before - taken
        assert [chunk.address - buffer._address for chunk in buffer._chunks] == [0, at]
        buffer.fill(3, offset=at, size=1)
        buffer.resize(40 * MiB)
        buffer.fill(4, size=at)
        buffer.fill(4, offset=at + 1)
        assert buffer.to_host(shape=1, offset=at)[0] == 3
        chunks = buffer.chunks
        assert [one.address + one.size for one in chunks[:-1]] == [one.address for one in chunks[1:]]
        assert wait_until(lambda: waiting(buffer) >= 16 * MiB)
        buffer.resize(1)
        assert (waiting(buffer), len(buffer._chunks)) == (0, 1)


@pytest.mark.parametrize("call", ["create", "map", "set_access"])
def test_a_part_that_cannot_be_had_beside_what_waits(stage: Stage, call: str) -> None:
    """What was taken for it is given back, and the others wait on (invariant 5)."""
    with remap.ElasticBuffer("64MiB", device=0, ahead=8 * MiB, chunk=2 * MiB) as buffer:
        buffer.resize(2 * MiB)
        assert wait_until(lambda: waiting(buffer) == 8 * MiB)
        buffer.commit(6 * MiB, 7 * MiB)  # leaves chunks at 2, 4 and 8
        assert wait_until(lambda: waiting(buffer) == 6 * MiB)
        stage.faulty.fail(call)
        with pytest.raises(remap.DriverError):
            buffer.commit(8 * MiB, 12 * MiB)
        stage.faulty.heal()
        assert buffer.extents == ((0, 2 * MiB), (6 * MiB, 7 * MiB))
        assert offsets(buffer) == [0, 6]
        buffer.resize(12 * MiB)
        buffer.fill(1)
        assert offsets(buffer) == [0, 2, 4, 6, 8, 10]


@pytest.mark.two_devices
def test_what_waits_when_the_buffer_moves(stage: Stage) -> None:
    """It does not stay behind: it is given back, growth goes on at the new place, and so does giving it to others."""
    there = remap.device(1).location
    with remap.ElasticBuffer("512MiB", device=0, accessing=[0, 1], ahead=16 * MiB, chunk=2 * MiB) as buffer:
        buffer.resize(4 * MiB)
        assert wait_until(lambda: waiting(buffer) == 16 * MiB)
        remap.migrate(buffer, 1)
        assert buffer.footprint() == {there: 4 * MiB}
        buffer.resize(6 * MiB)
        assert wait_until(lambda: waiting(buffer) == 16 * MiB)
        assert buffer.footprint() == {there: 22 * MiB}
        if stage.inner.name == "cuda":
            return  # it would fill the GPU
        with remap.create(remap.device(1).memory().free + 2 * MiB, at=1):
            assert waiting(buffer) == 0


def test_what_waits_cannot_be_given_back(stage: Stage) -> None:
    """A move that is refused at that leaves the buffer where it was, with what waits (invariant 5)."""
    here = remap.device(0).location
    with remap.ElasticBuffer("64MiB", device=0, ahead=8 * MiB, chunk=2 * MiB) as buffer:
        buffer.resize(2 * MiB)
        buffer.fill(6)
        assert wait_until(lambda: waiting(buffer) == 8 * MiB)
        stage.faulty.fail("unmap")
        with pytest.raises(remap.DriverError):
            remap.migrate(buffer, remap.Host())
        stage.faulty.heal()
        assert buffer.footprint() == {here: 10 * MiB}
        buffer.resize(10 * MiB)
        assert (buffer.to_host(shape=2 * MiB) == 6).all()


def test_the_thread_ends_with_its_owner(stage: Stage) -> None:
    """Closing a buffer, or collecting it, ends its thread, which the first growth begins, and gives all back."""
    before, running = stage.seen(), threads()
    buffer = remap.ElasticBuffer("256MiB", device=0, ahead=16 * MiB)
    assert threads() == running
    buffer.resize(MiB)
    assert threads() == running + 1
    buffer.close()
    assert wait_until(lambda: threads() == running)
    lost = remap.ElasticBuffer("256MiB", device=0, ahead=16 * MiB)
    lost.resize(MiB)
    assert threads() == running + 1
    with pytest.warns(ResourceWarning):
        del lost
        remap.collect()
    assert wait_until(lambda: threads() == running)
    assert stage.unchanged(before)


def test_a_failure_in_the_thread_is_nobodys(stage: Stage) -> None:
    """What fails ahead is silent and leaves nothing; whoever then asks for the memory meets the failure (trap 8)."""
    before = stage.seen()
    for call in ("create", "map", "set_access"):
        buffer = remap.ElasticBuffer("64MiB", device=0, ahead=8 * MiB, chunk=2 * MiB)
        buffer.resize(1)
        assert wait_until(partial(has_ready, buffer, 8 * MiB))
        stage.faulty.fail(call)
        buffer.resize(2 * MiB + 1)  # takes one chunk of what waits, and the thread fails to replace it
        assert wait_until(lambda: bool(stage.faulty.refused))
        assert stage.faulty.refused == (call,)
        stage.faulty.heal()
        buffer.resize(10 * MiB)
        buffer.fill(1)
        buffer.close()
    assert stage.unchanged(before)
