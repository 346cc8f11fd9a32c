"""What other libraries say of their memory is checked before any of it is taken over (invariant 11)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB, dlpack

_new: Any = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Capsule:
    """A DLPack capsule over four floats, with fields as a test wants them."""

    def __init__(self, *, code: int = 2, bits: int = 32, device: int = dlpack.CPU, offset: int = 0) -> None:
        self.memory = np.zeros(64, np.float32)
        self.managed: Any = dlpack._Managed()
        self.shape = (ctypes.c_int64 * 1)(4)
        self.deleted: list[int] = []
        self.deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.deleted.append)
        self.managed.deleter = ctypes.cast(self.deleter, ctypes.c_void_p).value
        tensor = self.managed.tensor
        tensor.data, tensor.byte_offset, tensor.ndim = self.memory.ctypes.data, offset, 1
        tensor.device.type = device
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code, bits, 1
        tensor.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        self.value = _new(ctypes.addressof(self.managed), b"dltensor", None)


@pytest.mark.parametrize(
    "fields",
    [
        {"code": 2, "bits": 8},  # a float of one byte
        {"code": 0, "bits": 24},
        {"code": 1, "bits": 128},
        {"code": 5, "bits": 32},
        {"code": 6, "bits": 32},
        {"code": 2, "bits": 128},  # IEEE's, and not what NumPy calls float128
        {"device": 10},  # ROCm
        {"offset": (1 << 64) - 8},
    ],
)
def test_a_refused_capsule_is_not_used_up(fields: dict[str, int]) -> None:
    """A tensor that remap cannot describe, or not reach, is an InvalidValueError, and its capsule can go elsewhere."""
    capsule = Capsule(**fields)
    with pytest.raises(remap.InvalidValueError):
        remap.from_dlpack(capsule.value)
    assert dlpack._get_name(capsule.value) == b"dltensor"
    assert not capsule.deleted


def test_a_taken_capsule_is_given_back_once() -> None:
    """One that is taken is used from then on, and its producer is told once when nobody needs it any more."""
    capsule = Capsule()
    array = remap.from_dlpack(capsule.value)
    with pytest.raises(remap.InvalidValueError, match="used before"):
        remap.from_dlpack(capsule.value)
    assert not capsule.deleted
    del array
    assert len(capsule.deleted) == 1


class PyCapsule:
    """Called like a capsule, and none."""


class Producer:
    """Has the methods of DLPack, and no capsule to give."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Name the CPU."""
        return dlpack.CPU, 0

    def __dlpack__(self, **_: object) -> object:
        """Return what is no capsule."""
        return PyCapsule()


@pytest.mark.parametrize("value", [None, 5, "text", PyCapsule()])
def test_what_has_no_dlpack(value: object) -> None:
    """An object that cannot be asked is a TypeError that says what can."""
    with pytest.raises(TypeError, match="__dlpack__"):
        remap.from_dlpack(value)


def test_a_producer_without_a_capsule() -> None:
    """What a producer hands over instead of a capsule is refused."""
    with pytest.raises(remap.InvalidValueError, match="no capsule"):
        remap.from_dlpack(Producer())


class Interface:
    """An object with a `__cuda_array_interface__`."""

    def __init__(self, **fields: object) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (4,),
            "typestr": "<f4",
            "strides": None,
            **fields,
        }


@pytest.mark.parametrize(
    "fields",
    [{"typestr": None}, {"typestr": "|V8", "descr": [("a", "<f4")]}],
)
def test_an_interface_that_contradicts_itself(fields: dict[str, object]) -> None:
    """No type is none, and not a double; a description of another size than its type is none either."""
    with remap.allocate(2 * MiB) as buffer, pytest.raises(remap.InvalidValueError, match="interface"):
        remap.as_array(Interface(data=(buffer.address, False), **fields))
