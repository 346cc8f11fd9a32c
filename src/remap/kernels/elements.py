"""Elements of arrays: which index each array takes, and what has to be known when a kernel is compiled."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from remap.kernels import ir
from remap.kernels.expressions import Expressions, element_type
from remap.kernels.ir import INT, Array, Scalar, Witness, is_numpy
from remap.kernels.scope import ElementOf
from remap.sizes import counted


class Elements(Expressions):
    """Types what has an index."""

    def subscript(self, node: ast.Subscript) -> ir.Expr:
        """Return an element of an array, or an extent of one (`x.shape[0]`)."""
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            array = self.array(node.value.value)
            axis = self.constant(node.slice, "an axis")
            assert isinstance(array.type, Array)
            if not isinstance(axis, int) or not 0 <= axis < array.type.ndim:
                rule = f"the array has {counted(array.type.ndim, 'dimension')}, numbered from 0"
                raise self.error(node, ast.unparse(node), rule)
            return ir.Extent(INT, node.lineno, array, axis)
        array = self.array(node.value)
        indices = self.indices(node, array, "read")
        return ir.Load(element_type(array), node.lineno, array, indices)

    def array(self, node: ast.expr) -> ir.Var:
        """Return an expression that is an array."""
        found = self.expression(node)
        if isinstance(found, ElementOf) or not isinstance(found.type, Array) or not isinstance(found, ir.Var):
            rule = f"an array is wanted, and this is a {'element' if isinstance(found, ElementOf) else found.type}"
            raise self.error(node, ast.unparse(node), rule)
        return found

    def indices(self, node: ast.Subscript, array: ir.Var, verb: str) -> tuple[ir.Expr, ...]:
        """Return the index of an element: a witness, or a number for each axis; refuse what the array does not take."""
        nodes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return self.checked_indices(node, array, nodes, verb)

    def checked_indices(
        self, node: ast.AST, array: ir.Var, nodes: list[ast.expr], verb: str
    ) -> tuple[ir.Expr, ...]:
        """Return indices from their nodes, as `indices` does."""
        kind, what = array.type, ast.unparse(node)
        assert isinstance(kind, Array)
        if any(isinstance(one, ast.Slice) for one in nodes):
            rule = "an element is read or written at a time, and no part of an array"
            raise self.error(node, what, rule, "Loop over its elements by their index")
        found = self.in_order(*(partial(self.value, one) for one in nodes))
        if len(found) == 1 and isinstance(found[0].type, Witness) and kind.kind in ("slice", "disjoint"):
            space = found[0].type.space
            if kind.kind == "disjoint":
                self.enter_space(node, array, space)
            elif kind.ndim == 2 and space.kind in ("2d", "width"):
                self.shared.read_by[array.name, space] = None
            return (found[0],)
        if kind.kind == "disjoint":
            rule = "a DisjointSlice takes the thread's own index, so that no two threads can meet; a number is none"
            raise self.error(
                node, what, rule, "Use remap.index_1d() or index_2d(…), or remap.unchecked(out) to promise it"
            )
        if len(found) != kind.ndim:
            given = f"{len(found)} ind{'ex' if len(found) == 1 else 'ices'}"
            rule = f"the array has {counted(kind.ndim, 'dimension')}, and this has {given}"
            raise self.error(node, what, rule)
        numbers: list[ir.Expr] = []
        for one, index in zip(nodes, found, strict=True):
            number = self.as_number(index, one)
            assert isinstance(number.type, Scalar)
            if number.type.dtype.kind not in "iu":
                raise self.error(
                    one, what, f"an index is a whole number, and this is a {number.type}", "Use int(…)"
                )
            if isinstance(number, ir.Const) and number.value < 0:
                rule = "an index counts from the front, so a negative one lies outside"
                raise self.error(one, what, rule, f"Use len(…) - {-number.value}")
            numbers.append(self.cast(number, INT))
        return tuple(numbers)

    def enter_space(self, node: ast.AST, array: ir.Var, space: ir.Space) -> None:
        """Note by which index a DisjointSlice is used; two kinds of index could give one element to two threads."""
        known = self.shared.spaces.setdefault(array.name, space)
        if known != space:
            rule = f"it was used with {known} before, and an index from {space} may be another thread's there"
            raise self.error(node, ast.unparse(node), rule, "Use one kind of index for an array")

    def constant(self, node: ast.expr, what: str) -> Any:
        """Return the value of an expression that has to be known when the kernel is compiled."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                return tuple(self.constant(one, what) for one in elts)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.whole_constant(operand, what)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _CONSTANT:
                a, b = self.whole_constant(left, what), self.whole_constant(right, what)
                if isinstance(op, (ast.FloorDiv, ast.Mod)) and b == 0:
                    raise self.error(node, f"{what}: {ast.unparse(node)}", "nothing can be divided by 0")
                if isinstance(op, ast.LShift) and not 0 <= b < 64:
                    raise self.error(node, f"{what}: {ast.unparse(node)}", "a shift is by 0 to 63 bits")
                return _CONSTANT[type(op)](a, b)
            case ast.Name(id=name) if name in self.constants:
                self.local(node)  # which raises where it may not have been assigned yet
                return self.constants[name]
            case ast.Name() | ast.Attribute():
                path = ast.unparse(node)
                if not self.is_local(path.split(".", maxsplit=1)[0]):
                    found: Any = self.resolve(path)
                    if is_numpy(found, (int, np.integer)):
                        return int(found)
                    if is_numpy(found, (str, np.dtype, type)):
                        return found
            case _:
                pass
        rule = "it has to be known when the kernel is compiled"
        step = "Use a number or a global variable"
        if what == "shape":
            step += ", or dynamic_shared(…), which each launch sizes"
        raise self.error(node, f"{what}: {ast.unparse(node)}", rule, step)

    def whole_constant(self, node: ast.expr, what: str) -> int:
        """Return the value of an expression that is a whole number, known when the kernel is compiled."""
        found = self.constant(node, what)
        if not ir.is_whole(found):
            raise self.error(node, f"{what}: {ast.unparse(node)}", "arithmetic needs whole numbers here")
        return int(found)


_OPERATOR: Any = operator  # whose functions take anything and tell nothing
_CONSTANT: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: _OPERATOR.add,
    ast.Sub: _OPERATOR.sub,
    ast.Mult: _OPERATOR.mul,
    ast.FloorDiv: _OPERATOR.floordiv,
    ast.Mod: _OPERATOR.mod,
    ast.LShift: _OPERATOR.lshift,
}
