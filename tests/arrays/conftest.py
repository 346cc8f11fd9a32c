"""Memory for the tests of arrays, and the proof that each test gave it all back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import remap
from remap import Host, MiB, lifetime


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """After a test no object of it lives, and the device has as much free memory as before.

    On CUDA the other libraries keep pools, and the context memory of its own: there only the objects tell.
    """
    before = len(lifetime.live())
    free = remap.device(0).memory().free
    yield
    remap.collect()
    assert len(lifetime.live()) == before
    if remap.driver().name == "host":
        assert remap.device(0).memory().free == free


@pytest.fixture
def shared() -> Iterator[remap.Buffer]:
    """Host-located memory that device 0 and the CPU may read and write."""
    with remap.allocate(2 * MiB, resident=Host(), accessing=[0, Host()]) as buffer:
        buffer.fill(0)
        yield buffer


@pytest.fixture
def readable() -> Iterator[remap.Mapping]:
    """Host-located memory that the CPU may only read, and device 0 may write."""
    with (
        remap.create(2 * MiB, at=Host()) as memory,
        remap.reserve(2 * MiB) as addresses,
        addresses.map(memory, access={0: "rw", Host(): "r"}) as mapping,
    ):
        mapping.fill(5)
        yield mapping


@pytest.fixture
def private() -> Iterator[remap.Buffer]:
    """Memory on device 0 that nobody else may touch."""
    with remap.allocate(2 * MiB, resident=0) as buffer:
        buffer.fill(0)
        yield buffer
