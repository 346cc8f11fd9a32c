"""The typed form of a kernel: what one pass over its Python source gives, and what both back ends read.

Every expression has its type, and every operand has been cast to the type that the operation works in, so that a back
end decides nothing about numbers. Types of numbers are NumPy's (NEP 50): a Python number is *weak* and takes the type
of what it meets; where it meets nothing it is an int64 or a float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from remap.kernels.reading import Reference


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number of a NumPy type; `weak` if it stands for a Python number."""

    dtype: np.dtype[Any]
    weak: bool = False

    def __str__(self) -> str:
        """Return the name that a user would write."""
        return {"i": "int", "f": "float"}[self.dtype.kind] if self.weak else str(self.dtype)


@dataclass(frozen=True, slots=True)
class Record:
    """A structure by value, laid out as in C."""

    dtype: np.dtype[Any]

    def __str__(self) -> str:
        """Return its fields."""
        return f"structure {self.dtype}"


@dataclass(frozen=True, slots=True)
class Array:
    """Memory that is indexed: `kind` is `slice`, `disjoint`, `unchecked` or `shared`."""

    kind: str
    dtype: np.dtype[Any]
    ndim: int

    @property
    def axes(self) -> range:
        """The axes whose extents go along with the length: none where there is one axis only."""
        return range(self.ndim if self.ndim > 1 else 0)

    def __str__(self) -> str:
        """Return what a user would call it."""
        names = {"slice": "Slice", "disjoint": "DisjointSlice", "unchecked": "unchecked view"}
        return f"{names.get(self.kind, 'shared array')} of {self.dtype}"


@dataclass(frozen=True, slots=True)
class Space:
    """How threads are numbered: `1d`, `2d` with a fixed stride, `width` (the 2-D one of run time), or `warp`."""

    kind: str
    stride: int = 0
    width: str = ""

    def __str__(self) -> str:
        """Return the call that makes such an index."""
        if self.kind == "2d":
            return f"index_2d(stride={self.stride})"
        if self.kind == "width":
            return f"index_2d({self.width})"
        return "index_1d()" if self.kind == "1d" else "warp_index()"


@dataclass(frozen=True, slots=True)
class Witness:
    """A thread's own index, which proves that no other thread has the same one."""

    space: Space

    def __str__(self) -> str:
        """Return what it is."""
        return f"thread index from {self.space}"


@dataclass(frozen=True, slots=True)
class Element:
    """The thread's own element of a DisjointSlice, or none."""

    array: str
    dtype: np.dtype[Any]
    space: Space

    def __str__(self) -> str:
        """Return what it is."""
        return f"element of {self.array}"


Type: TypeAlias = Scalar | Record | Array | Witness | Element

BOOL = Scalar(np.dtype(np.bool_))
INT = Scalar(np.dtype(np.int64), weak=True)
FLOAT = Scalar(np.dtype(np.float64), weak=True)

WIDEST = 1 << 36
"""The widest two-dimensional index: a grid has fewer than 2**26 rows of threads, so that row × width + column fits."""


# -- expressions --


@dataclass(slots=True)
class Expr:
    """An expression with its type and the line it stands on."""

    type: Type
    line: int


@dataclass(slots=True)
class Const(Expr):
    """A number."""

    value: Any


@dataclass(slots=True)
class Var(Expr):
    """A local variable, a parameter, or a captured value (all of one name space)."""

    name: str


@dataclass(slots=True)
class Cast(Expr):
    """A conversion. From a float to an integer: towards zero, held to the range, NaN becomes 0.

    A `checked` one is of a Python number that has to fit: the host reports it if not, CUDA keeps the lowest bits.
    """

    value: Expr
    checked: bool = False


@dataclass(slots=True)
class Op(Expr):
    """An operation on operands that have been cast to what it works in; `name` is Python's operator or a function."""

    name: str
    operands: tuple[Expr, ...]


@dataclass(slots=True)
class Builtin(Expr):
    """A number of the launch: `thread`, `block`, `block_size` or `grid_size` along an axis (0 is x)."""

    name: str
    axis: int


@dataclass(slots=True)
class MakeIndex(Expr):
    """The thread's own index in a space; `width` is there for the space of that kind."""

    width: Expr | None = None


@dataclass(slots=True)
class Number(Expr):
    """The number of a witness (`part` 0), or its row (1) or column (2)."""

    index: Expr
    part: int = 0


@dataclass(slots=True)
class Extent(Expr):
    """The length of an array along an axis; axis -1 is the number of all elements."""

    array: Var
    axis: int


@dataclass(slots=True)
class Load(Expr):
    """An element. One witness, which gives zero where the array has no such element; or a number for each axis.

    With `default`, a number outside of the array gives that instead of an error.
    """

    array: Var
    indices: tuple[Expr, ...]
    default: Expr | None = None


