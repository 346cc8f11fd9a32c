"""How wide `index_2d(width)` is at a launch: read again each time, for the arrays that are written with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from remap.errors import LaunchError
from remap.kernels import ir
from remap.kernels.arguments import View
from remap.kernels.reading import Reference, Source
from remap.types import Dim3, LaunchConfig


def widths_of(kernel: ir.Kernel, source: Source) -> list[tuple[int, partial[int]]]:
    """Return, for each array that is written with a two-dimensional index, what its width has to be.

    That is asked with the arguments of a launch, the arrays among them, and the configuration.
    """
    found: list[tuple[int, partial[int]]] = []
    names = [name for name, _ in kernel.parameters]
    for name, space in kernel.spaces.items():
        if space.kind == "2d":
            found.append((names.index(name), partial(_constant, space.stride)))
        elif space.kind == "width":
            found.append((names.index(name), _width(space.width, names, kernel, source)))
    return found


def check_width(asked: str, name: str, space: str, width: int, shape: tuple[int, ...]) -> None:
    """Raise `LaunchError` where an array cannot be written with a two-dimensional index of that width."""
    if width > ir.WIDEST:
        raise LaunchError(
            f"{asked}, argument {name!r}",
            rule=f"it is written with {space}, which is {width} wide, and an index is at most 2**36 wide",
            next_step="Pass the number of columns: several threads would get one element otherwise",
        )
    if len(shape) == 2 and shape[1] != width:
        raise LaunchError(
            f"{asked}, argument {name!r} of shape {shape}",
            rule=f"it is written with {space}, which is {width} wide, and the array has rows of {shape[1]}",
            next_step="Make the two equal: an element would not belong to one thread otherwise",
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
