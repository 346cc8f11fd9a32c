# No `from __future__ import annotations` here: annotations are objects, as in most programs.
"""How the source of a kernel is found and read: names inside of functions, and text at the left edge."""

import dataclasses
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
