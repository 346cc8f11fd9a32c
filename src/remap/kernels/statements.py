"""Types for statements, and the whole pass: from the source of a Python function to a typed kernel."""

from __future__ import annotations

import ast
from typing import Any

from remap.kernels import ir
from remap.kernels.assignments import Assignments
from remap.kernels.bindings import jumps, stored
from remap.kernels.ir import BOOL, INT, Record, Scalar, Type, promote
from remap.kernels.reading import Reference, Source, scalar_of
from remap.kernels.scope import Shared

_PASSES = 20  # types of variables only ever widen, so that a few passes are enough
_NO_ELSE = "Set a variable before the break, and look at it after the loop"


class Statements(Assignments):
    """Types the statements of one function."""

    def __init__(self, source: Source, shared: Shared, parameters: dict[str, Type]) -> None:
        super().__init__(source, shared, parameters)
        self.result: Type | None = None

    def run(self) -> ir.Block:
        """Return the typed body, once the types of all variables have settled."""
        for _ in range(_PASSES):
            before, result = dict(self.types), self.result
            self.out, self.assigned, self.aliases, self.constants, self.captures = [], set(), {}, {}, {}
            self.temporaries, self.depth = 0, 0
            self.forget()
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
            if before == self.types and result == self.result and not self.narrowed():
                self.check_bindings()
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
                to = scalar_of(self.annotated(annotation))
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

    # -- control --

    def choose(self, node: ast.If) -> None:
        """Type an if; a variable counts as assigned after it where both sides assign it or jump away."""
        test = self.truth(node.test)
        before = self.assigned
        # One variable before, inside and after: what had a value, and what both sides, or the one that stays, bind.
        names = stored([*node.body, *node.orelse]) & (before or set())
        for one, other in ((node.body, node.orelse), (node.orelse, node.body)):
            names |= stored(one) if jumps(other) else stored(one) & stored(other)
        with self.region(node, names):
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
            raise self.error(node, "while … else", "a loop of a kernel has no else", _NO_ELSE)
        known = None if self.assigned is None else set(self.assigned)
        with self.region(node, stored(node.body) & (known or set())):
            before, test = self.inside(lambda: self.truth(node.test))
            body, _ = self.branch(node.body, known)
        self.out.append(ir.While(node.lineno, before, test, body))
        endless = isinstance(node.test, ast.Constant) and bool(node.test.value) and not _breaks(node.body)
        self.assigned = None if endless else known

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
        if node.orelse:
            raise self.error(node, "for … else", "a loop of a kernel has no else", _NO_ELSE)
        if not known_range or not isinstance(node.target, ast.Name):
            text = ast.unparse(node).splitlines()[0].rstrip(":")
            raise self.error(
                node, text, "a kernel loops with: for k in range(…)", "Take the elements by their index"
            )
        assert isinstance(call, ast.Call)
        numbers = self.numbers(call.args)
        for one, at in zip(numbers, call.args, strict=True):
            if not isinstance(one.type, Scalar) or one.type.dtype.kind not in "iu":
                raise self.error(at, ast.unparse(call), "range takes whole numbers")
        line = node.lineno
        step = self.fixed(self.cast(numbers[2], INT), node) if len(numbers) == 3 else ir.Const(INT, line, 1)
        if isinstance(step, ir.Const) and step.value == 0:
            raise self.error(node, ast.unparse(call), "the step of a range is not 0")
        start = self.cast(numbers[0], INT) if len(numbers) > 1 else ir.Const(INT, line, 0)
        end = self.cast(numbers[min(len(numbers) - 1, 1)], INT)
        stop = self.fixed(end, node)
        counter = self.temporary(INT, line, start)
        test = self.goes_on(counter, stop, step)
        known = None if self.assigned is None else set(self.assigned)
        self.stores[node.target.id] = max(self.stores.get(node.target.id, 0), 2)
        with self.region(node, stored([node]) & (known or set())):
            out, self.out = self.out, []
            self.assign(node, node.target.id, counter)
            first, self.out = self.out, out
            body, _ = self.branch(node.body, None if known is None else known | {node.target.id})
        sign = "advance" if _may_pass(end, step) else "+"
        after: ir.Block = [ir.Assign(line, counter.name, ir.Op(INT, line, sign, (counter, step)))]
        self.out.append(ir.While(line, [], test, first + body, after))
        self.assigned = known

    def fixed(self, value: ir.Expr, loop: ast.For) -> ir.Expr:
        """Return a number that stays what it is, as Python's range looks at its arguments once."""
        assigned = {self.current.get(name) for name in stored([loop])}
        if isinstance(value, ir.Var) and value.name in assigned:
            return self.temporary(value.type, loop.lineno, value)
        return value if isinstance(value, ir.Builtin) else self.hold(value, loop.lineno)

    def goes_on(self, counter: ir.Expr, stop: ir.Expr, step: ir.Expr) -> ir.Expr:
        """Return whether a range has a further number; a step of 0, which Python refuses, has none."""
        line = counter.line
        below, above = (ir.Op(BOOL, line, sign, (counter, stop)) for sign in "<>")
        if isinstance(step, ir.Const):
            return below if step.value > 0 else above
        if isinstance(step, ir.Builtin) and step.name in ("block_size", "grid_size"):
            return below
        zero = ir.Const(INT, line, 0)
        up = ir.Op(BOOL, line, "and", (ir.Op(BOOL, line, ">", (step, zero)), below))
        down = ir.Op(BOOL, line, "and", (ir.Op(BOOL, line, "<", (step, zero)), above))
        return ir.Op(BOOL, line, "or", (up, down))

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
            self.out.append(ir.Return(node.lineno, self.meet(value, self.result)))
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
        # The values that it captures are the kernel's: they come along in each call.
        named += [(one, read.type) for one, read in typer.captures.items()]
        return ir.Function(name, named, typer.result, typer.variables(), body, source.line)

    def annotated(self, node: ast.expr) -> Any:
        """Return what the annotation of a variable means."""
        for one in self.source.names_in(node):
            self.resolve(one)
        return self.source.evaluate(node)

    def variables(self) -> dict[str, Type]:
        """Return the types of all variables by the names that they have in the typed form."""
        return dict(self.types)


