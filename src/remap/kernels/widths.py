"""How wide `index_2d(width)` is at a launch: read again each time, for the arrays that it writes and reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from remap.errors import LaunchError
from remap.kernels import ir
from remap.kernels.arguments import View
from remap.kernels.reading import Reference, Source
from remap.types import Dim3, LaunchConfig


class Wanted(NamedTuple):
    """The width that an array has to have: that of the space by whose index it is `written`, or read."""

    place: int
    space: ir.Space
    written: bool
    width: partial[int]


def widths_of(kernel: ir.Kernel, source: Source) -> list[Wanted]:
    """Return what is wanted of the arrays that a two-dimensional index writes, or reads by row and column."""
    found: list[Wanted] = []
    names = [name for name, _ in kernel.parameters]
    written = [(name, space, True) for name, space in kernel.spaces.items()]
    for name, space, is_written in [*written, *((*one, False) for one in kernel.read_by)]:
        if space.kind == "2d":
            width = partial(_constant, space.stride)
        elif space.kind == "width":
            width = _width(space.width, names, kernel, source)
        else:
            continue
        found.append(Wanted(names.index(name), space, is_written, width))
    return found


def check_width(what: str, verb: str, width: int, shape: tuple[int, ...]) -> None:
    """Raise `LaunchError` where a two-dimensional index of that width does not fit an array."""
    if width > ir.WIDEST:
        raise LaunchError(
            what,
            rule=f"it is {verb}, which is {width} wide, and an index is at most 2**36 wide",
            next_step="Pass the number of columns: several threads would get one element otherwise",
        )
    if len(shape) == 2 and shape[1] != width:
        step = "Make the two equal: an element would not belong to one thread otherwise"
        if verb.startswith("read"):
            step = "Make the two equal, or read by row and column: x.get(i.row, i.col)"
        raise LaunchError(
            f"{what} of shape {shape}",
            rule=f"it is {verb}, which is {width} wide, and the array has rows of {shape[1]}",
            next_step=step,
        )


def is_argument(width: partial[int]) -> bool:
    """Tell whether a width is an argument that goes by value, or a field of one."""
    return width.func is _argument


def _width(text: str, names: list[str], kernel: ir.Kernel, source: Source) -> partial[int]:
    """Return what reads a width, from the text that `Calls.width_text` gives."""
    head, _, rest = text.partition(".shape[")
    if rest:
        return partial(_extent, names.index(f"p_{head}"), int(rest.rstrip("]")))
    if text.isdecimal():
        return partial(_constant, int(text))
    root, *fields = text.split(".")
    if f"p_{root}" in names:
        index = names.index(f"p_{root}")
        if isinstance(kernel.parameters[index][1], ir.Array):
            return partial(_whole, index, fields[0])
        return partial(_argument, names.index(f"p_{root}"), fields)
    for _, reference, _ in kernel.captured:
        if reference.source is source and f"{text}.".startswith(f"{reference.path}."):
            return partial(_outside, reference, text[len(reference.path) + 1 :].split("."))
    is_block, axis = text.endswith(("block_size.x", "block_size.y", "block_size.z")), "xyz".index(text[-1])
    return partial(_launched, "block" if is_block else "grid", axis)


def _constant(width: int, _arguments: object, _views: object, _config: object) -> int:
    return width


def _extent(index: int, axis: int, _arguments: object, views: dict[int, View], _config: object) -> int:
    return views[index].shape[axis]


def _whole(index: int, what: str, _arguments: object, views: dict[int, View], _config: object) -> int:
    shape = views[index].shape
    return len(shape) if what == "ndim" else prod(shape)


def _argument(
    index: int, fields: Sequence[str], arguments: tuple[Any, ...], _views: object, _config: object
) -> int:
    return _field(arguments[index], fields)


def _outside(
    reference: Reference, fields: Sequence[str], _arguments: object, _views: object, _config: object
) -> int:
    return _field(reference.now(), fields)


def _launched(what: str, axis: int, _arguments: object, _views: object, config: LaunchConfig) -> int:
    extents: Dim3 = config.block if what == "block" else config.grid
    return extents[axis]


def _field(value: Any, fields: Sequence[str]) -> int:
    for name in fields:
        if name:
            value = value[name] if isinstance(value, np.void) else getattr(value, name)
    return int(value)
