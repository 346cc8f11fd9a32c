"""Types for what statements do with values: effects, assignments, stores, shared memory."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from remap.kernels import ir
from remap.kernels.advice import instead_of_setting
from remap.kernels.bindings import Bindings
from remap.kernels.effects import acts, may_fail
from remap.kernels.expressions import BINARY, element_type
from remap.kernels.index import INTRINSICS
from remap.kernels.ir import BOOL, Array, Record, Type, Witness, value_type
from remap.kernels.reading import Source
from remap.kernels.scope import ElementOf, Shared

_SHARED_LIMIT = 48 * 1024  # bytes of static shared memory (CUDA programming guide, technical specifications)


class Assignments(Bindings):
    """Types assignments."""

    def __init__(self, source: Source, shared: Shared, parameters: dict[str, Type]) -> None:
        super().__init__(source, shared, parameters)
        self.depth = 0
        self.stores: dict[str, int] = {}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.stores[node.id] = self.stores.get(node.id, 0) + 1

    def effect(self, node: ast.expr) -> None:
        """Type an expression that stands alone."""
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            path = ast.unparse(node.func)
            if not self.is_local(path.split(".", maxsplit=1)[0]):
                target = self.resolve(path)
                name = INTRINSICS.get(target) if callable(target) and target.__hash__ is not None else None
                if name in ("barrier", "alias_fence") and (node.args or node.keywords):
                    raise self.error(node, ast.unparse(node), f"{name} takes no argument")
                if name == "barrier":
                    if not self.is_kernel:
                        rule = "a device function cannot have a barrier: nobody could see that all threads reach it"
                        raise self.error(node, "barrier()", rule, "Put it into the kernel")
                    self.shared.has_barrier = True
                    self.out.append(ir.Barrier(node.lineno))
                    return
                if name == "alias_fence":
                    self.out.append(ir.Fence(node.lineno))
                    return
                if name in ("shared_array", "dynamic_shared"):
                    raise self.error(node, ast.unparse(node), "it has to be given a name")
        self.alone = node
        found = self.expression(node)
        if isinstance(found, ir.Expr) and not isinstance(found, (ir.Const, ir.Var)):
            self.out.append(ir.Evaluate(node.lineno, found))

    def assignment(self, node: ast.Assign, target: ast.expr, value: ast.expr) -> None:
        """Type an assignment to one target."""
        if isinstance(target, ast.Tuple):
            self.unpack(node, target, value)
            return
        if isinstance(target, ast.Name) and isinstance(value, ast.Call):
            path = ast.unparse(value.func)
            if not self.is_local(path.split(".", maxsplit=1)[0]):
                called = self.resolve(path)
                name = INTRINSICS.get(called) if callable(called) and called.__hash__ is not None else None
                if name in ("shared_array", "dynamic_shared"):
                    self.declare(node, target.id, name, value)
                    return
        before, found = self.inside(partial(self.expression, value))
        if isinstance(target, ast.Name) and (isinstance(found, ElementOf) or isinstance(found.type, Array)):
            self.alias(node, target.id, found)
            return
        if isinstance(found, ElementOf):
            raise self.error(node, ast.unparse(node), "an element cannot be stored")
        # A constant is all that a name ever stands for; a parameter has stood for something before.
        if (
            isinstance(target, ast.Name)
            and isinstance(found, ir.Const)
            and self.stores[target.id] == 1
            and target.id not in self.parameters
        ):
            self.constants[target.id] = found.value
        self.put(node, target, found, before)

    def alias(self, node: ast.AST, name: str, found: Any) -> None:
        """Let a name stand for an array or an element."""
        if self.stores.get(name, 0) > 1 or self.depth:
            rule = "a name for an array or an element is given once, outside of any if or loop"
            raise self.error(node, name, rule)
        self.aliases[name] = found

    def unpack(self, node: ast.Assign, target: ast.Tuple, value: ast.expr) -> None:
        """Type `a, b = b, a` and `element, i = out.get_mut_indexed()`."""
        names = target.elts
        if (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and value.func.attr == "get_mut_indexed"
        ):
            array = self.array(value.func.value)
            kind = array.type
            if not isinstance(kind, Array) or kind.kind != "disjoint" or value.args or len(names) != 2:
                raise self.error(
                    node, ast.unparse(node), "write: element, i = out.get_mut_indexed(), of a DisjointSlice"
                )
            space = self.shared.spaces.get(array.name) or ir.Space("1d")
            self.shared.kinds.add("1d" if space.kind == "1d" else "2d")
            if space.kind != "1d":
                raise self.error(
                    node, ast.unparse(node), f"the array is used with {space}, and this is index_1d()"
                )
            self.enter_space(node, array, space)
            element, index = names
            if not isinstance(element, ast.Name) or not isinstance(index, ast.Name):
                raise self.error(node, ast.unparse(target), "both take a name")
            made = self.temporary(Witness(space), node.lineno, ir.MakeIndex(Witness(space), node.lineno))
            self.alias(node, element.id, ElementOf(array, made))
            self.put(node, index, made)
            return
        if not isinstance(value, ast.Tuple) or len(value.elts) != len(names):
            step = "A call gives one value, and an index is taken apart as i.row and i.col"
            raise self.error(
                node,
                ast.unparse(node),
                "as many values as names have to stand there",
                step if isinstance(value, ast.Call) else "",
            )
        # Fresh copies, since a name on the left may be read on the right.
        values = self.in_order(*(partial(self.value, one) for one in value.elts))
        held = [
            self.temporary(one.type, node.lineno, one) if self.literal(one) is None else one for one in values
        ]
        for name, one in zip(names, held, strict=True):
            self.put(node, name, one)

    def put(self, node: ast.AST, target: ast.expr, value: ir.Expr, before: Sequence[ir.Stmt] = ()) -> None:
        """Type an assignment of a value, with what has to come before, to a name, an element, or a field of one."""
        match target:
            case ast.Name(id=name):
                self.out += before
                self.assign(node, name, value)
            case ast.Subscript():
                self.store(node, target, value, before)
            case ast.Attribute(value=ast.Subscript() as element, attr=field):
                self.store(node, element, value, before, field)
            case ast.Attribute(value=owner, attr="value"):
                found = self.expression(owner)
                if not isinstance(found, ElementOf):
                    raise self.error(
                        node, ast.unparse(target), "only an element of get_mut_indexed has a value to set"
                    )
                self.store_at(node, found.array, (found.index,), value, before)
            case _:
                rule = "a kernel cannot assign to this"
                raise self.error(node, ast.unparse(target), rule, instead_of_setting(target))

    def store(
        self,
        node: ast.AST,
        target: ast.Subscript,
        value: ir.Expr,
        before: Sequence[ir.Stmt],
        field: str = "",
    ) -> None:
        """Type an assignment to an element."""
        array = self.array(target.value)
        assert isinstance(array.type, Array)
        if array.type.kind == "slice":
            raise self.error(
                node, ast.unparse(target), "a Slice is read only", "Annotate it as remap.DisjointSlice"
            )
        there, indices = self.inside(partial(self.indices, target, array, "write"))
        if not isinstance(indices[0].type, Witness):  # which needs no statements
            self.out += before
            before = there
            if acts(there):
                value = self.steady(value)
        self.store_at(node, array, indices, value, before, field)

    def store_at(
        self,
        node: ast.AST,
        array: ir.Var,
        indices: tuple[ir.Expr, ...],
        value: ir.Expr,
        before: Sequence[ir.Stmt],
        field: str = "",
    ) -> None:
        """Type an assignment to an element whose index is typed, after the statements that the value needs.

        A thread without an element works nothing out, but for what changes memory elsewhere.
        """
        to = element_type(array)
        if isinstance(value.type, Witness):
            rule = "the thread's index cannot be stored"
            raise self.error(node, ast.unparse(node), rule, "Store its number: int(i)")
        if field:
            if not isinstance(to, Record) or field not in (to.dtype.names or ()):
                raise self.error(node, ast.unparse(node), f"a {to} has no field {field}")
            to = value_type(to.dtype[field])
        if value.type != to:
            if isinstance(to, Record) or isinstance(value.type, Record):
                raise self.error(
                    node, ast.unparse(node), f"the element is a {to}, and the value a {value.type}"
                )
            value = self.cast(value, to)
        line = getattr(node, "lineno", 0)
        if acts(before):
            self.out += before
            before = ()
        body = [*before, ir.Store(line, array, indices, value, field)]
        kind = indices[0].type
        # Most expressions are no different where nobody asked for them, and faster without a condition. Beside the
        # first thread of a warp all others have its index, and would read its element.
        if isinstance(kind, Witness) and (kind.space.kind == "warp" or any(map(may_fail, body))):
            body = [ir.If(line, ir.Has(BOOL, line, array, indices[0]), body, [])]
        self.out += body

    def augmented(self, node: ast.AugAssign, target: ast.expr, op: ast.operator, value: ast.expr) -> None:
        """Type `x += v`."""
        if isinstance(target, ast.Name):
            read: ast.expr = ast.copy_location(ast.Name(target.id, ast.Load()), target)
            self.put(node, target, self.binary(node_of(node, read, op, value), read, op, value))
            return
        if isinstance(target, ast.Subscript):
            array = self.array(target.value)
            indices = tuple(self.hold(one, node.lineno) for one in self.indices(target, array, "write"))
            old: ir.Expr = ir.Load(element_type(array), node.lineno, array, indices)
            before, new = self.inside(partial(self.combined, node, old, op, value))
            assert isinstance(array.type, Array)
            if array.type.kind == "slice":
                raise self.error(
                    node, ast.unparse(target), "a Slice is read only", "Annotate it as remap.DisjointSlice"
                )
            self.store_at(node, array, indices, new, before)
            return
        if isinstance(target, ast.Attribute) and target.attr == "value":
            found = self.expression(target.value)
            if isinstance(found, ElementOf):
                old = ir.Load(element_type(found.array), node.lineno, found.array, (found.index,))
                before, new = self.inside(partial(self.combined, node, old, op, value))
                self.store_at(node, found.array, (found.index,), new, before)
                return
        rule = "a kernel cannot assign to this"
        raise self.error(node, ast.unparse(target), rule, instead_of_setting(target))

    def combined(self, node: ast.AugAssign, old: ir.Expr, op: ast.operator, value: ast.expr) -> ir.Expr:
        """Return the new value of `x op= v` in the type of x."""
        name = BINARY.get(type(op))
        if name is None:
            raise self.refuse(node)
        before = self.as_number(old, node.target)
        new = self.operate(node, name, *self.in_order(lambda: before, partial(self.number, value)))
        return self.cast(new, old.type)

    def declare(self, node: ast.Assign, name: str, kind: str, call: ast.Call) -> None:
        """Type a shared array."""
        what = ast.unparse(call)
        if self.depth or not self.is_kernel:
            raise self.error(node, what, "shared memory is declared in the kernel, outside of any if or loop")
        given = self.declared(node, what, kind, call)
        try:
            dtype = np.dtype(self.constant(given["dtype"], "dtype"))
        except TypeError:
            raise self.error(node, what, "the type is none of NumPy's") from None
        if not ir.storable(dtype):
            raise self.error(
                node, what, f"shared memory holds booleans, integers, float32 and float64, and not {dtype}"
            )
        align = self.constant(given["align"], "align") if "align" in given else 0
        if not ir.is_whole(align) or align < 0 or align & (align - 1) or align > 1024:
            raise self.error(node, what, f"align={align} is no power of two up to 1024")
        declare = self.declare_static if kind == "shared_array" else self.declare_dynamic
        array = declare(node, what, f"s_{name}", dtype, align, given)
        self.alias(node, name, ir.Var(array, node.lineno, f"s_{name}"))

    def declared(self, node: ast.Assign, what: str, kind: str, call: ast.Call) -> dict[str | None, ast.expr]:
        """Return what a shared array is declared with, by name."""
        static = kind == "shared_array"
        positional = ["shape", "dtype"] if static else ["dtype"]
        allowed = {"shape", "dtype", "align"} if static else {"dtype", "offset", "length", "align"}
        given: dict[str | None, ast.expr] = dict(zip(positional, call.args, strict=False))
        given.update({one.arg: one.value for one in call.keywords})
        step = f"Write remap.{kind}({', '.join(positional)})"
        missing = [one for one in positional if one not in given]
        if missing:
            are = "are" if len(missing) > 1 else "is"
            raise self.error(node, what, f"{' and '.join(missing)} {are} missing", step)
        if len(call.args) > len(positional) or not {*given} <= allowed:
            further = ", ".join(f"{one}=" for one in sorted(allowed - {*positional}))
            raise self.error(node, what, f"beside {' and '.join(positional)} it takes {further}", step)
        return given

    def declare_static(
        self,
        node: ast.Assign,
        what: str,
        place: str,
        dtype: np.dtype[Any],
        align: int,
        given: Mapping[str | None, ast.expr],
    ) -> Array:
        """Return the type of an array whose size the source says."""
        told = self.constant(given["shape"], "shape")
        shape: tuple[Any, ...] = told if ir.is_numpy(told, tuple) else (told,)
        if not 1 <= len(shape) <= 3 or not all(ir.is_whole(one) and one > 0 for one in shape):
            raise self.error(node, what, "a shape is one to three whole numbers above 0")
        align = max(align, dtype.itemsize)
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        total = self.shared.static_shared = -(-self.shared.static_shared // align) * align + size
        if total > _SHARED_LIMIT:
            rule = f"static shared memory has at most {_SHARED_LIMIT} bytes, and this makes {total}"
            raise self.error(node, what, rule, "Use dynamic_shared and launch(shared=…), which go further")
        self.out.append(ir.Shared(node.lineno, place, dtype, shape, align))
        return Array("shared", dtype, len(shape))

    def declare_dynamic(
        self,
        node: ast.Assign,
        what: str,
        place: str,
        dtype: np.dtype[Any],
        align: int,
        given: Mapping[str | None, ast.expr],
    ) -> Array:
        """Return the type of an array that lies in what each launch gives."""
        offset = self.constant(given["offset"], "offset") if "offset" in given else 0
        length = self.constant(given["length"], "length") if "length" in given else None
        if not ir.is_whole(offset) or offset < 0 or offset % dtype.itemsize:
            raise self.error(
                node, what, f"an offset is a multiple of {dtype.itemsize} bytes, the size of an element"
            )
        if align and offset % align:
            raise self.error(
                node, what, f"offset={offset} is no multiple of align={align}, so that nothing is aligned so"
            )
        if length is not None and (not ir.is_whole(length) or length <= 0):
            raise self.error(node, what, "a length is a whole number above 0")
        align = max(align, 16)
        self.shared.dynamic_align = max(self.shared.dynamic_align, align)
        least = offset + (length or 1) * dtype.itemsize
        self.shared.dynamic_least = max(self.shared.dynamic_least, least)
        self.out.append(ir.DynamicShared(node.lineno, place, dtype, offset, length, align))
        return Array("shared", dtype, 1)


def node_of(node: ast.AugAssign, left: ast.expr, op: ast.operator, right: ast.expr) -> ast.expr:
    """Return the operation that an augmented assignment stands for, for messages."""
    return ast.copy_location(ast.BinOp(left, op, right), node)
