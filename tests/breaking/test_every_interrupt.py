"""Ctrl-C at every place where the interpreter looks for signals: nothing stays busy, and nothing is lost.

It looks where a function of Python begins, where one of C has returned, and at the end of a loop's turn. A profiling
function sees the first two, so that a test can raise at each of them in turn, and need not hope to hit one.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB, drivers, lifetime
from remap.testing.bench import wait_until

GRANULE = 64 << 10  # there are thousands of places: filling and comparing megabytes at each takes a minute
SIZE = 2 * GRANULE
OURS = (str(Path(remap.__file__).parent), contextlib.__file__)
"""Where an interrupt is raised: not inside the modules that nobody here can mend (threading, numpy)."""

# Where an interrupt meets a finaliser, Python can only print it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Interrupted(BaseException):
    """What the handler of a signal raises."""


class Interrupter:
    """A profiling function that raises at the `nth` place, once."""

    def __init__(self, nth: int, rooms: tuple[str, ...]) -> None:
        self.left = nth
        self._rooms = rooms
        self.where = ""
        self.releasing = False  # an allocation's handle, which may be gone or not

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Count a place, and raise if it is the one."""
        code = frame.f_code
        if event not in {"call", "c_return"} or not code.co_filename.startswith(self._rooms):
            return
        if event == "call" and code.co_name == "__del__":
            return  # a finaliser that is interrupted as it begins does not run: nobody can mend that
        self.left -= 1
        if self.left:
            return
        sys.setprofile(None)
        self.where = f"{event} {code.co_filename}:{frame.f_lineno} {argument or ''}"
        caller: FrameType | None = frame
        while caller is not None:
            self.releasing |= caller.f_code.co_name == "release"
            caller = caller.f_back
        raise Interrupted


def interrupt(act: Callable[[], object], nth: int, rooms: tuple[str, ...]) -> Interrupter:
    """Do `act` and raise at the `nth` place; `where` is empty if it has fewer."""
    interrupter = Interrupter(nth, rooms)
    sys.setprofile(interrupter)
    try:
        act()
    except Interrupted:
        pass
    finally:
        sys.setprofile(None)
    return interrupter


def every(act: Callable[[], object], rooms: tuple[str, ...] = OURS) -> Generator[Interrupter]:
    """Do `act` again and again, interrupted one place later each time, until it ends by itself."""
    for nth in range(1, 5000):
        done = interrupt(act, nth, rooms)
        if not done.where:
            assert nth > 10, "it was hardly interrupted at all"
            return
        yield done
    pytest.fail("the operation has no end")


