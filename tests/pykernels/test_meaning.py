"""Expressions mean what they mean in Python: their order, their values, and what is not worked out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import KernelError

N = 8


def bump(s: Any, k: int) -> Any:
    """Add one to an element, and return it."""
    s[k] = s[k] + 1
    return s[k]


def test_what_is_read_before_a_call_is_read_before_it(on_both: Any) -> None:
    """Operands are worked out from left to right, though a function changes what was read."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice, more: remap.DisjointSlice) -> None:
        s = remap.shared_array(8, np.int64)
        i = remap.index_1d()
        t = remap.thread.x
        s[t] = 10
        a = s[t] + bump(s, t)
        s[t] = 10
        s[t] += bump(s, t)
        b = s[t]
        s[t] = 10
        c = bump(s, t) + s[t]
        s[t] = 10
        d = max(s[t], 0) * 100 + (s[t] < bump(s, t)) * 10 + (bump(s, t) if s[t] > 3 else 0)
        s[t] = 10
        e, f = s[t], bump(s, t)
        s[t] = 10
        g = both(s[t], bump(s, t))
        s[t] = 10
        h = s[t] == 10 and bump(s, t) == 11 and s[t] == 11
        s[t] = 10
        k = s[t] < bump(s, t) <= s[t] < 12
        out[i] = a + 100 * b + 10000 * c
        more[i] = d + 10000 * e + 1000000 * f + 100000000 * g + 10000000000 * int(h) + 20000000000 * int(k)

    out, more = on_both(kernel, np.zeros(N, np.int64), np.zeros(N, np.int64), threads=N)
    assert out.tolist() == [21 + 2100 + 220000] * N
    d = 10 * 100 + True * 10 + 12
    assert more.tolist() == [d + 100000 + 11000000 + 100000000 * (10 * 100 + 11) + 30000000000] * N


def both(a: int, b: int) -> int:
    """Join two numbers."""
    return a * 100 + b


def test_what_is_read_before_an_atomic_is_read_before_it(on_both: Any) -> None:
    """The same of atomic operations, in shared memory and in the device's, also inside of an index."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice, mine: remap.DisjointSlice) -> None:
        s = remap.shared_array(8, np.float32)
        i = remap.index_1d()
        t = remap.thread.x
        s[t] = 10
        a = s[t] - remap.atomic_exchange(s, t, 3.0)
        b = s[t] * 10
        u = remap.unchecked(mine)
        u[t] = 4
        c = u[t] * 100 + remap.atomic_add(mine, t, 1) + remap.atomic_add(mine, t, 1) * 10
        u[remap.atomic_exchange(mine, t, t)] = u[t]
        d = x.get(remap.atomic_add(mine, t, 1) - 6, s[t])
        out[i] = a + b + c + d * 1000

    x = np.arange(1, N + 1, dtype=np.int32)
    _, out, mine = on_both(kernel, x, np.zeros(N), np.zeros(N, np.int64), threads=(1))
    assert out[0] == 0 + 30 + 400 + 4 + 50 + 3000
    assert mine[[0, 6]].tolist() == [1, 6]


def test_and_or_give_the_operand_that_decides(on_both: Any) -> None:
    """As values, `and` and `or` are one of their operands, and the one on the right is worked out only if it is."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice, n_out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        k = int(i)
        out[i] = x[i] or 5.0
        n_out[i] = (k - 3 and x[k - 3 if k > 3 else 0] and 7) + 100 * (k < 2 or k or x[100])
        v = (x[i] and x[i] * 2) or -1
        if x[i] or k > 6:
            out[i] += v
        out[i] += (k > 2 and k < 5) * 0.25

    x = np.array([0, 1, -2, 0, np.nan, 0.5, 0, -0.0], np.float32)
    _, out, n_out = on_both(kernel, x, np.zeros(N, np.float32), np.zeros(N, np.float32), threads=N)
    for k in range(N):
        expected = x[k] or np.float32(5)
        v = (x[k] and x[k] * 2) or -1
        if x[k] or k > 6:
            expected = expected + v
        expected = np.float32(expected + (k > 2 and k < 5) * 0.25)
        assert out[k] == expected or np.isnan(expected)
        whole = (k - 3 and x[k - 3 if k > 3 else 0] and 7) + 100 * (k < 2 or k)
        assert n_out[k] == whole


