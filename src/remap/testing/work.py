"""The rules of kernels on memory that comes and goes: T10 and T13."""

# ruff: noqa: N802 (a test carries the number of its rule)

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from remap.drivers.protocol import DEFAULT_STREAM
from remap.errors import CudaResult, IllegalAddressError, context_lost
from remap.testing.bench import NONE, READ, RW, Bench, DriverFactory, OpenDriver, Region, refused
from remap.testing.children import run_in_child
from remap.testing.kernels import KernelOpener
from remap.types import AllocationProperties, Host

LOST = CudaResult.ILLEGAL_ADDRESS


class WorkRules:
    """One test or a few for each rule; part of `DriverConformance`, which gives the fixtures."""

    # -- T10: kernels on forbidden memory; each in a process of its own, which loses its context --

    @pytest.mark.parametrize("state", ["unmapped", "none", "read"])
    def test_T10_a_kernel_on_forbidden_memory_faults(
        self, factory: DriverFactory, kernel: KernelOpener, state: str
    ) -> None:
        """The launch succeeds, the next synchronisation is ILLEGAL_ADDRESS, and so is all work from then on."""
        run_in_child(_fault, factory, kernel, state, "work")

    def test_T10_memory_objects_after_a_fault(self, factory: DriverFactory, kernel: KernelOpener) -> None:
        """After a fault, calls that need no context go on working, so that memory can be given back (seen on H200)."""
        run_in_child(_fault, factory, kernel, "unmapped", "objects")

    def test_T10_a_kernel_on_good_memory(self, bench: Bench, kernel: KernelOpener) -> None:
        """A kernel writes through the mapping that allows it, and a read-only alias shows what it wrote."""
        region = bench.region(reserved=2 * bench.size)
        alias = region.address + region.size
        bench.driver.map(alias, region.size, region.handle)
        bench.grant(alias, region.size, READ)
        store = kernel(bench.driver)
        store.store(region.address + 64, 0x01020304)
        bench.driver.synchronize_context()
        assert bytes(bench.read(alias + 64, 4)) == b"\x04\x03\x02\x01"
        store.close()

    # -- T13: addresses that survive --

    def test_T13_a_pointer_survives_re_backing(self, bench: Bench, kernel: KernelOpener) -> None:
        """Unmap, create, map and grant at the same address: the raw pointer is valid and sees the new memory."""
        region = bench.region()
        store = kernel(bench.driver)
        store.store(region.address, 1)
        bench.driver.synchronize_context()
        bench.driver.unmap(region.address, region.size)
        fresh = bench.create()
        bench.driver.map(region.address, region.size, fresh)
        bench.grant(region.address, region.size, RW)
        bench.fill(region.address, 0, region.size)
        store.store(region.address, 2)
        bench.driver.synchronize_context()
        assert bench.read(region.address, 8).view(np.uint32).tolist() == [2, 0]
        # The old memory is another one, and has kept what it held.
        other = bench.reserve()
        bench.driver.map(other, region.size, region.handle)
        bench.grant(other, region.size, READ)
        assert bench.read(other, 4).view(np.uint32).tolist() == [1]
        store.close()

    def test_T13_a_pointer_survives_a_move_to_the_host(self, bench: Bench, kernel: KernelOpener) -> None:
        """With host memory behind the same address, kernels and the CPU use the same bytes there."""
        bench.require(Host())
        region = bench.region()
        store = kernel(bench.driver)
        store.store(region.address, 1)
        bench.driver.synchronize_context()
        bench.driver.unmap(region.address, region.size)
        bench.driver.map(region.address, region.size, bench.create(location=Host()))
        bench.driver.set_access(region.address, region.size, [(bench.device, RW), (Host(), RW)])
        store.store(region.address, 0x0A0B0C0D)
        bench.driver.synchronize_context()
        assert ctypes.string_at(region.address, 4) == b"\x0d\x0c\x0b\x0a"
        ctypes.memset(region.address, 0x44, 4)
        assert bench.holds(region.address, 4, 0x44)
        store.close()


def _fault(factory: DriverFactory, kernel: KernelOpener, state: str, then: str) -> None:
    """Let a kernel write to forbidden memory, and check what `then` returns afterwards."""
    opened = OpenDriver(factory)
    bench = Bench(opened)  # never closed: a lost context takes everything with it
    driver = bench.driver
    good = bench.region()
    bad = bench.region({"unmapped": None, "none": NONE, "read": READ}[state])
    if state == "unmapped":
        driver.unmap(bad.address, bad.size)
    store = kernel(driver)
    store.store(good.address, 7)
    driver.synchronize_context()
    assert bench.read(good.address, 4).view(np.uint32).tolist() == [7]
    assert not context_lost()

    store.store(bad.address, 8)
    with refused(LOST, IllegalAddressError):
        driver.synchronize_context()
    assert context_lost()
    if then == "objects":
        _give_back(bench, good)
        return
    host = np.zeros(4, np.uint8)
    calls: list[Callable[[], object]] = [
        driver.synchronize_context,
        driver.memory_info,
        driver.create_stream,
        lambda: driver.allocate(64),
        lambda: driver.fill(good.address, 1, 1, 4, DEFAULT_STREAM),
        lambda: driver.copy_to_host(host.ctypes.data, good.address, 4, DEFAULT_STREAM),
        lambda: store.store(good.address, 9),
        driver.synchronize_context,
    ]
    for call in calls:
        with refused(LOST):
            call()


def _give_back(bench: Bench, good: Region) -> None:
    """Make the calls that take no context on old and new objects."""
    driver = bench.driver
    driver.unmap(good.address, good.size)
    driver.release(good.handle)
    driver.free_range(good.address, good.size)
    handle = driver.create(bench.size, AllocationProperties(bench.device))
    address = driver.reserve(bench.size)
    driver.map(address, bench.size, handle)
    driver.set_access(address, bench.size, [(bench.device, RW)])
    driver.unmap(address, bench.size)
    driver.release(handle)
    driver.free_range(address, bench.size)
