"""Multicast objects of the host driver: CUDA's order and rules, and what operations do to the replicas (B6)."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest

from remap.drivers.host import HostDriver
from remap.drivers.multicast_power import MulticastLaunch, MulticastProperties, SupportsMulticast
from remap.errors import CudaResult, DriverError, InUseError, NotSupportedError
from remap.sizes import MiB
from remap.testing.children import run_in_child
from remap.types import Access, AllocationProperties, HandleType, LaunchConfig, Location, LocationKind

pytestmark = pytest.mark.skipif(
    os.environ["REMAP_DRIVER"] != "host",
    reason="these are the host driver's own objects, and multicast is off here",
)

UNIT = 4 * MiB
FD = frozenset({HandleType.POSIX_FD})
ONE = LaunchConfig((1, 1, 1), (1, 1, 1))


def place(index: int) -> Location:
    """Return a device as a location."""
    return Location(LocationKind.DEVICE, index)


@dataclass
class Values:
    """Arguments of a kernel that takes none."""

    values: tuple[object, ...] = ()
    pointers: int = field(default=0)


class Bench:
    """A host driver of two devices, with ways to make what the tests need, and to undo all of it."""

    def __init__(self, **options: Any) -> None:
        self.driver = HostDriver(devices=2, **options)
        self.driver.push_context(self.driver.retain_context(0))

    def team(self, size: int = UNIT, added: int = 2, kinds: frozenset[HandleType] = FD) -> int:
        """Return an object for two devices, of which so many have been added."""
        handle = self.driver.create_multicast(MulticastProperties(2, size, kinds))
        for device in range(added):
            self.driver.add_multicast_device(handle, device)
        return handle

    def memory(self, device: int, size: int = UNIT, kinds: frozenset[HandleType] = FD) -> int:
        """Return memory on a device."""
        return self.driver.create(size, AllocationProperties(place(device), kinds))

    def map(self, handle: int, size: int = UNIT) -> int:
        """Map memory, or an object, for device 0."""
        address = self.driver.reserve(size, UNIT)
        self.driver.map(address, size, handle)
        self.driver.set_access(address, size, [(place(0), Access.READ_WRITE)])
        return address

    def run(self, kernel: Callable[[Any], None]) -> None:
        """Run a kernel on device 0 and wait for it."""
        self.driver.launch(kernel, ONE, 0, Values(), None)
        self.driver.synchronize_stream(0)

    def read(self, address: int, size: int = 4) -> bytes:
        """Return bytes at the memory's own addresses."""
        found: list[bytes] = []
        self.run(lambda launch: found.append(bytes(launch.read(address, size))))
        return found[0]


@pytest.fixture(name="bench")
def _bench() -> Generator[Bench]:
    bench = Bench()
    yield bench
    bench.driver.shutdown()


def refused(call: Callable[..., object], *arguments: object) -> str:
    """Return the CUDA name of the refusal of a call."""
    with pytest.raises(DriverError) as caught:
        call(*arguments)
    assert caught.value.rule
    return caught.value.name.removeprefix("CUDA_ERROR_")


def test_it_has_the_power(bench: Bench) -> None:
    """The host driver has multicast objects, with a granularity that is not that of memory."""
    driver = bench.driver
    assert isinstance(driver, SupportsMulticast)
    assert driver.capabilities(0)["multicast"]
    own = driver.multicast_granularity(MulticastProperties(2, UNIT)).minimum
    assert own == UNIT > driver.granularity(AllocationProperties(place(0))).minimum


@pytest.mark.parametrize("shared", [False, True])
def test_one_operation_reaches_every_replica(bench: Bench, shared: bool) -> None:
    """What one operation writes is in the memory of every device, at its own addresses; reading sees every replica."""
    driver, kinds = bench.driver, FD if shared else frozenset[HandleType]()
    handle, memories = bench.team(kinds=kinds), [bench.memory(device, kinds=kinds) for device in range(2)]
    for memory in memories:
        driver.bind_multicast(handle, 0, memory, 0, UNIT)
    view, own = bench.map(handle), [bench.map(memory) for memory in memories]
    seen: list[list[bytes]] = []

    def kernel(launch: MulticastLaunch) -> None:
        with launch.multimem(view + 100, 4, writes=True) as replicas:
            for one in replicas:
                one[:] = b"abcd"
        launch_any: Any = launch
        launch_any.write(own[1] + 100, 2)[:] = b"xy"
        with launch.multimem(view + 100, 4, writes=False) as replicas:
            seen.append([bytes(one) for one in replicas])

    bench.run(kernel)
    assert seen == [[b"abcd", b"xycd"]]
    assert [bench.read(address + 100) for address in own] == [b"abcd", b"xycd"]


