"""Everything that the CUDA driver names in `cuda.bindings.driver` is there, in whatever version is installed.

The source is read, not run, so that it needs neither a GPU nor libcuda: a version of the bindings that lacks a
function, a member of an enum or a field of a structure is seen in CI, and not at the one call that needs it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remap.drivers import cuda as room

driver: Any = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

FILES = sorted(Path(room.__file__).parent.glob("*.py"))
ASKING = {"device_attribute", "known", "_reads"}
"""The functions that take the name of a device attribute without its prefix."""


def chain(node: ast.expr) -> list[str]:
    """Return `a.b.c` as its names, nothing for what is no chain of names."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = chain(node.value)
        return [*before, node.attr] if before else []
    return []


def meanings(function: ast.AST) -> dict[str, list[str]]:
    """Return what local names stand for: `kinds = cuda.CUmemorytype`, `params = cuda.CUDA_MEMCPY3D()`."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = node.value
            made = isinstance(value, ast.Call) and not value.args
            names = chain(value.func if made and isinstance(value, ast.Call) else value)
            if names[:1] == ["cuda"]:
                found[node.targets[0].id] = [*names, "()"] if made else names
    return found


def named(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each name of the bindings that a file uses, as its line and the attributes that lead there."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for part in [tree, *functions]:
        known = meanings(part) if isinstance(part, ast.FunctionDef) else {}
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute):
                names = chain(node)
                names = [*known.get(names[0], names[:1]), *names[1:]] if names else []
                if names[:1] == ["cuda"]:
                    yield node.lineno, tuple(names[1:])


def missing(names: tuple[str, ...]) -> bool:
    """Tell whether attributes do not lead anywhere; `()` stands for making a structure."""
    found = driver
    for at, name in enumerate(names):
        if name == "()":
            found = found()
        elif name not in dir(found):
            return True
        elif at + 1 < len(names):  # not the last: an enum that is 0 in a new structure cannot be read
            found = getattr(found, name)
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_named_is_there(path: Path) -> None:
    """Every function, member of an enum and field of a structure that the file names exists."""
    lacking = sorted({(line, ".".join(names)) for line, names in named(path) if missing(names)})
    assert not lacking


def test_the_reading_finds_what_it_is_for() -> None:
    """The reading sees functions, members of enums, and fields of structures that have been made."""
    found = {names for path in FILES for _, names in named(path)}
    assert ("cuMemCreate",) in found
    assert ("CUmemAllocationType", "CU_MEM_ALLOCATION_TYPE_PINNED") in found
    assert ("CUmemAllocationProp", "()", "allocFlags", "compressionType") in found
    assert ("CUmemorytype", "CU_MEMORYTYPE_HOST") in found
    assert missing(("cuMemCreat",))
    assert missing(("CUmemAllocationProp", "()", "allocFlags", "compression"))


def test_device_attributes_are_spelled_right() -> None:
    """Each device attribute that is asked for by name exists: one that does not would be taken for an old driver."""
    asked = {
        argument.value
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and chain(node.func)[-1:] and chain(node.func)[-1] in ASKING
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }
    assert len(asked) > 20
    there = driver.CUdevice_attribute.__members__
    assert not [name for name in asked if f"CU_DEVICE_ATTRIBUTE_{name}" not in there]
