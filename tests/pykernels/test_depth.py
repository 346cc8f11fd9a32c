"""Long chains of branches and long expressions: they mean what they say, or the kernel is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import CompileError

N = 8


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], remap.PythonKernel]:
    """Give what makes the kernel of a text."""

    def make(text: str) -> remap.PythonKernel:
        scope: dict[str, Any] = {}
        path = tmp_path / "long.py"
        path.write_text(text)
        exec(compile(text, str(path), "exec"), scope)
        return scope["long"]  # type: ignore[no-any-return]

    return make


HEAD = """import remap
@remap.kernel
def long(x: remap.Slice, out: remap.DisjointSlice):
    i = remap.index_1d()
    n = x[i]
"""
FUNCTION = "def found(n):\n"


def elifs(count: int) -> str:
    """Return a chain of `elif`."""
    chain = "".join(f"    {'elif' if k else 'if'} n == {k}:\n        v = {k * 3}\n" for k in range(count))
    return f"{HEAD}    v = 1\n{chain}    else:\n        v = -1\n    out[i] = v\n"


def returns(count: int) -> str:
    """Return a chain of early returns."""
    chain = "".join(f"    if n == {k}:\n        out[i] = {k * 3}\n        return\n" for k in range(count))
    return f"{HEAD}{chain}    out[i] = -1\n"


def returned_elifs(count: int) -> str:
    """Return a chain of `elif` that end the thread, but for some."""
    chain = "".join(
        f"    {'elif' if k else 'if'} n == {k}:\n        out[i] = {k * 3}\n{'        return' if k % 2 else ''}\n"
        for k in range(count)
    )
    return f"{HEAD}    out[i] = -2\n{chain}    else:\n        out[i] = -1\n        return\n    out[i] += 0\n"


def continues(count: int) -> str:
    """Return a chain of `continue` and `break` in a loop."""
    chain = "".join(
        f"        if n == {k}:\n            v = {k * 3}\n            {'continue' if k % 2 else 'break'}\n"
        for k in range(count)
    )
    return f"{HEAD}    v = -1\n    for _ in range(2):\n{chain}    out[i] = v\n"


def in_a_function(count: int) -> str:
    """Return a function with a chain of early returns, and a kernel that calls it."""
    chain = "".join(f"    if n == {k}:\n        return {k * 3}\n" for k in range(count))
    return f"def found(n):\n{chain}    return -1\n{HEAD}    out[i] = found(n)\n"


@pytest.mark.parametrize("write", [elifs, returns, returned_elifs, continues, in_a_function])
@pytest.mark.parametrize("count", [3, 130])
def test_a_long_chain_of_branches(on_both: Any, made: Any, write: Callable[[int], str], count: int) -> None:
    """Each thread takes its own way, however many there are."""
    x = np.array([0, 1, 2, count - 1, count, -1, 1, count // 2])
    _, out = on_both(made(write(count)), x, np.zeros(N, np.int64), threads=N)
    assert out.tolist() == [3 * n if 0 <= n < count else -1 for n in x.tolist()]


def sums(count: int) -> str:
    """Return a sum of many terms."""
    return f"{HEAD}    out[i] = {' + '.join(['n'] * count)}\n"


def largest(count: int) -> str:
    """Return the largest of many numbers."""
    return f"{HEAD}    out[i] = max({', '.join(['n'] * count)})\n"


@pytest.mark.parametrize("write", [elifs, sums, largest])
def test_more_than_python_can_follow(place: Any, made: Any, write: Callable[[int], str]) -> None:
    """What Python itself has no room for is refused with the line of the kernel, and a way out."""
    out = place(N, "int64")
    with pytest.raises(
        CompileError, match=r"long\.py:3: kernel long: too much of it stands inside .* Divide it"
    ):
        made(write(2000)).launch(place(np.arange(N)), out, grid=1, block=N)
    kernel = made(write(60))
    place.launch(kernel, place(np.arange(N)), out, grid=1, block=N)
    assert out.to_host()[1] in (3, 60, 1)
