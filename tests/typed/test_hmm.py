"""Host arrays by reference (D8), on a machine whose devices reach them: the host driver has HMM if it is asked for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import remap
from remap.errors import LaunchError
from remap.testing.bench import wait_until
from remap.testing.stage import Stage
from remap.testing.typed import gate

from . import test_host_arrays as plain
from .test_host_arrays import SHAPE, N, numbers

pytest_plugins = ("remap.testing.stage",)

_vector_add = plain._vector_add  # the fixture


@pytest.fixture(scope="module", autouse=True)
def _hmm(_warm: None) -> Iterator[None]:
    if remap.driver().name != "host":
        capabilities = remap.device(0).capabilities
        if not (capabilities["hmm"] or capabilities["ats"]):
            pytest.skip(capabilities["hmm"].reason)
        yield
        return
    remap.use("host", capabilities={"hmm": True})
    yield
    remap.use("host")


def test_host_arrays_go_as_pointers(stage: Stage, vector_add: remap.Kernel) -> None:
    """A host array goes as a pointer, beside memory of the device; one with gaps is refused."""
    a, b = numbers(1), numbers(2)
    out = np.zeros(N, np.float32)
    with remap.DeviceBuffer.from_host(b, device=0) as second:
        vector_add.launch(a, second, out, N, **SHAPE)
        remap.device(0).synchronize()
    assert (out == a + b).all()
    with pytest.raises(LaunchError, match="one after the other"):
        vector_add.launch(np.zeros((N, 2), np.float32)[:, 0], b, out, N, **SHAPE)


@remap.kernel
def double(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Write twice what is read."""
    i = remap.index_1d()
    out[i] = x[i] * 2


def test_host_arrays_go_to_kernels_in_python(stage: Stage) -> None:
    """A kernel in Python reads and writes host arrays in place."""
    a, out = numbers(1), np.zeros(N, np.float32)
    double.launch(a, out, **SHAPE)
    remap.device(0).synchronize()
    assert (out == a * 2).all()


def test_host_arrays_that_are_not_aligned_are_refused(stage: Stage) -> None:
    """NumPy takes elements at any address, and a device does not."""
    odd = np.zeros(4 * N + 1, np.uint8)[1:].view(np.float32)
    for given in ((odd, numbers(1)), (numbers(1), odd)):
        with pytest.raises(LaunchError, match="at a multiple of 4 bytes"):
            double.launch(*given, **SHAPE)
    remap.device(0).synchronize()
    assert not odd.any()


def test_host_arrays_are_kept(stage: Stage, vector_add: remap.Kernel) -> None:
    """The arrays of a launch live until the kernel has run, and no longer."""
    array, out = numbers(1), np.zeros(N, np.float32)
    reference = weakref.ref(array)
    with remap.Stream(0) as stream:
        with gate(stream):
            vector_add.launch(array, array, out, N, **SHAPE, stream=stream)
            del array
            stage.recording.forget()
            gc.collect()
            assert reference() is not None
        stream.synchronize()
    assert (out == numbers(1) * 2).all()
    assert wait_until(lambda: reference() is None)
