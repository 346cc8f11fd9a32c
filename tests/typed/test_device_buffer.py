"""DeviceBuffer: arrays to the device and back, whatever memory stands behind (D2, A8; traps 26, 39, 42, 43)."""

from __future__ import annotations

import threading
from typing import Any, Literal

import numpy as np
import pytest

import remap
from remap.buffers import sources
from remap.buffers.plain import PlainMemory
from remap.errors import AlignmentError, ClosedError, InUseError, InvalidValueError, OutOfMemoryError
from remap.sizes import MiB
from remap.testing.stage import Stage
from remap.testing.typed import gate

pytest_plugins = ("remap.testing.stage",)

SOURCES = ("plain", "mapped")
TYPES = ("float32", "float64", "int8", "uint16", "int64", "complex64", "bool")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", TYPES)
def test_there_and_back(stage: Stage, dtype: str, source: Literal["plain", "mapped"]) -> None:
    """What from_host takes to_host gives back, with its shape and type, for every type and source."""
    array = (np.random.default_rng(1).random((7, 11)) * 100).astype(dtype)
    with remap.DeviceBuffer.from_host(array, source=source) as buffer:
        back = buffer.to_host()
        assert back.dtype == array.dtype
        assert (back == array).all()
        assert (buffer.shape, buffer.dtype, buffer.size, len(buffer)) == ((7, 11), np.dtype(dtype), 77, 7)
    assert buffer.closed


@pytest.mark.parametrize("source", ["plain", "mapped", "buffer"])
def test_source_changes_no_other_line(stage: Stage, source: str) -> None:
    """One program runs alike over plain memory, mapped memory and a buffer that is handed in (A8)."""
    own = remap.allocate(2 * MiB, resident=0) if source == "buffer" else None
    with remap.DeviceBuffer.zeroed(1000, "int32", source=own or source) as buffer:  # type: ignore[arg-type]
        buffer[100:200].fill(3)
        view = buffer.view("uint16")
        assert view.shape == (2000,)
        assert buffer.to_host().sum() == 300
        buffer.copy_from_host(np.arange(1000, dtype="int32"))
        out = np.empty(1000, "int32")
        buffer.copy_to_host(out)
        assert (out == np.arange(1000)).all()
        assert buffer.address % 256 == 0
    if own is not None:
        assert not own.closed, "memory that was handed in stays its owner's"
        own.close()


def test_default_sources(stage: Stage) -> None:
    """Below one granule memory is plain, above it mapped, and mapped always where it may have to move."""
    granule = remap.device().granularity().minimum
    with (
        remap.DeviceBuffer.empty(granule - 1, "uint8") as small,
        remap.DeviceBuffer.empty(granule, "uint8") as large,
        sources.mapped_only(),
        remap.DeviceBuffer.empty(1, "uint8") as moving,
    ):
        assert isinstance(small.owner, PlainMemory)
        assert isinstance(large.owner, remap.Buffer)
        assert isinstance(moving.owner, remap.Buffer)


def test_empty_buffers_ask_nothing_of_the_driver(stage: Stage) -> None:
    """A buffer of no elements is valid, works, and makes no call on memory (trap 39)."""
    mark = stage.mark()
    for shape in (0, (0, 5), (5, 0)):
        with remap.DeviceBuffer.zeroed(shape, "float64") as buffer:
            assert buffer.to_host().shape == buffer.shape
            buffer.copy_from_host(np.empty(buffer.shape))
            buffer.fill(1)
            assert buffer[:0].to_host().size == 0
    with remap.DeviceBuffer.from_host(np.empty((3, 0), "int8")) as buffer:
        assert buffer.nbytes == 0
    assert stage.names_since(mark) == []


def test_parts(stage: Stage) -> None:
    """Slices and rows are parts without a copy, and keep the owner; other steps are refused."""
    array = np.arange(60, dtype="int16").reshape(5, 4, 3)
    buffer = remap.DeviceBuffer.from_host(array)
    for key in (slice(1, 3), slice(-2, None), slice(3, 1), slice(None), 0, -1, 4):
        assert (buffer[key].to_host() == array[key]).all(), key
    assert (buffer[1][2].to_host() == array[1][2]).all()
    assert buffer[2][1].reshape(3, 1).shape == (3, 1)
    with pytest.raises(InvalidValueError, match="contiguous"):
        buffer[::2]
    with pytest.raises(IndexError):
        buffer[5]
    with pytest.raises(InvalidValueError):
        buffer[1][2][1][0]
    with pytest.raises(TypeError, match=r"\(0, 1\) of an array of shape .*first axis.*to_host"):
        buffer[0, 1]  # type: ignore[index]
    row = buffer[3]
    buffer[3].fill(-1)
    assert (row.to_host() == -1).all()
    buffer.close()
    with pytest.raises(ClosedError):
        row.to_host()


