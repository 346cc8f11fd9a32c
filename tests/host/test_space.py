"""The driver's picture of the kernel's mappings is the kernel's, and its limit is kept."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from remap.drivers.host import HostDriver, linux
from remap.errors import OutOfAddressSpaceError
from remap.types import Access, AllocationProperties

from .support import GRANULE, LIMIT, Host, device, run_child

NONE, READ, READ_WRITE = Access.NONE, Access.READ, Access.READ_WRITE


def kernel_mappings(driver: HostDriver) -> int:
    """Count the kernel's mappings inside the driver's reservations."""
    spans = [(one.base, one.end) for one in driver._memory.space.reservations]
    count = 0
    for line in Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+)", line)
        assert match is not None
        start, end = int(match[1], 16), int(match[2], 16)
        count += any(base < end and start < stop for base, stop in spans)
    return count


def test_count_is_the_kernels(open_host: Callable[..., Host]) -> None:
    """After every random map, grant, unmap, reservation and freeing, our count is that of /proc/self/maps."""
    driver = open_host(memory="1GiB").driver
    chance = random.Random(2)
    granules = 24
    handles = [driver.create(GRANULE, AllocationProperties(device())) for _ in range(8)]
    handles += [driver.create(2 * GRANULE, AllocationProperties(device())) for _ in range(4)]
    sizes = [GRANULE] * 8 + [2 * GRANULE] * 4
    first = driver.reserve(granules * GRANULE)
    # A neighbour, so that holes merge over the border of two reservations, and mappings cross it.
    second = driver.reserve(granules * GRANULE, 0, first + granules * GRANULE)
    together = second == first + granules * GRANULE
    mapped: dict[int, int] = {}
    for step in range(600):
        what = chance.randrange(4)
        if what < 2:
            place = chance.randrange(len(handles))
            base = chance.choice((first, second) if not together else (first,))
            room = granules * (2 if together else 1) * GRANULE
            address = base + chance.randrange(room // GRANULE - 1) * GRANULE
            taken = any(
                start < address + sizes[place] and address < start + size for start, size in mapped.items()
            )
            if not taken:
                driver.map(address, sizes[place], handles[place])
                mapped[address] = sizes[place]
        elif mapped and what == 2:
            address = chance.choice(list(mapped))
            driver.set_access(address, mapped[address], [(device(), chance.choice((NONE, READ, READ_WRITE)))])
        elif mapped:
            address = chance.choice(list(mapped))
            driver.unmap(address, mapped.pop(address))
        if step % 5 == 0:
            assert driver._memory.space.kernel_mappings == kernel_mappings(driver)
    for address, size in mapped.items():
        driver.unmap(address, size)
    assert driver._memory.space.kernel_mappings == kernel_mappings(driver)
    driver.free_range(first, granules * GRANULE)
    driver.free_range(second, granules * GRANULE)
    assert driver._memory.space.kernel_mappings == 0


def test_mapping_without_access_costs_nothing(host: Host) -> None:
    """The kernel learns of a mapping at its first grant; until then the reservation's hole stands for it."""
    address = host.memory(4, access=NONE)
    assert kernel_mappings(host.driver) == 1
    host.driver.set_access(address, 4 * GRANULE, [(device(), READ)])
    assert host.bytes_at(address, 4) == bytes(4)


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_100000_mappings_in_arena_order(open_host: Callable[..., Host]) -> None:
    """Neighbours in order with equal rights are one kernel mapping, however many; every step stays fast."""
    driver = open_host(memory="200GiB").driver
    count = 100_000
    properties = AllocationProperties(device())
    before = linux.map_count()
    began = time.perf_counter()
    address = driver.reserve(count * GRANULE)
    grants = [(device(), READ_WRITE)]
    handles: list[int] = []
    for index in range(count):
        handle = driver.create(GRANULE, properties)
        driver.map(address + index * GRANULE, GRANULE, handle)
        driver.set_access(address + index * GRANULE, GRANULE, grants)
        handles.append(handle)
    each = (time.perf_counter() - began) / count
    assert driver._memory.space.kernel_mappings == 1
    assert linux.map_count() <= before + 10
    assert each < 300e-6, f"{each * 1e6:.0f} µs for create, map and set access"
    driver.fill(address + 70_000 * GRANULE - 4, 7, 1, 8, 0)
    driver.synchronize_stream(0)
    assert driver.address_range(address + 99_999 * GRANULE + 5).base == address + 99_999 * GRANULE
    driver.set_access(address, count * GRANULE, [(device(), READ)])
    driver.unmap(address, count * GRANULE)
    for handle in handles:
        driver.release(handle)
    driver.free_range(address, count * GRANULE)
    assert driver._memory.space.kernel_mappings == 0
    assert driver.memory_info().used == 0


