"""Ctrl-C at every place of pools of tensors: none is locked for ever, and no thread stays in a block."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import remap
from remap import MiB, drivers, lifetime

from .test_every_interrupt import every

ROOMS = (str(Path(remap.__file__).parent / "integrations"), contextlib.__file__)
"""Residency has tests of its own."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(
        find_spec("torch") is None or find_spec("numba") is None, reason="needs torch and numba"
    ),
]


@pytest.fixture
def machine() -> Generator[Any]:
    """`remap.torch` on memory that CPU torch can see."""
    if remap.driver().name != "host":
        pytest.skip("what CUDA has in use is machine-wide")
    remap.use("host", memory=64 * MiB, devices=1, coherent=True, integrated=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield remap.torch
        remap.collect()
        remap.torch.status()
    drivers.close()


def enter(machine: Any) -> None:
    """Be in nested blocks of two pools, and outside of both."""
    with machine.pool("p"), machine.pool("q"), machine.outside():
        pass


ACTS: dict[str, Callable[[Any], object]] = {
    "enter": enter,
    "sleep": lambda machine: machine.sleep(["p", "q"]),
    "wake": lambda machine: machine.wake(["p", "q"]),
}


@pytest.mark.filterwarnings("ignore:pool 'p' is put to sleep, and nothing was ever made in it")
@pytest.mark.parametrize("act", ACTS)
def test_interrupted_pools(machine: Any, act: str) -> None:
    """Wherever it is interrupted, the pools can be woken, entered and put to sleep afterwards (5, 13)."""
    with machine.pool("p"), machine.pool("q"):
        kept = machine.empty(100).fill_(3)
    if act == "wake":
        machine.sleep(["p", "q"])
    for done in every(lambda: ACTS[act](machine), ROOMS):
        with pytest.raises(remap.InvalidValueError, match="in no pool"):
            machine.empty(1)
        machine.sleep(["p", "q"])
        machine.wake(["p", "q"])
        assert {one.state for one in machine.status().values()} == {"awake"}, done.where
        with machine.pool("p"), machine.pool("q") as pool:
            tag = machine.buffer_of(machine.empty(1)).tag
        assert tag == "q", done.where
        assert float(kept.sum()) == 300, done.where
        lifetime.drain()
        if act == "wake":
            machine.sleep(["p", "q"])
        assert not pool._visitors, done.where
    machine.wake()


def test_interrupted_captures(machine: Any) -> None:
    """A capture that was interrupted is over: what is freed after it goes back."""
    with machine.pool("p"):
        pass
    memory = remap.integrations.memory.memory()

    def capture() -> None:
        with memory.capturing():
            pass

    for done in every(capture, ROOMS):
        assert not memory._captures, done.where
