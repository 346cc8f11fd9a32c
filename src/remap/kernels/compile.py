"""Compile CUDA C++ text to an image, for one architecture or several, with or without a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    chosen = _architectures(arch)
    flags = [*options]
    # Debug code has its lines anyway, and the assembler warns of the pair.
    flags += ["--device-debug"] if debug else ["--generate-line-info"] if lineinfo else []
    members: list[tuple[str, bytes]] = []
    entries: dict[str, Entry] = {}
    for architecture in chosen:
        compiled = nvrtc.run(source, name, [f"--gpu-architecture={architecture}", *flags], instances)
        expressions = {symbol: expression for expression, symbol in compiled.lowered.items()}
        # PTX is there beside machine code, and it alone tells the types of the parameters.
        for entry in Image.from_bytes(compiled.ptx, name).entries or ():
            entries[entry.symbol] = Entry(entry.symbol, entry.parameters, expressions.get(entry.symbol, ""))
        members.append((architecture, compiled.cubin if architecture.startswith("sm_") else compiled.ptx))
    found = tuple(entries.values())
    if len(members) == 1:
        if chosen[0].startswith("sm_"):
            return Image(ImageKind.CUBIN, members[0][1], chosen, name, found)
        return Image(ImageKind.PTX, members[0][1].rstrip(b"\0"), chosen, name, found)
    return Image(ImageKind.FATBIN, nvrtc.join(members, name), chosen, name, found)


def architecture_for(capability: tuple[int, int]) -> str:
    """Return the architecture that the installed NVRTC should compile for, to run on a device.

    Machine code, unless the device is newer than the compiler: then PTX of the newest that both know.
    """
    number = capability[0] * 10 + capability[1]
    known = nvrtc.architectures()
    if number in known:
        return f"sm_{number}"
    older = [one for one in known if one < number]
    if not older:
        raise CompileError(
            f"compile for compute capability {capability[0]}.{capability[1]}",
            rule=f"NVRTC {_dotted()} compiles for {known[0]} and newer",
            next_step="Install an older NVRTC: pip install 'remap[cu12]'",
        )
    return f"compute_{older[-1]}"


def _architectures(arch: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the architectures to compile for, each once, checked against what NVRTC knows."""
    if arch is None:
        return _of_devices()
    several: Any = (arch,) if isinstance(arch, str | int | float) else arch  # a number, if no checker looked
    chosen: tuple[Any, ...] = tuple(dict.fromkeys(several))
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
