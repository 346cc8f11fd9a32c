# pyright: reportMissingImports=false
"""CuPy, torch and Numba take arrays of remap, and remap takes theirs; on the machine that has them and a GPU."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import remap
from remap import Host

pytestmark = pytest.mark.cuda


def framework(name: str) -> Any:
    """Import a framework, or skip with what is missing."""
    try:
        with warnings.catch_warnings():  # what a framework does while it loads is not ours to judge
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:  # numba-cuda raises it beside a NumPy that is too new for it
        pytest.skip(f"needs {name}: {error}")
    except AttributeError as error:
        pytest.skip(f"{name} does not work with NumPy {np.__version__}: {error}")


@pytest.fixture
def memory() -> Iterator[remap.Buffer]:
    """Device memory; a test makes its own array of it, which ends with the test and so holds nothing open after it."""
    with remap.allocate(4000, resident=0) as buffer:
        buffer.copy_from_host(np.arange(1000, dtype=np.float32))
        yield buffer


def array_of(memory: remap.Buffer) -> remap.DeviceArray:
    """Return 1000 floats."""
    return memory.array("float32", (10, 100))


def test_cupy(memory: remap.Buffer) -> None:
    """CuPy computes on the memory itself, by either protocol, and holds the buffer open."""
    numbers = array_of(memory)
    cupy = framework("cupy")
    for take in (cupy.asarray, cupy.from_dlpack):
        taken = take(numbers)
        assert taken.data.ptr == numbers.address
        assert taken.shape == numbers.shape
        taken += 1
        cupy.cuda.Device(0).synchronize()
        with pytest.raises(remap.InUseError):
            memory.close()
        del taken
    assert (numbers.to_host().ravel() == np.arange(2, 1002)).all()


def test_cupy_comes_over(memory: remap.Buffer) -> None:
    """Memory of CuPy is a source of copies, by either protocol."""
    numbers = array_of(memory)
    cupy = framework("cupy")
    source = cupy.full((10, 100), 3, dtype="float32")
    taken = remap.as_array(source)
    assert (taken.address, taken.location) == (source.data.ptr, remap.device(0).location)
    numbers.copy_from(source)
    assert (numbers.to_host() == 3).all()
    with pytest.raises(remap.InvalidValueError, match="contiguous"):
        numbers.copy_from(cupy.zeros((100, 10), dtype="float32").T)


def test_torch(memory: remap.Buffer) -> None:
    """Torch computes on the memory itself, by either protocol, and holds the buffer open."""
    numbers = array_of(memory)
    torch = framework("torch")
    for take in (torch.from_dlpack, lambda array: torch.as_tensor(array, device="cuda:0")):
        taken = take(numbers)
        assert taken.data_ptr() == numbers.address
        assert taken.device == torch.device("cuda", 0)
        taken += 1
        torch.cuda.synchronize()
        with pytest.raises(remap.InUseError):
            memory.close()
        del taken
    assert (numbers.to_host().ravel() == np.arange(2, 1002)).all()


def test_torch_comes_over(memory: remap.Buffer) -> None:
    """Tensors on the device and on the CPU are sources of copies, in the order of the stream they were made on."""
    numbers = array_of(memory)
    torch = framework("torch")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        source = torch.zeros(10, 100, device="cuda:0")
        for _ in range(50):
            source += 1
        numbers.copy_from(source)
    assert (numbers.to_host() == 50).all()
    numbers.copy_from(torch.full((10, 100), 4.0))
    assert (numbers.to_host() == 4).all()


def test_torch_on_the_host() -> None:
    """Host-located memory is a CPU tensor in torch, and a CUDA tensor on request."""
    torch = framework("torch")
    with remap.allocate(1, resident=Host(), accessing=[0, Host()]) as buffer:
        array = buffer.array("float32", 16)
        tensor = torch.from_dlpack(array)
        assert tensor.device.type == "cpu"
        tensor.fill_(5)
        other = torch.as_tensor(array, device="cuda:0")
        assert other.data_ptr() == array.address
        assert float(other.sum()) == 80
        del tensor, other, array


@pytest.mark.filterwarnings("ignore:.*low occupancy")
def test_numba(memory: remap.Buffer) -> None:
    """A Numba kernel writes into the memory itself."""
    numbers = array_of(memory)
    cuda = framework("numba.cuda")

    @cuda.jit  # type: ignore[untyped-decorator]
    def add_one(values: Any) -> None:
        i = cuda.grid(1)
        if i < values.size:
            values[i] += 1

    flat = numbers.reshape(1000)
    taken = cuda.as_cuda_array(flat)
    assert taken.device_ctypes_pointer.value == numbers.address
    add_one[4, 256](taken)
    cuda.synchronize()
    with pytest.raises(remap.InUseError):
        memory.close()
    del taken, flat
    assert (numbers.to_host().ravel() == np.arange(1, 1001)).all()


def test_numba_comes_over(memory: remap.Buffer) -> None:
    """Memory of Numba is a source of copies."""
    numbers = array_of(memory)
    cuda = framework("numba.cuda")
    numbers.copy_from(cuda.to_device(np.full((10, 100), 6, np.float32)))
    assert (numbers.to_host() == 6).all()


def test_read_only_memory() -> None:
    """Memory that the device may only read is refused by consumers that cannot respect it, or comes over as such."""
    cupy = framework("cupy")
    with remap.allocate(1, resident=0, access="r") as buffer:
        array = buffer.array("float32", 16)
        assert array.__cuda_array_interface__["data"][1] is True
        capsule = array.__dlpack__(max_version=(1, 0))
        with pytest.raises(BufferError):
            array.__dlpack__()
        del capsule
        assert cupy is not None
        del array
