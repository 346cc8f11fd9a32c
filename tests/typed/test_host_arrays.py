"""Typed buffers in kernels and groups, and host arrays where devices do not reach them (D8)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import remap
from remap import kernels
from remap.errors import LaunchError
from remap.kernels import Pointer
from remap.testing.stage import Stage
from remap.testing.typed import gate

pytest_plugins = ("remap.testing.stage",)

N = 1000
SHAPE: dict[str, Any] = {"grid": 4, "block": 256}


def add(launch: object, a: Pointer, b: Pointer, c: Pointer, n: int) -> None:
    """Do what `vector_add` does."""
    c.write("float32", int(n))[:] = a.read("float32", int(n)) + b.read("float32", int(n))


@pytest.fixture(name="vector_add")
def _vector_add(stage: Stage) -> Iterator[remap.Kernel]:
    with remap.load(kernels.shipped("vector_add").with_suffix(".ptx"), device=0) as module:
        kernel = module.function("vector_add")
        kernel.host(add)
        yield kernel


def numbers(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return random numbers."""
    return np.random.default_rng(seed).random(N, np.float32)


def test_typed_buffers_in_kernels(stage: Stage, vector_add: remap.Kernel) -> None:
    """Buffers, boxes, slices, pinned and managed memory go to a kernel alike, and closing waits for it."""
    a, b = numbers(1), numbers(2)
    with remap.Stream(0) as stream:
        first = remap.DeviceBuffer.from_host(a, device=0)
        second = remap.DeviceBox.from_host(b, stream=stream)
        with remap.pinned(N, "float32") as third:
            with gate(stream):
                vector_add.launch(first, second, third, N, **SHAPE, stream=stream)
            assert (third.numpy() == a + b).all()
            gc.collect()
        out = remap.DeviceBuffer.zeroed((3, N), device=0)
        vector_add.launch(first, second, out[1], N, **SHAPE, stream=stream)
        assert (out.to_host() == [np.zeros(N), a + b, np.zeros(N)]).all()
        for memory in (first, second, out):
            memory.close()
        stream.synchronize()
    remap.DeviceBox.trim(0)


def test_host_arrays_are_refused_where_devices_do_not_reach_them(
    stage: Stage, vector_add: remap.Kernel
) -> None:
    """Without HMM and ATS a host array is refused, with the reason and what to do instead (D8)."""
    capabilities = remap.device(0).capabilities
    if capabilities["hmm"] or capabilities["ats"]:
        pytest.skip("devices here reach host memory: tests/typed/test_hmm.py is for them")
    with pytest.raises(LaunchError, match=r"does not reach.*DeviceBuffer\.from_host") as caught:
        vector_add.launch(numbers(1), numbers(2), np.zeros(N, np.float32), N, **SHAPE)
    assert capabilities["hmm"].reason in str(caught.value)


def test_groups_take_mapped_memory(stage: Stage) -> None:
    """A typed buffer that is made in a group can sleep, however small, and keeps address and contents."""
    array = numbers(3)
    with remap.group("typed") as group:
        buffer = remap.DeviceBuffer.from_host(array, device=0)
    assert group.buffers == (buffer.owner,)
    address = buffer.address
    remap.pause(buffer, keep="host")
    with pytest.raises(remap.PausedError):
        buffer.to_host()
    remap.resume(buffer)
    assert buffer.address == address
    assert (buffer.to_host() == array).all()
    buffer.close()


@pytest.mark.parametrize("make", [remap.DeviceBox.zeroed, remap.pinned, remap.managed])
def test_other_memory_cannot_sleep_and_says_why(stage: Stage, make: Any) -> None:
    """Pool, pinned and managed memory are refused by name, with the reason."""
    with make(10) as memory, pytest.raises(remap.InvalidValueError, match="its address belongs to its bytes"):
        remap.pause(memory)
    remap.device().synchronize()
    remap.DeviceBox.trim()
