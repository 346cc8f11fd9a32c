"""CuPy and Numba: arrays whose memory sleeps and wakes under them; on a GPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import remap

from .conftest import need

pytestmark = pytest.mark.cuda


def test_cupy_allocates_in_a_group() -> None:
    """Arrays made inside lie in buffers of the group, divided by CuPy's pool, and sleep and wake with it."""
    cupy = need("cupy")
    from remap.integrations import cupy as ours

    with ours.allocator("arrays") as pool:
        numbers = cupy.arange(1 << 20, dtype=cupy.float32)
        others = cupy.ones(10)
    group = remap.groups()["arrays"]
    address = numbers.data.ptr
    assert any(buffer.address <= address < buffer.address + buffer.size for buffer in group.buffers)
    remap.pause("arrays")
    remap.resume("arrays")
    assert numbers.data.ptr == address
    assert float(numbers.sum()) == float(cupy.arange(1 << 20, dtype=cupy.float32).sum())
    assert float(others.sum()) == 10
    del numbers, others
    gc.collect()
    pool.free_all_blocks()
    gc.collect()
    remap.collect()
    assert "arrays" not in remap.groups()


def test_cupy_is_told_of_memory_that_is_short() -> None:
    """Running out is CuPy's own error (trap 9)."""
    cupy = need("cupy")
    from remap.integrations import cupy as ours

    with ours.allocator("arrays"), pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cupy.empty(1 << 42, dtype=cupy.uint8)


def test_a_buffer_as_a_cupy_array() -> None:
    """No copy, and the buffer stays open while the array lives (trap 26)."""
    cupy = need("cupy")
    from remap.integrations import cupy as ours

    with remap.allocate(4096, resident=0) as buffer:
        array = ours.array(buffer, "float32", (16, 16))
        array[...] = 3
        cupy.cuda.Device(0).synchronize()
        assert (buffer.to_host("float32", 256) == 3).all()
        with pytest.raises(remap.InUseError):
            buffer.close()
        del array
        gc.collect()


NUMBA = """
import numpy as np, remap
from numba import cuda
from remap.integrations import numba as ours
cuda.set_memory_manager(ours.memory_manager("arrays"))

@cuda.jit
def double(values):
    i = cuda.grid(1)
    if i < values.size:
        values[i] *= 2

array = cuda.to_device(np.arange(1000, dtype=np.float32))
double[4, 256](array)
cuda.synchronize()
(buffer,) = remap.groups()["arrays"].buffers
assert buffer.address == array.device_ctypes_pointer.value
remap.pause("arrays"); remap.resume("arrays")
double[4, 256](array)
assert (array.copy_to_host() == np.arange(1000) * 4).all()
assert cuda.current_context().get_memory_info().total == remap.device(0).memory().total
view = ours.array(buffer, "float32", 1000)
assert (view.copy_to_host() == np.arange(1000) * 4).all()
del view, array, buffer
remap.collect()
assert not remap.groups()
print("right")
"""


def test_numba_allocates_in_a_group() -> None:
    """Numba's arrays are buffers of the group, under an external memory manager; in a process of its own."""
    import subprocess
    import sys

    need("numba.cuda")
    done = subprocess.run(
        [sys.executable, "-c", NUMBA], capture_output=True, text=True, check=False, timeout=110
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_torch_memory_saver_itself(torch: Any) -> None:
    """Where the library is installed it takes remap as its mode, and a graph's memory pauses without preload."""
    import subprocess
    import sys

    assert torch is not None
    need("torch_memory_saver")
    code = """
import remap, torch
from remap.integrations import tms
tms.install()
from torch_memory_saver import torch_memory_saver as saver
with saver.region(tag="weights", enable_cpu_backup=True):
    weights = torch.full((1 << 22,), 3.0, device="cuda")
graph = torch.cuda.CUDAGraph()
with saver.cuda_graph(graph, tag="graph"):
    result = weights * 2
saver.pause(); saver.resume()
graph.replay(); torch.cuda.synchronize()
assert float(weights.mean()) == 3 and float(result.mean()) == 6
print("right")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=110
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
