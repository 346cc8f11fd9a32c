"""Arrays on the device for the tests of Python kernels, and the proof that every kernel here compiles for GPUs."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import remap
from remap.kernels import PythonKernel, nvrtc
from remap.kernels.built import image_for
from remap.kernels.cpp import captured_layout
from remap.kernels.spelling import entry_name

_COMPILED: set[str] = set()


class Place:
    """Puts arrays on the device, in buffers that are closed at the end, and launches kernels on them."""

    def __init__(self) -> None:
        self.buffers: list[remap.Buffer] = []
        self.kernels: list[PythonKernel] = []

    def __call__(self, values: Any, dtype: Any = None) -> Any:
        """Return an array on the device with these values, or of this shape and type and full of zeros."""
        array = np.zeros(values, dtype) if dtype is not None else np.ascontiguousarray(values)
        buffer = remap.allocate(max(array.nbytes, 1))
        self.buffers.append(buffer)
        found = buffer.array(array.dtype, array.shape)
        found.copy_from(array)
        return found

    def launch(self, kernel: PythonKernel, *arguments: Any, **shape: Any) -> None:
        """Launch a kernel, and remember it."""
        self.kernels.append(kernel)
        kernel.launch(*arguments, **shape)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Give a `Place`. Afterwards, what its kernels became is shown to be CUDA C++ that compiles for every GPU."""
    made = Place()
    yield made
    for buffer in made.buffers:
        buffer.close()
    if not nvrtc.available() or request.node.get_closest_marker("many_kernels"):
        return
    for kernel in made.kernels:
        for variant in [one for several in kernel._variants.values() for one in several]:
            text = variant.cpp()
            if text not in _COMPILED:
                _COMPILED.add(text)
                image = image_for(text, kernel.name, kernel._fma, "compute_75")
                assert image.architectures == ("compute_75",)


SHIM = """
#include <cmath>
#include <cstdlib>
#include <cstring>
#define __device__
#define __global__
#define __shared__ static
#define __align__(n)
struct three { unsigned int x, y, z; };
static three threadIdx, blockIdx, blockDim, gridDim = {1, 1, 1};
static void __trap() { std::abort(); }
static float __int_as_float(int a) { float b; std::memcpy(&b, &a, 4); return b; }
static double __longlong_as_double(long long a) { double b; std::memcpy(&b, &a, 8); return b; }
template <class T> static T change(T *p, T value) { T old = *p; *p = value; return old; }
template <class T> static T atomicAdd(T *p, T value) { return change<T>(p, *p + value); }
template <class T> static T atomicMin(T *p, T value) { return change<T>(p, value < *p ? value : *p); }
template <class T> static T atomicMax(T *p, T value) { return change<T>(p, value > *p ? value : *p); }
template <class T> static T atomicExch(T *p, T value) { return change<T>(p, value); }
template <class T> static T atomicCAS(T *p, T old, T value) { return change<T>(p, *p == old ? value : *p); }
extern "C" void be_thread(unsigned int x, unsigned int y, unsigned int wide, unsigned int high)
{
    threadIdx = {x, y, 0};
    blockDim = {wide, high, 1};
}
"""
"""What stands for a GPU's compiler and threads, so that an ordinary compiler can run what a kernel becomes."""


@pytest.fixture(scope="session")
def in_cpp(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give a function that runs the CUDA C++ of a kernel in this process, one thread of a block after the other.

    So for kernels in which no thread waits for another. It changes the arrays that it is given.
    """
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    folder = tmp_path_factory.mktemp("cpp")

    def run(kernel: PythonKernel, *given: Any, threads: int | tuple[int, int]) -> None:
        wide, high = threads if isinstance(threads, tuple) else (threads, 1)
        register = 'asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(size));'
        text = SHIM + kernel.source(*given).replace(register, "size = 0;")
        text = re.sub(
            r"static_assert\(\(unsigned long long\)__INTADDR__.*?;", "", text
        )  # NVRTC's own offsetof
        name = f"kernel{len(list(folder.iterdir()))}"
        source, library = folder / f"{name}.cpp", folder / f"{name}.so"
        source.write_text(text)
        options = ["-O1", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
        command = ["g++", *options, str(source), "-o", str(library)]
        compiled = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
        assert not compiled.returncode, compiled.stderr
        loaded = ctypes.CDLL(str(library))
        arguments: list[Any] = []
        for one in given:
            if isinstance(one, np.ndarray):
                arguments += [ctypes.c_void_p(one.ctypes.data), ctypes.c_longlong(one.size)]
                arguments += [ctypes.c_longlong(extent) for extent in one.shape if one.ndim > 1]
            else:
                arguments.append(ctypes.c_double(one) if isinstance(one, float) else ctypes.c_longlong(one))
        variant = kernel._variant(given)
        layout = captured_layout(variant.kernel)
        if layout is not None:
            kind: Any = np.ctypeslib.as_ctypes_type(layout)
            arguments.append(kind.from_buffer_copy(*variant._captured_bytes()))
        for y in range(high):
            for x in range(wide):
                loaded.be_thread(x, y, wide, high)
                getattr(loaded, entry_name(kernel.name))(*arguments)

    return run


@pytest.fixture
def on_both(place: Place, request: pytest.FixtureRequest) -> Any:
    """Give a function that runs a kernel for one block on the driver and as C++, and returns what both left there.

    It returns the new contents of the arrays, which must be equal bit for bit; without g++ those of the driver.
    """
    in_cpp = request.getfixturevalue("in_cpp") if shutil.which("g++") is not None else None

    def run(kernel: PythonKernel, *given: Any, threads: int | tuple[int, int]) -> list[Any]:
        copies = [one.copy() if isinstance(one, np.ndarray) else one for one in given]
        there = [place(one) if isinstance(one, np.ndarray) else one for one in given]
        place.launch(kernel, *there, grid=1, block=threads)
        found = [one.to_host() for one in there if not isinstance(one, (int, float))]
        if in_cpp is None:
            return found
        in_cpp(kernel, *copies, threads=threads)
        arrays = [one for one in copies if isinstance(one, np.ndarray)]
        for one, other in zip(found, arrays, strict=True):
            same = np.array(one.tobytes() == other.tobytes())
            if one.dtype.kind == "f":  # NaNs are equal as NaNs
                same = one.view(f"u{one.itemsize}") == other.view(f"u{other.itemsize}")
                same |= np.isnan(one) & np.isnan(other)
            assert same.all(), f"{one} on the driver, {other} in C++"
        return found

    return run
