"""Growing and shrinking in place: what it costs, whom it waits for, what it refuses, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import remap
from remap import Access, GiB, MiB
from remap.buffers.growth import Change
from remap.drivers.wrappers import _Forwarding
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

GRANULE = 2 * MiB
WAITS = {"synchronize_stream", "synchronize_context", "synchronize_event"}


def random_bytes(size: int) -> Any:
    """Return random bytes."""
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def last_device() -> int:
    """Return the number of the last device that device 0 reaches."""
    return max([0, *(peer.index for peer in remap.device(0).peers())])


class Gate(_Forwarding):
    """A driver that stops in every call of some methods until it is let through."""

    def __init__(self, inner: Any, *names: str) -> None:
        self._names = names
        self.reached, self.open = threading.Event(), threading.Event()
        super().__init__(inner)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        if name not in self._names:
            return partial(call)  # a function of its own, which may be named anew

        def gated(*args: Any, **kwargs: Any) -> Any:
            self.reached.set()
            assert self.open.wait(30)
            return call(*args, **kwargs)

        return gated


@contextmanager
def gated(stage: Stage, *names: str) -> Generator[Gate]:
    """Use a driver with a gate for a block, which closes everything that it makes."""
    gate = Gate(stage.recording, *names)
    remap.use(gate)
    try:
        yield gate
    finally:
        gate.open.set()
        remap.use(stage.recording)


@contextmanager
def in_a_thread(act: Callable[[], Any]) -> Generator[list[Any]]:
    """Run a call in a thread beside the block; yields a list that gets its result, or its error, at the end."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(act())
        except remap.RemapError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield results
    finally:
        thread.join(30)
        assert not thread.is_alive()


# -- growing --


def test_unaligned_growth_keeps_address_and_bytes(stage: Stage) -> None:
    """Any sequence of unaligned sizes works; address and contents stay, `size` is what was asked (traps 3, 5)."""
    mark = stage.mark()
    with remap.ElasticBuffer("1GiB", device=0) as buffer:
        address, size = buffer.address, 0
        assert buffer.capacity == GiB
        for step in (1, 3 * MiB, 5, 2 * MiB, 7 * MiB + 13, 1):
            held = buffer.to_host()
            size += step
            buffer.resize(size)
            assert (buffer.address, buffer.size, buffer.extents) == (address, size, ((0, size),))
            assert np.array_equal(buffer.to_host()[: held.size], held)
            buffer.copy_from_host(random_bytes(step), offset=size - step)
    assert stage.names_since(mark).count("reserve") == 1
    assert stage.names_since(mark).count("free_range") == 1


def test_growth_says_what_it_mapped_and_counts(stage: Stage) -> None:
    """A step within the last chunk asks nothing of the driver; one that maps says so, and `generation` grows."""
    with remap.ElasticBuffer(64 * MiB, device=0, chunk=8 * MiB) as buffer:
        seen: list[int] = []
        buffer.on_change(lambda changed: seen.append(changed.generation))
        assert buffer.resize(5) == Change(mapped=8 * MiB)
        mark = stage.mark()
        assert buffer.resize(8 * MiB) == Change()
        assert stage.names_since(mark) == []
        assert buffer.resize(8 * MiB + 1) == Change(mapped=8 * MiB)
        assert seen == [1, 2]


def test_growing_waits_for_nobody_and_disturbs_nobody(stage: Stage) -> None:
    """Buffers grow under queued work, with no wait; shrinking waits before it unmaps (invariant 7, traps 11, 12)."""
    with remap.ElasticBuffer(256 * MiB, device=0, chunk=GRANULE) as buffer, remap.Stream(0) as stream:
        buffer.resize(4 * MiB)
        buffer.fill(7, stream=stream)
        mark = stage.mark()
        buffer.resize(64 * MiB)
        buffer.commit(100 * MiB, 110 * MiB)
        assert not WAITS & set(stage.names_since(mark))
        mark = stage.mark()
        buffer.resize(2 * MiB)
        names = [name for name in stage.names_since(mark) if name in WAITS | {"unmap"}]
        assert names == ["synchronize_stream", "unmap"]
        assert (buffer.to_host() == 7).all()


