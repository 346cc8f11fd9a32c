"""Pack the arguments of a kernel that was compiled elsewhere: check them, and lay them out for cuLaunchKernel.

A compiled kernel takes bytes and trusts the caller. So an argument is taken only where its bytes are certain: memory
gives its address, NumPy and ctypes scalars have a type of their own, and a Python number takes the size and type of
the parameter, which the image tells. What does not fit is refused before anything is launched.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from remap.errors import InvalidValueError, LaunchError
from remap.kernels.image import Parameter, ParameterType
from remap.spans import Span

_POINTER = 8
_UNSIGNED = {1: "B", 2: "H", 4: "I", 8: "Q"}
_SIGNED = {1: "b", 2: "h", 4: "i", 8: "q"}
_FLOATS = {2: "e", 4: "f", 8: "d"}
_ANY = Parameter(0)
_CTYPES: Any = (ctypes.Structure, ctypes.Union, ctypes.Array, ctypes._SimpleCData)


class Address(int):
    """An argument that is a device address, told apart from a number for kernels that run in Python."""


class Arguments:
    """The arguments of one launch: `types.PackedArguments`, and what the launch has to know about them."""

    __slots__ = ("block", "pointers", "spans", "streams", "traceable", "values")

    def __init__(self) -> None:
        self.values: tuple[object, ...] = ()
        self.pointers = 0
        self.block: _Block | None = None
        self.spans: list[Span] = []
        self.streams: list[int] = []
        # Whether every address is that of a span: otherwise nobody can say what the kernel may touch.
        self.traceable = True


class Packer:
    """Packs the arguments of one kernel; its blocks of bytes are used again and again.

    `parameters` is None where the image does not tell them: then every argument must have a type of its own.
    """

    def __init__(self, kernel: str, parameters: Sequence[Parameter] | None) -> None:
        self._kernel = kernel
        self.parameters = tuple(parameters) if parameters is not None else None
        self._layouts: dict[str, _Layout] = {}

    def pack(self, given: tuple[Any, ...]) -> Arguments:
        """Return `given` as bytes with an array of pointers to them; `give_back` must follow the launch."""
        arguments = Arguments()
        codes, raw = self._encode(given, arguments)
        key = " ".join(codes)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts.setdefault(key, _Layout(codes))
        block = layout.fill(raw)
        arguments.block = block
        arguments.pointers = block.pointers
        return arguments

    def values(self, given: tuple[Any, ...]) -> Arguments:
        """Return `given` checked in the same way, as Python values for a kernel that runs in Python."""
        arguments = Arguments()
        codes, raw = self._encode(given, arguments)
        arguments.values = tuple(
            Address(bits) if code == "P" else value
            for code, bits, value in zip(codes, raw, given, strict=True)
        )
        return arguments

    def _encode(self, given: tuple[Any, ...], arguments: Arguments) -> tuple[list[str], list[Any]]:
        parameters = self.parameters
        if parameters is None:
            parameters = (_ANY,) * len(given)
        elif len(parameters) != len(given):
            raise LaunchError(
                f"launch {self._kernel} with {len(given)} arguments",
                rule=f"it has {len(parameters)} parameters",
            )
        codes: list[str] = []
        raw: list[Any] = []
        code: str
        bits: Any
        for index, (value, parameter) in enumerate(zip(given, parameters, strict=True)):
            if isinstance(value, Span):
                code, bits = "P", value._address  # not .address: it does not escape here
                arguments.spans.append(value)
                self._check_pointer(index, value, parameter)
            elif isinstance(value, np.generic):
                code, bits = self._typed(index, value, parameter)
            elif isinstance(value, (int, float)):
                code, bits = self._number(index, value, parameter)
            else:
                code, bits = self._other(index, value, parameter, arguments)
            codes.append(code)
            raw.append(bits)
        return codes, raw

    def _check_pointer(self, index: int, value: object, parameter: Parameter) -> None:
        if parameter.size not in (_POINTER, 0) or parameter.type is ParameterType.FLOAT:
            raise self._refuse(index, value, f"the parameter is no pointer, but {_told(parameter)}")

    def _typed(self, index: int, value: Any, parameter: Parameter) -> tuple[str, bytes]:
        """Encode a NumPy scalar, structures included, by its own type."""
        kind = value.dtype.kind
        if parameter.size not in (value.nbytes, 0):
            raise self._refuse(index, value, f"the parameter is {_told(parameter)}")
        if (parameter.type is ParameterType.FLOAT and kind in "iub") or (
            parameter.type is ParameterType.INTEGER and kind == "f"
        ):
            raise self._refuse(index, value, f"the parameter is {_told(parameter)}")
        if kind not in "iubfcV":
            raise self._refuse(index, value, "such a scalar means nothing on a device")
        return f"{value.nbytes}s", value.tobytes()

    def _number(self, index: int, value: float, parameter: Parameter) -> tuple[str, Any]:
        """Encode a Python number in the size and type of the parameter."""
        size, kind = parameter
        if self.parameters is None:
            raise self._refuse(
                index,
                value,
                "the image does not tell the types of its parameters, and a Python number has no size",
                "Pass numpy.int64(…) or numpy.float32(…), or name the types: function(name, parameters=[…])",
            )
        if size == 0:  # source that nobody has compiled: only a twin in Python will see it
            return "", value
        is_whole = isinstance(value, int)
        if kind is ParameterType.BYTES or size not in _UNSIGNED:
            raise self._refuse(
                index, value, f"the parameter is {_told(parameter)}", "Pass a structured NumPy scalar"
            )
        if kind is ParameterType.FLOAT or not is_whole:
            if kind is ParameterType.INTEGER or size not in _FLOATS:
                raise self._refuse(index, value, f"the parameter is {_told(parameter)}")
            try:
                struct.pack(_FLOATS[size], value)
            except OverflowError:
                raise self._refuse(index, value, f"it does not fit into {size} bytes") from None
            return _FLOATS[size], value
        # Signed and unsigned parameters look alike in an image, so both ranges are taken.
        if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
            raise self._refuse(index, value, f"it does not fit into {size} bytes")
        return (_SIGNED if value < 0 else _UNSIGNED)[size], value

    def _other(self, index: int, value: Any, parameter: Parameter, arguments: Arguments) -> tuple[str, Any]:
        """Encode what is neither a span nor a number: other memory, ctypes values, a null pointer."""
        if value is None:
            self._check_pointer(index, value, parameter)
            return "P", 0
        if isinstance(value, _CTYPES):
            content = bytes(value)
            if parameter.size not in (len(content), 0):
                raise self._refuse(index, value, f"the parameter is {_told(parameter)}")
            return f"{len(content)}s", content
        span = getattr(value, "span", None)
        if isinstance(span, Span):
            arguments.spans.append(span)
        else:
            arguments.traceable = False
        address = getattr(value, "address", None)
        if isinstance(address, int):
            self._check_pointer(index, value, parameter)
            return "P", address
        if type(value) is np.ndarray:
            raise self._refuse(
                index, value, "it is host memory", "Copy it to a buffer: buffer.copy_from_host(array)"
            )
        interface: Any = getattr(value, "__cuda_array_interface__", None)
        if interface is None:
            rule = "an argument is memory (a buffer, an array on the device), a number, or a NumPy or ctypes scalar"
            raise self._refuse(index, value, rule)
        self._check_pointer(index, value, parameter)
        stream = interface.get("stream")
        if stream is not None:
            arguments.streams.append(int(stream))
        return "P", int(interface["data"][0])

    def _refuse(self, index: int, value: object, rule: str, next_step: str = "") -> LaunchError:
        kind = type(value)
        what = (
            f"{value!r} ({kind.__name__})" if isinstance(value, (int, float, np.generic)) else kind.__name__
        )
        return LaunchError(f"launch {self._kernel}, argument {index}: {what}", rule=rule, next_step=next_step)


def parse_parameters(types: Sequence[str]) -> tuple[Parameter, ...]:
    """Return the parameters that a caller names: `"pointer"`, or a NumPy type such as `"int64"` for a scalar."""
    found: list[Parameter] = []
    for name in types:
        if name == "pointer":
            found.append(Parameter(_POINTER, ParameterType.INTEGER))
            continue
        try:
            dtype = np.dtype(name)
        except TypeError:
            rule = 'a type is "pointer" or a NumPy type such as "int64"'
            raise InvalidValueError(f"parameter type {name!r}", rule=rule) from None
        kinds = {"f": ParameterType.FLOAT, "i": ParameterType.INTEGER, "u": ParameterType.INTEGER}
        found.append(Parameter(dtype.itemsize, kinds.get(dtype.kind, ParameterType.BYTES)))
    return tuple(found)


def _told(parameter: Parameter) -> str:
    kind = "a value" if parameter.type is ParameterType.UNKNOWN else f"{_ARTICLES[parameter.type]}"
    return f"{kind} of {parameter.size} byte{'s' * (parameter.size != 1)}"


_ARTICLES = {
    ParameterType.INTEGER: "an integer or a pointer",
    ParameterType.FLOAT: "a floating-point number",
    ParameterType.BYTES: "a structure",
}


class _Block:
    """Memory for the arguments of one launch: the array of pointers, then what they point to."""

    __slots__ = ("_layout", "content", "pointers")

    def __init__(self, layout: _Layout, offsets: Sequence[int], size: int) -> None:
        self._layout = layout
        start = _POINTER * len(offsets)
        self.content = (ctypes.c_char * (start + size))()
        base = ctypes.addressof(self.content)
        self.pointers = base if offsets else 0
        struct.pack_into(f"{len(offsets)}P", self.content, 0, *(base + start + offset for offset in offsets))

    def give_back(self) -> None:
        """Let a later launch use this block; the driver copies the arguments before it returns."""
        self._layout.free.append(self)


class _Layout:
    """Where the arguments of one combination of types lie, and blocks that were used for it before."""

    __slots__ = ("_offsets", "_start", "_struct", "free")

    def __init__(self, codes: Sequence[str]) -> None:
        self._struct = struct.Struct("".join(codes))  # native mode: each value is aligned as in C
        ends = [struct.calcsize("".join(codes[: i + 1])) for i in range(len(codes))]
        self._offsets = [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        self._start = _POINTER * len(codes)
        self.free: list[_Block] = []

    def fill(self, raw: Sequence[Any]) -> _Block:
        """Return a block with these values that no other launch uses now."""
        try:
            block = self.free.pop()  # one step under the GIL: no two threads get the same block
        except IndexError:
            block = _Block(self, self._offsets, self._struct.size)
        self._struct.pack_into(block.content, self._start, *raw)
        return block
