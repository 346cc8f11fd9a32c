"""What the host driver takes for a race and what it does not: barriers, atomics and a thread's own elements (D6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remap
from remap.errors import KernelError
from remap.kernels.shadows import BlockShadow, GridShadow, Who

N = 64


def host_only() -> None:
    """Skip on CUDA, which does not tell."""
    if remap.driver().name != "host":
        pytest.skip("a GPU does not tell")


def told(place: Any, kernel: Any, *arguments: Any, **shape: Any) -> str:
    """Return what the host driver reports of a launch."""
    host_only()
    place.launch(kernel, *arguments, **shape)
    with pytest.raises(KernelError) as caught:
        remap.device().synchronize()
    return str(caught.value)


def test_a_barrier_orders_many_readers_before_a_writer(place: Any) -> None:
    """All threads of a block read an element of the device's memory, and after a barrier one of them writes it."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice, rounds: int) -> None:
        u = remap.unchecked(out)
        for _ in range(rounds):
            v = u[remap.block.x]
            remap.barrier()
            if remap.thread.x == 5:
                u[remap.block.x] = v + 1
            remap.barrier()

    out = place(3, "int64")
    place.launch(kernel, out, 4, grid=3, block=N)
    assert out.to_host().tolist() == [4, 4, 4]


def test_a_barrier_does_not_order_readers_of_another_block(place: Any) -> None:
    """Many readers of one block are behind its barrier; those of another block never are."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        u = remap.unchecked(out)
        v = u[0]
        remap.barrier()
        if remap.block.x == 1 and remap.thread.x == 0:
            u[0] = v + 1

    found = told(place, kernel, place(1, "int64"), grid=2, block=N)
    assert "write to an element that another thread reads, with nothing to order the two" in found


def test_many_readers_without_a_barrier(place: Any) -> None:
    """The writer has to be behind a barrier that lies after the last reader."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        u = remap.unchecked(out)
        v = u[0]
        remap.barrier()
        v = u[0]
        if remap.thread.x == 0:
            u[0] = v + 1

    found = told(place, kernel, place(1, "int64"), grid=1, block=N)
    assert "write to an element that another thread reads" in found


@remap.kernel
def histogram(x: remap.Slice, bins: remap.DisjointSlice, out: remap.DisjointSlice, wait: bool) -> None:
    i = remap.index_1d()
    remap.atomic_add(bins, x[i] % len(bins), 1)
    if wait:
        remap.barrier()
    out[i] = remap.unchecked(bins)[remap.thread.x % len(bins)]


def test_a_barrier_orders_atomics_before_a_reader(place: Any) -> None:
    """What the atomics of a block made of the device's memory can be read after a barrier, in one block."""
    values = np.random.default_rng(0).integers(0, 100, N)
    x, bins, out = place(values), place(8, "int32"), place(N, "int32")
    place.launch(histogram, x, bins, out, True, grid=1, block=N)
    expected = np.bincount(values % 8, minlength=8)
    assert np.array_equal(out.to_host(), np.tile(expected, 8))


@pytest.mark.parametrize(("grid", "wait"), [(2, True), (1, False)])
def test_atomics_and_a_reader_with_nothing_between(place: Any, grid: int, wait: bool) -> None:
    """No barrier orders the atomics of another block, nor those of the own one where there is none."""
    x, bins, out = place(np.arange(grid * N)), place(8, "int32"), place(grid * N, "int32")
    found = told(place, histogram, x, bins, out, wait, grid=grid, block=N)
    assert "read of what another thread wrote, with nothing to order the two" in found


@pytest.mark.parametrize("shared", [True, False])
def test_a_thread_reads_what_its_own_atomic_made(place: Any, shared: bool) -> None:
    """An element that one thread alone uses has an order: that of the thread."""

    @remap.kernel
    def in_shared(out: remap.DisjointSlice) -> None:
        s = remap.shared_array(64, np.int32)
        t = remap.thread.x
        s[t] = 0
        old = remap.atomic_add(s, t, 5)
        again = remap.atomic_add(s, t, 2)
        s[t] = s[t] + 1
        remap.barrier()
        last = remap.atomic_max(s, t, 3)
        out[remap.index_1d()] = s[t] * 1000 + last * 100 + again * 10 + old

    @remap.kernel
    def in_memory(out: remap.DisjointSlice) -> None:
        t = remap.block.x * 64 + remap.thread.x
        u = remap.unchecked(out)
        u[t] = 0
        old = remap.atomic_add(out, t, 5)
        again = remap.atomic_add(out, t, 2)
        u[t] = u[t] + 1
        remap.barrier()
        last = remap.atomic_max(out, t, 3)
        u[t] = u[t] * 1000 + last * 100 + again * 10 + old

    out = place(2 * N, "int32")
    place.launch(in_shared if shared else in_memory, out, grid=2, block=N)
    assert out.to_host().tolist() == [8850] * 2 * N


