"""Closing memory after a kernel that did something wrong: the memory is given back, and then it is told."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import remap
from remap.errors import KernelError

N = 64


@remap.kernel
def beyond(x: remap.Slice, out: remap.DisjointSlice) -> None:
    i = remap.index_1d()
    out[i] = x[int(i) + 5]


@pytest.fixture(autouse=True)
def on_the_host() -> None:
    """Skip on CUDA, where such a kernel ends the context."""
    if remap.driver().name != "host":
        pytest.skip("a GPU does not tell")


MAKERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: remap.DeviceBuffer.zeroed(N),
    "mapped": lambda: remap.DeviceBuffer.zeroed(N, source="mapped"),
    "box": lambda: remap.DeviceBox.zeroed(N),
}


@pytest.mark.parametrize("name", ["plain", "mapped", "box"])
def test_a_with_block_gives_back_and_tells(name: str) -> None:
    """What a kernel did wrongly is raised where the block ends, and nothing of the block stays open."""
    x, out = MAKERS[name](), MAKERS[name]()
    with pytest.raises(KernelError, match="nothing lies there"):  # noqa: SIM117
        with x, out:
            beyond.launch(x, out, grid=1, block=N)
            if name == "box":
                remap.device().synchronize()
    assert x.closed
    assert out.closed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del x, out
        gc.collect()
    assert not caught


def test_every_kernel_is_told_once() -> None:
    """Of several, the first is raised and the others are its notes; no later wait tells them again."""
    x, out = remap.DeviceBuffer.zeroed(N), remap.DeviceBuffer.zeroed(N)
    for _ in range(3):
        beyond.launch(x, out, grid=1, block=N)
    with pytest.raises(KernelError) as caught:
        out.close()
    assert sum("nothing lies there" in note for note in caught.value.__notes__) == 2
    assert out.closed
    out.close()
    x.close()
    remap.device().synchronize()


def test_the_wait_that_the_caller_names() -> None:
    """The same where `after=` says what to wait for."""
    x, out = remap.DeviceBuffer.zeroed(N), remap.DeviceBuffer.zeroed(N)
    with remap.Stream() as stream:
        beyond.launch(x, out, grid=1, block=N, stream=stream)
        with pytest.raises(KernelError, match="nothing lies there"):
            out.close(after=stream)
        assert out.closed
        x.close(after=None)
