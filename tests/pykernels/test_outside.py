"""Names from outside of a kernel: each function reads its own, values at each launch, and nothing stale is used."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import remap
from remap.kernels import PythonKernel

OFFSET = 1000.0
FACTOR = 2.0
TYPE: Any = np.float64


def turned(v: Any) -> Any:
    """Read a constant of a module."""
    return v * math.pi


def scaled(v: Any) -> Any:
    """Read a global value."""
    return v * FACTOR


def outer(v: Any) -> Any:
    """Call what reads a global value."""
    return scaled(v) + 1.0


@remap.kernel
def through_functions(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Read nothing from outside but through the functions that it calls."""
    i = remap.index_1d()
    out[i] = turned(x[i]) + outer(x[i])


def run(place: Any, kernel: PythonKernel, dtype: str = "float64") -> list[float]:
    """Return what a kernel makes of 1 to 4."""
    x, out = place(np.arange(1, 5, dtype=dtype)), place(4, dtype)
    place.launch(kernel, x, out, grid=1, block=4)
    return out.to_host().tolist()  # type: ignore[no-any-return]


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Give what makes a module of a text; called again, it makes the same module anew."""
    path = tmp_path / "written_by_a_test.py"
    sys.path.insert(0, str(tmp_path))

    def write(text: str) -> ModuleType:
        path.write_text(text)
        importlib.invalidate_caches()
        known = sys.modules.get(path.stem)
        return importlib.import_module(path.stem) if known is None else importlib.reload(known)

    yield write
    sys.path.remove(str(tmp_path))
    sys.modules.pop(path.stem, None)


def test_a_device_function_reads_values_from_outside(place: Any) -> None:
    """What a function captures is there in it, however deep it is called, and read at each launch."""
    assert run(place, through_functions) == [v * math.pi + v * 2.0 + 1.0 for v in (1.0, 2.0, 3.0, 4.0)]
    globals()["FACTOR"] = 5.0
    try:
        assert run(place, through_functions) == [v * math.pi + v * 5.0 + 1.0 for v in (1.0, 2.0, 3.0, 4.0)]
    finally:
        globals()["FACTOR"] = 2.0
    assert "FACTOR of scaled" in through_functions.layout(np.zeros(4), np.zeros(4))


def test_a_function_of_another_module_reads_its_own_globals(place: Any, written: Any) -> None:
    """A name means what it means where the function is written, though the kernel's module has the same name."""
    other = written("OFFSET = 7.0\n\ndef moved(v):\n    return v + OFFSET\n")
    moved = other.moved

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = moved(x[i]) + OFFSET

    assert run(place, kernel) == [1008.0, 1009.0, 1010.0, 1011.0]
    other.OFFSET = 8.0
    assert run(place, kernel) == [1009.0, 1010.0, 1011.0, 1012.0]


def adder(c: float) -> Callable[[Any], Any]:
    """Return a function that adds its own number."""

    def add(v: Any) -> Any:
        return v + c

    return add


def test_two_closures_have_their_own_values(place: Any) -> None:
    """Functions of one source with other cells are other functions."""
    one, other = adder(1.0), adder(10.0)

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = one(x[i]) * other(x[i])

    assert run(place, kernel) == [(v + 1) * (v + 10) for v in (1.0, 2.0, 3.0, 4.0)]


def test_functions_of_one_name_that_call_each_other(place: Any, written: Any) -> None:
    """Two functions of one name stay two, also where one calls the other."""
    inner = written("def add(v):\n    return v + 7.0\n").add

    def add(v: Any) -> Any:
        return inner(v) * 2.0

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = add(x[i])

    assert run(place, kernel) == [16.0, 18.0, 20.0, 22.0]


def test_a_structure_captured_by_a_device_function(place: Any) -> None:
    """Fields of a captured structure reach the function that reads them."""
    settings: Any = np.array((3, 0.5), np.dtype([("n", np.int32), ("by", np.float64)], align=True))[()]

    def scale(v: Any) -> Any:
        return v * settings.by + settings.n

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = scale(x[i])

    assert run(place, kernel) == [3.5, 4.0, 4.5, 5.0]


