"""Numbers that a kernel is given, and those of its source: what does not fit is refused, what fits can be written."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import CompileError, LaunchError

SEED: Any = 0xCBF29CE484222325


@dataclasses.dataclass
class Inner:
    """Hold a small number."""

    k: np.uint8


@dataclasses.dataclass
class Settings:
    """Hold numbers of several types."""

    n: int
    by: np.float32
    inner: Inner


@remap.kernel
def settings_of(settings: Settings, out: remap.DisjointSlice) -> None:
    """Use all fields."""
    i = remap.index_1d()
    out[i] = settings.n * settings.by + settings.inner.k


@remap.kernel
def single(v: np.float32, out: remap.DisjointSlice) -> None:
    """Write a number."""
    i = remap.index_1d()
    out[i] = v


@remap.kernel
def double(v: float, out: remap.DisjointSlice) -> None:
    """Write a number."""
    i = remap.index_1d()
    out[i] = v


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Settings(1.7, np.float32(1), Inner(np.uint8(1))), "field n: 1.7: it is a float"),  # type: ignore[arg-type]
        (Settings(2.0, np.float32(1), Inner(np.uint8(1))), "field n: 2.0: it is a float"),  # type: ignore[arg-type]
        (Settings(1 << 63, np.float32(1), Inner(np.uint8(1))), "field n: .* does not fit into int64"),
        (Settings(1, 1e300, Inner(np.uint8(1))), r"field by: 1e\+300: it does not fit into float32"),  # type: ignore[arg-type]
        (Settings(1, np.float32(1), Inner(256)), "field inner.k: 256: it does not fit into uint8"),  # type: ignore[arg-type]
        (Settings(1, np.float32(1), Inner(np.int64(-1))), "field inner.k: .*does not fit into uint8"),  # type: ignore[arg-type]
        (Settings("1", np.float32(1), Inner(np.uint8(1))), "field n: '1': it is no number"),  # type: ignore[arg-type]
    ],
)
def test_a_field_holds_its_number_unchanged(place: Any, given: Settings, said: str) -> None:
    """What a field of a dataclass cannot hold is refused and never cut."""
    with pytest.raises(LaunchError, match=f"argument 'settings'.*{said}"):
        settings_of.launch(given, place(4, "float32"), grid=1, block=4)


def test_fields_that_fit(place: Any) -> None:
    """Whole numbers go into floats, and floats are rounded."""
    out = place(4, "float32")
    place.launch(settings_of, Settings(3, 2, Inner(255)), out, grid=1, block=4)  # type: ignore[arg-type]
    assert out.to_host().tolist() == [261.0] * 4


@pytest.mark.parametrize(
    "given", [1e300, -1e39, 10**400, float.fromhex("0x1.ffffffp+127"), np.float64(1e300)]
)
def test_a_float_that_is_too_large(place: Any, given: Any) -> None:
    """A number becomes infinite nowhere by being passed."""
    with pytest.raises(
        LaunchError, match=r"argument 'v': .* it does not fit into float32\. Pass a number that"
    ):
        single.launch(given, place(4, "float32"), grid=1, block=4)


@pytest.mark.parametrize("given", [3.4028234e38, math.inf, -math.inf, 5, True, np.int8(-3), 1e-300])
def test_a_float_that_fits(place: Any, given: Any) -> None:
    """Infinity is itself, and a small number may become 0."""
    out = place(4, "float32")
    place.launch(single, given, out, grid=1, block=4)
    assert out.to_host().tolist() == [float(np.float32(given))] * 4


def test_a_whole_number_that_no_float_holds(place: Any) -> None:
    """A number of any length is refused with an error that can be read."""
    with pytest.raises(
        LaunchError, match=r"argument 'v': a number of 1329 bits: it does not fit into float64"
    ):
        double.launch(10**400, place(4, "float64"), grid=1, block=4)


def test_constants_of_64_bits(place: Any) -> None:
    """The largest and the smallest number of each type can be written."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice, signed: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = np.uint64(0xCBF29CE484222325) ^ np.uint64(0xFFFFFFFFFFFFFFFF)
        signed[i] = -9223372036854775808

    out, signed = place(2, "uint64"), place(2, "int64")
    place.launch(kernel, out, signed, grid=1, block=2)
    assert out.to_host().tolist() == [0xCBF29CE484222325 ^ 0xFFFFFFFFFFFFFFFF] * 2
    assert signed.to_host().tolist() == [-(1 << 63)] * 2


