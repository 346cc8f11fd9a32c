"""The suite sees: a driver that breaks one rule fails the test of that rule."""

# ruff: noqa: D103 (the name of a bent method says which rule it breaks)

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest

from remap import drivers
from remap.drivers.protocol import Driver
from remap.drivers.wrappers import Faulty
from remap.errors import CudaResult, DriverError, driver_error
from remap.sizes import MiB
from remap.testing import DriverConformance, open_kernel
from remap.testing.bench import RW, Bench, DriverFactory, OpenDriver
from remap.testing.machine import wander
from remap.types import Access, AddressRange, Location, LocationKind, PointerInfo

FIRST = Location(LocationKind.DEVICE, 0)
GRANULE = 2 * MiB


class Bent(Faulty):
    """A driver that is right in everything but one method."""

    def bend(self, method: str, replacement: Callable[..., Any]) -> None:
        """Let `replacement(inner, *arguments)` stand for a method."""
        setattr(self, method, partial(replacement, self.inner))


def create_of_any_size(driver: Driver, size: int, properties: Any) -> int:
    return driver.create(-(-max(size, 1) // GRANULE) * GRANULE, properties)


def reserve_without_alignment(driver: Driver, size: int, alignment: int = 0, hint: int = 0) -> int:
    del alignment
    return driver.reserve(size, 0, hint)


def reserve_without_hint(driver: Driver, size: int, alignment: int = 0, hint: int = 0) -> int:
    del hint
    return driver.reserve(size, alignment)


def free_nothing(driver: Driver, address: int, size: int) -> None:
    del driver, address, size


def release_nothing(driver: Driver, handle: int) -> None:
    del driver, handle


def map_with_access(driver: Driver, address: int, size: int, handle: int, offset: int = 0) -> None:
    driver.map(address, size, handle, offset)
    driver.set_access(address, size, [(FIRST, RW)])


def map_another_refusal(driver: Driver, address: int, size: int, handle: int, offset: int = 0) -> None:
    try:
        driver.map(address, size, handle, offset)
    except DriverError as error:
        raise driver_error(error.call, CudaResult.INVALID_VALUE) from None


def unmap_whatever_is_touched(driver: Driver, address: int, size: int) -> None:
    try:
        driver.unmap(address, size)
    except DriverError:
        driver.unmap(address, 2 * GRANULE)


def unmap_refuses_nothing(driver: Driver, address: int, size: int) -> None:
    try:
        driver.address_range(address)
    except DriverError:
        raise driver_error("cuMemUnmap", CudaResult.INVALID_VALUE) from None
    driver.unmap(address, size)


def always_writable(driver: Driver, address: int, size: int, grants: Any) -> None:
    driver.set_access(
        address, size, [(place, RW if right is Access.READ else right) for place, right in grants]
    )


def forgiving_access(driver: Driver, address: int, size: int, grants: Any) -> None:
    try:
        driver.set_access(address, size, grants)
    except DriverError:
        return


def fill_one_short(driver: Driver, address: int, value: int, width: int, count: int, stream: int) -> None:
    driver.fill(address, value, width, max(count - 1, 1), stream)


def fill_in_silence(driver: Driver, *arguments: int) -> None:
    try:
        driver.fill(*arguments)
    except DriverError:
        return


def whole_reservation(driver: Driver, address: int) -> AddressRange:
    driver.address_range(address)
    info = driver.pointer_info(address)
    return AddressRange(info.range_start, info.range_size)


def one_id_for_all(driver: Driver, address: int) -> PointerInfo:
    info = driver.pointer_info(address)
    return PointerInfo(info.range_start, info.range_size, 1, info.device)


def retain_without_reference(driver: Driver, address: int) -> int:
    handle = driver.retain(address)
    driver.release(handle)
    return handle


BREAKS: list[tuple[str, Callable[..., Any], str]] = [
    ("create", create_of_any_size, "test_T2_create_takes_whole_granules(3145728)"),
    ("release", release_nothing, "test_T2_memory_is_taken_at_create"),
    ("reserve", reserve_without_alignment, "test_T3_alignment"),
    ("reserve", reserve_without_hint, "test_T3_hint"),
    ("free_range", free_nothing, "test_T4_free_twice"),
    ("free_range", free_nothing, "test_T3_hint"),
    ("map", map_with_access, "test_T6_a_new_mapping_has_no_access"),
    ("map", map_another_refusal, "test_T5_map_takes_the_whole_allocation"),
    ("set_access", always_writable, "test_T5_aliases"),
    ("set_access", forgiving_access, "test_T6_whole_mappings_only"),
    ("set_access", forgiving_access, "test_T6_an_empty_list"),
    ("unmap", unmap_whatever_is_touched, "test_T7_unmap_part_of_a_mapping"),
    ("unmap", unmap_refuses_nothing, "test_T7_unmap_nothing"),
    ("retain", retain_without_reference, "test_T8_retain_adds_a_reference"),
    ("fill", fill_one_short, "test_T4_free_with_a_mapping_inside"),
    ("fill", fill_in_silence, "test_T6_a_new_mapping_has_no_access"),
    ("fill", fill_in_silence, "test_T9_transfers_are_checked_at_the_call('fill', 'none')"),
    ("address_range", whole_reservation, "test_T12_address_range_is_one_mapping"),
    ("pointer_info", one_id_for_all, "test_T12_pointer_info"),
    ("map", map_with_access, "test_B2_pairs_of_calls('map', 'fill')"),
    ("release", release_nothing, "test_B2_pairs_of_calls('create', 'release')"),
]

WALKED = [
    *[create_of_any_size, map_with_access, map_another_refusal, always_writable, forgiving_access],
    *[fill_one_short, fill_in_silence, whole_reservation, unmap_refuses_nothing],
]
"""What a random walk has to find, too."""

METHODS = {replacement: method for method, replacement, _ in BREAKS}


class Suite(DriverConformance):
    """The suite as an object whose tests are called one by one."""

    __test__ = False

    @classmethod
    def factory(cls) -> DriverFactory:
        return partial(drivers.open, "host", devices=1, memory="64MiB")


@pytest.fixture
def opened() -> Generator[OpenDriver]:
    driver = Bent(Suite.factory()())
    opened = OpenDriver(lambda: driver)
    yield opened
    opened.close()


def bent(opened: OpenDriver) -> Bent:
    assert isinstance(opened.driver, Bent)
    return opened.driver


@pytest.mark.parametrize(
    ("method", "replacement", "test"), BREAKS, ids=[f"{r.__name__}-{t}" for _, r, t in BREAKS]
)
def test_a_broken_rule_fails_its_test(
    opened: OpenDriver, method: str, replacement: Callable[..., Any], test: str
) -> None:
    """The test passes on the driver as it is, and fails when one method of it is bent."""
    run_one(opened, test)
    bent(opened).bend(method, replacement)
    with pytest.raises((AssertionError, DriverError)):
        run_one(opened, test)


@pytest.mark.parametrize("replacement", WALKED)
def test_a_walk_finds_it(opened: OpenDriver, replacement: Callable[..., Any]) -> None:
    """A random walk of 400 steps agrees with the driver as it is, and not when one method of it is bent."""
    walk(opened)
    bent(opened).bend(METHODS[replacement], replacement)
    with pytest.raises((AssertionError, DriverError)):
        walk(opened)


def test_the_kernel_is_open_to_both_kinds(opened: OpenDriver) -> None:
    """A driver without modules gets the kernel as a callable, and it runs."""
    with Bench(opened, patience=0) as bench:
        region = bench.region()
        store = open_kernel(bench.driver)
        store.store(region.address, 5)
        bench.driver.synchronize_context()
        assert bench.read(region.address, 1)[0] == 5
        store.close()


def run_one(opened: OpenDriver, test: str) -> None:
    """Run one test of the suite with its arguments as written."""
    name, _, rest = test.partition("(")
    arguments = [part.strip(" ')") for part in rest.split(",") if part.strip(" ')")]
    with Bench(opened, patience=0) as bench:
        getattr(Suite(), name)(bench, *[int(part) if part.isdigit() else part for part in arguments])


def walk(opened: OpenDriver) -> None:
    """Take 400 random steps, and check that nothing stays."""
    with Bench(opened, patience=0) as bench:
        for seed in range(4):
            wander(bench, random.Random(seed), 400, to_the_end=True)
