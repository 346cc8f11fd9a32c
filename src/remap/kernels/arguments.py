"""What is given to a Python kernel, and what it becomes: arrays as (address, length), all else by value."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from remap.arrays import DeviceArray
from remap.errors import InvalidValueError, LaunchError
from remap.foreign import as_array
from remap.kernels.index import DisjointSlice, Slice, _Annotated
from remap.kernels.ir import Array, Record, Scalar, Type, is_numpy, storable
from remap.kernels.reading import Source, scalar_of, type_of_value
from remap.kernels.structures import alignment, check_layout, structure_of
from remap.sizes import counted
from remap.spans import Span
from remap.streams import StreamLike


class View(NamedTuple):
    """An array that a kernel was given. `owner` is ours, or None; `host` is there for memory of the host."""

    owner: Span | None
    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    keep: object = None
    host: Any = None
    writable: bool = True


def key_of(value: Any) -> object:
    """Return what an argument's type is known by, cheaply."""
    if isinstance(value, DeviceArray):
        return value.dtype, len(value.shape)
    if is_numpy(value):  # before float: numpy.float64 is one
        return value.dtype
    if value is None or isinstance(value, (int, float)):
        return type(value)
    shape = getattr(value, "shape", None)
    if shape is not None:
        dtype = getattr(value, "dtype", None)
        return dtype if is_numpy(dtype, np.dtype) else str(dtype), len(shape), is_numpy(value, np.ndarray)
    return _type(value)


_type: Any = type


def is_array(value: Any) -> bool:
    """Tell whether an argument is memory and not a value."""
    if isinstance(value, np.generic):
        return False
    return (
        isinstance(value, (DeviceArray, Span, np.ndarray))
        or hasattr(value, "__cuda_array_interface__")
        or hasattr(value, "__dlpack__")
    )


def view_of(value: Any, asked: str, name: str, stream: StreamLike | None) -> View:
    """Return an argument as an array; raises `LaunchError` where it is none that a kernel can take."""
    if isinstance(value, DeviceArray) and isinstance(value.owner, Span):
        owner = value.owner
        return View(owner, owner._address + value.offset, value.dtype, value.shape)
    known = getattr(value, "_remap_array", None)
    if known is not None:  # memory that a graph will allocate: no driver can be asked about it yet
        address, dtype, shape = known
        return View(None, address, dtype, shape, value)
    if isinstance(value, Span):
        rule = f"a {value.kind} has bytes, and no elements of a type"
        raise LaunchError(
            f"{asked}, argument {name!r}", rule=rule, next_step="Pass buffer.array(dtype, shape)"
        )
    if not is_array(value):
        raise _no_array(f"{asked}, argument {name!r}", value)
    try:
        found = as_array(value, stream=stream)
    except (InvalidValueError, TypeError) as error:
        raise LaunchError(f"{asked}, argument {name!r}", rule=str(error)) from error
    if not found.contiguous:
        raise LaunchError(
            f"{asked}, argument {name!r} with strides {found.strides}",
            rule="a kernel takes an array as address and length, so its elements must lie one after the other",
            next_step="Make a contiguous copy first",
        )
    unit = alignment(np.dtype(found.dtype))
    unit = unit & -unit or 1  # other sizes are those of types that no kernel has
    if found.address % unit and found.size:
        raise LaunchError(
            f"{asked}, argument {name!r} at {found.address:#x}",
            rule=f"a device reads an element of {found.dtype} whole, at a multiple of {counted(unit, 'byte')}",
            next_step="Make a copy first",
        )
    host = None if found.location.is_device else found.numpy()
    return View(None, found.address, np.dtype(found.dtype), found.shape, value, host, not found.read_only)