def test_others_use_what_is_committed_while_it_grows(stage: Stage) -> None:
    """While one thread grows a buffer others fill, copy and count in it; a second change is refused (invariant 13)."""
    with gated(stage, "create") as gate:
        gate.open.set()
        buffer = remap.ElasticBuffer(64 * MiB, device=0, chunk=GRANULE)
        buffer.resize(GRANULE)
        gate.open.clear()
        gate.reached.clear()
        with in_a_thread(lambda: buffer.resize(32 * MiB)) as results:
            try:
                assert gate.reached.wait(30)
                buffer.fill(3)
                assert (buffer.to_host() == 3).all()
                assert buffer.size == GRANULE
                for change in (
                    lambda: buffer.resize(8 * MiB),
                    lambda: buffer.decommit(0, GRANULE),
                    lambda: remap.pause(buffer, keep=None),
                    buffer.fork,
                    lambda: buffer.set_access({0: "r"}),
                    buffer.close,
                ):
                    with pytest.raises(remap.InUseError, match="resized"):
                        change()
            finally:
                gate.open.set()
        assert results == [Change(mapped=30 * MiB)]
        assert buffer.size == 32 * MiB
        buffer.close()


def test_shrinking_excludes_uses(stage: Stage) -> None:
    """While chunks are being taken away nobody can use the buffer (invariant 13)."""
    with gated(stage, "unmap") as gate:
        buffer = remap.ElasticBuffer(64 * MiB, device=0, chunk=GRANULE)
        buffer.resize(8 * MiB)
        with in_a_thread(lambda: buffer.resize(0)) as results:
            try:
                assert gate.reached.wait(30)
                with pytest.raises(remap.InUseError, match="shrunk"):
                    buffer.fill(3)
            finally:
                gate.open.set()
        assert results == [Change(freed=8 * MiB)]
        buffer.close()


def test_new_chunks_have_the_rights_of_the_buffer(stage: Stage) -> None:
    """Who may touch a buffer may touch what it grows by, and nobody else, after a change too (invariant 12)."""
    last, here = last_device(), remap.device(0).location
    with remap.ElasticBuffer(64 * MiB, device=0, accessing=[0], chunk=GRANULE) as buffer:
        buffer.resize(GRANULE)
        buffer.set_access({0: "r"})
        buffer.resize(2 * GRANULE)
        buffer.commit(32 * MiB, 33 * MiB)
        for chunk in buffer.chunks:
            assert stage.inner.get_access(chunk.address, here) is Access.READ
            if last:
                assert stage.inner.get_access(chunk.address, remap.device(last).location) is Access.NONE
        with pytest.raises(remap.AccessError):
            buffer.fill(1, size=1)


def test_growth_over_several_devices(stage: Stage) -> None:
    """New chunks go to the resident devices in turn, all under one address (B3)."""
    del stage
    places = [0, *(peer.index for peer in remap.device(0).peers())]
    with remap.ElasticBuffer(64 * MiB, resident=places, accessing=[0], chunk=GRANULE) as buffer:
        for step in range(1, 9):
            buffer.resize(step * GRANULE)
        homes = [chunk.location.index for chunk in buffer.chunks]
        assert homes == [places[n % len(places)] for n in range(8)]
        data = random_bytes(buffer.size)
        buffer.copy_from_host(data)
        assert np.array_equal(buffer.to_host(), data)


# -- giving back --


def test_shrinking_frees_what_it_says(stage: Stage) -> None:
    """What a shrink says that it freed is free at the driver when it returns (trap 7)."""
    memory = remap.device(0).memory
    with remap.ElasticBuffer(256 * MiB, device=0) as buffer:
        before = memory().free
        mapped = buffer.resize(100 * MiB + 5).mapped
        assert mapped >= 100 * MiB + 5
        assert before - memory().free == mapped
        freed = buffer.resize(3).freed
        assert before - memory().free == mapped - freed == sum(chunk.size for chunk in buffer.chunks)
        assert buffer.resize(0) == Change(freed=mapped - freed)
        assert memory().free == before
        assert buffer.chunks == ()


