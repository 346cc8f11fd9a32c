"""Element types that NumPy has only with ml_dtypes: bfloat16 and float8, which is what models are made of."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator

import numpy as np
import pytest

import remap
from remap.dtypes import ADDED, parse_dtype

ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes")


@pytest.fixture(name="memory")
def _memory() -> Generator[remap.Buffer]:
    """Memory where the CPU may look."""
    with remap.allocate("2MiB", resident=remap.Host(), accessing=[remap.Host(), 0]) as buffer:
        yield buffer


@pytest.mark.parametrize("name", ADDED)
def test_arrays_of_such_types(memory: remap.Buffer, name: str) -> None:
    """They are named as text, viewed, copied in and out, and filled, as other types are."""
    kind = np.dtype(getattr(ml_dtypes, name))
    values = np.array([[1, 2], [4, 0.5]]).astype(kind)
    array = memory.array(name, (2, 2))
    assert array.dtype == kind
    array.copy_from(values)
    assert (memory.to_host(name, (2, 2)) == values).all()
    assert not hasattr(array, "__cuda_array_interface__"), "which has no such type"
    with remap.DeviceBuffer.zeroed(4, name) as typed:
        typed.fill(2)
        assert (typed.to_host() == np.full(4, 2).astype(kind)).all()


def test_bfloat16_by_dlpack(memory: remap.Buffer) -> None:
    """What torch takes is its own bfloat16, without a copy, and remap takes torch's."""
    torch = pytest.importorskip("torch", reason="needs torch")
    array = memory.array(torch.bfloat16, 4)
    array.copy_from(np.array([1, 2, 3, 4]).astype(ml_dtypes.bfloat16))
    tensor = torch.from_dlpack(array) if remap.driver().name == "host" else torch.from_dlpack(array).cpu()
    assert tensor.dtype is torch.bfloat16
    assert tensor.tolist() == [1, 2, 3, 4]
    back = remap.from_dlpack(torch.ones(3, dtype=torch.bfloat16))
    assert (back.dtype, back.shape) == (np.dtype(ml_dtypes.bfloat16), (3,))
    assert parse_dtype(torch.float32) == np.float32
    del tensor


def test_kernels_say_what_they_take(memory: remap.Buffer) -> None:
    """A kernel computes with none of them, and says how to pass the bits."""

    @remap.kernel
    def copy(x: remap.Slice, y: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        y[i] = x[i]

    with remap.DeviceBuffer.zeroed(4, "uint16") as out:
        with pytest.raises(remap.LaunchError, match=r"bfloat16.*array\.view\('uint16'\)"):
            copy.launch(memory.array("bfloat16", 4), out, grid=1, block=4)
        memory.fill(3)
        copy.launch(memory.array("bfloat16", 4).view("uint16"), out, grid=1, block=4)
        assert (out.to_host() == 0x0303).all()


WITHOUT = """
import sys
sys.modules["ml_dtypes"] = None  # as if it were not installed
import remap
try:
    remap.allocate("2MiB").array("bfloat16")
except remap.InvalidValueError as error:
    print(error)
"""


def test_without_ml_dtypes() -> None:
    """Where the package is missing, it is named, with a way that needs none."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert "ml_dtypes" in done.stdout
    assert "array('uint16')" in done.stdout
    assert "torch.bfloat16" in done.stdout


def test_what_is_no_type(memory: remap.Buffer) -> None:
    """What NumPy does not take for a type is a TypeError that says so."""
    for wrong in ("bfloat17", "torch.nothing", 3.0):
        with pytest.raises(TypeError, match="a dtype is one of NumPy's"):
            memory.array(wrong)  # type: ignore[arg-type]
