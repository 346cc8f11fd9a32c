"""SupportsManaged: memory of the CPU and of all devices at one address."""

from __future__ import annotations

import pytest

import remap
from remap.drivers.powers import ManagedAdvice, SupportsManaged
from remap.drivers.protocol import Driver
from remap.errors import DriverError
from remap.sizes import MiB
from remap.types import Host, Location, LocationKind

from .conftest import Desk

SIZE = 2 * MiB
DEVICE = Location(LocationKind.DEVICE, 0)


def powers(driver: Driver) -> SupportsManaged:
    """Return the driver as one that has the power."""
    assert isinstance(driver, SupportsManaged)
    if not remap.device(0).capabilities["managed_memory"]:
        pytest.skip(remap.device(0).capabilities["managed_memory"].reason)
    return driver


def test_one_address_for_all(desk: Desk) -> None:
    """What the device writes the CPU reads at the same address, and the other way round."""
    driver, stream = powers(desk.driver), desk.stream()
    address = driver.allocate_managed(SIZE)
    view = desk.view(address, SIZE)
    desk.driver.fill(address, 7, 1, SIZE, stream)
    desk.driver.synchronize_stream(stream)
    assert (view == 7).all()
    view[:100] = 9
    out = desk.driver.allocate(SIZE)
    desk.driver.copy(out, address, SIZE, stream)
    assert desk.read(out, 200, stream).tolist() == [9] * 100 + [7] * 100
    desk.driver.free(out)
    del view
    driver.free_managed(address)


def test_prefetch(desk: Desk) -> None:
    """A range says where it was last prefetched to, if all of it was prefetched to one place."""
    driver, stream = powers(desk.driver), desk.stream()
    address = driver.allocate_managed(SIZE)
    assert driver.prefetched_to(address, SIZE) is None
    driver.prefetch(address, SIZE, DEVICE, stream)
    desk.driver.synchronize_stream(stream)
    assert driver.prefetched_to(address, SIZE) == DEVICE
    driver.prefetch(address, SIZE // 2, Host(), stream)
    desk.driver.synchronize_stream(stream)
    assert driver.prefetched_to(address, SIZE // 2) == Host()
    assert driver.prefetched_to(address + SIZE // 2, SIZE // 2) == DEVICE
    assert driver.prefetched_to(address, SIZE) is None
    driver.free_managed(address)


def test_advice(desk: Desk) -> None:
    """Every advice can be set and unset again, and changes no byte."""
    driver, stream = powers(desk.driver), desk.stream()
    address = driver.allocate_managed(SIZE)
    desk.driver.fill(address, 5, 1, SIZE, stream)
    desk.driver.synchronize_stream(stream)
    for advice in ManagedAdvice:
        driver.advise_managed(address, SIZE, advice, DEVICE, True)
        driver.advise_managed(address, SIZE, advice, DEVICE, False)
    assert (desk.read(address, SIZE, stream) == 5).all()
    driver.free_managed(address)


def test_other_memory_is_refused(desk: Desk) -> None:
    """Prefetches and advice are for managed memory only."""
    driver, stream = powers(desk.driver), desk.stream()
    plain = desk.driver.allocate(SIZE)
    with pytest.raises(DriverError):
        driver.prefetch(plain, SIZE, DEVICE, stream)
    with pytest.raises(DriverError):
        driver.advise_managed(plain, SIZE, ManagedAdvice.READ_MOSTLY, DEVICE, True)
    desk.driver.free(plain)


def test_freeing_waits(desk: Desk) -> None:
    """Managed memory is freed when the work that uses it is done."""
    driver, stream = powers(desk.driver), desk.stream()
    address = driver.allocate_managed(SIZE)
    desk.driver.fill(address, 5, 1, SIZE, stream)
    driver.free_managed(address)
    assert desk.driver.stream_done(stream)
