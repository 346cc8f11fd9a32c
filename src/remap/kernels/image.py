"""Images: compiled device code as a value, told apart by its bytes, with the kernels that are inside.

What is inside is read here and not asked of a driver, so that a wrong name, a wrong number of arguments or a wrong
architecture is found, and told in the same words, on machines that have no GPU.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from remap.errors import CudaResult, driver_error


class ImageKind(StrEnum):
    """What the bytes of an image are."""

    CUBIN = "cubin"
    FATBIN = "fatbin"
    PTX = "ptx"
    SOURCE = "source"


class ParameterType(StrEnum):
    """How the bytes of a kernel parameter are meant, as far as the image tells."""

    INTEGER = "integer"  # pointers too: PTX does not tell them apart
    FLOAT = "float"
    BYTES = "bytes"
    UNKNOWN = "unknown"


class Parameter(NamedTuple):
    """One parameter of a kernel: its size in bytes (0 where it is not known) and its type."""

    size: int
    type: ParameterType = ParameterType.UNKNOWN


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel inside an image.

    `symbol` is the name in the image, `expression` the C++ expression that it was asked for by, if any;
    `parameters` is None where the image does not tell them.
    """

    symbol: str
    parameters: tuple[Parameter, ...] | None = None
    expression: str = ""

    @property
    def name(self) -> str:
        """The unmangled name: the expression, or the symbol without what C++ added."""
        return self.expression or unmangled(self.symbol)


