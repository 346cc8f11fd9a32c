"""Types for statements, and the whole pass: from the source of a Python function to a typed kernel."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np

from remap.kernels import ir
from remap.kernels.calls import Calls
from remap.kernels.expressions import ElementOf, Shared, element_type, value_type
from remap.kernels.index import INTRINSICS
from remap.kernels.ir import BOOL, INT, Array, Record, Scalar, Type, Witness, promote
from remap.kernels.reading import Source, scalar_of

_PASSES = 20  # types of variables only ever widen, so that a few passes are enough
_SHARED_LIMIT = 48 * 1024  # bytes of static shared memory (CUDA programming guide, technical specifications)


class Statements(Calls):
    """Types the statements of one function."""

    def __init__(self, source: Source, shared: Shared, parameters: dict[str, Type]) -> None:
        super().__init__(source, shared, parameters)
        self.depth = 0
        self.result: Type | None = None
        self.stores: dict[str, int] = {}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.stores[node.id] = self.stores.get(node.id, 0) + 1

    def run(self) -> ir.Block:
        """Return the typed body, once the types of all variables have settled."""
        for _ in range(_PASSES):
            before, result = dict(self.types), self.result
            self.out, self.assigned, self.aliases, self.constants = [], set(), {}, {}
            self.temporaries, self.depth = 0, 0
            if self.is_kernel:
                self.shared.start()
            for name, kind in self.parameters.items():
                if name in self.source.locals:
                    if not isinstance(kind, (Scalar, Record)):
                        raise self.error(
                            self.source.tree, f"parameter {name}", "an array parameter cannot be assigned to"
                        )
                    self.assign(self.source.tree, name, ir.Var(kind, self.source.line, f"p_{name}"))
            self.block(self.source.tree.body)
            if before == self.types and result == self.result:
                return self.out
        raise self.error(self.source.tree, self.source.name, "the types of its variables do not settle")

    def block(self, nodes: list[ast.stmt]) -> None:
        """Type statements in order."""
        for node in nodes:
            if self.assigned is None:
                return  # nothing comes after a jump
            self.statement(node)

    def statement(self, node: ast.stmt) -> None:
        """Type one statement."""
        match node:
            case ast.Pass() | ast.Expr(value=ast.Constant(value=str())):
                return
            case ast.Expr(value=value):
                self.effect(value)
            case ast.Assign(targets=[target], value=value):
                self.assignment(node, target, value)
            case ast.Assign(targets=targets, value=value):
                held = self.hold(self.value(value), node.lineno)
                for target in targets:
                    self.put(node, target, held)
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value, annotation=annotation):
                to = scalar_of(self.source.evaluate(annotation))
                if to is None:
                    raise self.error(
                        node, ast.unparse(annotation), "a variable is of int, float, bool or a NumPy type"
                    )
                self.put(node, target, self.convert(self.number(value), to))
            case ast.AugAssign(target=target, op=op, value=value):
                self.augmented(node, target, op, value)
            case ast.If():
                self.choose(node)
            case ast.While():
                self.loop(node)
            case ast.For():
                self.count(node)
            case ast.Break() | ast.Continue():
                self.out.append(ir.Jump(node.lineno, "break" if isinstance(node, ast.Break) else "continue"))
                self.assigned = None
            case ast.Return():
                self.leave(node)
            case _:
                raise self.refuse(node)

    # -- values --

    def effect(self, node: ast.expr) -> None:
        """Type an expression that stands alone."""
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            path = ast.unparse(node.func)
            if not self.is_local(path.split(".", maxsplit=1)[0]):
                target = self.source.at(path)
                name = INTRINSICS.get(target) if callable(target) and target.__hash__ is not None else None
                if name == "barrier":
                    if not self.is_kernel:
                        rule = "a device function cannot have a barrier, since nobody could see that all threads reach it"
                        raise self.error(node, "barrier()", rule, "Put it into the kernel")
                    self.shared.has_barrier = True
                    self.out.append(ir.Barrier(node.lineno))
                    return
                if name == "alias_fence":
                    self.out.append(ir.Fence(node.lineno))
                    return
                if name in ("shared_array", "dynamic_shared"):
                    raise self.error(node, ast.unparse(node), "it has to be given a name")
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
                called = self.source.at(path)
                name = INTRINSICS.get(called) if callable(called) and called.__hash__ is not None else None
                if name in ("shared_array", "dynamic_shared"):
                    self.declare(node, target.id, name, value)
                    return
        found = self.expression(value)
        if isinstance(target, ast.Name) and (isinstance(found, ElementOf) or isinstance(found.type, Array)):
            self.alias(node, target.id, found)
            return
        if isinstance(found, ElementOf):
            raise self.error(node, ast.unparse(node), "an element cannot be stored")
        if isinstance(target, ast.Name) and self.stores[target.id] == 1 and isinstance(found, ir.Const):
            self.constants[target.id] = found.value
        self.put(node, target, found)

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
            raise self.error(node, ast.unparse(node), "as many values as names have to stand there")
        # Fresh copies, since a name on the left may be read on the right.
        values = [self.value(one) for one in value.elts]
        held = [self.temporary(one.type, node.lineno, one) for one in values]
        for name, one in zip(names, held, strict=True):
            self.put(node, name, one)

    def put(self, node: ast.AST, target: ast.expr, value: ir.Expr) -> None:
        """Type an assignment of a value to a name, an element, or a field of one."""
        match target:
            case ast.Name(id=name):
                self.assign(node, name, value)
            case ast.Subscript():
                self.store(node, target, value)
            case ast.Attribute(value=ast.Subscript() as element, attr=field):
                self.store(node, element, value, field)
            case ast.Attribute(value=owner, attr="value"):
                found = self.expression(owner)
                if not isinstance(found, ElementOf):
                    raise self.error(
                        node, ast.unparse(target), "only an element of get_mut_indexed has a value to set"
                    )
                self.store_at(node, found.array, (found.index,), value)
            case _:
                raise self.error(node, ast.unparse(target), "a kernel cannot assign to this")

    def assign(self, node: ast.AST, name: str, value: ir.Expr) -> None:
        """Type an assignment to a variable; its type becomes one that holds all that is ever assigned to it."""
        line = getattr(node, "lineno", 0)
        if name in self.aliases:
            raise self.error(node, name, "the name stands for an array or an element already")
        known = self.types.get(name)
        if known is None or known == value.type:
            kind: Type = value.type
        elif isinstance(known, Scalar) and isinstance(value.type, Scalar):
            kind = promote(known, value.type)
        else:
            raise self.error(
                node, f"variable {name}", f"it is a {known} before, and would become a {value.type}"
            )
        self.types[name] = kind
        if self.assigned is not None:
            self.assigned.add(name)
        self.out.append(ir.Assign(line, f"v_{name}", self.cast(value, kind)))

    def store(self, node: ast.AST, target: ast.Subscript, value: ir.Expr, field: str = "") -> None:
        """Type an assignment to an element."""
        array = self.array(target.value)
        assert isinstance(array.type, Array)
        if array.type.kind == "slice":
            raise self.error(
                node, ast.unparse(target), "a Slice is read only", "Annotate it as remap.DisjointSlice"
            )
        self.store_at(node, array, self.indices(target, array, "write"), value, field)

    def store_at(
        self, node: ast.AST, array: ir.Var, indices: tuple[ir.Expr, ...], value: ir.Expr, field: str = ""
    ) -> None:
        """Type an assignment to an element whose index is typed."""
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
        self.out.append(ir.Store(getattr(node, "lineno", 0), array, indices, value, field))

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
            new = self.combined(node, old, op, value)
            assert isinstance(array.type, Array)
            if array.type.kind == "slice":
                raise self.error(
                    node, ast.unparse(target), "a Slice is read only", "Annotate it as remap.DisjointSlice"
                )
            self.store_at(node, array, indices, new)
            return
        if isinstance(target, ast.Attribute) and target.attr == "value":
            found = self.expression(target.value)
            if isinstance(found, ElementOf):
                old = ir.Load(element_type(found.array), node.lineno, found.array, (found.index,))
                self.store_at(node, found.array, (found.index,), self.combined(node, old, op, value))
                return
        raise self.error(node, ast.unparse(target), "a kernel cannot assign to this")

    def combined(self, node: ast.AugAssign, old: ir.Expr, op: ast.operator, value: ast.expr) -> ir.Expr:
        """Return the new value of `x op= v` in the type of x."""
        name = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
                ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>"}.get(type(op))  # fmt: skip
        if name is None:
            raise self.refuse(node)
        new = self.operate(node, name, self.as_number(old, node.target), self.number(value))
        return self.cast(new, old.type)

    def declare(self, node: ast.Assign, name: str, kind: str, call: ast.Call) -> None:
        """Type a shared array."""
        what = ast.unparse(call)
        if self.depth or not self.is_kernel:
            raise self.error(node, what, "shared memory is declared in the kernel, outside of any if or loop")
        options = {one.arg: one.value for one in call.keywords}
        positional = ["shape", "dtype"] if kind == "shared_array" else ["dtype"]
        given = {**dict(zip(positional, call.args, strict=False)), **options}
        allowed = (
            {"shape", "dtype", "align"} if kind == "shared_array" else {"dtype", "offset", "length", "align"}
        )
        if len(call.args) > len(positional) or not set(positional) <= set(given) <= allowed:
            raise self.error(node, what, f"it takes {', '.join(sorted(allowed))}")
        try:
            dtype = np.dtype(self.constant(given["dtype"], "dtype"))
        except TypeError:
            raise self.error(node, what, "the type is none of NumPy's") from None
        if not ir.storable(dtype):
            raise self.error(
                node, what, f"shared memory holds booleans, integers, float32 and float64, and not {dtype}"
            )
        align = self.constant(given["align"], "align") if "align" in given else 0
        if not isinstance(align, int) or align < 0 or align & (align - 1) or align > 1024:
            raise self.error(node, what, f"align={align} is no power of two up to 1024")
        place = f"s_{name}"
        if kind == "shared_array":
            shape = self.constant(given["shape"], "shape")
            shape = shape if isinstance(shape, tuple) else (shape,)
            if not 1 <= len(shape) <= 3 or not all(isinstance(one, int) and one > 0 for one in shape):
                raise self.error(node, what, "a shape is one to three whole numbers above 0")
            align = max(align, dtype.itemsize)
            size = int(np.prod(shape, dtype=object)) * dtype.itemsize
            self.shared.static_shared = -(-self.shared.static_shared // align) * align + size
            if self.shared.static_shared > _SHARED_LIMIT:
                rule = f"static shared memory has at most {_SHARED_LIMIT} bytes, and this makes {self.shared.static_shared}"
                raise self.error(
                    node, what, rule, "Use dynamic_shared and launch(shared=…), which go further"
                )
            self.out.append(ir.Shared(node.lineno, place, dtype, shape, align))
            array = Array("shared", dtype, len(shape))
        else:
            offset = self.constant(given["offset"], "offset") if "offset" in given else 0
            length = self.constant(given["length"], "length") if "length" in given else None
            if not isinstance(offset, int) or offset < 0 or offset % dtype.itemsize:
                raise self.error(
                    node, what, f"an offset is a multiple of {dtype.itemsize} bytes, the size of an element"
                )
            if length is not None and (not isinstance(length, int) or length <= 0):
                raise self.error(node, what, "a length is a whole number above 0")
            align = max(align, 16)
            self.shared.dynamic_align = max(self.shared.dynamic_align, align)
            least = offset + (length or 1) * dtype.itemsize
            self.shared.dynamic_least = max(self.shared.dynamic_least, least)
            self.out.append(ir.DynamicShared(node.lineno, place, dtype, offset, length, align))
            array = Array("shared", dtype, 1)
        self.alias(node, name, ir.Var(array, node.lineno, place))

    # -- control --

    def choose(self, node: ast.If) -> None:
        """Type an if; a variable counts as assigned after it where both sides assign it or jump away."""
        test = self.truth(node.test)
        before = self.assigned
        body, after_body = self.branch(node.body, before)
        orelse, after_else = self.branch(node.orelse, before)
        self.out.append(ir.If(node.lineno, test, body, orelse))
        if after_body is None or after_else is None:
            self.assigned = after_else if after_body is None else after_body
        else:
            self.assigned = after_body & after_else

    def branch(self, nodes: list[ast.stmt], before: set[str] | None) -> tuple[ir.Block, set[str] | None]:
        """Return the typed statements of one side, and what is assigned after it."""
        out, self.out = self.out, []
        self.assigned = None if before is None else set(before)
        self.depth += 1
        try:
            self.block(nodes)
            return self.out, self.assigned
        finally:
            self.out = out
            self.depth -= 1

    def loop(self, node: ast.While) -> None:
        """Type a while loop."""
        if node.orelse:
            raise self.error(node, "while … else", "a kernel cannot have this")
        before, test = self.inside(lambda: self.truth(node.test))
        known = None if self.assigned is None else set(self.assigned)
        body, _ = self.branch(node.body, known)
        self.out.append(ir.While(node.lineno, before, test, body))
        self.assigned = known

    def count(self, node: ast.For) -> None:
        """Type `for k in range(…)`."""
        call = node.iter
        known_range = (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id == "range"
            and not call.keywords
            and 1 <= len(call.args) <= 3
        )
        if node.orelse or not known_range or not isinstance(node.target, ast.Name):
            raise self.error(
                node, ast.unparse(node).splitlines()[0], "a kernel loops with: for k in range(…)"
            )
        assert isinstance(call, ast.Call)
        numbers = [self.number(one) for one in call.args]
        for one, at in zip(numbers, call.args, strict=True):
            if not isinstance(one.type, Scalar) or one.type.dtype.kind not in "iu":
                raise self.error(at, ast.unparse(call), "range takes whole numbers")
        step = numbers[2] if len(numbers) == 3 else ir.Const(INT, node.lineno, 1)
        if not isinstance(step, ir.Const) or step.value == 0:
            raise self.error(
                node, ast.unparse(call), "the step of a range is a number in the source, and not 0"
            )
        start = self.cast(numbers[0], INT) if len(numbers) > 1 else ir.Const(INT, node.lineno, 0)
        stop = self.hold(self.cast(numbers[min(len(numbers) - 1, 1)], INT), node.lineno)
        line = node.lineno
        counter = self.temporary(INT, line, start)
        test = ir.Op(BOOL, line, "<" if step.value > 0 else ">", (counter, stop))
        known = None if self.assigned is None else set(self.assigned)
        self.stores[node.target.id] = max(self.stores.get(node.target.id, 0), 2)
        out, self.out = self.out, []
        self.assign(node, node.target.id, counter)
        first, self.out = self.out, out
        body, _ = self.branch(node.body, None if known is None else known | {node.target.id})
        after: ir.Block = [ir.Assign(line, counter.name, ir.Op(INT, line, "+", (counter, step)))]
        self.out.append(ir.While(line, [], test, first + body, after))
        self.assigned = known

    def leave(self, node: ast.Return) -> None:
        """Type a return."""
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
            if not self.is_kernel and self.result is not None:
                raise self.error(node, "return", "it returns a value elsewhere")
            self.out.append(ir.Return(node.lineno, None))
        elif self.is_kernel:
            raise self.error(node, ast.unparse(node), "a kernel returns nothing", "Write to a DisjointSlice")
        else:
            value = self.value(node.value)
            if (
                isinstance(value.type, Scalar)
                and isinstance(self.result, Scalar)
                and value.type != self.result
            ):
                self.result = promote(self.result, value.type)
            elif self.result is None:
                self.result = value.type
            elif value.type != self.result and not isinstance(value.type, Scalar):
                raise self.error(node, ast.unparse(node), f"it returns a {self.result} elsewhere")
            self.out.append(ir.Return(node.lineno, self.cast(value, self.result)))
        self.assigned = None

    def make_function(self, source: Source, parameters: dict[str, Type], name: str) -> ir.Function:
        """Return a device function, typed."""
        typer = Statements(source, self.shared, parameters)
        typer.is_kernel = False
        body = typer.run()
        if typer.result is not None and typer.assigned is not None:
            rule = "it returns a value on some paths and ends without one on others"
            raise source.error(source.tree, f"device function {source.name}", rule)
        named = [(f"p_{one}", kind) for one, kind in parameters.items()]
        return ir.Function(name, named, typer.result, typer.variables(), body, source.line)

    def variables(self) -> dict[str, Type]:
        """Return the types of all variables by the names that they have in the typed form."""
        return {
            f"t_{name[1:]}" if name.startswith("%") else f"v_{name}": kind
            for name, kind in self.types.items()
        }


def node_of(node: ast.AugAssign, left: ast.expr, op: ast.operator, right: ast.expr) -> ast.expr:
    """Return the operation that an augmented assignment stands for, for messages."""
    return ast.copy_location(ast.BinOp(left, op, right), node)


def type_kernel(source: Source, parameters: dict[str, Type], fma: bool) -> tuple[ir.Kernel, dict[str, Any]]:
    """Return the typed kernel for these types of parameters, and the values from outside that went into it.

    Raises `CompileError`, naming file and line, for what a kernel cannot have.
    """
    shared = Shared()
    typer = Statements(source, shared, parameters)
    body = typer.run()
    kernel = ir.Kernel(
        name=source.name,
        file=source.file,
        parameters=[(f"p_{name}", kind) for name, kind in parameters.items()],
        captured=[(name, path, kind) for path, (name, kind) in shared.captured.items()],
        variables=typer.variables(),
        body=body,
        functions=list(shared.functions.values()),
        spaces=shared.spaces,
        index_kinds=frozenset(shared.kinds),
        unchecked=frozenset(shared.unchecked),
        has_barrier=shared.has_barrier,
        static_shared=shared.static_shared,
        dynamic_align=shared.dynamic_align,
        dynamic_least=shared.dynamic_least,
        fma=fma,
    )
    return kernel, shared.baked
