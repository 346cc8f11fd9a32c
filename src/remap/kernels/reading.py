"""The Python function behind a kernel: its syntax tree, and what the names in it mean outside of it."""

from __future__ import annotations
import __future__

import ast
import builtins
import dataclasses
import dis
import inspect
import operator
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from remap.errors import CompileError
from remap.kernels.index import _Axes
from remap.kernels.ir import FLOAT, INT, Record, Scalar, Type, is_numpy, storable
from remap.kernels.structures import structure_of

MISSING: Any = object()
_UNCHANGING = ("remap", "numpy", "math")
"""Modules whose contents are taken to stay what they are, so that a launch need not look at them."""


class Source:
    """One Python function: `tree` is its syntax tree, with the line numbers of its file, `code` what it did then."""

    def __init__(self, function: Callable[..., Any], what: str = "kernel") -> None:
        self.function = function
        self.name = getattr(function, "__name__", repr(function))
        self.title = f"{what} {self.name}"
        self.file = "?"
        if not isinstance(function, types.FunctionType):
            raise CompileError(self.title, rule="it is not a function written in Python")
        self.code = code = function.__code__
        self.file = code.co_filename
        # Not of the function itself: behind a decorator `inspect` would show what that was given (`functools.wraps`).
        bare = types.FunctionType(code, function.__globals__, closure=function.__closure__)
        try:
            lines, first = inspect.getsourcelines(bare)
        except (OSError, TypeError):
            raise CompileError(
                self.title,
                rule="its source text is missing, and a kernel is compiled from its source",
                next_step="Define it in a file or a notebook cell; not with exec, nor by piping a script into Python",
            ) from None
        # Not dedented: comments, texts and continued lines may begin further left than the function.
        inside = lines[0][:1].isspace()
        self.line = first
        try:
            body = ast.parse("".join(["if True:\n", *lines] if inside else lines)).body
        except SyntaxError as error:  # a lambda inside a larger expression
            raise self.error(
                first,
                self.title,
                f"its source cannot be read alone ({error.msg})",
                "Write it with def, in lines of its own",
            ) from None
        tree = body[0]
        if inside and isinstance(tree, ast.If):
            tree = tree.body[0]
        ast.increment_lineno(tree, first - 1 - inside)
        self.line = tree.lineno
        with self.shallow():
            is_source = code.co_name == "<lambda>" or _is_source_of(tree, code)
        if not is_source:
            raise self.error(
                first,
                self.title,
                "its file has changed since it was imported, and a kernel is compiled from its source",
                "Import it again (importlib.reload), or start anew",
            )
        if not isinstance(tree, ast.FunctionDef):
            raise self.error(tree, self.title, "it has to be a plain function, written with def")
        self.tree = tree
        arguments = tree.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
            wrapped = getattr(function, "__wrapped__", None)
            raise self.error(
                tree,
                self.title,
                "its parameters are plain ones, without *, ** or defaults",
                "A decorator has put it there: use the function without that" if wrapped is not None else "",
            )
        self.parameters = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        self.annotations = {one.arg: one.annotation for one in (*arguments.posonlyargs, *arguments.args)}
        self._meanings: dict[str, Any] = {}
        try:
            self._kept = dict(function.__annotations__)
        except Exception:  # noqa: BLE001 (from Python 3.14 on they are evaluated here, and can raise anything)
            self._kept = {}
        self._cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        self.locals = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }

    def outside(self, name: str) -> Any:
        """Return what a name means outside of the function now, `MISSING` if it means nothing."""
        if name in self._cells:
            try:
                return self._cells[name].cell_contents
            except ValueError:
                return MISSING
        found = self.function.__globals__.get(name, MISSING)
        return getattr(builtins, name, MISSING) if found is MISSING else found

    def at(self, path: str) -> Any:
        """Return what a dotted path means outside of the function now, `MISSING` if it means nothing."""
        first, *rest = path.split(".")
        found = self.outside(first)
        for name in rest:
            if found is MISSING or isinstance(found, _Axes):  # whose numbers only threads know
                return MISSING
            found = getattr(found, name, MISSING)
        return found

    def is_global(self, path: str) -> bool:
        """Tell whether a path is the name of a global or of a builtin."""
        return "." not in path and path not in self._cells

    def is_unchanging(self, path: str) -> bool:
        """Tell whether a path leads into a module that stays what it is."""
        found = self.outside(path.split(".", maxsplit=1)[0])
        return isinstance(found, types.ModuleType) and found.__name__ in _UNCHANGING

    def annotation(self, name: str) -> Any:
        """Return the annotation of a parameter as an object, None if it has none.

        It is looked up once: an annotation means what it meant then. Python keeps the object, and only text where the
        module says `from __future__ import annotations`.
        """
        if name not in self._meanings:
            node, kept = self.annotations[name], self._kept.get(name, "")
            if isinstance(kept, str):
                kept = None if node is None else self.evaluate(node)
            self._meanings[name] = kept
        return self._meanings[name]

    def names_in(self, node: ast.expr) -> set[str]:
        """Return the names in an annotation."""
        return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}

    def evaluate(self, node: ast.expr) -> Any:
        """Return what an annotation means, also where it is only text (`from __future__ import annotations`)."""
        where, text = node, ast.unparse(node)
        try:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                node = ast.parse(text, mode="eval").body
            scope = {one: value for one in self.names_in(node) if (value := self.outside(one)) is not MISSING}
            return eval(compile(ast.Expression(node), self.file, "eval"), {}, scope)
        except Exception as error:  # noqa: BLE001 (an annotation can raise anything)
            step = (
                "Give it a name of the module: a name inside of a function is lost where annotations are text"
            )
            raise self.error(
                where,
                f"annotation {text}",
                f"it means nothing here ({error})",
                f"{step} (from __future__ import annotations)" if isinstance(error, NameError) else "",
            ) from None

    @contextmanager
    def shallow(self) -> Generator[None]:
        """Raise `CompileError` where a block meets Python's own limits of what can stand inside of one another."""
        try:
            yield
        except (RecursionError, SyntaxError) as error:
            if isinstance(error, SyntaxError) and not str(error).startswith("too many"):
                raise
            raise self.error(
                self.line,
                self.title,
                "too much of it stands inside of one another: branches, or the terms of one expression",
                "Divide it: give parts of an expression names, move branches into functions, or read an array",
            ) from None

    def error(self, where: ast.AST | int, what: str, rule: str, next_step: str = "") -> CompileError:
        """Return an error that names file and line."""
        line = where if isinstance(where, int) else getattr(where, "lineno", self.line)
        return CompileError(f"{self.file}:{line}: {what}", rule=rule, next_step=next_step)


