"""Streams run their work in order, each on its own thread, under CUDA's rules of the default streams."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from remap.drivers.protocol import DEFAULT_STREAM, HostLaunch
from remap.errors import CudaResult, DriverError
from remap.testing import wait_until
from remap.types import LaunchConfig

from .support import GRANULE, LIMIT, Host, Values

INVALID, HANDLE = CudaResult.INVALID_VALUE, CudaResult.INVALID_HANDLE


class Gate:
    """A kernel that says when it has begun and ends when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()

    def __call__(self, launch: HostLaunch) -> None:
        self.begun.set()
        assert self.go.wait(LIMIT)


def refused(error: pytest.ExceptionInfo[DriverError], result: CudaResult) -> bool:
    """Tell whether the driver answered with this result."""
    return error.value.code == result


def test_order_within_and_between(host: Host) -> None:
    """Work of one stream runs in order; other streams do not wait for it, unless an event says so."""
    driver = host.driver
    first, second, third = (driver.create_stream() for _ in range(3))
    seen: list[str] = []
    gate = Gate()
    host.launch(gate, first)
    host.launch(lambda _: seen.append("first"), first)
    event = driver.create_event()
    driver.record_event(event, first)
    driver.wait_event(second, event)
    host.launch(lambda _: seen.append("second"), second)
    host.launch(lambda _: seen.append("third"), third)
    driver.synchronize_stream(third)
    assert seen == ["third"]
    assert not driver.stream_done(second)
    assert not driver.event_done(event)
    gate.go.set()
    driver.synchronize_stream(second)
    assert seen == ["third", "first", "second"]


def test_default_stream_and_blocking_streams(host: Host) -> None:
    """Blocking streams and the default stream wait for each other; a non-blocking stream runs beside them."""
    driver = host.driver
    blocking, apart = driver.create_stream(nonblocking=False), driver.create_stream()
    seen: list[str] = []
    gate = Gate()
    host.launch(gate, blocking)
    host.launch(lambda _: seen.append("default"), DEFAULT_STREAM)
    host.launch(lambda _: seen.append("blocking"), blocking)
    host.launch(lambda _: seen.append("apart"), apart)
    driver.synchronize_stream(apart)
    assert seen == ["apart"]
    assert not driver.stream_done(DEFAULT_STREAM)
    gate.go.set()
    driver.synchronize_stream(blocking)
    assert seen == ["apart", "default", "blocking"]


def test_an_event_on_the_default_stream_covers_blocking_ones(host: Host) -> None:
    """Recording on the default stream marks what the default stream would wait for."""
    driver = host.driver
    blocking = driver.create_stream(nonblocking=False)
    gate = Gate()
    host.launch(gate, blocking)
    event = driver.create_event()
    driver.record_event(event, DEFAULT_STREAM)
    assert not driver.event_done(event)
    gate.go.set()
    driver.synchronize_event(event)


def test_events(host: Host) -> None:
    """Events that were never recorded are done; times need timing events that have been reached."""
    driver = host.driver
    stream = driver.create_stream()
    plain, start, end = (
        driver.create_event(),
        driver.create_event(timing=True),
        driver.create_event(timing=True),
    )
    assert driver.event_done(plain)
    driver.synchronize_event(plain)
    driver.wait_event(stream, plain)
    with pytest.raises(DriverError) as error:
        driver.elapsed(start, end)
    assert refused(error, HANDLE)
    gate = Gate()
    driver.record_event(plain, stream)
    driver.record_event(start, stream)
    host.launch(gate, stream)
    driver.record_event(end, stream)
    with pytest.raises(DriverError) as error:
        driver.elapsed(start, end)
    assert refused(error, CudaResult.NOT_READY)
    gate.go.set()
    driver.synchronize_stream(stream)
    assert driver.elapsed(start, end) >= 0
    with pytest.raises(DriverError, match="without timing"):
        driver.elapsed(plain, end)
    driver.destroy_event(plain)
    with pytest.raises(DriverError) as error:
        driver.event_done(plain)
    assert refused(error, HANDLE)


def test_an_event_stays_with_its_device(host: Host) -> None:
    """Recording on a stream of another device is refused; waiting for the event there is allowed."""
    driver = host.driver
    event, stream = driver.create_event(), driver.create_stream()
    driver.push_context(driver.retain_context(1))
    other = driver.create_stream()
    with pytest.raises(DriverError) as error:
        driver.record_event(event, other)
    assert refused(error, HANDLE)
    driver.record_event(event, stream)
    driver.wait_event(other, event)
    with pytest.raises(DriverError) as error:
        host.launch(lambda _: None, stream)
    assert refused(error, HANDLE)


def test_work_of_a_destroyed_stream_runs(host: Host) -> None:
    """Destroying a stream does not wait, and what was queued still runs."""
    driver = host.driver
    stream = driver.create_stream()
    seen: list[int] = []
    gate = Gate()
    host.launch(gate, stream)
    host.launch(lambda _: seen.append(1), stream)
    driver.destroy_stream(stream)
    gate.go.set()
    driver.synchronize_context()
    assert seen == [1]
    for default in (0, 1, 2):
        with pytest.raises(DriverError):
            driver.destroy_stream(default)


