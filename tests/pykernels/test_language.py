"""What a kernel can be written in: control flow, variables, functions, mathematics; and clear refusals of the rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import CompileError, LaunchError

LIMIT = 7
SCALE = np.float32(0.5)


@remap.kernel
def collatz(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Count the steps to 1: threads leave the loop at different times."""
    i = remap.index_1d()
    n = int(x[i])
    steps = 0
    while n > 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    out[i] = steps


def test_threads_that_loop_for_different_times(place: Any) -> None:
    """Each thread goes round its own number of times."""

    def steps(n: int) -> int:
        count = 0
        while n > 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            count += 1
        return count

    values = np.arange(500, dtype=np.int64)
    x, out = place(values), place(500, "int32")
    place.launch(collatz, x, out, grid=2, block=256)
    assert out.to_host().tolist() == [steps(n) for n in range(500)]


def jumpy(n: int) -> int:
    """Do with one number what the kernel below does, in plain Python."""
    total = 0
    for k in range(20):
        if k == n % 11:
            continue
        for m in range(k, 0, -2):
            if m % 7 == 3:
                break
            if total > 200 + n:
                return total
            total += m
        else_ = total % 5
        if else_ == 4 and k > 15:
            break
        total += 1
    return total


def test_break_continue_and_return(place: Any) -> None:
    """Jumps out of nested loops, taken by different threads in different rounds."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        n = int(i)
        total = 0
        for k in range(20):
            if k == n % 11:
                continue
            for m in range(k, 0, -2):
                if m % 7 == 3:
                    break
                if total > 200 + n:
                    out[i] = total
                    return
                total += m
            else_ = total % 5
            if else_ == 4 and k > 15:
                break
            total += 1
        out[i] = total

    out = place(700, "int64")
    place.launch(kernel, out, grid=3, block=256)
    assert out.to_host().tolist() == [jumpy(n) for n in range(700)]


def bend(v: float, n: int) -> float:
    """Return on several paths."""
    if n % 3 == 0:
        return v * v
    total = v
    while total < n:
        total = total + 1.5
        if total > 50:
            return -1.0
    return total


def reach(x: remap.Slice, k: int) -> float:
    """Read an array that is handed on, and call another function."""
    return bend(x[k], k) + 1


def test_device_functions(place: Any) -> None:
    """Functions written in Python are compiled for the types they are called with, arrays included."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        if i < len(x):
            out[i] = reach(x, int(i))

    values = np.random.default_rng(0).random(100)
    x, out = place(values), place(100, "float64")
    place.launch(kernel, x, out, grid=1, block=128)
    assert out.to_host().tolist() == [bend(v, k) + 1 for k, v in enumerate(values.tolist())]


def test_short_circuits(place: Any) -> None:
    """What stands right of and, or, and on the other side of a conditional expression is not run."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        k = int(i)
        a = k + 5 < len(x) and x[k + 5] > 3
        b = k < 3 or x[k - 3] == 0
        c = x[k - 1] if k > 0 else -1
        out[i] = int(a) + 10 * int(b) + 100 * int(c)

    x, out = place(np.arange(10, dtype=np.int32)), place(10, "int64")
    place.launch(kernel, x, out, grid=1, block=10)
    expected = []
    for k in range(10):
        a, b, c = k + 5 < 10 and k + 5 > 3, k < 3 or k - 3 == 0, k - 1 if k > 0 else -1
        expected.append(int(a) + 10 * int(b) + 100 * c)
    assert out.to_host().tolist() == expected


def test_variables_take_the_type_that_holds_all(place: Any) -> None:
    """A sum that begins as 0 becomes what is added to it; annotations fix a type; values swap."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        total = 0
        small: np.uint8 = 250  # type: ignore[assignment] # pyright: ignore[reportAssignmentType]
        a, b = 1, 2
        a, b = b, a
        for k in range(3):
            total += x[k] / 3
            small += k + a
        total = total + b
        out[i] = total * small

    values = np.array([0.1, 0.2, 0.3], np.float32)
    x, out = place(values), place(4, "float32")
    place.launch(kernel, x, out, grid=1, block=4)
    total = np.float32(0)
    for v in values:
        total = total + v / np.float32(3)
    total = total + np.float32(1)
    with np.errstate(over="ignore"):
        small = np.uint8(250) + np.uint8(2) + np.uint8(3) + np.uint8(4)
    assert (out.to_host() == total * small).all()


