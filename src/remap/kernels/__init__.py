"""Kernels: images, compiling, loading and launching."""

from __future__ import annotations

from pathlib import Path

from remap.errors import InvalidValueError
from remap.kernels.compile import compile
from remap.kernels.image import Entry, Image, ImageKind, Parameter, ParameterType, source
from remap.kernels.index import (
    DisjointSlice,
    Slice,
    alias_fence,
    atomic_add,
    atomic_cas,
    atomic_exchange,
    atomic_max,
    atomic_min,
    barrier,
    block,
    block_size,
    dynamic_shared,
    fma,
    grid_size,
    index_1d,
    index_2d,
    shared_array,
    thread,
    unchecked,
    warp_index,
)
from remap.kernels.launch import Kernel
from remap.kernels.module import Module, load
from remap.kernels.python import PythonKernel, kernel
from remap.kernels.twin import Pointer

__all__ = [
    "DisjointSlice",
    "Entry",
    "Image",
    "ImageKind",
    "Kernel",
    "Module",
    "Parameter",
    "ParameterType",
    "Pointer",
    "PythonKernel",
    "Slice",
    "alias_fence",
    "atomic_add",
    "atomic_cas",
    "atomic_exchange",
    "atomic_max",
    "atomic_min",
    "barrier",
    "block",
    "block_size",
    "compile",
    "dynamic_shared",
    "fma",
    "grid_size",
    "index_1d",
    "index_2d",
    "kernel",
    "load",
    "shared_array",
    "shipped",
    "source",
    "thread",
    "unchecked",
    "warp_index",
]


def shipped(name: str) -> Path:
    """Return the CUDA C++ file of a kernel that comes with remap; its PTX lies beside it.

    Loading it compiles it where NVRTC is installed, and takes the PTX elsewhere.
    """
    path = Path(__file__).parent / "cuda" / f"{name}.cu"
    if not path.exists():
        names = ", ".join(sorted(one.stem for one in path.parent.glob("*.cu")))
        raise InvalidValueError(
            f"shipped kernel {name!r}", rule="there is none of this name", next_step=f"Take: {names}"
        )
    return path
