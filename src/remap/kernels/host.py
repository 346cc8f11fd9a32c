"""Python from a typed kernel: a function that runs a batch of threads at once on NumPy arrays (see `lanes`).

Threads that part ways run one side after the other, each with the lanes that took it; loops go on with the lanes that
are left. NumPy's own operations give the results, so they are what NumPy gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from remap.kernels import ir, numbers
from remap.kernels.ir import BOOL, Array, Scalar, Type, Witness
from remap.kernels.lanes import NONE, inner, pick, put, split, union

_SYMBOLS = {"+", "-", "*", "/", "&", "|", "^", "<", "<=", ">", ">=", "==", "!="}
_UFUNCS = {
    "+": "np.add",
    "-": "np.subtract",
    "*": "np.multiply",
    "/": "np.true_divide",
    "&": "np.bitwise_and",
    "|": "np.bitwise_or",
    "^": "np.bitwise_xor",
}
_FUNCTIONS = {
    "//": "np.floor_divide",
    "%": "np.remainder",
    "<<": "np.left_shift",
    ">>": "np.right_shift",
    "neg": "np.negative",
    "not": "np.logical_not",
    "~": "np.invert",
    "and": "np.logical_and",
    "or": "np.logical_or",
    "select": "np.where",
    "abs": "np.abs",
    "min": "numbers.smaller",
    "max": "numbers.larger",
    "fma": "numbers.fma",
    "advance": "numbers.advance",
}


class HostWriter:
    """Writes one kernel as Python, and compiles it."""

    def __init__(self, kernel: ir.Kernel) -> None:
        self.kernel = kernel
        self.scope: dict[str, Any] = {
            "np": np,
            "numbers": numbers,
            "NONE": NONE,
            "inner": inner,
            "pick": pick,
            "put": put,
            "split": split,
            "union": union,
        }
        self.lines: list[str] = []
        self.indent = 0
        self.names = 0
        self.held: dict[tuple[str, str], str] = {}
        self.left: list[
            tuple[str, str]
        ] = []  # for each loop: the lanes that broke out, and those that continue
        self.unit = min(
            (one.dtype.itemsize for one in kernel.body if isinstance(one, ir.DynamicShared)), default=1
        )

    def text(self) -> str:
        """Return the module's text."""
        for function in self.kernel.functions:
            self.function(
                function.name, [name for name, _ in function.parameters], function.variables, function.body
            )
        parameters = [name for name, _ in self.kernel.parameters] + [
            name for name, _, _ in self.kernel.captured
        ]
        self.function("kernel", [*parameters, "dynamic_size"], self.kernel.variables, self.kernel.body)
        return "\n".join(self.lines)

    def compiled(self) -> Any:
        """Return the function."""
        text = self.text()
        exec(compile(text, f"<{self.kernel.name} on the host>", "exec"), self.scope)
        return self.scope["kernel"]

    def function(self, name: str, parameters: list[str], variables: dict[str, Type], body: ir.Block) -> None:
        """Write one function."""
        self.put(f"def {name}({', '.join(['f', *parameters])}):")
        self.indent += 1
        self.held, self.left = {}, []
        for variable in variables:
            self.put(f"{variable} = None")
        self.put("result = None")
        self.put("s0 = None")
        self.block(body, "s0")
        self.indent = 1
        self.put("return result")
        self.indent = 0

    def put(self, line: str) -> None:
        """Add a line."""
        self.lines.append("    " * self.indent + line)

    def new(self, kind: str) -> str:
        """Return a name that nothing has yet."""
        self.names += 1
        return f"{kind}{self.names}"

    def forget(self, name: str) -> None:
        """Forget the values that are held of a variable, or for a selection."""
        self.held = {key: value for key, value in self.held.items() if name not in key}

    # -- statements --

    def block(self, block: ir.Block, lanes: str) -> None:
        """Write statements for a selection, whose name `lanes` is; lanes that jump away leave it."""
        depth = self.indent
        for number, one in enumerate(block):
            self.statement(one, lanes)
            if number + 1 < len(block) and jumps(one):
                self.forget(lanes)
                # Not one inside of the other: Python takes a hundred levels.
                self.indent = depth
                self.put(f"if {lanes} is not NONE:")
                self.indent += 1
        self.indent = depth

    def statement(self, one: ir.Stmt, lanes: str) -> None:
        """Write one statement."""
        match one:
            case ir.Assign(name=name, value=value):
                text = self.value(value, lanes)
                self.put(f"{name} = put({name}, {text}, {lanes}, f.count)")
                self.forget(name)
            case ir.Store():
                self.store(one, lanes)
            case ir.Evaluate(value=value):
                self.put(self.value(value, lanes))
            case ir.If():
                self.choose(one, lanes)
            case ir.While():
                self.loop(one, lanes)
            case ir.Jump(kind=kind):
                name = self.left[-1][kind == "continue"]
                self.put(f"{name} = union({name}, {lanes}, None, f.count)")
                self.put(f"{lanes} = NONE")
            case ir.Return(value=value):
                if value is not None:
                    self.put(f"result = put(result, {self.value(value, lanes)}, {lanes}, f.count)")
                self.put(f"{lanes} = NONE")
            case ir.Barrier(line=line):
                self.put(f"f.barrier({lanes}, {line})")
            case ir.Fence():
                self.put(f"f.fence({lanes})")
            case ir.Shared(name=name, dtype=dtype, shape=shape):
                self.put(f"{name} = f.shared({name[2:]!r}, {dtype.str!r}, {shape!r})")
            case ir.DynamicShared(name=name, dtype=dtype, offset=offset, length=length):
                arguments = f"{name[2:]!r}, {dtype.str!r}, {offset}, {length}, dynamic_size, {self.unit}"
                self.put(f"{name} = f.dynamic({arguments})")
            case _:
                raise AssertionError(one)

    def store(self, one: ir.Store, lanes: str) -> None:
        """Write a store."""
        if (operation := _ufunc(one)) is not None:
            assert isinstance(one.value, ir.Op)
            values = self.several(one.value.operands, lanes)
            index = self.value(one.indices[0], lanes)
            self.put(f"f.store_result({one.array.name}, {index}, {operation}, {values}, {lanes}, {one.line})")
            return
        value = self.value(one.value, lanes)
        field = f", {one.field!r}" if one.field else ""
        if isinstance(one.indices[0].type, Witness):
            index = self.value(one.indices[0], lanes)
            self.put(f"f.store_own({one.array.name}, {index}, {value}, {lanes}, {one.line}{field})")
        else:
            self.put(
                f"f.store({one.array.name}, {self.several(one.indices, lanes)}, {value}, {lanes}, {one.line}{field})"
            )

    def choose(self, one: ir.If, lanes: str) -> None:
        """Write a choice: one side after the other; one that ends the other side, such as an `elif`, after it."""
        yes, no = self.new("y"), self.new("n")
        self.put(f"{yes}, {no} = split({self.value(one.test, lanes)}, {lanes})")
        self.side(one.body, yes)
        unions = [f"{lanes} = union({yes}, {no}, {lanes}, f.count)"] if jumps(one) else []
        while one.orelse:
            *first, last = one.orelse
            if not isinstance(last, ir.If) or any(map(jumps, first)):
                self.side(one.orelse, no)
                break
            one, lanes = last, no
            yes, no = self.new("y"), self.new("n")
            self.put(f"{yes}, {no} = NONE, NONE")
            self.put(f"if {lanes} is not NONE:")
            self.indent += 1
            self.block(first, lanes)
            self.put(f"{yes}, {no} = split({self.value(one.test, lanes)}, {lanes})")
            self.indent -= 1
            self.side(one.body, yes)
            if jumps(one):
                unions.append(f"{lanes} = union({yes}, {no}, {lanes}, f.count)")
        for union_ in reversed(unions):
            self.put(union_)

    def side(self, block: ir.Block, lanes: str) -> None:
        """Write one side of a choice."""
        if block:
            self.put(f"if {lanes} is not NONE:")
            self.indent += 1
            self.block(block, lanes)
            self.indent -= 1

    def loop(self, one: ir.While, lanes: str) -> None:
        """Write a loop, which goes on with the lanes that are left."""
        stay, out, again, gone = self.new("l"), self.new("o"), self.new("c"), self.new("g")
        leaves = _all_jumps(one.body)
        self.held = {}
        self.put(f"{stay}, {gone} = {lanes}, NONE")
        self.put("while True:")
        self.indent += 1
        self.block(one.before, stay)
        self.put(f"{stay}, {out} = split({self.value(one.test, stay)}, {stay})")
        self.forget(stay)
        if "return" in leaves:
            self.put(f"{gone} = union({gone}, {out}, None, f.count)")
        self.put(f"if {stay} is NONE: break")
        self.put(f"{again} = NONE")
        self.left.append((gone, again))
        self.block(one.body, stay)
        self.left.pop()
        if leaves:
            self.put(f"{stay} = union({stay}, {again}, {lanes}, f.count)")
            self.put(f"if {stay} is NONE: break")
            self.forget(stay)
        self.block(one.after, stay)
        self.indent -= 1
        self.held = {}
        if "return" in leaves:
            self.put(f"{lanes} = {gone}")

    # -- expressions --

    def several(self, values: tuple[ir.Expr, ...], lanes: str) -> str:
        """Return values as a tuple."""
        return f"({', '.join(self.value(one, lanes) for one in values)},)"

    def value(self, one: ir.Expr, lanes: str) -> str:
        """Return an expression for a selection, as text."""
        match one:
            case ir.Const(value=value):
                return self.constant(value, one.type)
            case ir.Var(name=name):
                return self.variable(name, one.type, lanes)
            case ir.Cast(value=value, checked=True, line=line):
                assert isinstance(one.type, Scalar)
                return f"f.fitting({self.value(value, lanes)}, np.{one.type.dtype}, {lanes}, {line})"
            case ir.Cast(value=value):
                return self.cast(value, one.type, lanes)
            case ir.Op(name=name, operands=operands):
                return self.operation(name, operands, lanes)
            case ir.Builtin(name=name, axis=axis):
                return f"f.builtin({name!r}, {axis}, {lanes})"
            case ir.MakeIndex(width=width):
                assert isinstance(one.type, Witness)
                space = one.type.space
                stride = self.value(width, lanes) if width is not None else str(space.stride)
                return f"f.index({('2d' if space.kind == 'width' else space.kind)!r}, {stride}, {lanes})"
            case ir.Number(index=index, part=part):
                return f"{self.value(index, lanes)}.{('number', 'row', 'col')[part]}"
            case ir.Extent(array=array, axis=axis):
                return f"{array.name}.extent({axis})"
            case ir.Has(array=array, index=index):
                return f"f.has({array.name}, {self.value(index, lanes)})"
            case ir.Load(array=array, indices=indices, default=default, line=line):
                return self.load(array, indices, default, lanes, line)
            case ir.Member(value=value, name=name):
                text = f"{self.value(value, lanes)}[{name!r}]"
                return f"numbers.truth({text})" if one.type == BOOL else text
            case ir.Call(function=function, arguments=arguments):
                texts = [f"f.enter({lanes})", *(self.value(argument, lanes) for argument in arguments)]
                return f"{function.name}({', '.join(texts)})"
            case ir.Atomic(name=name, array=array, indices=indices, operands=operands, line=line):
                places, values = self.several(indices, lanes), self.several(operands, lanes)
                return f"f.atomic({name!r}, {array.name}, {places}, {values}, {lanes}, {line})"
            case _:
                raise AssertionError(one)

    def load(
        self, array: ir.Var, indices: tuple[ir.Expr, ...], default: ir.Expr | None, lanes: str, line: int
    ) -> str:
        """Return a read."""
        other = self.value(default, lanes) if default is not None else "None"
        if isinstance(indices[0].type, Witness):
            return f"f.own({array.name}, {self.value(indices[0], lanes)}, {other}, {lanes}, {line})"
        places = self.several(indices, lanes)
        if default is not None:
            return f"f.get({array.name}, {places}, {other}, {lanes}, {line})"
        return f"f.load({array.name}, {places}, {lanes}, {line})"

    def variable(self, name: str, kind: Type, lanes: str) -> str:
        """Return a variable for a selection; parameters are the same for all lanes."""
        if isinstance(kind, Array) or name.startswith("c_"):
            return name
        found = self.held.get((name, lanes))
        if found is None:
            found = self.held[name, lanes] = self.new("k")
            self.put(f"{found} = pick({name}, {lanes})")
        return found

    def constant(self, value: Any, kind: Type) -> str:
        """Return the name of a constant of that type."""
        assert isinstance(kind, Scalar)
        name = self.new("K")
        self.scope[name] = kind.dtype.type(value)
        return name

    def cast(self, value: ir.Expr, to: Type, lanes: str) -> str:
        """Return a conversion."""
        text, start = self.value(value, lanes), value.type
        assert isinstance(to, Scalar)
        assert isinstance(start, Scalar)
        if to.dtype == start.dtype:
            return text
        if start.dtype.kind == "f" and to.dtype.kind in "iu":
            return f"numbers.to_integer({text}, np.{to.dtype})"
        return f"{text}.astype(np.{'bool_' if to.dtype.kind == 'b' else to.dtype})"

    def operation(self, name: str, operands: tuple[ir.Expr, ...], lanes: str) -> str:
        """Return an operation."""
        texts = [self.value(one, lanes) for one in operands]
        if name in _SYMBOLS:
            first, second = operands[0].type, operands[-1].type
            mixed = isinstance(first, Scalar) and isinstance(second, Scalar) and first.dtype != second.dtype
            if mixed:  # a 64-bit unsigned number and a signed one
                return f"(numbers.compare({texts[0]}, {texts[1]}) {name} 0)"
            return f"({texts[0]} {name} {texts[1]})"
        return f"{_FUNCTIONS.get(name, f'np.{name}')}({', '.join(texts)})"


