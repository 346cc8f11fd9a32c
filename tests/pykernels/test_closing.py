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


def launch_and_forget(out: remap.DeviceBuffer) -> None:
    """Launch a kernel that nobody has any more then."""

    @remap.kernel
    def add(out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = out[i] + 1

    add.launch(out, grid=1, block=N)


def test_what_is_collected_meanwhile_tells_nobody() -> None:
    """Code that nobody has any more waits for its stream, and leaves what another kernel did to who asks for that."""
    x, out = remap.DeviceBuffer.zeroed(N), remap.DeviceBuffer.zeroed(N)
    remap.collect()
    launch_and_forget(out)
    for _ in range(2):
        beyond.launch(x, out, grid=1, block=N)
    assert remap.collect() == 1
    with pytest.raises(KernelError, match="nothing lies there") as caught:
        out.close()
    assert "nothing lies there" in caught.value.__notes__[0]
    x.close()
    remap.device().synchronize()


def test_a_kernel_that_went_before_its_driver() -> None:
    """Code of a kernel that nobody has any more, and that was not collected yet, goes with the driver, in silence."""
    gc.collect()
    gc.disable()
    try:
        with remap.DeviceBuffer.zeroed(N) as out:
            launch_and_forget(out)
        remap.use("host")
        gc.collect()
        assert remap.collect() == 0
    finally:
        gc.enable()