def test_a_helper_that_is_bound_again_is_taken_anew(place: Any) -> None:
    """A launch runs what the name means now: the first, the second, and the first again; a repeated launch too."""

    def helper(v: Any) -> Any:
        return v + 1.0

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = helper(x[i])

    first = helper
    x, out = place(np.arange(1, 5, dtype=np.float64)), place(4, "float64")
    for _ in range(3):
        place.launch(kernel, x, out, grid=1, block=4)
    assert out.to_host().tolist() == [2.0, 3.0, 4.0, 5.0]
    assert len(kernel._kept) == 1

    def doubled(v: Any) -> Any:
        return v * 2.0

    helper = doubled
    place.launch(kernel, x, out, grid=1, block=4)
    assert out.to_host().tolist() == [2.0, 4.0, 6.0, 8.0]
    helper = first
    place.launch(kernel, x, out, grid=1, block=4)
    assert out.to_host().tolist() == [2.0, 3.0, 4.0, 5.0]
    assert len(next(iter(kernel._variants.values()))) == 2, "what was compiled is used again"


def test_a_module_that_is_loaded_again(place: Any, written: Any) -> None:
    """A function behind a module's name is looked at as well: a cell of a notebook that is run again, say."""
    helpers = written("def change(v):\n    return v + 1.0\n")

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = helpers.change(x[i])

    assert run(place, kernel) == [2.0, 3.0, 4.0, 5.0]
    written("def change(v):\n    return v * 3.0  # longer, so that it is read anew\n")
    assert run(place, kernel) == [3.0, 6.0, 9.0, 12.0]


def inside_of(v: Any) -> Any:
    """Convert to a global type."""
    return TYPE(v)


def test_a_type_that_is_bound_again(place: Any) -> None:
    """A type is compiled in, in a function that the kernel calls too, and for a variable's annotation."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        w: TYPE = x[i]  # pyright: ignore[reportInvalidTypeForm]
        out[i] = inside_of(x[i]) + w

    x, out = place(np.array([1.5, 2.5])), place(2, "float64")
    place.launch(kernel, x, out, grid=1, block=2)
    assert out.to_host().tolist() == [3.0, 5.0]
    globals()["TYPE"] = np.int32
    try:
        place.launch(kernel, x, out, grid=1, block=2)
    finally:
        globals()["TYPE"] = np.float64
    assert out.to_host().tolist() == [2.0, 4.0]


def test_a_builtin_that_is_hidden_later(place: Any) -> None:
    """A global that takes the name of a builtin takes its place at the next launch."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = abs(x[i])

    assert run(place, kernel) == [1.0, 2.0, 3.0, 4.0]
    globals()["abs"] = turned
    try:
        assert run(place, kernel) == [v * math.pi for v in (1.0, 2.0, 3.0, 4.0)]
    finally:
        del globals()["abs"]


def test_what_modules_of_libraries_have_costs_a_repeated_launch_nothing(place: Any) -> None:
    """A kernel that takes from outside nothing but what remap, NumPy and math have is not looked at again."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = math.sqrt(x[i]) + np.float64(remap.thread.x)

    x, out = place(np.arange(1, 5, dtype=np.float64)), place(4, "float64")
    place.launch(kernel, x, out, grid=1, block=4)
    assert out.to_host().tolist() == [1.0, math.sqrt(2.0) + 1, math.sqrt(3.0) + 2, 5.0]
    (again,) = kernel._kept._launches.values()
    assert again.outside is None


def test_a_function_that_is_given_another_body(place: Any) -> None:
    """A function that stays the same object and does something else, as `%autoreload` makes it, is compiled anew."""

    def helper(v: Any) -> Any:
        return v + 1.0

    def other(v: Any) -> Any:
        return v * 2.0

    def through(v: Any) -> Any:
        return helper(v)

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = through(x[i])

    first, second = helper.__code__, other.__code__
    x, out = place(np.arange(1, 5, dtype=np.float64)), place(4, "float64")
    for code in (first, second, first, second):
        helper.__code__ = code
        for _ in range(3):
            out.copy_from(np.zeros(4))
            place.launch(kernel, x, out, grid=1, block=4)
            assert out.to_host().tolist() == [through(v) for v in (1.0, 2.0, 3.0, 4.0)]
    assert len(kernel._kept) == 1, "a launch with the same functions is kept"
    assert len(next(iter(kernel._variants.values()))) == 2
