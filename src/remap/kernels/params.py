"""Pack the arguments of a kernel that was compiled elsewhere: check them, and lay them out for cuLaunchKernel.

A compiled kernel takes bytes and trusts the caller. So an argument is taken only where its bytes are certain: memory
gives its address, NumPy and ctypes scalars have a type of their own, and a Python number takes the size and type of
the parameter, which the image tells. What does not fit is refused before anything is launched.

What is certain of an argument's type is found out once for each combination of types (`_Plan`), since a launch may
cost little more than the driver's own call.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np

from remap.arrays import DeviceArray
from remap.errors import InvalidValueError, LaunchError
from remap.kernels.again import Packed, Repeatable
from remap.kernels.image import Parameter, ParameterType
from remap.sizes import counted
from remap.spans import Span

if TYPE_CHECKING:
    from numpy.typing import NDArray

_POINTER = 8
_INTEGERS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_FLOATS = {2: "e", 4: "f", 8: "d"}
_SCALARS = {
    **{("i", size): code.lower() for size, code in _INTEGERS.items()},
    **{("u", size): code for size, code in _INTEGERS.items()},
    **{("f", size): code for size, code in _FLOATS.items()},
    ("b", 1): "?",
}
_NUMBERS: Any = (int, float, np.generic)
_CTYPES: Any = (ctypes.Structure, ctypes.Union, ctypes.Array, ctypes._SimpleCData)
_PLANS = 256  # combinations of argument types that one kernel remembers

Convert: TypeAlias = Callable[[Any], Any]


class Address(int):
    """An argument that is a device address, told apart from a number for kernels that run in Python."""


class Arguments:
    """The arguments of one launch (`types.PackedArguments`), with the memory that they name.

    The bytes are an array of pointers, then what they point to. The driver copies them before a launch returns, so
    that a later launch can use this object again once it was given back.
    """

    __slots__ = ("_free", "_start", "content", "host", "pointers", "spans", "streams", "traceable", "values")

    def __init__(self, free: list[Arguments], offsets: Sequence[int], size: int) -> None:
        self._free = free
        self._start = start = _POINTER * len(offsets)
        self.content = (ctypes.c_char * (start + size))()
        base = ctypes.addressof(self.content)
        self.pointers = base if offsets else 0
        struct.pack_into(f"{len(offsets)}P", self.content, 0, *(base + start + offset for offset in offsets))
        self.values: tuple[object, ...] = ()
        self.spans: tuple[Span, ...] = ()
        self.streams: tuple[int, ...] = ()
        # Arrays of the host that the kernel was given by reference, to be kept until it has run (D8).
        self.host: tuple[NDArray[Any], ...] = ()
        # Whether every address is that of a span: otherwise nobody can say what the kernel may touch.
        self.traceable = True

    def give_back(self) -> None:
        """Let a later launch use this object."""
        self.spans = self.values = self.host = ()
        self._free.append(self)


class Packer:
    """Packs the arguments of one kernel.

    `parameters` is None where the image does not tell them: then every argument must have a type of its own.
    `unreached` says why the device does not reach host memory by its own addresses, empty where it does (D8).
    """

    def __init__(
        self,
        kernel: str,
        parameters: Sequence[Parameter] | None,
        unreached: Callable[[], str] = lambda: "nobody has asked it",
    ) -> None:
        self._kernel = kernel
        self._unreached = unreached
        self.parameters = tuple(parameters) if parameters is not None else None
        self._plans: dict[tuple[type, ...], _Plan] = {}

    def pack(self, given: tuple[Any, ...]) -> Arguments:
        """Return `given` as bytes with an array of pointers to them; `give_back` follows when they were used.

        Raises `LaunchError` for a wrong number of arguments, and for one that does not fit its parameter.
        """
        plan = self._plans.get(tuple(map(type, given))) or self._plan(given)
        raw = list(given)
        for index, convert in plan.conversions:
            raw[index] = convert(raw[index])
        try:
            arguments = plan.free.pop()  # one step under the GIL: no two threads get the same one
        except IndexError:
            arguments = Arguments(plan.free, plan.offsets, plan.layout.size)
        try:
            plan.layout.pack_into(arguments.content, arguments._start, *raw)
        except (struct.error, OverflowError):
            plan.layout.pack_into(arguments.content, arguments._start, *self._fitted(plan, given, raw))
        arguments.spans = plan.spans_of(given)
        if plan.others:
            self._look_at_others(plan, given, arguments)
        return arguments

    def values(self, given: tuple[Any, ...]) -> Arguments:
        """Return `given` checked in the same way, as Python values for a kernel that runs in Python."""
        plan = self._plans.get(tuple(map(type, given))) or self._plan(given)
        arguments = Arguments([], (), 0)  # not used again: the launch may run at any later time
        raw = list(given)
        for index, convert in plan.conversions:
            raw[index] = convert(raw[index])
        raw = self._fitted(plan, given, raw)
        arguments.values = tuple(
            Address(bits)
            if code == "P"
            else Address(_array_address(value))
            if index in plan.slices
            else value
            for index, (code, bits, value) in enumerate(zip(plan.codes, raw, given, strict=True))
        )
        arguments.spans = plan.spans_of(given)
        self._look_at_others(plan, given, arguments)
        return arguments

    def repeatable(self, given: tuple[Any, ...], arguments: Arguments) -> Repeatable | None:
        """Return what a repeated launch has to look at; None where anything but memory of ours and numbers is given."""
        plan = self._plans.get(tuple(map(type, given)))
        if plan is None:
            return None
        places: list[int] = []
        numbers: list[Packed] = []
        for index, code in enumerate(plan.codes):
            value: Any = given[index]
            if _is_ours(value):
                places.append(index)
            elif isinstance(value, _NUMBERS) and len(code) == 1:
                offset = arguments._start + plan.offsets[index]
                numbers.append((index, value.__class__, struct.Struct(code), offset))
            else:
                return None
        return Repeatable(places, numbers)

    def _plan(self, given: tuple[Any, ...]) -> _Plan:
        parameters = self.parameters
        if parameters is None:
            parameters = (_ANY,) * len(given)
        elif len(parameters) != len(given):
            raise LaunchError(
                f"launch of {self._kernel} with {counted(len(given), 'argument')}",
                rule=f"it has {counted(len(parameters), 'parameter')}",
            )
        slots = [
            self._slot(i, value, one) for i, (value, one) in enumerate(zip(given, parameters, strict=True))
        ]
        plan = _Plan(slots)
        # The dtype of a structured scalar is its own, not its type's.
        if not any(isinstance(value, np.void) for value in given):
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[tuple(map(type, given))] = plan
        return plan

    def _slot(self, index: int, value: Any, parameter: Parameter) -> _Slot:
        """Find out how arguments of the type of `value` are passed in this place."""
        if isinstance(value, Span):
            self._check_pointer(index, value, parameter)
            return _Slot("P", _ADDRESS, "span")  # not .address: it does not escape here
        if isinstance(value, np.generic):
            return self._scalar(index, value, parameter)
        if isinstance(value, (int, float)):
            return self._number(index, value, parameter)
        if isinstance(value, DeviceArray) and parameter == _SLICE:
            return _Slot(f"{_SLICE.size}s", _slice_bytes, "slice")
        if isinstance(value, DeviceArray):
            self._check_pointer(index, value, parameter)
            return _Slot("P", _array_address, "other")
        if isinstance(value, _CTYPES):
            if parameter.size not in (ctypes.sizeof(value), 0):
                raise self._refuse(index, value, f"the parameter is {_told(parameter)}")
            return _Slot(f"{ctypes.sizeof(value)}s", bytes)
        if value is None:
            self._check_pointer(index, value, parameter)
            return _Slot("P", _null)
        if isinstance(getattr(value, "address", None), int):
            self._check_pointer(index, value, parameter)
            return _Slot("P", operator.attrgetter("address"), "other")
        if isinstance(value, np.ndarray):
            self._check_pointer(index, cast("object", value), parameter)
            missing = self._unreached()
            if missing:
                rule = f"it is host memory, which the device does not reach: {missing}"
                step = "Copy it: remap.DeviceBuffer.from_host(array); remap.advise says what else there is"
                raise self._refuse(index, cast("object", value), rule, step)
            return _Slot("P", _host_address, "other")
        if hasattr(value, "__cuda_array_interface__"):
            self._check_pointer(index, value, parameter)
            return _Slot("P", _interface_address, "other")
        rule = (
            "an argument is memory (a buffer, an array on the device), a number, or a NumPy or ctypes scalar"
        )
        raise self._refuse(index, value, rule)

    def _check_pointer(self, index: int, value: object, parameter: Parameter) -> None:
        if parameter.size not in (_POINTER, 0) or parameter.type is ParameterType.FLOAT:
            raise self._refuse(index, value, f"the parameter is {_told(parameter)}")

    def _scalar(self, index: int, value: Any, parameter: Parameter) -> _Slot:
        """Pass NumPy scalars of the dtype of `value`, structures included, as they are."""
        kind, size = value.dtype.kind, value.nbytes
        mixed = (parameter.type is ParameterType.FLOAT and kind in "iub") or (
            parameter.type is ParameterType.INTEGER and kind == "f"
        )
        if mixed or parameter.size not in (size, 0):
            raise self._refuse(index, value, f"the parameter is {_told(parameter)}")
        if kind not in "iubfcV":
            raise self._refuse(index, value, "such a scalar means nothing on a device")
        code = _SCALARS.get((kind, size))
        return _Slot(code) if code else _Slot(f"{size}s", np.generic.tobytes)

    def _number(self, index: int, value: float, parameter: Parameter) -> _Slot:
        """Pass Python numbers of the type of `value` in the size and type of the parameter."""
        size, kind = parameter
        if self.parameters is None:
            raise self._refuse(
                index,
                value,
                "the image does not tell the types of its parameters, and a Python number has no size",
                "Pass numpy.int64(…) or numpy.float32(…), or name the types: function(name, parameters=[…])",
            )
        if size == 0:  # source that nobody has compiled: only a twin in Python will see it
            return _Slot("")
        is_float = kind is ParameterType.FLOAT or isinstance(value, float)
        fits = size in _FLOATS and kind is not ParameterType.INTEGER if is_float else size in _INTEGERS
        if not fits or kind is ParameterType.BYTES:
            step = "Pass a structured NumPy scalar" if kind is ParameterType.BYTES else ""
            raise self._refuse(index, value, f"the parameter is {_told(parameter)}", step)
        if is_float:
            return _Slot(_FLOATS[size])
        return _Slot(_INTEGERS[size])

    def _fitted(self, plan: _Plan, given: tuple[Any, ...], raw: list[Any]) -> list[Any]:
        """Return the values with negative integers as the unsigned ones of the same bits; refuse what does not fit.

        Signed and unsigned parameters look alike in an image, so the numbers of both are taken. The codes are those
        of unsigned ones; only where `struct` refuses a value is it looked at again here.
        """
        for index, (code, value) in enumerate(zip(plan.codes, raw, strict=True)):
            size = struct.calcsize(code)
            if code in _FLOATS.values():
                try:
                    struct.pack(code, value)
                except OverflowError:  # half precision only; a float becomes infinite, as in C
                    raise self._refuse(index, given[index], f"it does not fit into {size} bytes") from None
            elif code in _INTEGERS.values():
                if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
                    raise self._refuse(index, value, f"it does not fit into {size} bytes")
                raw[index] = value & (1 << (8 * size)) - 1
        return raw

    def _look_at_others(self, plan: _Plan, given: tuple[Any, ...], arguments: Arguments) -> None:
        """Note the spans behind other objects, and the streams that their memory comes from."""
        spans, streams = list(arguments.spans), list[int]()
        host: list[NDArray[Any]] = []
        arguments.traceable = True
        for index in plan.others:
            value = given[index]
            if isinstance(value, np.ndarray):
                host.append(cast("NDArray[Any]", value))
                continue
            if isinstance(value, DeviceArray) and isinstance(value.owner, Span):
                spans.append(value.owner)
                continue
            arguments.traceable = False
            interface: Any = getattr(value, "__cuda_array_interface__", {})
            if interface.get("stream") is not None:
                streams.append(int(interface["stream"]))
        arguments.spans, arguments.streams, arguments.host = tuple(spans), tuple(streams), tuple(host)

    def _refuse(self, index: int, value: object, rule: str, next_step: str = "") -> LaunchError:
        kind = type(value).__name__
        what = f"{value!r} ({kind})" if isinstance(value, (int, float, np.generic)) else kind
        return LaunchError(
            f"launch of {self._kernel}, argument {index}: {what}", rule=rule, next_step=next_step
        )


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
        found.append(Parameter(dtype.itemsize, _KINDS.get(dtype.kind, ParameterType.BYTES)))
    return tuple(found)


_ANY = Parameter(0)
_SLICE = Parameter(2 * _POINTER, ParameterType.BYTES)
"""`remap::slice` and `remap::disjoint_slice` of `remap.cuh`: address and length of an array."""
_ADDRESS = operator.attrgetter("_address")
_KINDS = {
    "f": ParameterType.FLOAT,
    "i": ParameterType.INTEGER,
    "u": ParameterType.INTEGER,
    "b": ParameterType.INTEGER,
}
_WORDS = {
    ParameterType.INTEGER: "an integer or a pointer",
    ParameterType.FLOAT: "a floating-point number",
    ParameterType.BYTES: "a structure",
    ParameterType.UNKNOWN: "a value",
}


def _told(parameter: Parameter) -> str:
    return f"{_WORDS[parameter.type]} of {counted(parameter.size, 'byte')}"


def _is_ours(value: Any) -> bool:
    return isinstance(value.owner if isinstance(value, DeviceArray) else value, Span)


def _array_address(array: DeviceArray) -> int:
    return array.owner._address + array.offset


def _host_address(array: NDArray[Any]) -> int:
    if not array.flags.c_contiguous:
        raise LaunchError(
            f"launch with a host array of strides {array.strides}",
            rule="a kernel takes its address alone, so the elements must lie one after the other",
            next_step="Pass numpy.ascontiguousarray(array)",
        )
    return array.ctypes.data


def _slice_bytes(array: DeviceArray) -> bytes:
    return struct.pack("Pq", _array_address(array), array.size)


def _null(_: object) -> int:
    return 0


def _interface_address(value: Any) -> int:
    return int(value.__cuda_array_interface__["data"][0])


class _Slot(NamedTuple):
    """How one argument is passed: its code in `struct`, what makes its value for that, and what it is."""

    code: str
    convert: Convert | None = None
    role: str = ""


class _Plan:
    """How arguments of one combination of types are passed."""

    __slots__ = ("codes", "conversions", "free", "layout", "offsets", "others", "slices", "spans_of")

    def __init__(self, slots: Sequence[_Slot]) -> None:
        self.codes = codes = [slot.code for slot in slots]
        self.conversions = [(i, slot.convert) for i, slot in enumerate(slots) if slot.convert is not None]
        self.layout = struct.Struct("".join(codes))  # native mode: each value is aligned as in C
        ends = [struct.calcsize("".join(codes[: i + 1])) for i in range(len(codes))]
        self.offsets = [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        self.slices = frozenset(i for i, slot in enumerate(slots) if slot.role == "slice")
        self.others = [i for i, slot in enumerate(slots) if slot.role in ("other", "slice")]
        self.spans_of = _picker([i for i, slot in enumerate(slots) if slot.role == "span"])
        self.free: list[Arguments] = []


def _picker(indices: list[int]) -> Callable[[tuple[Any, ...]], tuple[Span, ...]]:
    """Return what picks the arguments at these places."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return (lambda given: (given[indices[0]],)) if indices else (lambda _: ())
