"""DLPack in both directions: versions, flags, devices, and capsules that lie."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import remap
from remap import Host, dlpack
from remap.exports import ExportError

CPU = (1, 0)
name_of: Any = ctypes.pythonapi.PyCapsule_GetName
pointer_of: Any = ctypes.pythonapi.PyCapsule_GetPointer


def structure(capsule: Any) -> Any:
    """Return what a capsule points to, to read it or to damage it."""
    name = name_of(capsule)
    return dlpack._STRUCTURES[name].from_address(pointer_of(capsule, name))


class Producer:
    """An array of another library: hands out the capsule it was given, and says where it lies."""

    def __init__(self, capsule: Any, device: tuple[int, int] = CPU) -> None:
        self.capsule = capsule
        self.device = device
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        return self.capsule


class OldProducer:
    """A library from before DLPack had versions: knows `stream` only."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        assert stream is None
        return self.array.__dlpack__()


# -- to others --


def test_numpy_takes_it(shared: remap.Buffer) -> None:
    """`numpy.from_dlpack` looks at the memory itself, may write, and holds the buffer open."""
    array = shared.array("int16", (4, 5))
    view = np.from_dlpack(array)
    assert view.ctypes.data == array.address
    assert view.shape == (4, 5)
    assert view.dtype == np.int16
    view[:] = 3
    assert (array.to_host() == 3).all()
    with pytest.raises(remap.InUseError, match="1 array of"):
        shared.close()
    del view
    shared.close()


def test_versions(shared: remap.Buffer) -> None:
    """A consumer that names 1.0 or newer gets a versioned capsule, any other the old kind."""
    array = shared.array("f4", 8)
    assert array.__dlpack_device__() == CPU
    for asked, name in (
        (None, dlpack.PLAIN),
        ((0, 8), dlpack.PLAIN),
        ((1, 0), dlpack.VERSIONED),
        ((2, 3), dlpack.VERSIONED),
    ):
        capsule = array.__dlpack__(max_version=asked)
        assert name_of(capsule) == name
        managed = structure(capsule)
        tensor = managed.tensor
        assert (tensor.data, tensor.ndim, tensor.shape[0], tensor.byte_offset) == (array.address, 1, 8, 0)
        assert (tensor.device.type, tensor.device.index) == CPU
        assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (2, 32, 1)
        if name == dlpack.VERSIONED:
            assert managed.major == 1
            assert managed.flags == 0


def test_read_only(readable: remap.Mapping) -> None:
    """Memory that the CPU may only read is flagged so; a capsule that could not say it is refused."""
    array = readable.array("u1", 8)
    assert structure(array.__dlpack__(max_version=(1, 0))).flags & dlpack.READ_ONLY
    assert not np.from_dlpack(array).flags.writeable
    for asked in (None, (0, 8)):
        with pytest.raises(BufferError, match="read-only"):
            array.__dlpack__(max_version=asked)


def test_never_consumed(shared: remap.Buffer) -> None:
    """A capsule that nobody consumed lets go of the memory when it is dropped."""
    capsule = shared.array("u1", 8).__dlpack__()
    with pytest.raises(remap.InUseError):
        shared.close()
    del capsule
    shared.close()


def test_dropped_while_an_error_is_on_its_way(shared: remap.Buffer) -> None:
    """A consumer that refuses drops the capsule in the middle of its own error, and that error survives."""
    array = shared.array("u1", 8)
    with pytest.raises(TypeError, match="no len"):
        len(array.__dlpack__(max_version=(1, 0)))
    with pytest.raises(TypeError, match="no len"):
        len(array.__dlpack__())
    shared.close()


def test_consumer_in_another_thread(shared: remap.Buffer) -> None:
    """The deleter may be called by any thread."""
    views = [np.from_dlpack(shared.array("u1", 64)) for _ in range(50)]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    shared.close()