@dataclass(slots=True)
class Has(Expr):
    """Whether a witness has an element in an array."""

    array: Var
    index: Expr


@dataclass(slots=True)
class Member(Expr):
    """A field of a structure."""

    value: Expr
    name: str


@dataclass(slots=True)
class Call(Expr):
    """A call of a device function."""

    function: Function
    arguments: tuple[Expr, ...]


@dataclass(slots=True)
class Atomic(Expr):
    """An atomic operation (`add`, `min`, `max`, `exchange`, `cas`) on an element; gives what was there before."""

    name: str
    array: Var
    indices: tuple[Expr, ...]
    operands: tuple[Expr, ...]


# -- statements --


@dataclass(slots=True)
class Stmt:
    """A statement and the line it stands on."""

    line: int


Block: TypeAlias = list[Stmt]


@dataclass(slots=True)
class Assign(Stmt):
    """A value for a local variable, which has that type."""

    name: str
    value: Expr


@dataclass(slots=True)
class Store(Stmt):
    """A value for an element; `field` for one field of a structure there."""

    array: Var
    indices: tuple[Expr, ...]
    value: Expr
    field: str = ""


@dataclass(slots=True)
class Evaluate(Stmt):
    """An expression for its effect."""

    value: Expr


@dataclass(slots=True)
class If(Stmt):
    """A choice."""

    test: Expr
    body: Block
    orelse: Block


@dataclass(slots=True)
class While(Stmt):
    """A loop; `before` is run before each test, `after` after each round, also one that `continue` ended."""

    before: Block
    test: Expr
    body: Block
    after: Block = field(default_factory=list[Stmt])


@dataclass(slots=True)
class Jump(Stmt):
    """`break` or `continue`."""

    kind: str


@dataclass(slots=True)
class Return(Stmt):
    """The end of the thread, or of a device function with its value."""

    value: Expr | None


@dataclass(slots=True)
class Barrier(Stmt):
    """A barrier of the block."""


@dataclass(slots=True)
class Fence(Stmt):
    """An order between the two addresses of aliased memory."""


@dataclass(slots=True)
class Shared(Stmt):
    """A static shared array."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    align: int


@dataclass(slots=True)
class DynamicShared(Stmt):
    """A view of the dynamic shared memory from a byte offset on; `length` None for as many elements as fit."""

    name: str
    dtype: np.dtype[Any]
    offset: int
    length: int | None
    align: int


# -- whole functions --


@dataclass(slots=True)
class Function:
    """A typed device function."""

    name: str
    parameters: list[tuple[str, Type]]
    result: Type | None
    variables: dict[str, Type]
    body: Block
    line: int


@dataclass(slots=True)
class Kernel:
    """A typed kernel with all that launching it takes.

    `captured` are the values from outside by the name they have inside and how they are read. `spaces` says
    for each DisjointSlice that is written by index which space that is, `read_by` for each two-dimensional Slice by
    which two-dimensional ones it is read; `index_kinds` tells what grids it takes.
    """

    name: str
    file: str
    parameters: list[tuple[str, Type]]
    captured: list[tuple[str, Reference, Type]]
    variables: dict[str, Type]
    body: Block
    functions: list[Function]
    spaces: dict[str, Space]
    read_by: list[tuple[str, Space]]
    index_kinds: frozenset[str]
    unchecked: frozenset[str]
    has_barrier: bool
    static_shared: int
    dynamic_align: int
    dynamic_least: int
    fma: bool


def value_type(dtype: np.dtype[Any]) -> Type:
    """Return the type of a value of a NumPy type."""
    return Record(dtype) if dtype.fields is not None else Scalar(dtype)


def storable(dtype: np.dtype[Any]) -> bool:
    """Tell whether numbers of this type can be computed with in a kernel."""
    return (
        dtype.kind == "b"
        or (dtype.kind in "iu" and dtype.isnative)
        or (dtype.kind == "f" and dtype.itemsize in (4, 8) and dtype.isnative)
    )


def is_numpy(value: Any, kind: Any = np.generic) -> bool:
    """Tell whether a value is NumPy's, without a type checker taking it for one of unknown type from then on."""
    return isinstance(value, kind)


def is_whole(value: Any) -> bool:
    """Tell whether a constant is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def promote(one: Scalar, other: Scalar) -> Scalar:
    """Return the type that both become (NEP 50)."""
    if one.weak and other.weak:
        return FLOAT if "f" in (one.dtype.kind, other.dtype.kind) else INT
    if other.weak:
        one, other = other, one
    if not one.weak:
        return Scalar(np.promote_types(one.dtype, other.dtype))
    if other.dtype.kind == "f":
        return other
    if one.dtype.kind == "f":
        return Scalar(np.dtype(np.float64))
    return Scalar(np.dtype(np.int64)) if other.dtype.kind == "b" else other
