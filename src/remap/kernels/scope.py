"""Names in a kernel: local variables, parameters, and values from outside; and what all functions of a kernel share."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from remap.errors import CompileError
from remap.kernels import ir
from remap.kernels.advice import called_here, instead_of
from remap.kernels.index import _Axes
from remap.kernels.ir import INT, Record, Type, value_type
from remap.kernels.reading import MISSING, Reference, Source, type_of_value

Alias: TypeAlias = "ir.Var | ElementOf"
"""What a local name can stand for beside a value: an array, or an element of one."""


@dataclass(slots=True)
class ElementOf:
    """What `get_mut_indexed` gives first: the thread's element of an array."""

    array: ir.Var
    index: ir.Expr


@dataclass
class Shared:
    """What all functions of one kernel have in common while it is typed.

    `captured` are values from outside, which each launch reads; `resolved` is what was found outside and compiled in.
    """

    captured: dict[Reference, tuple[str, Type]] = field(default_factory=dict[Reference, tuple[str, Type]])
    resolved: dict[Reference, Any] = field(default_factory=dict[Reference, Any])
    sources: dict[Any, Source] = field(default_factory=dict[Any, Source])
    functions: dict[Any, ir.Function] = field(default_factory=dict[Any, ir.Function])
    stack: list[Any] = field(default_factory=list[Any])
    spaces: dict[str, ir.Space] = field(default_factory=dict[str, ir.Space])
    read_by: dict[tuple[str, ir.Space], None] = field(default_factory=dict[tuple[str, ir.Space], None])
    kinds: set[str] = field(default_factory=set[str])
    names: int = 0
    unchecked: set[str] = field(default_factory=set[str])
    has_barrier: bool = False
    static_shared: int = 0
    dynamic_align: int = 0
    dynamic_least: int = 0

    def start(self) -> None:
        """Forget what a pass has noted, before the next; captured values keep their names."""
        self.__dict__.update(Shared(captured=self.captured, sources=self.sources).__dict__)


_T = TypeVar("_T")


class Scope:
    """The names of one function while it is typed; `out` is the block that statements go to."""

    def __init__(self, source: Source, shared: Shared, parameters: dict[str, Type]) -> None:
        self.source = source
        self.shared = shared
        self.parameters = parameters
        self.types: dict[str, Type] = {}  # of variables and temporaries
        self.current: dict[str, str] = {}  # the variable that a name stands for here
        self.aliases: dict[str, Alias] = {}
        self.assigned: set[str] | None = set()  # None: this point is not reached
        self.constants: dict[str, Any] = {}
        self.captures: dict[
            str, ir.Var
        ] = {}  # the captured values that this function reads, those it calls too
        self.out: ir.Block = []
        self.is_kernel = True
        self.alone: ast.expr | None = None  # the expression that is a statement, whose value nobody takes
        self.temporaries = 0

    def error(self, where: ast.AST | int, what: str, rule: str, next_step: str = "") -> CompileError:
        """Return an error that names file and line."""
        return self.source.error(where, what, rule, next_step)

    def is_local(self, name: str) -> bool:
        """Tell whether a name is the function's own."""
        return name in self.source.locals or name in self.parameters

    def local(self, node: ast.Name) -> ir.Expr | ElementOf:
        """Return a local variable or a parameter."""
        name = node.id
        alias = self.aliases.get(name)
        if alias is not None:
            return alias
        if name in self.parameters and name not in self.source.locals:
            return ir.Var(self.parameters[name], node.lineno, f"p_{name}")
        variable = self.current.get(name)
        unassigned = self.assigned is not None and name not in self.assigned
        if variable is None or unassigned or variable not in self.types:
            rule = "it may be read before anything was assigned to it"
            raise self.error(node, f"variable {name}", rule, "Assign to it on every path before")
        return ir.Var(self.types[variable], node.lineno, variable)

    def resolve(self, path: str) -> Any:
        """Return what a path means outside of the function, for good: where it changes, the kernel is typed anew."""
        value = self.source.at(path)
        if value is not MISSING and not self.source.is_unchanging(path):
            self.shared.resolved[Reference(self.source, path)] = value
        return value

    def outside(self, node: ast.expr, path: str) -> ir.Expr:
        """Return a value from outside of the kernel, which is read at each launch."""
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            value = self.source.at(".".join(parts[:count]))
            if value is MISSING:
                rule = "there is nothing of this name"
                raise self.error(node, ".".join(parts[:count]), rule, called_here(path))
            if isinstance(value, _Axes):
                if count + 1 != len(parts) or parts[count] not in ("x", "y", "z"):
                    raise self.error(node, path, f"{value.name} has .x, .y and .z, which are numbers")
                self.resolve(".".join(parts[:count]))
                return ir.Builtin(INT, node.lineno, value.name, "xyz".index(parts[count]))
            if isinstance(value, (types.ModuleType, type)):
                continue
            kind = type_of_value(value)
            if kind is None:
                break
            found: ir.Expr = self.capture(node, ".".join(parts[:count]), kind)
            for name in parts[count:]:
                found = self.member(node, found, name)
            return found
        rule = "only numbers, NumPy scalars, structures and dataclasses can be captured"
        raise self.error(node, path, rule, "Pass arrays as arguments")

    def capture(self, node: ast.AST, path: str, kind: Type) -> ir.Var:
        """Return a captured value as a variable."""
        names = self.shared.captured
        name, kind = names.setdefault(Reference(self.source, path), (f"c_{len(names)}", kind))
        found = self.captures[name] = ir.Var(kind, getattr(node, "lineno", 0), name)
        return found

    def member(self, node: ast.AST, owner: ir.Expr, name: str) -> ir.Expr:
        """Return a field of a structure."""
        if not isinstance(owner.type, Record) or name not in (owner.type.dtype.names or ()):
            raise self.error(node, f"field {name}", f"a {owner.type} has none of this name")
        return ir.Member(value_type(owner.type.dtype[name]), owner.line, owner, name)

    def inside(self, make: Callable[[], _T]) -> tuple[ir.Block, _T]:
        """Return what `make` gives, with the statements that it needs before it."""
        before, self.out = self.out, []
        try:
            found = make()
            return self.out, found
        finally:
            self.out = before

    def temporary(self, kind: Type, line: int, value: ir.Expr | None) -> ir.Var:
        """Return a new variable, assigned if there is a value for it."""
        name = f"t_{self.temporaries}"
        self.types[name] = kind
        self.temporaries += 1
        found = ir.Var(kind, line, name)
        if value is not None:
            self.out.append(ir.Assign(line, name, value))
        return found

    def hold(self, value: ir.Expr, line: int) -> ir.Expr:
        """Return a value that can be used twice and is worked out once."""
        return value if isinstance(value, (ir.Const, ir.Var)) else self.temporary(value.type, line, value)

    def refuse(self, node: ast.AST) -> CompileError:
        """Return the error for a part of Python that kernels do not have."""
        what = ast.unparse(node).splitlines()[0].rstrip(":")
        kind = type(node.value if isinstance(node, ast.Constant) else node).__name__
        return self.error(node, what, f"a kernel cannot have this ({kind})", instead_of(node))
