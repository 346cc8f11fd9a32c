"""The same launch again takes the short way, and goes back to the checks as soon as anything has changed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB
from remap.errors import AccessError, ClosedError, InvalidValueError, LaunchError, PausedError, RemapError
from remap.kernels import PythonKernel
from remap.testing.typed import gate


def fresh() -> PythonKernel:
    """Return a kernel that nobody has launched."""

    @remap.kernel
    def add_one(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = x[i] + 1

    return add_one


def kept(kernel: PythonKernel) -> int:
    """Return how many launches are kept."""
    return len(kernel._kept)


def test_launches_on_the_same_arrays_are_kept_once(place: Any) -> None:
    """A launch again is the same launch: the result is there, and nothing piles up."""
    kernel = fresh()
    x, out = place(np.arange(64, dtype=np.int32)), place(64, "int32")
    for turn in range(5):
        x.copy_from(np.full(64, turn, np.int32))
        place.launch(kernel, x, out, grid=1, block=64)
        assert out.to_host().tolist() == [turn + 1] * 64
    assert kept(kernel) == 1
    place.launch(kernel, out, x, grid=1, block=64)
    assert kept(kernel) == 2


def test_another_shape_is_another_launch(place: Any) -> None:
    """The shape is compared each time."""
    kernel = fresh()
    x, out = place(np.arange(64, dtype=np.int32)), place(64, "int32")
    for block in (16, 32, 64):
        place.launch(kernel, x, out, grid=1, block=block)
        assert out.to_host().tolist()[:block] == list(range(1, block + 1))
        assert not out.to_host()[block:].any()
    with pytest.raises(LaunchError):
        place.launch(kernel, x, out, grid=1, block=(8, 8))


class Foreign:
    """A stream as other libraries hand it out: a new object each time, and each keeps the stream alive."""

    def __init__(self, stream: remap.Stream, version: int = 0) -> None:
        self.stream = stream
        self.version = version

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return what CUDA's protocol asks for."""
        return self.version, self.stream.__cuda_stream__()[1]


def test_streams_of_other_libraries_are_known_by_their_handle() -> None:
    """Whatever object brings the handle, the launch is kept once; one object is held, and its stream waited for."""
    kernel = fresh()
    with remap.Stream() as stream, remap.Stream() as other, remap.allocate(2 * MiB) as a:
        b = remap.allocate(2 * MiB)
        x, out = a.array("int32", 8), b.array("int32", 8)
        x.copy_from(np.arange(8, dtype=np.int32))
        kernel.launch(
            x, out, grid=1, block=8
        )  # loads it, for which CUDA waits until all streams have come to rest
        owners: list[weakref.ref[Foreign]] = []
        for turn in range(3):
            owner = Foreign(stream)
            owners.append(weakref.ref(owner))
            with gate(stream) as opened:
                kernel.launch(x, out, grid=1, block=8, stream=owner)
                assert kept(kernel) == 2
                del owner
                assert not stream.done, turn
                opened.set()
            stream.synchronize()
            assert out.to_host().tolist() == list(range(1, 9))
        assert owners[0]() is not None, "the stream lives until somebody has waited for it"
        kernel.launch(x, out, grid=1, block=8, stream=Foreign(other))
        assert kept(kernel) == 3
        with pytest.raises(InvalidValueError, match="version"):
            kernel.launch(x, out, grid=1, block=8, stream=Foreign(stream, version=7))
        with gate(stream) as opened:
            kernel.launch(x, out, grid=1, block=8, stream=Foreign(stream))
            threading.Timer(0.05, opened.set).start()
            b.close()
            assert opened.is_set(), "closing waits for the stream of a launch that was kept"
        gc.collect()
        assert [one() for one in owners[1:]] == [None] * 2, "one object is enough to keep the stream alive"


def test_arrays_that_go_are_forgotten() -> None:
    """Nothing is kept alive: with the array goes what was kept for it."""
    kernel = fresh()
    with remap.allocate(2 * MiB) as a, remap.allocate(2 * MiB) as b:
        x, out = a.array("int32", 8), b.array("int32", 8)
        kernel.launch(x, out, grid=1, block=8)
        assert kept(kernel) == 1
        del x
        gc.collect()
        assert kept(kernel) == 0
        remap.device().synchronize()


def test_a_buffer_that_was_closed_meanwhile() -> None:
    """The second launch is refused as the first would have been."""
    kernel = fresh()
    a, b = remap.allocate(2 * MiB), remap.allocate(2 * MiB)
    x, out = a.array("int32", 8), b.array("int32", 8)
    kernel.launch(x, out, grid=1, block=8)
    a.close()
    with pytest.raises(ClosedError):
        kernel.launch(x, out, grid=1, block=8)
    b.close()