def test_views_check_size_and_alignment(stage: Stage) -> None:
    """A view needs whole elements at addresses that are multiples of their size."""
    with remap.DeviceBuffer.from_host(np.arange(10, dtype="uint8")) as buffer:
        assert (
            buffer[2:6].view("uint16").to_host() == np.arange(10, dtype="uint8")[2:6].view("uint16")
        ).all()
        with pytest.raises(InvalidValueError, match="whole elements"):
            buffer.view("uint32")
        with pytest.raises(AlignmentError):
            buffer[1:5].view("uint32")


@pytest.mark.parametrize("value", [0, 1, 2.5, -1, 1e300])
def test_fill(stage: Stage, value: float) -> None:
    """Every element gets the value, also where its bytes are no pattern that a driver can fill with."""
    with remap.DeviceBuffer.empty((3, 1000), "float64") as buffer:
        buffer.fill(0)
        buffer[1].fill(value)
        assert buffer.to_host().tolist() == [[0] * 1000, [value] * 1000, [0] * 1000]


@pytest.mark.parametrize("values", [[1, 2], [], [7], (1, 2), np.zeros(3), [[1], [2]]])
def test_fill_takes_one_value(stage: Stage, values: Any) -> None:
    """Several values are refused, and nothing is written, whatever the size of an element and wherever they begin."""
    for dtype in ("uint8", "float64"):
        with remap.DeviceBuffer.zeroed(5, dtype) as buffer:
            for part in (buffer, buffer[1:2], buffer[:0]):
                with pytest.raises(InvalidValueError, match="one and the same value"):
                    part.fill(values)
            assert not buffer.to_host().any()


def test_fill_with_a_structure(stage: Stage) -> None:
    """A value of a structured type is a tuple, or a scalar of that type."""
    kind = np.dtype([("a", "i4"), ("b", "f4")])
    with remap.DeviceBuffer.zeroed(3, kind) as buffer:
        buffer.fill((1, 2.5))
        assert buffer.to_host().tolist() == [(1, 2.5)] * 3
        buffer[1:].fill(np.array((7, 0.5), kind)[()])
        assert buffer.to_host().tolist() == [(1, 2.5), (7, 0.5), (7, 0.5)]
        buffer.fill((0, 0))
        assert buffer.to_host().tolist() == [(0, 0)] * 3


def test_the_array_may_change_at_once(stage: Stage) -> None:
    """Without a stream, from_host and copy_from_host have copied when they return."""
    array = np.arange(1 << 16)
    with remap.DeviceBuffer.from_host(array) as buffer:
        array[:] = 0
        assert (buffer.to_host() == np.arange(1 << 16)).all()


def test_the_array_is_kept_until_the_stream_has_passed(stage: Stage) -> None:
    """With a stream the copy happens later, from an array that lives on though nobody else has it."""
    with remap.Stream(0) as stream, gate(stream) as opened:
        expected = np.arange(1 << 12)
        buffer = remap.DeviceBuffer.from_host(expected.copy(), stream=stream)
        opened.set()
        assert (buffer.to_host(stream=stream) == expected).all()
        buffer.close()


def test_copies_come_after_what_was_queued(stage: Stage) -> None:
    """A copy with no stream comes after work on a non-blocking stream that remap queued before."""
    with (
        remap.Stream(0) as stream,
        remap.DeviceBuffer.zeroed(1 << 16, "uint8", device=0) as buffer,
        gate(stream) as opened,
    ):
        buffer.fill(7, stream=stream)
        threading.Timer(0.05, opened.set).start()
        assert (buffer.to_host() == 7).all()


def test_closing_waits(stage: Stage) -> None:
    """Closing waits for the streams that used the buffer."""
    with remap.Stream(0) as stream:
        buffer = remap.DeviceBuffer.zeroed(1 << 16, "uint8", device=0)
        with gate(stream) as opened:
            buffer.fill(7, stream=stream)
            closing = threading.Thread(target=buffer.close)
            closing.start()
            closing.join(0.05)
            assert closing.is_alive(), "it did not wait"
            opened.set()
            closing.join(30)
        assert not closing.is_alive()


