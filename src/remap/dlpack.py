"""DLPack capsules: ones that NumPy makes and remap relabels, and foreign ones taken over.

A capsule carries two C functions: its destructor, and the deleter of the tensor inside, which may be called by any
thread, in the middle of an exception, and after the interpreter has gone. NumPy has them in C. So remap lets NumPy
make the capsule, over an array of the right address that nobody reads, and then writes the device into it.

Rejected: the same functions as `ctypes` callbacks. A destructor that runs while an exception is on its way (a consumer
that refuses drops the capsule just then) would lose that exception, and a deleter called after finalisation would
crash the process.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from remap.dtypes import ADDED
from remap.errors import InvalidValueError
from remap.forks import in_child
from remap.sizes import LARGEST

T = TypeVar("T")

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""The kinds of device that remap can be asked for (`DLDeviceType`)."""

READ_ONLY = 1
"""The bit of `flags` that forbids writing."""

NEWEST = (1, 1)
"""The version that remap asks producers for; any 1.x is understood."""

_MOST_DIMENSIONS = 64  # NumPy's limit; a larger number can only be damage

PLAIN, VERSIONED = b"dltensor", b"dltensor_versioned"
_USED = {PLAIN: b"used_dltensor", VERSIONED: b"used_dltensor_versioned"}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """What a capsule named `dltensor` points to (`DLManagedTensor`)."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    """What a capsule named `dltensor_versioned` points to (`DLManagedTensorVersioned`)."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_STRUCTURES: dict[bytes, type[_Managed | _ManagedVersioned]] = {PLAIN: _Managed, VERSIONED: _ManagedVersioned}
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}  # DLDataTypeCode: NumPy's letter
_ADDED = {kind: name for name, kind in ADDED.items()}
_BITS = {"i": (8, 16, 32, 64), "u": (8, 16, 32, 64), "f": (16, 32, 64), "c": (64, 128), "b": (8,)}

_python = ctypes.pythonapi
_get_name: Any = _python.PyCapsule_GetName
_get_name.restype, _get_name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_get_pointer: Any = _python.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_set_name: Any = _python.PyCapsule_SetName
_set_name.restype, _set_name.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)

# A capsule keeps a pointer to its name and may outlive this module, so the new names stay for ever.
for _name in _USED.values():
    _python.Py_IncRef(ctypes.py_object(_name))


class _Taking:
    """A lock, so that of two threads that take the same capsule one finds it used."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Make the lock anew: in a forked child, a thread that does not exist there may hold it."""
        self.lock = threading.Lock()


_taking = _Taking()
in_child(_taking.renew)


def export(
    array: Any,
    device: tuple[int, int],
    max_version: tuple[int, int] | None,
    kind: tuple[int, int] | None = None,
    *,
    copied: bool = False,
) -> Any:
    """Return a new capsule over a NumPy array's memory that says it lies on `device` (a kind and an index).

    `kind`, a code and bits, is what its elements are said to be where NumPy has no such type. The capsule is versioned
    if the consumer asks for 1.0 or newer, and NumPy (2.1 or newer) can make such a one.
    """
    if not versioned(max_version):
        capsule = array.__dlpack__()
    elif copied:
        capsule = array.__dlpack__(max_version=max_version, copy=True)
    else:
        capsule = array.__dlpack__(max_version=max_version)
    name = _get_name(capsule)
    tensor = _STRUCTURES[name].from_address(_get_pointer(capsule, name)).tensor
    tensor.device.type, tensor.device.index = device
    if kind is not None:
        tensor.dtype.code, tensor.dtype.bits = kind
    return capsule


def versioned(max_version: tuple[int, int] | None) -> bool:
    """Tell whether a consumer that asks for `max_version` gets a versioned capsule: NumPy 2.1 or newer makes them."""
    import numpy as np

    numpy_version = tuple(int(part) for part in np.__version__.split(".")[:2])
    return max_version is not None and max_version[0] >= 1 and numpy_version >= (2, 1)


