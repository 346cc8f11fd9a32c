"""Types for expressions: NumPy's rules (NEP 50), with every conversion written out."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from remap.kernels import ir
from remap.kernels.effects import acts, harmless
from remap.kernels.ir import BOOL, FLOAT, INT, Array, Element, Scalar, Type, Witness, promote, value_type
from remap.kernels.scope import ElementOf, Scope

BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}


class Expressions(Scope):
    """Types expressions."""

    # -- expressions --

    def value(self, node: ast.expr) -> ir.Expr:
        """Return an expression as a value: a number, a structure or a witness."""
        found = self.expression(node)
        if isinstance(found, ElementOf):
            raise self.error(node, ast.unparse(node), "an element is not a value", "Use its .value")
        if isinstance(found.type, Array):
            raise self.error(node, ast.unparse(node), "an array is not a value", "Index it")
        return found

    def number(self, node: ast.expr) -> ir.Expr:
        """Return an expression as a number; a witness gives its number."""
        return self.as_number(self.value(node), node)

    def as_number(self, found: ir.Expr, node: ast.expr) -> ir.Expr:
        """Return a value as a number; a witness gives its number."""
        if isinstance(found.type, Witness):
            return ir.Number(INT, found.line, found)
        if not isinstance(found.type, Scalar):
            raise self.error(node, ast.unparse(node), f"a number is wanted, and this is a {found.type}")
        return found

    def truth(self, node: ast.expr) -> ir.Expr:
        """Return an expression as a condition."""
        if isinstance(node, ast.BoolOp):
            return self.logic(node, isinstance(node.op, ast.And))
        return self.cast(self.operand(node), BOOL)

    def operand(self, node: ast.expr) -> ir.Expr:
        """Return an expression that is asked whether it is true, as a number."""
        found = self.expression(node)
        if isinstance(found, ElementOf):
            return ir.Has(BOOL, node.lineno, found.array, found.index)
        if isinstance(found.type, Array):
            raise self.error(node, ast.unparse(node), "an array is neither true nor false")
        return self.as_number(found, node)

    def in_order(self, *makes: Callable[[], Any]) -> list[Any]:
        """Return what is made one after the other, as Python does: read before it if a later call may change it."""
        found: list[Any] = []
        for make in makes:
            body, one = self.inside(make)
            if acts(body):
                found = [self.steady(before) for before in found]
            self.out += body
            found.append(one)
        return found

    def steady(self, value: Any) -> Any:
        """Return a value, or several, that no later statement changes."""
        if ir.is_numpy(value, tuple):
            return tuple(self.steady(one) for one in value)
        return value if not isinstance(value, ir.Expr) or harmless(value) else self.hold(value, value.line)

    def numbers(self, nodes: Iterable[ast.expr]) -> list[ir.Expr]:
        """Return expressions as numbers."""
        return self.in_order(*(partial(self.number, one) for one in nodes))

    def expression(self, node: ast.expr) -> ir.Expr | ElementOf:
        """Return an expression, typed."""
        match node:
            case ast.Constant(value=bool() as value):
                return ir.Const(BOOL, node.lineno, value)
            case ast.Constant(value=int() as value):
                return self.whole(node, value)
            case ast.Constant(value=float() as value):
                return ir.Const(FLOAT, node.lineno, value)
            case ast.Name() | ast.Attribute():
                return self.name(node)
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(node, left, op, right)
            case ast.UnaryOp(op=op, operand=operand):
                return self.unary(node, op, operand)
            case ast.Compare():
                return self.compare(node)
            case ast.BoolOp(op=op, values=values):
                return self.either(node, isinstance(op, ast.And), values)
            case ast.IfExp():
                return self.choice(node)
            case ast.Subscript():
                return self.subscript(node)
            case ast.Call():
                return self.call(node)
            case ast.Tuple():
                raise self.error(node, ast.unparse(node), "a tuple is not a value in a kernel")
            case _:
                raise self.refuse(node)

    def call(self, node: ast.Call) -> ir.Expr | ElementOf:
        """Return a call; `Calls` knows which there are."""
        raise NotImplementedError

    # -- names --

    def name(self, node: ast.expr) -> ir.Expr | ElementOf:
        """Return what a name or an attribute stands for."""
        if isinstance(node, ast.Name):
            return self.local(node) if self.is_local(node.id) else self.outside(node, node.id)
        assert isinstance(node, ast.Attribute)
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and not self.is_local(root.id):
            return self.outside(node, ast.unparse(node))
        return self.attribute(node)

    def attribute(self, node: ast.Attribute) -> ir.Expr:
        """Return an attribute of a local value."""
        owner = self.expression(node.value)
        line = node.lineno
        if isinstance(owner, ElementOf):
            if node.attr != "value":
                raise self.error(node, ast.unparse(node), "an element has .value, and nothing else")
            return ir.Load(element_type(owner.array), line, owner.array, (owner.index,))
        kind = owner.type
        if isinstance(kind, Array):
            assert isinstance(owner, ir.Var)
            if node.attr == "size":
                return ir.Extent(INT, line, owner, -1)
            if node.attr == "ndim":
                return ir.Const(INT, line, kind.ndim)
            rule = "an array has .size, .ndim and .shape[k]"
            raise self.error(node, ast.unparse(node), rule)
        if isinstance(kind, Witness):
            if node.attr in ("row", "col") and kind.space.kind in ("2d", "width"):
                return ir.Number(INT, line, owner, 1 if node.attr == "row" else 2)
            raise self.error(node, ast.unparse(node), "an index from index_2d has .row and .col")
        return self.member(node, owner, node.attr)

    # -- operators --

    def cast(self, value: ir.Expr, to: Type) -> ir.Expr:
        """Return a value converted to a type."""
        if value.type == to:
            return value
        assert isinstance(to, Scalar)
        if isinstance(value.type, Witness):
            value = ir.Number(INT, value.line, value)
        assert isinstance(value.type, Scalar)
        if isinstance(value, ir.Const):
            self.check_fits(value, to)
        if value.type.dtype == to.dtype and not isinstance(value, ir.Const):
            return ir.Cast(to, value.line, value)
        foldable = to.dtype.kind == "f" or (to.dtype.kind in "iu" and value.type.dtype.kind != "f")
        if isinstance(value, ir.Const) and foldable:
            return ir.Const(to, value.line, to.dtype.type(value.value).item())
        return ir.Cast(to, value.line, value)

    def meet(self, value: ir.Expr, to: Type) -> ir.Expr:
        """Return a value in the type of what it meets, which a Python number has to fit into."""
        found = self.cast(value, to)
        if not isinstance(to, Scalar):
            return found
        if isinstance(found, ir.Cast) and value.type == INT and to.dtype.kind in "iu":
            found.checked = to.dtype != np.int64
        return found

    def check_fits(self, value: ir.Const, to: Scalar) -> None:
        """Raise where a number of the source does not fit into the integer type that it takes."""
        if to.dtype.kind in "iu" and isinstance(value.value, int):
            limits = np.iinfo(to.dtype)
            if not limits.min <= value.value <= limits.max:
                rule = f"it does not fit into {to.dtype}, the type of what it meets"
                raise self.error(
                    value.line, f"{value.value}", rule, "Convert the other one first, or use a smaller number"
                )

    def binary(self, node: ast.expr, left: ast.expr, op: ast.operator, right: ast.expr) -> ir.Expr:
        """Return a binary operation."""
        if isinstance(op, ast.Pow):
            if isinstance(right, ast.Constant) and isinstance(right.value, (int, float)) and right.value == 2:
                base = self.hold(self.number(left), node.lineno)
                if isinstance(right.value, float):
                    assert isinstance(base.type, Scalar)
                    base = self.hold(self.cast(base, promote(base.type, FLOAT)), node.lineno)
                return self.operate(node, "*", base, base)
            raise self.error(
                node, ast.unparse(node), "a kernel has ** 2 and no other power", "Multiply, or use math.sqrt"
            )
        name = BINARY.get(type(op))
        if name is None:
            raise self.refuse(node)
        return self.operate(node, name, *self.numbers((left, right)))

    def operate(self, node: ast.AST, name: str, a: ir.Expr, b: ir.Expr) -> ir.Expr:
        """Return an operation on two numbers, converted to the type that NumPy would work in."""
        assert isinstance(a.type, Scalar)
        assert isinstance(b.type, Scalar)
        kind = promote(a.type, b.type)
        if name in ("&", "|", "^"):
            if kind.dtype.kind == "f":
                raise self.error(
                    node, f"{a.type} {name} {b.type}", "bits of floating-point numbers have no meaning"
                )
        elif a.type.dtype.kind == "b" and b.type.dtype.kind == "b":
            raise self.error(
                node,
                f"{name} of two booleans",
                "that is no arithmetic",
                "Convert them with int(…), or use and, or",
            )
        if name == "/" and kind.dtype.kind != "f":
            kind = FLOAT if kind.weak else Scalar(np.dtype(np.float64))
        if name in ("<<", ">>") and kind.dtype.kind == "f":
            raise self.error(node, f"{a.type} {name} {b.type}", "only integers can be shifted")
        if isinstance(a, ir.Const) and isinstance(b, ir.Const) and kind == INT and name in "+-*":
            value = {"+": a.value + b.value, "-": a.value - b.value, "*": a.value * b.value}[name]
            if -(1 << 63) <= value < 1 << 63:
                return ir.Const(INT, a.line, value)
        return ir.Op(kind, getattr(node, "lineno", a.line), name, (self.meet(a, kind), self.meet(b, kind)))

    def whole(self, node: ast.expr, value: int) -> ir.Expr:
        """Return a whole number that stands in the source."""
        if not -(1 << 63) <= value < 1 << 63:
            step = f"Write numpy.uint64({value})" if 0 <= value < 1 << 64 else ""
            raise self.error(node, f"{value}", "an int of a kernel has 64 bits and a sign", step)
        return ir.Const(INT, node.lineno, value)

    def unary(self, node: ast.expr, op: ast.unaryop, operand: ast.expr) -> ir.Expr:
        """Return an operation on one number."""
        literal = whole_number(node)
        if literal is not None:  # with its sign: the smallest number has no positive counterpart
            return self.whole(node, literal)
        if isinstance(op, ast.Not):
            return ir.Op(BOOL, node.lineno, "not", (self.truth(operand),))
        value = self.number(operand)
        assert isinstance(value.type, Scalar)
        if isinstance(op, ast.UAdd):
            return value
        if isinstance(op, ast.USub):
            if isinstance(value, ir.Const) and value.type.weak:
                return ir.Const(value.type, node.lineno, -value.value)
            if value.type.dtype.kind == "b":
                raise self.error(node, ast.unparse(node), "a boolean has no negative", "Use not")
            return ir.Op(value.type, node.lineno, "neg", (value,))
        if value.type.dtype.kind == "f":
            raise self.error(node, ast.unparse(node), "bits of floating-point numbers have no meaning")
        return ir.Op(value.type, node.lineno, "~", (value,))

    def compare(self, node: ast.Compare) -> ir.Expr:
        """Return a comparison; of chained ones, the next is worked out only if those before it hold."""
        names = [_COMPARE[type(op)] for op in node.ops if type(op) in _COMPARE]
        if len(names) < len(node.ops):
            raise self.refuse(node)
        left, right = self.numbers((node.left, node.comparators[0]))
        found: ir.Expr | None = None
        behind = False
        for number, name in enumerate(names):
            body: ir.Block = []
            if number:
                left = right
                body, right = self.inside(partial(self.number, node.comparators[number]))
            if number + 1 < len(names) and not harmless(right):
                out, self.out = self.out, body if number else self.out
                right = self.hold(right, node.lineno)
                self.out = out
            one = self.compared(node, name, left, right)
            # What was worked out behind a comparison is not there where that one fails.
            behind = behind or bool(body)
            found = one if found is None else self.decided(node, True, found, body, one, behind)
        assert found is not None
        return found

    def compared(self, node: ast.AST, name: str, a: ir.Expr, b: ir.Expr) -> ir.Expr:
        """Return a comparison of two numbers; integers compare by value, whatever their types are."""
        assert isinstance(a.type, Scalar)
        assert isinstance(b.type, Scalar)
        line = getattr(node, "lineno", a.line)
        kinds = a.type.dtype.kind + b.type.dtype.kind
        if "f" in kinds:
            kind = promote(a.type, b.type)
            return ir.Op(BOOL, line, name, (self.cast(a, kind), self.cast(b, kind)))
        # A number of the source takes part in full: no conversion may change what is compared.
        unsigned = Scalar(np.dtype(np.uint64))
        wide = [unsigned if one.type == unsigned else Scalar(np.dtype(np.int64)) for one in (a, b)]
        if kinds == "bb":
            wide = [BOOL, BOOL]
        return ir.Op(BOOL, line, name, (self.cast(a, wide[0]), self.cast(b, wide[1])))

    def logic(self, node: ast.BoolOp, is_and: bool) -> ir.Expr:
        """Return `and` or `or` as a condition; what is on the right runs only where it decides."""
        found = self.truth(node.values[0])
        for one in node.values[1:]:
            found = self.decided(node, is_and, found, *self.inside(partial(self.truth, one)))
        return found

    def decided(
        self,
        node: ast.expr,
        is_and: bool,
        found: ir.Expr,
        body: ir.Block,
        right: ir.Expr,
        behind: bool = False,
    ) -> ir.Expr:
        """Return whether both, or one of two, holds; `body` and what is on the right run only where that decides.

        `behind` is for what cannot be worked out elsewhere, although it is harmless.
        """
        if not body and not behind and harmless(right):
            return ir.Op(BOOL, node.lineno, "and" if is_and else "or", (found, right))
        result = self.temporary(BOOL, node.lineno, found)
        body.append(ir.Assign(node.lineno, result.name, right))
        test: ir.Expr = result if is_and else ir.Op(BOOL, node.lineno, "not", (result,))
        self.out.append(ir.If(node.lineno, test, body, []))
        return result

    def either(self, node: ast.expr, is_and: bool, values: list[ast.expr]) -> ir.Expr:
        """Return `and` or `or` as a value: the operand that decides, as in Python."""
        one = self.operand(values[0])
        if len(values) == 1:
            return one
        body, other = self.inside(partial(self.either, node, is_and, values[1:]))
        if one.type == BOOL and other.type == BOOL:
            return self.decided(node, is_and, one, body, other)
        one = self.hold(one, node.lineno)
        test = self.cast(one, BOOL)
        if is_and:
            return self.chosen(node, test, (body, other), ([], one))
        return self.chosen(node, test, ([], one), (body, other))

    def choice(self, node: ast.IfExp) -> ir.Expr:
        """Return a conditional expression; only the chosen side runs."""
        test = self.truth(node.test)
        one, other = (self.inside(partial(self.number, side)) for side in (node.body, node.orelse))
        return self.chosen(node, test, one, other)

    def chosen(
        self,
        node: ast.expr,
        test: ir.Expr,
        yes: tuple[ir.Block, ir.Expr],
        no: tuple[ir.Block, ir.Expr],
    ) -> ir.Expr:
        """Return one of two values, each with the statements that it needs before it."""
        (body, one), (orelse, other) = yes, no
        assert isinstance(one.type, Scalar)
        assert isinstance(other.type, Scalar)
        kind = one.type if one.type == other.type else promote(one.type, other.type)
        one, other = self.meet(one, kind), self.meet(other, kind)
        if not body and not orelse and harmless(one) and harmless(other):
            return ir.Op(kind, node.lineno, "select", (test, one, other))
        result = self.temporary(kind, node.lineno, None)
        body.append(ir.Assign(node.lineno, result.name, one))
        orelse.append(ir.Assign(node.lineno, result.name, other))
        self.out.append(ir.If(node.lineno, test, body, orelse))
        return result

    def subscript(self, node: ast.Subscript) -> ir.Expr:
        """Return an element of an array; `Elements` knows how."""
        raise NotImplementedError


def whole_number(node: ast.expr) -> int | None:
    """Return the whole number that an expression of the source is, with its sign, None for anything else."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            return None if isinstance(value, bool) else -value
        case _:
            return None


def element_type(array: ir.Var) -> Type:
    """Return the type of an array's elements."""
    assert isinstance(array.type, (Array, Element))
    return value_type(array.type.dtype)