def test_rights_that_were_taken_meanwhile() -> None:
    """A right that was lowered is seen."""
    kernel, at = fresh(), remap.device()
    with remap.allocate(2 * MiB) as a, remap.allocate(2 * MiB) as b:
        x, out = a.array("int32", 8), b.array("int32", 8)
        kernel.launch(x, out, grid=1, block=8)
        b.set_access({at: "r"})
        with pytest.raises(AccessError):
            kernel.launch(x, out, grid=1, block=8)
        b.set_access({at: "rw"})
        kernel.launch(x, out, grid=1, block=8)
        at.synchronize()


def test_a_buffer_that_was_paused_meanwhile() -> None:
    """A paused buffer is refused, and works again when it was resumed."""
    kernel = fresh()
    with remap.allocate(2 * MiB) as a, remap.allocate(2 * MiB) as b:
        x, out = a.array("int32", 8), b.array("int32", 8)
        a.fill(0)
        kernel.launch(x, out, grid=1, block=8)
        remap.pause(a)
        with pytest.raises(PausedError):
            kernel.launch(x, out, grid=1, block=8)
        remap.resume(a)
        kernel.launch(x, out, grid=1, block=8)
        assert out.to_host().tolist() == [1] * 8


def test_a_stream_that_was_closed_meanwhile() -> None:
    """A closed stream is refused, and another one with the same place in memory is not taken for it."""
    kernel = fresh()
    with remap.allocate(2 * MiB) as a, remap.allocate(2 * MiB) as b:
        x, out = a.array("int32", 8), b.array("int32", 8)
        stream = remap.Stream(remap.device())
        kernel.launch(x, out, grid=1, block=8, stream=stream)
        stream.close()
        with pytest.raises(RemapError):
            kernel.launch(x, out, grid=1, block=8, stream=stream)
        for _ in range(3):
            with remap.Stream(remap.device()) as other:
                kernel.launch(x, out, grid=1, block=8, stream=other)


def test_closing_waits_for_a_launch_again() -> None:
    """The short way notes its stream, too (invariant 7)."""
    kernel = fresh()
    with remap.Stream(remap.device()) as stream:
        a, b = remap.allocate(8 * MiB), remap.allocate(8 * MiB)
        x, out = a.array("int32", 2 * MiB), b.array("int32", 2 * MiB)
        kernel.launch(x, out, grid=8192, block=256, stream=stream)
        stream.synchronize()
        for _ in range(10):
            kernel.launch(x, out, grid=8192, block=256, stream=stream)
        a.close()
        assert stream.done
        b.close()


def test_numbers_are_packed_anew(place: Any) -> None:
    """Numbers of each launch are its own, on the short way too; one that does not fit is refused."""

    @remap.kernel
    def fill(n: int, f: np.float32, out: remap.DisjointSlice, small: np.int8) -> None:
        out[remap.index_1d()] = n + f + small

    out = place(8, "float64")
    for n, f, small in ((1, 0.5, 2), (3, 0.25, -4), (1 << 40, 2.0, 127)):
        place.launch(fill, n, f, out, small, grid=1, block=8)
        assert out.to_host().tolist() == [float(np.float32(n) + np.float32(f) + np.float32(small))] * 8
    with pytest.raises((LaunchError, InvalidValueError), match="does not fit"):
        place.launch(fill, 1, 0.5, out, 200, grid=1, block=8)


factor: Any = 2
length = 4


def test_values_from_outside_are_looked_at(place: Any) -> None:
    """What is captured or compiled in is looked at each time, its type too; a launch with the same is kept."""
    global factor, length
    offset: Any = 1

    @remap.kernel
    def scale(x: remap.Slice, out: remap.DisjointSlice) -> None:
        part = remap.shared_array(length, np.int32)
        part[remap.thread.x] = 0
        remap.barrier()
        out[remap.index_1d()] = x[remap.index_1d()] * factor + offset + len(part)

    x, out = place(np.arange(4, dtype=np.float64)), place(4, "float64")
    for factor, offset, length in (
        (2, 1, 4),
        (2, 1, 4),
        (3, 1, 4),
        (3, 0.5, 4),
        (np.int8(3), 0.5, 4),
        (3, 0.5, 8),
    ):
        for _ in range(3):
            out.copy_from(np.zeros(4))
            place.launch(scale, x, out, grid=1, block=4)
            assert out.to_host().tolist() == (np.arange(4) * factor + offset + length).tolist()
    assert kept(scale) == 1


