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
        pytest.raises(remap.AccessError, match="nobody"),
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