def _ufunc(one: ir.Store) -> str | None:
    """Return the operation of NumPy that makes the value of a thread's own element, where it is one with that type."""
    value = one.value
    if one.field or not isinstance(one.indices[0].type, Witness) or not isinstance(value, ir.Op):
        return None
    types = {operand.type for operand in value.operands}
    if types != {value.type}:  # so neither comparisons, nor operations that `numbers` has to define
        return None
    name = _UFUNCS.get(value.name) or _FUNCTIONS.get(value.name, f"np.{value.name}")
    found = getattr(np, name.removeprefix("np."), None)
    return name if isinstance(found, np.ufunc) else None


def jumps(one: ir.Stmt) -> bool:
    """Tell whether lanes may leave their selection in a statement."""
    match one:
        case ir.Jump() | ir.Return():
            return True
        case ir.If(body=body, orelse=orelse):
            return any(map(jumps, body)) or any(map(jumps, orelse))
        case ir.While(body=body):
            return "return" in _all_jumps(body)
        case _:
            return False


def _all_jumps(block: ir.Block) -> set[str]:
    """Return how lanes may leave the block of a loop."""
    found: set[str] = set()
    for one in block:
        match one:
            case ir.Jump(kind=kind):
                found.add(kind)
            case ir.Return():
                found.add("return")
            case ir.If(body=body, orelse=orelse):
                found |= _all_jumps(body) | _all_jumps(orelse)
            case ir.While(body=body):
                found |= _all_jumps(body) & {"return"}
            case _:
                pass
    return found