@pytest.fixture(autouse=True)
def driver() -> Generator[None]:
    """Let the tests use a host driver with no wrapper, and let finalisers warn: that is what they are for."""
    if remap.driver().name != "host":
        pytest.skip("what CUDA has in use is machine-wide, and each place would take its slack")
    remap.use("host", granularity=GRANULE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        remap.allocate(SIZE, poison=True).close()
        yield
        remap.collect()
    for thing in lifetime.live():  # those of a test that failed
        thing.close()
    drivers.close()


def free() -> int:
    """Return the free bytes of device 0 when everything that was left to do is done; nothing may hang on cycles."""
    lifetime.drain()
    return remap.device(0).memory().free


USES: dict[str, Callable[[remap.Buffer, remap.Buffer, remap.Stream], object]] = {
    "fill": lambda one, _, __: one.fill(1),
    "fill in a stream": lambda one, _, stream: one.fill(1, stream=stream),
    "copy_from_host": lambda one, _, __: one.copy_from_host(np.ones(100, np.uint8)),
    "copy_to_host": lambda one, _, __: one.copy_to_host(np.ones(100, np.uint8)),
    "copy_from": lambda one, other, _: one.copy_from(other),
    "copy_from in a stream": lambda one, other, stream: one.copy_from(other, stream=stream),
    "copy_from itself": lambda one, _, __: one.copy_from(one, source_offset=SIZE // 2),
    "set_access": lambda one, _, __: one.set_access({0: "r"}),
}


@pytest.mark.parametrize("use", USES)
def test_interrupted_uses(use: str) -> None:
    """Wherever a use is interrupted, the memory is not busy afterwards, and its work is known: it closes (5, 7, 13)."""
    with remap.Stream(0) as stream, remap.allocate(SIZE) as other:
        before = free()
        made: list[remap.Buffer] = []

        def act() -> None:
            made[0].set_access({0: "rw"})
            USES[use](made[0], other, stream)

        made.append(remap.allocate(SIZE))
        for done in every(act):
            assert not made[0]._busy, done.where
            assert not other._busy, done.where
            assert not made[0]._taken, done.where
            made[0].close()
            assert free() == before, done.where
            made[0] = remap.allocate(SIZE)
        made[0].close()


MAKERS: dict[str, Callable[[], object]] = {
    "allocate": lambda: remap.allocate(SIZE, resident=0).close(),
    "allocate in stripes": lambda: remap.allocate(SIZE, resident=[0, 1]).close(),
    "create": lambda: remap.create(SIZE, at=0).close(),
    "create to share": lambda: remap.create(SIZE, at=0, shareable="posix_fd").close(),
    "reserve": lambda: remap.reserve(SIZE).close(),
    "stream": lambda: remap.Stream(0).close(),
    "event": lambda: remap.Event(0).close(),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_interrupted_making(kind: str) -> None:
    """What was being made is gone, or given back with what is collected: no memory is lost (invariants 4, 5)."""
    before = free()
    for done in every(MAKERS[kind]):
        left = before - free()
        if done.releasing:  # whether the handle is gone cannot be asked, and releasing it twice is worse (T8)
            assert left in {0, SIZE, SIZE // 2}, done.where
            before -= left
        assert free() == before, done.where
        assert not lifetime.live(), done.where


def test_interrupted_mapping() -> None:
    """What an interrupt leaves of a mapping that was being made stands in nobody's way (invariants 4, 5)."""
    with remap.create(SIZE, at=0) as memory, remap.reserve(SIZE) as addresses:
        for done in every(lambda: addresses.map(memory, access={0: "rw"}).close()):
            lifetime.drain()
            assert addresses.mappings == (), done.where
            addresses.map(memory, access={0: "rw"}).close()


def test_interrupted_ordered_resume() -> None:
    """Buffers sleep on, or are awake and can be brought back: with their contents, and with nobody who waits (5)."""
    contents = [np.full(SIZE, value, np.uint8) for value in (1, 2)]
    made: list[remap.Buffer] = []
    remap.host_pool(prepare=32 * MiB)  # or each turn would touch it anew
    before = free()

    def asleep() -> None:
        made[:] = [remap.allocate(SIZE) for _ in contents]
        for one, value in zip(made, contents, strict=True):
            one.copy_from_host(value)
        remap.pause(made)

    def close() -> None:
        arriving: Any = made[1]._arriving
        if arriving is not None:
            arriving.waking.close()
        for one in made:
            one.close()

    asleep()
    for done in every(lambda: remap.resume(made, events=True)):
        remap.resume(made)
        for one, value in zip(made, contents, strict=True):
            assert np.array_equal(one.to_host(), value), done.where
        close()
        left = before - free()
        if done.releasing:
            assert left in {0, SIZE}, done.where
            before -= left
        assert free() == before, done.where
        assert not lifetime.live(), done.where
        asleep()
    close()


def family(rows: int) -> list[remap.ElasticBuffer]:
    """Return a cache of one chunk of ones, and a fork of so many chunks, whose later ones are its own."""
    root = remap.ElasticBuffer(4 * GRANULE, device=0, chunk=GRANULE)
    root.resize(GRANULE)
    root.fill(1)
    fork = root.fork()
    if rows > 1:
        fork.resize(rows * GRANULE)
        fork.fill(2, offset=GRANULE)
    return [root, fork]


FORKS_MOVE: dict[str, tuple[bool, Callable[[list[remap.ElasticBuffer]], object]]] = {
    "pause": (False, remap.pause),
    "resume": (True, remap.resume),
    "migrate": (False, lambda made: remap.migrate(made, remap.Host())),
}


@pytest.mark.parametrize("move", FORKS_MOVE)
def test_interrupted_moves_of_forks(move: str) -> None:
    """Forks sleep together or not at all; waking all brings them back, still shared; and all of it goes (4, 5).

    Places in the driver are left out: on CUDA nothing can be interrupted there.
    """
    asleep, act = FORKS_MOVE[move]
    rooms = tuple(str(Path(remap.__file__).parent / room) for room in ("residency", "buffers", "chunks"))
    shared = np.full(GRANULE, 1, np.uint8)
    made: list[remap.ElasticBuffer] = []
    remap.host_pool(prepare=32 * MiB).wait()
    before = free()

    def make() -> None:
        made[:] = family(2)
        if asleep:
            remap.pause(made)

    make()
    for done in every(lambda: act(made), rooms):
        assert len({one.paused for one in made}) == 1, done.where
        remap.resume(made)
        assert sum(remap.footprint(made).values()) == 2 * GRANULE, done.where
        assert np.array_equal(made[0].to_host(), shared), done.where
        assert np.array_equal(made[1].to_host(shape=GRANULE), shared), done.where
        assert (made[1].to_host()[GRANULE:] == 2).all(), done.where
        for one in made:
            one.close()
        left = before - free()
        assert left in {0, GRANULE}, done.where
        assert done.releasing or not left or "create" in done.where or "retain" in done.where, done.where
        before -= left
        assert not lifetime.live(), done.where
        assert not remap.host_pool().statistics().used, done.where
        make()
    for one in made:
        one.close()


FORKING: dict[str, Callable[[list[remap.ElasticBuffer]], object]] = {
    "fork": lambda made: made.append(made[0].fork()),
    "make_private": lambda made: made[1].make_private(),
    "close": lambda made: made[1].close(),
}


@pytest.mark.parametrize("act", FORKING)
def test_interrupted_forking(act: str) -> None:
    """Whoever is left can sleep without the other, with its contents, and all memory comes back (4, 5).

    Places in the driver are left out: on CUDA nothing can be interrupted there.
    """
    rooms = tuple(str(Path(remap.__file__).parent / room) for room in ("buffers", "chunks"))
    contents = np.full(GRANULE, 1, np.uint8)
    made: list[remap.ElasticBuffer] = []
    before = free()

    made[:] = family(1)
    for done in every(lambda: FORKING[act](made), rooms):
        while len(made) > 1:
            made.pop().close()
        lifetime.drain()
        assert made[0].shared == (), done.where
        remap.pause(made)
        remap.resume(made)
        assert np.array_equal(made[0].to_host(), contents), done.where
        made.pop().close()
        left = before - free()
        assert left in {0, GRANULE}, done.where
        assert done.releasing or not left or "create" in done.where or "retain" in done.where, done.where
        before -= left
        assert not lifetime.live(), done.where
        made[:] = family(1)
    for one in made:
        one.close()


CHANGES: dict[str, Callable[[remap.ElasticBuffer], object]] = {
    "grow": lambda one: one.resize(6 * GRANULE),
    "shrink": lambda one: one.resize(GRANULE),
    "commit": lambda one: one.commit(5 * GRANULE, 7 * GRANULE),
    "decommit": lambda one: one.decommit(GRANULE, 3 * GRANULE),
}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_interrupted_changes(change: str, pooled: bool, ahead: bool) -> None:
    """What a buffer says is mapped, and nothing else; pools count as much; and it grows and shrinks on (4, 5, 14).

    Places in the driver are left out: on CUDA nothing can be interrupted there.
    """
    rooms = tuple(str(Path(remap.__file__).parent / room) for room in ("buffers", "chunks"))
    made: list[remap.ElasticBuffer] = []
    pool = remap.ChunkPool(0, limit=8 * GRANULE)

    def make() -> None:
        pool.trim()
        margin = 2 * GRANULE if ahead else 0
        one = remap.ElasticBuffer(
            8 * GRANULE, device=0, chunk=GRANULE, pool=pool if pooled else None, ahead=margin
        )
        made[:] = [one]
        one.resize(4 * GRANULE)
        one.fill(1)
        assert one._ahead is None or wait_until(lambda: one._ahead is not None and one._ahead.bytes == margin)

    def lost() -> int:
        return before - free() - sum(made[0].footprint().values()) - pool.statistics().kept

    def settled(allowed: set[int]) -> bool:
        counted = sum(made[0].footprint().values()) if pooled else 0
        return lost() in allowed and pool.statistics().used == counted

    before = free()
    make()
    for done in every(lambda: CHANGES[change](made[0]), rooms):
        one, handle = made[0], done.releasing or "retain" in done.where
        assert not one._changing, done.where
        assert not one._taken, done.where
        # Its thread may just be mapping more.
        assert wait_until(partial(settled, {0, GRANULE} if handle else {0})), done.where
        before -= lost()
        for start, stop in one.extents:
            if start < 4 * GRANULE:
                contents = one.to_host(shape=min(stop, 4 * GRANULE) - start, offset=start)
                assert (contents == 1).all(), done.where
        one.resize(8 * GRANULE)
        one.fill(2)
        one.close()
        make()
    made[0].close()
    pool.close()
    assert free() == before


@pytest.mark.parametrize("after", [False, True])
def test_interrupted_closing_of_pool_memory(after: bool) -> None:
    """It is freed once, by the close or by what is left of it; places in the driver are left out, as on CUDA (4)."""
    rooms = tuple(str(Path(remap.__file__).parent / room) for room in ("buffers", "uses.py", "streams.py"))
    device = remap.device(0)

    def free_now() -> int:
        lifetime.drain()
        device.synchronize()  # it is freed in the order of its stream
        return free()

    with remap.Stream(0) as stream:
        remap.DeviceBox.zeroed(SIZE, "uint8").close()
        before = free_now()
        made = [remap.DeviceBox.zeroed(SIZE, "uint8")]
        for done in every(lambda: made[0].close(after=stream) if after else made[0].close(), rooms):
            made.pop().close()
            assert free_now() == before, done.where
            assert lifetime.live() == [stream], done.where
            made.append(remap.DeviceBox.zeroed(SIZE, "uint8"))
        made.pop().close()


def test_interrupted_end_of_a_move() -> None:
    """Once all has moved, what held the old memory is given back, at once or by the next call (invariant 5)."""
    with remap.allocate(SIZE, resident=0, accessing=[0, 1]) as buffer:
        buffer.fill(3)
        for place in (1, 0):
            remap.migrate(buffer, place)
        before = free()
        for done in every(lambda: _finished(buffer)):
            remap.migrate(buffer, 0)
            left = before - free()
            if done.releasing:
                assert left in {0, SIZE}, done.where
                before -= left
            assert free() == before, done.where
            assert (buffer.to_host() == 3).all()


def _finished(buffer: remap.Buffer) -> None:
    """Move a buffer away; places are counted from when its memory has been swapped."""
    profile: Any = sys.getprofile()
    done: list[FrameType] = []

    def swapped(frame: FrameType, event: str, argument: object) -> None:
        if event == "return" and frame.f_code.co_name == "swap":
            done.append(frame)
        elif done and profile is not None:
            profile(frame, event, argument)

    sys.setprofile(swapped)
    remap.migrate(buffer, 1)


@pytest.mark.parametrize("kind", ["buffer", "mapping", "allocation", "reservation", "stream"])
def test_interrupted_closing(kind: str) -> None:
    """What a close had not done when it was interrupted is done by closing again, or by a later call (3, 4, 5)."""
    before = free()
    memory, addresses = remap.create(SIZE, at=0), remap.reserve(SIZE)
    made: list[lifetime.Resource] = []

    def make() -> lifetime.Resource:
        if kind == "mapping":
            return addresses.map(memory, access={0: "rw"})
        makers: dict[str, Callable[[], lifetime.Resource]] = {
            "buffer": lambda: remap.allocate(SIZE),
            "allocation": lambda: remap.create(SIZE, at=0),
            "reservation": lambda: remap.reserve(SIZE),
            "stream": lambda: remap.Stream(0),
        }
        return makers[kind]()

    def act() -> None:
        made[-1].close()

    taken = before - free()
    made.append(make())
    for done in every(act):
        made.pop().close()
        left = before - taken - free()
        if done.releasing:
            assert left in {0, SIZE}, done.where
            taken += left
        assert free() == before - taken, done.where
        assert lifetime.live() == [memory, addresses], done.where
        made.append(make())
    addresses.close()
    memory.close()