def test_threads_end(host: Host) -> None:
    """A stream's thread begins with its first work and ends when the stream is destroyed."""
    driver = host.driver
    before = set(threading.enumerate())
    stream = driver.create_stream()
    assert set(threading.enumerate()) == before
    threads: list[threading.Thread] = []
    host.launch(lambda _: threads.append(threading.current_thread()), stream)
    driver.synchronize_stream(stream)
    driver.destroy_stream(stream)
    threads[0].join(LIMIT)
    assert not threads[0].is_alive()
    assert threads[0].daemon


def test_shutdown_drops_what_waits(open_host: Callable[..., Host]) -> None:
    """Shutting down waits for what runs, drops what has not begun, frees waiters, and may be done twice."""
    host = open_host()
    driver = host.driver
    stream = driver.create_stream()
    seen: list[int] = []
    gate = Gate()
    host.launch(gate, stream)
    host.launch(lambda _: seen.append(1), stream)
    assert gate.begun.wait(LIMIT)
    ends: list[object] = []

    def waiter() -> None:
        driver.push_context(1)
        try:
            driver.synchronize_context()
        except DriverError as error:
            ends.append(error.code)

    waiting = threading.Thread(target=waiter)
    waiting.start()
    closing = threading.Thread(target=driver.shutdown)
    closing.start()

    def shut() -> bool:
        try:
            driver.device_count()
        except DriverError:
            return True
        return False

    assert wait_until(shut, LIMIT)  # else what waits at the gate may be let in first
    gate.go.set()
    closing.join(LIMIT)
    waiting.join(LIMIT)
    assert not closing.is_alive()
    assert not waiting.is_alive()
    assert seen == []
    driver.shutdown()
    with pytest.raises(DriverError) as error:
        driver.device_count()
    assert refused(error, CudaResult.DEINITIALIZED)


def test_a_kernel_may_not_wait(host: Host) -> None:
    """A kernel that waits for its own driver would wait for itself: the call is refused."""
    driver = host.driver
    found: list[int] = []

    def kernel(_: HostLaunch) -> None:
        calls: list[Callable[[], None]] = [driver.synchronize_context, driver.shutdown]
        for call in calls:
            driver.push_context(1)
            try:
                call()
            except DriverError as error:
                found.append(error.code)

    host.launch(kernel)
    driver.synchronize_context()
    assert found == [CudaResult.NOT_PERMITTED] * 2


@pytest.mark.parametrize(
    "config",
    [
        LaunchConfig((0, 1, 1), (1, 1, 1)),
        LaunchConfig((1, 1, 1), (0, 1, 1)),
        LaunchConfig((1, 1, 1), (1025, 1, 1)),
        LaunchConfig((1, 1, 1), (1, 1, 65)),
        LaunchConfig((1, 1, 1), (64, 64, 1)),
        LaunchConfig((1, 65536, 1), (1, 1, 1)),
        LaunchConfig((1, 1, 1), (1, 1, 1), 300_000),
        LaunchConfig((1, 1, 1), (1, 1, 1), -1),
    ],
    ids=str,
)
def test_launch_limits(host: Host, config: LaunchConfig) -> None:
    """A shape that no device takes is INVALID_VALUE, and nothing is launched."""
    with pytest.raises(DriverError) as error:
        host.driver.launch(lambda _: None, config, 0, Values(), ())
    assert refused(error, INVALID)
    with pytest.raises(DriverError) as error:
        host.driver.launch(7, LaunchConfig((1, 1, 1), (1, 1, 1)), 0, Values(), ())
    assert refused(error, HANDLE)


def test_what_a_kernel_sees(host: Host) -> None:
    """A launch shows device, shape, arguments and the memory itself, with no copy."""
    driver = host.driver
    address = host.memory(2)
    config = LaunchConfig((2, 3, 4), (5, 6, 7), 8)
    seen: list[object] = []

    def kernel(launch: HostLaunch) -> None:
        seen.extend((launch.device, launch.config, launch.arguments))
        view = launch.write(address + GRANULE - 2, 4)  # over the border of nothing: one mapping
        view[:] = b"abcd"
        reading = launch.read(address + GRANULE - 2, 4)
        seen.append((bytes(reading), reading.readonly, view.readonly, view.format))
        seen.append(len(launch.read(1, 0)))

    driver.launch(kernel, config, 0, Values((1, "x")), None)
    driver.synchronize_context()
    assert seen == [0, config, (1, "x"), (b"abcd", True, False, "B"), 0]
    assert host.bytes_at(address + GRANULE - 2, 4) == b"abcd"


def test_fills_of_every_width(host: Host) -> None:
    """A fill writes its pattern and nothing else, at any size; what does not fit is refused."""
    driver = host.driver
    address = host.memory(2)
    for width, value in ((1, 0xAB), (2, 0xBEEF), (4, 0xDEADBEEF), (4, 0x01010101)):
        for count in (1, 3, 1000, 300_001):
            driver.fill(address, 0, 1, 2 * GRANULE, 0)
            driver.fill(address + 8, value, width, count, 0)
            end = 8 + width * count
            expected = bytes(8) + value.to_bytes(width, "little") * count + bytes(8)
            assert host.bytes_at(address, end + 8) == expected
    for width, value, count, at in ((3, 1, 1, 0), (1, 256, 1, 0), (2, -1, 1, 0), (2, 1, 1, 1), (1, 1, -1, 0)):
        with pytest.raises(DriverError) as error:
            driver.fill(address + at, value, width, count, 0)
        assert refused(error, INVALID)
