"""Shared memory, barriers, atomics, aliases: right results, and what the host driver finds and a GPU does not (D6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB
from remap.errors import AccessError, CompileError, KernelError, LaunchError

T = 16


@remap.kernel
def total(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Sum up 256 elements a block."""
    part = remap.shared_array(256, np.float32)
    t = remap.thread.x
    i = remap.index_1d()
    part[t] = x[i]
    remap.barrier()
    half = 128
    while half > 0:
        if t < half:
            part[t] += part[t + half]
        remap.barrier()
        half //= 2
    if t == 0:
        remap.unchecked(out)[remap.block.x] = part[0]


@remap.kernel
def transpose(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Transpose by tiles, with a column of padding against bank conflicts."""
    tile = remap.shared_array((T, T + 1), np.float32)
    row, col = remap.block.y * T + remap.thread.y, remap.block.x * T + remap.thread.x
    tile[remap.thread.y, remap.thread.x] = x.get(row, col, 0)
    remap.barrier()
    row, col = remap.block.x * T + remap.thread.y, remap.block.y * T + remap.thread.x
    if row < out.shape[0] and col < out.shape[1]:
        remap.unchecked(out)[row, col] = tile[remap.thread.x, remap.thread.y]


def host_only() -> None:
    """Skip on CUDA, which does not tell."""
    if remap.driver().name != "host":
        pytest.skip("a GPU does not tell")


def test_a_reduction(place: Any) -> None:
    """Blocks sum up their elements through shared memory; each order of sums is the source's, so bits are equal."""
    values = np.random.default_rng(0).random(100 * 256 - 3, dtype=np.float32)
    x, out = place(values), place(100, "float32")
    place.launch(total, x, out, grid=100, block=256)
    part = np.append(values, np.zeros(3, np.float32)).reshape(100, 256)
    while part.shape[1] > 1:
        half = part.shape[1] // 2
        part = part[:, :half] + part[:, half:]
    assert np.array_equal(out.to_host(), part[:, 0])


def test_a_transpose(place: Any) -> None:
    """Tiles turn a matrix over, ragged edges included."""
    values = np.random.default_rng(1).random((50, 37), dtype=np.float32)
    x, out = place(values), place((37, 50), "float32")
    place.launch(transpose, x, out, grid=(3, 4), block=(T, T))
    assert np.array_equal(out.to_host(), values.T)


def test_dynamic_shared_memory_is_divided_by_offsets(place: Any) -> None:
    """Two views of the dynamic block with their own types and offsets hold what was put there."""

    @remap.kernel
    def split(x: remap.Slice, out: remap.DisjointSlice) -> None:
        floats = remap.dynamic_shared(np.float64, length=32)
        bytes_ = remap.dynamic_shared(np.uint8, offset=256)
        t = remap.thread.x
        i = remap.index_1d()
        floats[t] = x[i]
        bytes_[t] = t
        remap.barrier()
        out[i] = floats[31 - t] + bytes_[len(bytes_) - 1 - t]

    values = np.random.default_rng(2).random(64)
    x, out = place(values), place(64, "float64")
    place.launch(split, x, out, grid=2, block=32, shared=256 + 32)
    turned = np.arange(32)[::-1]
    assert np.array_equal(
        out.to_host(), np.concatenate([values[:32][::-1], values[32:][::-1]]) + np.tile(turned, 2)
    )


def test_too_little_dynamic_memory_is_refused(place: Any) -> None:
    """A launch gives at least what the kernel's offsets and lengths need."""

    @remap.kernel
    def need(out: remap.DisjointSlice) -> None:
        s = remap.dynamic_shared(np.float32, offset=128, length=8)
        s[remap.thread.x] = 1
        out[remap.index_1d()] = s[remap.thread.x]

    with pytest.raises(LaunchError, match="uses 160 bytes"):
        place.launch(need, place(8, "float32"), grid=1, block=8, shared=159)


def test_too_much_shared_memory_is_refused(place: Any) -> None:
    """Too much is refused before the launch, with the limit."""

    @remap.kernel
    def static(out: remap.DisjointSlice) -> None:
        s = remap.shared_array((128, 128), np.float32)
        s[0, 0] = 1
        out[remap.index_1d()] = s[0, 0]

    with pytest.raises(CompileError, match="at most 49152 bytes"):
        place.launch(static, place(8, "float32"), grid=1, block=1)
    x, out = place(256, "float32"), place(1, "float32")
    limit = remap.device().properties.shared_memory_per_block_optin
    with pytest.raises(LaunchError, match=r"dynamic shared memory.*smaller tiles"):
        place.launch(total, x, out, grid=1, block=256, shared=limit)


def test_the_shape_of_a_shared_array_is_a_constant(place: Any) -> None:
    """A shape that is known at run time only is refused with the line."""

    @remap.kernel
    def wrong(out: remap.DisjointSlice, n: int) -> None:
        s = remap.shared_array(n, np.float32)
        s[0] = 1
        out[remap.index_1d()] = s[0]

    with pytest.raises(CompileError, match="known when the kernel is compiled"):
        place.launch(wrong, place(8, "float32"), 8, grid=1, block=8)


# -- atomics --


def test_atomics(place: Any) -> None:
    """Every thread's contribution counts, however many meet."""

    @remap.kernel
    def count(
        x: remap.Slice, bins: remap.DisjointSlice, low: remap.DisjointSlice, high: remap.DisjointSlice
    ) -> None:
        i = remap.index_1d()
        if i < len(x):
            remap.atomic_add(bins, x[i] % 8, 1)
            remap.atomic_min(low, 0, x[i])
            remap.atomic_max(high, 0, x[i])

    values = np.random.default_rng(3).integers(-1000, 1000, 3000, dtype=np.int32)
    x, bins = place(values), place(8, "int32")
    low, high = place(np.full(1, 5000, np.int32)), place(np.full(1, -5000, np.int32))
    place.launch(count, x, bins, low, high, grid=12, block=256)
    assert np.array_equal(bins.to_host(), np.bincount(values % 8, minlength=8))
    assert (low.to_host()[0], high.to_host()[0]) == (values.min(), values.max())


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64", "float32", "float64"])
def test_atomics_give_what_was_there(place: Any, dtype: str) -> None:
    """Each operation returns the old value: of n threads that add 1, each sees another number."""

    @remap.kernel
    def tickets(counter: remap.DisjointSlice, seen: remap.DisjointSlice, last: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        seen[i] = remap.atomic_add(counter, 0, 1)
        remap.atomic_exchange(last, 0, seen[i])
        remap.atomic_cas(last, 1, 0, 7)
        remap.atomic_min(last, 2, 3)
        remap.atomic_max(last, 2, 2)

    counter, seen, last = place(1, dtype), place(100, dtype), place(np.array([0, 0, 9], dtype))
    place.launch(tickets, counter, seen, last, grid=4, block=25)
    assert counter.to_host()[0] == 100
    assert sorted(seen.to_host().tolist()) == list(range(100))
    assert last.to_host()[0] in range(100)
    assert last.to_host()[1:].tolist() == [7, 3]


def test_atomics_in_shared_memory(place: Any) -> None:
    """A histogram of each block in shared memory, added to the whole one."""

    @remap.kernel
    def histogram(x: remap.Slice, bins: remap.DisjointSlice) -> None:
        own = remap.shared_array(16, np.uint32)
        t = remap.thread.x
        i = remap.index_1d()
        if t < 16:
            own[t] = 0
        remap.barrier()
        if i < len(x):
            remap.atomic_add(own, x[i], 1)
        remap.barrier()
        if t < 16:
            remap.atomic_add(bins, t, own[t])

    values = np.random.default_rng(4).integers(0, 16, 1000, dtype=np.uint8)
    x, bins = place(values), place(16, "uint32")
    place.launch(histogram, x, bins, grid=8, block=128)
    assert np.array_equal(bins.to_host(), np.bincount(values, minlength=16))


# -- what the host driver finds --


def launch_and_find(place: Any, kernel: Any, *arguments: Any, **shape: Any) -> str:
    """Return what the host driver reports of a launch."""
    place.launch(kernel, *arguments, **shape)
    with pytest.raises(KernelError) as caught:
        remap.device().synchronize()
    remap.device().synchronize()  # told once
    return str(caught.value)


def test_a_missing_barrier(place: Any) -> None:
    """Shared memory that another thread wrote, read with no barrier between: both threads are named."""
    host_only()

    @remap.kernel
    def missing(x: remap.Slice, out: remap.DisjointSlice) -> None:
        s = remap.shared_array(64, np.float32)
        t = remap.thread.x
        i = remap.index_1d()
        s[t] = x[i]
        out[i] = s[63 - t]

    found = launch_and_find(place, missing, place(128, "float32"), place(128, "float32"), grid=2, block=64)
    assert "kernel missing" in found
    assert (
        "block 0, thread 0: shared s[63]: read of what another thread wrote, with no barrier between" in found
    )
    assert "the other is block 0, thread 63" in found
    assert f"test_shared.py:{missing.function.__code__.co_firstlineno + 6}" in found


def test_a_missing_second_barrier(place: Any) -> None:
    """Shared memory that is overwritten while others may still read it."""
    host_only()

    @remap.kernel
    def again(x: remap.Slice, out: remap.DisjointSlice) -> None:
        s = remap.shared_array(32, np.float32)
        t = remap.thread.x
        i = remap.index_1d()
        s[t] = x[i]
        remap.barrier()
        v = s[31 - t]
        s[t] = v
        out[i] = v

    found = launch_and_find(place, again, place(32, "float32"), place(32, "float32"), grid=1, block=32)
    assert "write to an element that another thread reads, with no barrier between" in found


def test_shared_memory_that_nobody_wrote(place: Any) -> None:
    """The contents of shared memory are undefined until something is written."""
    host_only()

    @remap.kernel
    def never(out: remap.DisjointSlice) -> None:
        s = remap.shared_array(32, np.float32)
        out[remap.index_1d()] = s[remap.thread.x]

    found = launch_and_find(place, never, place(32, "float32"), grid=1, block=32)
    assert "shared s[0]: read of shared memory that nothing was written to" in found


def test_two_threads_write_one_shared_element(place: Any) -> None:
    """Also within one statement."""
    host_only()

    @remap.kernel
    def collide(out: remap.DisjointSlice) -> None:
        s = remap.shared_array(16, np.int64)
        s[remap.thread.x // 2] = remap.thread.x
        remap.barrier()
        out[remap.index_1d()] = s[0]

    found = launch_and_find(place, collide, place(32, "int64"), grid=1, block=32)
    assert "write to an element that another thread writes, too" in found


def test_a_barrier_that_not_all_threads_reach(place: Any) -> None:
    """The block, how many reach it and one thread that does not are named."""
    host_only()

    @remap.kernel
    def some(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        if i < 40:
            remap.barrier()
        out[i] = 1

    found = launch_and_find(place, some, place(64, "int64"), grid=2, block=32)
    assert "barrier reached by 8 of the 32 threads of the block" in found
    assert "block 1, thread 8 does not reach it" in found


def test_a_thread_that_returned_does_not_reach_the_barrier(place: Any) -> None:
    """The classic: threads beyond the end return, and the others wait for them."""
    host_only()

    @remap.kernel
    def early(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        if i >= len(out):
            return
        remap.barrier()
        out[i] = 1

    found = launch_and_find(place, early, place(50, "int64"), grid=2, block=32)
    assert "barrier reached by 18 of the 32" in found


def test_a_barrier_in_a_loop_that_threads_leave_at_different_times(place: Any) -> None:
    """Each round is looked at by itself."""
    host_only()

    @remap.kernel
    def uneven(out: remap.DisjointSlice) -> None:
        for _ in range(remap.thread.x // 8):
            remap.barrier()
        out[remap.index_1d()] = 1

    assert "barrier reached by 24 of the 32" in launch_and_find(
        place, uneven, place(32, "int64"), grid=1, block=32
    )


def test_blocks_may_pass_different_numbers_of_barriers(place: Any) -> None:
    """What is the same for a block may differ between blocks."""

    @remap.kernel
    def blocks(out: remap.DisjointSlice) -> None:
        s = remap.shared_array(32, np.int64)
        t = remap.thread.x
        s[t] = t
        remap.barrier()
        for _ in range(remap.block.x):
            v = s[(t + 1) % 32]
            remap.barrier()
            s[t] = v
            remap.barrier()
        out[remap.index_1d()] = s[t]

    out = place(160, "int64")
    place.launch(blocks, out, grid=5, block=32)
    expected = [(t + block) % 32 for block in range(5) for t in range(32)]
    assert out.to_host().tolist() == expected


def test_a_plain_write_beside_an_atomic_one(place: Any) -> None:
    """Atomics order themselves against each other only."""
    host_only()

    @remap.kernel
    def both(out: remap.DisjointSlice) -> None:
        remap.atomic_add(out, 0, 1)
        if remap.thread.x == 3:
            remap.unchecked(out)[0] = 5

    assert "write to an element that another thread wrote" in launch_and_find(
        place, both, place(1, "int64"), grid=1, block=32
    )


def test_a_barrier_does_not_order_blocks(place: Any) -> None:
    """Memory of the device that another block wrote is not ordered by a barrier; within a block it is."""

    @remap.kernel
    def within(out: remap.DisjointSlice) -> None:
        u = remap.unchecked(out)
        i = remap.block.x * 32 + remap.thread.x
        u[i] = remap.thread.x
        remap.barrier()
        v = u[remap.block.x * 32 + 31 - remap.thread.x]
        remap.barrier()
        u[i] = v

    @remap.kernel
    def across(out: remap.DisjointSlice) -> None:
        u = remap.unchecked(out)
        i = remap.block.x * 32 + remap.thread.x
        u[i] = remap.thread.x
        remap.barrier()
        v = u[(i + 32) % len(out)]
        remap.barrier()
        u[i] = v

    out = place(128, "int64")
    place.launch(within, out, grid=4, block=32)
    assert out.to_host().tolist() == list(range(31, -1, -1)) * 4
    host_only()
    found = launch_and_find(place, across, out, grid=4, block=32)
    assert "read of what another thread wrote, with nothing to order the two" in found


# -- aliases --


@pytest.fixture
def aliases(place: Any) -> Any:
    """Give one allocation as two arrays at different addresses, and close all of it afterwards."""
    at = remap.device()
    memory = remap.create(2 * MiB, at=at)
    addresses = remap.reserve(4 * MiB)
    first = addresses.map(memory, offset=0, access={at: "rw"})
    second = addresses.map(memory, offset=2 * MiB, access={at: "rw"})
    first.fill(0)
    yield first.array("int32", 64), second.array("int32", 64)
    for one in (first, second, addresses, memory):
        one.close()


@remap.kernel
def copy(x: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    out[i] = x[i] + 1


def test_an_overlapping_output_is_refused(place: Any, aliases: Any) -> None:
    """A DisjointSlice shares no memory with another argument, not through an alias either (D10)."""
    first, second = aliases
    buffer = place(64, "int32").owner
    front, back = buffer.array("int32", 40), buffer.array("int32", 40, offset=80)
    for x, out in ((first, first), (first, second), (second, first), (front, back)):
        with pytest.raises(LaunchError, match=r"'x' and 'out'|'out' and 'x'") as caught:
            place.launch(copy, x, out, grid=1, block=64)
        assert "allow_overlap=True" in str(caught.value)
    place.launch(copy, front, buffer.array("int32", 20, offset=160), grid=1, block=64)


def test_an_alias_that_nobody_could_touch_is_found_when_it_has_rights(place: Any) -> None:
    """What the driver could not say of memory without rights is asked again: an alias is refused later on (D10)."""
    at = remap.device()
    with (
        remap.create(2 * MiB, at=at) as memory,
        remap.reserve(4 * MiB) as addresses,
        addresses.map(memory, offset=0, access={at: "rw"}) as one,
        addresses.map(memory, offset=2 * MiB) as other,
        remap.Stream(at) as stream,  # without one, a launch is refused before anything else is asked
    ):
        x, out = other.array("int32", 64), one.array("int32", 64)
        for _ in range(2):
            with pytest.raises(AccessError):
                place.launch(copy, x, out, grid=1, block=64, stream=stream)
        other.set_access({at: "r"})
        with pytest.raises(LaunchError, match="same memory"):
            place.launch(copy, x, out, grid=1, block=64, stream=stream)


def test_the_overlap_can_be_allowed(place: Any, aliases: Any) -> None:
    """In place is fine where each thread reads what it alone writes."""
    first, _ = aliases
    place.launch(copy, first, first, grid=1, block=64, allow_overlap=True)
    assert first.to_host().tolist() == [1] * 64


def test_double_writes_through_two_addresses_are_found(place: Any, aliases: Any) -> None:
    """Elements are known by the memory behind them and not by their addresses (B8)."""
    host_only()

    @remap.kernel
    def both(a: remap.DisjointSlice, b: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        a[i] = 1
        remap.unchecked(b)[63 - i] = 2

    first, second = aliases
    found = launch_and_find(place, both, first, second, grid=1, block=64, allow_overlap=True)
    assert "write to an element that another thread wrote" in found


def test_the_unfenced_program_is_found(place: Any, aliases: Any) -> None:
    """A write through one address is seen through the other only after alias_fence() (B8)."""

    @remap.kernel
    def fenced(a: remap.DisjointSlice, b: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        a[i] = int(i) + 5
        remap.alias_fence()
        out[i] = b[i]

    @remap.kernel
    def unfenced(a: remap.DisjointSlice, b: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        a[i] = int(i) + 5
        out[i] = b[i]

    first, second = aliases
    out = place(64, "int32")
    place.launch(fenced, first, second, out, grid=1, block=64, allow_overlap=True)
    assert out.to_host().tolist() == list(range(5, 69))
    host_only()
    found = launch_and_find(place, unfenced, first, second, out, grid=1, block=64, allow_overlap=True)
    assert (
        "read through another address than what was written through, with no alias_fence() between" in found
    )


def test_the_two_views_of_a_ring_are_one_memory(place: Any) -> None:
    """A window of the second view of a ring buffer shares memory with the same window of the first."""
    with remap.RingBuffer(2 * MiB, device=0) as ring:
        half = ring.size // 2
        first, other = ring.window(0, 64, "int32"), ring.window(half, 64, "int32")
        wrapped = remap.DeviceArray.over(ring, "int32", 64, ring.size - 128)
        with pytest.raises(LaunchError, match="same memory"):
            place.launch(copy, first, wrapped, grid=1, block=64)
        place.launch(copy, other, first, grid=1, block=64)
        remap.device(0).synchronize()