def test_structures_from_outside_are_read_each_time(place: Any) -> None:
    """A structure may change inside, so a launch that takes one from outside is looked at each time."""
    given: Any = np.zeros((), [("by", "i4")])[()]

    @remap.kernel
    def add_from_outside(x: remap.Slice, out: remap.DisjointSlice) -> None:
        out[remap.index_1d()] = x[remap.index_1d()] + given.by

    x, out = place(np.arange(4, dtype=np.int32)), place(4, "int32")
    for by in (1, 2, 3):
        given["by"] = by
        place.launch(add_from_outside, x, out, grid=1, block=4)
        assert out.to_host().tolist() == [by, 1 + by, 2 + by, 3 + by]


def test_a_width_among_the_numbers_is_checked_each_time(place: Any) -> None:
    """A number that is the width of an index has to be that of the array at every launch, not only at the first."""

    @remap.kernel
    def fill(out: remap.DisjointSlice, width: int) -> None:
        i = remap.index_2d(width)
        out[i] = 7

    out = place((4, 8), "int32")
    for _ in range(3):
        place.launch(fill, out, 8, grid=1, block=(8, 4))
        with pytest.raises(LaunchError, match="wide"):
            place.launch(fill, out, 4, grid=1, block=(8, 4))
    assert (out.to_host() == 7).all()


def test_the_number_of_arguments_is_looked_at(place: Any) -> None:
    """Too many arguments, and too few, are refused though the arrays are those of a launch before."""

    @remap.kernel
    def fill(out: remap.DisjointSlice, n: int) -> None:
        out[remap.index_1d()] = n

    out = place(8, "int32")
    for _ in range(2):
        place.launch(fill, out, 1, grid=1, block=8)
        for wrong in ((out,), (out, 1, 2), ()):
            with pytest.raises(LaunchError, match="argument"):
                place.launch(fill, *wrong, grid=1, block=8)


class Acting(type):
    """A class of classes of which one attribute does something first, once, as another thread might just then."""

    first: Callable[[], object] | None = None

    @property
    def more(cls) -> int:
        """Return what is added."""
        first, cls.first = cls.first, None
        if first is not None:
            first()
        return 1


@pytest.mark.parametrize("kept_before", [True, False])
@pytest.mark.parametrize("change", ["rights", "memory"])
def test_what_changes_between_the_checks_and_the_launch(kept_before: bool, change: str) -> None:
    """It is checked again: no kernel writes what may only be read, or runs on what was looked at before it moved."""

    class Settings(metaclass=Acting):
        pass

    @remap.kernel
    def add(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = x[i] + Settings.more

    with remap.allocate(2 * MiB) as a, remap.ElasticBuffer(4 * MiB, chunk="2MiB") as b:
        b.resize(4 * MiB)
        x, out = a.array("int32", 8), b.array("int32", MiB)
        x.copy_from(np.arange(8, dtype=np.int32))
        if kept_before:
            add.launch(x, out, grid=1, block=8)
            assert kept(add) == 1
        else:
            assert add.source(x, out)  # it is known what the kernel looks like
        if change == "rights":
            Settings.first = lambda: b.set_access({0: "r"})
            refusal: type[RemapError] = AccessError
        else:
            Settings.first = lambda: b.resize(2 * MiB)
            refusal = InvalidValueError
        with pytest.raises(refusal):
            add.launch(x, out, grid=1, block=8)
        assert Settings.first is None
        if change == "rights":
            b.set_access({0: "rw"})
        else:
            b.resize(4 * MiB)
        add.launch(x, out, grid=1, block=8)
        assert out.to_host().tolist()[:8] == list(range(1, 9))


def test_bytes_that_were_given_up_within_a_chunk() -> None:
    """A kept launch is refused them as the first one is, although no memory has gone."""
    kernel = fresh()
    with remap.allocate(2 * MiB) as a, remap.ElasticBuffer(8 * MiB, chunk="8MiB") as b:
        b.resize(8 * MiB)
        x, out = a.array("int32", 8), b.array("int32", 2 * MiB)
        a.fill(0)
        kernel.launch(x, out, grid=1, block=8)
        b.resize(2 * MiB)
        with pytest.raises(InvalidValueError, match="not committed"):
            kernel.launch(x, out, grid=1, block=8)


def test_a_grid_that_cannot_be_compared() -> None:
    """It is refused as it is where nothing was kept yet."""
    kernel = fresh()
    with remap.allocate(2 * MiB) as a, remap.allocate(2 * MiB) as b:
        x, out = a.array("int32", 8), b.array("int32", 8)
        a.fill(0)
        kernel.launch(x, out, grid=1, block=8)
        grid: Any = np.array([1, 1])
        with pytest.raises(LaunchError, match="whole number"):
            kernel.launch(x, out, grid=grid, block=8)
