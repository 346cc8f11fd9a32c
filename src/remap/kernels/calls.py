"""Calls inside of a kernel: conversions, mathematics, what `remap.kernels.index` has, and device functions."""

from __future__ import annotations

import ast
import builtins
import math
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from remap.errors import CompileError
from remap.kernels import ir
from remap.kernels.advice import called_here, instead_of_calling
from remap.kernels.elements import Elements
from remap.kernels.expressions import element_type, whole_number
from remap.kernels.index import INTRINSICS
from remap.kernels.ir import BOOL, FLOAT, INT, Array, Record, Scalar, Space, Type, promote
from remap.kernels.reading import MISSING, Source, scalar_of
from remap.kernels.scope import ElementOf
from remap.sizes import counted

_EXACT: dict[Any, str] = {
    math.sqrt: "sqrt",
    np.sqrt: "sqrt",
    math.fabs: "abs",
    np.abs: "abs",
    np.fabs: "abs",
    math.floor: "floor",
    np.floor: "floor",
    math.ceil: "ceil",
    np.ceil: "ceil",
    math.trunc: "trunc",
    np.trunc: "trunc",
    np.rint: "rint",
    math.isnan: "isnan",
    np.isnan: "isnan",
}
"""Functions whose result is the one nearest to the true one, so that every machine gives the same bits."""

_CLOSE: dict[Any, str] = {
    getattr(module, name): name
    for name in ("exp", "exp2", "log", "log2", "log10", "sin", "cos", "tan", "tanh")
    for module in (math, np)
    if hasattr(module, name)
}
"""Functions that differ in the last bits from one library to another."""

_KEPT = ("abs", "floor", "ceil", "trunc")  # give an integer for one, exactly
_WHOLE = (math.floor, math.ceil, math.trunc)  # Python's give an int