class Tensor(NamedTuple):
    """What a foreign capsule says. `typestr` may name a type that only ml_dtypes has; strides are in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    typestr: str
    device: tuple[int, int]
    read_only: bool


class Claim:
    """The ownership of a foreign tensor: tells its producer, once, when nobody needs it any more."""

    __slots__ = ("_deleter", "_pointer")

    def __init__(self, pointer: int, deleter: int | None) -> None:
        self._pointer = pointer
        # Bound now: while the interpreter ends, the module's names may be gone before the claim is.
        self._deleter: Any = _DELETER(deleter) if deleter else None

    def __del__(self) -> None:
        """Call the producer's deleter."""
        deleter, self._deleter = self._deleter, None
        if deleter is not None:
            deleter(self._pointer)


def is_capsule(value: object) -> bool:
    """Tell whether a value is a capsule of any name."""
    kind = type(value)  # which has no name that could be imported before Python 3.13
    return (kind.__module__, kind.__qualname__) == ("builtins", "PyCapsule")


def take(capsule: Any, accept: Callable[[Tensor], T]) -> tuple[T, Claim]:
    """Take over the tensor in a capsule, and mark the capsule as used.

    Returns what `accept` makes of the tensor, and the claim that keeps its memory. A capsule that is refused, here or
    by `accept`, stays as it was, and gives its memory back itself. Raises `InvalidValueError` for one that is used, is
    none of DLPack's, or describes a tensor that cannot be.
    """
    if not is_capsule(capsule):
        raise _refused(f"it is no capsule but {type(capsule)}")
    with _taking.lock:
        name = _get_name(capsule)
        if name in _USED.values():
            raise _refused("it was used before", "Ask its producer for a new one")
        if name not in _STRUCTURES:
            raise _refused(f"its name is {name!r}, and DLPack's are {PLAIN!r} and {VERSIONED!r}")
        pointer = _get_pointer(capsule, name)
        managed: Any = _STRUCTURES[name].from_address(pointer)
        flags = 0
        if name == VERSIONED:
            # A later major version may have moved every field but the version, the context and the deleter.
            if managed.major != NEWEST[0]:
                raise _refused(f"it has version {managed.major}.{managed.minor}, and remap reads 1.x")
            flags = managed.flags
        tensor = managed.tensor
        shape, strides = _extents(tensor)
        typestr = _typestr(tensor.dtype)
        address = (tensor.data or 0) + tensor.byte_offset
        if not tensor.data and 0 not in shape:
            raise _refused("its data pointer is null")
        if address > LARGEST:
            raise _refused(f"its data begins at {address:#x}, and no address is that large")
        device = (tensor.device.type, tensor.device.index)
        accepted = accept(Tensor(address, shape, strides, typestr, device, bool(flags & READ_ONLY)))
        claim = Claim(pointer, managed.deleter)
        _set_name(capsule, _USED[name])
    return accepted, claim


def _extents(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    count = tensor.ndim
    if not 0 <= count <= _MOST_DIMENSIONS:
        raise _refused(f"it has {count} dimensions, and 0 to {_MOST_DIMENSIONS} are possible")
    if count and not tensor.shape:
        raise _refused("its shape is a null pointer")
    shape = tuple(tensor.shape[:count]) if count else ()
    if any(extent < 0 for extent in shape):
        raise _refused(f"its shape is {shape}, and an extent is 0 or more")
    return shape, (tuple(tensor.strides[:count]) if count else ()) if tensor.strides else None


def _typestr(kind: Any) -> str:
    if kind.lanes == 1 and (kind.code, kind.bits) in _ADDED:
        return _ADDED[kind.code, kind.bits]
    letter = _KINDS.get(kind.code, "")
    if kind.bits not in _BITS.get(letter, ()) or kind.lanes != 1:
        raise _refused(
            f"its elements have type code {kind.code}, {kind.bits} bits and {kind.lanes} lanes",
            "NumPy has no such type; view it as an integer type of the same size first",
        )
    return f"{letter}{kind.bits // 8}"


def _refused(rule: str, next_step: str = "") -> InvalidValueError:
    return InvalidValueError("a DLPack capsule", rule=rule, next_step=next_step)
