"""Each thread writes its own element: the index that proves it, and everything that would break the proof (D5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import CompileError, KernelError, LaunchError

N = 1000
SHAPE: dict[str, Any] = {"grid": 4, "block": 256}


@remap.kernel
def double(x: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    out[i] = x[i] * 2


def test_a_kernel_runs_with_a_ragged_last_block(place: Any) -> None:
    """Threads beyond the end of the arrays write nothing, and those before it write what the source says."""
    values = np.random.default_rng(0).random(N, dtype=np.float32)
    x, y = place(values), place(N, "float32")
    place.launch(double, x, y, **SHAPE)
    assert np.array_equal(y.to_host(), values * 2)


@pytest.mark.parametrize("count", [1, N, 1024, 5000])
def test_a_number_may_be_what_is_written(place: Any, count: int) -> None:
    """A thread may store its own number, or what it makes of it, with more or fewer threads than elements."""

    @remap.kernel
    def number(same: remap.DisjointSlice, later: remap.DisjointSlice, half: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        same[i] = int(i)
        later[i] = int(i) + 3
        half[i] = int(i) * 0.5

    same, later, half = place(count, "int64"), place(count, "int64"), place(count, "float64")
    place.launch(number, same, later, half, **SHAPE)
    threads = np.arange(min(count, 1024))
    for array, expected in ((same, threads), (later, threads + 3), (half, threads * 0.5)):
        assert np.array_equal(array.to_host()[: len(threads)], expected)
        assert not array.to_host()[len(threads) :].any()


def test_a_result_is_made_of_what_was_there(place: Any) -> None:
    """An element may be worked out of itself, and of numbers that all threads share."""

    @remap.kernel
    def step(x: remap.Slice, out: remap.DisjointSlice, by: np.float32) -> None:
        i = remap.index_1d()
        old = out[i]
        out[i] = old + x[i]
        out[i] = old * out[i]
        if x[i] > 500:
            out[i] = by * by

    values = np.arange(N, dtype=np.float32)
    x, out = place(values), place(values + 1)
    place.launch(step, x, out, 3.0, **SHAPE)
    expected = (values + 1) * (values + 1 + values)
    expected[501:] = 9
    assert np.array_equal(out.to_host(), expected)


def test_the_same_kernel_takes_other_types(place: Any) -> None:
    """A kernel is specialised on the types of its arguments, each time with NumPy's result."""
    for dtype in ("int8", "uint16", "int32", "float64"):
        values = np.arange(100, dtype=dtype)
        x, y = place(values), place(100, dtype)
        place.launch(double, x, y, grid=1, block=128)
        assert np.array_equal(y.to_host(), values * 2)


def test_what_lies_after_the_array_is_not_touched(place: Any) -> None:
    """A thread whose index lies beyond the array writes nothing, although its memory goes on there."""
    buffer = place(np.full(64, 7, np.int32)).owner
    part = buffer.array("int32", 10)
    place.launch(double, part, part, grid=1, block=64, allow_overlap=True)
    assert buffer.to_host("int32", 64).tolist() == [14] * 10 + [7] * 54


