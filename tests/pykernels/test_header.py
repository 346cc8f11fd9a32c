"""`remap.cuh` gives CUDA C++ the slices, the thread's own index and the fence of Python kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
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


def remap_cuh() -> str:
    """Return the header's text."""
    return (Path(remap.kernels.__file__).parent / "cuda" / "remap.cuh").read_text()


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


ROWS = (
    """
#define __device__
#define __global__
struct three { unsigned int x, y, z; };
static three threadIdx, blockIdx, blockDim = {1, 8, 1}, gridDim = {1, 1, 1};
static void __trap() { __builtin_abort(); }
"""
    + remap_cuh()
    + """
#include <cstdio>
int main()
{
    float memory[4] = {};
    struct { float *address; long long length; } raw = {memory, 4};
    auto &out = reinterpret_cast<remap::disjoint_slice<float, remap::width_space> &>(raw);
    const long long widths[] = {2, 1LL << 36, (1LL << 36) + 1, 1LL << 62};
    for (long long width : widths)
        for (threadIdx.y = 0; threadIdx.y < 8; ++threadIdx.y) {
            float *mine = out.get(remap::thread_index::grid(width));
            std::printf("%d ", mine ? int(mine - memory) : -1);
        }
}
"""
)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_a_width_that_no_number_holds_gives_no_element(tmp_path: Path) -> None:
    """Row × width + column never wraps: with such a width no thread has an element, so that no two have the same."""
    source, program = tmp_path / "rows.cpp", tmp_path / "rows"
    source.write_text(ROWS)
    subprocess.run(["g++", "-std=c++17", "-w", str(source), "-o", str(program)], check=True, timeout=100)
    told = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=100).stdout
    assert told.split() == ["0", "2"] + ["-1"] * 6 + ["0"] + ["-1"] * 7 + ["-1"] * 16
