"""`remap.advise`: the four recommendations of memory kinds, and buffer against box (D7, D3)."""

from __future__ import annotations

import pytest

import remap
from remap.errors import InvalidValueError
from remap.testing.children import run_in_child
from remap.testing.typed import advice_with


def test_large_arrays() -> None:
    """Large arrays are copied explicitly."""
    assert "explicit copies" in remap.advise("4GiB").memory
    assert "explicit copies" in remap.advise("4GiB", read_only=True).memory


def test_iterating_between_cpu_and_gpu() -> None:
    """What both work on in turns is double-buffered."""
    advice = remap.advise("64MiB", alternating=True)
    assert "double-buffered" in advice.memory
    assert "examples/double_buffer.py" in advice.write


@pytest.mark.parametrize(("size", "options"), [("1KiB", {"read_only": True}), ("1GiB", {"prototype": True})])
def test_where_devices_reach_host_memory(size: str, options: dict[str, bool]) -> None:
    """Small read-only configuration and prototypes use host arrays, or what comes next with the reason."""
    advice = remap.advise(size, **options)
    capabilities = remap.device().capabilities
    if capabilities["hmm"]:
        assert advice.memory.startswith("HMM")
        assert not advice.instead_of
    elif capabilities["ats"]:
        assert advice.memory.startswith("ATS")
    else:
        assert advice.memory in {"pinned memory", "managed memory"}
        assert capabilities["hmm"].reason in advice.instead_of


def test_without_hmm() -> None:
    """A device without HMM gets the next best, and is told what it lacks."""
    small, prototype = run_in_child(advice_with, False)
    assert small.memory == "pinned memory"
    assert prototype.memory == "managed memory"
    assert "made for them" in small.instead_of
    assert "made for them" in str(prototype)


def test_with_hmm() -> None:
    """A host driver that was told to have HMM is advised to use it."""
    for advice in run_in_child(advice_with, True):
        assert advice.memory.startswith("HMM")
        assert not advice.instead_of


def test_many_short_lived_arrays() -> None:
    """What is made and dropped again and again comes from the pool."""
    assert remap.advise("1MiB", short_lived=True).memory == "DeviceBox"


def test_bad_sizes() -> None:
    """A size that is none is refused."""
    with pytest.raises(InvalidValueError):
        remap.advise(-1)
