"""Ctrl-C at every place of what is around buffers: groups and traces, and what is made to be kept by a program."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import remap
from remap import lifetime

from .test_every_interrupt import SIZE, driver, every

__all__ = ["driver"]  # the fixture of these tests, too

SOURCE = Path(remap.__file__).parent

# Where an interrupt meets a finaliser, Python can only print it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def covered() -> list[str]:
    """Return the methods of the driver that a trace listens to."""
    return [name for name, call in vars(remap.driver()).items() if call.__class__.__name__ == "function"]


def test_interrupted_traces() -> None:
    """A trace that is interrupted as it begins is over, and one that ends can be ended: nobody pays after it."""

    def act() -> None:
        with traces[-1]:
            remap.allocate(SIZE).close()

    rooms = (str(SOURCE / "observe"), contextlib.__file__)
    traces = [remap.trace()]
    for done in every(act, rooms):
        traces[-1].end()
        assert not covered(), done.where
        assert not lifetime.watchers, done.where
        with remap.trace() as another:
            remap.allocate(SIZE).close()
        assert any(call.name == "create" for call in another.calls), done.where
        assert not covered(), done.where
        traces.append(remap.trace())


def test_interrupted_groups() -> None:
    """What is made after a block that was interrupted, also as it began, is in no group."""

    def act() -> None:
        with remap.group("weights"):
            pass

    rooms = (
        str(SOURCE / "residency"),
        str(SOURCE / "lifetime.py"),
        str(SOURCE / "buffers" / "sources.py"),
        contextlib.__file__,
    )
    for done in every(act, rooms):
        with remap.allocate(SIZE) as buffer:
            assert buffer._groups == (), done.where
        with remap.DeviceBuffer.zeroed(10, "uint8") as small:
            assert not isinstance(small.owner, remap.Buffer), done.where
