"""Migration: the bytes move, the address and the rights stay."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

import remap
from remap.testing.stage import Stage

from .support import SIZE, contents, filled, holds

pytest_plugins = ("remap.testing.stage",)


def test_to_the_host_and_back(stage: Stage) -> None:
    """Device memory is given back, the CPU can look under the same address, and what it writes comes back (T13)."""
    with filled(SIZE, SIZE) as buffers:
        addresses = [one.address for one in buffers]
        free = remap.device(0).memory().free
        moved = remap.migrate(buffers, remap.Host())
        assert (moved.buffers, moved.bytes, moved.freed) == (2, 2 * SIZE, 2 * SIZE)
        assert abs(remap.device(0).memory().free - free - 2 * SIZE) <= stage.slack
        assert all(one.resident == (remap.Host(),) for one in buffers)
        assert all(list(one.access) == [remap.device(0).location] for one in buffers), "nobody new has access"
        assert holds(buffers)
        buffers[0].set_access({remap.Host(): "rw"})
        view = buffers[0].array().numpy()
        assert view.ctypes.data == addresses[0]
        view[:8] = 1
        del view
        with pytest.raises(remap.AccessError, match=r"Take the right away first"):
            remap.migrate(buffers, 0)
        assert all(one.resident == (remap.Host(),) for one in buffers)
        buffers[0].set_access({remap.Host(): "none"})
        remap.migrate(buffers, 0)
        assert (buffers[0].to_host()[:8] == 1).all()
        buffers[0].copy_from_host(contents(0)[:8])
        assert holds(buffers)
        assert [one.address for one in buffers] == addresses
        assert [one.generation for one in buffers] == [2, 2]


def test_where_it_is_already(stage: Stage) -> None:
    """A buffer that lies there already is not touched."""
    with filled(SIZE) as buffers:
        mark = stage.mark()
        assert remap.migrate(buffers, 0).buffers == 0
        assert not {"create", "unmap", "copy"} & set(stage.names_since(mark))
        assert buffers[0].generation == 0


@pytest.mark.two_devices
def test_striped_memory_to_one_device(stage: Stage) -> None:
    """The stripes of other devices join those that are there; rights and contents stay."""
    del stage
    with remap.allocate(4 * SIZE, resident=[0, 1], accessing=[1]) as buffer:
        buffer.copy_from_host(contents(0, buffer.size))
        moved = remap.migrate(buffer, 1)
        assert moved.bytes == 2 * SIZE
        assert buffer.footprint() == {remap.device(1).location: 4 * SIZE}
        assert holds([buffer])
        remap.pause(buffer)
        remap.migrate(buffer, 0)
        remap.resume(buffer)
        assert buffer.footprint() == {remap.device(0).location: 4 * SIZE}
        assert list(buffer.access) == [remap.device(1).location]
        assert holds([buffer])


def test_memory_that_could_not_be_given_back(stage: Stage) -> None:
    """All have moved then, and listeners are told; the failure says so first, and what a listener raises after it."""

    def fail(_: remap.Buffer) -> None:
        raise ZeroDivisionError("of a listener")

    with filled(SIZE, SIZE) as buffers:
        for buffer in buffers:
            buffer.on_change(fail)
        stage.faulty.fail("free_range")
        with pytest.raises(remap.DriverError, match="cuMemAddressFree") as caught:
            remap.migrate(buffers, remap.Host())
        notes = caught.value.__notes__
        assert "2 buffers moved all the same" in notes[0]
        assert notes[1:] == ["and then: of a listener"] * 2
        assert {one.resident for one in buffers} == {(remap.Host(),)}
    (leaked,) = [call for call in stage.recording.calls_to("free_range") if call.error]
    stage.inner.free_range(*leaked.arguments)


def test_asleep(stage: Stage) -> None:
    """A sleeping buffer is not copied; it wakes at the new place, with its contents."""
    with filled(SIZE) as buffers:
        remap.pause(buffers)
        mark = stage.mark()
        moved = remap.migrate(buffers, remap.Host())
        assert (moved.bytes, moved.freed) == (0, 0)
        assert not {"create", "copy"} & set(stage.names_since(mark))
        remap.resume(buffers)
        assert buffers[0].resident == (remap.Host(),)
        assert holds(buffers)


def one_memory(ring: remap.RingBuffer) -> bool:
    """Tell whether byte `size + i` of a ring is byte i, with contents that were not there before."""
    written = (int(ring.to_host(shape=1)[0]) + 1) % 256
    ring.fill(written, size=16)
    second = ring.to_host(shape=ring.size, offset=ring.size)
    return bool((second[:16] == written).all()) and np.array_equal(second, ring.to_host())


def test_both_views_of_a_ring(stage: Stage) -> None:
    """Both views show the new memory, each with its rights, and the old memory is given back whole."""
    here, memory = remap.device(0).location, remap.device(0).memory
    with remap.RingBuffer(SIZE, device=0, second="r") as ring:
        ring.write(contents(0)[: SIZE - 4])
        ring.read(SIZE - 4)
        free = memory().free
        assert remap.migrate(ring, remap.Host()).freed == ring.size
        assert abs(memory().free - free - ring.size) <= stage.slack
        assert one_memory(ring)
        ring.write(b"over the end")
        assert ring.read().tobytes() == b"over the end"
        assert [stage.inner.get_access(one.address, here) for one in ring.chunks] == ["rw", "r"]
        assert {one.location for one in ring.chunks} == {remap.Host()}


@pytest.mark.parametrize("call", ["unmap", "map", "set_access"])
def test_a_ring_that_could_not_move(stage: Stage, call: str) -> None:
    """Whichever call on one of its views is refused, both show the old memory, with their rights (invariant 5)."""
    here = remap.device(0).location
    with remap.RingBuffer(SIZE, device=0, second="r") as ring:
        ring.copy_from_host(contents(0, ring.size))
        refusals = 0
        while ring.resident == (here,):
            before, mark = stage.seen(), stage.mark()
            stage.faulty.fail(call, nth=refusals + 1)
            with suppress(remap.DriverError):
                remap.migrate(ring, remap.Host())
            if ring.resident == (here,):
                refusals += 1
                assert stage.unchanged(before)
            else:
                stage.clean_up_refused(mark)
            stage.faulty.heal()
            for offset in (0, ring.size):
                assert np.array_equal(ring.to_host(shape=ring.size, offset=offset), contents(0, ring.size))
            assert [stage.inner.get_access(one.address, here) for one in ring.chunks] == ["rw", "r"]
        assert refusals >= {"unmap": 1, "map": 2, "set_access": 2}[call]
        assert one_memory(ring)


@pytest.mark.parametrize("access", ["none", "r"])
def test_memory_that_nobody_may_write(stage: Stage, access: str) -> None:
    """It moves all the same, and gives nobody a further right (invariant 12)."""
    del stage
    with filled(SIZE) as buffers:
        buffers[0].set_access({0: access})
        remap.migrate(buffers, remap.Host())
        assert buffers[0].get_access(0) == access
        buffers[0].set_access({0: "rw"})
        assert holds(buffers)


@contextmanager
def two_groups() -> Generator[tuple[remap.Group, remap.Group]]:
    """Make a group of two buffers, one of which is in another group, too."""
    with remap.group("outer") as outer:
        first = remap.allocate(SIZE, resident=0)
        with remap.group("inner") as inner, remap.Stream(0):
            second = remap.allocate(SIZE, resident=0)
    third = remap.allocate(SIZE, resident=0)
    for seed, one in enumerate((first, second)):
        one.copy_from_host(contents(seed))
    yield outer, inner
    for one in (first, second, third):
        one.close()


def test_groups(stage: Stage) -> None:
    """A group is what was made inside its block, nested ones included; it sleeps, moves and wakes by its tag."""
    del stage
    with two_groups() as (outer, inner):
        assert [len(one.buffers) for one in (outer, inner)] == [2, 1]
        assert outer.size == 2 * SIZE
        assert set(remap.groups()) == {"outer", "inner"}
        with remap.group("outer") as again:
            assert again is outer
        inner.pause()
        assert [one.paused for one in outer.buffers] == [False, True]
        assert remap.pause("outer").buffers == 1
        outer.migrate(remap.Host())
        outer.resume()
        assert holds(outer.buffers)
        assert all(one.resident == (remap.Host(),) for one in outer.buffers)
    gc.collect()
    assert not remap.groups(), "closed buffers are in no group"
    with pytest.raises(remap.InvalidValueError, match="no such group"):
        remap.pause("nothing")
    assert remap.pause("outer").buffers == 0


def test_a_group_keeps_nothing_alive(stage: Stage) -> None:
    """A buffer that is only in a group is collected, and warns like any other (invariant 4)."""
    del stage
    with remap.group("weak") as group:
        buffer = remap.allocate(SIZE, resident=0)
    with pytest.warns(ResourceWarning, match="never closed"):
        del buffer
        gc.collect()
    assert not group.buffers
    assert remap.collect() == 1


def test_bandwidth_figures_add_up(stage: Stage) -> None:
    """What a result says of itself is consistent, and can be read as a sentence."""
    del stage
    with filled(SIZE) as buffers:
        slept = remap.pause(buffers)
        assert np.isclose(slept.rate, slept.bytes / slept.seconds / 1e9)
        assert "1 buffer, 4 MiB copied in" in str(slept)
        assert "4 MiB given back" in str(slept)
        assert set(slept.free) == {remap.device(0).location}
        woken = remap.resume(buffers, keep_host=True)
        assert "of host memory held" in str(woken)
    remap.host_pool().trim()