def test_chained_comparisons_stop_where_one_fails(on_both: Any) -> None:
    """What is right of a comparison that fails is not worked out, and each term is worked out once."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        s = remap.shared_array(8, np.int32)
        t = remap.thread.x
        k = int(i) - 2
        found = 0 <= k < x[k]
        again = 0 <= k + 1 < len(x) and 0 <= k < x[k] <= x[k + 1] < x[k + 1] + 1
        s[t] = 0
        last = 1 < bump(s, t) < bump(s, t) < 5
        third = 0 < bump(s, t) < bump(s, t) < bump(s, t) < 5
        out[i] = int(found) + 10 * int(again) + 100 * int(last) + 1000 * int(third) + 10000 * s[t]

    x = np.array([5, 7, 1, 1, 9, 9], np.int64)
    _, out = on_both(kernel, x, np.zeros(N, np.int64), threads=N)
    for t in range(N):
        k = t - 2
        found = 0 <= k < x[k]
        again = 0 <= k + 1 < len(x) and 0 <= k < x[k] <= x[k + 1] < x[k + 1] + 1
        assert out[t] == int(found) + 10 * int(again) + 1000 + 40000


def test_a_power_has_the_type_of_its_exponent(on_both: Any) -> None:
    """`** 2.0` is a float, `** 2` stays what it is."""

    @remap.kernel
    def kernel(x: remap.Slice, y: remap.Slice, out: remap.DisjointSlice, whole: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = x[i] ** 2.0 + y[i] ** 2.0 + int(x[i]) ** 2.0
        whole[i] = x[i] ** 2

    x, y = np.full(N, 100_000, np.int32), np.full(N, 0.3, np.float32)
    _, _, out, whole = on_both(kernel, x, y, np.zeros(N), np.zeros(N, np.int64), threads=N)
    assert np.array_equal(out, x**2.0 + y**2.0 + 1e10)
    assert np.array_equal(whole, x**2)


def test_rounding_leaves_integers_alone(on_both: Any) -> None:
    """Floor, ceil and trunc of an integer are that integer: none goes through a float64, which holds 53 bits."""

    @remap.kernel
    def kernel(x: remap.Slice, u: remap.Slice, out: remap.DisjointSlice, u_out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = math.floor(x[i]) + math.ceil(x[i]) * 2 - math.trunc(x[i])
        u_out[i] = np.floor(u[i]) + np.ceil(u[i]) - np.trunc(u[i]) + math.floor(u[i]) * 0

    x = 2**53 + np.arange(N) * 3 + 1
    u = x.astype(np.uint64) << np.uint64(9)
    _, _, out, u_out = on_both(kernel, x, u, np.zeros(N, np.int64), np.zeros(N, np.uint64), threads=N)
    assert np.array_equal(out, x * 2)
    assert np.array_equal(u_out, u)


def test_functions_give_numbers_of_numpy_or_of_python(on_both: Any) -> None:
    """NumPy's functions give NumPy's numbers, which decide the type of what they meet; math's of integers do not."""

    @remap.kernel
    def kernel(x: remap.Slice, n: remap.Slice, out: remap.DisjointSlice, more: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = np.sqrt(2.0) * x[i] + np.fabs(n[i])
        more[i] = math.sqrt(n[i]) * x[i] + np.abs(-3) * x[i]

    x, n = np.linspace(0.1, 1, N).astype(np.float32), np.arange(N, dtype=np.int32)
    _, _, out, more = on_both(kernel, x, n, np.zeros(N), np.zeros(N), threads=N)
    assert np.array_equal(out, np.sqrt(2.0) * x.astype(np.float64) + np.fabs(n))
    roots = np.array([np.float32(math.sqrt(one)) for one in n]) * x
    assert np.array_equal(more, roots + np.abs(-3) * x)


@remap.kernel
def index_added(x: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    out[i] = x[i] + int(i)


@remap.kernel
def given_added(x: remap.Slice, out: remap.DisjointSlice, by: int) -> None:
    i = remap.index_1d()
    out[i] += by


def sum_of(v: Any, n: int) -> Any:
    """Add two numbers."""
    return v + n


@remap.kernel
def in_a_function(x: remap.Slice, out: remap.DisjointSlice, by: int) -> None:
    i = remap.index_1d()
    if i < len(x):
        v = sum_of(x[i], int(i) + by)
        out[i] = v


@remap.kernel
def in_min(x: remap.Slice, out: remap.DisjointSlice, by: int) -> None:
    i = remap.index_1d()
    out[i] = min(x[i], int(i) * by)


@remap.kernel
def chosen(x: remap.Slice, out: remap.DisjointSlice, by: int) -> None:
    i = remap.index_1d()
    v = x[i] if i != 130 else by
    out[i] = v


@pytest.mark.parametrize(
    ("kernel", "by", "line", "told"),
    [
        (index_added, None, 3, "block 2, thread 0: 256 meets uint8"),
        (given_added, 300, 3, "block 0, thread 0: 300 meets uint8"),
        (in_a_function, 56, None, "block 1, thread 72: 256 meets uint8"),
        (in_min, -1, 3, "block 0, thread 1: -1 meets uint8"),
        (chosen, 256, 3, "block 1, thread 2: 256 meets uint8"),
    ],
    ids=["index", "argument", "function", "min", "choice"],
)
def test_a_python_number_that_does_not_fit_what_it_meets_is_told(
    place: Any, kernel: Any, by: int | None, line: int | None, told: str
) -> None:
    """NumPy raises OverflowError there; the host driver names kernel, line, block, thread and number."""
    if remap.driver().name != "host":
        pytest.skip("a GPU does not tell")
    x, out = place(np.zeros(400, np.uint8)), place(400, "uint8")
    place.launch(kernel, x, out, *(() if by is None else (by,)), grid=4, block=128)
    with pytest.raises(KernelError) as caught:
        remap.device().synchronize()
    code = sum_of.__code__ if line is None else kernel.function.__code__
    assert f"test_meaning.py:{code.co_firstlineno + (2 if line is None else line)}: {told}" in str(
        caught.value
    )
    assert "numpy.uint8(" in str(caught.value)


def test_python_numbers_that_fit_and_threads_without_an_element(on_both: Any) -> None:
    """What fits is no error, nor is what a thread without an element, or on the other side, would have met."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice, wide: remap.DisjointSlice, by: int) -> None:
        i = remap.index_1d()
        out[i] = x[i] + int(i)
        out[i] += by
        wide[i] = x[i] + int(i) if i < 200 else 7
        if i < 100 and x[i] + int(i) < 50:
            wide[i] += np.uint8(int(i) + 300)
        wide[i] += (x[i] << 1) // 2 * (x[i] > int(i) - 1000)

    x, out, wide = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8), np.zeros(400, np.int32)
    _, out, wide = on_both(kernel, x, out, wide, 50, threads=400)
    assert np.array_equal(out, x + np.arange(100, dtype=np.uint8) + np.uint8(50))
    both = np.append(x, np.zeros(300, np.uint8))
    expected = np.where(np.arange(400) < 200, both + np.arange(400).astype(np.uint8), np.uint8(7)).astype(
        np.int32
    )
    small = (np.arange(400) < 100) & (2 * np.arange(400) < 50)
    expected = expected + np.where(small, (np.arange(400) + 300) % 256, 0) + both
    assert np.array_equal(wide, expected)
