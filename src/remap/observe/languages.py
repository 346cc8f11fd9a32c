"""The languages that a trace is printed in: C over `cuda.h`, and Python over cuda-bindings."""

from __future__ import annotations

from typing import Any, ClassVar

from remap.errors import InvalidValueError
from remap.observe.program import Argument, Writer

_FLAGS = {
    "none": "CU_MEM_ACCESS_FLAGS_PROT_NONE",
    "r": "CU_MEM_ACCESS_FLAGS_PROT_READ",
    "rw": "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
}
_TYPES = {
    "device": "CU_MEM_LOCATION_TYPE_DEVICE",
    "host": "CU_MEM_LOCATION_TYPE_HOST",
    "host node": "CU_MEM_LOCATION_TYPE_HOST_NUMA",
}
_HANDLES = {
    "posix_fd": "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
    "fabric": "CU_MEM_HANDLE_TYPE_FABRIC",
    "win32": "CU_MEM_HANDLE_TYPE_WIN32",
}


def _place(name: str) -> tuple[str, int]:
    """Return the CUDA name and the number of a location."""
    if name == "host":
        return _TYPES["host"], 0
    kind, _, number = name.rpartition(" ")
    return _TYPES[kind], int(number)


class _Lines:
    """What both languages share."""

    mark: ClassVar[str] = ""

    def __init__(self, about: str) -> None:
        self.about = about
        self.lines: list[str] = []
        self._host = 1

    def host(self, size: int) -> str:
        """Return the host memory that all copies use."""
        self._host = max(self._host, int(size))
        return "host"


class C(_Lines):
    """C11 over `cuda.h`; every call is checked, and the program ends with the first that fails."""

    def call(self, function: str, arguments: list[Argument], made: tuple[str, str] | None = None) -> None:
        """Write a checked call."""
        said = [_c(one) for one in arguments]
        if made is None:
            self.lines.append(f"CHECK({function}({', '.join(said)}));")
            return
        kind, name = made
        self.lines.append(f"{kind} {name};")
        if function == "cuDevicePrimaryCtxRetain":
            said = [f"device({said[0]})"]
        self.lines.append(f"CHECK({function}({', '.join([f'&{name}', *said])}));")

    def comment(self, text: str) -> None:
        """Write a remark."""
        self.lines.append(f"/* {text} */")

    def memory(self, properties: dict[str, Any]) -> str:
        """Return the properties of an allocation as an expression."""
        kind, number = _place(properties["location"])
        handles = " | ".join(_HANDLES[one] for one in sorted(properties["handle_types"])) or "0"
        compress = "CU_MEM_ALLOCATION_COMP_GENERIC" if properties["compressible"] else "0"
        rdma = int(bool(properties["rdma"]))
        return f"memory_at({kind}, {number}, {handles}, {compress}, {rdma})"

    def rights(self, address: str, size: int, grants: list[Any]) -> None:
        """Write cuMemSetAccess."""
        self.lines.append("{")
        self.lines.append("    CUmemAccessDesc rights[] = {")
        for place, right in grants:
            kind, number = _place(place)
            self.lines.append(f"        right({kind}, {number}, {_FLAGS[right]}),")
        self.lines.append("    };")
        self.lines.append(f"    CHECK(cuMemSetAccess({address}, {size}, rights, {len(grants)}));")
        self.lines.append("}")

    def text(self) -> str:
        """Return the whole program."""
        body = "\n".join(f"    {line}" for line in self.lines)
        return _C.replace("@about@", self.about).replace("@host@", str(self._host)).replace("@body@", body)


def _c(argument: Argument) -> str:
    if isinstance(argument, str):
        return argument
    return f"{argument}ull" if argument > 0x7FFF_FFFF else str(argument)


class Python(_Lines):
    """Python over `cuda.bindings.driver`; every call is checked."""

    def call(self, function: str, arguments: list[Argument], made: tuple[str, str] | None = None) -> None:
        """Write a checked call."""
        said = ", ".join(self._argument(function, one) for one in arguments)
        call = f"check(cuda.{function}({said}))"
        if made is None:
            self.lines.append(call)
        elif made[0] == "CUdeviceptr":
            self.lines.append(f"{made[1]} = int({call})")
        else:
            self.lines.append(f"{made[1]} = {call}")

    def comment(self, text: str) -> None:
        """Write a remark."""
        self.lines.append(f"# {text}")

    def memory(self, properties: dict[str, Any]) -> str:
        """Return the properties of an allocation as an expression."""
        kind, number = _place(properties["location"])
        handles = [
            f"cuda.CUmemAllocationHandleType.{_HANDLES[one]}" for one in sorted(properties["handle_types"])
        ]
        options = f", handles=[{', '.join(handles)}]" if handles else ""
        options += ", compressible=True" if properties["compressible"] else ""
        options += ", rdma=True" if properties["rdma"] else ""
        return f"memory_at(cuda.CUmemLocationType.{kind}, {number}{options})"

    def rights(self, address: str, size: int, grants: list[Any]) -> None:
        """Write cuMemSetAccess."""
        said = ", ".join(
            f"right(cuda.CUmemLocationType.{kind}, {number}, cuda.CUmemAccess_flags.{_FLAGS[right]})"
            for (kind, number), right in ((_place(place), right) for place, right in grants)
        )
        self.lines.append(f"check(cuda.cuMemSetAccess({address}, {size}, [{said}], {len(grants)}))")

    def text(self) -> str:
        """Return the whole program."""
        body = "\n".join(self.lines)
        return (
            _PYTHON.replace("@about@", self.about).replace("@host@", str(self._host)).replace("@body@", body)
        )

    def _argument(self, function: str, argument: Argument) -> str:
        if isinstance(argument, int):
            return f"device({argument})" if function == "cuDevicePrimaryCtxRetain" else str(argument)
        if argument.startswith("(void *)"):
            return argument[len("(void *)") :].removeprefix("(").removesuffix(")")
        if argument in _PYTHON_WORDS:
            return _PYTHON_WORDS[argument]
        return argument


