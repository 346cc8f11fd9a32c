"""`DeviceArray`: what it says of itself, what it refuses, and copies."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

import remap
from remap import Host


def test_says_what_it_is(private: remap.Buffer) -> None:
    """Address, shape, strides and sizes follow from offset, type and extents."""
    array = private.array("float32", (3, 4), offset=64)
    assert array.address == private.address + 64
    assert (array.shape, array.ndim, array.size, array.nbytes) == ((3, 4), 2, 12, 48)
    assert array.strides == np.empty((3, 4), np.float32).strides
    assert array.dtype == np.float32
    assert array.owner is private
    assert len(array) == 3
    assert "(3, 4) of float32" in repr(array)


def test_takes_all_that_fits(private: remap.Buffer) -> None:
    """Without a shape, the array has as many elements as fit from the offset on."""
    assert private.array().shape == (private.size,)
    assert private.array("float64", offset=8).shape == (private.size // 8 - 1,)
    assert private.array("float64", offset=private.size).shape == (0,)


def test_address_escapes(private: remap.Buffer) -> None:
    """Making an array gives no address away; reading its address does (invariant 7)."""
    quiet = remap.allocate(1, resident=0)
    array = quiet.array()
    assert not quiet._uses.escaped
    assert array.address
    assert quiet._uses.escaped
    quiet.close()


@pytest.mark.parametrize(
    ("dtype", "shape", "offset", "kind", "words"),
    [
        (object, 1, 0, remap.InvalidValueError, "Python objects"),
        ([("a", object)], 1, 0, remap.InvalidValueError, "Python objects"),
        ("S0", 1, 0, remap.InvalidValueError, "no size"),
        ("(2,)f4", 1, 0, remap.InvalidValueError, "no size"),
        ("f4", -1, 0, remap.InvalidValueError, "0 or more"),
        ("f4", (2, -1), 0, remap.InvalidValueError, "0 or more"),
        ("f4", 2**40, 0, remap.InvalidValueError, "does not fit"),
        ("f4", (2**40, 2**40), 0, OverflowError, "2\\*\\*63"),
        ("f8", 2**62, 0, OverflowError, "2\\*\\*63"),
        ("f4", 1, 2, remap.AlignmentError, "multiple of 4"),
        ("c16", 1, 8, remap.AlignmentError, "multiple of 16"),
        ("u1", 1, -1, remap.InvalidValueError, "bytes"),
        ("u1", 0, 2**21 + 1, remap.InvalidValueError, "bytes"),
        ("u1", 2**21, 1, remap.InvalidValueError, "does not fit"),
    ],
)
def test_refuses(
    private: remap.Buffer, dtype: Any, shape: Any, offset: int, kind: type[Exception], words: str
) -> None:
    """What cannot be an array of this memory is refused with the rule, and as an error of remap (trap 43)."""
    with pytest.raises(kind, match=words) as caught:
        private.array(dtype, shape, offset=offset)
    assert isinstance(caught.value, remap.RemapError)


def test_refuses_what_is_no_type_or_shape(private: remap.Buffer) -> None:
    """An unknown type and an extent that is no whole number are a `TypeError`, as in NumPy."""
    half: Any = 3.5
    with pytest.raises(TypeError):
        private.array("float31", 1)
    with pytest.raises(TypeError):
        private.array("u1", half)


def test_structures_need_no_more_alignment_than_their_size(private: remap.Buffer) -> None:
    """A packed structure of 12 bytes may start at a multiple of 4."""
    kind = np.dtype([("x", "f4"), ("y", "f8")])
    assert private.array(kind, 2, offset=12).nbytes == 24


def test_empty_arrays(private: remap.Buffer) -> None:
    """Arrays without elements are valid, also in a buffer without bytes, which has no address."""
    assert private.array("f4", (0, 7)).nbytes == 0
    with remap.allocate(0) as nothing:
        array = nothing.array("f4")
        assert array.shape == (0,)
        assert array.to_host().size == 0
        array.copy_from(np.empty(0, np.float32))


def test_reshape_and_view(shared: remap.Buffer) -> None:
    """The same bytes in another shape or type; what does not come out even is refused."""
    array = shared.array("u4", (6, 4))
    array.copy_from(np.arange(24, dtype=np.uint32).reshape(6, 4))
    assert (array.reshape(3, 8).to_host() == np.arange(24).reshape(3, 8)).all()
    assert array.view("u2").shape == (6, 8)
    assert (array.view("u8").to_host() == np.arange(24, dtype=np.uint32).view(np.uint64).reshape(6, 2)).all()
    with pytest.raises(remap.InvalidValueError, match="24 elements"):
        array.reshape(5, 5)
    with pytest.raises(remap.InvalidValueError, match="not whole elements"):
        shared.array("u4", (6, 3)).view("u8")
    with pytest.raises(remap.AlignmentError):
        shared.array("u4", 4, offset=4).view("u8")


def test_keeps_the_owner_alive() -> None:
    """An array holds its buffer; the buffer does not hold the array."""
    buffer = remap.allocate(1)
    array = buffer.array("u1", 16)
    gone = weakref.ref(array)
    alive = weakref.ref(buffer)
    del buffer
    kept = alive()
    assert kept is not None
    del array
    assert gone() is None
    kept.close()


def test_closed_owner(private: remap.Buffer) -> None:
    """After closing, what leads to the memory raises `ClosedError`; shape and type still tell (invariant 4)."""
    buffer = remap.allocate(1)
    array = buffer.array("u1", 16)
    buffer.close()
    assert array.shape == (16,)
    for use in (
        lambda: array.address,
        array.numpy,
        array.to_host,
        array.__dlpack__,
        array.__dlpack_device__,
        lambda: array.__cuda_array_interface__,
        lambda: array.copy_from(np.zeros(16, np.uint8)),
    ):
        with pytest.raises(remap.ClosedError):
            use()


def test_copies_from_numpy_and_arrays(private: remap.Buffer, shared: remap.Buffer) -> None:
    """`copy_from` takes host arrays and arrays of devices; shape and type must be the same."""
    data = np.arange(1000, dtype=np.int32)
    first, second = private.array("i4", 1000), shared.array("i4", 1000, offset=4000)
    first.copy_from(data)
    second.copy_from(first)
    assert (second.to_host() == data).all()
    with pytest.raises(remap.InvalidValueError, match="convert nothing"):
        first.copy_from(data.astype(np.int64))
    with pytest.raises(remap.InvalidValueError, match="contiguous"):
        private.array("i4", 500).copy_from(data[::2])
    with pytest.raises(TypeError, match="buffer protocol"):
        first.copy_from(object())
    with pytest.raises(remap.InvalidValueError, match="Python objects"):
        first.copy_from(np.array([None]))


def test_copy_needs_a_right(shared: remap.Buffer) -> None:
    """An array that nobody may write refuses copies."""
    with remap.allocate(1, resident=Host(), accessing=[0, Host()], access="r") as fixed:
        with pytest.raises(remap.AccessError):
            fixed.array("u1", 4).copy_from(np.zeros(4, np.uint8))
        with pytest.raises(remap.AccessError):
            fixed.array("u1", 4).copy_from(shared.array("u1", 4))
