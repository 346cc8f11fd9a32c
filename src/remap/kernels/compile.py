"""Compile CUDA C++ text to an image, for one architecture or several, with or without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from remap import drivers
from remap.errors import CompileError
from remap.kernels import nvrtc
from remap.kernels.image import Entry, Image, ImageKind


def compile(
    source: str | Image,
    *,
    arch: str | Sequence[str] | None = None,
    debug: bool = False,
    lineinfo: bool = False,
    options: Sequence[str] = (),
    instances: Sequence[str] = (),
    name: str = "kernel.cu",
) -> Image:
    """Compile CUDA C++ source and return the image: a cubin or PTX for one architecture, a fatbin for several.

    `source` is text, or what `remap.source` made of text: not the name of a file, which `remap.load` takes.
    `arch` is one or several of `"sm_90"` (machine code) and `"compute_90"` (PTX, which the driver compiles for that
    capability or newer); without it, the code is for the devices of the CUDA driver. `debug` keeps what a debugger
    needs and turns optimisation off; `lineinfo` keeps the source lines for profilers. `options` go to NVRTC as
    they are. `instances` name template instances to compile, such as `"scale<float>"`, which are then functions of
    the module by that name. `name` stands for the source in messages.

    Works without a driver if `arch` is given. Raises `CompileError` with the compiler's log. Source: NVRTC, nvFatbin.
    """
    if isinstance(source, Image):
        if source.kind is not ImageKind.SOURCE:
            raise CompileError(f"compile {source.name}", rule=f"it is a {source.kind}, and compiled already")
        name, source = source.name, source.data.decode()
    elif source.endswith((".cu", ".cuh", ".cpp")):
        rule = "this is the name of a file, and the text of one is wanted"
        raise CompileError(f"compile {source!r}", rule=rule, next_step="Pass Path(name).read_text()")
    given: Any = arch  # a number too, from a program without types
    several = isinstance(given, Iterable) and not isinstance(given, str)
    chosen: tuple[Any, ...] = tuple(dict.fromkeys(given)) if several else (given,)
    if not chosen:
        raise CompileError("compile for no architecture", rule='name at least one, such as arch="sm_90"')
    known = nvrtc.architectures()
    for one in chosen:
        if not isinstance(one, str):
            raise TypeError(f'an architecture is a text such as "sm_90" or "compute_90", and not {one!r}')
        match = re.fullmatch(r"(?:sm|compute)_(\d+)[af]?", one)
        if match is None:
            raise CompileError(f"compile for {one!r}", rule='an architecture is "sm_90" or "compute_90", say')
        if int(match[1]) not in known:
            numbers = ", ".join(str(number) for number in known)
            raise CompileError(
                f"compile for {one}",
                rule=f"NVRTC {_dotted()} knows {numbers}",
                next_step="Choose one of these, or install another NVRTC",
            )
    return chosen


def _of_devices() -> tuple[str, ...]:
    driver = drivers.current()
    if driver.name != "cuda":
        raise CompileError(
            "compile without arch",
            rule=f"the {driver.name} driver has no architecture to compile for",
            next_step='Pass arch="sm_90", say; or load the source, which needs no compiler here',
        )
    capabilities = (driver.device_properties(i).compute_capability for i in range(driver.device_count()))
    return tuple(dict.fromkeys(architecture_for(capability) for capability in capabilities))


def _dotted() -> str:
    major, minor = nvrtc.version()
    return f"{major}.{minor}"