def test_zero_where_the_index_has_no_element(place: Any) -> None:
    """Reading by the own index beyond the end gives zero, or the default that get names."""

    @remap.kernel
    def read(x: remap.Slice, out: remap.DisjointSlice, late: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = x[i]
        late[i] = x.get(i, -1)

    x, out, late = place(np.arange(5, dtype=np.int32)), place(8, "int32"), place(8, "int32")
    place.launch(read, x, out, late, grid=1, block=8)
    assert out.to_host().tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert late.to_host().tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def taken(x: Any, k: int) -> Any:
    """Return an element of an array."""
    return x[k]


PAIR = np.dtype([("n", np.int32), ("by", np.int32)])


def test_a_thread_without_an_element_works_nothing_out(on_both: Any) -> None:
    """What would be wrong for the threads beyond the end alone is wrong for nobody, however it is written."""

    @remap.kernel
    def kernel(
        x: remap.Slice,
        plain: remap.DisjointSlice,
        chosen: remap.DisjointSlice,
        called: remap.DisjointSlice,
        added: remap.DisjointSlice,
        pairs: remap.DisjointSlice,
        last: remap.DisjointSlice,
    ) -> None:
        i = remap.index_1d()
        k = int(i)
        plain[i] = x[k]
        chosen[i] = x[k] if k % 2 and x[k] > 1 else x[k] * 10
        called[i] = taken(x, k) * 2
        added[i] += x[k] and x[k] + 1
        added[i] -= taken(x, k)
        pairs[i].n = x[k] * 3
        element, _ = last.get_mut_indexed()
        element.value = x[k]
        element.value += taken(x, k)

    x = np.arange(5, dtype=np.int32)
    arrays = [np.zeros(5, np.int32) for _ in range(4)] + [np.zeros(5, PAIR), np.zeros(5, np.int32)]
    _, plain, chosen, called, added, pairs, last = on_both(kernel, x, *arrays, threads=8)
    assert plain.tolist() == x.tolist()
    assert chosen.tolist() == [0, 10, 20, 3, 40]
    assert called.tolist() == (x * 2).tolist()
    assert added.tolist() == [0, 1, 1, 1, 1]
    assert pairs["n"].tolist() == (x * 3).tolist()
    assert last.tolist() == (x * 2).tolist()


def test_what_changes_memory_elsewhere_is_done_by_all(on_both: Any) -> None:
    """An atomic operation counts for every thread, and so does a function that changes an array."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice, count: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        s = remap.shared_array(8, np.int32)
        s[remap.thread.x] = 0
        out[i] = remap.atomic_add(count, 0, 1) * 0 + raised(s, remap.thread.x)
        remap.atomic_add(count, 1, s[remap.thread.x])

    out, count = on_both(kernel, np.zeros(5, np.int32), np.zeros(2, np.int32), threads=8)
    assert out.tolist() == [1] * 5
    assert count.tolist() == [8, 8]


def raised(s: Any, k: int) -> Any:
    """Add one to an element, and return it."""
    s[k] = s[k] + 1
    return s[k]


def test_a_number_that_is_read_first_has_to_lie_inside(place: Any) -> None:
    """A name is worked out by every thread, also by those beyond the end."""
    if remap.driver().name != "host":
        pytest.skip("on CUDA the kernel traps, and the context is lost")

    @remap.kernel
    def early(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        v = x[int(i)]
        out[i] = v

    place.launch(early, place(5, "int32"), place(5, "int32"), grid=1, block=8)
    with pytest.raises(KernelError, match=r"thread 5: x\[5\]: the array has 5 elements"):
        remap.device().synchronize()


def test_get_with_a_number_gives_the_default_outside(place: Any) -> None:
    """Get takes any number, also a negative one, and gives the default outside of the array."""

    @remap.kernel
    def shift(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = x.get(i - 2, -5)

    x, out = place(np.arange(6, dtype=np.int32)), place(10, "int32")
    place.launch(shift, x, out, grid=2, block=5)
    assert out.to_host().tolist() == [-5, -5, 0, 1, 2, 3, 4, 5, -5, -5]


def test_the_element_and_the_index_at_once(place: Any) -> None:
    """get_mut_indexed gives the own element, which tells whether it is there, and the index."""

    @remap.kernel
    def add(x: remap.Slice, out: remap.DisjointSlice) -> None:
        mine, i = out.get_mut_indexed()
        if mine:
            mine.value = mine.value + x[int(i)]
            mine.value += 1

    x, out = place(np.arange(10, dtype=np.float32)), place(np.full(10, 5, np.float32))
    place.launch(add, x, out, grid=1, block=32)
    assert np.array_equal(out.to_host(), np.arange(10, dtype=np.float32) + 6)


def test_unchecked_writes_by_number(place: Any) -> None:
    """Unchecked is the explicit way to write elsewhere."""

    @remap.kernel
    def turn(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        if i < len(x):
            remap.unchecked(out)[len(x) - 1 - i] = x[i]

    values = np.arange(N, dtype=np.int64)
    x, out = place(values), place(N, "int64")
    place.launch(turn, x, out, **SHAPE)
    assert np.array_equal(out.to_host(), values[::-1])


def test_one_writer_a_warp(place: Any) -> None:
    """With warp_index the first thread of each warp writes, and the others read by its number."""

    @remap.kernel
    def first(x: remap.Slice, out: remap.DisjointSlice) -> None:
        w = remap.warp_index()
        out[w] = x[w] + remap.thread.x

    x, out = place(np.arange(100, 120, dtype=np.int64)), place(20, "int64")
    place.launch(first, x, out, grid=3, block=80)  # three warps a block, the last one half empty
    assert out.to_host()[:9].tolist() == [100, 133, 166, 103, 136, 169, 106, 139, 172]
    assert not out.to_host()[9:].any()


# -- two dimensions --


@remap.kernel
def fixed(x: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_2d(stride=37)
    out[i] = x[i] + i.row * 100 + i.col


@remap.kernel
def wide(x: remap.Slice, out: remap.DisjointSlice, width: int) -> None:
    i = remap.index_2d(width)
    out[i] = x[i] + i.row * 100 + i.col


@remap.kernel
def shaped(x: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_2d(out.shape[1])
    out[i] = x[i] + i.row * 100 + i.col


ROWS, COLS = 21, 37
TWO: dict[str, Any] = {"grid": (3, 2), "block": (16, 16)}


@pytest.mark.parametrize("name", ["fixed", "wide", "shaped"])
@pytest.mark.parametrize("shape", [(ROWS, COLS), (ROWS * COLS,)])
def test_two_dimensions(place: Any, name: str, shape: tuple[int, ...]) -> None:
    """Row and column give the element; threads beyond the last column or row write nothing."""
    if name == "shaped" and len(shape) == 1:
        pytest.skip("a flat array has no second extent")
    values = np.random.default_rng(1).integers(0, 1000, (ROWS, COLS))
    x, out = place(values.reshape(shape)), place(shape, "int64")
    arguments = (x, out, COLS) if name == "wide" else (x, out)
    place.launch({"fixed": fixed, "wide": wide, "shaped": shaped}[name], *arguments, **TWO)
    expected = values + np.arange(ROWS)[:, None] * 100 + np.arange(COLS)
    assert np.array_equal(out.to_host().reshape(ROWS, COLS), expected)


@pytest.mark.parametrize("name", ["fixed", "wide"])
def test_an_array_of_another_width_is_refused(place: Any, name: str) -> None:
    """An index of one stride does not write an array of another; nothing is launched."""
    x, out = place((10, 36), "int64"), place((10, 36), "int64")
    kernel, arguments = (fixed, (x, out)) if name == "fixed" else (wide, (x, out, COLS))
    with pytest.raises(LaunchError, match=r"37 wide, and the array has rows of 36"):
        place.launch(kernel, *arguments, **TWO)


@remap.kernel
def read_fixed(x: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_2d(stride=5)
    out[i] = x[i]


@remap.kernel
def read_shaped(x: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_2d(out.shape[1])
    out[i] = x.get(i, 7)


@remap.kernel
def read_alone(x: remap.Slice, out: remap.DisjointSlice) -> None:
    same = x
    i = remap.index_2d(remap.block_size.x)
    k = remap.index_2d(stride=5)
    out[k] = same[i]


@pytest.mark.parametrize("kernel", [read_fixed, read_shaped, read_alone], ids=lambda one: one.name)
def test_an_array_of_another_width_is_not_read(place: Any, kernel: Any) -> None:
    """Row and column of an index are those of the array that it reads, too; a flat array has no rows (D5)."""
    values = np.arange(24, dtype=np.int32)
    out = place((4, 5), "int32")
    with pytest.raises(
        LaunchError, match=r"'x' of shape \(4, 6\): it is read with index_2d.*5 wide.* rows of 6"
    ):
        place.launch(kernel, place(values.reshape(4, 6)), out, grid=1, block=(5, 4))
    assert not out.to_host().any()
    for x in (place(values[:20].reshape(4, 5)), place(values)):
        place.launch(kernel, x, out, grid=1, block=(5, 4))
        assert out.to_host().ravel().tolist() == values[:20].tolist()


@remap.kernel
def add_one(out: remap.DisjointSlice, width: int) -> None:
    i = remap.index_2d(width)
    out[i] += 1.0


@pytest.mark.parametrize("width", [2**62, 2**61 + 1, 2**36 + 1])
def test_a_width_that_no_number_holds_is_refused(place: Any, width: int) -> None:
    """Row × width + column would wrap, and two rows would own one element of a flat array: nothing is launched."""
    out = place(4, "float32")
    with pytest.raises(LaunchError, match=r"at most 2\*\*36 wide"):
        place.launch(add_one, out, width, grid=1, block=(1, 8))
    assert not out.to_host().any()
    place.launch(add_one, out, 2**36, grid=1, block=(1, 8))
    assert out.to_host().tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(("width", "step"), [(2**62, 0), (2**36 + 1, 0), (2**36, 2**36)])
def test_with_a_width_that_no_number_holds_no_thread_has_an_element(
    on_both: Any, width: int, step: int
) -> None:
    """Where nothing is written with such an index the launch goes on, and every thread reads zero."""

    @remap.kernel
    def numbers(x: remap.Slice, out: remap.DisjointSlice, width: int) -> None:
        i = remap.index_2d(width)
        remap.unchecked(out)[remap.thread.y] = int(i) + int(x[i])

    _, found = on_both(numbers, np.array([7, 7, 7]), np.zeros(8, np.int64), width, threads=(1, 8))
    expected = [step * row + 7 * (row == 0) for row in range(8)] if step else [-1] * 8
    assert found.tolist() == expected


@pytest.mark.parametrize(
    "shape", [{"grid": (2, 2), "block": 8}, {"grid": 2, "block": (8, 2)}, {"grid": 1, "block": (8, 1, 2)}]
)
def test_index_1d_is_refused_in_more_dimensions(place: Any, shape: dict[str, Any]) -> None:
    """In a grid or a block of more dimensions several threads would have one index."""
    x, y = place(16, "float32"), place(16, "float32")
    with pytest.raises(LaunchError, match=r"index_1d.*same index"):
        place.launch(double, x, y, **shape)


def test_index_2d_is_refused_in_three_dimensions(place: Any) -> None:
    """Threads with another z would have the same index."""
    x, out = place((10, 37), "int64"), place((10, 37), "int64")
    with pytest.raises(LaunchError, match="another z"):
        place.launch(fixed, x, out, grid=(1, 1, 2), block=8)


# -- the index cannot be made, stored, returned or mixed --


def helper(n: int) -> int:
    """Return a number for a kernel."""
    return n + 1


def test_a_number_is_no_index(place: Any) -> None:
    """A DisjointSlice takes no number, whatever it is made from; the line is named."""

    @remap.kernel
    def constant(out: remap.DisjointSlice) -> None:
        out[3] = 1

    @remap.kernel
    def made(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i + 0] = 1

    @remap.kernel
    def number(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[int(i)] = 1

    @remap.kernel
    def argument(out: remap.DisjointSlice) -> None:
        i = remap.index_1d(5)  # type: ignore[call-arg]
        out[i] = 1

    @remap.kernel
    def stored(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = i

    @remap.kernel
    def shared(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        s = remap.shared_array(32, np.int64)
        s[remap.thread.x] = i
        out[i] = 1

    @remap.kernel
    def passed(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = helper(i)

    out = place(32, "int64")
    for kernel, line in (
        (constant, "out[3]"),
        (made, "out[i + 0]"),
        (number, "out[int(i)]"),
        (argument, "index_1d(5)"),
        (stored, "out[i] = i"),
        (shared, "s[remap.thread.x] = i"),
        (passed, "helper(i)"),
    ):
        with pytest.raises(CompileError, match=r"test_index.py:\d+: ") as caught:
            place.launch(kernel, out, grid=1, block=32)
        assert line in str(caught.value)
        first = kernel.function.__code__.co_firstlineno
        number_ = int(str(caught.value).split("test_index.py:")[1].split(":")[0])
        assert first < number_ <= first + 7


def test_two_kinds_of_index_are_refused_for_one_array(place: Any) -> None:
    """Two threads can have the same number in two spaces, so an array is used with one of them only."""

    @remap.kernel
    def mixed(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        j = remap.index_2d(stride=4)
        out[i] = 1
        out[j] = 2

    with pytest.raises(CompileError, match=r"index_2d\(stride=4\)"):
        place.launch(mixed, place(32, "int64"), grid=1, block=32)


def test_a_width_has_to_be_one_for_all_threads(place: Any) -> None:
    """A width that differs from thread to thread would give one element to two of them."""

    @remap.kernel
    def varying(out: remap.DisjointSlice) -> None:
        width = remap.thread.x + 1
        out[remap.index_2d(width)] = 1

    with pytest.raises(CompileError, match="same for all threads"):
        place.launch(varying, place(32, "int64"), grid=1, block=32)


def test_a_slice_is_not_written(place: Any) -> None:
    """A Slice is read only."""

    @remap.kernel
    def wrong(x: remap.Slice) -> None:
        x[remap.index_1d()] = 1  # type: ignore[index] # pyright: ignore[reportIndexIssue]

    with pytest.raises(CompileError, match="read only"):
        place.launch(wrong, place(32, "int64"), grid=1, block=32)


def test_outside_of_a_kernel() -> None:
    """The functions of a kernel do nothing outside of one, and a kernel is not called."""
    with pytest.raises(LaunchError, match="outside of a kernel"):
        remap.index_1d()
    with pytest.raises(LaunchError, match="outside of a kernel"):
        _ = remap.thread.x
    with pytest.raises(LaunchError, match=r"\.launch"):
        double(1, 2)


# -- what the host driver finds --


def test_a_read_outside_is_reported(place: Any) -> None:
    """A number outside of its array ends the kernel: block, thread, array and index are named (host driver)."""
    if remap.driver().name != "host":
        pytest.skip("on CUDA the kernel traps, and the context is lost")

    @remap.kernel
    def beyond(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = x[i + 1]

    x, out = place(64, "float32"), place(64, "float32")
    place.launch(beyond, x, out, grid=2, block=32)
    with pytest.raises(
        KernelError, match=r"kernel beyond, .*block 1, thread 31: x\[64\]: the array has 64 elements"
    ):
        remap.device().synchronize()


def test_two_threads_that_write_one_element_are_reported(place: Any) -> None:
    """Unchecked is a promise that the host driver checks: element, address and both threads are named."""
    if remap.driver().name != "host":
        pytest.skip("a GPU does not tell")

    @remap.kernel
    def collide(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        remap.unchecked(out)[i // 2] = int(i)

    out = place(64, "int64")
    place.launch(collide, out, grid=1, block=32)
    with pytest.raises(KernelError, match=r"thread 0: out\[0\] at 0x.*another thread writes.*thread 1"):
        out.to_host()
    # The report was delivered, and the driver goes on.
    assert len(out.to_host()) == 64


def test_threads_of_different_blocks_collide_too(place: Any) -> None:
    """Blocks that run long after each other on the host race all the same."""
    if remap.driver().name != "host":
        pytest.skip("a GPU does not tell")

    @remap.kernel
    def collide(out: remap.DisjointSlice) -> None:
        remap.unchecked(out)[remap.thread.x] = remap.block.x

    out = place(1024, "int64")
    place.launch(collide, out, grid=200, block=1024)
    with pytest.raises(KernelError, match=r"block \d+, thread \d+: out"):
        out.to_host()
