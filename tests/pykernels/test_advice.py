# mypy: ignore-errors
# pyright: basic, reportUnusedVariable=false, reportOperatorIssue=false, reportUnusedExpression=false
# ruff: noqa: F841, E731, PLW0603, SIM105
# (the kernels here are wrong, as those of users are)
"""What is advised where a kernel is refused can be followed, and is advised where it helps alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import CompileError, KernelError

COUNT = 0
PAIR = np.dtype([("a", np.float32), ("inner", [("x", np.float32), ("y", np.float32)])])


def prints(x: remap.Slice, out: remap.DisjointSlice) -> None:
    print(x[0])


def joins(x: remap.Slice, out: remap.DisjointSlice) -> None:
    s = f"{x[0]}"


def walrus(x: remap.Slice, out: remap.DisjointSlice) -> None:
    if (n := x[0]) > 1:
        out[remap.index_1d()] = n


def matches(x: remap.Slice, out: remap.DisjointSlice) -> None:
    match int(x[0]):
        case 0:
            pass


def tries(x: remap.Slice, out: remap.DisjointSlice) -> None:
    try:
        out[remap.index_1d()] = 1
    except ValueError:
        pass


def opens(x: remap.Slice, out: remap.DisjointSlice) -> None:
    with remap.Stream():
        out[remap.index_1d()] = 1


def counts(x: remap.Slice, out: remap.DisjointSlice) -> None:
    global COUNT
    COUNT += 1


def claims(x: remap.Slice, out: remap.DisjointSlice) -> None:
    assert x[0] > 0


def raises(x: remap.Slice, out: remap.DisjointSlice) -> None:
    raise ValueError


def defines(x: remap.Slice, out: remap.DisjointSlice) -> None:
    h = lambda a: a


def is_in(x: remap.Slice, out: remap.DisjointSlice) -> None:
    if x[0] in (1, 2):
        out[remap.index_1d()] = 1


def is_none(x: remap.Slice, out: remap.DisjointSlice) -> None:
    if x[0] is None:
        out[remap.index_1d()] = 1


def nothing(x: remap.Slice, out: remap.DisjointSlice) -> None:
    a = None


def text(x: remap.Slice, out: remap.DisjointSlice) -> None:
    a = "abc"


def imaginary(x: remap.Slice, out: remap.DisjointSlice) -> None:
    out[remap.index_1d()] = x[0] * 1j


def dots(x: remap.Slice, out: remap.DisjointSlice) -> None: ...


def infinity(x: remap.Slice, out: remap.DisjointSlice) -> None:
    out[remap.index_1d()] = float("-Infinity")


def rounds(x: remap.Slice, out: remap.DisjointSlice) -> None:
    out[remap.index_1d()] = round(x[0])


def sums(x: remap.Slice, out: remap.DisjointSlice) -> None:
    out[remap.index_1d()] = sum(x[k] for k in range(3))


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (prints, "print(): a kernel cannot call it. Store what it should show"),
        (joins, "(JoinedStr). A kernel has numbers alone: let one stand for it; make text of it after"),
        (walrus, "(NamedExpr). Assign in a line of its own"),
        (matches, "match int(x[0]): a kernel cannot have this (Match). Write it with if and elif"),
        (tries, "(Try). Store a number that tells of it"),
        (opens, "(With). Put it around the launch"),
        (counts, "(Global). A kernel reads what is outside, and writes to a DisjointSlice"),
        (claims, "(Assert). Store a number that tells of it"),
        (raises, "(Raise). Store a number that tells of it"),
        (defines, "(Lambda). Put it outside of the kernel as a def, and call it"),
        (
            is_in,
            "x[0] in (1, 2): a kernel cannot have this (Compare). Compare with == and !=, and join with and, or",
        ),
        (is_none, "(Compare). Compare with =="),
        (nothing, "(NoneType). A kernel has numbers alone: let one stand for it"),
        (text, "(str). A kernel has numbers alone: let one stand for it"),
        (imaginary, "(complex). Compute with its two parts"),
        (dots, "(ellipsis). Write pass"),
        (infinity, "(str). For infinity and NaN, use math.inf and math.nan"),
        (rounds, "round(): a kernel cannot call it. Use np.rint"),
        (sums, "sum(): a kernel cannot call it. Loop with: for k in range(…)"),
    ],
)
def test_parts_of_python_that_kernels_do_not_have(function: Any, told: str) -> None:
    """Each is answered with what stands for it."""
    with pytest.raises(CompileError) as caught:
        remap.kernel(function).source(np.zeros(4, np.float32), np.zeros(4, np.float32))
    assert told in str(caught.value)


def adds_to_a_field(x: remap.Slice, out: remap.DisjointSlice) -> None:
    out[remap.index_1d()].a += 1


def sets_a_field_inside(x: remap.Slice, out: remap.DisjointSlice) -> None:
    out[remap.index_1d()].inner.x = 1


def sets_a_field_of_a_copy(x: remap.Slice, out: remap.DisjointSlice) -> None:
    p = x[0]
    p.a = 1


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (adds_to_a_field, "Write out[remap.index_1d()].a = out[remap.index_1d()].a … instead"),
        (sets_a_field_inside, "Assign the structure that it is a field of, as a whole"),
        (sets_a_field_of_a_copy, "Assign another structure to the name, or keep its fields in variables"),
    ],
)
def test_what_cannot_be_assigned_to(function: Any, told: str) -> None:
    """The way that there is depends on what it is."""
    with pytest.raises(CompileError, match="a kernel cannot assign to this") as caught:
        remap.kernel(function).source(np.zeros(4, PAIR), np.zeros(4, PAIR))
    assert told in str(caught.value)


def test_a_field_is_raised_as_advised(on_both: Any) -> None:
    """What the advice says is what works."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i].inner = x[i].inner
        out[i].a = out[i].a + x[i].a

    x = np.zeros(4, PAIR)
    x["a"], x["inner"]["y"] = np.arange(4), 7
    _, out = on_both(kernel, x, np.ones(4, PAIR), threads=4)
    assert out["a"].tolist() == [1, 2, 3, 4]
    assert out["inner"]["y"].tolist() == [7] * 4


@pytest.mark.parametrize(
    "where", ["slice", "shared", "shared write", "unchecked", "unchecked write", "atomic"]
)
def test_get_is_advised_where_there_is_one(place: Any, where: str) -> None:
    """Only a Slice is read with a default; what is written, and shared memory, has to be asked about first."""
    if remap.driver().name != "host":
        pytest.skip("on CUDA the kernel traps, and the context is lost")

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice, case: int) -> None:
        i = remap.index_1d()
        k = int(i) + 30
        s = remap.shared_array(32, np.float32)
        u = remap.unchecked(out)
        s[remap.thread.x] = 0.0
        v = 0.0
        if case == 0:
            v = x[k]
        if case == 1:
            v = s[k]
        if case == 2:
            s[k] = 1.0
        if case == 3:
            v = u[k]
        if case == 4:
            u[k] = v
        if case == 5:
            remap.atomic_add(out, k, v)

    case = ["slice", "shared", "shared write", "unchecked", "unchecked write", "atomic"].index(where)
    place.launch(kernel, place(32, "float32"), place(32, "float32"), case, grid=1, block=32)
    with pytest.raises(
        KernelError, match=r"\[32\]: the array has 32 elements, and nothing lies there"
    ) as caught:
        remap.device().synchronize()
    advice = "Check the index first"
    assert caught.value.next_step == (
        f"{advice}, or use .get(index, default)" if where == "slice" else advice
    )
