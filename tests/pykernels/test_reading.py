# No `from __future__ import annotations` here: annotations are objects, as in most programs.
"""How the source of a kernel is found and read: names inside of functions, and text at the left edge."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import CompileError


def test_names_that_a_function_imports(place: Any) -> None:
    """A kernel inside of a function may take everything from there: annotations, functions, the decorator."""
    from remap import DisjointSlice, Slice, index_1d, kernel

    @kernel
    def add(x: Slice, out: DisjointSlice) -> None:
        i = index_1d()
        out[i] = x[i] + 1

    x, out = place(np.arange(4, dtype=np.int32)), place(4, "int32")
    place.launch(add, x, out, grid=1, block=4)
    assert out.to_host().tolist() == [1, 2, 3, 4]


def test_types_of_an_enclosing_function(place: Any) -> None:
    """A dataclass and a type that only a function knows serve as annotations of parameters and of variables."""

    @dataclasses.dataclass
    class Settings:
        by: float
        n: int

    Number = np.float32  # noqa: N806

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice, settings: Settings, more: Number) -> None:  # type: ignore[valid-type]
        i = remap.index_1d()
        w: Number = x[i] * settings.by  # type: ignore[valid-type]
        out[i] = w + settings.n + more

    x, out = place(np.arange(4, dtype=np.float32)), place(4, "float32")
    place.launch(kernel, x, out, Settings(0.5, 3), 1.0, grid=1, block=4)
    assert out.to_host().tolist() == [4.0, 4.5, 5.0, 5.5]


def made(path: Path, text: str) -> Any:
    """Return what `make` gives in a file of this text."""
    scope: dict[str, Any] = {}
    path.write_text(text)
    exec(compile(text, str(path), "exec"), scope)
    return scope["make"]()


def test_an_annotation_that_is_lost_as_text(tmp_path: Path) -> None:
    """Where annotations are text, a name inside of a function is gone, and the error says so with its line."""
    text = """from __future__ import annotations
import remap
def make():
    from remap import Slice
    @remap.kernel
    def kernel(
        x: Slice,
    ):
        pass
    return kernel
"""
    with pytest.raises(CompileError, match=r"text\.py:7: annotation Slice") as caught:
        made(tmp_path / "text.py", text).launch(np.zeros(4), grid=1, block=1)
    assert "Give it a name of the module" in caught.value.next_step


EDGE = """import remap
def make():
    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        '''Say something
at the left edge.
        '''
        i = remap.index_1d()
# a comment at the left edge
        y = (x[i] +
1)
        # and one that is not
        out[i] = y * \\
2
    return kernel
"""


def test_lines_at_the_left_edge(place: Any, tmp_path: Path) -> None:
    """Comments, texts and continued lines may begin further left than the kernel."""
    kernel = made(tmp_path / "edge.py", EDGE)
    x, out = place(np.arange(4, dtype=np.int32)), place(4, "int32")
    place.launch(kernel, x, out, grid=1, block=4)
    assert out.to_host().tolist() == [2, 4, 6, 8]


def test_the_line_of_an_error_below_the_left_edge(tmp_path: Path) -> None:
    """An error names the line of the file."""
    kernel = made(tmp_path / "edge.py", EDGE.replace("x[i] +", "x['a'] +"))
    with pytest.raises(CompileError, match=r"edge\.py:10: "):
        kernel.launch(np.zeros(4), np.zeros(4), grid=1, block=4)


def test_a_function_that_is_not_written_alone(tmp_path: Path) -> None:
    """A lambda in an expression cannot be cut out of it, and the error names its line."""
    text = "import remap\ndef make():\n    return (remap.kernel)(\n        lambda out: out)\n"
    with pytest.raises(CompileError, match=r"lambda\.py:4: kernel <lambda>: .*def"):
        made(tmp_path / "lambda.py", text).launch(1, grid=1, block=1)


def doubling(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return twice what a function gives."""

    @functools.wraps(function)
    def inner(v: Any) -> Any:
        return function(v) * 2

    return inner


def counting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass everything on."""

    @functools.wraps(function)
    def inner(*given: Any) -> Any:
        return function(*given)

    return inner


@doubling
def decorated(v: Any) -> Any:
    """Add one, and be doubled."""
    return v + 1


@counting
def passed_on(v: Any) -> Any:
    """Add one."""
    return v + 1


def test_a_function_behind_a_decorator(place: Any) -> None:
    """A kernel calls what the name means in Python: what the decorator has made, and not what that was given."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = decorated(x[i])

    values = np.arange(4, dtype=np.int64)
    x, out = place(values), place(4, "int64")
    place.launch(kernel, x, out, grid=1, block=4)
    assert out.to_host().tolist() == [decorated(v) for v in range(4)] == [2, 4, 6, 8]


def test_a_decorator_that_a_kernel_cannot_have(place: Any) -> None:
    """What the decorator has made is refused at its own line, though it has the name of what is inside."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = passed_on(int(i))

    line = passed_on.__code__.co_firstlineno
    with pytest.raises(
        CompileError, match=rf"test_reading\.py:{line + 1}: device function passed_on: "
    ) as caught:
        kernel.launch(place(4, "int64"), grid=1, block=4)
    assert "A decorator has put it there" in caught.value.next_step


def test_a_kernel_behind_a_decorator(place: Any) -> None:
    """The decorator's function is the kernel, by its own text."""

    def inside(x: remap.Slice, out: remap.DisjointSlice) -> None:
        raise AssertionError

    @remap.kernel
    @functools.wraps(inside)
    def kernel(x, out):  # type: ignore[no-untyped-def]
        i = remap.index_1d()
        out[i] = x[i] * 3

    x, out = place(np.arange(4, dtype=np.int32)), place(4, "int32")
    place.launch(kernel, x, out, grid=1, block=4)
    assert out.to_host().tolist() == [0, 3, 6, 9]


TWO = """import remap
def change(v):
    return v {0} 1
def make():
    @remap.kernel
    def first(out: remap.DisjointSlice):
        i = remap.index_1d()
        out[i] = int(i) {0} 1
    @remap.kernel
    def second(out: remap.DisjointSlice):
        out[remap.index_1d()] = change({1})
    return first, second
"""


@pytest.mark.parametrize(
    "now",
    [
        TWO.format("-", 5),
        TWO.format("+", 5).replace(" 1", " 1.0"),
        "\n" + TWO.format("+", 5),
        TWO.format("+", 5).replace("@remap.kernel", "# a comment\n    @remap.kernel"),
        TWO.format("+", 5)[:40],
        "",
    ],
    ids=["operator", "type", "line", "comment", "short", "empty"],
)
def test_a_file_that_has_changed_since(place: Any, tmp_path: Path, now: str) -> None:
    """A kernel is never compiled from another text than Python was: kernel and function say so, and nothing runs."""
    path = tmp_path / "changed.py"
    first, second = made(path, TWO.format("+", 5))
    path.write_text(now)
    out = place(4, "int64")
    for kernel in (first, second):
        with pytest.raises(CompileError, match=r"changed|missing|read alone"):
            kernel.launch(out, grid=1, block=4)


def test_a_file_that_has_changed_elsewhere(place: Any, tmp_path: Path) -> None:
    """What stands where it stood, and as it stood, is compiled."""
    path = tmp_path / "elsewhere.py"
    first, second = made(path, TWO.format("+", 5))
    path.write_text(TWO.format("+", 5) + "# more\n")
    out = place(4, "int64")
    for kernel, expected in ((first, [1, 2, 3, 4]), (second, [6] * 4)):
        place.launch(kernel, out, grid=1, block=4)
        assert out.to_host().tolist() == expected
