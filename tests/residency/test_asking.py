"""What pause and resume are asked, and what they say to that: nothing is passed over in silence."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import remap
from remap import MiB, drivers
from remap.drivers.wrappers import Faulty
from remap.residency.stores import Keep
from remap.testing.stage import Stage

from .support import SIZE, acts

pytest_plugins = ("remap.testing.stage",)


@pytest.mark.parametrize("events", [False, True])
def test_a_shortage_is_told_of_the_whole_call(stage: Stage, events: bool) -> None:
    """What all buffers need, and what was free before the attempt: not one chunk, and what its undoing took (9)."""
    if stage.inner.name == "cuda":
        pytest.skip("taking all memory of a GPU disturbs who else uses it")
    with remap.ElasticBuffer(4 * SIZE, chunk=2 * MiB) as buffer, remap.allocate(SIZE) as other:
        buffer.resize(4 * SIZE)
        remap.pause([buffer, other])
        info = remap.device(0).memory()
        with remap.create(info.free // SIZE * SIZE - SIZE, at=0):
            left = remap.device(0).memory().free
            free = rf"{left >> 20} MiB of {info.total >> 20} MiB are free there"
            with pytest.raises(remap.OutOfMemoryError, match=rf"16 MiB on device 0, and {free}") as told:
                remap.resume(buffer, events=events)
            assert str(told.value).startswith(f"resume of {buffer.describe()}: ")
            assert told.value.code == 2
            with pytest.raises(remap.OutOfMemoryError, match=rf"resume of 2 buffers: .* 20 MiB on .*{free}"):
                remap.resume([buffer, other], events=events)
        remap.resume([buffer, other])


@pytest.mark.parametrize("keep", ["disk", None])
def test_a_mapping_has_its_own_keeps(stage: Stage, keep: Keep) -> None:
    """A keep beside a mapping would be ignored, and contents lost that the caller meant to have; it is refused."""
    with remap.allocate(SIZE) as buffer:
        buffer.fill(3)
        with pytest.raises(remap.InvalidValueError, match="the mapping says of each what is kept"):
            remap.pause({buffer: None}, keep=keep)
        assert not buffer.paused
        assert int(buffer.to_host()[0]) == 3
        remap.pause({buffer: "host"})
        for call in acts(
            lambda: remap.resume({buffer: "host"}),
            lambda: remap.resume(buffer, order={buffer: None}),
            lambda: remap.migrate({buffer: None}, remap.Host()),
        ):
            with pytest.raises(remap.InvalidValueError, match="a mapping to be"):
                call()
        remap.resume([buffer])
        assert int(buffer.to_host()[0]) == 3


def test_a_directory_means_something(stage: Stage, tmp_path: Path) -> None:
    """A directory where nothing can go any more is refused, and one where nothing was to go is noted."""
    del stage
    other = tmp_path / "other"
    with remap.allocate(SIZE) as buffer:
        assert "directory=" in str(remap.pause(buffer, directory=tmp_path))
        remap.resume(buffer)
        assert "directory=" not in str(remap.pause(buffer, "disk", directory=tmp_path))
        for place in (other, str(other), tmp_path / ".."):
            with pytest.raises(remap.PausedError, match=f"in {re.escape(str(tmp_path))} already. Resume"):
                remap.pause({buffer: "disk"}, directory=place)
        for same in (None, tmp_path, other / ".."):
            assert remap.pause(buffer, "disk", directory=same).buffers == 0
        remap.resume(buffer)


def test_a_pause_waits_for_others_to_let_go(stage: Stage) -> None:
    """A thread in the middle of a call holds a buffer; the pause is refused, or waits as long as it is told to (13)."""
    faulty = Blocking(drivers.open())
    remap.use(faulty)
    try:
        with remap.allocate(SIZE) as buffer, remap.allocate(SIZE) as other:
            buffer.fill(3)
            faulty.let.clear()
            user = threading.Thread(target=buffer.fill, args=(5,))
            user.start()
            assert faulty.begun.wait(30)
            with pytest.raises(remap.InUseError, match="still under way"):
                remap.pause([other, buffer])
            with pytest.raises(remap.InUseError, match="still under way"):
                remap.pause([other, buffer], wait=0.02)
            other.to_host()  # nobody holds it
            pausing = threading.Thread(target=remap.pause, args=([other, buffer],), kwargs={"wait": 30})
            pausing.start()
            faulty.let.set()
            user.join()
            pausing.join()
            assert buffer.paused
            assert other.paused
            remap.resume([buffer, other])
            assert int(buffer.to_host()[0]) == 5
            with pytest.raises(remap.InvalidValueError, match="number of seconds"):
                remap.pause(buffer, wait=float("nan"))
    finally:
        faulty.let.set()
        drivers.close()
        remap.use(stage.recording)


def test_a_pause_that_waits_takes_the_group_as_it_is_then(stage: Stage) -> None:
    """A fork that joins the group while a pause of it waits is paused with it; who has gone is not missed."""
    faulty = Blocking(drivers.open())
    remap.use(faulty)
    try:
        with remap.group("waited for") as group:
            root, busy, gone = (
                remap.ElasticBuffer(4 * SIZE, device=0),
                remap.allocate(SIZE),
                remap.allocate(SIZE),
            )
        root.resize(SIZE)
        faulty.let.clear()
        user = threading.Thread(target=busy.fill, args=(5,))
        user.start()
        assert faulty.begun.wait(30)
        done: list[int] = []
        pausing = threading.Thread(target=lambda: done.append(remap.pause(iter([group]), wait=20).buffers))
        pausing.start()
        twin = None
        while twin is None:  # the pause holds them for moments
            with contextlib.suppress(remap.InUseError):
                twin = root.fork()
        while not gone.closed:
            with contextlib.suppress(remap.InUseError):
                gone.close()
        faulty.let.set()
        for thread in (user, pausing):
            thread.join(30)
        assert done == [3]
        assert root.paused
        assert twin.paused
        for buffer in group.buffers:
            buffer.close()
    finally:
        faulty.let.set()
        drivers.close()
        remap.use(stage.recording)


def test_a_pause_does_not_wait_for_other_processes(stage: Stage) -> None:
    """Shared memory stays shared however long one waits, so that is refused at once."""
    with remap.allocate(SIZE, shareable="posix_fd") as buffer:
        with (
            remap.export(buffer),
            pytest.raises(remap.InUseError, match="may still hold its memory"),
        ):
            remap.pause(buffer, wait=3600)
        assert not buffer.paused


class Blocking(Faulty):
    """A driver whose fills wait until they are let."""

    def __init__(self, inner: Any) -> None:
        self.let, self.begun = threading.Event(), threading.Event()
        self.let.set()
        super().__init__(inner)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **keywords: Any) -> Any:
            if name == "fill" and not self.let.is_set():
                self.begun.set()
                assert self.let.wait(30)
            return call(*arguments, **keywords)

        return made


def test_closing_while_a_resume_waits(stage: Stage) -> None:
    """What is closed while a resume waits for memory is left out, as if it had been closed right after it."""
    if stage.inner.name == "cuda":
        pytest.skip("taking all memory of a GPU disturbs who else uses it")
    with remap.allocate(SIZE) as one, remap.allocate(SIZE) as other:
        remap.pause([one, other])
        with remap.create(remap.device(0).memory().free - SIZE, at=0):
            told: list[Any] = []
            waiter = threading.Thread(target=lambda: told.append(remap.resume([one, other], wait=60)))
            waiter.start()
            while not one._taken:  # until it has tried
                assert waiter.is_alive()
            while not other.closed:  # refused in the middle of an attempt
                with contextlib.suppress(remap.InUseError):
                    other.close()
            waiter.join(30)
            assert told[0].buffers == 1
        assert not one.paused
        with pytest.raises(remap.ClosedError):
            remap.resume([one, other])


def test_groups_whose_blocks_end_in_another_order(stage: Stage) -> None:
    """Nothing of a block stays behind it, whichever ends first, as blocks of tasks and of generators do."""
    del stage
    blocks = [remap.group("first"), remap.group("second")]
    groups = [block.__enter__() for block in blocks]
    blocks[0].__exit__(None, None, None)
    with remap.allocate(SIZE, resident=0) as inside:
        assert [inside in one.buffers for one in groups] == [False, True]
    blocks[1].__exit__(None, None, None)
    with remap.allocate(SIZE, resident=0) as outside, remap.DeviceBuffer.empty(1, "uint8") as small:
        assert not any(outside in one.buffers for one in groups)
        assert not isinstance(small.owner, remap.Buffer), "mapped memory is for those inside of a group"


def test_a_group_is_not_its_block(stage: Stage) -> None:
    """What begins a block says where the group is, to who takes it for that; a group goes through its buffers."""
    del stage
    block: Any = remap.group("of a block")
    with pytest.raises(
        AttributeError, match=r"is a block, .* has no 'pause'; .*remap\.groups\(\)\['of a block'\]"
    ):
        block.pause()
    assert not hasattr(block, "buffers")
    assert "of a block" in repr(block)
    with block as group, remap.allocate(SIZE) as one, remap.ElasticBuffer(SIZE) as other:
        assert list(group) == [one, other]
        assert one in group
        assert remap.groups()["of a block"] is group

    @remap.group("of a function")
    def make() -> remap.Buffer:
        return remap.allocate(SIZE)

    with make() as first, make() as second:
        assert list(remap.groups()["of a function"]) == [first, second]


def test_a_group_has_what_several_threads_make(stage: Stage) -> None:
    """Every buffer that is made inside of a block is in the group, whoever makes others at the same time (13)."""
    del stage
    made: list[remap.Buffer] = []
    start = threading.Barrier(4)

    def work() -> None:
        for _ in range(20):
            start.wait(30)
            with remap.group("of several threads"):
                made.extend([remap.allocate(0) for _ in range(25)])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert len(made) == 2000
    assert set(remap.groups()["of several threads"].buffers) == set(made)
    while made:
        made.pop().close()
    assert "of several threads" not in remap.groups()
