# mypy: disable-error-code="call-arg,operator,arg-type"
# pyright: reportUnusedVariable=false, reportCallIssue=false, reportOperatorIssue=false
# (the kernels here are wrong, as those of users are)
"""What a kernel cannot have is refused with the line, the rule, and a next step that can be followed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import CompileError, DriverError, LaunchError
from remap.kernels import PythonKernel, nvrtc


@dataclasses.dataclass
class Lost:
    """Have a field whose annotation names nothing."""

    n: Nowhere  # type: ignore[name-defined]  # noqa: F821 # pyright: ignore[reportUndefinedVariable]


def length_of_nothing(out: remap.DisjointSlice) -> None:
    """Take the length of nothing."""
    out[remap.index_1d()] = len()


def divided(_: remap.DisjointSlice) -> None:
    """Divide by zero."""
    s = remap.shared_array(4 // 0, np.float32)  # noqa: F841


def shifted_back(_: remap.DisjointSlice) -> None:
    """Shift by a negative number."""
    s = remap.shared_array(1 << -1, np.float32)  # noqa: F841


def shifted_far(_: remap.DisjointSlice) -> None:
    """Make a number that no memory holds."""
    s = remap.shared_array(1 << 1000000000000000, np.float32)  # noqa: F841


def text_minus_one(_: remap.DisjointSlice) -> None:
    """Subtract from a text."""
    s = remap.shared_array("a" - 1, np.float32)  # noqa: F841


def width_of_a_thread(out: remap.DisjointSlice) -> None:
    """Take what differs between threads as a width."""
    out[remap.index_2d(remap.thread.x)] = 1


def width_of_shared_memory(out: remap.DisjointSlice) -> None:
    """Take the extent of a shared array as a width."""
    s = remap.shared_array((4, 8), np.float32)
    out[remap.index_2d(s.shape[1])] = 1


def loop_with_else(out: remap.DisjointSlice) -> None:
    """Have an else after a loop."""
    i = remap.index_1d()
    for k in range(3):
        out[i] = k
    else:  # noqa: PLW0120
        out[i] = 7


def barrier_with_argument(_: remap.DisjointSlice) -> None:
    """Give a barrier an argument."""
    remap.barrier(1)


def shape_of_truth(_: remap.DisjointSlice) -> None:
    """Take True as an extent."""
    s = remap.shared_array(True, np.float32)  # noqa: F841


def length_of_truth(_: remap.DisjointSlice) -> None:
    """Take True as a length."""
    s = remap.dynamic_shared(np.float32, length=True)  # noqa: F841


def sum_of_truth(_: remap.DisjointSlice) -> None:
    """Add True to a number."""
    s = remap.shared_array(31 + True, np.float32)  # noqa: F841


def stride_of_truth(out: remap.DisjointSlice) -> None:
    """Take True as a stride."""
    out[remap.index_2d(stride=True)] = 1


def without_a_type(_: remap.DisjointSlice) -> None:
    """Leave out the type."""
    s = remap.shared_array(32)  # noqa: F841


def with_an_unknown_option(_: remap.DisjointSlice) -> None:
    """Give an option that there is not."""
    s = remap.shared_array(32, np.float32, length=3)  # noqa: F841


def called_number(out: remap.DisjointSlice) -> None:
    """Call a number of the launch."""
    out[remap.index_1d()] = remap.thread.x()


def bare_axes(out: remap.DisjointSlice) -> None:
    """Use three numbers as one."""
    out[remap.index_1d()] = remap.thread


def aligned_at_another_offset(_: remap.DisjointSlice) -> None:
    """Ask for an alignment that the offset does not have."""
    s = remap.dynamic_shared(np.float32, offset=4, align=128)  # noqa: F841


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (aligned_at_another_offset, "offset=4 is no multiple of align=128"),
        (length_of_nothing, r"len\(\): len takes one array"),
        (divided, "shape: 4 // 0: nothing can be divided by 0"),
        (shifted_back, "shape: 1 << -1: a shift is by 0 to 63 bits"),
        (shifted_far, "a shift is by 0 to 63 bits"),
        (text_minus_one, "shape: 'a': arithmetic needs whole numbers"),
        (width_of_a_thread, r"the width has to be the same for all threads: .* or remap.block_size.x"),
        (width_of_shared_memory, "an array parameter's extent"),
        (loop_with_else, "for … else: a loop of a kernel has no else. Set a variable before the break"),
        (barrier_with_argument, r"remap.barrier\(1\): barrier takes no argument"),
        (shape_of_truth, "a shape is one to three whole numbers above 0"),
        (length_of_truth, "a length is a whole number above 0"),
        (sum_of_truth, "shape: True: arithmetic needs whole numbers"),
        (stride_of_truth, "a stride is a whole number from 1"),
        (without_a_type, r"dtype is missing. Write remap.shared_array\(shape, dtype\)"),
        (with_an_unknown_option, "beside shape and dtype it takes align="),
        (called_number, "there is nothing of this name to call"),
        (bare_axes, "thread has .x, .y and .z"),
    ],
)
def test_a_refusal_names_the_line_and_the_rule(function: Callable[..., None], said: str) -> None:
    """No error of Python's own comes out of a kernel that is read."""
    with pytest.raises(CompileError, match=rf"test_refusals\.py:\d+: .*{said}"):
        remap.kernel(function).source(np.zeros((4, 4)) if "width" in function.__name__ else np.zeros(4))


