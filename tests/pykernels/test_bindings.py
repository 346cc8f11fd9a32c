"""A name that is bound again: each binding has the type that it has in NumPy, or the kernel is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import CompileError

N = 8


def test_a_later_binding_does_not_change_what_came_before(on_both: Any) -> None:
    """What is worked out of a float32 stays one, though the name is given a float64 afterwards."""

    @remap.kernel
    def kernel(x: remap.Slice, y: remap.Slice, out: remap.DisjointSlice, n_out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        v = x[i]
        w = v * v
        v = y[i]
        out[i] = w + v * 0
        n = 9007199254740993
        n_out[i] = n - 9007199254740992
        n = 0.5  # type: ignore[assignment]
        out[i] += n

    x, y = np.full(N, 0.3, np.float32), np.linspace(1, 2, N)
    _, _, out, whole = on_both(kernel, x, y, np.zeros(N), np.zeros(N, np.int64), threads=N)
    assert np.array_equal(out, np.float64(x * x) + 0.5)
    assert whole.tolist() == [1] * N


def test_bindings_inside_of_a_branch_and_a_loop_have_their_own_types(on_both: Any) -> None:
    """What a branch or a loop binds for itself alone follows the same rule."""

    @remap.kernel
    def kernel(x: remap.Slice, y: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        if i < len(x):
            v = x[i]
            w = v * v
            v = v / 2
            out[i] = w + v
            for k in range(3):
                u = x[k] * x[k]
                u = u + y[k]
                out[i] += u
        else:
            out[i] = 0

    x, y = np.arange(100_000, 100_000 + N, dtype=np.int32), np.linspace(1, 2, N)
    _, _, out = on_both(kernel, x, y, np.zeros(N), threads=N)
    squares = x * x  # they wrap
    expected = squares + x / 2
    for k in range(3):
        expected = expected + (squares[k] + y[k])
    assert np.array_equal(out, expected)


def test_a_number_begins_a_sum_of_another_type(on_both: Any) -> None:
    """A number of the source becomes what is added to it in a loop, and stays a Python number before the loop."""

    @remap.kernel
    def kernel(x: remap.Slice, m: remap.Slice, out: remap.DisjointSlice, before: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        total, low, seen = 0, math.inf, -math.inf
        before[i] = total + m[i] // 2 * 3
        for k in range(len(x)):
            total += x[k]
            low = min(low, x[k])
            seen = max(seen, x[k])
        if total > 3:
            total = 2.5  # type: ignore[assignment]
        out[i] = total + low + seen

    x, m = np.linspace(-1, 2, N).astype(np.float32), np.arange(N, dtype=np.int32)
    _, _, out, before = on_both(kernel, x, m, np.zeros(N, np.float32), np.zeros(N, np.int32), threads=N)
    total = np.float32(0)
    for one in x:
        total += one
    total = np.float32(2.5) if total > 3 else total
    assert np.array_equal(out, np.full(N, total + x.min() + x.max()))
    assert np.array_equal(before, m // 2 * 3)


def test_a_loop_round_a_branch_goes_on_with_one_variable(on_both: Any) -> None:
    """A variable that is bound in a branch of a loop is the same in the next round and after the loop."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        best, k = 0, 0
        while k < len(x):
            if k % 2 == 1:
                best = best + x[k]
            elif k == 4:
                best = 7
            else:
                k = k + 1
                continue
            k += 1
        best = best * 2
        if i > 3:  # noqa: SIM108
            sign = -1
        else:
            sign = 1
        out[i] = best * sign

    x = np.linspace(1, 2, N).astype(np.float32)
    _, out = on_both(kernel, x, np.zeros(N, np.float64), threads=N)
    best = (np.float32(7) + x[5] + x[7]) * 2
    assert np.array_equal(out, best * np.where(np.arange(N) > 3, -1, 1).astype(np.float32))