@pytest.mark.parametrize("shared", [True, False])
def test_a_plain_write_is_no_atomic_for_the_atomics_of_others(place: Any, shared: bool) -> None:
    """A thread's own atomic does not hide its plain write before, with no barrier between it and another's atomic."""

    @remap.kernel
    def in_shared(out: remap.DisjointSlice) -> None:
        s = remap.shared_array(64, np.int32)
        t = remap.thread.x
        s[t] = 0
        remap.atomic_add(s, t, 5)
        remap.atomic_add(s, (t + 1) % 64, 5)
        out[remap.index_1d()] = 1

    @remap.kernel
    def in_memory(out: remap.DisjointSlice) -> None:
        t = remap.thread.x
        remap.unchecked(out)[t] = 0
        remap.atomic_add(out, t, 5)
        remap.atomic_add(out, (t + 1) % 64, 5)

    found = told(place, in_shared if shared else in_memory, place(N, "int32"), grid=1, block=N)
    assert "write to an element that another thread wrote" in found


@pytest.mark.parametrize("shared", [True, False])
def test_the_atomics_of_several_threads_and_a_reader(place: Any, shared: bool) -> None:
    """Once a second thread has come, what an element holds is known to nobody before a barrier."""

    @remap.kernel
    def in_shared(out: remap.DisjointSlice) -> None:
        s = remap.shared_array(32, np.int32)
        t = remap.thread.x
        if t < 32:
            s[t] = 0
        remap.barrier()
        remap.atomic_add(s, t // 2, 5)
        out[remap.index_1d()] = s[t // 2]

    @remap.kernel
    def in_memory(out: remap.DisjointSlice) -> None:
        t = remap.thread.x
        remap.atomic_add(out, t // 2, 5)
        remap.unchecked(out)[32 + t // 2] = remap.unchecked(out)[t // 2]

    found = told(place, in_shared if shared else in_memory, place(N, "int32"), grid=1, block=N)
    assert "read of what another thread wrote" in found


def test_an_atomic_does_not_hide_a_plain_write_from_other_blocks(place: Any) -> None:
    """A block sets an element, and adds to it behind a barrier; nothing orders the other blocks' additions."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        if remap.block.x == 0:
            if remap.thread.x == 0:
                remap.unchecked(out)[0] = 0
            remap.barrier()
        remap.atomic_add(out, 0, 1)

    found = told(place, kernel, place(1, "int32"), grid=2, block=N)
    assert "write to an element that another thread wrote, with nothing to order the two" in found


@remap.kernel
def warp_tells(out: remap.DisjointSlice, seen: remap.DisjointSlice, wait: bool) -> None:
    w = remap.warp_index()
    i = remap.index_1d()
    out[w] = 5.0
    if wait:
        remap.barrier()
    seen[i] = out[w]


def test_a_reader_by_the_index_of_a_warp(place: Any) -> None:
    """The first thread of a warp writes its element; the others have the same index, and may read behind a barrier."""
    out, seen = place(4, "float32"), place(2 * N, "float32")
    place.launch(warp_tells, out, seen, True, grid=2, block=N)
    assert seen.to_host().tolist() == [5.0] * 2 * N
    found = told(place, warp_tells, out, seen, False, grid=2, block=N)
    assert "thread 1: out[0]" in found
    assert (
        "read of what another thread wrote, with nothing to order the two; the other is block 0, thread 0"
        in found
    )


def test_the_element_of_a_warp_is_read_by_its_writer_alone(place: Any) -> None:
    """What the first thread makes of its element is its own business: the other threads do not look at it there."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        w = remap.warp_index()
        out[w] = x[w]
        out[w] += x[w] * 2
        out[w] = out[w] + out.get(w, 0)
        out[w] *= 1 if out[w] > 4 else 10

    x, out = place(np.arange(4, dtype=np.int64)), place(4, "int64")
    place.launch(kernel, x, out, grid=2, block=N)
    assert out.to_host().tolist() == [0, 6, 12, 18]


def test_an_exchange_may_be_the_first_to_write(place: Any) -> None:
    """What an exchange stores is as good as what anything else stores; its result is undefined there."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        s = remap.shared_array(1, np.int32)
        remap.atomic_exchange(s, 0, 7)
        remap.barrier()
        old = remap.atomic_add(s, 0, 0)
        out[remap.index_1d()] = old

    out = place(2 * N, "int32")
    place.launch(kernel, out, grid=2, block=N)
    assert out.to_host().tolist() == [7] * 2 * N


@pytest.mark.parametrize("name", ["add", "min", "max", "cas"])
def test_other_atomics_need_something_that_was_written(place: Any, name: str) -> None:
    """They make a value of what was there, which is undefined."""

    @remap.kernel
    def add(out: remap.DisjointSlice) -> None:
        s = remap.shared_array(1, np.int32)
        remap.atomic_add(s, 0, 7)
        out[remap.index_1d()] = 1

    @remap.kernel
    def min_(out: remap.DisjointSlice) -> None:
        s = remap.shared_array(1, np.int32)
        remap.atomic_min(s, 0, 7)
        out[remap.index_1d()] = 1

    @remap.kernel
    def max_(out: remap.DisjointSlice) -> None:
        s = remap.shared_array(1, np.int32)
        remap.atomic_max(s, 0, 7)
        out[remap.index_1d()] = 1

    @remap.kernel
    def cas(out: remap.DisjointSlice) -> None:
        s = remap.shared_array(1, np.int32)
        remap.atomic_cas(s, 0, 0, 7)
        out[remap.index_1d()] = 1

    kernel = {"add": add, "min": min_, "max": max_, "cas": cas}[name]
    found = told(place, kernel, place(N, "int32"), grid=1, block=N)
    assert "read of shared memory that nothing was written to" in found


@pytest.mark.parametrize("in_grid", [False, True])
@settings(max_examples=300)
@given(data=st.data())
def test_random_accesses_are_races_where_nothing_orders_them(in_grid: bool, data: st.DataObject) -> None:
    """What is reported is what comparing each access with every earlier one gives: no more and no less."""
    blocks, threads, elements = 2, 3, 2
    shadow: Any = GridShadow(elements) if in_grid else BlockShadow(elements * blocks)
    epochs, before = [0] * blocks, list[tuple[int, int, int, str]]()  # element, thread, epoch, kind
    steps = st.sampled_from(["barrier", "read", "write", "atomic", "exchange"])
    for verb in data.draw(st.lists(steps, min_size=2, max_size=9)):
        if verb == "barrier":
            epochs[data.draw(st.integers(0, blocks - 1))] += 1
            continue
        lanes = sorted(data.draw(st.sets(st.integers(0, blocks * threads - 1), min_size=1)))
        at = [
            data.draw(st.integers(0, elements - 1)) + lane // threads * elements * (not in_grid)
            for lane in lanes
        ]
        kind = "atomic" if verb == "exchange" else verb
        found = (
            verb in ("read", "atomic")
            and not in_grid
            and any(all(one[0] != where or one[3] == "read" for one in before) for where in at)
        )
        for where, lane in zip(at, lanes, strict=True):
            for where_, lane_, epoch, kind_ in before:
                ordered = lane // threads == lane_ // threads and epoch < epochs[lane // threads]
                alike = kind == kind_ and kind != "write"
                found = found or (where == where_ and lane != lane_ and not alike and not ordered)
            before.append((where, lane, epochs[lane // threads], kind))
        mine, epoch_ = np.array(lanes), np.array([epochs[lane // threads] for lane in lanes])
        if in_grid:
            who = Who(mine + 1, mine // threads, epoch_, np.int32(0), threads)
            told_ = getattr(shadow, verb)(np.array(at), who, 1)
        else:
            told_ = getattr(shadow, verb)(np.array(at), epoch_ << 32 | mine % threads, epoch_ << 32)
        assert (told_ is not None) == found
        if found:
            return
