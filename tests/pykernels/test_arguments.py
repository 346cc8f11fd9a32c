"""What a kernel is given: layouts that both sides agree on, captured values read at launch, places and rights."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB
from remap.errors import AccessError, ClosedError, LaunchError

PAIR = np.dtype([("low", np.uint8), ("high", np.float64)], align=True)
NESTED = np.dtype([("flag", np.bool_), ("pair", PAIR), ("count", np.int16)], align=True)

factor = 3
shift = np.float32(0.25)


@dataclass(frozen=True)
class Box:
    """A structure with padding: one byte, eight, two."""

    kind: np.uint8
    width: float
    depth: np.int16


@dataclass
class Scale:
    """A structure that can be changed."""

    by: float
    plus: int


@dataclass(frozen=True)
class Settings:
    """A structure inside a structure."""

    on: bool
    box: Box
    steps: int


settings = Settings(on=True, box=Box(np.uint8(200), 0.1, np.int16(-7)), steps=1 << 40)


def test_structures_by_value(place: Any) -> None:
    """A dataclass and a structured scalar arrive field by field, padding and nesting included (D4)."""

    @remap.kernel
    def kernel(s: Settings, n: Any, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        sizes = s.box.kind + s.box.width * s.box.depth + s.steps
        out[i] = sizes + n.pair.low * n.pair.high + n.count + int(s.on) - int(n.flag)

    value = np.array((True, (7, 0.3), -300), NESTED)[()]
    out = place(4, "float64")
    place.launch(kernel, settings, value, out, grid=1, block=4)
    box = settings.box
    first = np.uint8(200) + box.width * np.int16(-7)
    expected = first + float(1 << 40) + np.uint8(7) * np.float64(0.3) + np.float64(-300) + 1 - 1
    assert (out.to_host() == expected).all()


def test_structures_are_as_they_were_at_the_launch(place: Any) -> None:
    """What is changed after the launch, in a dataclass or a structured scalar, does not reach the kernel."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice, scale: Scale, pair: Any) -> None:
        i = remap.index_1d()
        out[i] = scale.by * i + scale.plus + pair.high

    scale, out = Scale(2, 10), place(4, "float64")
    pair = np.array((1, 100), PAIR)[()]
    place.launch(
        kernel, out, Scale(0, 0), pair, grid=1, block=4
    )  # loads it, for which CUDA waits for all streams
    remap.device().synchronize()  # the stream below does not wait for this one
    held = threading.Event()
    with remap.Stream() as stream, remap.Graph() as graph:
        graph.host(held.wait)
        with graph.instantiate() as executable:
            executable.launch(stream)
            try:
                place.launch(kernel, out, scale, pair, grid=1, block=4, stream=stream)
                scale.by, pair["high"] = 7, 900
            finally:
                held.set()
            stream.synchronize()
    assert out.to_host().tolist() == [110, 112, 114, 116]
    for wrong in (Scale("two", 10), Scale(2, 1 << 70), Scale(2, None)):  # type: ignore[arg-type]
        with pytest.raises(LaunchError, match=r"launch of kernel, argument 'scale': .*a field does not fit"):
            kernel.launch(out, wrong, pair, grid=1, block=4)
    remap.device().synchronize()  # nothing was lost