def parameter_types(source: Source, arguments: tuple[Any, ...]) -> dict[str, Type]:
    """Return the types of the parameters for these arguments; raises `LaunchError` where they do not fit."""
    asked = f"launch of {source.name}"
    if len(arguments) != len(source.parameters):
        raise LaunchError(
            f"{asked} with {counted(len(arguments), 'argument')}",
            rule=f"it has {counted(len(source.parameters), 'parameter')}: {', '.join(source.parameters)}",
        )
    found: dict[str, Type] = {}
    for name, value in zip(source.parameters, arguments, strict=True):
        annotation = source.annotation(name)
        what = f"{asked}, argument {name!r}"
        wanted: np.dtype[Any] | None = None
        if isinstance(annotation, _Annotated):
            wanted, annotation = annotation.dtype, annotation.kind
        if annotation in (Slice, DisjointSlice):
            found[name] = _array(what, value, "slice" if annotation is Slice else "disjoint", wanted)
        elif is_array(value):
            raise LaunchError(
                f"{what}: an array",
                rule="the parameter is not annotated as one",
                next_step=f"Write {name}: remap.Slice to read it, or {name}: remap.DisjointSlice to write it",
            )
        else:
            found[name] = _value(what, value, annotation)
    return found


def _no_array(what: str, value: object) -> LaunchError:
    kind = type(value).__name__
    return LaunchError(
        what,
        rule=f"an array is wanted, and this is {'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}",
        next_step="Pass its array(dtype, shape)"  # what a graph allocates, say
        if hasattr(value, "array")
        else "Pass a DeviceBuffer, or buffer.array(dtype, shape)",
    )


def _array(what: str, value: Any, kind: str, wanted: np.dtype[Any] | None) -> Array:
    if not is_array(value):
        raise _no_array(what, value)
    view: Any = (
        value
        if is_numpy(value, np.ndarray)
        else view_of(value, what.split(",", maxsplit=1)[0], what.split("'")[1], None)
    )
    dtype, ndim = view.dtype, len(view.shape)
    if wanted is not None and dtype != wanted:
        raise LaunchError(f"{what}: an array of {dtype}", rule=f"the parameter is annotated with {wanted}")
    if dtype.fields is not None:
        check_layout(dtype, "of the elements")
    elif not storable(dtype):
        raise LaunchError(
            f"{what}: an array of {dtype}",
            rule="a kernel computes with booleans, integers, float32, float64 and structures of them",
            next_step="Convert it, or pass its bits as integers: array.view('uint16')",
        )
    if not 1 <= ndim <= 3:
        rule = f"it has {ndim} dimensions, and a kernel takes one to three"
        raise LaunchError(what, rule=rule, next_step="Reshape it: array.reshape(…)")
    return Array(kind, dtype, ndim)


def _value(what: str, value: Any, annotation: Any) -> Type:
    if value is None:
        return Record(np.dtype([]))  # no bytes: it vanishes
    kind = type_of_value(value)
    if kind is None:
        rule = f"a {type(value).__name__} cannot go to a device by value"
        raise LaunchError(
            what, rule=rule, next_step="Pass a number, a NumPy scalar, a structure or a dataclass"
        )
    if isinstance(kind, Record):
        check_layout(
            kind.dtype, type(value).__name__ if dataclasses.is_dataclass(value) else "of the argument"
        )
    to = scalar_of(annotation)
    if to is not None:
        if not isinstance(kind, Scalar) or (kind.dtype.kind == "f" and to.dtype.kind != "f"):
            raise LaunchError(f"{what}: {value!r}", rule=f"the parameter is annotated with {to}")
        return to
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        layout = structure_of(annotation)
        if not isinstance(kind, Record) or kind.dtype != layout:
            raise LaunchError(f"{what}: {value!r}", rule=f"the parameter is a {annotation.__name__}")
    elif not _meant(annotation, value):
        raise LaunchError(
            f"{what}: {value!r}",
            rule=f"the parameter is annotated with {_name(annotation)}, which this is not",
            next_step="Annotate it with int, float, bool, a type of NumPy that kernels have, or a dataclass",
        )
    return kind


def _name(annotation: Any) -> str:
    return str(getattr(annotation, "__name__", annotation))


def _meant(annotation: Any, value: Any) -> bool:
    """Tell whether a value is one of what a parameter is annotated with, as far as that is a type."""
    if is_numpy(annotation, np.dtype):
        return bool(getattr(value, "dtype", None) == annotation)
    try:
        return not isinstance(annotation, type) or isinstance(value, annotation)
    except TypeError:  # a protocol, which no value can be asked for
        return True
