"""An ordered resume: what happens before it returns, what a thread does after that, and who waits for it."""

from __future__ import annotations

import gc
import subprocess
import sys
from itertools import pairwise
from threading import get_ident

import numpy as np
import pytest

import remap
from remap import MiB, lifetime, residency
from remap.drivers.wrappers import Call
from remap.errors import CudaResult
from remap.testing.bench import wait_until
from remap.testing.stage import Stage

from .support import SIZE, contents, filled, holds

pytest_plugins = ("remap.testing.stage",)


def made_by(calls: tuple[Call, ...], names: set[str], *, here: bool) -> list[str]:
    """Return the names of calls that this thread made, or that others made."""
    return [call.name for call in calls if call.name in names and (call.thread == get_ident()) == here]


def test_all_memory_comes_first(stage: Stage) -> None:
    """What can fail is done before anything is mapped; then the first is brought, and a thread brings the rest."""
    with filled(*[SIZE] * 4) as buffers:
        remap.pause(buffers)
        mark = stage.mark()
        order = [buffers[2], buffers[0]]
        with remap.resume(buffers, order=order, events=True) as waking:
            waking.events[-1].synchronize()
            calls = tuple(stage.since(mark))
        names = {"create", "create_event", "map", "set_access", "copy_to_device", "record_event"}
        bringing = ["map", "set_access", "copy_to_device", "record_event"]
        here = made_by(calls, names, here=True)
        assert here == ["create", "create_event"] * 4 + bringing
        assert made_by(calls, names, here=False) == bringing * 3
        mapped = [call.arguments[0] for call in calls if call.name == "map"]
        assert mapped == [one._address for one in [*order, buffers[1], buffers[3]]]
        assert holds(buffers)


def test_an_event_says_whether_it_is_closed() -> None:
    """A chunk's event is shown as closed when its resume is, and not before."""
    with filled(SIZE) as buffers:
        remap.pause(buffers)
        with remap.resume(buffers, events=True) as waking:
            assert repr(waking.events[0]).startswith("<remap.ChunkEvent chunk event ")
        assert repr(waking.events[0]).startswith("<remap.ChunkEvent closed chunk event ")


def test_a_shortage_maps_nothing(stage: Stage) -> None:
    """Where memory is short, nothing was mapped or copied before that is said, and all sleep on (invariant 5)."""
    with filled(*[SIZE] * 3) as buffers:
        remap.pause(buffers)
        before, mark = stage.seen(), stage.mark()
        stage.faulty.fail("create", nth=3, result=CudaResult.OUT_OF_MEMORY)
        with pytest.raises(remap.OutOfMemoryError):
            remap.resume(buffers, events=True)
        assert not {"map", "copy_to_device"} & set(stage.names_since(mark))
        assert all(one.paused for one in buffers)
        assert stage.unchanged(before)
        remap.resume(buffers)
        assert holds(buffers)


@pytest.mark.parametrize("known", ["address", "listener"])
def test_addresses_that_others_know(stage: Stage, known: str) -> None:
    """A buffer whose address was given away is mapped before the call returns: nothing keeps others from using it."""
    with filled(*[SIZE] * 3) as buffers:
        mapped: list[int] = []
        if known == "address":
            assert buffers[1].address
        else:
            buffers[1].on_change(lambda one: mapped.append(len(one.chunks)))
        remap.pause(buffers)
        mark = stage.mark()
        with remap.resume(buffers, events=True) as waking:
            waking.events[-1].synchronize()
            calls = tuple(stage.since(mark))
        assert made_by(calls, {"map"}, here=True) == ["map"] * 2
        assert mapped == ([] if known == "address" else [0, 1])
        assert holds(buffers)


def test_a_listener_that_fails(stage: Stage) -> None:
    """What it raises is raised when everything has arrived: nothing is under way that nobody could wait for (6)."""
    del stage
    with filled(*[SIZE] * 3) as buffers:
        told: list[int] = []

        def fail(_: remap.Buffer) -> None:
            raise ZeroDivisionError

        buffers[0].on_change(fail)
        buffers[2].on_change(lambda one: told.append(one.generation))
        with pytest.raises(ZeroDivisionError):
            remap.pause(buffers)
        with pytest.raises(ZeroDivisionError):
            remap.resume(buffers, events=True)
        assert told == [1, 2]
        assert not lifetime.live(residency.Waking)
        assert [one._arriving for one in buffers] == [None] * 3
        assert holds(buffers)


