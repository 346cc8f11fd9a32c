"""Expressions mean what they mean in Python: their order, their values, and what is not worked out."""

from __future__ import annotations

from typing import Any

import numpy as np

import remap

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
