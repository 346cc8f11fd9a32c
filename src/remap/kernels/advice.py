"""What to write in a kernel instead of what it cannot have: parts of Python, functions, names of other libraries."""

from __future__ import annotations

import ast
import builtins
from typing import Any

_NUMBERS = "A kernel has numbers alone: let one stand for it"
_AFTER = "Store a number that tells of it, and look at that after the launch"
_ROOM = "A thread has variables, and a block has remap.shared_array"
_OUTSIDE = "Put it outside of the kernel"

_PARTS: dict[type[ast.AST], str] = {
    ast.Assert: _AFTER,
    ast.Raise: _AFTER,
    ast.Try: _AFTER,
    ast.TryStar: _AFTER,
    ast.ClassDef: _OUTSIDE,
    ast.FunctionDef: f"{_OUTSIDE}, and call it",
    ast.Import: _OUTSIDE,
    ast.ImportFrom: _OUTSIDE,
    ast.Lambda: f"{_OUTSIDE} as a def, and call it",
    ast.With: "Put it around the launch",
    ast.Global: "A kernel reads what is outside, and writes to a DisjointSlice",
    ast.Nonlocal: "A kernel reads what is outside, and writes to a DisjointSlice",
    ast.Delete: "Leave it out: a name costs nothing",
    ast.JoinedStr: f"{_NUMBERS}; make text of it after the launch",
    ast.Match: "Write it with if and elif",
    ast.NamedExpr: "Assign in a line of its own, before",
    ast.Compare: "Compare with == and !=, and join with and, or",  # the others of Python's: in, is
    ast.AugAssign: "Write it with = and the operation in full",
    ast.BinOp: "Loop over the elements",  # a @ b
    ast.Dict: _ROOM,
    ast.DictComp: _ROOM,
    ast.GeneratorExp: "Loop with: for k in range(…)",
    ast.List: _ROOM,
    ast.ListComp: _ROOM,
    ast.Set: _ROOM,
    ast.SetComp: _ROOM,
}
_CALLS: dict[Any, str] = {
    builtins.print: "Store what it should show, and print that after the launch",
    builtins.round: "Use np.rint",
    builtins.pow: "Multiply, or use math.sqrt",
    builtins.divmod: "Use // and %",
    builtins.sum: "Loop with: for k in range(…)",
    builtins.any: "Loop with: for k in range(…)",
    builtins.all: "Loop with: for k in range(…)",
    builtins.list: _ROOM,
    builtins.str: _NUMBERS,
}


def instead_of(node: ast.AST) -> str:
    """Return the advice for a part of Python that kernels do not have, empty where there is none."""
    if not isinstance(node, ast.Constant):
        return _PARTS.get(type(node), "")
    if isinstance(node.value, str) and node.value.lower().lstrip("+-") in ("inf", "infinity", "nan"):
        return "For infinity and NaN, use math.inf and math.nan"
    if isinstance(node.value, complex):
        return "Compute with its two parts"
    return "Write pass" if node.value is ... else _NUMBERS


def instead_of_calling(target: Any) -> str:
    """Return the advice for a call of what kernels do not have."""
    try:
        found = _CALLS.get(target)
    except TypeError:  # it has no hash
        found = None
    return found or "It takes functions written in Python, and those of docs/kernels.md"


def instead_of_setting(target: ast.expr) -> str:
    """Return the advice for an assignment to what cannot be assigned to."""
    match target:
        case ast.Attribute(value=ast.Subscript()):  # with an operator: plainly it can be
            return f"Write {ast.unparse(target)} = {ast.unparse(target)} … instead"
        case ast.Attribute(value=ast.Attribute()):
            return "Assign the structure that it is a field of, as a whole"
        case ast.Attribute():
            return "Assign another structure to the name, or keep its fields in variables"
        case _:
            return ""


# By the names that CUDA C++, Numba and Triton have for them.
_ELSEWHERE = {
    "threadIdx": "remap.thread",
    "blockIdx": "remap.block",
    "blockDim": "remap.block_size",
    "gridDim": "remap.grid_size",
    "program_id": "remap.block.x",
    "syncthreads": "remap.barrier()",
    "gridsize": "remap.grid_size and remap.block_size",
    "grid": "remap.index_1d() or index_2d(…)",
    "shared": "remap.shared_array(shape, dtype)",
    "atomic": "remap.atomic_add, _min, _max, _exchange and _cas",
}


def called_here(path: str) -> str:
    """Return the advice to write what stands for a name of another library here, empty where that is not known."""
    known = {_plain(name): here for name, here in _ELSEWHERE.items()}
    found = next((known[part] for part in map(_plain, path.split(".")) if part in known), "")
    return f"Write {found}" if found else ""


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
