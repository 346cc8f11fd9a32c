"""`remap.cuh` gives CUDA C++ the slices, the thread's own index and the fence of Python kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import CompileError
from remap.kernels import ParameterType, Pointer
from remap.kernels.compile import compile as compile_source

TWICE = """
#include <remap.cuh>
extern "C" __global__ void twice(remap::slice<float> x, remap::disjoint_slice<float> out)
{
    auto i = remap::thread_index::linear();
    if (float *mine = out.get(remap::move(i))) *mine = 2 * x.get(i.number(), 0);
    remap::alias_fence();
}
"""

BODY = """
#include <remap.cuh>
extern "C" __global__ void kernel(remap::slice<float> x, remap::disjoint_slice<float> out,
                                  remap::disjoint_slice<float, remap::grid_space<16>> tile)
{{
    {}
}}
"""

FINE = (
    "auto i = remap::thread_index::grid<16>(); if (auto p = tile.get(remap::move(i))) *p = x[i.number()];",
    "out.get(remap::thread_index::linear());",
    "out.unchecked(3) = x[3];",
)

WRONG = {
    "an index from a number": "remap::index_of<remap::linear_space> i(3, true); out.get(remap::move(i));",
    "an index from a brace": "out.get({3, true});",
    "a copied index": "auto i = remap::thread_index::linear(); auto j = i;",
    "an index that was not moved": "auto i = remap::thread_index::linear(); out.get(i);",
    "an index of another space": "out.get(remap::thread_index::grid<16>());",
    "an index of another stride": "tile.get(remap::thread_index::grid<8>());",
    "a number": "*out.get(3) = 1;",
    "a write to a slice": "x[3] = 1;",
}


def compile_text(text: str) -> remap.Image:
    """Compile for one architecture, with no GPU."""
    return compile_source(text, arch="sm_90")


def test_it_compiles_and_tells_its_parameters() -> None:
    """A slice is a structure of 16 bytes, address and length."""
    entries = compile_text(TWICE).entries
    assert entries is not None
    (entry,) = entries
    assert entry.name == "twice"
    assert [tuple(one) for one in entry.parameters or ()] == [(16, ParameterType.BYTES)] * 2


@pytest.mark.parametrize("line", FINE)
def test_what_is_right_compiles(line: str) -> None:
    """The ways to use an index."""
    compile_text(BODY.format(line))


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_does_not_compile(what: str) -> None:
    """An index cannot be made, copied, kept or mixed up, and a slice cannot be written."""
    with pytest.raises(CompileError):
        compile_text(BODY.format(WRONG[what]))


def test_arrays_are_passed_as_slices(place: Any) -> None:
    """The packer gives an array as address and length where the parameter is a slice, on both drivers."""
    values = np.random.default_rng(0).random(100, dtype=np.float32)
    x, out = place(values), place(100, "float32")
    image = compile_text(TWICE) if remap.driver().name == "host" else compile_source(TWICE)
    with remap.load(image) as module:
        kernel = module.function("twice")

        @kernel.host
        def _(launch: object, x: Pointer, out: Pointer) -> None:
            out.write("float32", 100)[:] = x.read("float32", 100) * 2

        kernel.launch(x, out, grid=1, block=128)
        assert np.array_equal(out.to_host(), values * 2)
