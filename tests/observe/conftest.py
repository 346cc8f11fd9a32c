"""A program with one of everything, and the check that nothing of it stays."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

import remap
from remap import MiB, lifetime


@pytest.fixture(autouse=True)
def nothing_left() -> Generator[None]:
    """No test leaves an object, a watcher, or a covered driver behind."""
    before = {thing.serial for thing in lifetime.live()}
    yield
    remap.collect()
    assert not [str(thing.describe()) for thing in lifetime.live() if thing.serial not in before]
    assert not lifetime.watchers
    covered = [name for name, value in vars(remap.driver()).items() if getattr(value, "__name__", "") == name]
    assert not covered


@dataclass(frozen=True)
class Program:
    """Objects of a program that uses most of what there is."""

    buffer: remap.Buffer
    growing: remap.ElasticBuffer
    fork: remap.ElasticBuffer
    ring: remap.RingBuffer
    allocation: remap.PhysicalAllocation
    reservation: remap.Reservation
    mappings: tuple[remap.Mapping, ...]


@pytest.fixture
def program() -> Generator[Program]:
    """A buffer in a group, a growing one with a fork, a ring, and one allocation at three addresses, three rights."""
    with ExitStack() as stack:

        def keep(thing: Any) -> Any:
            stack.callback(thing.close)
            return thing

        with remap.group("weights"):
            buffer = keep(remap.allocate(8 * MiB))
        growing = keep(remap.ElasticBuffer(capacity=64 * MiB))
        growing.resize(6 * MiB)
        fork = keep(growing.fork())
        ring = keep(remap.RingBuffer(2 * MiB, second="r"))
        reservation = keep(remap.reserve(32 * MiB))
        allocation = keep(remap.create(4 * MiB))
        mappings = tuple(
            keep(reservation.map(allocation, offset=at * MiB, access=access))
            for at, access in ((0, {0: "rw"}), (8, {0: "r"}), (16, None))
        )
        yield Program(buffer, growing, fork, ring, allocation, reservation, mappings)
