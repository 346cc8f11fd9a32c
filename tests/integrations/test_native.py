"""The native callbacks: what they record, what they do when the driver refuses, and that they never need the GIL."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import pytest

import remap
from remap import MiB
from remap.integrations import layout
from remap.integrations.layout import Options, State

from . import libc

BUDGET = 64 * MiB


@pytest.fixture(scope="module")
def table() -> Iterator[Any]:
    """A table over libc's memory, with one pool on device 0, and what is left of its budget."""
    from .conftest import need

    need("numba")
    from remap.integrations.table import Table

    functions, left = libc.libc_functions(BUDGET)
    table = Table(functions)
    pool = table.add_pool("test", {0: Options(b"", b"", 0, 2 * MiB, 1)})
    yield table, pool, left
    assert left[0] == BUDGET, "every test gives back what it took"


def calls(table: Any, pool: int) -> tuple[Any, Any]:
    """Return a pool's callbacks as Python calls."""
    allocate, free = table.entry(pool)
    i64 = ctypes.c_int64
    return (
        ctypes.CFUNCTYPE(i64, i64, ctypes.c_int, i64)(allocate),
        ctypes.CFUNCTYPE(None, i64, i64, ctypes.c_int, i64)(free),
    )


def test_records(table: Any) -> None:
    """An allocation is recorded with its rounded size, its pool and a serial number of its own; a free empties it."""
    one, pool, left = table
    allocate, free = calls(one, pool)
    first, second = allocate(3 * MiB, 0, 0), allocate(1, 0, 0)
    records = one.records(0)
    assert [record.address for record in records] == [first, second]
    assert [record.size for record in records] == [4 * MiB, 2 * MiB]
    assert [record.requested for record in records] == [3 * MiB, 1]
    assert [record.pool for record in records] == [pool, pool]
    assert records[0].serial < records[1].serial
    assert one.counters(0).live_bytes == BUDGET - left[0] == 6 * MiB
    free(first, 3 * MiB, 0, 0)
    third = allocate(1, 0, 0)
    assert one.records(0)[0].slot == records[0].slot
    assert one.records(0)[0].serial > records[1].serial
    free(second, 1, 0, 0)
    free(third, 1, 0, 0)
    assert one.records(0) == []


def test_out_of_memory_is_null(table: Any) -> None:
    """What the driver refuses is a null pointer and a counted failure, with nothing left behind (traps 4, 9)."""
    one, pool, left = table
    allocate, _ = calls(one, pool)
    before = one.counters(0)
    assert allocate(BUDGET + 1, 0, 0) == 0
    after = one.counters(0)
    assert (after.failed - before.failed, after.last_error) == (1, 2)
    assert left[0] == BUDGET
    assert one.records(0) == []


@pytest.mark.parametrize(("size", "device"), [(0, 0), (-1, 0), (1, 1), (1, layout.DEVICES - 1)])
def test_what_no_pool_was_made_for(table: Any, size: int, device: int) -> None:
    """No size, or a device that the pool has no options for: null, and no driver call."""
    one, pool, left = table
    allocate, _ = calls(one, pool)
    assert allocate(size, device, 0) == 0
    assert left[0] == BUDGET


def test_a_held_segment_is_not_unmapped(table: Any) -> None:
    """While Python holds a segment, freeing only marks it; what is forgotten then can be used again."""
    one, pool, left = table
    allocate, free = calls(one, pool)
    address = allocate(2 * MiB, 0, 0)
    (record,) = one.records(0)
    assert one.hold(0, record)
    assert not one.hold(0, record)
    free(address, 2 * MiB, 0, 0)
    assert left[0] == BUDGET - 2 * MiB
    assert one.let_go(0, record) == State.GONE
    (gone,) = one.records(0)
    assert gone.state == State.GONE
    one.forget(0, record)
    assert one.records(0) == []
    left[0] += 2 * MiB  # what giving it back would have done