def test_a_capture_is_refused(stage: Stage) -> None:
    """Under a capture, memory whose contents still arrive is refused by name; the capture goes on."""
    with filled(SIZE, SIZE) as buffers, remap.Stream(0) as stream:
        remap.pause(buffers[0])
        with remap.resume(buffers[0], events=True), remap.capture(stream) as captured:
            buffers[1].fill(4, stream=stream)
            with pytest.raises(remap.InUseError, match="still arriving"):
                buffers[0].fill(4, stream=stream)
        with captured.graph as graph, graph.instantiate() as executable:
            executable.launch(stream)
            stream.synchronize()
        assert (buffers[1].to_host() == 4).all()
        assert holds(buffers[:1])
        del stage


REFUSED = ("map", "set_access", "copy_to_device", "record_event")


@pytest.mark.parametrize("call", REFUSED)
@pytest.mark.parametrize("ending", ["resumed", "waited", "paused", "closed"])
def test_what_the_thread_is_refused(stage: Stage, call: str, ending: str) -> None:
    """What has come stays, the rest says what happened and how to go on, and going on completes it (invariant 5)."""
    with filled(*[SIZE] * 3) as buffers:
        remap.pause(buffers)
        stage.faulty.fail(call, nth=2, repeat=True)
        waking = remap.resume(buffers, events=True)
        assert wait_until(lambda: waking.held_up is not None)
        assert "held up" in str(waking.describe())
        waking.events[0].synchronize()
        for act in (
            buffers[1].to_host,
            lambda: buffers[2].address,
            waking.events[1].synchronize,
            lambda: waking.events[2].done,
        ):
            with pytest.raises(remap.PausedError, match=r"not come back.*resume\(buffer\) again"):
                act()
        for again in (lambda: remap.resume(buffers), waking.close):
            with pytest.raises(remap.DriverError) as caught:
                again()
            assert "backups are intact" in caught.value.__notes__[0]
        stage.faulty.heal()
        assert np.array_equal(buffers[0].to_host(), contents(0))
        if ending == "resumed":
            assert remap.resume(buffers).buffers == 0
        elif ending == "waited":
            assert waking.wait().bytes == 3 * SIZE
        elif ending == "paused":
            assert remap.pause(buffers).buffers == 3
            remap.resume(buffers)
        else:
            buffers[2].close()
        waking.close()
        assert holds(buffers[:2] if ending == "closed" else buffers)


def test_the_second_view_of_a_ring(stage: Stage) -> None:
    """Who uses a ring through its second view waits for its memory, as through the first."""
    with filled(SIZE) as buffers, remap.RingBuffer(SIZE, device=0) as ring:
        ring.copy_from_host(contents(1))
        remap.pause([*buffers, ring])
        stage.faulty.fail("map", nth=2, repeat=True)
        with remap.resume([*buffers, ring], events=True) as waking:
            assert wait_until(lambda: waking.held_up is not None)
            with pytest.raises(remap.PausedError, match="not come back"):
                ring.to_host(shape=16, offset=ring.size)
            stage.faulty.heal()
            remap.resume(ring)
            assert np.array_equal(ring.to_host(shape=SIZE, offset=ring.size), contents(1))


def test_collected_while_held_up(stage: Stage) -> None:
    """A resume that was held up, and is dropped with its buffers, gives everything back, and maps nothing more."""
    before = stage.seen()
    buffers = [remap.allocate(SIZE, resident=0) for _ in range(3)]
    remap.pause(buffers)
    stage.faulty.fail("map", nth=2, repeat=True)
    dropped = [remap.resume(buffers, events=True)]
    assert wait_until(lambda: dropped[0].held_up is not None)
    stage.faulty.heal()
    mark = stage.mark()
    with pytest.warns(ResourceWarning, match="never closed"):
        dropped.clear()
        del buffers
        gc.collect()
    remap.collect()
    assert "map" not in stage.names_since(mark)
    assert stage.unchanged(before)


@pytest.mark.parametrize("count", [1, 3])
def test_a_change_of_drivers_meanwhile(stage: Stage, count: int) -> None:
    """A resume that a change of drivers refuses ends, and all sleep on with their backups (invariant 5)."""
    driver = remap.driver()
    with filled(*[SIZE] * count) as buffers:
        remap.pause(buffers)
        before = stage.seen()
        lifetime.leave(driver)  # what `use` and `close` do while they look whether anything lives
        try:
            with pytest.raises(remap.InUseError, match="changed the driver"):
                remap.resume(buffers, events=True)
        finally:
            lifetime.enter(driver)
        remap.collect()
        assert all(one.paused for one in buffers)
        assert stage.unchanged(before)
        remap.resume(buffers)
        assert holds(buffers)