def _is_source_of(tree: ast.stmt, code: types.CodeType) -> bool:
    """Tell whether a function was compiled from this; the text of a file may be another one by now."""
    if getattr(tree, "name", "") != code.co_name:
        return False
    if any(
        isinstance(one, ast.Assert) for one in ast.walk(tree)
    ):  # pytest compiles others; a kernel has none
        return True
    # Inside of a function that has the variables that it takes from enclosing ones, and no others.
    own = "pass" if code.co_name in code.co_freevars else f"global {code.co_name}"
    around = ast.parse(f"def around():\n {own}\n {' = '.join([*code.co_freevars, 'None'])}")
    function = around.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body.append(tree)
    flags = code.co_flags & __future__.annotations.compiler_flag
    compiled, wanted = compile(around, code.co_filename, "exec", flags, dont_inherit=True), _steps(code)
    return any(one.co_name == code.co_name and _steps(one) == wanted for one in _inside(compiled))


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    """Give the code objects in a code object."""
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield one
            yield from _inside(one)


def _steps(code: types.CodeType) -> list[tuple[str, object]]:
    """Return what a code object does, step by step, wherever it stands.

    A call of a method is none of its own here: which of `a.b()` is one the compiler guesses from the imports of a file.
    """
    kept: list[dis.Instruction] = []
    number: dict[int, int] = {}
    for one in dis.get_instructions(code):
        number[one.offset] = len(kept)
        if one.opname not in ("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL"):
            kept.append(one)
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return [
        (
            one.opname.replace("LOAD_METHOD", "LOAD_ATTR"),
            number[one.argval]
            if one.opcode in jumps
            else _steps(one.argval)
            if isinstance(one.argval, types.CodeType)
            else repr(one.argval),  # as text, 1 is not 1.0
        )
        for one in kept
    ]


class Reference(NamedTuple):
    """A dotted path as one function reads it: the same path may mean something else in another."""

    source: Source
    path: str

    def now(self) -> Any:
        """Return what it means now, `MISSING` if it means nothing."""
        return self.source.at(self.path)


def reader(references: Sequence[Reference], functions: Sequence[Source]) -> Callable[[], Iterable[Any]]:
    """Return what reads several references at once, and then what functions do by now, in one order.

    A launch that is made again asks it each time. So the globals of one module are read without a step of Python.
    """
    spaces = [one.source.function.__globals__ for one in references if one.source.is_global(one.path)]
    quick, slow = list[str](), list[Callable[[], Any]]()
    for one in references:
        if one.source.is_global(one.path) and one.source.function.__globals__ is spaces[0]:
            quick.append(one.path)
        else:
            slow.append(partial(one.source.at, one.path))
    get: Any = spaces[0].get if spaces else None
    each: Any = map  # which gives nothing that a checker knows
    read = partial(each, get, quick, [getattr(builtins, name, MISSING) for name in quick])
    if not slow and not functions:
        return read
    codes = partial(each, operator.attrgetter("__code__"), [one.function for one in functions])
    if not slow:
        return lambda: chain(read(), codes())
    return lambda: [*(read() if quick else ()), *[one() for one in slow], *codes()]


def is_same(now: Any, before: Any) -> bool:
    """Tell whether what was compiled in is still meant: the same object, or an equal number or name of a type."""
    if now is before:
        return True
    plain = isinstance(before, (int, str)) or is_numpy(before, (np.integer, np.dtype))
    return plain and type(now) is type(before) and bool(now == before)


def type_of_value(value: Any) -> Type | None:
    """Return the type of a value that goes to a kernel by value, None if it cannot."""
    if isinstance(value, (bool, np.bool_)):
        return Scalar(np.dtype(np.bool_))
    if isinstance(value, int):
        return INT
    if is_numpy(value, np.void) and value.dtype.fields is not None:
        return Record(value.dtype)
    if is_numpy(value):  # before float: numpy.float64 is one
        return Scalar(value.dtype) if storable(value.dtype) else None
    if isinstance(value, float):
        return FLOAT
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return Record(structure_of(type(value)))
    return None


def scalar_of(what: Any) -> Scalar | None:
    """Return the type that `int`, `float`, `bool`, a NumPy scalar type or dtype stands for, None for anything else."""
    if what is int:
        return INT
    if what is float:
        return FLOAT
    if what is bool:
        return Scalar(np.dtype(np.bool_))
    if is_numpy(what, np.dtype) or (is_numpy(what, type) and issubclass(what, np.generic)):
        return _stored(what)
    return None


def _stored(what: Any) -> Scalar | None:
    try:
        dtype: np.dtype[Any] = np.dtype(what)
    except TypeError:  # one of several, such as numpy.floating
        return None
    return Scalar(dtype) if storable(dtype) else None
