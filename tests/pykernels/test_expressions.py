"""Random typed expressions: the same bits as NumPy, element by element, on whichever driver runs."""

from __future__ import annotations

import linecache
import math
import shutil
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import remap
from remap.kernels import ir
from remap.kernels.batch import Batch, Memory
from remap.kernels.frame import Frame

COUNT = 64
TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64")
INTEGERS = TYPES[:8]


class Term(NamedTuple):
    """An expression as a kernel writes it, as NumPy is asked, and its type ("weak" for a number of the source)."""

    kernel: str
    numpy: str
    dtype: str


def promoted(a: str, b: str) -> str:
    """Return the type that two become, where at most one is weak."""
    if "weak" in (a, b):
        return b if a == "weak" else a
    return np.promote_types(a, b).name


@st.composite
def terms(draw: Any, depth: int = 3) -> Term:
    """Draw an expression that has a type of its own."""
    kind = draw(st.integers(0, 9)) if depth else 0
    if kind == 0:
        dtype = draw(st.sampled_from(TYPES))
        return Term(f"{dtype}_[i]", f"{dtype}_", dtype)
    a = draw(terms(depth=depth - 1))
    if kind == 1:
        op = draw(st.sampled_from(["-", "~", "abs"]))
        if op == "~" and a.dtype.startswith("f"):
            op = "-"
        if op == "abs":
            return Term(f"abs({a.kernel})", f"abs({a.numpy})", a.dtype)
        return Term(f"({op}{a.kernel})", f"({op}{a.numpy})", a.dtype)
    if kind == 2:
        to = draw(st.sampled_from(TYPES))
        return Term(f"np.{to}({a.kernel})", f"cast({to!r}, {a.numpy})", to)
    if kind == 3:
        number = (
            draw(st.integers(0, 100))
            if not a.dtype.startswith("f")
            else draw(st.sampled_from([0.5, 3, 2.75]))
        )
        op = draw(st.sampled_from(["+", "-", "*", "//", "%", "/"]))
        dtype = "float64" if op == "/" and not a.dtype.startswith("f") else a.dtype
        return Term(f"({a.kernel} {op} {number})", f"({a.numpy} {op} {number})", dtype)
    b = draw(terms(depth=depth - 1))
    both = promoted(a.dtype, b.dtype)
    if kind == 4:
        name = draw(st.sampled_from(["min", "max"]))
        return Term(f"{name}({a.kernel}, {b.kernel})", f"{name}_({a.numpy}, {b.numpy})", both)
    if kind == 5:
        c, d = draw(terms(depth=depth - 1)), draw(terms(depth=depth - 1))
        op = draw(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]))
        joint = draw(st.sampled_from(["and", "or"]))
        test = f"{c.kernel} {op} {d.kernel} {joint} not {a.kernel} {op} {d.kernel}"
        asked = f"({c.numpy} {op} {d.numpy}) {joint} not ({a.numpy} {op} {d.numpy})"
        return Term(f"({a.kernel} if {test} else {b.kernel})", f"select({asked}, {a.numpy}, {b.numpy})", both)
    if kind == 6 and not both.startswith("f"):
        op = draw(st.sampled_from(["&", "|", "^", "<<", ">>"]))
        return Term(f"({a.kernel} {op} {b.kernel})", f"({a.numpy} {op} {b.numpy})", both)
    if kind == 7:
        name = draw(st.sampled_from(["sqrt", "floor", "ceil", "trunc", "rint"]))
        if not a.dtype.startswith("f"):
            a = Term(f"np.float64({a.kernel})", f"cast('float64', {a.numpy})", "float64")
        return Term(f"np.{name}({a.kernel})", f"np.{name}({a.numpy})", a.dtype)
    op = draw(st.sampled_from(["+", "-", "*", "//", "%", "/"]))
    dtype = "float64" if op == "/" and not both.startswith("f") else both
    return Term(f"({a.kernel} {op} {b.kernel})", f"({a.numpy} {op} {b.numpy})", dtype)


def cast(to: str, value: Any) -> Any:
    """Convert as kernels say it: integers wrap, floats are cut to the range and towards zero."""
    kind = np.dtype(to)
    if kind.kind == "f":
        return kind.type(value)
    limits = np.iinfo(kind)
    if isinstance(value, np.floating):
        if math.isnan(value):
            return kind.type(0)
        whole = limits.max if value == math.inf else limits.min if value == -math.inf else int(value)
        return kind.type(max(min(whole, limits.max), limits.min))
    return np.array(int(value) & (1 << 8 * kind.itemsize) - 1, f"u{kind.itemsize}").view(kind)[()]


def min_(a: Any, b: Any) -> Any:
    """Return Python's min in the common type."""
    kind = np.promote_types(a.dtype, b.dtype).type
    a, b = kind(a), kind(b)
    return b if b < a else a  # noqa: FURB136 (not min, which is what is tested)


def max_(a: Any, b: Any) -> Any:
    """Return Python's max in the common type."""
    kind = np.promote_types(a.dtype, b.dtype).type
    a, b = kind(a), kind(b)
    return b if b > a else a  # noqa: FURB136


def select(test: Any, a: Any, b: Any) -> Any:
    """Return one of two in the common type."""
    kind = np.promote_types(a.dtype, b.dtype).type
    return kind(a) if test else kind(b)


ORACLE = {"np": np, "cast": cast, "min_": min_, "max_": max_, "select": select, "abs": abs}