def test_consumer_outlives_the_interpreter() -> None:
    """A view that is alive at exit does no harm: no error, no message, no crash."""
    script = (
        "import remap, numpy as np, sys\n"
        "from remap import Host\n"
        "b = remap.allocate(1, resident=Host(), accessing=[0, Host()])\n"
        "sys.kept = np.from_dlpack(b.array('u1', 8))\n"
        "sys.other = b.array('u1', 8).__dlpack__(max_version=(1, 0))\n"
        "sys.foreign = remap.from_dlpack(np.arange(3))\n"
        "print('end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_copies_to_the_cpu(private: remap.Buffer) -> None:
    """A consumer that asks for the CPU gets a copy, flagged so, unless it forbids one."""
    array = private.array("f4", 8)
    array.copy_from(np.arange(8, dtype=np.float32))
    copied = structure(array.__dlpack__(max_version=(1, 0), dl_device=CPU))
    assert copied.flags & 2
    assert copied.tensor.data != array.address
    assert (np.from_dlpack(array, device="cpu") == np.arange(8)).all()
    with pytest.raises(BufferError):
        array.__dlpack__(dl_device=CPU, copy=False)
    private.close()


def test_copy_on_request(shared: remap.Buffer) -> None:
    """`copy=True` copies where no copy was needed, and what it gives does not hold the buffer open."""
    copied = np.from_dlpack(shared.array("u1", 8), copy=True)
    copied[:] = 1
    assert not shared.to_host("u1", 8).any()
    shared.close()


def test_refusals(shared: remap.Buffer) -> None:
    """Other devices, streams of the CPU and types that DLPack lacks are refused, by an error of both worlds."""
    array = shared.array("f4", 8)
    refused: list[dict[str, Any]] = [
        {"dl_device": (10, 0)},
        {"dl_device": (3, 0)},
        {"dl_device": (2, 63)},
        {"dl_device": CPU, "stream": 5},
    ]
    for options in refused:
        with pytest.raises(BufferError) as caught:
            array.__dlpack__(**options)
        assert isinstance(caught.value, ExportError)
    for dtype in ("M8[s]", "S4", ">f4", [("x", "f4")]):
        with pytest.raises(BufferError, match="byte order"):
            shared.array(dtype, 2).__dlpack__()
    shared.close()


def test_simulated_devices_are_not_named(private: remap.Buffer) -> None:
    """On the host driver, memory that the CPU may not look at has no device that DLPack could name."""
    if remap.driver().name != "host":
        pytest.skip("on CUDA such memory has a device")
    with pytest.raises(BufferError, match="to_host"):
        private.array().__dlpack_device__()
    with pytest.raises(BufferError, match="to_host"):
        np.from_dlpack(private.array())
    private.close()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1)])
def test_odd_shapes(shared: remap.Buffer, shape: tuple[int, ...]) -> None:
    """Arrays of no dimensions and of no elements go through in both directions."""
    view = np.from_dlpack(shared.array("f8", shape))
    assert view.shape == shape
    assert remap.from_dlpack(view).shape == shape


# -- from others --


def test_takes_numpy() -> None:
    """A NumPy array comes over with its address, type, strides and owner; dropping it lets the owner go."""
    source = np.arange(24, dtype=np.uint16).reshape(4, 6)[::2, ::3]
    taken = remap.from_dlpack(source)
    assert (taken.address, taken.shape, taken.strides) == (source.ctypes.data, source.shape, source.strides)
    assert (taken.dtype, taken.location, taken.read_only) == (source.dtype, Host(), False)
    assert (taken.size, taken.nbytes, taken.contiguous) == (4, 8, False)
    assert "(2, 2) of uint16 on host" in repr(taken)
    before = sys.getrefcount(source)
    view = taken.numpy()
    assert (view == source).all()
    del taken
    assert sys.getrefcount(source) == before
    del view
    assert sys.getrefcount(source) == before - 1


def test_read_only_comes_over() -> None:
    """A producer's read-only flag is kept."""
    source = np.arange(4)
    source.flags.writeable = False
    taken = remap.from_dlpack(source)
    assert taken.read_only
    assert not taken.numpy().flags.writeable


def test_asks_for_versions_and_does_without() -> None:
    """Remap asks for versioned capsules, and takes a producer that does not know them."""
    data = np.arange(4)
    producer = Producer(data.__dlpack__(max_version=(1, 0)))
    assert (remap.from_dlpack(producer).numpy() == data).all()
    assert producer.asked == [{"max_version": dlpack.NEWEST}]
    assert (remap.from_dlpack(OldProducer(data)).numpy() == data).all()


def test_takes_bare_capsules() -> None:
    """A capsule by itself is taken, and marked as used so that its destructor leaves the tensor alone."""
    for asked in (None, (1, 0)):
        capsule = np.arange(4).__dlpack__(max_version=asked)
        taken = remap.from_dlpack(capsule)
        assert name_of(capsule) in (b"used_dltensor", b"used_dltensor_versioned")
        del capsule
        assert taken.numpy().sum() == 6


