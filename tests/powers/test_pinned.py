"""SupportsPinned: host memory that devices copy and reach."""

from __future__ import annotations

import numpy as np
import pytest

from remap.drivers.powers import SupportsPinned
from remap.drivers.protocol import Driver
from remap.errors import DriverError, InUseError, OutOfMemoryError

from .conftest import Desk

SIZE = 1 << 20


def powers(driver: Driver) -> SupportsPinned:
    """Return the driver as one that has the power."""
    assert isinstance(driver, SupportsPinned)
    return driver


def test_pinned_memory_is_both_sides(desk: Desk) -> None:
    """The CPU and the device see the same bytes: a fill by the device, then a copy from what the CPU wrote."""
    driver = powers(desk.driver)
    stream, address = desk.stream(), powers(desk.driver).allocate_pinned(SIZE)
    reached = driver.device_pointer(address)
    desk.driver.fill(reached, 0x5A, 1, SIZE, stream)
    desk.driver.synchronize_stream(stream)
    view = desk.view(address, SIZE)
    assert (view == 0x5A).all()
    view[:] = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    plain = desk.driver.allocate(SIZE)
    desk.driver.copy(plain, reached, SIZE, stream)
    assert (desk.read(plain, SIZE, stream) == view).all()
    desk.driver.free(plain)
    del view
    driver.free_pinned(address)


def test_freeing_waits(desk: Desk) -> None:
    """Pinned memory that queued work uses is freed when that work is done, and not before."""
    driver = powers(desk.driver)
    stream, address = desk.stream(), driver.allocate_pinned(SIZE)
    desk.driver.fill(driver.device_pointer(address), 1, 1, SIZE, stream)
    driver.free_pinned(address)
    assert desk.driver.stream_done(stream)


def test_registered_memory(desk: Desk) -> None:
    """A registered array is reached by the device at its device pointer, and by nobody after it was unregistered."""
    driver = powers(desk.driver)
    stream = desk.stream()
    array = np.zeros(SIZE + 4096, np.uint8)
    start = -(-array.ctypes.data // 4096) * 4096
    driver.register_pinned(start, SIZE)
    reached = driver.device_pointer(start)
    desk.driver.fill(reached + 10, 7, 1, 5, stream)
    desk.driver.synchronize_stream(stream)
    driver.unregister_pinned(start)
    inside = array[start - array.ctypes.data :]
    assert inside[:20].tolist() == [0] * 10 + [7] * 5 + [0] * 5
    if desk.driver.name == "host":  # CUDA may take it for pageable memory, whatever comes of it
        with pytest.raises(DriverError):
            desk.driver.fill(reached, 7, 1, 5, stream)


def test_registering_twice(desk: Desk) -> None:
    """Memory that is registered is refused a second time, and unregistering twice as well, by CUDA's names."""
    driver = powers(desk.driver)
    array = np.zeros(SIZE + 4096, np.uint8)
    start = -(-array.ctypes.data // 4096) * 4096
    driver.register_pinned(start, SIZE)
    with pytest.raises(DriverError, match="HOST_MEMORY_ALREADY_REGISTERED"):
        driver.register_pinned(start, SIZE)
    driver.unregister_pinned(start)
    with pytest.raises(DriverError, match="HOST_MEMORY_NOT_REGISTERED"):
        driver.unregister_pinned(start)


def test_addresses_that_are_not_pinned(desk: Desk) -> None:
    """Freeing and asking for the device's pointer of other memory are refused."""
    driver = powers(desk.driver)
    plain = desk.driver.allocate(SIZE)
    with pytest.raises(DriverError):
        driver.free_pinned(plain)
    desk.driver.free(plain)
    array = np.zeros(SIZE, np.uint8)
    with pytest.raises(DriverError):
        driver.device_pointer(array.ctypes.data)


def test_absurd_size(desk: Desk) -> None:
    """An allocation that no host has memory for is refused as out of memory, and changes nothing."""
    with pytest.raises(OutOfMemoryError):
        powers(desk.driver).allocate_pinned(1 << 46)
    address = powers(desk.driver).allocate_pinned(64)
    powers(desk.driver).free_pinned(address)


def test_unregistering_under_work(desk: Desk) -> None:
    """The host driver sees that queued work still uses memory that is unregistered; CUDA cannot tell."""
    if desk.driver.name != "host":
        pytest.skip("CUDA lets it happen: the outcome is undefined")
    driver = powers(desk.driver)
    stream, array = desk.stream(), np.zeros(SIZE, np.uint8)
    driver.register_pinned(array.ctypes.data, SIZE)
    desk.driver.fill(array.ctypes.data, 1, 1, SIZE, stream)
    with pytest.raises(InUseError, match="a fill"):
        driver.unregister_pinned(array.ctypes.data)
    desk.driver.synchronize_stream(stream)
    driver.unregister_pinned(array.ctypes.data)
