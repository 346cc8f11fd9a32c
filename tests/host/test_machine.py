"""What the machine can be made of, and what its devices say; plain memory; places on the host."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest

from remap.drivers.host import HostDriver
from remap.drivers.protocol import Driver, SupportsModules, SupportsSharing
from remap.errors import CudaResult, DriverError, InvalidValueError, NotSupportedError, OutOfMemoryError
from remap.types import CAPABILITIES, Access, AllocationProperties, HandleType, HostNuma
from remap.types import Host as AtHost

from .support import GRANULE, Host, device

READ_WRITE = Access.READ_WRITE


def test_is_a_driver(host: Host) -> None:
    """It has every call of the protocol; it shares memory, and loads no modules."""
    driver: Driver = host.driver
    assert isinstance(driver, SupportsSharing)
    assert not isinstance(driver, SupportsModules)
    assert driver.name == "host"
    assert driver.version().startswith("host driver ")
    for name in dir(Driver):
        if not name.startswith("_"):
            assert hasattr(driver, name)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"devices": 0}, "devices=0"),
        ({"devices": 65}, "devices=65"),
        ({"memory": "3MiB"}, "memory"),
        ({"memory": -1}, "memory"),
        ({"memory": ["2MiB"]}, "memory"),
        ({"memory": "1 GB"}, "GB"),
        ({"granularity": 3 << 20}, "granularity"),
        ({"granularity": 1024}, "page size"),
        ({"peers": "some"}, "peers"),
        ({"peers": [[True]]}, "peers"),
        ({"numa_nodes": 0}, "numa_nodes"),
        ({"clock_khz": [1]}, "clock_khz"),
        ({"capabilities": {"speed": True}}, "speed"),
        ({"capabilities": {"fabric": True}}, "fabric"),
    ],
)
def test_wrong_options(options: dict[str, Any], named: str) -> None:
    """An option that cannot be is named, with its rule."""
    with pytest.raises(InvalidValueError, match=named):
        HostDriver(**options)


def test_options(open_host: Callable[..., Host]) -> None:
    """Sizes, speeds, peers and granularity are what was asked for."""
    host = open_host(
        devices=3,
        memory=["4MiB", "8MiB", 16 << 20],
        granularity="64KiB",
        peers=[[False, True, False], [True, False, False], [False, False, True]],
        clock_khz=[1, 3, 2],
    )
    driver = host.driver
    found = [driver.device_properties(index) for index in range(3)]
    assert [one.memory >> 20 for one in found] == [4, 8, 16]
    assert max(found, key=lambda one: one.speed) is found[1]
    assert driver.can_access_peer(0, 1)
    assert not driver.can_access_peer(0, 2)
    assert not driver.can_access_peer(2, 2)
    assert driver.granularity(AllocationProperties(device())).minimum == 64 << 10
    handle = driver.create(64 << 10, AllocationProperties(device(2)))
    address = driver.reserve(64 << 10)
    driver.map(address, 64 << 10, handle)
    with pytest.raises(DriverError, match="peers"):
        driver.set_access(address, 64 << 10, [(device(0), READ_WRITE)])
    driver.set_access(address, 64 << 10, [(device(2), READ_WRITE)])
    for call in (driver.device_properties, driver.capabilities, driver.retain_context):
        for number in (3, -1):
            with pytest.raises(DriverError) as error:
                call(number)
            assert error.value.code == CudaResult.INVALID_DEVICE


def test_capabilities(open_host: Callable[..., Host]) -> None:
    """Every capability is answered for, with a reason where it is missing; one that is switched off is refused."""
    host = open_host(capabilities={"vmm": False, "posix_fd": False}, compression=True)
    found = host.driver.capabilities(0)
    assert tuple(found) == CAPABILITIES
    assert all(one.supported or one.reason for one in found.values())
    assert found["compression"]
    assert not found["fabric"]
    with pytest.raises(NotSupportedError, match="switched off") as error:
        host.driver.create(GRANULE, AllocationProperties(device()))
    assert error.value.capability == "vmm"
    with pytest.raises(NotSupportedError):
        host.driver.reserve(GRANULE)
    host.driver.create(GRANULE, AllocationProperties(HostNuma(0)))
    with pytest.raises(NotSupportedError) as error:
        host.driver.create(GRANULE, AllocationProperties(HostNuma(0), frozenset({HandleType.POSIX_FD})))
    assert error.value.capability == "posix_fd"
    host.driver.free(host.driver.allocate(10))


@pytest.mark.parametrize("compression", [False, True])
def test_compression_is_a_request(open_host: Callable[..., Host], compression: bool) -> None:
    """Compressible memory is always created; what came of it is read back."""
    driver = open_host(compression=compression).driver
    handle = driver.create(GRANULE, AllocationProperties(device(), compressible=True))
    assert driver.properties_of(handle).compressible is compression


def test_host_memory_has_its_own_budget(open_host: Callable[..., Host]) -> None:
    """Memory on the host takes nothing from a device; both nodes share one budget; each keeps its own bytes."""
    host = open_host(host_memory="8MiB", numa_nodes=2)
    driver = host.driver
    places = [AtHost(), HostNuma(0), HostNuma(1)]
    addresses = [host.memory(at=place) for place in places]
    assert driver.memory_info().used == 0
    with pytest.raises(OutOfMemoryError, match="the host"):
        driver.create(2 * GRANULE, AllocationProperties(AtHost()))
    for number, address in enumerate(addresses):
        driver.fill(address, number + 1, 1, GRANULE, 0)
    driver.synchronize_context()
    driver.unmap(addresses[0], GRANULE)  # frees memory of HOST, and must leave that of node 0 alone
    assert host.bytes_at(addresses[1], GRANULE) == b"\x02" * GRANULE
    assert host.bytes_at(addresses[2], GRANULE) == b"\x03" * GRANULE
    assert host.bytes_at(host.memory(at=AtHost()), GRANULE) == bytes(GRANULE)
    for node in (2, 99):
        with pytest.raises(DriverError) as error:
            driver.create(GRANULE, AllocationProperties(HostNuma(node)))
        assert error.value.code == CudaResult.INVALID_VALUE


def test_the_cpu_reads_host_memory(host: Host) -> None:
    """Once the host is granted access to memory on it, the address works in plain C; as host memory of copies, too."""
    driver = host.driver
    address = host.memory(at=AtHost())
    driver.set_access(address, GRANULE, [(AtHost(), READ_WRITE), (device(), Access.NONE)])
    ctypes.memset(address, 0x41, 4)
    other = host.memory()
    driver.copy_to_device(other, address, 4, 0)
    assert host.bytes_at(other, 4) == b"AAAA"
    with pytest.raises(DriverError, match="no access"):
        driver.fill(address, 1, 1, 4, 0)


@pytest.mark.parametrize("coherent", [False, True])
def test_the_cpu_and_device_memory(open_host: Callable[..., Host], coherent: bool) -> None:
    """The host is granted access to device memory only on a coherent machine."""
    host = open_host(coherent=coherent)
    driver = host.driver
    assert bool(driver.capabilities(0)["coherent"]) is coherent
    address = host.memory()
    if not coherent:
        with pytest.raises(NotSupportedError):
            driver.set_access(address, GRANULE, [(device(), Access.READ), (AtHost(), Access.READ)])
        assert driver.get_access(address, device()) is READ_WRITE
        return
    driver.set_access(address, GRANULE, [(AtHost(), READ_WRITE)])
    ctypes.memset(address, 0x42, 4)
    assert host.bytes_at(address, 4) == b"BBBB"


def test_host_addresses_of_copies_are_checked(host: Host) -> None:
    """An address of ours that is passed as host memory has to be usable; a null or absurd one is refused."""
    driver = host.driver
    address = host.memory()
    hole = driver.reserve(GRANULE)
    for bad in (0, -8, 1 << 64, hole, address - 8):
        with pytest.raises(DriverError) as error:
            driver.copy_to_device(address, bad, 16, 0)
        assert error.value.code == CudaResult.INVALID_VALUE


def test_plain_memory(host: Host) -> None:
    """Small pieces share a slab, end exactly where they were asked to, and give the slab back with the last one."""
    driver = host.driver
    one, two = driver.allocate(1000), driver.allocate(1000)
    assert one % 256 == two % 256 == 0
    assert driver.memory_info().used == GRANULE
    assert driver.address_range(one + 999).base == one
    with pytest.raises(DriverError):
        driver.address_range(one + 1000)
    for size in (1001, 2048):
        with pytest.raises(DriverError, match="over the end"):
            driver.fill(one, 1, 1, size, 0)
    for call in (driver.unmap, lambda at, size: driver.set_access(at, size, [(device(), READ_WRITE)])):
        with pytest.raises(DriverError) as error:
            call(one, GRANULE)
        assert error.value.code == CudaResult.INVALID_VALUE
    driver.fill(one, 1, 1, 1000, 0)
    driver.fill(two, 2, 1, 1000, 0)
    assert host.bytes_at(one, 1000) == b"\x01" * 1000
    for wrong in (one + 256, 12345):
        with pytest.raises(DriverError):
            driver.free(wrong)
    driver.free(one)
    assert driver.allocate(600) == one
    driver.free(one)
    driver.free(two)
    driver.free(0)
    assert driver.memory_info().used == 0
    with pytest.raises(DriverError):
        driver.free(two)
    with pytest.raises(OutOfMemoryError):
        driver.allocate(1 << 40)
    with pytest.raises(DriverError):
        driver.allocate(0)


def test_a_context_takes_its_things_along(host: Host) -> None:
    """With the last reference of a context go its plain memory, streams and events; VMM memory stays."""
    driver = host.driver
    address = host.memory()
    driver.allocate(100)
    stream = driver.create_stream()
    driver.release_context(0)
    with pytest.raises(DriverError) as error:
        driver.memory_info()
    assert error.value.code == CudaResult.CONTEXT_IS_DESTROYED
    with pytest.raises(DriverError) as error:
        driver.release_context(0)
    assert error.value.code == CudaResult.INVALID_CONTEXT
    driver.retain_context(0)
    assert driver.memory_info().used == GRANULE
    with pytest.raises(DriverError):
        driver.synchronize_stream(stream)
    assert host.bytes_at(address, 1) == b"\0"


def test_context_stacks(host: Host) -> None:
    """Each thread has a stack of its own; popping an empty one and pushing what is none are refused."""
    driver = host.driver
    driver.push_context(driver.retain_context(1))
    assert driver.current_context() == 2
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(driver.current_context()))
    thread.start()
    thread.join()
    assert seen == [0]
    assert driver.pop_context() == 2
    assert driver.pop_context() == 1
    assert driver.current_context() == 0
    with pytest.raises(DriverError) as error:
        driver.pop_context()
    assert error.value.code == CudaResult.INVALID_CONTEXT
    with pytest.raises(DriverError) as error:
        driver.push_context(0)
    assert error.value.code == CudaResult.INVALID_VALUE
    with pytest.raises(DriverError) as error:
        driver.fill(1, 1, 1, 1, 0)
    assert error.value.code == CudaResult.INVALID_CONTEXT


def test_absurd_sizes_leave_no_trace(host: Host) -> None:
    """Refused creations use up neither budget nor arena, however large they were."""
    driver = host.driver
    for _ in range(20):
        with pytest.raises(OutOfMemoryError):
            driver.create(1 << 60, AllocationProperties(device()))
        with pytest.raises(OutOfMemoryError):
            driver.create(1 << 60, AllocationProperties(device(), frozenset({HandleType.POSIX_FD})))
    assert driver.memory_info().used == 0
    assert host.bytes_at(host.memory(), 4) == bytes(4)
    for size in (1 << 63, 1 << 80):
        with pytest.raises(DriverError):
            driver.create(size, AllocationProperties(device()))
        with pytest.raises(DriverError):
            driver.reserve(size)


def test_copies_between_devices(host: Host) -> None:
    """The current device needs access to both ends, unless they are plain memory; fills need their own device's."""
    driver = host.driver
    own, others = host.memory(), host.memory(access=Access.NONE, at=device(1))
    driver.set_access(others, GRANULE, [(device(1), READ_WRITE)])
    for target, source in ((own, others), (others, own)):
        with pytest.raises(DriverError) as error:
            driver.copy(target, source, 16, 0)
        assert error.value.code == CudaResult.INVALID_VALUE
    driver.push_context(driver.retain_context(1))
    plain, stream = driver.allocate(64), driver.create_stream()
    driver.pop_context()
    driver.copy(plain, own, 64, 0)
    driver.copy(own, plain, 64, 0)
    with pytest.raises(DriverError):
        driver.fill(plain, 1, 1, 64, 0)
    driver.fill(others, 7, 1, 16, stream)  # a fill looks at the stream's device, not at the current one
    with pytest.raises(DriverError):
        driver.fill(own, 7, 1, 16, stream)
    driver.synchronize_stream(stream)
    driver.set_access(others, GRANULE, [(device(0), Access.READ)])
    driver.copy(own, others, 16, 0)
    assert host.bytes_at(own, 16) == b"\x07" * 16