def numbers(dtype: str, seed: int) -> Any:
    """Return numbers of all sizes, with the extremes among them."""
    random = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind == "f":
        found = (random.normal(0, 1, COUNT) * 10.0 ** random.integers(-4, 12, COUNT)).astype(kind)
        found[:10] = [0, -0.0, np.inf, -np.inf, np.nan, 0.5, -0.5, 1, -1, 2.5]
        return found
    limits = np.iinfo(kind)
    found = random.integers(limits.min, limits.max, COUNT, dtype=kind, endpoint=True)
    small = random.integers(0, 12, COUNT).astype(kind)
    found = np.where(random.random(COUNT) < 0.5, small, found)
    found[:4] = [limits.min, limits.max, 0, 1]
    return random.permutation(found)


def made(lines: list[str], name: str) -> Any:
    """Return a kernel from text."""
    parameters = ", ".join(f"{dtype}_: remap.Slice" for dtype in TYPES)
    outs = ", ".join(f"out{k}: remap.DisjointSlice" for k in range(len(lines)))
    body = "".join(f"    out{k}[i] = {line}\n" for k, line in enumerate(lines))
    text = f"@remap.kernel\ndef {name}({parameters}, {outs}):\n    i = remap.index_1d()\n{body}"
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"remap": remap, "np": np}
    exec(compile(text, file, "exec"), scope)
    return scope[name]


def _says_cast(text: str) -> bool:
    """Tell whether an expression is itself a conversion, which is then no hidden one."""
    return text.replace("abs(", "").startswith("np.")


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy 1 promotes otherwise than NEP 50"
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(expressions=st.lists(terms(), min_size=4, max_size=4), seed=st.integers(0, 1000))
def test_random_expressions_have_numpys_bits(expressions: list[Term], seed: int) -> None:
    """Every expression has NumPy's type (NEP 50) and, for every element, NumPy's bits; any NaN counts as one."""
    kernel = made([one.kernel for one in expressions], "random_kernel")
    values = {f"{dtype}_": numbers(dtype, seed + k) for k, dtype in enumerate(TYPES)}
    inputs = list(values.values())
    with remap.allocate(COUNT * 8 * (len(inputs) + len(expressions))) as buffer:
        at, given_, outs = 0, [], []
        for array in inputs:
            given_.append(buffer.array(array.dtype, COUNT, offset=at))
            given_[-1].copy_from(array)
            at += COUNT * 8
        for one in expressions:
            outs.append(buffer.array(one.dtype, COUNT, offset=at))
            at += COUNT * 8
        variant = kernel._variant((*given_, *outs))
        stores = [one for one in variant.kernel.body if isinstance(one, ir.Store)]
        for one, store in zip(expressions, stores, strict=True):
            value = store.value.value if isinstance(store.value, ir.Cast) else store.value
            wanted = {np.dtype(one.dtype)} | ({value.type.dtype} if _says_cast(one.kernel) else set())  # type: ignore[union-attr]
            assert value.type.dtype in wanted, one.kernel  # type: ignore[union-attr]
        kernel.launch(*given_, *outs, grid=1, block=COUNT)
        found = [out.to_host() for out in outs]
    with np.errstate(all="ignore"):
        for one, result in zip(expressions, found, strict=True):
            for k in range(COUNT):
                lane = {name: array[k] for name, array in values.items()}
                expected = eval(one.numpy, {**ORACLE, **lane})
                assert expected.dtype == one.dtype, one.numpy
                same = expected.tobytes() == result[k].tobytes() or (
                    np.isnan(expected) and np.isnan(result[k])
                )
                used = {name: value for name, value in lane.items() if name in one.numpy}
                assert same, f"{one.kernel}\n{used}\n{expected!r} {result[k]!r}"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
@settings(
    max_examples=4,
    phases=[Phase.generate],  # making a failure smaller would run the compiler for minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(expressions=st.lists(terms(), min_size=20, max_size=20), seed=st.integers(0, 1000))
def test_the_generated_cpp_has_the_same_bits(in_cpp: Any, expressions: list[Term], seed: int) -> None:
    """The CUDA C++ of random expressions, run by an ordinary compiler, gives the bits of the host driver's lanes."""
    kernel = made([one.kernel for one in expressions], "random_kernel")
    inputs = [numbers(dtype, seed + k) for k, dtype in enumerate(TYPES)]
    outs = [np.zeros(COUNT, one.dtype) for one in expressions]
    in_cpp(kernel, *inputs, *outs, threads=COUNT)
    lanes = on_host(kernel, inputs, expressions)
    for one, a, b in zip(expressions, outs, lanes, strict=True):
        same = (a.view(f"u{a.itemsize}") == b.view(f"u{b.itemsize}")) | (np.isnan(a) & np.isnan(b))
        where = int(np.argmin(same))
        assert same.all(), (
            f"{one.kernel} at {[array[where] for array in inputs]}: {a[where]!r} in C++, {b[where]!r}"
        )


def on_host(kernel: Any, inputs: list[Any], expressions: list[Term]) -> list[Any]:
    """Return what the lanes of the host driver give, on NumPy arrays and without any driver."""
    outs = [np.zeros(COUNT, one.dtype) for one in expressions]
    variant = kernel._variant((*inputs, *outs))
    memories = [
        Memory(name[2:], array, (COUNT,), COUNT)
        for (name, _), array in zip(variant.kernel.parameters, (*inputs, *outs), strict=True)
    ]
    with np.errstate(all="ignore"):
        variant.host()(Frame(Batch("kernel", "file", (1, 1, 1), (COUNT, 1, 1), 0, 1)), *memories, 0)
    return outs
