"""Happens-before: memory is not taken away under work that no wait orders before it, by proof and not by luck."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest

from remap.drivers.protocol import DEFAULT_STREAM, PER_THREAD_STREAM, HostLaunch
from remap.errors import CudaResult, DriverError, InUseError
from remap.types import Access, AllocationProperties, Touched

from .support import GRANULE, LIMIT, Host, device

READ, READ_WRITE, NONE = Access.READ, Access.READ_WRITE, Access.NONE


def test_a_finished_copy_still_counts(host: Host) -> None:
    """Work that is done, but which nobody waited for, refuses the unmapping; a wait or a successful query allows it."""
    driver = host.driver
    for wait in (driver.synchronize_stream, driver.stream_done):
        stream = driver.create_stream()
        address = host.memory()
        driver.fill(address, 1, 1, GRANULE, stream)
        found = driver._streams._by_handle[stream]
        found.wait(found.submitted)  # the fill is done, and the host has not been told
        with pytest.raises(InUseError) as caught:
            driver.unmap(address, GRANULE)
        assert f"a fill (work 1 of stream {stream} of device 0)" in str(caught.value)
        assert f"{address:#x}" in str(caught.value)
        assert wait(stream) in {None, True}
        driver.unmap(address, GRANULE)


def test_a_failed_query_teaches_nothing(host: Host) -> None:
    """A query that finds work running is no wait."""
    driver = host.driver
    stream = driver.create_stream()
    address = host.memory()
    go = threading.Event()
    host.launch(lambda _: wait(go), stream, [Touched(address, 4)])
    assert not driver.stream_done(stream)
    with pytest.raises(InUseError, match="kernel"):
        driver.unmap(address, GRANULE)
    go.set()
    driver.synchronize_stream(stream)
    driver.unmap(address, GRANULE)


def test_events_carry_the_order(host: Host) -> None:
    """Waiting for one stream covers what it waited for through an event, also when the event was reached long ago."""
    driver = host.driver
    first, second = driver.create_stream(), driver.create_stream()
    event = driver.create_event()
    address = host.memory()
    driver.fill(address, 1, 1, 4, first)
    driver.record_event(event, first)
    driver.wait_event(second, event)
    driver.fill(host.memory(), 1, 1, 4, second)
    driver.destroy_event(event)
    driver.synchronize_stream(second)
    driver.unmap(address, GRANULE)


def test_a_free_in_a_stream_without_work_of_its_own(host: Host) -> None:
    """It comes after what that stream waits for: who does not wait for it gets other memory, which can be freed."""
    driver = host.driver
    working, freeing, other = (driver.create_stream() for _ in range(3))
    event = driver.create_event()
    address = driver.pool_allocate(GRANULE, working)
    driver.fill(address, 1, 1, GRANULE, working)
    driver.record_event(event, working)
    found = driver._streams._by_handle[working]
    found.wait(
        found.submitted
    )  # the fill is done, and the host has not been told: nothing is queued for the wait
    driver.wait_event(freeing, event)
    driver.pool_free(address, freeing)
    another = driver.pool_allocate(GRANULE, other)
    assert another != address
    driver.pool_free(another, other)
    driver.wait_event(other, event)
    assert driver.pool_allocate(GRANULE, other) == address


def test_an_event_covers_what_came_before_it_only(host: Host) -> None:
    """Work queued after the record is not covered."""
    driver = host.driver
    stream, event = driver.create_stream(), driver.create_event()
    before, after = host.memory(), host.memory()
    driver.fill(before, 1, 1, 4, stream)
    driver.record_event(event, stream)
    driver.fill(after, 1, 1, 4, stream)
    driver.synchronize_event(event)
    driver.unmap(before, GRANULE)
    with pytest.raises(InUseError):
        driver.unmap(after, GRANULE)
    driver.synchronize_context()
    assert driver.event_done(event)
    driver.unmap(after, GRANULE)


def test_default_stream_orders_blocking_streams(host: Host) -> None:
    """Waiting for the default stream covers blocking streams, and does not cover non-blocking ones."""
    driver = host.driver
    blocking, apart = driver.create_stream(nonblocking=False), driver.create_stream()
    one, two = host.memory(), host.memory()
    driver.fill(one, 1, 1, 4, blocking)
    driver.fill(two, 1, 1, 4, apart)
    driver.synchronize_stream(DEFAULT_STREAM)
    driver.unmap(one, GRANULE)
    with pytest.raises(InUseError):
        driver.unmap(two, GRANULE)
    driver.synchronize_stream(apart)
    driver.unmap(two, GRANULE)


def test_lowering_access(host: Host) -> None:
    """Taking away a right waits for those who use that right: readers do not mind that writing ends."""
    driver = host.driver
    address = host.memory()
    peer = device(1)
    driver.set_access(address, GRANULE, [(peer, READ_WRITE)])
    out = ctypes.create_string_buffer(4)
    driver.copy_to_host(ctypes.addressof(out), address, 4, 0)
    driver.set_access(address, GRANULE, [(device(), READ)])
    with pytest.raises(InUseError, match="take access from"):
        driver.set_access(address, GRANULE, [(device(), NONE)])
    assert driver.get_access(address, device()) is READ
    driver.set_access(address, GRANULE, [(peer, NONE)])  # no work of the peer's
    driver.set_access(address, GRANULE, [(device(), READ_WRITE)])
    driver.synchronize_context()
    driver.fill(address, 1, 1, 4, 0)
    with pytest.raises(InUseError, match="take write access"):
        driver.set_access(address, GRANULE, [(device(), READ)])
    driver.synchronize_context()
    driver.set_access(address, GRANULE, [(device(), NONE)])
    driver.unmap(address, GRANULE)


def test_a_launch_that_may_touch_anything(host: Host) -> None:
    """A launch without a list covers what its device could reach then: not memory mapped or granted later."""
    driver = host.driver
    before, ungranted = host.memory(), host.memory(access=NONE)
    go = threading.Event()
    stream = driver.create_stream()
    host.launch(lambda _: wait(go), stream, None)
    after = host.memory()
    driver.set_access(ungranted, GRANULE, [(device(), READ)])
    driver.unmap(after, GRANULE)
    driver.unmap(ungranted, GRANULE)
    with pytest.raises(InUseError, match="kernel"):
        driver.unmap(before, GRANULE)
    go.set()
    driver.synchronize_stream(stream)
    driver.unmap(before, GRANULE)


def test_what_a_kernel_really_touches_counts(host: Host) -> None:
    """A kernel may reach memory that its launch did not list; from then on that memory is in use, too."""
    driver = host.driver
    address = host.memory()
    touched, go = threading.Event(), threading.Event()

    def kernel(launch: HostLaunch) -> None:
        view = launch.write(address, 4)
        touched.set()
        wait(go)
        view[:] = b"late"

    stream = driver.create_stream()
    host.launch(kernel, stream, [])
    wait(touched)
    with pytest.raises(InUseError, match="kernel"):
        driver.unmap(address, GRANULE)
    go.set()
    driver.synchronize_stream(stream)
    assert host.bytes_at(address, 4) == b"late"
    driver.unmap(address, GRANULE)


def test_both_ends_of_a_copy(host: Host) -> None:
    """A copy uses its source and its destination; a refused unmapping changes nothing."""
    driver = host.driver
    source, target = host.memory(), host.memory()
    driver.fill(source, 9, 1, GRANULE, 0)
    driver.copy(target, source, GRANULE, 0)
    for address in (source, target):
        with pytest.raises(InUseError):
            driver.unmap(address, GRANULE)
    assert host.bytes_at(target, GRANULE) == b"\x09" * GRANULE
    driver.unmap(source, GRANULE)
    driver.unmap(target, GRANULE)


def test_one_unmap_of_many_is_all_or_nothing(host: Host) -> None:
    """If one mapping of a range is in use, none of them is unmapped."""
    driver = host.driver
    handle = driver.create(GRANULE, AllocationProperties(device()))
    address = driver.reserve(2 * GRANULE)
    for base in (address, address + GRANULE):
        driver.map(base, GRANULE, handle)
    driver.set_access(address, 2 * GRANULE, [(device(), READ_WRITE)])
    driver.fill(address + GRANULE, 1, 1, 4, 0)
    with pytest.raises(InUseError):
        driver.unmap(address, 2 * GRANULE)
    assert host.bytes_at(address, 4) == b"\x01" * 4  # the alias of what was filled
    driver.unmap(address, 2 * GRANULE)


def test_logs_stay_short(host: Host) -> None:
    """Streams that come and go leave no trail in the log of a mapping."""
    driver = host.driver
    address = host.memory()
    for _ in range(200):
        stream = driver.create_stream()
        driver.fill(address, 1, 1, 4, stream)
        driver.synchronize_stream(stream)
        driver.destroy_stream(stream)
    mapping = driver._memory.space.mappings.at(address)
    assert mapping is not None
    assert mapping.writes is not None
    assert len(mapping.writes) < 40
    assert len(driver._streams.all_of(0)) < 5


def test_what_a_destroyed_stream_did(host: Host) -> None:
    """Destroying a stream is no wait; one for the context is, for that stream, too."""
    driver = host.driver
    stream = driver.create_stream()
    address = host.memory()
    driver.fill(address, 1, 1, 4, stream)
    driver.destroy_stream(stream)
    with pytest.raises(InUseError):
        driver.unmap(address, GRANULE)
    with pytest.raises(DriverError) as caught:
        driver.synchronize_stream(stream)
    assert caught.value.code == CudaResult.INVALID_HANDLE
    driver.synchronize_context()
    driver.unmap(address, GRANULE)


def test_host_threads_share_what_they_know(host: Host) -> None:
    """A wait in one thread counts for all, since how threads wait for each other cannot be seen from the driver."""
    driver = host.driver
    address = host.memory()
    driver.fill(address, 1, 1, 4, 0)

    def other() -> None:
        driver.push_context(1)
        driver.synchronize_context()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(LIMIT)
    driver.unmap(address, GRANULE)


def test_per_thread_streams_are_apart(host: Host) -> None:
    """Each thread has a default stream of its own, which waiting for the context covers."""
    driver = host.driver
    address = host.memory()

    def other() -> None:
        driver.push_context(1)
        driver.fill(address, 1, 1, 4, PER_THREAD_STREAM)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(LIMIT)
    driver.synchronize_stream(PER_THREAD_STREAM)
    with pytest.raises(InUseError, match="default stream of thread"):
        driver.unmap(address, GRANULE)
    driver.synchronize_context()
    driver.unmap(address, GRANULE)


def test_free_of_plain_memory_waits(open_host: Callable[..., Host]) -> None:
    """Freeing plain memory waits for its device, as on CUDA; work of another device has to be waited for before."""
    host = open_host()
    driver = host.driver
    address = driver.allocate(4096)
    driver.fill(address, 1, 1, 4096, driver.create_stream())
    driver.free(address)
    address = driver.allocate(4096)
    driver.push_context(driver.retain_context(1))
    target = driver.allocate(4096)
    driver.copy(target, address, 4096, 0)
    with pytest.raises(InUseError):
        driver.free(address)
    driver.synchronize_context()
    driver.free(address)
    driver.free(target)


def wait(event: threading.Event) -> None:
    """Wait for an event, with a limit."""
    assert event.wait(LIMIT)
