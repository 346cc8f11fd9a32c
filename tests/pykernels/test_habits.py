"""What those who come from CUDA C++, Numba and Triton write at first: it works, or is told what stands for it here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import CompileError, LaunchError

# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false

BLOCK = 32


@remap.kernel
def softmax(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """A block to a row, and strides of a block along it."""
    part = remap.shared_array(BLOCK, np.float64)
    row, t = remap.block.x, remap.thread.x
    best = -math.inf
    for c in range(t, x.shape[1], remap.block_size.x):
        best = max(best, x[row, c])
    part[t] = best
    remap.barrier()
    best = part[0]
    for k in range(1, BLOCK):
        best = max(best, part[k])
    remap.barrier()
    total = 0.0
    for c in range(t, x.shape[1], BLOCK):
        total += math.exp(x[row, c] - best)
    part[t] = total
    remap.barrier()
    total = 0.0
    for k in range(BLOCK):
        total += part[k]
    for c in range(t, x.shape[1], BLOCK):
        remap.unchecked(out)[row, c] = math.exp(x[row, c] - best) / total


def test_strides_of_a_block(place: Any) -> None:
    """The step of a range may be the extent of a block, or a value from outside."""
    values = np.random.default_rng(7).normal(size=(5, 75))
    out = place(values.shape, "float64")
    place.launch(softmax, place(values), out, grid=5, block=BLOCK)
    powers = np.exp(values - values.max(1, keepdims=True))
    assert np.allclose(out.to_host(), powers / powers.sum(1, keepdims=True), rtol=1e-12)


@pytest.mark.parametrize("step", [3, 1, -1, -4, 0])
def test_steps_that_are_known_at_the_launch(place: Any, step: int) -> None:
    """A range goes up or down as its step says; with one of 0, which Python refuses, it is empty."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice, start: int, stop: int, step: int) -> None:
        i = remap.index_1d()
        total = 0
        for k in range(start + int(i), stop, step):
            total = total * 100 + k + 50
        out[i] = total

    for start, stop in ((0, 9), (9, 0), (3, 3)):
        out = place(4, "int64")
        place.launch(kernel, out, start, stop, step, grid=1, block=4)
        expected: list[int] = []
        for i in range(4):
            total = 0
            for k in range(start + i, stop, step) if step else ():
                total = total * 100 + k + 50
            expected.append((total + 2**63) % 2**64 - 2**63)
        assert out.to_host().tolist() == expected