def test_arrays_of_structures(place: Any) -> None:
    """Fields of elements are read and written, and whole elements copied."""

    @remap.kernel
    def kernel(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        if i % 2 == 0:
            out[i] = x[i]
        else:
            out[i].high = x[i].high * 2
            out[i].low = x[i].low + 1

    values = np.zeros(10, PAIR)
    values["low"], values["high"] = np.arange(10), np.arange(10) / 3
    x, out = place(values), place(10, PAIR)
    place.launch(kernel, x, out, grid=1, block=16)
    odd = np.arange(10) % 2 == 1
    found = out.to_host()
    assert np.array_equal(found["low"], values["low"] + odd)
    assert np.array_equal(found["high"], np.where(odd, values["high"] * 2, values["high"]))


def test_a_structure_that_is_not_laid_out_as_in_c_is_refused(place: Any) -> None:
    """A packed type has other offsets than C, so it is refused, with the cure."""

    @remap.kernel
    def kernel(s: Any, out: remap.DisjointSlice) -> None:
        out[remap.index_1d()] = s.high

    packed = np.dtype([("low", np.uint8), ("high", np.float64)])
    with pytest.raises(LaunchError, match=r"C puts it at 8.*align=True"):
        place.launch(kernel, np.zeros((), packed)[()], place(4, "float64"), grid=1, block=4)


def test_the_layout_can_be_printed(place: Any) -> None:
    """Every value has its offset and size, padding and captured values too; what has no bytes is named as gone."""

    @remap.kernel
    def kernel(nothing: None, x: remap.Slice, n: np.int16, s: Any, out: remap.DisjointSlice) -> None:
        i = remap.index_2d(out.shape[1])
        out[i] = x[i] * n * factor + s.high * shift

    layout = kernel.layout(
        None, np.zeros(4, np.float32), 5, np.zeros((), PAIR)[()], np.zeros((2, 2), np.float64)
    )
    lines = [" ".join(line.split()) for line in layout.splitlines()]
    for line in (
        "0 8 x: address",
        "8 8 x: number of elements (float32)",
        "16 2 n: int16",
        "0 1 uint8 low",
        "1 7 (padding)",
        "8 8 float64 high",
        "24 16 s: structure",
        "56 8 out: extent 0",
        "64 8 out: extent 1",
        "0 8 int64 factor",
        "8 4 float32 shift",
        "12 4 (padding)",
        "- 0 nothing: no bytes, so it vanishes",
    ):
        assert line in lines, f"{line} is not in\n{layout}"


def test_zero_size_arguments_vanish(place: Any) -> None:
    """None and structures without fields have no bytes and no parameter."""

    @remap.kernel
    def kernel(nothing: Any, out: remap.DisjointSlice) -> None:
        out[remap.index_1d()] = 5

    out = place(4, "int64")
    place.launch(kernel, None, out, grid=1, block=4)
    assert out.to_host().tolist() == [5] * 4
    assert "p_nothing" not in kernel.source(None, out)


def test_captured_values_are_read_at_launch(place: Any) -> None:
    """Globals and closure variables go by value as they are when the kernel is launched."""
    global factor  # noqa: PLW0603 (what is tested)
    offset = 10
    where = {"x": 1}

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = i * factor + offset + settings.box.depth

    out = place(4, "int64")
    place.launch(kernel, out, grid=1, block=4)
    assert out.to_host().tolist() == [3 * i + 3 for i in range(4)]
    factor, offset = 5, 20
    try:
        place.launch(kernel, out, grid=1, block=4)
        assert out.to_host().tolist() == [5 * i + 13 for i in range(4)]
    finally:
        factor = 3
    assert where


def test_a_captured_value_of_another_type_makes_another_variant(place: Any) -> None:
    """A variable that has become a float is computed with as a float."""
    value: Any = 3

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        out[remap.index_1d()] = value / 2

    out = place(1, "float64")
    place.launch(kernel, out, grid=1, block=1)
    assert out.to_host()[0] == 1.5
    value = np.float32(0.1)
    place.launch(kernel, out, grid=1, block=1)
    assert out.to_host()[0] == np.float32(0.1) / np.float32(2)


def test_a_captured_constant_is_compiled_in(place: Any) -> None:
    """A global that gives the shape of shared memory is a constant, and a new value compiles a new variant."""
    size = 4

    @remap.kernel
    def kernel(out: remap.DisjointSlice) -> None:
        s = remap.shared_array(size, np.int64)
        s[remap.thread.x % size] = size
        out[remap.index_1d()] = len(s)

    out = place(4, "int64")
    place.launch(kernel, out, grid=1, block=4)
    assert out.to_host().tolist() == [4] * 4
    size = 8
    place.launch(kernel, out, grid=1, block=4)
    assert out.to_host().tolist() == [8] * 4


def test_numbers_that_do_not_fit_are_refused(place: Any) -> None:
    """A number goes in the type that the parameter names, and has to fit."""

    @remap.kernel
    def kernel(n: np.int8, f: float, out: remap.DisjointSlice) -> None:
        out[remap.index_1d()] = n + f

    out = place(1, "float64")
    place.launch(kernel, -5, 2, out, grid=1, block=1)
    assert out.to_host()[0] == -3
    with pytest.raises(LaunchError, match=r"'n': 200.*int8"):
        place.launch(kernel, 200, 2.0, out, grid=1, block=1)
    with pytest.raises(LaunchError, match="annotated with int8"):
        place.launch(kernel, 2.5, 2.0, out, grid=1, block=1)


@remap.kernel
def single_precision(x: remap.Slice[np.float32], out: remap.DisjointSlice) -> None:  # type: ignore[type-arg]
    i = remap.index_1d()
    out[i] = x[i]


def test_a_slice_of_a_named_type(place: Any) -> None:
    """Slice[np.float32] takes arrays of float32 only."""
    place.launch(single_precision, place(4, "float32"), place(4, "float32"), grid=1, block=4)
    with pytest.raises(LaunchError, match="annotated with float32"):
        place.launch(single_precision, place(4, "float64"), place(4, "float32"), grid=1, block=4)


# -- places and rights --


@remap.kernel
def copy(x: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    out[i] = x[i]


def test_arrays_of_the_host(place: Any) -> None:
    """A NumPy array goes by reference where devices reach it, through HMM or ATS, and is refused elsewhere (D8)."""
    values = np.arange(32, dtype=np.int32)
    out = place(32, "int32")
    at = remap.device()
    if not (at.capabilities["hmm"] or at.capabilities["ats"]):
        with pytest.raises(LaunchError, match=r"memory of the host.*DeviceBuffer\.from_host"):
            place.launch(copy, values, out, grid=1, block=32)
        return
    place.launch(copy, values, out, grid=1, block=32)
    assert np.array_equal(out.to_host(), values)


class Theirs:
    """An array of another library."""

    def __init__(self, address: int, dtype: Any, count: int = 2) -> None:
        kind = np.dtype(dtype)
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": kind.str,
            "descr": kind.descr,
            "data": (address, False),
            "version": 3,
        }


@pytest.mark.parametrize(
    ("dtype", "offset", "unit"),
    [("float32", 1, 4), ("int16", 3, 2), ("float64", 4, 8), ([("n", "i4"), ("x", "i4"), ("y", "f8")], 4, 8)],
)
def test_arrays_that_are_not_aligned_are_refused(place: Any, dtype: Any, offset: int, unit: int) -> None:
    """A device that reads an element whole at another address than a multiple of its size loses the context."""
    out = place(2, dtype)
    memory = place(64, "uint8")
    with pytest.raises(LaunchError, match=rf"argument 'x' at 0x\w+: .* at a multiple of {unit} bytes"):
        place.launch(copy, Theirs(memory.address + offset, dtype), out, grid=1, block=2)
    with pytest.raises(LaunchError, match="argument 'out' at"):
        place.launch(copy, out, Theirs(memory.address + offset, dtype), grid=1, block=2)
    place.launch(copy, Theirs(memory.address + 2 * unit, dtype), out, grid=1, block=2)
    place.launch(copy, Theirs(memory.address + offset, dtype, 0), out, grid=1, block=2)  # nothing lies there


def test_read_only_memory_is_not_written() -> None:
    """A DisjointSlice over memory that the device may only read is refused before the launch (D10)."""
    at = remap.device()
    with remap.allocate(2 * MiB, access="r") as readable, remap.allocate(2 * MiB) as writable:
        x, out = readable.array("int32", 8), writable.array("int32", 8)
        copy.launch(x, out, grid=1, block=8)
        with pytest.raises(AccessError, match="a DisjointSlice is written"):
            copy.launch(out, x, grid=1, block=8)
        at.synchronize()


def test_memory_without_access_is_refused() -> None:
    """A buffer of another device, or one that nobody may touch, is refused before the launch."""
    if len(remap.devices()) < 2:
        pytest.skip("needs two devices")
    with remap.allocate(2 * MiB, resident=1) as theirs, remap.allocate(2 * MiB, resident=0) as ours:
        with remap.Stream(remap.device(0)) as stream, pytest.raises(AccessError):
            copy.launch(theirs.array("int32", 8), ours.array("int32", 8), grid=1, block=8, stream=stream)
        with pytest.raises(AccessError):
            copy.launch(ours.array("int32", 8), theirs.array("int32", 8), grid=1, block=8)


def test_a_closed_buffer_is_refused() -> None:
    """A closed buffer has no memory to work on."""
    buffer = remap.allocate(2 * MiB)
    array = buffer.array("int32", 8)
    buffer.close()
    with remap.allocate(2 * MiB) as other, pytest.raises(ClosedError):
        copy.launch(array, other.array("int32", 8), grid=1, block=8)


def test_closing_waits_for_the_launch() -> None:
    """The stream of a launch is known to its buffers, so closing one waits for it (invariant 7)."""
    with remap.Stream(remap.device()) as stream:
        buffer = remap.allocate(8 * MiB)
        x = buffer.array("int32", MiB)
        out = remap.allocate(8 * MiB)
        for _ in range(20):
            copy.launch(x, out.array("int32", MiB), grid=4096, block=256, stream=stream)
        buffer.close()
        assert stream.done
        out.close()


def test_empty_arrays(place: Any) -> None:
    """Arrays without elements are valid: every thread is beyond their end (trap 39)."""
    x, out = place(0, "float32"), place(0, "float32")
    place.launch(copy, x, out, grid=2, block=32)
    assert out.to_host().size == 0


def test_shapes_are_checked(place: Any) -> None:
    """Grid and block within the device's limits; lists and NumPy integers are taken."""
    x, out = place(8, "int32"), place(8, "int32")
    place.launch(copy, x, out, grid=[1], block=[np.int64(8), 1])
    for shape, told in (
        ({"grid": 0, "block": 8}, "every extent is 1 or more"),
        ({"grid": 1, "block": 2048}, "at most"),
        ({"grid": 1, "block": (1, 1, 1, 1)}, "one to three"),
        ({"grid": "1", "block": 1}, "whole number"),
    ):
        with pytest.raises(LaunchError, match=told):
            place.launch(copy, x, out, **shape)


def test_threads_launch_the_same_kernel() -> None:
    """Several threads compile and launch one kernel at once; each gets its own result (invariant 13)."""

    @remap.kernel
    def kernel(out: remap.DisjointSlice, n: int) -> None:
        out[remap.index_1d()] = n

    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with remap.allocate(2 * MiB) as buffer, remap.Stream(remap.device()) as stream:
                out = buffer.array("int64", 1000)
                for turn in range(20):
                    kernel.launch(out, number * 100 + turn, grid=4, block=256, stream=stream)
                stream.synchronize()
                assert (out.to_host() == number * 100 + 19).all()
        except Exception as error:  # noqa: BLE001 (shown by the test's own thread)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures
    assert len(kernel._variants) == 1


def test_a_driver_can_be_left_although_kernels_are_loaded(tmp_path: Path) -> None:
    """What a kernel has loaded counts as nobody's: the driver can be changed, and the kernel goes on after it."""
    text = """
import numpy as np, remap
def run():
    with remap.allocate(1) as a, remap.allocate(1) as b:
        a.fill(1)
        import kernels_of_this_test as k
        k.copy.launch(a.array("uint8", 64), b.array("uint8", 64), grid=1, block=64)
        assert (b.to_host("uint8", 64) == 1).all()
run()
remap.use("host", devices=1)
run()
print("fine")
"""
    module = """
import remap
@remap.kernel
def copy(x: remap.Slice, out: remap.DisjointSlice):
    i = remap.index_1d()
    out[i] = x[i]
"""
    (tmp_path / "kernels_of_this_test.py").write_text(module)
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, "-W", "error", str(tmp_path / "program.py")]
    environment = {**os.environ, "REMAP_DRIVER": "host"}
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=100)
    assert found.stdout == "fine\n", found.stderr