def test_one_of_several_numbers_begins_a_sum(on_both: Any) -> None:
    """Where a branch decides which number of the source it is, the sum begins with that one."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        total = 3
        if i > 2:
            total = 0.5  # type: ignore[assignment]
        for k in range(len(x)):
            total += x[k]
        out[i] = total

    x = np.linspace(1, 2, N).astype(np.float32)
    _, out = on_both(kernel, x, np.zeros(N, np.float32), threads=N)
    for k in range(N):
        total: Any = 0.5 if k > 2 else 3
        for one in x:
            total += one
        assert out[k] == total


def test_parameters_and_functions_bind_anew(on_both: Any) -> None:
    """A parameter that is assigned to is a variable like any other, in device functions, too."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice, n: int) -> None:
        i = remap.index_1d()
        n = n + 1
        k = n // 2
        n = n * 0.25  # type: ignore[assignment] # pyright: ignore[reportAssignmentType]
        out[i] = k + n + shrunk(x[i])

    x = np.arange(100, 100 + N, dtype=np.uint8)
    _, out = on_both(kernel, x, np.zeros(N), 6, threads=N)
    with np.errstate(over="ignore"):
        assert np.array_equal(out, 3 + 1.75 + (x + x + x * np.float32(0.5)))


def shrunk(v: Any) -> Any:
    """Bind a parameter anew."""
    w = v + v
    v = v * np.float32(0.5)
    return w + v


@remap.kernel
def in_a_loop(x: remap.Slice, y: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    v = x[i]
    for k in range(3):
        v = v + y[k]
    out[i] = v


@remap.kernel
def in_branches(x: remap.Slice, y: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    if x[i] > 1:  # noqa: SIM108
        v = x[i]
    else:
        v = y[i]
    out[i] = v


@remap.kernel
def from_an_int(x: remap.Slice, y: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    n = int(i)
    while n < 10:
        n = n + 0.5  # type: ignore[assignment]
    out[i] = n


@remap.kernel
def an_index(x: remap.Slice, y: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    if x[i] > 1:
        i = 3
    out[i] = y[i]


@pytest.mark.parametrize(
    ("kernel", "line", "told"),
    [
        (in_a_loop, 5, "it is a float32 in line {3} and a float64 in line {5}"),
        (in_branches, 6, "it is a float32 in line {4} and a float64 in line {6}"),
        (from_an_int, 5, "it is a int in line {3} and a float in line {5}"),
        (
            an_index,
            4,
            "it is a thread index from index_1d() before, and would become a int. Use another name",
        ),
    ],
    ids=["loop", "branches", "int", "index"],
)
def test_a_type_that_changes_in_a_loop_or_a_branch_is_refused(
    place: Any, kernel: Any, line: int, told: str
) -> None:
    """No one type is right for a variable that has two; both lines are named."""
    first = kernel.function.__code__.co_firstlineno
    with pytest.raises(CompileError) as caught:
        kernel.launch(place(N, "float32"), place(N, "float64"), place(N, "float64"), grid=1, block=N)
    for number in range(2, 8):
        told = told.replace(f"{{{number}}}", str(first + number))
    assert f"test_bindings.py:{first + line}: variable" in str(caught.value)
    assert told in str(caught.value)


def test_a_number_that_the_type_does_not_hold_is_refused(place: Any) -> None:
    """0.1 is no float32: what the loop reads first would not be what the source says."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        v = 0.1
        for k in range(3):
            v = v * x[k]
        out[i] = v

    first = kernel.function.__code__.co_firstlineno
    with pytest.raises(CompileError, match=f"0.1 in line {first + 3} is no float32 exactly") as caught:
        place.launch(kernel, place(N, "float32"), place(N, "float64"), grid=1, block=N)
    assert f"in line {first + 5}" in str(caught.value)
    assert "numpy.float32(0.1)" in str(caught.value)


Pair = np.dtype([("a", "f4"), ("b", "i4")])


def first_or_last(x: Any, y: Any, first: Any) -> Any:
    """Return one of two structures."""
    if first:
        return x
    return y


@remap.kernel
def pick(x: remap.Slice, y: remap.DisjointSlice) -> None:
    """Copy the element, or the first one."""
    i = remap.index_1d()
    y[i] = first_or_last(x[i], x[0], int(i) > 1)


def test_a_function_may_return_a_structure() -> None:
    """A structure is what a function gives, as a number is."""
    values = np.array([(1, 2), (3, 4), (5, 6), (7, 8)], Pair)
    with remap.DeviceBuffer.from_host(values) as x, remap.DeviceBuffer.zeroed(4, Pair) as y:
        pick.launch(x, y, grid=1, block=4)
        assert y.to_host().tolist() == [(1, 2), (1, 2), (5, 6), (7, 8)]