def test_a_chunk_stays_while_a_byte_is_committed(stage: Stage) -> None:
    """Parts of a chunk free nothing; the last one frees it, in whatever order they go (trap 5)."""
    del stage
    with remap.ElasticBuffer(64 * MiB, device=0, chunk=8 * MiB) as buffer:
        buffer.resize(16 * MiB)
        assert buffer.decommit(MiB, 8 * MiB + 1).freed == 0
        assert buffer.decommit(0, MiB - 1).freed == 0
        assert buffer.extents == ((MiB - 1, MiB), (8 * MiB + 1, 16 * MiB))
        assert buffer.decommit(MiB - 1, MiB).freed == 8 * MiB
        assert buffer.size == 16 * MiB
        assert buffer.decommit(8 * MiB, 64 * MiB).freed == 8 * MiB
        assert buffer.size == 0
        assert not buffer.extents


def test_what_was_given_back_in_front_is_backed_again(stage: Stage) -> None:
    """After a part in front went, growing to a size that was there before backs it anew (trap 5)."""
    del stage
    with remap.ElasticBuffer(64 * MiB, device=0, chunk=GRANULE) as buffer:
        buffer.resize(8 * MiB)
        buffer.decommit(0, 5 * MiB)
        assert buffer.decommit(0, 64 * MiB) == Change(freed=4 * MiB)
        assert buffer.resize(6 * MiB) == Change(mapped=6 * MiB)
        assert buffer.resize(7 * MiB) == Change(mapped=2 * MiB)
        buffer.fill(1)
        assert (buffer.to_host() == 1).all()


def test_sparse_use(stage: Stage) -> None:
    """Far parts of a large capacity are backed by themselves; what lies between is refused, with advice (B3)."""
    del stage
    with remap.ElasticBuffer("64GiB", device=0) as buffer:
        data = random_bytes(3 * MiB)
        for start in (0, 7 * GiB + 1, 63 * GiB + 5):
            buffer.commit(start, start + data.size)
            buffer.copy_from_host(data, offset=start)
        assert sum(buffer.footprint().values()) <= 18 * MiB
        assert np.array_equal(buffer.to_host(shape=data.size, offset=7 * GiB + 1), data)
        for asked in (
            lambda: buffer.fill(0),
            lambda: buffer.to_host(shape=16, offset=GiB),
            lambda: buffer.copy_from_host(data, offset=4),
            lambda: buffer.array("uint8", 16, offset=GiB).__cuda_array_interface__,
        ):
            with pytest.raises(remap.InvalidValueError, match=r"commit\("):
                asked()
        other = buffer.array("uint8", 16, offset=7 * GiB + 16)
        assert np.array_equal(other.to_host(), data[15:31])


def test_after_takes_the_place_of_the_wait(stage: Stage) -> None:
    """`after=` waits for what it names; with None the caller promises, and the host driver sees a broken promise."""
    buffer = remap.ElasticBuffer(64 * MiB, device=0, chunk=GRANULE)
    with buffer, remap.Stream(0) as stream, remap.Stream(0) as other:
        buffer.resize(8 * MiB)
        buffer.fill(1, stream=stream)
        if stage.inner.name == "host":
            chunks, extents = buffer.chunks, buffer.extents
            with pytest.raises(remap.InUseError):
                buffer.resize(0, after=None)
            assert (buffer.chunks, buffer.extents, buffer.size) == (chunks, extents, 8 * MiB)
        other.wait(stream)
        mark = stage.mark()
        assert buffer.decommit(0, 8 * MiB, after=other).freed == 8 * MiB
        waited = [call.arguments for call in stage.since(mark) if call.name == "synchronize_stream"]
        assert waited == [(other.handle,)]


def test_arrays_of_others_keep_it_from_shrinking(stage: Stage) -> None:
    """A buffer that other libraries view can grow, and gives nothing back until they let go (traps 11, 26)."""
    del stage
    with remap.ElasticBuffer(64 * MiB, device=0, chunk=GRANULE) as buffer:
        buffer.resize(4 * MiB)
        array = buffer.array("uint8", 16)
        interface = array.__cuda_array_interface__
        assert interface["data"] == (buffer.address, False)
        buffer.resize(8 * MiB)
        for change in (lambda: buffer.resize(0), lambda: buffer.decommit(6 * MiB, 8 * MiB), buffer.fork):
            with pytest.raises(remap.InUseError, match="of other libraries"):
                change()
        assert buffer.resize(7 * MiB) == Change()
        del array
        assert buffer.resize(0).freed == 8 * MiB