def test_what_a_failed_copy_leaves(stage: Stage) -> None:
    """If the copy of from_host fails, the memory is given back (invariant 5)."""
    before = stage.seen()
    stage.faulty.fail("copy_to_device")
    with pytest.raises(remap.DriverError):
        remap.DeviceBuffer.from_host(np.ones(10))
    stage.faulty.heal()
    assert stage.unchanged(before)


def test_bad_input(stage: Stage) -> None:
    """Every mistake has an error that says what was asked, and leaves nothing behind."""
    array = np.arange(12).reshape(3, 4)
    for mistake in (array.T, array[:, 1:], np.array([object()])):
        with pytest.raises(InvalidValueError):
            remap.DeviceBuffer.from_host(mistake)
    with pytest.raises(InvalidValueError, match="0 or more"):
        remap.DeviceBuffer.zeroed(-1)
    with pytest.raises(OverflowError):  # trap 43
        remap.DeviceBuffer.zeroed((1 << 40, 1 << 40), "float64")
    with pytest.raises(OutOfMemoryError):
        remap.DeviceBuffer.empty(1 << 46, "uint8")
    with pytest.raises(InvalidValueError, match="source"):
        remap.DeviceBuffer.empty(1, source="somewhere")  # type: ignore[arg-type]
    with remap.DeviceBuffer.from_host(array) as buffer:
        for other in (array.astype("int32"), array.reshape(4, 3), array[:2]):
            with pytest.raises(InvalidValueError, match="copies convert nothing"):
                buffer.copy_from_host(other)
            with pytest.raises(InvalidValueError, match="copies convert nothing"):
                buffer.copy_to_host(np.empty_like(other))
        frozen = np.empty_like(array)
        frozen.flags.writeable = False
        with pytest.raises(InvalidValueError, match="read-only"):
            buffer.copy_to_host(frozen)
        with remap.allocate(2 * MiB, resident=0) as small, pytest.raises(InvalidValueError, match="2 MiB"):
            remap.DeviceBuffer.empty(3 * MiB, "uint8", source=small)


def test_closing_under_an_export(stage: Stage) -> None:
    """A buffer of whose memory another library holds a part refuses to close, and stays open (trap 26)."""
    buffer = remap.DeviceBuffer.zeroed(10, device=0)
    part = buffer[2:]
    assert part.__cuda_array_interface__["shape"] == (8,)
    with pytest.raises(InUseError, match="of other libraries"):
        buffer.close()
    assert not buffer.closed
    del part
    buffer.close()


class Taken:
    """An array of another library: it holds what it was made of."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.data = given.__cuda_array_interface__["data"]


@pytest.mark.parametrize("source", SOURCES)
def test_closing_what_another_library_has_seen(stage: Stage, source: Literal["plain", "mapped"]) -> None:
    """What is taken by the array interface is the buffer itself, which the library holds: closing waits, and closes."""
    with remap.DeviceBuffer.zeroed(10, device=0, source=source) as buffer:
        assert hasattr(buffer, "__cuda_array_interface__")  # as libraries ask
        taken = Taken(buffer)
        assert taken.data == (buffer.address, False)
        mark = stage.mark()
    assert buffer.closed
    assert "synchronize_context" in stage.names_since(mark), (
        "nobody knows on which stream the library has used it"
    )
    with pytest.raises(ClosedError):
        Taken(buffer)


def test_memory_of_others_under_an_export(stage: Stage) -> None:
    """A buffer that was handed in stays its owner's, who hears that another library has it (trap 26)."""
    own = remap.allocate(2 * MiB, resident=0)
    with remap.DeviceBuffer.zeroed(10, source=own) as buffer:
        taken = Taken(buffer)
    with pytest.raises(InUseError, match="of other libraries"):
        own.close()
    del buffer, taken
    own.close()


@pytest.mark.two_devices
def test_every_buffer_remembers_its_device(stage: Stage) -> None:
    """Buffers are made, copied and closed on their own device, whatever is current (trap 42)."""
    array = np.arange(100)
    with remap.device(1).current():
        one = remap.DeviceBuffer.from_host(array, device=0)
    with remap.device(0).current():
        two = remap.DeviceBuffer.from_host(array, device=1, source="plain")
    with remap.Stream(1) as stream, remap.DeviceBuffer.from_host(array, stream=stream) as three:
        assert three.owner.accessing == (remap.device(1),)
        stream.synchronize()
    assert one.owner.accessing == (remap.device(0),)
    assert two.owner.accessing == (remap.device(1),)
    assert (one.to_host() == two.to_host()).all()
    with remap.device(1).current():
        one.close()
    with remap.device(0).current():
        two.close()