def test_a_range_looks_at_its_arguments_once(place: Any) -> None:
    """What the loop assigns to them changes nothing for the loop, as in Python."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        stop, step, count = 10, 2, 0
        stop += int(i)
        step += 0 * int(i)
        for _ in range(0, stop, step):
            stop = 5
            step = 100
            count += 1
        n = 4
        for n in range(n):  # noqa: B020
            count += 100 * n
        out[i] = count

    out = place(4, "int64")
    place.launch(kernel, out, grid=1, block=4)
    assert out.to_host().tolist() == [605, 606, 606, 607]


TOP = 2**63 - 1


@remap.kernel
def to_the_top(out: remap.DisjointSlice, start: int, stop: int, step: int) -> None:
    i = remap.index_1d()
    rounds, above = 0, 0
    for k in range(start, stop, step):
        above += k > 0
        rounds += 1
        if rounds > 9:  # else a test that fails would not end
            break
    for _ in range(start, stop, 3458764513820540928):
        rounds += 100
        if rounds > 999:
            break
    for _ in range(0, 9223372036854775807, 4611686018427387904):
        rounds += 10000
        if rounds > 99999:
            break
    out[i] = rounds + 1000000 * above


@pytest.mark.parametrize(
    ("start", "stop", "step"),
    [
        (0, TOP, 2**62),
        (TOP - 7, TOP, 5),
        (-TOP - 1, TOP, TOP),
        (TOP, -TOP - 1, -(2**62)),
        (5, -TOP, -TOP - 1),
        (0, 9, 4),
    ],
)
def test_a_range_up_to_the_largest_number_ends(on_both: Any, start: int, stop: int, step: int) -> None:
    """A number that no int is would be the next one: the range has ended, as in Python."""
    (out,) = on_both(to_the_top, np.zeros(4, np.int64), start, stop, step, threads=4)
    numbers = range(start, stop, step)
    rounds = len(numbers) + 100 * len(range(start, stop, 3 << 60)) + 20000
    assert out.tolist() == [rounds + 1000000 * sum(k > 0 for k in numbers)] * 4


def test_steps_of_each_thread(on_both: Any) -> None:
    """Start, stop and step may be other ones for each thread, also where some of them end at the largest number."""

    @remap.kernel
    def kernel(x: remap.Slice, y: remap.Slice, z: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        count = 0
        for k in range(x[i], y[i], z[i]):
            count += 1 + (k & 1) * 100
            if count > 5000:
                break
        out[i] = count

    x = np.array([0, TOP - 3, -TOP - 1, TOP, 7, 0])
    y = np.array([9, TOP, TOP, -TOP - 1, 7, -9])
    z = np.array([2, 2, 2**62 + 1, -(2**62), 3, -4])
    _, _, _, out = on_both(kernel, x, y, z, np.zeros(6, np.int64), threads=6)
    each = zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    assert out.tolist() == [sum(1 + (k & 1) * 100 for k in range(*one)) for one in each]


@remap.kernel
def no_step(x: remap.Slice, out: remap.DisjointSlice) -> None:
    for k in range(0, 4, 0):
        remap.unchecked(out)[0, k] = 1


@remap.kernel
def syncs(x: remap.Slice, out: remap.DisjointSlice) -> None:
    remap.syncthreads()


@remap.kernel
def asks_cuda(x: remap.Slice, out: remap.DisjointSlice) -> None:
    _ = threadIdx.x  # type: ignore[name-defined]  # noqa: F821 # pyright: ignore[reportUndefinedVariable]


@remap.kernel
def asks_numba(x: remap.Slice, out: remap.DisjointSlice) -> None:
    _ = remap.grid(1)


@remap.kernel
def infinite(x: remap.Slice, out: remap.DisjointSlice) -> None:
    _ = float("-inf")


@remap.kernel
def takes_a_row(x: remap.Slice, out: remap.DisjointSlice) -> None:
    _ = x[0, :]


@remap.kernel
def one_index(x: remap.Slice, out: remap.DisjointSlice) -> None:
    _ = x[0]


@remap.kernel
def asks_the_array(x: remap.Slice, out: remap.DisjointSlice) -> None:
    _ = x.max()  # type: ignore[attr-defined]


@remap.kernel
def sized_by_the_launch(x: remap.Slice, out: remap.DisjointSlice) -> None:
    _ = remap.shared_array(remap.block_size.x, np.float32)


@remap.kernel
def takes_apart(x: remap.Slice, out: remap.DisjointSlice) -> None:
    _row, _col = remap.index_2d(stride=4)


@remap.kernel
def own_list(x: remap.Slice, out: remap.DisjointSlice) -> None:
    _ = [0.0] * 4


@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        (no_step, "the step of a range is not 0"),
        (syncs, "Write remap.barrier()"),
        (asks_cuda, "Write remap.thread"),
        (asks_numba, "Write remap.index_1d()"),
        (infinite, "(str). For infinity and NaN, use math.inf and math.nan"),
        (own_list, "(List). A thread has variables, and a block has remap.shared_array"),
        (takes_a_row, "x[0, :]: an element is read or written at a time"),
        (one_index, "the array has 2 dimensions, and this has 1 index"),
        (asks_the_array, "no method max. Loop over its elements"),
        (
            sized_by_the_launch,
            "known when the kernel is compiled. Use a number or a global variable, or dynamic",
        ),
        (takes_apart, "an index is taken apart as i.row and i.col"),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_habits_are_answered(place: Any, kernel: Any, told: str) -> None:
    """The message names what to write instead."""
    with pytest.raises(CompileError) as caught:
        kernel.launch(place((4, 4), "float32"), place((4, 4), "float32"), grid=1, block=8)
    assert told in str(caught.value)


def test_grid_and_block_in_brackets() -> None:
    """A launch in the manner of Numba and Triton says how it is written here."""
    with pytest.raises(LaunchError, match=r"kernel softmax\[…\]: .*Use \.launch"):
        softmax[5, BLOCK]