def test_serials_tell_old_records_apart(table: Any) -> None:
    """A record that stands for another segment by now is not taken for the old one."""
    one, pool, _ = table
    allocate, free = calls(one, pool)
    address = allocate(1, 0, 0)
    (old,) = one.records(0)
    free(address, 1, 0, 0)
    address = allocate(1, 0, 0)
    assert not one.hold(0, old)
    assert one.let_go(0, old) == State.EMPTY
    free(address, 1, 0, 0)


def test_freed_during_a_capture(table: Any) -> None:
    """Nothing is waited for or unmapped then; `drain` does it, and so does an allocation that finds no memory."""
    one, pool, left = table
    allocate, free = calls(one, pool)
    for by_allocation in (False, True):
        address = allocate(2 * MiB, 0, 0)
        one.set_captures(1)
        free(address, 2 * MiB, 0, 0)
        assert one.counters(0).pending == 1
        assert left[0] == BUDGET - 2 * MiB
        assert allocate(BUDGET, 0, 0) == 0
        one.set_captures(0)
        if by_allocation:
            free(allocate(BUDGET, 0, 0), BUDGET, 0, 0)
        else:
            one.drain(0)
        assert one.counters(0).pending == 0
        assert left[0] == BUDGET


def test_freeing_what_is_not_ours(table: Any) -> None:
    """An address that no record has is counted as lost, and nothing else happens."""
    one, pool, left = table
    _, free = calls(one, pool)
    before = one.counters(0).lost
    free(4096, 1, 0, 0)
    assert one.counters(0).lost == before + 1
    free(0, 1, 0, 0)
    assert one.counters(0).lost == before + 1
    assert left[0] == BUDGET


def test_callbacks_run_while_another_thread_has_the_gil(table: Any, record_property: Any) -> None:
    """A native thread allocates and frees while a call keeps the GIL for a second (trap 24)."""
    one, pool, _ = table
    rounds = 2000
    allocate, free = one.entry(pool)
    start, told = libc.native_thread(allocate, free, rounds)
    python = ctypes.PyDLL(None)  # unlike CDLL, it keeps the GIL for the whole call
    start(time.monotonic_ns() + 50_000_000)
    held_from = time.monotonic_ns()
    python.usleep(1_000_000)
    held_until = time.monotonic_ns()
    deadline = time.monotonic() + 30
    while not told[4] and time.monotonic() < deadline:
        pass
    began, ended, done = int(told[1]), int(told[2]), int(told[3])
    assert done == rounds
    assert held_from < began < ended < held_until, "all of it happened while the GIL was held"
    record_property("microseconds for an allocation and a free", (ended - began) / rounds / 1000)


def test_entries_are_no_python(table: Any) -> None:
    """Pools have callbacks of their own, which differ in the pool's number alone."""
    one, pool, _ = table
    other = one.add_pool("other", {0: Options(b"", b"", 0, 4 * MiB, 1)})
    assert one.add_pool("other", {0: Options(b"", b"", 0, 4 * MiB, 1)}) == other
    assert one.entry(other) != one.entry(pool)
    allocate, free = calls(one, other)
    address = allocate(1, 0, 0)
    (record,) = one.records(0)
    assert (record.pool, record.size) == (other, 4 * MiB)
    free(address, 1, 0, 0)


def test_options_are_cudas_structures() -> None:
    """The bytes handed to the driver lie as `CUmemAllocationProp` and `CUmemAccessDesc` do."""
    from remap.integrations.functions import options_of
    from remap.types import AllocationProperties, HandleType

    place = remap.device(0).location
    kinds = frozenset({HandleType.POSIX_FD, HandleType.FABRIC})
    options = options_of(AllocationProperties(place, kinds, rdma=True), (place, remap.Host()), 2 * MiB, 1)
    pinned, handles, device, index = (
        int.from_bytes(options.properties[start : start + 4], "little") for start in range(0, 16, 4)
    )
    assert (pinned, handles, device, index) == (1, 9, 1, 0)
    assert options.properties[16:24] == bytes(8)
    assert options.properties[24:26] == b"\x00\x01"
    assert len(options.properties) == 32
    words = [int.from_bytes(options.access[at : at + 4], "little") for at in range(0, 24, 4)]
    assert words == [1, 0, 3, 2, 0, 3]
    assert options.accessing == 2