def test_mathematics(place: Any) -> None:
    """The functions that round correctly give NumPy's bits; the others come close."""

    @remap.kernel
    def exact(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        v = x[i]
        whole = math.sqrt(abs(v)) + math.floor(v) + math.ceil(v) * np.trunc(v)
        out[i] = whole + min(v, 0.5, -v) + max(v, 1) + np.rint(v)

    @remap.kernel
    def joined(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = remap.fma(x[i], x[i], -1.25)

    @remap.kernel
    def close(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = math.exp(x[i]) + np.sin(x[i]) * math.tanh(x[i]) + math.log(abs(x[i]) + 1)

    for dtype in (np.float32, np.float64):
        values = np.random.default_rng(5).normal(0, 3, 300).astype(dtype)
        x, out = place(values), place(300, dtype)
        place.launch(exact, x, out, grid=2, block=256)
        v: Any = values
        expected = np.sqrt(np.abs(v)) + np.floor(v).astype(np.int64).astype(dtype)
        expected = expected + np.ceil(v).astype(np.int64).astype(dtype) * np.trunc(v)
        expected = expected + np.minimum(np.minimum(v, dtype(0.5)), -v) + np.maximum(v, dtype(1)) + np.rint(v)
        assert np.array_equal(out.to_host(), expected)
        place.launch(joined, x, out, grid=2, block=256)
        if dtype is np.float32:  # the product of two float32 is exact in float64
            wide = values.astype(np.float64)
            assert np.array_equal(out.to_host(), (wide * wide - 1.25).astype(np.float32))
        place.launch(close, x, out, grid=2, block=256)
        expected = np.exp(values) + np.sin(values) * np.tanh(values) + np.log(np.abs(values) + dtype(1))
        assert np.allclose(out.to_host(), expected, rtol=1e-5 if dtype is np.float32 else 1e-13)


def test_products_and_sums_are_rounded_apart(place: Any) -> None:
    """A × b + c is two roundings, on every driver, unless the kernel asks for one."""

    @remap.kernel
    def kernel(a: remap.Slice, b: remap.Slice, c: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = a[i] * b[i] + c[i]

    random = np.random.default_rng(6)
    a, b, c = (random.normal(0, 1, 5000).astype(np.float32) for _ in range(3))
    out = place(5000, "float32")
    place.launch(kernel, place(a), place(b), place(c), out, grid=20, block=256)
    assert np.array_equal(out.to_host(), a * b + c)
    fused = (a.astype(np.float64) * b + c).astype(np.float32)
    assert not np.array_equal(fused, a * b + c)  # so the test can tell the two apart


def test_three_dimensions(place: Any) -> None:
    """Arrays of three dimensions have three extents and take three indices."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        n = int(i)
        rows, cols = x.shape[1], x.shape[2]
        out[i] = x.get(n // (rows * cols), n // cols % rows, n % cols, -1) + x.shape[0] * 1000 + x.ndim * 100

    values = np.arange(24, dtype=np.int64).reshape(2, 3, 4)
    x, out = place(values), place(30, "int64")
    place.launch(kernel, x, out, grid=1, block=30)
    assert out.to_host().tolist() == [v + 2300 for v in range(24)] + [2299] * 6


def test_threads_know_where_they_are(place: Any) -> None:
    """thread, block, block_size and grid_size have three axes each."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        t = remap.thread
        out[remap.index_1d()] = t.x

    with pytest.raises(CompileError):
        place.launch(kernel, place(4, "int64"), grid=1, block=4)

    @remap.kernel
    def right(out: remap.DisjointSlice) -> None:
        inner = (remap.thread.z * remap.block_size.y + remap.thread.y) * remap.block_size.x + remap.thread.x
        outer = (remap.block.z * remap.grid_size.y + remap.block.y) * remap.grid_size.x + remap.block.x
        size = remap.block_size.x * remap.block_size.y * remap.block_size.z
        remap.unchecked(out)[outer * size + inner] = outer * 1000 + inner

    out = place(2 * 3 * 4 * 5 * 2 * 3, "int64")
    place.launch(right, out, grid=(2, 3, 4), block=(5, 2, 3))
    assert out.to_host().tolist() == [b * 1000 + t for b in range(24) for t in range(30)]


# -- refusals --


def uses_barrier(n: int) -> int:
    """Wait, which a device function cannot."""
    remap.barrier()
    return n


def recursive(n: int) -> int:
    """Call itself."""
    return recursive(n - 1) if n > 0 else 0


def silent(n: int) -> Any:
    """Return on one path only."""
    while n > 3:
        return n
    n += 1
    if n > 5:
        return n + 1
    return None


names = ["a list"]


@remap.kernel
def lists(out: remap.DisjointSlice) -> None:
    v = [1, 2]
    out[remap.index_1d()] = v[0]


@remap.kernel
def strings(out: remap.DisjointSlice) -> None:
    out[remap.index_1d()] = "text"


@remap.kernel
def tries(out: remap.DisjointSlice) -> None:
    try:
        out[remap.index_1d()] = 1
    finally:
        pass


@remap.kernel
def prints(out: remap.DisjointSlice) -> None:
    print("hello")
    out[remap.index_1d()] = 1


@remap.kernel
def unknown(out: remap.DisjointSlice) -> None:
    out[remap.index_1d()] = nowhere  # type: ignore[name-defined]  # noqa: F821 # pyright: ignore[reportUndefinedVariable]


@remap.kernel
def captures_a_list(out: remap.DisjointSlice) -> None:
    out[remap.index_1d()] = names


@remap.kernel
def negative(x: remap.Slice, out: remap.DisjointSlice) -> None:
    out[remap.index_1d()] = x[-1]


@remap.kernel
def by_float(x: remap.Slice, out: remap.DisjointSlice) -> None:
    out[remap.index_1d()] = x[1.5]


@remap.kernel
def unassigned(out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    if i > 3:
        v = 1
    out[i] = v  # pyright: ignore[reportPossiblyUnboundVariable]


@remap.kernel
def returns(out: remap.DisjointSlice) -> int:
    return 3


@remap.kernel
def power(x: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    out[i] = x[i] ** 3


@remap.kernel
def waits(out: remap.DisjointSlice) -> None:
    out[remap.index_1d()] = uses_barrier(1)


@remap.kernel
def recurses(out: remap.DisjointSlice) -> None:
    out[remap.index_1d()] = recursive(3)


@remap.kernel
def falls_through(out: remap.DisjointSlice) -> None:
    out[remap.index_1d()] = silent(3)


@remap.kernel
def too_large(x: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    out[i] = int(np.uint8(x[i]) + 300)


@remap.kernel
def loops_over_array(x: remap.Slice, out: remap.DisjointSlice) -> None:
    for v in x:  # type: ignore[attr-defined]
        out[remap.index_1d()] = v


@remap.kernel
def bits_of_floats(x: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    out[i] = (x[i] * 0.5) & 1


@pytest.mark.parametrize(
    ("kernel", "line", "told"),
    [
        (lists, 2, "a kernel cannot have this (List)"),
        (strings, 2, "a kernel cannot have this"),
        (tries, 2, "a kernel cannot have this (Try)"),
        (prints, 2, "a kernel cannot call it"),
        (unknown, 2, "there is nothing of this name"),
        (captures_a_list, 2, "can be captured"),
        (negative, 2, "a negative one lies outside"),
        (by_float, 2, "an index is a whole number"),
        (unassigned, 5, "may be read before anything was assigned"),
        (returns, 2, "a kernel returns nothing"),
        (power, 3, "** 2 and no other power"),
        (loops_over_array, 2, "a kernel loops with: for k in range"),
        (bits_of_floats, 3, "bits of floating-point numbers"),
        (too_large, 3, "does not fit into uint8"),
    ],
    ids=lambda one: getattr(one, "name", None),
)
def test_what_a_kernel_cannot_have_is_named_with_its_line(
    place: Any, kernel: Any, line: int, told: str
) -> None:
    """Whatever the compiler cannot take is refused before the launch: the line, the text, the rule."""
    arguments = [place(8, "int32")] * (1 if kernel.function.__code__.co_argcount == 1 else 2)
    with pytest.raises(CompileError) as caught:
        kernel.launch(*arguments, grid=1, block=8, allow_overlap=True)
    first = kernel.function.__code__.co_firstlineno  # that of the decorator
    assert f"test_language.py:{first + line}: " in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("kernel", "function", "told"),
    [
        (waits, uses_barrier, "a device function cannot have a barrier"),
        (recurses, recursive, "cannot call itself"),
        (falls_through, silent, "it returns a value elsewhere"),
    ],
    ids=["barrier", "recursion", "no value"],
)
def test_what_a_device_function_cannot_have(place: Any, kernel: Any, function: Any, told: str) -> None:
    """The line is that of the function, and a note tells where it was called."""
    with pytest.raises(CompileError, match=told) as caught:
        kernel.launch(place(8, "int32"), grid=1, block=8)
    first = function.__code__.co_firstlineno
    assert any(f"test_language.py:{line}:" in str(caught.value) for line in range(first, first + 9))
    assert any("called from" in note for note in caught.value.__notes__)


def test_missing_source_is_told() -> None:
    """A function that was made with exec has no text to compile."""
    scope: dict[str, Any] = {"remap": remap}
    exec("@remap.kernel\ndef made(out: remap.DisjointSlice):\n    out[remap.index_1d()] = 1", scope)
    with pytest.raises(CompileError, match="source text is missing"):
        scope["made"].launch(np.zeros(3), grid=1, block=3)


def test_a_lambda_is_no_kernel() -> None:
    """Only functions written with def have lines and names for their parameters."""
    made = remap.kernel(lambda out: None)
    with pytest.raises(CompileError, match="def"):
        made.launch(1, grid=1, block=1)


def test_wrong_arguments(place: Any) -> None:
    """Number, kind and type of the arguments are checked against the parameters, by name."""
    x, out = place(8, "float32"), place(8, "float32")
    for arguments, told in (
        ((x,), "it has 2 parameters: x, out"),
        ((x, 3), "argument 'out': an array is wanted, and this is an int"),
        ((x.owner, out), "argument 'x': a buffer has bytes"),
        ((np.zeros((4, 4))[:, 1], out), "one after the other"),
        ((place(8, "float16"), out), "float16"),
        ((place(8, "complex64"), out), "complex64"),
        ((place((1, 2, 2, 2), "float32"), out), "4 dimensions"),
        (("text", out), "an array is wanted"),
    ):
        with pytest.raises(LaunchError, match=told.replace("(", r"\(")):
            collatz.launch(*arguments, grid=1, block=8)


def test_an_array_without_annotation(place: Any) -> None:
    """An array parameter says whether it is read or written."""

    @remap.kernel
    def bare(x: Any, out: remap.DisjointSlice) -> None:
        out[remap.index_1d()] = x[0]

    with pytest.raises(LaunchError, match=r"Write x: remap\.Slice"):
        bare.launch(place(8, "int32"), place(8, "int32"), grid=1, block=8)