def clamped_stride(out: remap.DisjointSlice, n: int) -> None:
    """Take for a stride what a branch alone makes a constant."""
    if n > 10:
        n = 4
    out[remap.index_2d(stride=n)] = 1


def clamped_in_a_loop(out: remap.DisjointSlice, n: int) -> None:
    """Take for a stride what a loop alone makes a constant."""
    while n > 10:
        n = 4
    out[remap.index_2d(stride=n)] = 1


def clamped_extent(out: remap.DisjointSlice, n: int) -> None:
    """Take for an extent what a branch alone makes a constant."""
    if n > 10:
        n = 4
    s = remap.shared_array(n, np.int32)
    out[remap.index_1d()] = len(s)


def extent_of_a_branch(out: remap.DisjointSlice, n: int) -> None:
    """Take for an extent what one branch alone assigns."""
    if n > 10:
        m = 8
    s = remap.shared_array(m, np.int32)  # pyright: ignore[reportPossiblyUnboundVariable]
    out[remap.index_1d()] = len(s)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (clamped_stride, "stride: n: it has to be known when the kernel is compiled"),
        (clamped_in_a_loop, "stride: n: it has to be known when the kernel is compiled"),
        (clamped_extent, "shape: n: it has to be known when the kernel is compiled"),
        (extent_of_a_branch, "variable m: it may be read before anything was assigned to it"),
    ],
)
def test_what_may_be_another_number_is_no_constant(function: Callable[..., None], said: str) -> None:
    """A name is a constant where it has one value on every path that leads there."""
    with pytest.raises(CompileError, match=rf"test_refusals\.py:\d+: .*{said}"):
        remap.kernel(function).source(np.zeros(4), 8)


def test_a_name_of_one_value_is_a_constant(place: Any) -> None:
    """So is one that a branch binds for itself alone, inside of it."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        n = 4
        s = remap.shared_array(n * 2, np.int32)
        if remap.grid_size.x == 1:
            m = 3
            i = remap.index_2d(stride=m)
            out[i] = i.row * 10 + len(s)

    out = place((2, 3), "int32")
    place.launch(kernel, out, grid=1, block=(4, 2))
    assert out.to_host().tolist() == [[8, 8, 8], [18, 18, 18]]


def test_a_dataclass_whose_annotations_mean_nothing() -> None:
    """The error names the structure and the way out."""

    @remap.kernel
    def kernel(v: Any, out: remap.DisjointSlice) -> None:
        out[remap.index_1d()] = v.n

    with pytest.raises(
        LaunchError, match=r"structure Lost: its annotations mean nothing in its module .*Nowhere"
    ):
        kernel.source(Lost(1), np.zeros(4))


@pytest.mark.parametrize("given", [3, "text", None])
def test_only_a_function_becomes_a_kernel(given: Any) -> None:
    """What is no function is refused where it is decorated."""
    with pytest.raises(TypeError, match="takes a function"):
        PythonKernel(given, fma=False)


def test_an_architecture_is_a_text() -> None:
    """A number is refused with the way to write it."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        out[remap.index_1d()] = 1

    with pytest.raises(TypeError, match='"sm_90", and not 90'):
        kernel.compile(np.zeros(4), arch=90)  # pyright: ignore[reportArgumentType]


def test_a_byte_of_shared_memory_too_many() -> None:
    """The two numbers of the message differ."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        out[remap.index_1d()] = 1

    most = remap.device().properties.shared_memory_per_block_optin
    with remap.DeviceBuffer.zeroed(4) as out, pytest.raises(LaunchError) as caught:
        kernel.launch(out, grid=1, block=4, shared=most + 1)
    assert f"{most + 1:,} bytes of dynamic" in str(caught.value)
    assert f"({most:,} bytes)" in str(caught.value)


def test_events_without_timing() -> None:
    """The error says how to make events that can be measured."""
    with remap.Stream() as stream, stream.record() as one, stream.record() as other:
        stream.synchronize()
        with pytest.raises(DriverError, match=r"stream.record\(timing=True\)"):
            one.elapsed(other)


# -- what was refused, and works --


def search(v: Any) -> Any:
    """Return from an endless loop only."""
    while True:
        for k in range(4):
            if k == 3:
                break
        v = v + 1
        if v > 7:
            return v


def test_an_endless_loop_ends_by_return(place: Any) -> None:
    """A function that leaves a `while True` by return alone returns a value on all paths."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = search(int(i))

    out = place(12, "int64")
    place.launch(kernel, out, grid=1, block=12)
    assert out.to_host().tolist() == [8] * 8 + [9, 10, 11, 12]


