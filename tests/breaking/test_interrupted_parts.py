"""Ctrl-C at every place of what is around buffers: groups and traces, and what is made to be kept by a program."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import remap
from remap import lifetime

from .test_every_interrupt import GRANULE, SIZE, Interrupted, driver, every

__all__ = ["driver"]  # the fixture of these tests, too

SOURCE = Path(remap.__file__).parent

# Where an interrupt meets a finaliser, Python can only print it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def covered() -> list[str]:
    """Return the methods of the driver that a trace listens to."""
    return [name for name, call in vars(remap.driver()).items() if call.__class__.__name__ == "function"]


def test_interrupted_traces() -> None:
    """A trace that is interrupted as it begins is over, and one that ends can be ended: nobody pays after it."""

    def act() -> None:
        with traces[-1]:
            remap.allocate(SIZE).close()

    rooms = (str(SOURCE / "observe"), contextlib.__file__)
    traces = [remap.trace()]
    for done in every(act, rooms):
        traces[-1].end()
        assert not covered(), done.where
        assert not lifetime.watchers, done.where
        with remap.trace() as another:
            remap.allocate(SIZE).close()
        assert any(call.name == "create" for call in another.calls), done.where
        assert not covered(), done.where
        traces.append(remap.trace())


def test_interrupted_groups() -> None:
    """What is made after a block that was interrupted, also as it began, is in no group."""

    def act() -> None:
        with remap.group("weights"):
            pass

    rooms = (
        str(SOURCE / "residency"),
        str(SOURCE / "lifetime.py"),
        str(SOURCE / "buffers" / "sources.py"),
        contextlib.__file__,
    )
    for done in every(act, rooms):
        with remap.allocate(SIZE) as buffer:
            assert buffer._groups == (), done.where
        with remap.DeviceBuffer.zeroed(10, "uint8") as small:
            assert not isinstance(small.owner, remap.Buffer), done.where


def counts() -> dict[str, int]:
    """Return how much of everything the host driver has, when all that was left to do is done."""
    lifetime.drain()
    host: Any = remap.driver()
    space = host._memory.space
    return {
        "free": remap.device(0).memory().free,
        "reservations": len(space.reservations),
        "mappings": len(space.mappings),
        "streams": len(host._streams._by_handle),
        "events": len(host._events._events),
        "graphs": len(host._graphs._graphs),
        "executables": len(host._executables._executables),
        "plain": len(host._plain.regions),
        "pinned and managed": len(host._reachable.regions),
        "in backups": remap.host_pool().statistics().used,
    }


def with_memory() -> remap.Graph:
    """Return a graph with memory nodes, of which a driver takes one executable at a time."""
    graph = remap.Graph(0)
    allocated = graph.alloc(GRANULE)
    graph.free(allocated, after=[allocated])
    return graph


ARRAY = np.zeros(GRANULE, np.uint8)

MAKERS: dict[str, Callable[[remap.Graph], Any]] = {
    "RingBuffer": lambda _: remap.RingBuffer(GRANULE, device=0),
    "ElasticBuffer": lambda _: remap.ElasticBuffer(4 * GRANULE, device=0),
    "ElasticBuffer ahead": lambda _: remap.ElasticBuffer(4 * GRANULE, device=0, ahead=GRANULE),
    "DeviceBuffer": lambda _: remap.DeviceBuffer.empty(10),
    "pinned": lambda _: remap.pinned(1000),
    "managed": lambda _: remap.managed(1000),
    "register": lambda _: remap.register(ARRAY),
    "Graph": lambda _: remap.Graph(0),
    "instantiate": lambda graph: graph.instantiate(),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_interrupted_makers(kind: str) -> None:
    """What was being made is gone, or given back with what is collected, and it can be made again (4, 5).

    Places in the driver are left out: on CUDA nothing can be interrupted there.
    """
    rooms = tuple(
        str(SOURCE / room) for room in ("buffers", "graphs", "spans.py", "handles.py", "lifetime.py")
    )
    made: list[Any] = []
    with with_memory() as graph:
        before = counts()
        for done in every(lambda: made.append(MAKERS[kind](graph)), rooms):
            assert counts() == before, done.where
            MAKERS[kind](graph).close()
            assert lifetime.live() == [graph], done.where
        made.pop().close()


MOVES: dict[str, Callable[[remap.Buffer], object]] = {
    "to the host": remap.pause,
    "to disk": lambda one: remap.pause(one, "disk"),
    "elsewhere": lambda one: remap.migrate(one, 1),
}


@pytest.mark.parametrize("move", MOVES)
def test_interrupted_moves_leave_nothing(move: str) -> None:
    """Streams, windows, staging memory and old memory are given back, wherever a move is interrupted (4, 5).

    Places in the driver are left out: on CUDA nothing can be interrupted there.
    """
    rooms = (str(SOURCE / "residency"), str(SOURCE / "releases.py"), contextlib.__file__)
    remap.host_pool(prepare=32 << 20).wait()

    def act() -> None:
        MOVES[move](made[0])

    made = [remap.allocate(SIZE, resident=0, accessing=[0, 1])]
    before = counts()
    for done in every(act, rooms):
        made.pop().close()
        made.append(remap.allocate(SIZE, resident=0, accessing=[0, 1]))
        now = counts()
        assert now == before or done.releasing, (done.where, now, before)
        before = now
    made.pop().close()


def test_interrupted_runs() -> None:
    """Wherever taking the results of a run is interrupted, no two runs get one lent stream afterwards."""
    chain = remap.chain(0)
    chain.copy_out(chain.copy_in(np.arange(5.0)))
    runs = [chain.run()]

    def act() -> None:
        runs[0].wait()

    rooms = tuple(str(SOURCE / room) for room in ("buffers/chains.py", "buffers/pooled.py", "streams.py"))
    for done in every(act, rooms):
        runs.clear()
        runs += [chain.run(), chain.run()]
        assert runs[0].stream is not runs[1].stream, done.where
        runs.pop().wait()


BEGINNINGS: dict[str, Callable[[remap.ElasticBuffer], object]] = {
    "fill": lambda one: one.fill(1),
    "resize": lambda one: one.resize(2 * GRANULE),
    "shrink": lambda one: one.resize(0),
    "pause": remap.pause,
    "migrate": lambda one: remap.migrate(one, 1),
    "set_access": lambda one: one.set_access({0: "r"}),
}


@pytest.mark.parametrize("act", BEGINNINGS)
def test_blocks_that_were_interrupted_as_they_began(act: str) -> None:
    """Nothing stays under way between a block's generator and the block, also while the traceback lives (5, 13)."""
    for nth in range(1, 100):
        with remap.ElasticBuffer(4 * GRANULE, device=0, chunk=GRANULE) as buffer:
            buffer.resize(GRANULE)
            left = [nth]

            def begun(frame: FrameType, event: str, _: object, left: list[int] = left) -> None:
                code = frame.f_code
                if (
                    event == "c_return"
                    and code.co_filename == contextlib.__file__
                    and code.co_name == "__enter__"
                ):
                    left[0] -= 1
                    if not left[0]:
                        sys.setprofile(None)
                        raise Interrupted

            kept: BaseException | None = None
            sys.setprofile(begun)
            try:
                BEGINNINGS[act](buffer)
            except Interrupted as error:
                kept = error
            finally:
                sys.setprofile(None)
            remap.pause(buffer)
            remap.resume(buffer)
            buffer.close()
        if kept is None:
            assert nth > 1, "it was not interrupted at all"
            return
    pytest.fail("it has no end")


def test_a_dropped_registration_can_be_found() -> None:
    """Where nobody holds what keeps a buffer from closing, the buffer does."""
    with remap.allocate(SIZE) as buffer:
        buffer.registered("NCCL")
        with pytest.raises(remap.InUseError, match=r"buffer\.registrations"):
            buffer.close()
        for one in buffer.registrations:
            assert one.by == "NCCL"
            one.close()
        assert buffer.registrations == ()


def test_interrupted_trims() -> None:
    """What a pool kept is kept still, or free, wherever giving it back is interrupted; it goes on from there (4, 5)."""
    rooms = (str(SOURCE / "chunks" / "pool.py"),)
    with remap.ChunkPool(0, limit=8 * GRANULE) as pool:

        def fill() -> None:
            with remap.ElasticBuffer(8 * GRANULE, device=0, chunk=GRANULE, pool=pool) as buffer:
                buffer.resize(4 * GRANULE)

        before = remap.device(0).memory().free
        fill()
        for done in every(pool.trim, rooms):
            assert remap.device(0).memory().free == before - pool.statistics().kept, done.where
            pool.trim()
            assert remap.device(0).memory().free == before, done.where
            fill()