@pytest.mark.timeout(300)
def test_limit_of_scattered_mappings(open_host: Callable[..., Host]) -> None:
    """With a hole beside each mapping, about half the kernel's limit can be had; then the error tells the cure.

    At the limit, everything can still be unmapped.
    """
    driver = open_host().driver
    count = 40_000
    address = driver.reserve(2 * count * GRANULE)
    handle = driver.create(GRANULE, AllocationProperties(device()))
    grants = [(device(), READ)]
    done = 0
    with pytest.raises(OutOfAddressSpaceError, match=r"vm\.max_map_count") as caught:
        for index in range(count):
            driver.map(address + 2 * index * GRANULE, GRANULE, handle)
            driver.set_access(address + 2 * index * GRANULE, GRANULE, grants)
            done += 1
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert "sysctl" in str(caught.value)
    limit = linux.largest_map_count()
    assert 0.40 * limit < done <= 0.45 * limit
    driver.unmap(address, 2 * count * GRANULE)
    driver.release(handle)
    driver.free_range(address, 2 * count * GRANULE)
    assert driver._memory.space.kernel_mappings == 0


@pytest.mark.alone
def test_lookup_stays_fast_with_10000_mappings(open_host: Callable[..., Host]) -> None:
    """A look-up among 10,000 mappings costs at most a few times one among 100."""
    driver = open_host().driver
    handle = driver.create(GRANULE, AllocationProperties(device()))
    costs: list[float] = []
    for count in (100, 10_000):
        address = driver.reserve(count * GRANULE)
        for index in range(count):
            driver.map(address + index * GRANULE, GRANULE, handle)
        probes = [address + random.Random(1).randrange(count) * GRANULE + 9 for _ in range(2000)]
        best = LIMIT
        for _ in range(5):
            began = time.perf_counter()
            for probe in probes:
                driver.get_access(probe, device())
            best = min(best, time.perf_counter() - began)
        costs.append(best)
    assert costs[1] < 4 * costs[0]


def test_address_space_limit() -> None:
    """Under `ulimit -v`, reserving too much is an error about address space that names the limit."""
    out = run_child(
        """
        from remap.drivers.host import HostDriver
        from remap.errors import OutOfAddressSpaceError
        driver = HostDriver()
        driver.free_range(driver.reserve(1 << 30), 1 << 30)
        try:
            driver.reserve(64 << 30)
        except OutOfAddressSpaceError as error:
            print(error)
        driver.shutdown()
        """,
        prefix="ulimit -v 8000000",
    )
    assert "ulimit -v" in out
    assert "CUDA_ERROR_OUT_OF_MEMORY" in out


def test_64_tib_yes_128_tib_no(host: Host) -> None:
    """64 TiB of addresses can be reserved, 128 TiB cannot: an error of address space, not of memory."""
    size = 64 << 40
    host.driver.free_range(host.driver.reserve(size), size)
    with pytest.raises(OutOfAddressSpaceError, match="not memory"):
        host.driver.reserve(2 * size)
    with pytest.raises(OutOfAddressSpaceError):
        host.driver.reserve((1 << 63) - GRANULE, 1 << 62)


def test_pages_come_back(host: Host) -> None:
    """Freed memory is given back to the system, and new memory reads zero though an extent was used before."""

    def shared() -> int:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        found = re.search(r"RssShmem:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1])

    driver = host.driver
    before = shared()
    address = host.memory(32)
    driver.fill(address, 1, 1, 32 * GRANULE, 0)
    driver.synchronize_context()
    assert shared() > before + 60_000
    driver.unmap(address, 32 * GRANULE)
    assert shared() < before + 4_000
    assert driver.memory_info().used == 0
    fresh = host.memory(2)
    assert host.bytes_at(fresh, 2 * GRANULE) == bytes(2 * GRANULE)