_PYTHON_WORDS = {
    "CU_STREAM_LEGACY": "1",
    "CU_STREAM_PER_THREAD": "2",
    "CU_STREAM_NON_BLOCKING": "int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)",
    "CU_STREAM_DEFAULT": "int(cuda.CUstream_flags.CU_STREAM_DEFAULT)",
    "CU_EVENT_DEFAULT": "int(cuda.CUevent_flags.CU_EVENT_DEFAULT)",
    "CU_EVENT_DISABLE_TIMING": "int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)",
    "CU_MEM_ATTACH_GLOBAL": "int(cuda.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)",
}

LANGUAGES: dict[str, type[C | Python]] = {"c": C, "python": Python}


def writer(language: str, about: str) -> Writer:
    """Return what writes a language; `about` is one line for the top of the program."""
    try:
        clean = "".join(letter if letter.isprintable() else "?" for letter in about)
        return LANGUAGES[language](
            clean.replace("*/", "* /").replace("/*", "/ *").replace('"""', "'''").replace("\\", "/")
        )
    except KeyError:
        raise InvalidValueError(
            f"a trace as {language!r}", rule=f"the languages are {', '.join(LANGUAGES)}"
        ) from None


_C = """\
/* @about@
   cc -I<cuda>/include trace.c -lcuda */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call) check((call), #call)

static void check(CUresult result, const char *call)
{
    const char *name = "an unknown error";
    if (result == CUDA_SUCCESS)
        return;
    cuGetErrorName(result, &name);
    fprintf(stderr, "%s: %s\\n", call, name);
    exit(1);
}

static CUdevice device(int number)
{
    CUdevice found;
    CHECK(cuDeviceGet(&found, number));
    return found;
}

static const CUmemAllocationProp *memory_at(CUmemLocationType type, int id, unsigned handles,
                                            unsigned char compression, unsigned char rdma)
{
    static const CUmemAllocationProp nothing;
    static CUmemAllocationProp asked;
    asked = nothing;
    asked.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    asked.location.type = type;
    asked.location.id = id;
    asked.requestedHandleTypes = (CUmemAllocationHandleType)handles;
    asked.allocFlags.compressionType = compression;
    asked.allocFlags.gpuDirectRDMACapable = rdma;
    return &asked;
}

static CUmemAccessDesc right(CUmemLocationType type, int id, CUmemAccess_flags flags)
{
    static const CUmemAccessDesc nothing;
    CUmemAccessDesc found = nothing;
    found.location.type = type;
    found.location.id = id;
    found.flags = flags;
    return found;
}

int main(void)
{
    void *host = calloc(1, @host@); /* what was in host memory is not in the trace */
    (void)&memory_at, (void)&right, (void)&device; /* whether they are used or not */
    CHECK(cuInit(0));
@body@
    free(host);
    return 0;
}
"""

_PYTHON = '''\
"""@about@"""

import ctypes

from cuda.bindings import driver as cuda


def check(result):
    error, *values = result
    if error:
        raise RuntimeError(error.name)
    return values[0] if values else None


def device(number):
    return check(cuda.cuDeviceGet(number))


def memory_at(kind, number, handles=(), compressible=False, rdma=False):
    asked = cuda.CUmemAllocationProp()
    asked.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    asked.location.type = kind
    asked.location.id = number
    if handles:
        asked.requestedHandleTypes = cuda.CUmemAllocationHandleType(sum(int(one) for one in handles))
    if compressible:
        asked.allocFlags.compressionType = int(cuda.CUmemAllocationCompType.CU_MEM_ALLOCATION_COMP_GENERIC)
    if rdma:
        asked.allocFlags.gpuDirectRDMACapable = 1
    return asked


def right(kind, number, flags):
    found = cuda.CUmemAccessDesc()
    found.location.type = kind
    found.location.id = number
    found.flags = flags
    return found


memory = ctypes.create_string_buffer(@host@)  # what was in host memory is not in the trace
host = ctypes.addressof(memory)
check(cuda.cuInit(0))
@body@
'''
