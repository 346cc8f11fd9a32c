"""Arrays on the device for the tests of Python kernels, and the proof that every kernel here compiles for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import remap
from remap.kernels import PythonKernel, nvrtc
from remap.kernels.built import image_for

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
