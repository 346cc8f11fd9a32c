"""The rules of access and of what the driver tells about addresses: T6, T9, T11 and T12."""

# ruff: noqa: N802 (a test carries the number of its rule)

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import pytest

from remap.drivers.protocol import DEFAULT_STREAM, Driver
from remap.errors import CudaResult
from remap.testing.bench import NONE, READ, RW, Bench, Bytes, DriverFactory, OpenDriver, refused
from remap.testing.children import run_in_child
from remap.types import Access, Host, HostNuma, Location, LocationKind

INVALID_VALUE = CudaResult.INVALID_VALUE
NOT_FOUND = CudaResult.NOT_FOUND

BLOCK = 4096
"""How many bytes the transfers of T9 move."""


def _fill(driver: Driver, address: int, good: int, host: Bytes) -> None:
    del good, host
    driver.fill(address, 1, 4, BLOCK // 4, DEFAULT_STREAM)


def _copy_in(driver: Driver, address: int, good: int, host: Bytes) -> None:
    del good
    driver.copy_to_device(address, host.ctypes.data, BLOCK, DEFAULT_STREAM)


def _copy_onto(driver: Driver, address: int, good: int, host: Bytes) -> None:
    del host
    driver.copy(address, good, BLOCK, DEFAULT_STREAM)


def _copy_out(driver: Driver, address: int, good: int, host: Bytes) -> None:
    del good
    driver.copy_to_host(host.ctypes.data, address, BLOCK, DEFAULT_STREAM)


def _copy_from(driver: Driver, address: int, good: int, host: Bytes) -> None:
    del host
    driver.copy(good, address, BLOCK, DEFAULT_STREAM)


WRITES = {"fill": _fill, "copy_to_device": _copy_in, "copy_onto": _copy_onto}
READS = {"copy_to_host": _copy_out, "copy_from": _copy_from}
TRANSFERS = {**WRITES, **READS}


class AccessRules:
    """One test or a few for each rule; part of `DriverConformance`, which gives the fixtures."""

    # -- T6: access --

    def test_T6_a_new_mapping_has_no_access(self, bench: Bench) -> None:
        """Mapping grants nothing to anyone, also where another mapping had access before."""
        region = bench.region(None)
        for _ in range(2):
            for index in range(bench.driver.device_count()):
                location = Location(LocationKind.DEVICE, index)
                assert bench.driver.get_access(region.address, location) is NONE
            with refused(INVALID_VALUE):
                bench.fill(region.address, 1, region.size)
            bench.grant(region.address, region.size, RW)
            bench.driver.unmap(region.address, region.size)
            bench.driver.map(region.address, region.size, region.handle)

    @pytest.mark.parametrize("access", [RW, READ, NONE], ids=str)
    def test_T6_every_right_reads_back(self, bench: Bench, access: Access) -> None:
        """None, read and read-write are accepted after any other right, and read back, anywhere in the mapping."""
        region = bench.region(None)
        for before in (RW, READ, NONE):
            bench.grant(region.address, region.size, before)
            bench.grant(region.address, region.size, access)
            for where in (0, region.size - 1):
                assert bench.driver.get_access(region.address + where, bench.device) is access

    def test_T6_one_call_for_several_mappings(self, bench: Bench) -> None:
        """A range may span adjacent mappings, aliases of one allocation among them."""
        size = bench.size
        region = bench.region(None, reserved=3 * size)
        bench.driver.map(region.address + size, size, bench.create())
        bench.driver.map(region.address + 2 * size, size, region.handle)
        bench.grant(region.address, 3 * size, RW)
        bench.fill(region.address, 6, size)
        assert bench.holds(region.address + 2 * size, size, 6)
        bench.grant(region.address + size, 2 * size, READ)
        rights = [bench.driver.get_access(region.address + index * size, bench.device) for index in range(3)]
        assert rights == [RW, READ, READ]

    def test_T6_whole_mappings_only(self, bench: Bench) -> None:
        """A part of a mapping, an unmapped address, or a hole in the range is refused; rights stay as they were."""
        size = bench.size
        region = bench.region(READ, reserved=3 * size)
        half = size // 2
        for address, length in [
            (region.address, half),
            (region.address + half, half),
            (region.address + size, size),
            (region.address, 2 * size),
        ]:
            with refused(INVALID_VALUE):
                bench.grant(address, length, RW)
        assert bench.driver.get_access(region.address, bench.device) is READ
        assert bench.driver.get_access(region.address + half, bench.device) is READ

    def test_T6_an_empty_list(self, bench: Bench) -> None:
        """No location at all is refused."""
        region = bench.region(READ)
        with refused(INVALID_VALUE):
            bench.driver.set_access(region.address, region.size, [])
        assert bench.driver.get_access(region.address, bench.device) is READ

    @pytest.mark.parametrize("location", [Host(), HostNuma(0)], ids=str)
    def test_T6_the_cpu_and_device_memory(self, bench: Bench, location: Location) -> None:
        """Granting the CPU access to device memory is NOT_SUPPORTED, and the device keeps its right."""
        region = bench.region(READ)
        for access in (READ, RW):
            with refused(CudaResult.NOT_SUPPORTED):
                bench.grant(region.address, region.size, access, location)
        assert bench.driver.get_access(region.address, bench.device) is READ

    @pytest.mark.parametrize("location", [Host(), HostNuma(0)], ids=str)
    def test_T6_the_cpu_and_host_memory(self, bench: Bench, location: Location) -> None:
        """Host memory can be granted to devices and the CPU, which then use the same bytes at the same address."""
        bench.require(location)
        region = bench.region(location=location)
        bench.grant(region.address, region.size, RW, location)
        assert bench.driver.get_access(region.address, location) is RW
        bench.fill(region.address, 0x5A, region.size)
        assert ctypes.string_at(region.address, 16) == b"\x5a" * 16
        ctypes.memset(region.address + region.size - 16, 0x21, 16)
        assert bench.holds(region.address + region.size - 16, 16, 0x21)

    def test_T6_other_locations_keep_their_rights(self, bench: Bench) -> None:
        """Granting one device changes nothing for another."""
        if bench.driver.device_count() < 2 or not bench.driver.can_access_peer(1, 0):
            pytest.skip("needs a second device that can reach the first")
        other = Location(LocationKind.DEVICE, 1)
        region = bench.region(READ)
        assert bench.driver.get_access(region.address, other) is NONE
        bench.grant(region.address, region.size, RW, other)
        assert bench.driver.get_access(region.address, bench.device) is READ
        bench.driver.set_access(region.address, region.size, [(bench.device, RW), (other, NONE)])
        assert bench.driver.get_access(region.address, bench.device) is RW
        assert bench.driver.get_access(region.address, other) is NONE

    # -- T9: copies and fills --

    @pytest.mark.parametrize("transfer", TRANSFERS)
    @pytest.mark.parametrize("state", ["unmapped", "none", "read", "read_write"])
    def test_T9_transfers_are_checked_at_the_call(self, bench: Bench, transfer: str, state: str) -> None:
        """Memory that is unmapped, has no access, or is read-only for a write is refused at once; work goes on."""
        good = bench.region()
        rights = {"unmapped": None, "none": NONE, "read": READ, "read_write": RW}
        region = bench.region(rights[state])
        if state == "unmapped":
            bench.driver.unmap(region.address, region.size)
        bench.fill(good.address, 0x11, BLOCK)
        host = np.full(BLOCK, 0x11, np.uint8)
        accepted = state == "read_write" or (state == "read" and transfer in READS)
        if accepted:
            TRANSFERS[transfer](bench.driver, region.address, good.address, host)
        else:
            with refused(INVALID_VALUE):
                TRANSFERS[transfer](bench.driver, region.address, good.address, host)
        bench.driver.synchronize_context()
        if not accepted or transfer in WRITES:
            assert bench.holds(good.address, BLOCK, 0x11)
            assert (host == 0x11).all()
        bench.fill(good.address, 2, BLOCK)

    @pytest.mark.parametrize("transfer", TRANSFERS)
    def test_T9_transfers_span_adjacent_mappings(self, bench: Bench, transfer: str) -> None:
        """A copy or a fill may run over the border of two mappings that both allow it."""
        good = bench.region()
        region = bench.region(None, reserved=2 * bench.size)
        bench.driver.map(region.address + region.size, region.size, bench.create())
        bench.grant(region.address, 2 * region.size, RW)
        bench.fill(good.address, 7, BLOCK)
        bench.fill(region.address, 7, 2 * region.size)
        host = np.full(BLOCK, 7, np.uint8)
        start = region.address + region.size - BLOCK // 2
        TRANSFERS[transfer](bench.driver, start, good.address, host)
        bench.driver.synchronize_context()
        expected = (
            np.full(BLOCK // 4, 1, np.uint32).view(np.uint8)
            if transfer == "fill"
            else np.full(BLOCK, 7, np.uint8)
        )
        assert (bench.read(start, BLOCK) == expected).all()
        assert bench.holds(start - 16, 16, 7)
        assert bench.holds(start + BLOCK, 16, 7)

    @pytest.mark.parametrize("behind", ["unmapped", "none", "read"])
    def test_T9_transfers_are_checked_to_the_end(self, factory: DriverFactory, behind: str) -> None:
        """A copy or a fill that begins on good memory and runs into forbidden memory is refused, too."""
        # In a process of its own: a driver that lets one through loses its context.
        run_in_child(_transfers_to_the_end, factory, behind)

    # -- T11: threads without a context --

    def test_T11_memory_objects_need_no_context(self, bench: Bench) -> None:
        """Reserve, create, map, set access, unmap, release and free work on a thread with no current context."""

        def life_cycle() -> None:
            assert bench.driver.current_context() == 0
            handle = bench.driver.create(bench.size, bench.properties())
            address = bench.driver.reserve(bench.size)
            bench.driver.map(address, bench.size, handle)
            bench.grant(address, bench.size, RW)
            assert bench.driver.get_access(address, bench.device) is RW
            bench.driver.unmap(address, bench.size)
            bench.driver.release(handle)
            bench.driver.free_range(address, bench.size)

        _on_a_thread(life_cycle)

    def test_T11_work_needs_a_context(self, bench: Bench) -> None:
        """Copies, fills, memory information, allocation, streams and events are INVALID_CONTEXT without one."""
        good, region = bench.region(), bench.region()
        host = np.zeros(BLOCK, np.uint8)

        def work() -> None:
            for transfer in TRANSFERS.values():
                with refused(CudaResult.INVALID_CONTEXT):
                    transfer(bench.driver, region.address, good.address, host)
            calls: list[Callable[[], object]] = [
                bench.driver.memory_info,
                bench.driver.create_stream,
                bench.driver.create_event,
                bench.driver.synchronize_context,
                lambda: bench.driver.allocate(BLOCK),
            ]
            for call in calls:
                with refused(CudaResult.INVALID_CONTEXT):
                    call()

        _on_a_thread(work)
        bench.fill(region.address, 1, region.size)

    # -- T12: what the driver tells about an address --

    def test_T12_address_range_is_one_mapping(self, bench: Bench) -> None:
        """The range of an address is the mapping that holds it: base and size of that chunk alone."""
        size = bench.size
        region = bench.region(reserved=4 * size)
        bench.driver.map(region.address + size, 2 * size, bench.create(2 * size))
        bench.grant(region.address + size, 2 * size, READ)
        for offset, base, length in [
            (0, 0, size),
            (size - 1, 0, size),
            (size, size, 2 * size),
            (2 * size, size, 2 * size),
        ]:
            found = bench.driver.address_range(region.address + offset)
            assert (found.base - region.address, found.size) == (base, length)

    def test_T12_address_range_of_nothing(self, bench: Bench) -> None:
        """Where nothing is mapped, or nobody has access, there is no range: NOT_FOUND."""
        address = bench.reserve(2 * bench.size)
        with refused(NOT_FOUND):
            bench.driver.address_range(address)
        bench.driver.map(address, bench.size, bench.create())
        with refused(NOT_FOUND):
            bench.driver.address_range(address)
        bench.grant(address, bench.size, READ)
        assert bench.driver.address_range(address).base == address
        with refused(NOT_FOUND):
            bench.driver.address_range(address + bench.size)
        bench.driver.unmap(address, bench.size)
        with refused(NOT_FOUND):
            bench.driver.address_range(address)

    def test_T12_pointer_info(self, bench: Bench) -> None:
        """A mapped address knows its whole reservation and its device; each mapping, aliases too, has its own id."""
        size = bench.size
        region = bench.region(None, reserved=4 * size)
        bench.driver.map(region.address + size, size, bench.create())
        bench.driver.map(region.address + 2 * size, size, region.handle)
        found = [bench.driver.pointer_info(region.address + index * size + 64) for index in range(3)]
        for info in found:
            assert (info.range_start, info.range_size) == (region.address, 4 * size)
            assert info.device == 0
        assert len({info.buffer_id for info in found}) == 3
        again = bench.driver.pointer_info(region.address + size - 1)
        assert again.buffer_id == found[0].buffer_id

    def test_T12_pointer_info_of_nothing(self, bench: Bench) -> None:
        """A hole and an unmapped address are INVALID_VALUE, whatever is mapped elsewhere in the reservation."""
        address = bench.reserve(2 * bench.size)
        with refused(INVALID_VALUE):
            bench.driver.pointer_info(address)
        bench.driver.map(address, bench.size, bench.create())
        with refused(INVALID_VALUE):
            bench.driver.pointer_info(address + bench.size)
        bench.driver.unmap(address, bench.size)
        with refused(INVALID_VALUE):
            bench.driver.pointer_info(address)


def _transfers_to_the_end(factory: DriverFactory, behind: str) -> None:
    bench = Bench(OpenDriver(factory))  # never closed: it ends with its process
    good = bench.region()
    region = bench.region(reserved=2 * bench.size)
    end = region.address + region.size
    if behind != "unmapped":
        bench.driver.map(end, region.size, bench.create())
        bench.grant(end, region.size, READ if behind == "read" else NONE)
    host = np.zeros(BLOCK, np.uint8)
    for transfer in WRITES if behind == "read" else TRANSFERS:
        with refused(INVALID_VALUE):
            TRANSFERS[transfer](bench.driver, end - BLOCK // 2, good.address, host)
        bench.driver.synchronize_context()
    bench.fill(good.address, 1, BLOCK)


def _on_a_thread(call: Callable[[], None]) -> None:
    """Run `call` on a new thread, and raise here what it raises there."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