class Calls(Elements):
    """Types calls."""

    def make_function(self, source: Source, parameters: dict[str, Type], name: str) -> ir.Function:
        """Return a device function, typed."""
        raise NotImplementedError

    def call(self, node: ast.Call) -> ir.Expr | ElementOf:
        """Return a call, typed."""
        if isinstance(node.func, ast.Attribute):
            root: ast.expr = node.func
            while isinstance(root, ast.Attribute):
                root = root.value
            if not (isinstance(root, ast.Name) and not self.is_local(root.id)):
                return self.method(node, node.func)
        path = ast.unparse(node.func)
        target = self.resolve(path) if isinstance(node.func, (ast.Name, ast.Attribute)) else MISSING
        if isinstance(node.func, ast.Name) and self.is_local(node.func.id):
            raise self.error(node, path, "a local name cannot be called")
        if target is MISSING:
            raise self.error(node, path, "there is nothing of this name to call", called_here(path))
        return self.called(node, path, target)

    def called(self, node: ast.Call, path: str, target: Any) -> ir.Expr:
        """Return a call of something outside of the kernel."""
        try:
            intrinsic = INTRINSICS.get(target)
            function = _EXACT.get(target) or _CLOSE.get(target)
        except TypeError:  # it has no hash
            intrinsic = function = None
        if intrinsic is not None:
            return self.intrinsic(node, intrinsic)
        if node.keywords:
            raise self.error(node, path, "only positional arguments are taken here")
        scalar = scalar_of(target)
        if scalar is not None:
            literal = whole_number(node.args[0]) if len(node.args) == 1 else None
            if literal is not None:  # as it stands there: what is converted need not fit into an int
                return self.convert(ir.Const(INT, node.lineno, literal), scalar)
            (argument,) = self.counted(node, path, 1)
            return self.convert(argument, scalar)
        if isinstance(target, type) and issubclass(target, np.generic):
            raise self.error(node, path, "a kernel computes with booleans, integers, float32 and float64")
        if function is not None:
            return self.mathematics(node, path, function, target)
        if target is len:
            if len(node.args) != 1:
                raise self.error(node, ast.unparse(node), "len takes one array")
            return ir.Extent(INT, node.lineno, self.array(node.args[0]), 0)
        if target is builtins.abs:
            return self.mathematics(node, path, "abs", target)
        if target in (min, max):
            return self.extremum(node, path)
        if isinstance(target, types.FunctionType):
            return self.device_function(node, path, target)
        raise self.error(
            node,
            f"{path}()",
            "a kernel cannot call it",
            instead_of_calling(target),
        )

    def counted(self, node: ast.Call, path: str, count: int) -> list[ir.Expr]:
        """Return the arguments of a call as numbers; there have to be `count`."""
        if len(node.args) != count or node.keywords or any(isinstance(one, ast.Starred) for one in node.args):
            raise self.error(
                node, ast.unparse(node), f"{path} takes {count} argument{'s' * (count != 1)} here"
            )
        return self.numbers(node.args)

    def convert(self, value: ir.Expr, to: Scalar) -> ir.Expr:
        """Return a number converted because the source says so: a number that does not fit is cut as NumPy does."""
        if isinstance(value, ir.Const) and to.dtype.kind in "iu" and isinstance(value.value, int):
            self.check_fits(value, to)
        return self.cast(value, to)

    def mathematics(self, node: ast.Call, path: str, name: str, target: Any) -> ir.Expr:
        """Return a function of one number."""
        (value,) = self.counted(node, path, 1)
        assert isinstance(value.type, Scalar)
        kind = value.type
        of_numpy = isinstance(target, np.ufunc)  # which gives no Python number
        if of_numpy:
            kind = Scalar(kind.dtype)
        if kind.dtype.kind in "biu" and name in _KEPT and target not in (math.fabs, np.fabs):
            whole = self.cast(value, kind)
            if name == "abs" and kind.dtype.kind == "i":
                return ir.Op(kind, node.lineno, "abs", (whole,))
            return self.cast(whole, INT) if target in _WHOLE else whole
        if kind.dtype.kind != "f":
            kind = Scalar(np.dtype(np.float64)) if of_numpy else FLOAT
        found = ir.Op(kind, node.lineno, name, (self.cast(value, kind),))
        if name == "isnan":
            found.type = BOOL
        return self.cast(found, INT) if target in _WHOLE else found

    def extremum(self, node: ast.Call, path: str) -> ir.Expr:
        """Return `min` or `max` as Python has them: the first, unless a later one is smaller (or larger)."""
        if len(node.args) < 2 or node.keywords:
            raise self.error(node, ast.unparse(node), f"{path} takes two numbers or more here")
        values = self.numbers(node.args)
        kind = values[0].type
        for one in values[1:]:
            assert isinstance(kind, Scalar)
            assert isinstance(one.type, Scalar)
            kind = promote(kind, one.type) if kind != one.type else kind
        found = self.meet(values[0], kind)
        for one in values[1:]:
            found = ir.Op(kind, node.lineno, path.rsplit(".", maxsplit=1)[-1], (found, self.meet(one, kind)))
        return found

    # -- what only kernels have --

    def method(self, node: ast.Call, function: ast.Attribute) -> ir.Expr:
        """Return `x.get(i)` or `x.get(i, default)`; an array of two dimensions takes `x.get(r, c, default)`."""
        array = self.array(function.value)
        kind = array.type
        assert isinstance(kind, Array)
        what = ast.unparse(node)
        if function.attr == "get_mut_indexed":
            raise self.error(node, what, "it gives two things", "Write: element, i = out.get_mut_indexed()")
        if function.attr != "get" or kind.kind not in ("slice", "disjoint"):
            step = "Loop over its elements by their index"
            raise self.error(node, what, f"a {kind} has no method {function.attr}", step)
        nodes = list(node.args)
        if nodes and isinstance(nodes[0], ast.Tuple):
            if len(nodes[0].elts) != kind.ndim or len(nodes) > 2:
                rule = f"the array has {counted(kind.ndim, 'dimension')}, and takes as many indices"
                raise self.error(node, what, rule, f"Write {self.get_form(array)}")
            nodes = [*nodes[0].elts, *nodes[1:]]
        if node.keywords or not 1 <= len(nodes) <= 1 + kind.ndim:
            rule = "get takes the index and, if there is to be one, a default"
            raise self.error(node, what, rule, f"Write {self.get_form(array)}")
        to = element_type(array)
        _, first = self.inside(partial(self.value, nodes[0]))  # for its type: it is worked out below
        own = isinstance(first.type, ir.Witness)
        count = 1 if own or kind.kind == "disjoint" else kind.ndim
        makes: list[Callable[[], Any]] = [partial(self.checked_indices, node, array, nodes[:count], "read")]
        if len(nodes) > count:
            if isinstance(to, Record):
                raise self.error(node, what, "a structure has no default")
            makes.append(lambda: self.cast(self.number(nodes[-1]), to))
        elif isinstance(to, Scalar):
            makes.append(lambda: ir.Const(to, node.lineno, to.dtype.type(0).item()))
        try:
            indices, *default = self.in_order(*makes)
        except CompileError as error:
            if (
                kind.ndim > 1 and not own and len(nodes) <= kind.ndim
            ):  # a default may have been taken for an index
                error.next_step = f"Write {self.get_form(array)}"
            raise
        return ir.Load(to, node.lineno, array, indices, *default)

    def get_form(self, array: ir.Var) -> str:
        """Return how `get` is called for an array."""
        assert isinstance(array.type, Array)
        names = {1: "k", 2: "row, column", 3: "plane, row, column"}
        indices = "i" if array.type.kind == "disjoint" else names[array.type.ndim]
        return f"{array.name[2:]}.get({indices}, default)"

    def intrinsic(self, node: ast.Call, name: str) -> ir.Expr:
        """Return what one of the functions of `remap.kernels.index` gives."""
        line = node.lineno
        if name.startswith(("index_", "warp_")):
            return self.make_index(node, name)
        if name.startswith("atomic_"):
            return self.atomic(node, name.removeprefix("atomic_"))
        if name == "fma":
            values = self.counted(node, name, 3)
            kind = values[0].type
            for one in values[1:]:
                assert isinstance(kind, Scalar)
                assert isinstance(one.type, Scalar)
                kind = promote(kind, one.type) if kind != one.type else kind
            assert isinstance(kind, Scalar)
            if kind.dtype.kind != "f":
                kind = FLOAT
            return ir.Op(kind, line, "fma", tuple(self.cast(one, kind) for one in values))
        if name == "unchecked":
            array = self.array(node.args[0]) if len(node.args) == 1 else None
            if array is None or not isinstance(array.type, Array) or array.type.kind != "disjoint":
                raise self.error(node, ast.unparse(node), "unchecked takes one DisjointSlice")
            self.shared.unchecked.add(array.name)
            return ir.Var(Array("unchecked", array.type.dtype, array.type.ndim), line, array.name)
        rule = "it is a statement of its own, or stands alone on the right of ="
        raise self.error(node, ast.unparse(node), rule)

    def make_index(self, node: ast.Call, name: str) -> ir.Expr:
        """Return the thread's own index."""
        what = ast.unparse(node)
        if not self.is_kernel:
            raise self.error(
                node, what, "an index belongs to the kernel and cannot be made in a device function"
            )
        options = {one.arg: one.value for one in node.keywords}
        if name != "index_2d":
            if node.args or options:
                raise self.error(node, what, "an index cannot be made from a number: it takes no argument")
            kind = "1d" if name == "index_1d" else "warp"
            self.shared.kinds.add(kind)
            return ir.MakeIndex(ir.Witness(Space(kind)), node.lineno)
        self.shared.kinds.add("2d")
        if set(options) == {"stride"} and not node.args:
            stride = self.constant(options["stride"], "stride")
            if not ir.is_whole(stride) or not 0 < stride < 1 << 31:
                raise self.error(node, what, "a stride is a whole number from 1 to 2**31 - 1")
            return ir.MakeIndex(ir.Witness(Space("2d", stride=stride)), node.lineno)
        if len(node.args) + len(options) != 1 or not set(options) <= {"width"}:
            raise self.error(node, what, "it takes stride=, a constant, or a width")
        width = node.args[0] if node.args else options["width"]
        value = self.number(width)
        text = self.width_text(width, value) if self.is_uniform(width) else ""
        if not isinstance(value.type, Scalar) or value.type.dtype.kind not in "iu" or not text:
            rule = (
                "the width has to be the same for all threads: a parameter that nothing is assigned to, "
                "a captured value, an array parameter's extent such as x.shape[1], or remap.block_size.x"
            )
            raise self.error(node, what, rule)
        return ir.MakeIndex(ir.Witness(Space("width", width=text)), node.lineno, self.cast(value, INT))

    def width_text(self, node: ast.expr, value: ir.Expr) -> str:
        """Return the text by which a launch reads a width, empty where it cannot."""
        if isinstance(value, ir.Extent):
            name, kind = value.array.name, value.array.type
            if not isinstance(kind, Array) or not name.startswith(
                "p_"
            ):  # a shared array, whose shape is no argument
                return ""
            axis = 0 if kind.ndim == 1 else value.axis
            return f"{name[2:]}.shape[{axis}]" if axis >= 0 else f"{name[2:]}.size"
        if isinstance(value, ir.Builtin):
            known = value.name in ("block_size", "grid_size")
            return f"remap.{value.name}.{'xyz'[value.axis]}" if known else ""
        return ast.unparse(node)

    def is_uniform(self, node: ast.expr) -> bool:
        """Tell whether an expression has one value for the whole launch."""
        if isinstance(node, ast.Subscript):
            return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Constant):
            return True
        return isinstance(root, ast.Name) and root.id not in self.source.locals

    def atomic(self, node: ast.Call, name: str) -> ir.Expr:
        """Return an atomic operation."""
        what, wanted = ast.unparse(node), 4 if name == "cas" else 3
        if len(node.args) != wanted or node.keywords:
            raise self.error(
                node, what, f"it takes an array, an index and {wanted - 2} value{'s' * (wanted > 3)}"
            )
        array = self.array(node.args[0])
        kind = array.type
        assert isinstance(kind, Array)
        if kind.kind == "slice":
            raise self.error(node, what, "a Slice is read only", "Annotate it as remap.DisjointSlice")
        dtype = kind.dtype
        if dtype.fields is not None or dtype.kind == "b" or dtype.itemsize < 4:
            raise self.error(node, what, f"atomics take 4 and 8 bytes, and the elements are {dtype}")
        position = node.args[1]
        nodes = position.elts if isinstance(position, ast.Tuple) else [position]
        if kind.kind == "disjoint":
            self.shared.unchecked.add(array.name)
            array = ir.Var(Array("unchecked", dtype, kind.ndim), array.line, array.name)
        indices, values = self.in_order(
            partial(self.checked_indices, node, array, list(nodes), "change"),
            lambda: tuple(self.numbers(node.args[2:])),
        )
        to = self.cast if name in ("exchange", "cas") else self.meet
        operands = tuple(to(one, Scalar(dtype)) for one in values)
        return self.temporary(
            Scalar(dtype), node.lineno, ir.Atomic(Scalar(dtype), node.lineno, name, array, indices, operands)
        )

    def device_function(self, node: ast.Call, path: str, target: Callable[..., Any]) -> ir.Expr:
        """Return a call of a Python function, which is compiled for the types of its arguments."""
        source = self.shared.sources.get(target)
        if source is None:
            source = self.shared.sources[target] = Source(target, "device function")
        if any(isinstance(one, ast.Starred) for one in node.args) or len(node.args) != len(source.parameters):
            raise self.error(node, ast.unparse(node), f"{path} takes {len(source.parameters)} arguments")
        arguments: list[ir.Expr] = []
        given = self.in_order(*(partial(self.expression, one) for one in node.args))
        for one, found in zip(node.args, given, strict=True):
            if isinstance(found, ElementOf) or isinstance(found.type, ir.Witness):
                rule = "the thread's index and its element stay in the kernel"
                raise self.error(one, ast.unparse(node), rule, "Pass int(i), or the value of the element")
            if isinstance(found.type, Array) and found.type.kind == "disjoint":
                raise self.error(
                    one, ast.unparse(node), "a DisjointSlice stays in the kernel, as its index does"
                )
            arguments.append(found)
        key = (target, tuple(one.type for one in arguments))
        if target in self.shared.stack:
            raise self.error(node, path, "a function of a kernel cannot call itself, however indirectly")
        function = self.shared.functions.get(key)
        if function is None:
            self.shared.stack.append(target)
            try:
                types_ = {name: one.type for name, one in zip(source.parameters, arguments, strict=True)}
                self.shared.names += 1
                function = self.make_function(source, types_, f"f{self.shared.names}_{source.name}")
            except CompileError as error:
                error.add_note(f"called from {self.source.file}:{node.lineno}")
                raise
            finally:
                self.shared.stack.pop()
            self.shared.functions[key] = function
        for name, kind in function.parameters[len(arguments) :]:
            arguments.append(self.captures.setdefault(name, ir.Var(kind, node.lineno, name)))
        found = ir.Call(function.result or BOOL, node.lineno, function, tuple(arguments))
        if function.result is None:
            if self.alone is not node:
                rule = f"{path} returns nothing (line {source.line}), and a value is wanted here"
                raise self.error(node, ast.unparse(node), rule, "Return one, or call it on a line of its own")
            self.out.append(ir.Evaluate(node.lineno, found))
            return ir.Const(BOOL, node.lineno, False)
        return self.temporary(found.type, node.lineno, found)
