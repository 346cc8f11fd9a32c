"""What annotations mean: on parameters of a kernel, on its variables, and on the functions that it calls."""

from __future__ import annotations

import enum
import numbers
from typing import Any, Literal, SupportsFloat, TypeVar

import numpy as np
import pytest

import remap
from remap.errors import LaunchError

PAIR = np.dtype([("low", np.uint8), ("high", np.float64)], align=True)


def taking(annotation: Any) -> remap.PythonKernel:
    """Return a kernel whose parameter is annotated so."""

    def kernel(by, out: remap.DisjointSlice) -> None:  # type: ignore[no-untyped-def]
        i = remap.index_1d()
        out[i] = by * 2

    kernel.__annotations__["by"] = annotation
    return remap.kernel(kernel)


class Level(enum.IntEnum):
    """A number with a name."""

    LOW = 1


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (np.float16, 0.1),
        (np.dtype("float16"), 0.1),
        (np.complex64, 0.5),
        (str, 3),
        (np.floating, 0.1),
        (np.integer, np.float32(3)),
        (Level, 1),
        (PAIR, 3),
        (list, 3),
    ],
    ids=str,
)
def test_an_annotation_that_the_argument_does_not_meet(place: Any, annotation: Any, value: Any) -> None:
    """A parameter says what it takes; what a kernel does not have is no promise that is quietly broken."""
    with pytest.raises(LaunchError, match=r"argument 'by': .* annotated with .*, which this is not"):
        place.launch(taking(annotation), value, place(1, "float64"), grid=1, block=1)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Any, 3),
        (None, 3),
        (object, 3),
        (np.float32, 3),
        (np.dtype("int16"), 3),
        (np.integer, np.int16(3)),
        (numbers.Real, 3.0),
        (int | float, 3),
        (SupportsFloat, 3),
        (Level, Level.LOW),
        (Literal[3], 3),
        (TypeVar("TypeVar"), 3),
    ],
    ids=str,
)
def test_annotations_that_an_argument_meets(place: Any, annotation: Any, value: Any) -> None:
    """A number goes in the type that is named; one of what is no single type goes as it is."""
    out = place(1, "float64")
    place.launch(taking(annotation), value, out, grid=1, block=1)
    assert out.to_host().tolist() == [2.0 * value]


def doubled(v: int) -> Any:
    """Return twice a number, of whatever type."""
    return v * 2


def test_annotations_of_variables_and_of_functions(on_both: Any) -> None:
    """That of a variable converts; that of a function that the kernel calls means nothing, as in Python."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice, called: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        n: int = x[i] / 2
        out[i] = n
        called[i] = doubled(x[i] / 4)

    x = np.arange(-4, 4, dtype=np.float32)
    _, out, called = on_both(kernel, x, np.zeros(8, np.float32), np.zeros(8, np.float32), threads=8)
    assert out.tolist() == np.trunc(x / 2).tolist()
    assert called.tolist() == (x / 2).tolist()
