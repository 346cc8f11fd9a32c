"""Values that nobody expects where the wings ask for numbers, times, tags and buffers: taken, or refused at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB
from remap.testing.bench import wait_until


@pytest.mark.parametrize("wrong", [1.5, "x", None, np.float64(2)])
def test_cursors_of_a_ring_count_whole_bytes(wrong: Any) -> None:
    """Half bytes are refused: a cursor that became a float made every later call fail."""
    with remap.RingBuffer(MiB) as ring:
        ring.write(b"abcd")
        for act in (ring.produced, ring.consumed):
            with pytest.raises((TypeError, remap.InvalidValueError)):
                act(wrong)
        with pytest.raises((TypeError, remap.InvalidValueError)):
            ring.window(wrong, 1)
        assert (ring.head, ring.tail) == (4, 0)


def test_numbers_of_numpy_move_a_ring() -> None:
    """NumPy integers of any width count as the numbers they are, and leave whole Python numbers behind."""
    with remap.RingBuffer(MiB) as ring:
        ring.write(b"abcd")
        ring.consumed(np.int8(1))
        ring.produced(np.uint8(200))
        assert (ring.head, ring.tail, type(ring.head), type(ring.tail)) == (204, 1, int, int)
        numbers: list[Any] = [np.uint8(2), np.int64(2)]
        assert ring.window(*numbers).to_host().tobytes() == b"cd"


def test_a_closed_ring_moves_no_cursor() -> None:
    """Moving a cursor of a closed ring is a use after close (invariant 4)."""
    ring = remap.RingBuffer(MiB)
    ring.close()
    for act in (ring.produced, ring.consumed):
        with pytest.raises(remap.ClosedError):
            act(0)


@pytest.mark.parametrize("wait", [math.nan, -1.0])
def test_a_wait_that_never_ends_is_refused(wait: float) -> None:
    """A resume that waits for no number of seconds is refused before anything happens: NaN would wait for ever."""
    with remap.allocate(MiB) as buffer:
        remap.pause(buffer, None)
        with pytest.raises(remap.InvalidValueError, match="wait"):
            remap.resume(buffer, wait=wait)
        assert buffer.paused


def test_a_limit_holds_from_the_call_that_sets_it() -> None:
    """`limit=` and `prepare=` of one call are weighed against each other, and not against the limit before."""
    pool = remap.host_pool(limit=0)
    try:
        with pytest.raises(remap.OutOfMemoryError, match="limit is 1 MiB"):
            remap.host_pool(limit=MiB, prepare=MiB)  # memory is held in slabs of 32 MiB
        assert pool.statistics().limit == 0
        remap.host_pool(limit="1GiB", prepare=MiB)
        assert pool.statistics().limit == 1 << 30
    finally:
        remap.host_pool(prepare=0)
        remap.host_pool(limit=1 << 60)
        pool.wait()
    assert wait_until(lambda: pool.statistics().held == 0)


@pytest.mark.parametrize("wrong", [None, 5, "text"])
def test_only_a_buffer_has_a_backup(wrong: Any) -> None:
    """Anything else is a TypeError that says so."""
    with pytest.raises(TypeError, match="backup"):
        remap.backup(wrong)


def test_pool_memory_has_no_backup() -> None:
    """Memory of a device's pool cannot sleep, and so has no backup."""
    with remap.DeviceBox.zeroed(4, "uint8") as box, pytest.raises(TypeError, match="backup"):
        remap.backup(box)  # type: ignore[arg-type]


def test_a_buffer_is_once_in_a_group() -> None:
    """Blocks of one tag inside each other put a buffer into the group once: its size is not counted twice."""
    with remap.group("nested") as outer, remap.group("nested") as inner, remap.allocate(MiB) as buffer:
        assert outer is inner
        assert outer.buffers == (buffer,)
        assert outer.size == buffer.size


@pytest.mark.parametrize("wrong", [None, 5, b"text"])
def test_a_tag_is_text(wrong: Any) -> None:
    """Nobody could name a group of another kind of tag."""
    with pytest.raises(TypeError, match="tag"), remap.group(wrong):
        pass
