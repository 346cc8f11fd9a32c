"""Arrays of other libraries by `__cuda_array_interface__`, NumPy and the buffer protocol."""

from __future__ import annotations

import array as standard
from typing import Any

import numpy as np
import pytest

import remap
from remap import Host, lifetime
from remap.drivers.protocol import PER_THREAD_STREAM


class Interface:
    """An array of another library that has nothing but the interface it was given."""

    def __init__(self, interface: Any) -> None:
        self.__cuda_array_interface__ = interface


def good(buffer: Any, **changes: Any) -> dict[str, Any]:
    """Return the interface of 16 floats at the start of a buffer, with changes."""
    return {
        "version": 3,
        "shape": (4, 4),
        "typestr": "<f4",
        "data": (buffer.address, False),
        "strides": None,
        "stream": None,
        **changes,
    }


# -- to others --


def test_interface(private: remap.Buffer) -> None:
    """The interface says where, how large, of what type, and whether it may be written."""
    array = private.array("f4", (3, 5), offset=16)
    interface = array.__cuda_array_interface__
    assert interface == good(private, shape=(3, 5), data=(private.address + 16, False))
    kind = np.dtype([("x", "f4"), ("y", "i4")])
    assert private.array(kind, 2).__cuda_array_interface__["descr"] == kind.descr
    assert private.array("f4", (0, 2)).__cuda_array_interface__["data"][0] == 0


def test_interface_read_only() -> None:
    """Where no device may write, the interface says so."""
    with remap.allocate(1, resident=0, access="r") as buffer:
        assert buffer.array().__cuda_array_interface__["data"][1] is True


def test_no_interface_without_a_device() -> None:
    """Memory that no device may touch has no interface at all, so that nobody takes it for device memory."""
    with remap.allocate(1, resident=Host(), accessing=Host()) as buffer:
        assert not hasattr(buffer.array(), "__cuda_array_interface__")


def test_interface_holds_the_buffer_open(private: remap.Buffer) -> None:
    """Once the interface was read, closing is refused while the array that gave it lives (trap 26)."""
    array = private.array()
    assert array.__cuda_array_interface__
    assert array.__cuda_array_interface__
    with pytest.raises(remap.InUseError, match="1 array of"):
        private.close()
    del array
    private.close()


def test_stream_of_pending_work(private: remap.Buffer) -> None:
    """The interface names one stream that is behind all pending work, and none where there is none."""
    array = private.array("u1", 16)
    assert array.__cuda_array_interface__["stream"] is None
    with remap.Stream(0) as first, remap.Stream(0) as second:
        private.fill(1, stream=first)
        assert array.__cuda_array_interface__["stream"] == first.handle
        private.fill(2, offset=8, size=8, stream=second)
        named = array.__cuda_array_interface__["stream"]
        assert named in (first.handle, second.handle)
        (first if named == first.handle else second).synchronize()
        assert first.done
        assert second.done
    del array
    private.close()


@pytest.mark.parametrize("handle", [0, 1])
def test_default_stream_is_named_1(private: remap.Buffer, handle: int) -> None:
    """The interface forbids 0: the legacy default stream goes by 1."""
    array = private.array("u1", 16)
    private.fill(1, stream=handle)
    assert array.__cuda_array_interface__["stream"] == 1
    del array


def test_raw_stream_is_joined(private: remap.Buffer) -> None:
    """Work on a bare integer stream is joined into a stream that remap can name."""
    array = private.array("u1", 16)
    with remap.Stream(0) as stream:
        private.fill(1, stream=stream.handle)
        assert array.__cuda_array_interface__["stream"] == 1
        del array
        private.close()


# -- from others --


def test_takes_the_interface(private: remap.Buffer) -> None:
    """An interface comes over with all it says, and the object that gave it is kept."""
    given = Interface(good(private, strides=(32, 8), shape=(2, 2)))
    taken = remap.as_array(given)
    assert taken.owner is given
    assert (taken.address, taken.shape, taken.strides) == (private.address, (2, 2), (32, 8))
    assert (taken.dtype, taken.location, taken.read_only) == (np.float32, remap.device(0).location, False)
    assert not taken.contiguous
    with pytest.raises(remap.InvalidValueError, match="host memory"):
        taken.numpy()