@pytest.mark.parametrize("after", ["a promise", "an event"])
def test_closing_waits_for_copies_of_the_resume(stage: Stage, after: str) -> None:
    """Whatever the caller names or promises: what remap itself still copies into the memory is waited for (7)."""
    with filled(*[SIZE] * 3) as buffers, remap.Event(0) as event:
        remap.default_stream(0).record(event)
        remap.pause(buffers)
        with remap.resume(buffers, events=True):
            assert wait_until(lambda: buffers[2]._coming is None)
            mark = stage.mark()
            buffers[2].close(after=None if after == "a promise" else event)
            names = stage.names_since(mark)
            assert "synchronize_stream" in names[: names.index("unmap")]
        assert holds(buffers[:2])


def test_a_wait_that_fails_as_a_buffer_leaves(stage: Stage) -> None:
    """The memory that was created for it is given back all the same, and the others can go on."""
    with filled(*[SIZE] * 3) as buffers:
        remap.pause(buffers)
        stage.faulty.fail("map", nth=2, repeat=True)
        with remap.resume(buffers, events=True) as waking:
            assert wait_until(lambda: waking.held_up is not None)
            stage.faulty.heal()
            stage.faulty.fail("synchronize_stream", nth=2, result=CudaResult.UNKNOWN)
            with pytest.raises(remap.DriverError, match="UNKNOWN"):
                buffers[2].close()
            assert buffers[2].closed
            stage.faulty.heal()
            remap.resume(buffers[:2])
        assert holds(buffers[:2])


def test_memory_without_contents(stage: Stage) -> None:
    """What was given up has no events, and is mapped in its turn; poisoned, it has some."""
    with filled(*[SIZE] * 3) as buffers:
        for poison in (False, True):
            remap.pause({buffers[0]: "host", buffers[1]: None, buffers[2]: "host"})
            with remap.resume(buffers, events=True, poison=poison) as waking:
                assert len(waking.events) == 2 + poison
                if poison:
                    assert (buffers[1].to_host() == 0xCB).all()
                buffers[1].copy_from_host(contents(1))
            assert holds(buffers)
    del stage


def test_rings_and_elastic_buffers(stage: Stage) -> None:
    """Buffers of several chunks, of memory that is mapped twice, and of a pool come in portions, too."""
    with (
        filled(SIZE) as first,
        remap.RingBuffer(SIZE, device=0) as ring,
        remap.ElasticBuffer(96 * MiB, device=0, chunk=24 * MiB) as elastic,
    ):
        elastic.resize(80 * MiB)
        ring.copy_from_host(contents(5))
        elastic.copy_from_host(contents(6, 80 * MiB))
        buffers = [*first, ring, elastic]
        remap.pause(buffers)
        with remap.resume(buffers, events=True) as waking:
            assert len(waking.events) == 6
            elastic.resize(90 * MiB)  # growing waits for nothing
            elastic.fill(1, offset=85 * MiB, size=MiB)
            assert np.array_equal(ring.to_host(), contents(5))
            with pytest.raises(remap.InUseError, match="still arriving"):
                elastic.resize(10 * MiB)
        assert np.array_equal(elastic.to_host()[: 80 * MiB], contents(6, 80 * MiB))
        elastic.resize(0)
    del stage


ENDING = """
import remap
buffers = [remap.allocate("8MiB", resident=0) for _ in range(8)]
remap.pause(buffers)
waking = remap.resume(buffers, events=True)
print("ending")
"""


def test_a_program_that_ends_meanwhile() -> None:
    """The end of the interpreter waits for the thread, which is short: no error, no crash."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ending\n", "")


def test_host_memory_goes_in_one(stage: Stage) -> None:
    """What many backups lay in goes back by one thread, once all that is to be asked of the driver was asked."""
    if not hasattr(stage.inner, "register_pinned"):
        pytest.skip("the driver has no pinned memory")
    with filled(*[SIZE] * 24) as buffers:
        remap.pause(buffers)
        mark = stage.mark()
        remap.resume(buffers)
        remap.host_pool().wait()
        calls = stage.since(mark)
        gone = [call for call in calls if call.name == "unregister_pinned"]
        last = max(call.start for call in calls if call.thread == get_ident())
        assert len({call.thread for call in gone}) == 1 < len(gone)
        assert all(call.start > last for call in gone)
        sizes = [call.arguments[2] for call in calls if call.name == "copy_to_device"]
        assert sizes == [SIZE] * 24, "no copy is cut that need not be"
        assert holds(buffers)
    assert all(one.start <= other.start for one, other in pairwise(gone))
