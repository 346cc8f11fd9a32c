# ruff: noqa: PLC2401 (such names are what is tested)
"""Names of Python in CUDA C++: each stays itself, whatever others there are, and none is anything but a name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import remap
from remap.kernels import PythonKernel, nvrtc
from remap.kernels.cpp import Writer
from remap.kernels.spelling import entry_name, in_ascii, in_comment

N = 4


@remap.kernel
def parameters(x: remap.Slice, x_n: int, out: remap.DisjointSlice, data_p_x: float) -> None:
    i = remap.index_1d()
    out[i] = x[i] + x_n + data_p_x


@remap.kernel
def arrays(x: remap.Slice, x_n0: remap.Slice, x_p: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    out[i] = x[1, 1] + x_n0[i] * 10 + x_p[i] * 100


@remap.kernel
def shared(x: remap.Slice, out: remap.DisjointSlice) -> None:
    t = remap.shared_array(4, np.float32)
    t_m = remap.shared_array(4, np.float32)
    i = remap.index_1d()
    k = remap.thread.x
    t[k] = x[i]
    t_m[k] = 2.0
    out[i] = t[k] + t_m[k]


@remap.kernel
def größe(ß: remap.Slice, _udf: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    µ = ß[i] * 10
    _ub5 = _udf[i]
    _3bc = µ  # NFKC makes Greek of the micro sign
    out[i] = µ + _ub5 + _3bc


X = np.arange(N, dtype=np.float32)


@pytest.mark.parametrize(
    ("kernel", "given", "expected"),
    [
        (parameters, (X, 3, np.zeros(N, np.float32), 0.5), X + 3.5),
        (arrays, (np.ones((2, 2), np.float32), X, X, np.zeros(N, np.float32)), 1 + X * 110),
        (shared, (X, np.zeros(N, np.float32)), X + 2),
        (größe, (X, X, np.zeros(N, np.float32)), X * 21),
    ],
    ids=["parameters", "arrays", "shared", "letters"],
)
def test_names_that_look_like_those_of_the_compiler(
    on_both: Any, kernel: PythonKernel, given: Any, expected: Any
) -> None:
    """A kernel may name things as it likes: what is made for CUDA has names that no other has."""
    out = on_both(kernel, *given, threads=N)[-1]
    assert np.array_equal(out, expected)
    if nvrtc.available():
        image = kernel.compile(*given, arch="compute_75")
        assert [one.symbol for one in image.entries or ()] == [entry_name(kernel.name)]
        assert entry_name(kernel.name).isascii()


FIELDS = (
    ("my field", "v"),
    ("ß", "_udf"),
    ('a"b', "v"),
    ("a; int b", "v"),
    ("int", "class"),
    ("m1", "m0"),
    ("/*", "\\"),
    ('");\nextern "C" __global__ void evil() {}\nstatic_assert(1, "', "v"),
)


@pytest.mark.parametrize("names", FIELDS, ids=[ascii(one[0])[1:8] for one in FIELDS])
def test_fields_of_any_name(names: tuple[str, str]) -> None:
    """A type may come from a file: its fields are numbered in C++, and none of its text goes there."""

    @remap.kernel
    def kernel(x: remap.Slice, one: Any, out: remap.DisjointSlice, more: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = x[i]
        more[i] = one.v + one.pair.low

    kind = np.dtype([(name, np.float32) for name in names])
    value_type = np.dtype([("v", np.float32), ("pair", [("low", np.uint8), ("high", np.uint8)])], align=True)
    value = np.array((1.5, (3, 4)), value_type)[()]
    x = np.zeros(N, kind)
    x[names[0]], x[names[1]] = np.arange(N), 7
    text = kernel.source(x, value, x, X)
    assert not any(name in text.partition("using namespace")[2] for name in names if len(name) > 3)
    if nvrtc.available():
        kernel.compile(x, value, x, X, arch="compute_75")


def test_fields_are_read_and_written_by_their_number(place: Any) -> None:
    """Fields in another order than that of their names, read, written, and inside of one another."""
    inner = np.dtype([("b", np.int16), ("a", np.int16)])
    kind = np.dtype([("m1", np.int32), ("m0", inner), ("flag", np.bool_)], align=True)

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i].m1 = x[i].m0.a * 10 + x[i].m0.b
        out[i].m0 = x[i].m0
        out[i].flag = not x[i].flag

    values = np.zeros(N, kind)
    values["m0"]["a"], values["m0"]["b"] = np.arange(N), 3
    x, out = place(values), place(N, kind)
    place.launch(kernel, x, out, grid=1, block=N)
    found = out.to_host()
    assert found["m1"].tolist() == [3, 13, 23, 33]
    assert np.array_equal(found["m0"], values["m0"])
    assert found["flag"].all()


def test_spellings() -> None:
    """Names stay apart, and what stands in a comment does not end it."""
    assert in_ascii("p_ß + p__udf + p_ß * v_é") == "u0_p__df + p__udf + u0_p__df * u1_v__e9"
    assert entry_name("größe") == "remap_gr_uf6_udfe"
    assert entry_name('a"\n') == "remap_a_u22_ua"
    assert in_comment("<ipython-input 1>.py") == "<ipython-input 1>.py"
    assert in_comment("a\\\nint b;\\") == "a__int b__"


def test_a_file_whose_name_would_end_the_comment() -> None:
    """The file is told in a comment of one line, whatever it is called."""
    given = X, 3, np.zeros(N, np.float32), 0.5
    kernel = parameters._variant(given).kernel
    before, kernel.file = kernel.file, "/somewhere/else\nint evil;\\"
    try:
        first, second = Writer(kernel).text().splitlines()[:2]
    finally:
        kernel.file = before
    assert first == "// remap_parameters of else_int evil__, made by remap"
    assert "evil" not in second