def leaves(v: Any) -> Any:  # noqa: RET503
    """Break out of an endless loop, and then return no value."""
    while True:
        v = v + 1
        if v > 3:
            break
    if v > 5:
        return v


def test_an_endless_loop_that_breaks() -> None:
    """A break leads past the loop, where a value is missing."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = leaves(int(i))

    with pytest.raises(CompileError, match="ends without one on others"):
        kernel.source(np.zeros(4))


def test_the_width_of_a_second_name(place: Any) -> None:
    """Another name for an array has its extents, and the width is checked."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        y = x
        i = remap.index_2d(y.shape[1])
        out[i] = x[i] + 1

    x, out = place(np.arange(12.0).reshape(3, 4)), place((3, 4), "float64")
    place.launch(kernel, x, out, grid=1, block=(4, 3))
    assert out.to_host().tolist() == (np.arange(12.0).reshape(3, 4) + 1).tolist()
    with pytest.raises(LaunchError, match="which is 4 wide, and the array has rows of 6"):
        kernel.launch(x, place((2, 6), "float64"), grid=1, block=(4, 3))


def test_the_width_of_a_block(place: Any) -> None:
    """An extent of the launch is one for all threads, and arrays are checked against it at each launch."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        i = remap.index_2d(remap.block_size.x)
        out[i] = i.row * 10 + i.col

    out = place((3, 4), "int32")
    place.launch(kernel, out, grid=1, block=(4, 3))
    assert out.to_host().tolist() == [[r * 10 + c for c in range(4)] for r in range(3)]
    with pytest.raises(LaunchError, match=r"index_2d\(remap.block_size.x\), which is 8 wide"):
        kernel.launch(out, grid=1, block=(8, 3))


# -- get in two dimensions --


@pytest.mark.parametrize("form", ["plain", "tuple"])
def test_get_in_two_dimensions(place: Any, form: str) -> None:
    """An index for each axis, alone or in a tuple, and then the default."""

    @remap.kernel
    def plain(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_2d(x.shape[1])
        out[i] = x.get(i.row - 1, i.col, 7.0) + x.get(i.row, i.col + 1)

    @remap.kernel
    def with_tuple(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_2d(x.shape[1])
        out[i] = x.get((i.row - 1, i.col), 7.0) + x.get((i.row, i.col + 1))

    values = np.arange(12.0).reshape(3, 4)
    above = np.vstack([np.full((1, 4), 7.0), values[:-1]])
    beside = np.hstack([values[:, 1:], np.zeros((3, 1))])
    x, out = place(values), place((3, 4), "float64")
    place.launch(plain if form == "plain" else with_tuple, x, out, grid=1, block=(4, 3))
    assert out.to_host().tolist() == (above + beside).tolist()


def flat_index(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Take one number for two axes, and a default."""
    i = remap.index_2d(x.shape[1])
    out[i] = x.get((i.row - 1) * 4 + i.col, 0.0)


def short_tuple(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Take a tuple of one."""
    i = remap.index_2d(x.shape[1])
    out[i] = x.get((i.row,), 0.0)


def flat_alone(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Take one number for two axes."""
    i = remap.index_2d(x.shape[1])
    out[i] = x.get(i.row)


def too_many(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Take more than there are."""
    i = remap.index_2d(x.shape[1])
    out[i] = x.get(i.row, i.col, 0.0, 0.0)


@pytest.mark.parametrize("function", [flat_index, short_tuple, flat_alone, too_many])
def test_get_with_another_number_of_indices(function: Callable[..., None]) -> None:
    """The error leads to the form for two dimensions."""
    with pytest.raises(CompileError, match=r"Write x.get\(row, column, default\)"):
        remap.kernel(function).source(np.zeros((3, 4)), np.zeros((3, 4)))


def test_an_index_of_get_runs_once(place: Any) -> None:
    """What stands in the index is worked out once, also where it changes memory."""

    @remap.kernel
    def kernel(x: remap.Slice, count: remap.DisjointSlice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = x.get(remap.atomic_add(count, 0, 1), -1.0)

    x, count, out = place(np.arange(8.0)), place(1, "int32"), place(8, "float64")
    place.launch(kernel, x, count, out, grid=1, block=8)
    assert sorted(out.to_host().tolist()) == list(range(8))
    assert count.to_host().tolist() == [8]


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_an_endless_loop_compiles_for_the_hopper_generation() -> None:
    """The compiler takes a function whose only way out is a return inside of the loop."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = search(int(i))

    assert kernel.compile(np.zeros(4), arch="sm_90").architectures == ("sm_90",)
