"""Which variable a name stands for. A name that is bound again is another variable, with a type of its own.

It is the same one where Python's could be either of two when it is read: a name that a loop or a branch binds, and
that had a value before or has one after, is one variable for as long as that lasts, and it is *pinned*. Such a variable
has one type. A number of the source may stand for it (`total = 0`) if that type holds it exactly, and has that type
then; what came before the loop or the branch keeps the type that it had. Anything else is refused, since no one type
would be right for both.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from remap.errors import CompileError
from remap.kernels import ir
from remap.kernels.calls import Calls
from remap.kernels.ir import BOOL, Scalar, Type, promote
from remap.kernels.reading import Source
from remap.kernels.scope import Shared


class Bound(NamedTuple):
    """A value that a variable was given: line, type, and the numbers of the source that it can be, none for others."""

    line: int
    kind: Type
    literals: tuple[Any, ...]


class Bindings(Calls):
    """Types assignments to names."""

    def __init__(self, source: Source, shared: Shared, parameters: dict[str, Type]) -> None:
        super().__init__(source, shared, parameters)
        self.moved: set[str] = set()  # pinned variables of another type than what was there before
        self.forget()

    def forget(self) -> None:
        """Forget what a pass has noted of names, before the next."""
        self.current: dict[str, str] = {}
        self.pinned: dict[str, int] = {}  # names, and the loop or branch from which on they are
        self.regions = 0
        self.last: dict[str, Bound] = {}
        self.bound: dict[str, list[Bound]] = {}
        self.counts: dict[str, int] = {}

    def assign(self, node: ast.AST, name: str, value: ir.Expr) -> None:
        """Type an assignment to a name."""
        line = getattr(node, "lineno", 0)
        if name in self.aliases:
            raise self.error(node, name, "the name stands for an array or an element already")
        self.counts[name] = count = self.counts.get(name, 0) + 1
        literal = self.literal(value)
        bound = Bound(line, value.type, () if literal is None else (literal,))
        if name in self.pinned:
            variable = self.joined(node, name, bound)
            self.bound.setdefault(variable, []).append(bound)
        else:
            variable = self.current.get(name, "")
            if not variable or self.types[variable] != value.type:
                variable = self.current[name] = f"v_{name}" if count == 1 else f"v{count}_{name}"
            self.types[variable] = value.type
        self.last[variable] = bound
        if self.assigned is not None:
            self.assigned.add(name)
        self.out.append(ir.Assign(line, variable, self.cast(value, self.types[variable])))

    def joined(self, node: ast.AST, name: str, bound: Bound) -> str:
        """Return the variable of a pinned name once its type holds another value, too."""
        variable = self.current[name]
        known = self.types.get(variable)
        if known is None or known == bound.kind:
            self.types[variable] = bound.kind
            return variable
        if not isinstance(known, Scalar) or not isinstance(bound.kind, Scalar):
            rule = f"it is a {known} before, and would become a {bound.kind}"
            raise self.error(node, f"variable {name}", rule, "Use another name for one of the two")
        own = _own(name, self.pinned[name])
        if (
            variable != own
        ):  # what came before keeps its type: from the next pass on the region begins with a copy
            self.moved.add(own)
            self.bound[own] = [self.last[variable], *self.bound.get(variable, ())]
            self.current[name] = own
            known = promote(known, self.types.get(own, known))  # type: ignore[arg-type]
        self.types[own] = promote(known, bound.kind)
        return own

    @contextmanager
    def region(self, node: ast.stmt, names: Iterable[str]) -> Generator[None]:
        """Pin names for a loop or a branch; names that it binds for itself alone are gone afterwards."""
        self.regions += 1
        outer, before = self.pinned, dict(self.current)
        self.pinned = dict(outer)
        for name in sorted(set(names) - outer.keys() - self.aliases.keys()):
            self.pinned[name] = self.regions
            own = _own(name, self.regions)
            if name not in self.current or self.assigned is None or name not in self.assigned:
                self.current[name] = own
            elif own in self.moved:
                variable = self.current[name]
                value = ir.Var(self.types[variable], node.lineno, variable)
                self.out.append(ir.Assign(node.lineno, own, self.cast(value, self.types[own])))
                self.bound[own] = [self.last[variable]]
                self.current[name] = own
        starts = {name: self.last.get(self.current[name]) for name in self.pinned}
        yield
        for name in self.pinned.keys() - outer.keys():  # any of the values that it was given may be there now
            variable, start = self.current[name], starts[name]
            values = [*([] if start is None else [start]), *self.bound.get(variable, ())]
            every = {repr(one): one for value in values for one in value.literals}
            sure = all(value.literals for value in values)
            if variable in self.last:
                self.last[variable] = self.last[variable]._replace(
                    literals=tuple(every.values()) if sure else ()
                )
        kept = {name: self.current[name] for name in self.pinned}
        self.current, self.pinned = {**before, **kept}, outer

    def literal(self, value: ir.Expr) -> Any:
        """Return the number of the source that a value is, one of `math.inf` and the like included; None for others."""
        match value:
            case ir.Const(type=Scalar() as kind) if kind.weak or kind == BOOL:
                return value.value
            case ir.Op(name="neg", operands=(operand,)):
                found = self.literal(operand)
                return None if found is None else -found
            case ir.Var(name=name) if name.startswith("c_"):
                read = next((read for read, (one, _) in self.shared.captured.items() if one == name), None)
                if read is None:
                    return None
                owner, dot, _ = read.path.rpartition(".")
                return read.now() if dot and read.source.at(owner) in (math, np) else None
            case _:
                return None

    def narrowed(self) -> bool:
        """Give variables that were widened for what they are no longer given their type; tell whether any were."""
        found = False
        for variable, values in self.bound.items():
            kind = values[0].kind
            for one in values:
                if one.kind != kind and isinstance(kind, Scalar) and isinstance(one.kind, Scalar):
                    kind = promote(kind, one.kind)
            found = found or self.types[variable] != kind
            self.types[variable] = kind
        return found

    def check_bindings(self) -> None:
        """Raise `CompileError` for a variable that no one type is right for."""
        for variable, values in self.bound.items():
            kind = self.types[variable]
            for one in values:
                exact = one.literals and all(_exact(literal, kind) for literal in one.literals)
                if one.kind != kind and not exact:
                    raise self._changed(variable, one, kind, values)

    def _changed(self, variable: str, one: Bound, kind: Type, values: list[Bound]) -> CompileError:
        name = variable.partition("_")[2]
        other = next((found for found in values if found.kind == kind), None)
        other = other or next(found for found in values if found.kind != one.kind)
        first, second = sorted((one, other), key=lambda found: found.line)
        what = f"variable {name}"
        if one.literals:
            literal = next(value for value in one.literals if not _exact(value, kind))
            rule = f"{literal} in line {one.line} is no {kind} exactly, which the variable is in line {other.line}"
            return self.error(one.line, what, rule, f"Convert it: numpy.{_dtype(kind)}({literal})")
        rule = (
            f"it is a {first.kind} in line {first.line} and a {second.kind} in line {second.line}, and a variable "
            "that a loop or a branch assigns to has one type"
        )
        step = "Take another name for the second, or convert one of them, with numpy.float32(…), int(…) or the like"
        return self.error(second.line, what, rule, step)


def _own(name: str, region: int) -> str:
    """Return the variable that a name is in a loop or a branch with a type of its own."""
    return f"w{region}_{name}"


def _dtype(kind: Type) -> str:
    assert isinstance(kind, Scalar)
    return str(kind.dtype)


def _exact(literal: Any, kind: Type) -> bool:
    """Tell whether a type holds a number of the source as it is."""
    if not isinstance(kind, Scalar) or kind.dtype.kind == "b":
        return isinstance(literal, bool)
    if kind.dtype.kind in "iu":
        limits = np.iinfo(kind.dtype)
        return isinstance(literal, int) and int(limits.min) <= literal <= int(limits.max)
    with np.errstate(all="ignore"):
        held = kind.dtype.type(literal)
    if isinstance(literal, float):
        return float(held) == literal or math.isnan(literal)
    return bool(np.isfinite(held)) and int(held) == int(literal)


def stored(nodes: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements assign to."""
    every = (one for node in nodes for one in ast.walk(node))
    return {one.id for one in every if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def jumps(nodes: Iterable[ast.stmt]) -> bool:
    """Tell whether statements may leave where they stand."""
    kinds = (ast.Return, ast.Break, ast.Continue)
    return any(isinstance(one, kinds) for node in nodes for one in ast.walk(node))
