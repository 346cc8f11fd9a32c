"""The rules of physical allocations, reservations and mappings: T1 to T5, T7 and T8."""

# ruff: noqa: N802 (a test carries the number of its rule)

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from remap.errors import CudaResult, OutOfAddressSpaceError, OutOfMemoryError
from remap.sizes import GiB, MiB, TiB, round_up
from remap.testing.bench import NONE, READ, RW, Bench, refused
from remap.types import AllocationProperties, Host, HostNuma, Location, LocationKind

INVALID_VALUE = CudaResult.INVALID_VALUE
NOT_SUPPORTED = CudaResult.NOT_SUPPORTED

BAD_SIZES = [0, 1, MiB, 2 * MiB - 1, 2 * MiB + 1, 3 * MiB, 4 * MiB + 4096]


class ObjectRules:
    """One test or a few for each rule; part of `DriverConformance`, which gives the fixtures."""

    @pytest.mark.parametrize("location", [None, Host(), HostNuma(0)], ids=str)
    def test_T1_granularity(self, bench: Bench, location: Location | None) -> None:
        """Minimum and recommended granularity are 2 MiB, wherever the memory is."""
        bench.require(location)
        granularity = bench.driver.granularity(bench.properties(location))
        assert granularity.minimum == 2 * MiB
        assert granularity.recommended == 2 * MiB

    def test_T1_granularity_of_each_device(self, bench: Bench) -> None:
        """Every device has the same granularity, so that one buffer may span them."""
        for index in range(bench.driver.device_count()):
            location = Location(LocationKind.DEVICE, index)
            assert bench.driver.granularity(AllocationProperties(location)).minimum == 2 * MiB

    # -- T2: physical allocations --

    @pytest.mark.parametrize("size", BAD_SIZES)
    def test_T2_create_takes_whole_granules(self, bench: Bench, size: int) -> None:
        """A size that is 0 or no multiple of the granularity is refused, and takes no memory."""
        free = bench.free_memory()
        with refused(INVALID_VALUE):
            bench.driver.create(size, bench.properties())
        assert bench.free_becomes(free)

    def test_T2_create_more_than_there_is(self, bench: Bench) -> None:
        """More than the device has is OUT_OF_MEMORY, which is Python's MemoryError, too."""
        size = round_up(2 * bench.driver.memory_info().total, bench.granule)
        with refused(CudaResult.OUT_OF_MEMORY, OutOfMemoryError):
            bench.driver.create(size, bench.properties())
        assert issubclass(OutOfMemoryError, MemoryError)

    def test_T2_memory_is_taken_at_create(self, bench: Bench) -> None:
        """Free memory falls at create by the size, stays through map, access and unmap, and rises at release."""
        before = bench.free_memory()
        handle = bench.driver.create(bench.size, bench.properties())
        try:
            assert bench.free_becomes(before - bench.size)
            address = bench.reserve()
            bench.driver.map(address, bench.size, handle)
            bench.grant(address, bench.size, RW)
            assert bench.free_becomes(before - bench.size)
            bench.driver.unmap(address, bench.size)
            assert bench.free_becomes(before - bench.size)
        finally:
            bench.driver.release(handle)
        assert bench.free_becomes(before)

    def test_T2_fresh_memory_shows_nothing_old(self, bench: Bench) -> None:
        """Fresh memory is all one byte (zero, or a debug mode's poison), whatever stood in it before."""
        address = bench.reserve()
        for _ in range(2):
            handle = bench.driver.create(bench.size, bench.properties())
            bench.driver.map(address, bench.size, handle)
            bench.driver.release(handle)
            bench.grant(address, bench.size, RW)
            found = np.unique(bench.read(address, bench.size))
            assert found.size == 1
            assert found[0] != 0xAB
            bench.fill(address, 0xAB, bench.size)
            bench.driver.unmap(address, bench.size)

    # -- T3: reservations --

    @pytest.mark.parametrize("size", BAD_SIZES)
    def test_T3_reserve_takes_whole_granules(self, bench: Bench, size: int) -> None:
        """A size that is 0 or no multiple of 2 MiB is refused."""
        with refused(INVALID_VALUE):
            bench.driver.reserve(size)

    def test_T3_alignment(self, bench: Bench) -> None:
        """An alignment must be a power of two; one far above the granularity is honoured."""
        with refused(INVALID_VALUE):
            bench.driver.reserve(bench.size, 3 * MiB)
        assert bench.reserve(alignment=GiB) % GiB == 0

    def test_T3_address_space_is_large_and_ends(self, bench: Bench) -> None:
        """64 TiB can be reserved; 128 TiB is OUT_OF_MEMORY, as an error about addresses and not about memory."""
        bench.reserve(64 * TiB)
        with refused(CudaResult.OUT_OF_MEMORY, OutOfAddressSpaceError):
            bench.driver.reserve(128 * TiB)
        assert not issubclass(OutOfAddressSpaceError, OutOfMemoryError)

    def test_T3_hint(self, bench: Bench) -> None:
        """A hint behind a reservation is honoured; one at occupied addresses silently gives another address.

        A hint elsewhere, even into a range that was just freed, may be passed over (seen on H200).
        """
        wanted = bench.adjacent(2, bench.size)[1]
        other = bench.reserve(hint=wanted)
        assert other not in range(wanted - bench.size + 1, wanted + bench.size)

    def test_T3_reservations_are_disjoint(self, bench: Bench) -> None:
        """No two reservations overlap."""
        sizes = [count * bench.granule for count in (1, 2, 3, 5, 8, 13)] * 4
        ranges = sorted((bench.reserve(size), size) for size in sizes)
        for (start, size), (following, _) in pairwise(ranges):
            assert start + size <= following

    # -- T4: freeing reservations --

    def test_T4_free_takes_exactly_one_reservation(self, bench: Bench) -> None:
        """A part, more than the whole, or two at once are refused, and the range stays usable."""
        size = bench.size
        first, second = bench.adjacent(2, size)
        handle = bench.create()
        for address, length in [
            (first, size // 2),
            (first + size // 2, size // 2),
            (first, 2 * size),
            (first + size // 2, size),
        ]:
            with refused(INVALID_VALUE):
                bench.driver.free_range(address, length)
        bench.driver.map(first, size, handle)
        bench.driver.map(second, size, handle)

    def test_T4_free_with_a_mapping_inside(self, bench: Bench) -> None:
        """A range with a live mapping is not freed, and the mapping goes on working."""
        region = bench.region(reserved=2 * bench.size)
        with refused(INVALID_VALUE):
            bench.driver.free_range(region.address, 2 * bench.size)
        bench.fill(region.address, 5, region.size)
        assert bench.holds(region.address, region.size, 5)

    def test_T4_free_twice(self, bench: Bench) -> None:
        """Freeing a range a second time is refused."""
        address = bench.driver.reserve(bench.size)
        bench.driver.free_range(address, bench.size)
        with refused(INVALID_VALUE):
            bench.driver.free_range(address, bench.size)

    # -- T5: mappings --

    def test_T5_map_takes_the_whole_allocation(self, bench: Bench) -> None:
        """An offset other than 0, less than the allocation, or more, is NOT_SUPPORTED."""
        handle, address, size = bench.create(), bench.reserve(2 * bench.size), bench.size
        for length, offset in [(size, size // 2), (size // 2, size // 2), (size // 2, 0), (2 * size, 0)]:
            with refused(NOT_SUPPORTED):
                bench.driver.map(address, length, handle, offset)
        bench.driver.map(address, size, handle)

    def test_T5_map_onto_a_mapping(self, bench: Bench) -> None:
        """A mapping that would overlap a live one, in whole or in part, is refused and leaves it alone."""
        size = bench.size
        handle, address = bench.create(), bench.reserve(3 * size)
        bench.driver.map(address + size, size, bench.create())
        bench.grant(address + size, size, RW)
        bench.fill(address + size, 9, size)
        for where in (address + size, address + size // 2, address + size + size // 2):
            with refused(INVALID_VALUE):
                bench.driver.map(where, size, handle)
        assert bench.holds(address + size, size, 9)

    def test_T5_map_outside_a_reservation(self, bench: Bench) -> None:
        """A mapping outside all reserved space is refused."""
        size = bench.size
        address, handle = bench.reserve(), bench.create()
        # Far behind it: CUDA maps into space that it holds itself, at the end of a range too (seen on H200).
        with refused(INVALID_VALUE):
            bench.driver.map(address + 64 * GiB, size, handle)
        bench.driver.map(address, size, handle)

    def test_T5_map_across_two_reservations(self, bench: Bench) -> None:
        """A mapping may span two adjacent reservations; then neither can be freed while it lives."""
        size = bench.size
        first, second = bench.adjacent(2, size)
        handle = bench.create()
        bench.driver.map(first + size // 2, size, handle)
        bench.grant(first + size // 2, size, RW)
        bench.fill(first + size // 2, 3, size)
        assert bench.holds(second - 8, 16, 3)
        for address in (first, second):
            with refused(INVALID_VALUE):
                bench.driver.free_range(address, size)
        bench.driver.unmap(first + size // 2, size)

    def test_T5_aliases(self, bench: Bench) -> None:
        """One allocation at two addresses is the same memory, with rights of their own."""
        region = bench.region(reserved=2 * bench.size)
        alias = region.address + region.size
        bench.driver.map(alias, region.size, region.handle)
        bench.grant(alias, region.size, READ)
        bench.fill(region.address, 0x42, region.size)
        assert bench.holds(alias, region.size, 0x42)
        with refused(INVALID_VALUE):
            bench.fill(alias, 1, region.size)
        assert bench.driver.get_access(region.address, bench.device) is RW
        assert bench.driver.get_access(alias, bench.device) is READ
        bench.driver.unmap(region.address, region.size)
        assert bench.holds(alias, region.size, 0x42)

    # -- T7: unmapping --

    def test_T7_unmap_spans_mappings_and_holes(self, bench: Bench) -> None:
        """One call unmaps several whole mappings and the holes between them."""
        size = bench.size
        address = bench.reserve(4 * size)
        for index in (0, 2):
            bench.driver.map(address + index * size, size, bench.create())
            bench.grant(address + index * size, size, RW)
        bench.driver.unmap(address, 4 * size)
        for index in (0, 2):
            with refused(CudaResult.NOT_FOUND):
                bench.driver.address_range(address + index * size)
        bench.driver.map(address + size, size, bench.create())

    def test_T7_unmap_part_of_a_mapping(self, bench: Bench) -> None:
        """A range that covers a part of a mapping is refused, and the mapping stays whole."""
        size = bench.size
        region = bench.region(reserved=2 * size)
        bench.fill(region.address, 8, size)
        half = size // 2
        for address, length in [
            (region.address, half),
            (region.address + half, half),
            (region.address + half, size),
        ]:
            with refused(INVALID_VALUE):
                bench.driver.unmap(address, length)
        assert bench.holds(region.address, size, 8)

    def test_T7_unmap_one_and_a_half(self, bench: Bench) -> None:
        """A range that covers one mapping and a part of the next is refused, and both stay."""
        size = bench.size
        region = bench.region(reserved=2 * size)
        bench.driver.map(region.address + size, size, bench.create())
        bench.grant(region.address + size, size, RW)
        bench.fill(region.address, 8, size)
        with refused(INVALID_VALUE):
            bench.driver.unmap(region.address, size + size // 2)
        assert bench.holds(region.address, size, 8)

    def test_T7_unmap_nothing(self, bench: Bench) -> None:
        """Unmapping a range with nothing mapped in it succeeds."""
        address = bench.reserve()
        bench.driver.unmap(address, bench.size)
        bench.driver.map(address, bench.size, bench.create())
        bench.driver.unmap(address, bench.size)
        bench.driver.unmap(address, bench.size)

    # -- T8: references --

    def test_T8_release_while_mapped(self, bench: Bench) -> None:
        """A released allocation lives on while it is mapped, usable as before, and goes with its last mapping."""
        before, size = bench.free_memory(), bench.size
        handle, address = bench.driver.create(size, bench.properties()), bench.reserve(2 * size)
        bench.driver.map(address, size, handle)
        bench.driver.map(address + size, size, handle)
        bench.driver.release(handle)
        assert bench.free_becomes(before - size)
        bench.grant(address, 2 * size, RW)
        bench.fill(address, 0x77, size)
        bench.driver.unmap(address, size)
        assert bench.holds(address + size, size, 0x77)
        assert bench.free_becomes(before - size)
        bench.driver.unmap(address + size, size)
        assert bench.free_becomes(before)

    def test_T8_retain_adds_a_reference(self, bench: Bench) -> None:
        """A reference taken from an address keeps the allocation after its handle and mapping have gone."""
        before, size = bench.free_memory(), bench.size
        handle, address = bench.driver.create(size, bench.properties()), bench.reserve()
        bench.driver.map(address, size, handle)
        bench.grant(address, size, RW)
        bench.fill(address, 0x33, size)
        kept = bench.driver.retain(address + bench.granule // 2)
        bench.driver.release(handle)
        bench.driver.unmap(address, size)
        assert bench.free_becomes(before - size)
        bench.driver.map(address, size, kept)
        assert bench.driver.get_access(address, bench.device) is NONE
        bench.grant(address, size, RW)
        assert bench.holds(address, size, 0x33)
        bench.driver.unmap(address, size)
        bench.driver.release(kept)
        assert bench.free_becomes(before)
