"""Ring buffers: one memory at two neighbouring addresses (B8)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import remap
from remap import Access, MiB
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

SIZE = 2 * MiB


def test_bytes_written_over_the_end_are_at_the_beginning(stage: Stage) -> None:
    """Byte `size + i` is byte i, in both directions; one allocation is behind both, and counts once."""
    memory = remap.device(0).memory
    before, mark = memory().free, stage.mark()
    with remap.RingBuffer(SIZE - 5, device=0) as ring:
        assert ring.size == SIZE
        assert before - memory().free == SIZE
        assert stage.names_since(mark).count("create") == 1
        assert ring.footprint() == remap.footprint([ring]) == {remap.device(0).location: SIZE}
        first, second = ring.chunks
        assert (first.address + SIZE, first.size) == (second.address, second.size)
        data = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
        ring.copy_from_host(data, offset=SIZE // 2)
        whole = ring.to_host()
        assert whole.size == SIZE
        assert np.array_equal(whole, np.roll(data, SIZE // 2))
        ring.fill(9, size=1)
        assert ring.to_host(shape=2, offset=SIZE - 1)[1] == 9
        with pytest.raises(remap.InvalidValueError):
            ring.fill(1, offset=SIZE, size=SIZE + 1)


def test_cursors(stage: Stage) -> None:
    """What is written is read in order, whatever wraps; more than fits, or than is there, is refused whole."""
    del stage
    rng = np.random.default_rng(1)
    with remap.RingBuffer(SIZE, device=0) as ring:
        written, read = bytearray(), bytearray()
        for _ in range(40):
            data = rng.integers(0, 256, int(rng.integers(0, ring.free + 1)), dtype=np.uint8)
            assert ring.write(data) == data.size
            written += data.tobytes()
            read += ring.read(int(rng.integers(0, ring.filled + 1))).tobytes()
            assert (ring.head, ring.tail) == (len(written), len(read))
        read += ring.read().tobytes()
        assert read == written
        ring.write(np.arange(10, dtype=np.uint16))
        head = ring.head
        for refused in (
            lambda: ring.write(np.zeros(SIZE - 19, np.uint8)),
            lambda: ring.read(21),
            lambda: ring.produced(SIZE - 19),
            lambda: ring.consumed(21),
        ):
            with pytest.raises(remap.InvalidValueError):
                refused()
        assert (ring.head, ring.filled) == (head, 20)
        assert ring.read().view(np.uint16).tolist() == list(range(10))


def test_cursors_that_would_pass_each_other(stage: Stage) -> None:
    """A cursor that would pass the other stays where it is, and the message says what can be done."""
    del stage
    with remap.RingBuffer(SIZE) as ring:
        calls: list[Callable[[], object]] = [
            lambda: ring.read(1),
            lambda: ring.consumed(1),
            lambda: ring.produced(SIZE + 1),
            lambda: ring.write(np.zeros(SIZE + 1, "uint8")),
        ]
        for call in calls:
            with pytest.raises(remap.InvalidValueError) as caught:
                call()
            assert caught.value.next_step
        assert (ring.head, ring.tail) == (0, 0)


def test_windows_never_wrap(stage: Stage) -> None:
    """A window is one contiguous array wherever it begins, and more than the ring is refused."""
    del stage
    with remap.RingBuffer(SIZE, device=0) as ring:
        ring.produced(SIZE - 8)
        ring.consumed(SIZE - 8)
        values = np.arange(1000, dtype=np.float32)
        window = ring.window(ring.head, 1000, "float32")
        window.copy_from(values)
        ring.produced(window.nbytes)
        assert window.__cuda_array_interface__["data"][0] == ring.address + SIZE - 8
        assert np.array_equal(window.to_host(), values)
        assert np.array_equal(window.view("uint8").view("float32").to_host(), values)
        assert np.array_equal(ring.read(4000).view(np.float32), values)
        assert ring.window(3 * SIZE + 4, (2, 2), "int32").shape == (2, 2)
        with pytest.raises(remap.InvalidValueError, match="longer"):
            ring.window(0, SIZE + 1)
        del window


def test_a_second_view_with_rights_of_its_own(stage: Stage) -> None:
    """A read-only second view is read-only to the driver; writes go through the first, in pieces where they wrap."""
    here = remap.device(0).location
    with remap.RingBuffer(SIZE, device=0, second="r") as ring:
        first, second = ring.chunks
        assert stage.inner.get_access(first.address, here) is Access.READ_WRITE
        assert stage.inner.get_access(second.address, here) is Access.READ
        assert ring.access_to_second == {here: Access.READ}
        with pytest.raises(remap.AccessError, match="second view"):
            ring.fill(1, offset=SIZE - 1, size=2)
        assert ring.window(SIZE - 4, 8).__cuda_array_interface__["data"][1] is True
        ring.produced(SIZE - 3)
        ring.consumed(SIZE - 3)
        ring.write(b"abcdef")
        assert ring.read(6).tobytes() == b"abcdef"
    with (
        remap.RingBuffer(SIZE, device=0, second="none") as ring,
        pytest.raises(remap.AccessError, match="not readable"),
    ):
        ring.to_host(shape=2, offset=SIZE - 1)


def test_rights_of_both_views_change_together(stage: Stage) -> None:
    """`set_access` holds for both views, and for the memory after a pause."""
    here = remap.device(0).location
    with remap.RingBuffer(SIZE, device=0) as ring:
        ring.fill(4)
        ring.set_access({0: "r"})
        assert {stage.inner.get_access(chunk.address, here) for chunk in ring.chunks} == {Access.READ}
        with pytest.raises(remap.AccessError):
            ring.write(b"1")


def views(stage: Stage, ring: remap.RingBuffer, place: int) -> list[str]:
    """Return the right of a device to each view, as the driver has it."""
    return [str(stage.inner.get_access(one.address, remap.device(place).location)) for one in ring.chunks]


def test_a_refused_change_of_rights(stage: Stage) -> None:
    """Each view keeps the right that it had, whichever view was refused (invariant 5)."""
    if remap.device(0).capabilities["coherent"]:
        pytest.skip("the CPU can be granted access here")
    with remap.RingBuffer(SIZE, device=0, second="r") as ring:
        with pytest.raises(remap.RemapError):
            ring.set_access({0: "none", remap.Host(): "r"})
        for nth in (1, 2):
            stage.faulty.fail("set_access", nth=nth)
            with pytest.raises(remap.DriverError):
                ring.set_access({0: "none"})
            stage.faulty.heal()
        assert views(stage, ring, 0) == ["rw", "r"]
        assert [*ring.access.values(), *ring.access_to_second.values()] == ["rw", "r"]
        ring.set_access({0: "rw"})
        assert views(stage, ring, 0) == ["rw", "rw"]
        ring.fill(1, offset=SIZE - 1, size=2)


def test_a_right_to_the_second_view_alone_is_taken(stage: Stage) -> None:
    """Taking it waits for the work that may still use it, as taking one to the first view does (invariant 7)."""
    out = np.empty(16, np.uint8)
    with remap.RingBuffer(SIZE, device=0, access="r", second="rw") as ring, remap.Stream(0) as stream:
        ring.copy_to_host(out, offset=SIZE, stream=stream)
        mark = stage.mark()
        ring.set_access({0: "r"})
        assert "synchronize_stream" in stage.names_since(mark)
        assert views(stage, ring, 0) == ["r", "r"]


@pytest.mark.two_devices
def test_rights_of_one_do_not_bind_another(stage: Stage) -> None:
    """Who may write both views writes over the end, whatever others may do; who may not write the second does not."""
    with remap.RingBuffer(SIZE, device=0) as ring, remap.Stream(0) as stream:
        for right in ("r", "none"):
            ring.set_access({1: right})
            ring.fill(5, offset=SIZE - 1, size=2)
            ring.fill(6, offset=SIZE - 1, size=2, stream=stream)
            assert ring.window(SIZE - 4, 8).__cuda_array_interface__["data"][1] is False
        assert set(ring.access_to_second) == {remap.device(0).location}
    with remap.RingBuffer(SIZE, device=0, accessing=[0, 1], second="r") as ring:
        ring.set_access({0: "rw"})
        assert (views(stage, ring, 0), views(stage, ring, 1)) == (["rw", "rw"], ["rw", "r"])
        ring.fill(5, offset=SIZE - 1, size=2)
        with (
            remap.Stream(1) as other,
            pytest.raises(remap.AccessError, match="not writable for device 1"),
        ):
            ring.fill(5, offset=SIZE - 1, size=2, stream=other)


@remap.kernel
def one_each(out: remap.DisjointSlice) -> None:
    """Write ones."""
    out[remap.index_1d()] = 1


@pytest.mark.two_devices
def test_kernels_over_the_end(stage: Stage) -> None:
    """A kernel writes a window over the end where its device may, also when a peer may only read."""
    del stage
    with remap.RingBuffer(SIZE, device=0) as ring:
        ring.fill(0)
        ring.set_access({1: "r"})
        window = ring.window(SIZE - 512, 1024)
        one_each.launch(window, grid=4, block=256)
        assert (window.to_host() == 1).all()
        del window


def test_a_ring_sleeps_and_wakes(stage: Stage) -> None:
    """Paused, a ring gives its memory back once; awake, both views show the same memory again."""
    memory = remap.device(0).memory
    with remap.RingBuffer(SIZE, device=0, second="r") as ring:
        before, address = memory().free, ring.address
        data = np.random.default_rng(2).integers(0, 256, SIZE, dtype=np.uint8)
        ring.write(data)
        remap.pause(ring)
        assert memory().free - before == SIZE
        with pytest.raises(remap.PausedError):
            ring.read()
        remap.resume(ring)
        assert (ring.address, memory().free) == (address, before)
        assert np.array_equal(ring.read(), data)
        ring.write(b"xy")
        assert ring.to_host(shape=2, offset=SIZE).tobytes() == b"xy"
        assert stage.inner.get_access(ring.chunks[1].address, remap.device(0).location) is Access.READ


def test_rings_that_cannot_be(stage: Stage) -> None:
    """A ring lies on one device; one of no bytes is valid (trap 39)."""
    del stage
    with pytest.raises(remap.InvalidValueError, match="one place"):
        remap.RingBuffer(SIZE, device=[0, remap.Host()], accessing=0)  # type: ignore[arg-type]
    with remap.RingBuffer(0, device=0) as ring:
        assert (ring.size, ring.write(b""), ring.read().size, ring.chunks) == (0, 0, 0, ())
