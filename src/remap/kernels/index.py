"""What a Python kernel is written with: the types of its parameters, and the functions that exist inside it only.

None of these does anything by itself: `remap.kernel` reads the source of the function that uses them. Called outside
of a kernel they say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from remap.errors import LaunchError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


class Slice:
    """A parameter that is read: an array as (address, length). Annotate with it.

    `x[i]` with the thread's own index gives zero where the array ends before; with a number it must lie inside: a
    kernel that reads elsewhere ends with an error. `x.get(k, default)` gives the default there. `len(x)`, `x.size`,
    `x.shape`. An array of several dimensions takes a number for each: `x[r, c]`, `x.get(r, c, default)`.
    """

    def __class_getitem__(cls, dtype: Any) -> Any:
        """Return the annotation that takes arrays of one type only: `Slice["float32"]`."""
        return _Annotated(cls, dtype)

    if TYPE_CHECKING:  # what a kernel does with it; there is no such object at run time
        size: int
        shape: tuple[int, ...]
        ndim: int

        def __len__(self) -> int: ...
        def __getitem__(self, index: Any) -> Any: ...
        def get(self, *index_and_default: Any) -> Any:
            """Return an element, or the default where there is none."""


class DisjointSlice:
    """A parameter in which each thread writes its own element, and no other. Annotate with it.

    `out[i] = v` takes the thread's own index; a thread beyond the end writes nothing. `out[i]` and
    `out.get(i, default)` read that element. `element, i = out.get_mut_indexed()` gives both at once: `if element:`
    tells whether the thread has one, `element.value` is it. `unchecked(out)` is the way to write elsewhere.
    """

    def __class_getitem__(cls, dtype: Any) -> Any:
        """Return the annotation that takes arrays of one type only: `DisjointSlice["float32"]`."""
        return _Annotated(cls, dtype)

    if TYPE_CHECKING:  # what a kernel does with it; there is no such object at run time
        size: int
        shape: tuple[int, ...]
        ndim: int

        def __len__(self) -> int: ...
        def __getitem__(self, index: Any) -> Any: ...
        def get(self, *index_and_default: Any) -> Any:
            """Return an element, or the default where there is none."""

        def __setitem__(self, index: Any, value: Any) -> None: ...
        def get_mut_indexed(self) -> tuple[Any, Any]:
            """Return the thread's own element and its index."""
            ...


class _Annotated:
    """`Slice` or `DisjointSlice` of one type."""

    def __init__(self, kind: type, dtype: Any) -> None:
        import numpy as np

        self.kind = kind
        self.dtype = np.dtype(dtype)


def _only_inside(name: str) -> NoReturn:
    raise LaunchError(
        f"call of remap.{name} outside of a kernel",
        rule="it means something for the thread of a kernel only",
        next_step="Call it in a function that is decorated with @remap.kernel",
    )


def index_1d() -> Any:
    """Return the thread's own index, from grid and block of one dimension; a launch with more is refused.

    No two threads have the same, and it cannot be made from a number, so that `out[i] = v` cannot collide. As a number
    it serves reads and comparisons (`int(i)` where a plain number is wanted).
    """
    _only_inside("index_1d")


def index_2d(width: Any = None, *, stride: int | None = None) -> Any:
    """Return the thread's own index row × stride + column, for rows along y and columns along x.

    A thread whose column is not below the stride has no element. `stride` is a constant; `width` is known at run time
    and the same for all threads: a parameter, a captured value, an array's extent, `block_size.x`; at most 2**36.
    `i.row` and `i.col` are numbers. A two-dimensional array that is written or read with it must be as wide; that is
    checked before the launch.
    """
    _only_inside("index_2d")


def warp_index() -> Any:
    """Return the number of the thread's warp, with which its first thread, and no other, writes."""
    _only_inside("warp_index")


def unchecked(out: Any) -> Any:
    """Return a view of a DisjointSlice that is written by numbers; that threads do not collide is your promise.

    The bounds are checked all the same. The host driver finds two threads that write one element.
    """
    _only_inside("unchecked")


def shared_array(shape: int | Sequence[int], dtype: DTypeLike, *, align: int = 0) -> Any:
    """Return memory that the threads of a block share, of a constant shape. Its contents are undefined.

    `align` is in bytes, that of an element by default; the tensor copy engine asks for 128.
    """
    _only_inside("shared_array")


def dynamic_shared(dtype: DTypeLike, *, offset: int = 0, length: int | None = None, align: int = 0) -> Any:
    """Return the block's dynamic shared memory (`launch(shared=…)`) from byte `offset` on, aligned to 16 by default.

    Views with different offsets divide it; `length` counts elements, as many as fit by default.
    """
    _only_inside("dynamic_shared")


def barrier() -> None:
    """Wait for all threads of the block; what they wrote to shared memory can be read then. All must reach it."""
    _only_inside("barrier")


def alias_fence() -> None:
    """Order what was written through one address of aliased memory before what is read through another.

    (fence.proxy.alias)
    """
    _only_inside("alias_fence")


def atomic_add(array: Any, index: Any, value: Any) -> Any:
    """Add to an element in one step, and return what was there."""
    _only_inside("atomic_add")


def atomic_min(array: Any, index: Any, value: Any) -> Any:
    """Lower an element to a value in one step, and return what was there."""
    _only_inside("atomic_min")


def atomic_max(array: Any, index: Any, value: Any) -> Any:
    """Raise an element to a value in one step, and return what was there."""
    _only_inside("atomic_max")


def atomic_exchange(array: Any, index: Any, value: Any) -> Any:
    """Replace an element in one step, and return what was there: undefined in shared memory that nobody wrote."""
    _only_inside("atomic_exchange")


def atomic_cas(array: Any, index: Any, expected: Any, value: Any) -> Any:
    """Replace an element that is `expected` in one step, and return what was there."""
    _only_inside("atomic_cas")


def fma(x: Any, y: Any, z: Any) -> Any:
    """Return x × y + z, rounded once."""
    _only_inside("fma")


class _Axes:
    """Three numbers of the launch by axis; they exist inside of kernels only."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def x(self) -> int:
        """The number along x."""
        _only_inside(f"{self.name}.x")

    @property
    def y(self) -> int:
        """The number along y."""
        _only_inside(f"{self.name}.y")

    @property
    def z(self) -> int:
        """The number along z."""
        _only_inside(f"{self.name}.z")

    def __repr__(self) -> str:
        """Return the name."""
        return f"<remap.{self.name}>"


thread = _Axes("thread")
"""The thread's numbers in its block: `thread.x`, `thread.y`, `thread.z`."""
block = _Axes("block")
"""The block's numbers in the grid."""
block_size = _Axes("block_size")
"""The extents of a block."""
grid_size = _Axes("grid_size")
"""The extents of the grid, in blocks."""

INTRINSICS: dict[Callable[..., Any], str] = {
    one: one.__name__
    for one in (
        index_1d,
        index_2d,
        warp_index,
        unchecked,
        shared_array,
        dynamic_shared,
        barrier,
        alias_fence,
        atomic_add,
        atomic_min,
        atomic_max,
        atomic_exchange,
        atomic_cas,
        fma,
    )
}