@dataclass(frozen=True, slots=True)
class Image:
    """Compiled device code, or CUDA C++ source that is compiled when it is loaded.

    `architectures` are the names that the code was made for: `sm_90` is machine code, `compute_90` is PTX, which a
    driver compiles for devices of that capability or newer. `entries` is None where it cannot be read (a fatbin
    with compressed members).
    """

    kind: ImageKind
    data: bytes = field(repr=False)
    architectures: tuple[str, ...]
    name: str
    entries: tuple[Entry, ...] | None = field(default=None, repr=False)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "image") -> Image:
        """Return the image that `data` is; raises `DriverError` (INVALID_IMAGE) if it is none."""
        if data.startswith(_ELF):
            member = _read_cubin(data, name)
            return cls(ImageKind.CUBIN, data, (member.architecture,), name, member.entries)
        if data.startswith(_FATBIN):
            members = list(_members(data, name))
            if not members:
                raise _not_an_image(name, "the fatbin is empty")
            found = {entry.symbol: entry for member in members for entry in member.entries or ()}
            whole = all(member.entries is not None for member in members)
            architectures = tuple(dict.fromkeys(member.architecture for member in members))
            return cls(ImageKind.FATBIN, data, architectures, name, tuple(found.values()) if whole else None)
        text = _text(data)
        if text is not None and _PTX_TARGET.search(text):
            member = _read_ptx(text)
            return cls(ImageKind.PTX, data, (member.architecture,), name, member.entries)
        if text is not None and "__global__" in text:
            return source(text, name=name)
        raise _not_an_image(name, "it is neither a cubin, a fatbin, PTX nor CUDA C++ source")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Image:
        """Return the image in a file; raises `DriverError` (FILE_NOT_FOUND or INVALID_IMAGE)."""
        path = Path(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise driver_error(
                "cuModuleLoad",
                CudaResult.FILE_NOT_FOUND,
                asked=f"load {path}",
                rule=(error.strerror or "it cannot be read").lower(),
                next_step="Name a cubin, fatbin, PTX or CUDA C++ file that exists and can be read",
            ) from error
        return cls.from_bytes(data, str(path))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the image to a file and return its path. `remap.load(path)` takes it again."""
        path = Path(path)
        path.write_bytes(self.data)
        return path

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Tell whether a device of this compute capability can run some of the code."""
        return any(_fits(architecture, capability) for architecture in self.architectures)


def source(text: str, *, name: str = "kernel.cu") -> Image:
    """Return CUDA C++ source as an image that `load` compiles for the device it is loaded on.

    The host driver needs no compiler for it: kernels have a Python twin there. Use `compile` to have the code now,
    or for several architectures.
    """
    entries = tuple(
        Entry(match["name"], tuple(map(_declared, _split(match["parameters"]))))
        for match in _GLOBAL.finditer(_COMMENT.sub(" ", text))
    )
    return Image(ImageKind.SOURCE, text.encode(), (), name, entries)


class _Member(NamedTuple):
    architecture: str
    entries: tuple[Entry, ...] | None


# -- names --


def unmangled(symbol: str) -> str:
    """Return the plain name of a C++ function outside of any class or template; other names as they are."""
    match = re.match(r"_Z(\d+)", symbol)
    if match is None:
        return symbol
    start = match.end()
    name = symbol[start : start + int(match[1])]
    is_template = symbol[start + len(name) :].startswith("I")
    return symbol if is_template else name


def _fits(architecture: str, capability: tuple[int, int]) -> bool:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if match is None:
        return False
    made_for = (int(match[2]), int(match[3]))
    if match[4] == "a":
        return capability == made_for
    if match[1] == "sm" or match[4] == "f":
        return capability[0] == made_for[0] and capability >= made_for
    return capability >= made_for


# -- CUDA C++ --

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_GLOBAL = re.compile(
    r"__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?"
    r"(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)"
)


def _split(parameters: str) -> list[str]:
    """Split the parameters of a C++ function at the commas that are not inside a template's angles."""
    while (shorter := re.sub(r"<[^<>]*>", "", parameters)) != parameters:
        parameters = shorter
    return [one for one in parameters.split(",") if one.strip() not in ("", "void")]


_QUALIFIERS = {"const", "volatile", "__restrict__", "__grid_constant__", "struct", "std", ":"}
_WHOLE = {"unsigned", "signed", "int", "long", "short", "char", "bool", "size_t", "ptrdiff_t"}
_SIZED = re.compile(r"u?int(8|16|32|64)_t")
_SIZES = {"long": 8, "size_t": 8, "ptrdiff_t": 8, "short": 2, "char": 1, "bool": 1}


def _declared(text: str) -> Parameter:
    """Return a parameter as C++ declares it: pointers and plain numbers have a size, all else is not known here."""
    words = [one for one in re.findall(r"\w+|\S", text.partition("=")[0]) if one not in _QUALIFIERS]
    if "&" in words:
        return Parameter(0)
    if "*" in words or "[" in words:
        return Parameter(8, ParameterType.INTEGER)
    named = len(words) > 1 and words[-1] not in _WHOLE
    kinds = {*(words[:-1] if named else words)}
    if kinds in ({"float"}, {"double"}):
        return Parameter(4 if kinds == {"float"} else 8, ParameterType.FLOAT)
    if kinds <= _WHOLE:
        return Parameter(
            next((size for one, size in _SIZES.items() if one in kinds), 4), ParameterType.INTEGER
        )
    sized = _SIZED.fullmatch(*kinds) if len(kinds) == 1 else None
    return Parameter(int(sized[1]) // 8, ParameterType.INTEGER) if sized else Parameter(0)


# -- PTX --

_PTX_TARGET = re.compile(r"^\s*\.target\s+sm_(\w+)", re.MULTILINE)
_PTX_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*[{.]", re.DOTALL)
_PTX_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(?P<type>[a-z]+)(?P<bits>\d+)[^,\[]*(?:\[(?P<count>\d+)\])?"
)


def _text(data: bytes) -> str | None:
    """Return bytes as text, None if they are none; a NUL may end PTX."""
    try:
        text = data.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _read_ptx(text: str) -> _Member:
    text = _COMMENT.sub(" ", text)
    target = _PTX_TARGET.search(text)
    entries = tuple(
        Entry(match[1], tuple(_ptx_parameter(one) for one in _PTX_PARAMETER.finditer(match[2] or "")))
        for match in _PTX_ENTRY.finditer(text)
    )
    return _Member(f"compute_{target[1]}" if target else "", entries)


def _ptx_parameter(match: re.Match[str]) -> Parameter:
    size = int(match["bits"]) // 8
    if match["count"] is not None:
        return Parameter(size * int(match["count"]), ParameterType.BYTES)
    return Parameter(size, ParameterType.FLOAT if match["type"] == "f" else ParameterType.INTEGER)


# -- cubin: an ELF file --

_ELF = b"\x7fELF"
_MACHINE_CUDA = 190
_ABI_WITH_ARCHITECTURE_ABOVE = 8  # e_ident[EI_ABIVERSION]: from this one on, e_flags are laid out another way
_KERNEL_PARAMETER = 0x17  # EIATTR_KPARAM_INFO in section .nv.info.<kernel>
_SIZED_VALUE = 0x04  # EIFMT_SVAL: the value follows with its size


def _read_cubin(data: bytes, name: str) -> _Member:
    try:
        (machine,) = struct.unpack_from("<H", data, 18)
        if machine != _MACHINE_CUDA:
            raise _not_an_image(name, "it is an ELF file, but not for a CUDA device")
        (flags,) = struct.unpack_from("<I", data, 48)
        sections = dict(_sections(data))
        entries = tuple(
            Entry(section.removeprefix(".nv.info."), _cubin_parameters(content))
            for section, content in sections.items()
            if section.startswith(".nv.info.") and f".text.{section.removeprefix('.nv.info.')}" in sections
        )
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise _not_an_image(name, "the cubin is damaged or cut short") from error
    newer = data[8] >= _ABI_WITH_ARCHITECTURE_ABOVE
    number = (flags >> 8 if newer else flags) & 0xFF
    specific = "a" if flags & (0x8 if newer else 0x800) else ""
    return _Member(f"sm_{number}{specific}", entries)


def _sections(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Give the name and the content of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name_offset, _type, _flags, _address, offset, size in headers:
        start = names + name_offset
        yield data[start : data.index(b"\0", start)].decode(), data[offset : offset + size]


def _cubin_parameters(info: bytes) -> tuple[Parameter, ...]:
    sizes: dict[int, int] = {}
    at = 0
    while at < len(info):
        form, attribute = info[at], info[at + 1]
        (length,) = struct.unpack_from("<H", info, at + 2) if form == _SIZED_VALUE else (0,)
        if form == _SIZED_VALUE and attribute == _KERNEL_PARAMETER:
            _index, ordinal, _offset, packed = struct.unpack_from("<IHHI", info, at + 4)
            sizes[ordinal] = packed >> 18
        at += 4 + length
    return tuple(Parameter(sizes[ordinal]) for ordinal in sorted(sizes))


# -- fatbin: members one after the other, each a cubin or PTX --

_FATBIN = b"\x50\xed\x55\xba"
_MEMBER_HEADER = struct.Struct("<HHIQI8xI")  # kind, version, header size, size, compressed size, architecture
_MEMBER_PTX = 1
_MEMBER_CUBIN = 2


def _members(data: bytes, name: str) -> Iterator[_Member]:
    try:
        header_size, size = struct.unpack_from("<HQ", data, 6)
        at, end = header_size, header_size + size
        if end > len(data):
            raise _not_an_image(name, f"the fatbin is cut short: {len(data)} of {end} bytes")
        while at < end:
            kind, _, header, size, compressed, number = _MEMBER_HEADER.unpack_from(data, at)
            content = data[at + header : at + header + size]
            if kind == _MEMBER_CUBIN:
                is_plain = content.startswith(_ELF)
                yield _read_cubin(content, name) if is_plain else _Member(f"sm_{number}", None)
            elif kind == _MEMBER_PTX:
                text = None if compressed else _text(content)
                yield _Member(f"compute_{number}", _read_ptx(text).entries if text is not None else None)
            at += header + size
            if header + size == 0:
                break
    except struct.error as error:
        raise _not_an_image(name, "the fatbin is damaged or cut short") from error


def _not_an_image(name: str, why: str) -> Exception:
    return driver_error(
        "cuModuleLoadDataEx",
        CudaResult.INVALID_IMAGE,
        asked=f"load {name}",
        rule=why,
        next_step="Take a file that nvcc or remap.compile made",
    )