# -- what cannot be --


def test_growth_that_cannot_be(stage: Stage) -> None:
    """Beyond the capacity, backwards, below zero, closed: refused with the rule, and nothing changed (invariant 5)."""
    del stage
    buffer = remap.ElasticBuffer(5 * MiB, device=0)
    assert buffer.capacity == 6 * MiB
    buffer.resize(3 * MiB)
    seen = (buffer.chunks, buffer.extents, buffer.generation)
    for change, rule in (
        (lambda: buffer.resize(6 * MiB + 1), "capacity"),
        (lambda: buffer.commit(0, 7 * MiB), "capacity"),
        (lambda: buffer.decommit(5, 4), "behind"),
        (lambda: buffer.resize(-1), "0 or more"),
        (lambda: buffer.make_private(0, 7 * MiB), "capacity"),
        (lambda: remap.ElasticBuffer(MiB, device=0, resident=[0]), "both"),
        (lambda: remap.ElasticBuffer(MiB, device=0, chunk=3), "multiple"),
        (lambda: remap.ElasticBuffer(MiB, device=99), "device"),
    ):
        with pytest.raises(remap.InvalidValueError, match=rule):
            change()
    assert (buffer.chunks, buffer.extents, buffer.generation) == seen
    buffer.close()
    for use in (lambda: buffer.resize(1), lambda: buffer.commit(0, 1), buffer.fork, lambda: buffer.extents):
        with pytest.raises(remap.ClosedError):
            use()


def test_no_bytes_ask_nothing_of_the_driver(stage: Stage) -> None:
    """A capacity of 0, and sizes of 0, are valid, and make no call about memory (trap 39)."""
    mark = stage.mark()
    with remap.ElasticBuffer(0, device=0) as buffer:
        assert buffer.resize(0) == buffer.commit(0, 0) == buffer.decommit(0, 0) == Change()
        assert (buffer.size, buffer.extents, buffer.chunks, buffer.to_host().size) == (0, (), (), 0)
        with buffer.fork() as twin:
            assert twin.size == 0
    assert not {"reserve", "create", "map", "unmap", "free_range"} & set(stage.names_since(mark))


def test_a_capacity_that_no_address_space_has(stage: Stage) -> None:
    """A capacity beyond the address space says that addresses ran out, and what to do (trap 38)."""
    del stage
    with pytest.raises(remap.OutOfAddressSpaceError, match="smaller capacity="):
        remap.ElasticBuffer("128TiB", device=0)


def test_no_memory_to_grow(stage: Stage) -> None:
    """Growth that finds no memory changes nothing and works later; a geometric chunk gives way (trap 1)."""
    if stage.inner.name == "cuda":
        pytest.skip("it would fill the GPU; the host driver shows it")
    memory = remap.device(0).memory
    with remap.ElasticBuffer(GiB, device=0) as buffer:
        buffer.resize(256 * MiB)
        data = random_bytes(1000)
        buffer.copy_from_host(data, offset=256 * MiB - 1000)
        with remap.create(memory().free - 4 * MiB, at=0):
            seen = (buffer.chunks, buffer.extents, memory().free)
            with pytest.raises(remap.OutOfMemoryError, match="free"):
                buffer.resize(256 * MiB + 5 * MiB)
            assert (buffer.chunks, buffer.extents, memory().free) == seen
            assert buffer.resize(256 * MiB + 1) == Change(mapped=2 * MiB)
        buffer.resize(300 * MiB)
        assert np.array_equal(buffer.to_host(shape=1000, offset=256 * MiB - 1000), data)


def test_poison_where_nobody_may_write(stage: Stage) -> None:
    """Growth goes on where nobody may write, without poison; it comes back with the right to write."""
    del stage
    for first in ("rw", "r"):
        with remap.ElasticBuffer(64 * MiB, device=0, chunk=2 * MiB, access=first, poison=True) as buffer:
            buffer.resize(2 * MiB)
            buffer.set_access({0: "r"})
            buffer.resize(4 * MiB)
            buffer.set_access({0: "rw"})
            buffer.resize(6 * MiB)
            assert (buffer.to_host(shape=2 * MiB, offset=4 * MiB) == 0xCB).all()