def _may_pass(stop: ir.Expr, step: ir.Expr) -> bool:
    """Tell whether the number after the last one of a range may be larger, or smaller, than any int."""
    if isinstance(step, ir.Const):
        wide = abs(int(step.value))
    elif isinstance(step, ir.Builtin) and step.name in ("block_size", "grid_size"):
        wide = 1 << 31
    else:
        return True
    far = 1 << 62 if isinstance(stop, ir.Extent) else 1 << 63
    if isinstance(stop, ir.Const):
        far = abs(int(stop.value))
    return wide > 1 and far + wide > 1 << 63


def _breaks(nodes: list[ast.stmt]) -> bool:
    """Tell whether statements of a loop break out of it."""
    return any(
        isinstance(node, ast.Break)
        or (isinstance(node, ast.If) and (_breaks(node.body) or _breaks(node.orelse)))
        for node in nodes
    )


def type_kernel(
    source: Source, parameters: dict[str, Type], fma: bool
) -> tuple[ir.Kernel, dict[Reference, Any], list[Source]]:
    """Return the typed kernel for these types of parameters, what from outside was compiled in, and those functions.

    Raises `CompileError`, naming file and line, for what a kernel cannot have.
    """
    shared = Shared()
    typer = Statements(source, shared, parameters)
    body = typer.run()
    kernel = ir.Kernel(
        name=source.name,
        file=source.file,
        parameters=[(f"p_{name}", kind) for name, kind in parameters.items()],
        captured=[(name, reference, kind) for reference, (name, kind) in shared.captured.items()],
        variables=typer.variables(),
        body=body,
        functions=list(shared.functions.values()),
        spaces=shared.spaces,
        read_by=list(shared.read_by),
        index_kinds=frozenset(shared.kinds),
        unchecked=frozenset(shared.unchecked),
        has_barrier=shared.has_barrier,
        static_shared=shared.static_shared,
        dynamic_align=shared.dynamic_align,
        dynamic_least=shared.dynamic_least,
        fma=fma,
    )
    return kernel, shared.resolved, list(shared.sources.values())
