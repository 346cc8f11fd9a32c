"""Kernels: images, compiling, loading and launching."""

from __future__ import annotations

from pathlib import Path

from remap.errors import InvalidValueError
from remap.kernels.compile import compile
from remap.kernels.image import Entry, Image, ImageKind, Parameter, ParameterType, source
from remap.kernels.launch import Kernel
from remap.kernels.module import Module, load
from remap.kernels.twin import Pointer

__all__ = [
    "Entry",
    "Image",
    "ImageKind",
    "Kernel",
    "Module",
    "Parameter",
    "ParameterType",
    "Pointer",
    "compile",
    "load",
    "shipped",
    "source",
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