def test_structured_interface(private: remap.Buffer) -> None:
    """A structured type comes over by `descr`."""
    kind = np.dtype([("x", "f4"), ("y", "i4")])
    taken = remap.as_array(Interface(good(private, typestr="|V8", descr=kind.descr)))
    assert taken.dtype == kind


def test_copies_from_the_interface(private: remap.Buffer, shared: remap.Buffer) -> None:
    """Device memory of another library is copied by the device, after the stream that its interface names."""
    with remap.Stream(0) as stream:
        private.fill(7, stream=stream)
        given = Interface(good(private, stream=stream.handle))
        target = shared.array("f4", (4, 4))
        target.copy_from(given)
        assert (shared.to_host("u1", 64) == 7).all()
        private.fill(9, stream=stream)
        target.copy_from(given, stream=stream)
        stream.synchronize()
    assert (shared.to_host("u1", 64) == 9).all()


WRONG: dict[str, dict[str, Any]] = {
    "version is 4": {"version": 4},
    "mask": {"mask": object()},
    "stream 0": {"stream": 0},
    "stream -1": {"stream": -1},
    "0 or more|do not describe": {"shape": (-1, 4)},
    "do not describe": {"strides": (4,)},
    "TypeError": {"shape": None},
    "TypeError: data type": {"typestr": "float33"},
    "no bytes": {"typestr": "|O8"},
    "no memory at": {"data": (1 << 20, False)},
    "ValueError": {"data": (1, 2, 3)},
    "TypeError.*integer": {"data": ("here", False)},
}


@pytest.mark.parametrize("words", WRONG)
def test_refuses_interfaces(private: remap.Buffer, words: str) -> None:
    """A malformed interface is refused, naming what is wrong with it."""
    with pytest.raises(remap.InvalidValueError, match=words):
        remap.as_array(Interface(good(private, **WRONG[words])))


def test_the_stream_of_an_interface_leaves_nothing(private: remap.Buffer) -> None:
    """What joins the stream that an interface names is given back at once, and warns of nothing."""
    given = Interface(good(private, stream=PER_THREAD_STREAM))
    before = lifetime.live()
    taken = remap.as_array(given)
    assert lifetime.live() == before
    del taken


@pytest.mark.parametrize("missing", ["version", "shape", "typestr", "data"])
def test_refuses_incomplete_interfaces(private: remap.Buffer, missing: str) -> None:
    """Each entry that must be there is named when it is not."""
    interface = good(private)
    del interface[missing]
    with pytest.raises(remap.InvalidValueError, match=missing):
        remap.as_array(Interface(interface))
    with pytest.raises(remap.InvalidValueError, match="not a dictionary"):
        remap.as_array(Interface(5))


def test_absurd_interface(private: remap.Buffer) -> None:
    """Extents whose product overflows are an `OverflowError` (trap 43)."""
    with pytest.raises(OverflowError):
        remap.as_array(Interface(good(private, shape=(2**40, 2**40))))


def test_takes_host_arrays() -> None:
    """NumPy arrays and whatever has the buffer protocol are taken as they are."""
    data = np.arange(6, dtype=np.int64).reshape(2, 3).T
    taken = remap.as_array(data)
    assert (taken.address, taken.strides, taken.location) == (data.ctypes.data, data.strides, Host())
    assert (taken.numpy() == data).all()
    assert remap.as_array(b"abc").read_only
    assert not remap.as_array(bytearray(b"abc")).read_only
    assert remap.as_array(standard.array("d", [1.0, 2.0])).dtype == np.float64
    assert remap.as_array(np.empty((0, 3))).contiguous
    with pytest.raises(TypeError, match="object"):
        remap.as_array(object())


def test_takes_arrays_of_remap(private: remap.Buffer, shared: remap.Buffer) -> None:
    """Arrays of remap itself come over as device memory, or as host memory where they lie there."""
    array = private.array("f4", 4)
    taken = remap.as_array(array)
    assert taken.address == array.address
    assert taken.nbytes == 16
    del array, taken
    assert remap.as_array(shared.array("f4", 4)).location == Host()