def test_used_twice() -> None:
    """The second consumer of a capsule is refused, and the first one keeps its array."""
    capsule = np.arange(4).__dlpack__()
    taken = remap.from_dlpack(capsule)
    with pytest.raises(remap.InvalidValueError, match="used before"):
        remap.from_dlpack(capsule)
    assert taken.numpy().sum() == 6


def test_one_of_many_threads_gets_it() -> None:
    """Of eight threads that take one capsule, exactly one succeeds."""
    capsule = np.arange(4).__dlpack__()
    start = threading.Barrier(8)
    taken: list[Any] = []
    refused: list[Exception] = []

    def take() -> None:
        start.wait()
        try:
            taken.append(remap.from_dlpack(capsule))
        except remap.InvalidValueError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 7)


def test_foreign_capsule() -> None:
    """A capsule of something else is refused by its name."""
    import datetime

    with pytest.raises(remap.InvalidValueError, match="datetime"):
        remap.from_dlpack(datetime.datetime_CAPI)


DAMAGE: dict[str, Any] = {
    "version 9.0": lambda managed: setattr(managed, "major", 9),
    "-1 dimensions": lambda managed: setattr(managed.tensor, "ndim", -1),
    "1000000 dimensions": lambda managed: setattr(managed.tensor, "ndim", 1000000),
    "shape is a null pointer": lambda managed: setattr(managed.tensor, "shape", None),
    "0 or more": lambda managed: managed.tensor.shape.__setitem__(0, -4),
    "data pointer is null": lambda managed: setattr(managed.tensor, "data", None),
    "4 lanes": lambda managed: setattr(managed.tensor.dtype, "lanes", 4),
    "0 bits": lambda managed: setattr(managed.tensor.dtype, "bits", 0),
    "4 bits": lambda managed: setattr(managed.tensor.dtype, "bits", 4),
    "type code 4": lambda managed: setattr(managed.tensor.dtype, "code", 4),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_hostile_tensor(words: str) -> None:
    """A tensor that cannot be is refused by what is wrong with it, and its capsule still gives the memory back."""
    source = np.arange(4)
    before = sys.getrefcount(source)
    capsule = source.__dlpack__(max_version=(1, 0))
    managed = structure(capsule)
    kept = bytes(managed)
    DAMAGE[words](managed)
    with pytest.raises(remap.InvalidValueError, match=words):
        remap.from_dlpack(capsule)
    assert name_of(capsule) == dlpack.VERSIONED
    ctypes.memmove(ctypes.addressof(managed), kept, len(kept))
    del managed, capsule
    assert sys.getrefcount(source) == before


def test_absurd_extents() -> None:
    """Extents whose product overflows are refused when the capsule is used, and the memory goes back (trap 43)."""
    source = np.arange(4)
    before = sys.getrefcount(source)
    capsule = source.reshape(2, 2).__dlpack__()
    tensor = structure(capsule).tensor
    tensor.shape[0] = tensor.shape[1] = 2**40
    with pytest.raises(OverflowError):
        remap.from_dlpack(capsule)
    del capsule
    gc.collect()
    assert sys.getrefcount(source) == before


@pytest.mark.parametrize("device", [(4, 0), (10, 0), (2, 99)])
def test_other_devices(device: tuple[int, int]) -> None:
    """Arrays on devices that the driver does not have are refused before a capsule is asked for."""
    producer = Producer(None, device)
    with pytest.raises(remap.InvalidValueError, match="device"):
        remap.from_dlpack(producer)
    assert producer.asked == []


def test_pinned_memory_is_host_memory() -> None:
    """What CUDA pinned for the CPU (kDLCUDAHost) counts as the host's."""
    assert remap.from_dlpack(Producer(np.arange(4).__dlpack__(), (3, 0))).location == Host()


def test_round_trip(shared: remap.Buffer) -> None:
    """An array of remap comes back as the same memory, and holds the buffer until the end."""
    array = shared.array("f4", 4)
    taken = remap.from_dlpack(np.from_dlpack(array))
    assert taken.address == array.address
    with pytest.raises(remap.InUseError):
        shared.close()
    del taken
    shared.close()