def test_the_order(bench: Bench) -> None:
    """Binding and mapping before every device was added is refused, not waited for; so is a device too many."""
    driver = bench.driver
    handle, memory = bench.team(added=1), bench.memory(0)
    address = driver.reserve(UNIT, UNIT)
    assert refused(driver.bind_multicast, handle, 0, memory, 0, UNIT) == "ILLEGAL_STATE"
    assert refused(driver.map, address, UNIT, handle) == "ILLEGAL_STATE"
    assert refused(driver.add_multicast_device, handle, 0) == "INVALID_VALUE"
    assert refused(driver.add_multicast_device, handle, 2) == "INVALID_DEVICE"
    driver.add_multicast_device(handle, 1)
    driver.bind_multicast(handle, 0, memory, 0, UNIT)
    driver.map(address, UNIT, handle)
    single = driver.create_multicast(MulticastProperties(1, UNIT))
    driver.add_multicast_device(single, 0)
    assert refused(driver.add_multicast_device, single, 1) == "INVALID_VALUE"


def test_sizes_and_offsets(bench: Bench) -> None:
    """Sizes, offsets and addresses are multiples of the object's own granularity and lie within both ends."""
    driver = bench.driver
    for size in (0, -UNIT, UNIT // 2, UNIT + MiB):
        assert refused(driver.create_multicast, MulticastProperties(2, size)) == "INVALID_VALUE"
    for devices in (0, 65):
        assert refused(driver.create_multicast, MulticastProperties(devices, UNIT)) == "INVALID_VALUE"
    handle, memory = bench.team(2 * UNIT), bench.memory(0, 2 * UNIT)
    for offset, skip, size in (
        (0, 0, 0),
        (0, 0, UNIT // 2),
        (UNIT // 2, 0, UNIT),
        (0, UNIT // 2, UNIT),
        (0, 0, 3 * UNIT),
        (2 * UNIT, 0, UNIT),
        (0, 2 * UNIT, UNIT),
        (-UNIT, 0, UNIT),
        (0, -UNIT, UNIT),
    ):
        assert refused(driver.bind_multicast, handle, offset, memory, skip, size) == "INVALID_VALUE"
    driver.bind_multicast(handle, UNIT, memory, 0, UNIT)
    assert refused(driver.bind_multicast, handle, UNIT, memory, UNIT, UNIT) == "INVALID_VALUE"  # taken
    driver.bind_multicast(handle, 0, memory, UNIT, UNIT)
    address = driver.reserve(4 * UNIT, UNIT)
    assert refused(driver.map, address + UNIT // 2, 2 * UNIT, handle) == "INVALID_VALUE"
    assert refused(driver.map, address, UNIT, handle) == "NOT_SUPPORTED"
    assert refused(driver.map, address, 2 * UNIT, handle, UNIT) == "NOT_SUPPORTED"


def test_what_can_be_bound(bench: Bench) -> None:
    """Memory of a device of the team is bound, shareable where the object is; objects are told from memory."""
    driver = bench.driver
    handle, memory = bench.team(), bench.memory(0)
    plain = bench.memory(0, kinds=frozenset())
    host = driver.create(UNIT, AllocationProperties(Location(LocationKind.HOST_NUMA), FD))
    assert refused(driver.bind_multicast, handle, 0, plain, 0, UNIT) == "INVALID_VALUE"
    assert refused(driver.bind_multicast, handle, 0, host, 0, UNIT) == "INVALID_DEVICE"
    assert refused(driver.bind_multicast, handle, 0, handle, 0, UNIT) == "INVALID_VALUE"
    assert refused(driver.bind_multicast, memory, 0, memory, 0, UNIT) == "INVALID_VALUE"
    assert refused(driver.add_multicast_device, memory, 0) == "INVALID_VALUE"
    assert (
        refused(driver.export_handle, bench.team(kinds=frozenset()), HandleType.POSIX_FD) == "INVALID_VALUE"
    )
    single = driver.create_multicast(MulticastProperties(1, UNIT, FD))
    driver.add_multicast_device(single, 1)
    assert refused(driver.bind_multicast, single, 0, memory, 0, UNIT) == "INVALID_DEVICE"


def test_devices_without_a_link() -> None:
    """Devices that are no peers cannot be in one team."""
    bench = Bench(peers="none")
    handle = bench.team(added=1)
    assert refused(bench.driver.add_multicast_device, handle, 1) == "INVALID_DEVICE"
    bench.driver.shutdown()


def test_nothing_else_means_anything_there(bench: Bench) -> None:
    """Copies and fills of multicast addresses are refused at the call; devices outside of the team get no right."""
    driver = bench.driver
    handle = bench.team()
    view, memory = bench.map(handle), bench.map(bench.memory(0))
    assert refused(driver.fill, view, 1, 1, 4, 0) == "INVALID_VALUE"
    assert refused(driver.copy, memory, view, 4, 0) == "INVALID_VALUE"
    assert refused(driver.copy, view, memory, 4, 0) == "INVALID_VALUE"
    single = driver.create_multicast(MulticastProperties(1, UNIT))
    driver.add_multicast_device(single, 1)
    address = driver.reserve(UNIT, UNIT)
    driver.map(address, UNIT, single)
    assert refused(driver.set_access, address, UNIT, [(place(0), Access.READ)]) == "INVALID_VALUE"
    driver.set_access(address, UNIT, [(place(1), Access.READ)])
    assert driver.get_access(address, place(1)) is Access.READ


FAULTS = ("before mapping", "no multicast address", "plain load", "no replica", "beyond the end", "read-only")


@pytest.mark.parametrize("what", FAULTS)
def test_faults(what: str) -> None:
    """A kernel that uses multicast addresses wrongly loses the context, with the rule in the error (T10)."""
    name, text = run_in_child(fault, what)
    assert name == "CUDA_ERROR_ILLEGAL_ADDRESS"
    words = {
        "before mapping": "nothing is mapped",
        "no multicast address": "no multicast address",
        "plain load": "only multimem operations",
        "no replica": "no memory bound there",
        "beyond the end": "runs over the end",
        "read-only": "no such right",
    }
    assert words[what] in text


def fault(what: str) -> tuple[str, str]:
    """Do one wrong thing in a kernel; return the error of the wait."""
    bench = Bench()
    driver = bench.driver
    handle, memories = bench.team(), [bench.memory(device) for device in range(2)]
    for memory in memories[: 1 if what == "no replica" else 2]:
        driver.bind_multicast(handle, 0, memory, 0, UNIT)
    view = driver.reserve(UNIT, UNIT) if what == "before mapping" else bench.map(handle)
    own = bench.map(memories[0])
    if what == "read-only":
        driver.set_access(view, UNIT, [(place(0), Access.READ)])
    at = {"no multicast address": own, "beyond the end": view + UNIT - 2}.get(what, view)

    def kernel(launch: Any) -> None:
        if what == "plain load":
            launch.read(at, 4)
        with launch.multimem(at, 4, writes=True):
            raise AssertionError("it must not come so far")

    try:
        bench.run(kernel)
    except DriverError as error:
        return error.name, str(error)
    return "", ""


def test_unmapping_under_an_operation(bench: Bench) -> None:
    """The mapping is kept from being taken away under work that nothing has waited for, as any other (invariant 7)."""
    driver = bench.driver
    handle = bench.team()
    for device in range(2):
        driver.bind_multicast(handle, 0, bench.memory(device), 0, UNIT)
    view = bench.map(handle)

    def kernel(launch: MulticastLaunch) -> None:
        with launch.multimem(view, 4, writes=True):
            pass

    driver.launch(kernel, ONE, 0, Values(), ())
    event = driver.create_event()
    driver.record_event(event, 0)
    driver.launch(kernel, ONE, 0, Values(), None)
    with pytest.raises(InUseError):
        driver.unmap(view, UNIT)
    driver.synchronize_stream(0)
    driver.unmap(view, UNIT)


def test_what_lives_how_long(bench: Bench) -> None:
    """Bound memory lives as long as the object, the object as long as its handle or mapping; then all is given back."""
    driver = bench.driver
    free = driver.memory_info().free
    fds = len(os.listdir("/proc/self/fd"))
    handle, memory = bench.team(), bench.memory(0)
    driver.bind_multicast(handle, 0, memory, 0, UNIT)
    driver.release(memory)
    assert driver.memory_info().free == free - UNIT
    view = bench.map(handle)
    driver.release(handle)
    assert driver.memory_info().free == free - UNIT
    driver.unmap(view, UNIT)
    assert driver.memory_info().free == free
    assert len(os.listdir("/proc/self/fd")) == fds
    assert refused(driver.map, view, UNIT, handle) == "INVALID_VALUE"


def test_unbinding(bench: Bench) -> None:
    """Exactly one binding of this process is undone, and its memory given back; anything else is refused."""
    driver = bench.driver
    free = driver.memory_info().free
    handle = bench.team(2 * UNIT)
    for device in range(2):
        memory = bench.memory(device, 2 * UNIT)
        driver.bind_multicast(handle, 0, memory, 0, 2 * UNIT)
        driver.release(memory)
    for device, offset, size in ((0, 0, UNIT), (0, UNIT, UNIT), (0, 2 * UNIT, UNIT)):
        assert refused(driver.unbind_multicast, handle, device, offset, size) == "INVALID_VALUE"
    driver.unbind_multicast(handle, 0, 0, 2 * UNIT)
    assert refused(driver.unbind_multicast, handle, 0, 0, 2 * UNIT) == "INVALID_VALUE"
    assert driver.memory_info().free == free
    memory = bench.memory(0, 2 * UNIT)
    driver.bind_multicast(handle, 0, memory, 0, 2 * UNIT)


def test_two_holders(bench: Bench) -> None:
    """An exported object is the same one for whoever imports it; it outlives its maker."""
    other = HostDriver(devices=1)
    driver = bench.driver
    handle = driver.create_multicast(MulticastProperties(2, UNIT, FD))
    fd = driver.export_handle(handle, HandleType.POSIX_FD)
    assert isinstance(fd, int)
    theirs = other.import_handle(fd, HandleType.POSIX_FD)
    os.close(fd)
    other.add_multicast_device(theirs, 0)
    assert refused(driver.bind_multicast, handle, 0, bench.memory(0), 0, UNIT) == "ILLEGAL_STATE"
    driver.add_multicast_device(handle, 0)  # device 0 of another machine is another device
    memory = other.create(UNIT, AllocationProperties(place(0), FD))
    other.bind_multicast(theirs, 0, memory, 0, UNIT)
    driver.bind_multicast(handle, 0, bench.memory(0), 0, UNIT)
    view = bench.map(handle)
    other.shutdown()

    def kernel(launch: MulticastLaunch) -> None:
        with launch.multimem(view, 4, writes=True) as replicas:
            assert len(replicas) == 2
            for one in replicas:
                one[:] = b"abcd"

    bench.run(kernel)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("REMAP_DISABLE_MULTICAST", "1"),
        ("NCCL_NVLS_ENABLE", "0"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
        ("NVSHMEM_DISABLE_NVLS", "1"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_switched_off(variable: str, value: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever forbids multicast to any library forbids it here, also after the driver was opened; no object is made."""
    if not late:
        monkeypatch.setenv(variable, value)
    driver = HostDriver()
    assert bool(driver.capabilities(0)["multicast"]) == late
    monkeypatch.setenv(variable, value)
    calls: list[Callable[[], object]] = [
        lambda: driver.multicast_granularity(MulticastProperties(2, UNIT)),
        lambda: driver.create_multicast(MulticastProperties(2, UNIT)),
        lambda: driver.add_multicast_device(1, 0),
        lambda: driver.bind_multicast(1, 0, 1, 0, UNIT),
        lambda: driver.unbind_multicast(1, 0, 0, UNIT),
    ]
    for call in calls:
        with pytest.raises(NotSupportedError, match=variable) as caught:
            call()
        assert (caught.value.capability, caught.value.code) == ("multicast", CudaResult.NOT_SUPPORTED)
    driver.shutdown()


def test_a_machine_without() -> None:
    """A driver opened without the capability refuses every call by its name."""
    driver = HostDriver(capabilities={"multicast": False})
    with pytest.raises(NotSupportedError, match="switched off when the host driver was opened"):
        driver.create_multicast(MulticastProperties(2, UNIT))
    driver.shutdown()