def test_poison_shows_what_is_undefined(stage: Stage) -> None:
    """With `poison=True` every newly committed byte is 0xCB, and no other byte changes (invariant 8, trap 18)."""
    del stage
    with remap.ElasticBuffer(64 * MiB, device=0, poison=True) as buffer:
        buffer.resize(3)
        assert (buffer.to_host() == 0xCB).all()
        buffer.fill(1)
        buffer.resize(5)
        assert buffer.to_host().tolist() == [1, 1, 1, 0xCB, 0xCB]
        buffer.resize(2)
        buffer.resize(4)
        assert buffer.to_host().tolist() == [1, 1, 0xCB, 0xCB]


def test_poison_behind_what_a_fork_shares(stage: Stage) -> None:
    """The rest of a chunk that forks share is nobody's to write; what is behind it is poisoned (8)."""
    del stage
    with remap.ElasticBuffer(64 * MiB, device=0, chunk=4 * MiB, poison=True) as buffer:
        buffer.resize(2 * MiB)
        with buffer.fork() as fork:
            with remap.allocate(16 * MiB, resident=0) as dirty:
                dirty.fill(1)
            fork.resize(12 * MiB)
            assert (fork.to_host(offset=4 * MiB, shape=8 * MiB) == 0xCB).all()


# -- asleep --


def test_a_paused_buffer_neither_grows_nor_shrinks(stage: Stage) -> None:
    """Paused, a sparse buffer refuses every change; awake, it has its bytes and grows on; closing asleep is fine."""
    del stage
    memory = remap.device(0).memory
    buffer = remap.ElasticBuffer(256 * MiB, device=0)
    buffer.resize(5 * MiB + 1)
    buffer.commit(100 * MiB, 103 * MiB)
    data = random_bytes(3 * MiB)
    buffer.copy_from_host(data, offset=100 * MiB)
    extents, before = buffer.extents, memory().free
    remap.pause(buffer)
    assert memory().free > before
    for change in (
        lambda: buffer.resize(1),
        lambda: buffer.resize(64 * MiB),
        lambda: buffer.decommit(0, 5 * MiB),
        buffer.make_private,
        buffer.fork,
        lambda: buffer.fill(1, size=1),
    ):
        with pytest.raises(remap.PausedError):
            change()
    remap.resume(buffer)
    assert buffer.extents == extents
    assert np.array_equal(buffer.to_host(shape=data.size, offset=100 * MiB), data)
    buffer.resize(120 * MiB)
    assert np.array_equal(buffer.to_host(shape=data.size, offset=100 * MiB), data)
    remap.migrate(buffer, remap.Host())
    buffer.resize(150 * MiB)
    assert set(buffer.footprint()) == {remap.Host()}, "what is new goes where the rest was moved to"
    assert np.array_equal(buffer.to_host(shape=data.size, offset=100 * MiB), data)
    remap.pause(buffer, keep=None)
    buffer.close()


FORKED = """
import os
import remap
buffer = remap.ElasticBuffer("64MiB", device=0, ahead="8MiB")
buffer.resize(5)
child = os.fork()
if child == 0:
    told = 0
    grow, shrink = (lambda: buffer.resize(6)), (lambda: buffer.decommit(0, 5))
    for change in (grow, lambda: buffer.resize(1 << 23), shrink, buffer.fork):
        try:
            change()
        except remap.ForkedError:
            told += 1
    buffer.close()
    os._exit(told)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
buffer.fill(1)
buffer.close()
"""


def test_after_a_fork_the_child_has_inert_copies(stage: Stage) -> None:
    """In a forked child every change says so, closing does nothing, and the parent goes on (invariant 10, trap 44)."""
    del stage
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", FORKED],
        check=False,
        timeout=100,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_collected_buffer_gives_everything_back(stage: Stage) -> None:
    """A buffer that is collected unclosed warns, naming itself, and its memory is back, forks or not (invariant 4)."""
    before = stage.seen()
    buffer = remap.ElasticBuffer(64 * MiB, device=0, ahead=4 * MiB)
    buffer.resize(20 * MiB)
    twin = buffer.fork()
    with pytest.warns(ResourceWarning, match="elastic buffer"):
        del buffer
        remap.collect()
    twin.make_private()
    twin.fill(1)
    twin.close()
    assert stage.unchanged(before)
