"""CUDA C++ from a typed kernel. Every operation is written so that it has one result on every device and on the host.

Integers wrap (signed overflow means nothing in C++, so it is done on unsigned ones), `//` and `%` round down, an
integer divided by zero gives 0, floats become integers towards zero and within their range, and products and sums are
rounded apart (NVRTC runs with --fmad=false unless the kernel says `fma=True`). The helpers are in `cuda/kernel.cuh`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from remap.kernels import ir
from remap.kernels.ir import BOOL, Array, Record, Scalar, Type, Witness, value_type
from remap.kernels.spelling import entry_name, in_ascii, in_comment
from remap.kernels.structures import alignment, field_offset

_NAMES = {
    "b1": "bool",
    "i1": "signed char",
    "i2": "short",
    "i4": "int",
    "i8": "long long",
    "u1": "unsigned char",
    "u2": "unsigned short",
    "u4": "unsigned int",
    "u8": "unsigned long long",
    "f4": "float",
    "f8": "double",
}
_AXES = "xyz"
_GRID = {"thread": "threadIdx", "block": "blockIdx", "block_size": "blockDim", "grid_size": "gridDim"}
_INTEGER = {
    "+": "add",
    "-": "subtract",
    "*": "multiply",
    "//": "floor_divide",
    "%": "remainder_of",
    "<<": "shift_left",
    ">>": "shift_right",
    "min": "smaller",
    "max": "larger",
}


class Writer:
    """Writes one kernel."""

    def __init__(self, kernel: ir.Kernel) -> None:
        self.kernel = kernel
        self.structures: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.lines: list[str] = []
        self.indent = 0

    def text(self) -> str:
        """Return the whole translation unit; its entry is `extern "C"` and has the kernel's name after `remap_`."""
        kernel = self.kernel
        parameters: list[str] = []
        opening: list[str] = []
        for name, kind in kernel.parameters:
            if isinstance(kind, Array):
                # The tags stand in front, where no name of a kernel has them: x and x_n may both be there.
                numbers = [f"count_{name}", *(f"extent{axis}_{name}" for axis in kind.axes)]
                element = self.stored(kind.dtype)
                parameters += [f"{element} *data_{name}", *(f"long long {one}" for one in numbers)]
                opening.append(
                    f"const array<{element}, {kind.ndim}> {name}{{data_{name}, {', '.join(numbers)}}};"
                )
            elif not is_empty(kind):
                parameters.append(f"const {self.name_of(kind)} {name}")
        layout = captured_layout(kernel)
        if layout is not None:
            whole = Record(layout)
            parameters.append(f"const {self.name_of(whole)} captured")
            opening += [
                f"const {self.name_of(kind)} {name} = {self.member('captured', whole, name)};"
                for name, _, kind in kernel.captured
                if not is_empty(kind)
            ]
        functions = [self.function(one) for one in kernel.functions]
        self.lines, self.indent = [], 1
        self.declare(kernel.variables)
        self.block(kernel.body)
        body = "\n".join(["    " + line for line in opening] + self.lines)
        entry = (
            f'extern "C" __global__ void {entry_name(kernel.name)}({", ".join(parameters)})\n{{\n{body}\n}}\n'
        )
        dynamic = ""
        if kernel.dynamic_align:
            dynamic = f"extern __shared__ __align__({max(kernel.dynamic_align, 16)}) unsigned char dynamic_memory[];\n"
        head = f"// {entry_name(kernel.name)} of {in_comment(Path(kernel.file).name)}, made by remap\n"
        using = "using namespace made_by_remap;\n"
        text = "\n".join([head + prelude(), using, *self.structures.values(), dynamic, *functions, entry])
        return in_ascii(text)

    # -- types --

    def name_of(self, kind: Type | None) -> str:
        """Return the C++ name of a type; a structure is declared on the way."""
        if kind is None:
            return "void"
        if isinstance(kind, Scalar):
            return _NAMES[f"{kind.dtype.kind}{kind.dtype.itemsize}"]
        if isinstance(kind, Witness):
            return "thread_index"
        assert isinstance(kind, Record)
        return self.structure(kind.dtype)

    def stored(self, dtype: np.dtype[Any]) -> str:
        """Return the C++ name of a type in memory, where a boolean is a byte of any value: see `loaded`."""
        return "unsigned char" if dtype.kind == "b" else self.name_of(value_type(dtype))

    def loaded(self, text: str, kind: Type) -> str:
        """Return what was read from memory as a value of its type."""
        return f"({text} != 0)" if kind == BOOL else text

    def member(self, text: str, owner: Type, field: str) -> str:
        """Return a field of a structure."""
        assert isinstance(owner, Record)
        return self.loaded(text + field_tag(owner.dtype, field), value_type(owner.dtype[field]))

    def structure(self, dtype: np.dtype[Any]) -> str:
        """Return the name of a structure, with the proof that both sides lay it out alike."""
        key = repr(dtype)
        if key in self.names:
            return self.names[key]
        names = dtype.names or ()
        # A structure inside is declared by being named, so before the one that holds it.
        fields = [f"{self.stored(dtype[field])} m{number};" for number, field in enumerate(names)]
        name = self.names[key] = f"structure_{len(self.names)}"
        # Spelled as the compiler's own offsetof macro is: NVRTC 12.9 and 13.0 do not know __builtin_offsetof.
        place = 'static_assert((unsigned long long)__INTADDR__(&(({name}*)0)->m{number}) == {offset}, "m{number}");'
        checks = [
            place.format(name=name, number=number, offset=field_offset(dtype, field))
            for number, field in enumerate(names)
        ]
        checks.append(f'static_assert(sizeof({name}) == {dtype.itemsize}, "size");')
        self.structures[key] = f"struct {name} {{ {' '.join(fields)} }};\n{' '.join(checks)}\n"
        return name

    # -- functions and statements --

    def function(self, function: ir.Function) -> str:
        """Return a device function."""
        parameters: list[str] = []
        for name, kind in function.parameters:
            if isinstance(kind, Array):
                parameters.append(f"const array<{self.stored(kind.dtype)}, {kind.ndim}> {name}")
            else:
                parameters.append(f"const {self.name_of(kind)} {name}")
        self.lines, self.indent = [], 1
        self.declare(function.variables)
        self.block(function.body)
        body = "\n".join(self.lines)
        head = f"__device__ static {self.name_of(function.result)} {function.name}({', '.join(parameters)})"
        return f"{head}\n{{\n{body}\n}}\n"

    def declare(self, variables: dict[str, Type]) -> None:
        """Declare the variables; each is assigned before it is read, which the typing has proved."""
        for name, kind in variables.items():
            self.put(f"{self.name_of(kind)} {name};")

    def put(self, line: str) -> None:
        """Add a line."""
        self.lines.append("    " * self.indent + line)

    def block(self, block: ir.Block) -> None:
        """Write statements in order."""
        for one in block:
            self.statement(one)

    def braced(self, head: str, block: ir.Block) -> None:
        """Write a block in braces."""
        self.put(head + " {")
        self.indent += 1
        self.block(block)
        self.indent -= 1
        self.put("}")

    def statement(self, one: ir.Stmt) -> None:
        """Write one statement."""
        match one:
            case ir.Assign(name=name, value=value):
                self.put(f"{name} = {self.value(value)};")
            case ir.Store(array=array, indices=indices, value=value, field=field):
                assert isinstance(array.type, Array)
                to = field_tag(array.type.dtype, field) if field else ""
                if isinstance(indices[0].type, Witness):
                    index = self.value(indices[0])
                    self.put(
                        f"if ({index}.has({array.name}.n)) {array.name}.p[{index}.number]{to} = {self.value(value)};"
                    )
                else:
                    # The value first: it may read what is stored to.
                    self.put(
                        f"{{ const auto value = {self.value(value)}; {self.place(array, indices)}{to} = value; }}"
                    )
            case ir.Evaluate(value=value):
                self.put(f"(void)({self.value(value)});")
            case ir.If(test=test, body=body, orelse=orelse):
                self.braced(f"if ({self.value(test)})", body)
                if orelse:
                    self.braced("else", orelse)
            case ir.While():
                self.loop(one)
            case ir.Jump(kind=kind):
                self.put(f"{kind};")
            case ir.Return(value=value):
                self.put("return;" if value is None else f"return {self.value(value)};")
            case ir.Barrier():
                self.put("__syncthreads();")
            case ir.Fence():
                self.put('asm volatile("fence.proxy.alias;" ::: "memory");')
            case ir.Shared(name=name, dtype=dtype, shape=shape, align=align):
                element = self.stored(dtype)
                self.put(f"__shared__ __align__({align}) {element} data_{name}[{math.prod(shape)}];")
                extents = "".join(f", {extent}" for extent in (shape if len(shape) > 1 else ()))
                self.put(
                    f"const array<{element}, {len(shape)}> {name}{{data_{name}, {math.prod(shape)}{extents}}};"
                )
            case ir.DynamicShared(name=name, dtype=dtype, offset=offset, length=length):
                element = self.stored(dtype)
                count = length if length is not None else f"(dynamic_size() - {offset}) / {dtype.itemsize}"
                self.put(
                    f"const array<{element}, 1> {name}{{({element} *)(dynamic_memory + {offset}), {count}}};"
                )
            case _:
                raise AssertionError(one)

    def loop(self, one: ir.While) -> None:
        """Write a loop. A `continue` still has to count on, so that is what the header of a `for` is for."""
        step = ""
        if one.after:
            (last,) = one.after
            assert isinstance(last, ir.Assign)
            step = f"{last.name} = {self.value(last.value)}"
        if one.before:
            self.put(f"for (;; {step}) {{")
            self.indent += 1
            self.block(one.before)
            self.put(f"if (!({self.value(one.test)})) break;")
        else:
            self.put(f"for (; {self.value(one.test)}; {step}) {{")
            self.indent += 1
        self.block(one.body)
        self.indent -= 1
        self.put("}")

    # -- expressions --

    def value(self, one: ir.Expr) -> str:
        """Return an expression as text."""
        match one:
            case ir.Const(value=value):
                return self.constant(value, one.type)
            case ir.Var(name=name):
                return name
            case ir.Cast(value=value):
                return self.cast(value, one.type)
            case ir.Op(name=name, operands=operands):
                return self.operation(
                    one, name, [self.value(operand) for operand in operands], operands[0].type
                )
            case ir.Builtin(name=name, axis=axis):
                return f"(long long){_GRID[name]}.{_AXES[axis]}"
            case ir.MakeIndex(width=width):
                return self.make_index(one, width)
            case ir.Number(index=index, part=part):
                return f"{self.value(index)}.{('number', 'row', 'col')[part]}"
            case ir.Extent(array=array, axis=axis):
                return f"{array.name}.extent({axis})"
            case ir.Has(array=array, index=index):
                return f"{self.value(index)}.has({array.name}.n)"
            case ir.Load(array=array, indices=indices, default=default):
                return self.loaded(self.load(array, indices, default), one.type)
            case ir.Member(value=value, name=name):
                return self.member(self.value(value), value.type, name)
            case ir.Call(function=function, arguments=arguments):
                return f"{function.name}({', '.join(self.value(argument) for argument in arguments)})"
            case ir.Atomic(name=name, array=array, indices=indices, operands=operands):
                numbers = "".join(f", {self.value(operand)}" for operand in operands)
                return f"atomic_{name}(&{self.place(array, indices)}{numbers})"
            case _:
                raise AssertionError(one)

    def load(self, array: ir.Var, indices: tuple[ir.Expr, ...], default: ir.Expr | None) -> str:
        """Return a read of what lies in memory."""
        other = ""
        if default is not None:
            other = self.value(default)
            other = f"(unsigned char){other}" if default.type == BOOL else other
        if isinstance(indices[0].type, Witness):
            own = f"own({array.name}, {self.value(indices[0])}"
            return f"{own}, {other})" if other else f"{own})"
        if other:
            return f"get({array.name}, {other}, {', '.join(self.value(index) for index in indices)})"
        return self.place(array, indices)

    def place(self, array: ir.Var, indices: tuple[ir.Expr, ...]) -> str:
        """Return the element itself; an index outside of the array ends the kernel."""
        return f"at({array.name}, {', '.join(self.value(index) for index in indices)})"

    def make_index(self, one: ir.MakeIndex, width: ir.Expr | None) -> str:
        """Return the thread's own index."""
        assert isinstance(one.type, Witness)
        space = one.type.space
        if space.kind == "1d":
            return "thread_index::linear()"
        if space.kind == "warp":
            return "thread_index::warp()"
        return f"thread_index::grid({self.value(width) if width is not None else f'{space.stride}LL'})"

    def constant(self, value: Any, kind: Type) -> str:
        """Return a number as text that means exactly it."""
        name = self.name_of(kind)
        assert isinstance(kind, Scalar)
        if kind.dtype.kind == "b":
            return "true" if value else "false"
        if kind.dtype.kind == "f":
            if math.isnan(value):
                return f"not_a_number<{name}>()"
            if math.isinf(value):
                return f"{'-' if value < 0 else ''}infinity<{name}>()"
            text = float(value).hex() + ("f" if kind.dtype.itemsize == 4 else "")
            return f"({text})"
        if kind.dtype.itemsize == 8:
            bits = int(value) & (1 << 64) - 1
            return f"(({name}){bits}ULL)"
        return f"(({name}){int(value)})" if int(value) > -(1 << 31) else f"(({name})(-2147483647 - 1))"

    def cast(self, value: ir.Expr, to: Type) -> str:
        """Return a conversion."""
        text, name, start = self.value(value), self.name_of(to), value.type
        assert isinstance(to, Scalar)
        assert isinstance(start, Scalar)
        if to.dtype == start.dtype:
            return text
        if to.dtype.kind == "b":
            return f"({text} != ({self.name_of(start)})0)"
        if start.dtype.kind == "f" and to.dtype.kind in "iu":
            return f"to_integer<{name}>({text})"
        return f"(({name})({text}))"

    def operation(self, one: ir.Op, name: str, texts: list[str], works_in: Type) -> str:
        """Return an operation; what C++ does not define, or defines otherwise, is a helper."""
        assert isinstance(works_in, Scalar)
        result = self.name_of(one.type)
        kind = works_in.dtype.kind
        match name:
            case "not":
                return f"(!{texts[0]})"
            case "and" | "or":
                return f"({texts[0]} {'&&' if name == 'and' else '||'} {texts[1]})"
            case "select":
                return f"({texts[0]} ? {texts[1]} : {texts[2]})"
            case "<" | "<=" | ">" | ">=" | "==" | "!=":
                other = one.operands[1].type
                if works_in != other and kind != "f":  # a 64-bit unsigned and a signed one
                    return f"(compare({texts[0]}, {texts[1]}) {name} 0)"
                return f"({texts[0]} {name} {texts[1]})"
            case "+" | "-" | "*" if kind != "f":
                return f"{_INTEGER[name]}<{result}>({texts[0]}, {texts[1]})"
            case "+" | "-" | "*" | "/":
                return f"({texts[0]} {name} {texts[1]})"
            case "//" | "%" | "<<" | ">>":
                return f"{_INTEGER[name]}<{result}>({texts[0]}, {texts[1]})"
            case "neg":
                return f"(-{texts[0]})" if kind == "f" else f"subtract<{result}>(({result})0, {texts[0]})"
            case "~":
                return f"(!{texts[0]})" if kind == "b" else f"(({result})~{texts[0]})"
            case "&" | "|" | "^":
                return f"(({result})({texts[0]} {name} {texts[1]}))"
            case "min" | "max":
                return f"{_INTEGER[name]}<{result}>({texts[0]}, {texts[1]})"
            case "abs":
                return f"absolute<{result}>({texts[0]})"
            case "advance":
                return f"advance({texts[0]}, {texts[1]})"
            case "isnan":
                return f"is_nan({texts[0]})"
            case _:
                suffix = "f" if works_in.dtype.itemsize == 4 else ""
                return f"::{name}{suffix}({', '.join(texts)})"


def field_tag(dtype: np.dtype[Any], field: str) -> str:
    """Return what names a field of a structure: its number, since any text can be a name in NumPy."""
    return f".m{(dtype.names or ()).index(field)}"


def is_empty(kind: Type) -> bool:
    """Tell whether values of this type have no bytes: such arguments vanish."""
    return isinstance(kind, Record) and kind.dtype.itemsize == 0


def captured_layout(kernel: ir.Kernel) -> np.dtype[Any] | None:
    """Return the structure in which the captured values go, None if there are none."""
    fields = [
        (name, kind.dtype)
        for name, _, kind in kernel.captured
        if isinstance(kind, (Scalar, Record)) and not is_empty(kind)
    ]
    if not fields:
        return None
    # The widest first, so that no byte is spent on padding between them.
    fields.sort(key=lambda field: -alignment(field[1]))
    return np.dtype(fields, align=True)


@lru_cache(maxsize=1)
def prelude() -> str:
    """Return the helpers that every kernel uses."""
    return (Path(__file__).parent / "cuda" / "kernel.cuh").read_text()