def test_a_constant_that_is_too_large() -> None:
    """The advice can be followed, and there is none where no type is wide enough."""

    @remap.kernel
    def wide(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = 0xCBF29CE484222325

    @remap.kernel
    def wider(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = np.uint64(0x1CBF29CE484222325)

    out = np.zeros(4, np.uint64)
    with pytest.raises(CompileError, match=r"Write numpy.uint64\(14695981039346656037\)"):
        wide.launch(out, grid=1, block=4)
    with pytest.raises(CompileError, match=r"it does not fit into uint64"):
        wider.launch(out, grid=1, block=4)


def test_a_captured_number_that_is_too_large(place: Any) -> None:
    """The error names what is captured, and says how it can be; then it can."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = SEED

    out = place(4, "uint64")
    with pytest.raises(LaunchError, match=r"captured value SEED: 14695981039346656037.* numpy.uint64"):
        kernel.launch(out, grid=1, block=4)
    globals()["SEED"] = np.uint64(SEED)
    try:
        place.launch(kernel, out, grid=1, block=4)
    finally:
        globals()["SEED"] = int(SEED)
    assert out.to_host().tolist() == [SEED] * 4


def silent(v: Any) -> None:
    """Return nothing."""
    _ = v


def test_a_function_that_returns_nothing_has_no_value(place: Any) -> None:
    """It may be called on a line of its own; used as a value it is refused, with the line."""

    @remap.kernel
    def right(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        silent(x[i])
        out[i] = x[i]

    @remap.kernel
    def wrong(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = silent(x[i])  # type: ignore[func-returns-value]

    x, out = place(np.arange(4.0)), place(4, "float64")
    place.launch(right, x, out, grid=1, block=4)
    assert out.to_host().tolist() == [0.0, 1.0, 2.0, 3.0]
    line = wrong.function.__code__.co_firstlineno + 3
    with pytest.raises(
        CompileError, match=rf"test_numbers\.py:{line}: silent\(x\[i\]\): silent returns nothing"
    ):
        wrong.launch(x, out, grid=1, block=4)


FLAGS = np.array([255, 2, 1, 0, 128, 3, 0, 254], np.uint8)


def test_a_boolean_of_any_byte_is_true(on_both: Any) -> None:
    """Memory that was written as another type holds other bytes than 0 and 1, and every one but 0 is True."""

    @remap.kernel
    def kernel(
        x: remap.Slice,
        whole: remap.DisjointSlice,
        both: remap.DisjointSlice,
        out: remap.DisjointSlice,
        other: remap.DisjointSlice,
    ) -> None:
        i = remap.index_1d()
        k = int(i)
        s = remap.shared_array(8, np.bool_)
        s[k] = x[k]
        whole[i] = x[i] + 1 + 10 * (s[k] ^ True) + 100 * x.get(k + 1, True) + 1000 * x.get(i, False)
        both[i] = (x[k] & x[(k + 1) % 8]) * 1 + (10 if x[i] == True else 20)  # noqa: E712
        out[i] = x[k]
        if not other[i]:
            other[i] = x[i] | False

    flags = FLAGS.view(np.bool_)
    true = FLAGS != 0
    _, whole, both, out, other = on_both(
        kernel, flags, np.zeros(8, np.int64), np.zeros(8, np.float32), flags[::-1].copy(), flags, threads=8
    )
    after = np.append(true[1:], True)
    assert whole.tolist() == (true + 1 + 10 * ~true + 100 * after + 1000 * true).tolist()
    assert both.tolist() == ((true & np.roll(true, -1)) + np.where(true, 10, 20)).tolist()
    assert out.view(np.uint8).tolist() == true.astype(np.uint8).tolist()
    assert other.view(np.uint8).tolist() == FLAGS.tolist(), "what is not written stays"


def read_flag(p: Any) -> Any:
    """Read a boolean of a structure."""
    return p.flag


def test_a_boolean_field_of_any_byte_is_true(on_both: Any) -> None:
    """So are fields: of elements, of structures by value, and of what is taken from outside."""
    kind = np.dtype([("flag", np.bool_), ("n", np.int16)], align=True)
    outside: Any = np.array([2, 0], np.int16).view(kind)[0]

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = x[i].flag + 10 * read_flag(x[int(i)]) + 100 * (outside.flag + 1)

    values = np.zeros(8, kind)
    values.view(np.uint8)[::4] = FLAGS
    _, out = on_both(kernel, values, np.zeros(8, np.int64), threads=8)
    assert out.tolist() == ((FLAGS != 0) * 11 + 200).tolist()
