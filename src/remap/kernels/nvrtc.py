"""The calls of NVRTC and nvFatbin that remap uses, typed. Both work without a driver.

The modules are compiled and untyped, so they are `Any` here and nowhere above.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from remap.errors import CompileError

HEADER = Path(__file__).parent / "cuda" / "remap.cuh"
"""The header for CUDA C++: slices, the thread's own index, the fence between aliases."""

NOT_INSTALLED = "Install the compiler with: pip install 'remap[cu13]' (or cu12, to match the driver)"


class Compiled(NamedTuple):
    """What one run of the compiler gave: machine code if it was asked for, PTX always."""

    cubin: bytes
    ptx: bytes
    lowered: dict[str, str]


def architectures() -> tuple[int, ...]:
    """Return the compute capabilities that the installed NVRTC knows, 90 for 9.0; raises `CompileError`."""
    nvrtc = _nvrtc()
    result, known = nvrtc.nvrtcGetSupportedArchs()
    _check(nvrtc, result, "nvrtcGetSupportedArchs")
    return tuple(sorted(int(number) for number in known))


def version() -> tuple[int, int]:
    """Return the version of NVRTC; raises `CompileError` where it is not installed."""
    nvrtc = _nvrtc()
    result, major, minor = nvrtc.nvrtcVersion()
    _check(nvrtc, result, "nvrtcVersion")
    return int(major), int(minor)


def available() -> bool:
    """Tell whether NVRTC is installed."""
    try:
        version()
    except CompileError:
        return False
    return True


def run(source: str, name: str, options: Sequence[str], expressions: Sequence[str] = ()) -> Compiled:
    """Compile one translation unit for one architecture; raises `CompileError` with the compiler's log.

    `expressions` are C++ expressions that name kernels; their lowered names come back. `#include <remap.cuh>` finds the
    header that comes with remap.
    """
    nvrtc = _nvrtc()
    shipped = [HEADER] if HEADER.name in source else []
    texts, names = [one.read_bytes() for one in shipped], [one.name.encode() for one in shipped]
    result, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(texts), texts, names)
    _check(nvrtc, result, "nvrtcCreateProgram")
    try:
        for expression in expressions:
            (result,) = nvrtc.nvrtcAddNameExpression(program, expression.encode())
            _check(nvrtc, result, f"nvrtcAddNameExpression({expression})")
        encoded = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if result:
            log = _take(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
            raise CompileError(f"compile {name} ({' '.join(options)})", rule=log or _words(nvrtc, result))
        lowered: dict[str, str] = {}
        for expression in expressions:
            result, symbol = nvrtc.nvrtcGetLoweredName(program, expression.encode())
            _check(nvrtc, result, f"nvrtcGetLoweredName({expression})")
            lowered[expression] = bytes(symbol).decode()
        return Compiled(_take(nvrtc, "CUBIN", program), _take(nvrtc, "PTX", program), lowered)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def join(members: Sequence[tuple[str, bytes]], name: str) -> bytes:
    """Join the code for several architectures into one fatbin; raises `CompileError`.

    Nothing is compressed, so that older drivers, and remap itself, can read every member.
    """
    try:
        nvfatbin: Any = importlib.import_module("cuda.bindings.nvfatbin")
        options = ["-compress=false"]
        handle = nvfatbin.create(options, len(options))
    except (ImportError, RuntimeError) as error:
        raise CompileError(
            f"join {name} for {len(members)} architectures",
            rule=f"nvFatbin is not installed ({str(error).rstrip('. ')})",
            next_step=NOT_INSTALLED,
        ) from error
    try:
        for architecture, code in members:
            kind, number = architecture.split("_")
            if kind == "sm":
                nvfatbin.add_cubin(handle, code, len(code), number, name)
            else:
                nvfatbin.add_ptx(handle, code, len(code), number, name, "")
        out = bytearray(nvfatbin.size(handle))
        nvfatbin.get(handle, out)
        return bytes(out)
    except RuntimeError as error:  # nvFatbinError
        raise CompileError(f"join {name} for {len(members)} architectures", rule=str(error)) from error
    finally:
        nvfatbin.destroy(handle)


def _nvrtc() -> Any:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # RuntimeError: the package is there, the library is not
        raise CompileError(
            "compile CUDA C++",
            rule=f"NVRTC is not installed ({str(error).rstrip('. ')})",
            next_step=NOT_INSTALLED,
        ) from error
    return nvrtc


def _take(nvrtc: Any, what: str, program: Any) -> bytes:
    """Fetch one of a program's results by size and content."""
    result, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _check(nvrtc, result, f"nvrtcGet{what}Size")
    if size == 0:
        return b""
    out = bytearray(size)
    (result,) = getattr(nvrtc, f"nvrtcGet{what}")(program, out)
    _check(nvrtc, result, f"nvrtcGet{what}")
    return bytes(out)


def _check(nvrtc: Any, result: Any, call: str) -> None:
    if result:
        raise CompileError("compile CUDA C++", rule=f"{call} failed: {_words(nvrtc, result)}")


def _words(nvrtc: Any, result: Any) -> str:
    return str(getattr(result, "name", result))
