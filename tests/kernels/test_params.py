"""Arguments become the bytes that the kernel expects, or are refused by name before anything is launched."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remap.errors import InvalidValueError, LaunchError
from remap.kernels import Parameter, ParameterType
from remap.kernels.params import Packer, parse_parameters

INTEGER, FLOAT, BYTES = ParameterType.INTEGER, ParameterType.FLOAT, ParameterType.BYTES


def packed(packer: Packer, *arguments: Any) -> list[bytes]:
    """Pack, and read back what each pointer points to, as the driver would."""
    assert packer.parameters is not None
    made = packer.pack(arguments)
    pointers = (ctypes.c_void_p * len(arguments)).from_address(made.pointers)
    found = [
        ctypes.string_at(pointer or 0, parameter.size)
        for pointer, parameter in zip(pointers, packer.parameters, strict=True)
    ]
    made.give_back()
    return found


def test_each_argument_lies_at_its_pointer_in_the_size_of_its_parameter() -> None:
    """Python numbers take the parameter's size and type, NumPy and ctypes scalars keep their own."""
    pair = np.dtype([("x", "f4"), ("y", "f8")], align=True)
    packer = Packer(
        "k",
        [
            Parameter(8, INTEGER),
            Parameter(4, FLOAT),
            Parameter(1, INTEGER),
            Parameter(2, INTEGER),
            Parameter(16, BYTES),
            Parameter(8, FLOAT),
            Parameter(4, INTEGER),
        ],
    )
    value = np.zeros((), pair)
    value["x"], value["y"] = 1.5, 2.5
    found = packed(packer, 7, 0.25, True, np.int16(-2), value[()], 3, ctypes.c_uint32(9))
    assert found == [
        (7).to_bytes(8, "little"),
        np.float32(0.25).tobytes(),
        b"\1",
        np.int16(-2).tobytes(),
        value.tobytes(),
        np.float64(3).tobytes(),
        (9).to_bytes(4, "little"),
    ]


@given(st.integers(-(1 << 65), 1 << 65), st.sampled_from([1, 2, 4, 8]))
def test_integers_are_taken_exactly_if_they_fit(number: int, size: int) -> None:
    """An integer is taken if it is one of that size, signed or unsigned, and then bit for bit."""
    packer = Packer("k", [Parameter(size, INTEGER)])
    if -(1 << (8 * size - 1)) <= number < 1 << (8 * size):
        assert packed(packer, number) == [(number % (1 << (8 * size))).to_bytes(size, "little")]
    else:
        with pytest.raises(LaunchError, match=f"does not fit into {size} byte"):
            packer.pack((number,))


@given(st.floats(width=32))
def test_floats_are_packed_as_the_parameter_is(number: float) -> None:
    """A Python float goes into a 4-byte parameter as that number in single precision."""
    assert packed(Packer("k", [Parameter(4, FLOAT)]), number) == [np.float32(number).tobytes()]


def test_too_large_a_float_becomes_infinite_as_in_c() -> None:
    """A double that is too large for a `float` parameter is converted as C converts it."""
    assert packed(Packer("k", [Parameter(4, FLOAT)]), -1e300) == [np.float32(-np.inf).tobytes()]


def test_packing_again_uses_the_same_bytes_but_never_for_two_launches_at_once() -> None:
    """A block is used again only once it was given back."""
    packer = Packer("k", [Parameter(8, INTEGER)])
    first, second = packer.pack((1,)), packer.pack((2,))
    assert first.pointers != second.pointers
    first.give_back()
    assert packer.pack((3,)) is first


def test_no_arguments_need_no_bytes() -> None:
    """A kernel without parameters is launched with no array at all."""
    assert Packer("k", []).pack(()).pointers == 0


@pytest.mark.parametrize(
    ("parameter", "argument", "why"),
    [
        (Parameter(8, INTEGER), 1.5, "an integer or a pointer of 8 bytes"),
        (Parameter(8, INTEGER), np.float64(1), "an integer or a pointer of 8 bytes"),
        (Parameter(4, FLOAT), np.int32(1), "a floating-point number of 4 bytes"),
        (Parameter(8, INTEGER), np.int32(1), "8 bytes"),
        (Parameter(2, FLOAT), 1e300, "does not fit into 2 bytes"),
        (Parameter(16, BYTES), 1, "a structure of 16 bytes"),
        (Parameter(16, BYTES), ctypes.c_int(1), "a structure of 16 bytes"),
        (Parameter(4, INTEGER), None, "4 bytes"),
        (Parameter(8, INTEGER), np.zeros(3), "it is host memory"),
        (Parameter(8, INTEGER), "text", "an argument is memory"),
        (Parameter(8), np.str_("text"), "means nothing on a device|a value of 8 bytes"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(parameter: Parameter, argument: object, why: str) -> None:
    """The message names the kernel and the argument's place, and says what the parameter is."""
    with pytest.raises(LaunchError, match=why) as caught:
        Packer("saxpy", [parameter]).pack((argument,))
    assert "launch of saxpy" in str(caught.value)


def test_a_wrong_number_of_arguments_is_refused() -> None:
    """Too few and too many arguments are refused, with how many there should be."""
    for arguments in ((), (1, 2)):
        with pytest.raises(LaunchError, match="it has 1 parameter"):
            Packer("k", [Parameter(4, INTEGER)]).pack(arguments)


def test_without_types_only_typed_arguments_are_taken() -> None:
    """Where the image tells nothing, a Python number is refused, and the message says what to pass."""
    packer = Packer("k", None)
    with pytest.raises(LaunchError, match=r"Pass numpy\.int64"):
        packer.pack((1,))
    assert packer.pack((np.int32(1), None)).pointers


def test_other_libraries_arrays_give_their_address_and_their_stream() -> None:
    """An object with the CUDA array interface is memory; the stream it names is joined by the launch."""

    class Foreign:
        __cuda_array_interface__ = {  # noqa: RUF012 (as libraries have it)
            "data": (0x7000, False),
            "shape": (1,),
            "typestr": "<f4",
            "version": 3,
            "stream": 1,
        }

    packer = Packer("k", [Parameter(8, INTEGER)])
    assert packed(packer, Foreign()) == [(0x7000).to_bytes(8, "little")]
    made = packer.pack((Foreign(),))
    assert (made.streams, made.traceable) == ((1,), False)


def test_named_types_are_sizes_and_kinds() -> None:
    """Callers name parameters as pointers and NumPy types."""
    assert parse_parameters(["pointer", "int32", "float64", "bool"]) == (
        Parameter(8, INTEGER),
        Parameter(4, INTEGER),
        Parameter(8, FLOAT),
        Parameter(1, INTEGER),
    )
    with pytest.raises(InvalidValueError, match="parameter type 'handle'"):
        parse_parameters(["handle"])
