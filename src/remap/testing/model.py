"""A plain model of the rules, and calls that are made on the driver and on the model at once.

The model knows which ranges are reserved, what is mapped where with which rights, and what every byte of an allocation
holds, as far as that is known: contents belong to the allocation, so that whatever is written through one address must
be read through its aliases. For every call it says which rules the call breaks. The driver must refuse it with the
error of one of them (which comes first is not laid down), or accept it if there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from remap.errors import CudaResult, DriverError
from remap.testing.bench import NONE, Bench, Bytes
from remap.types import Access, Location

Broken = set[CudaResult]
"""The results of the rules that a call breaks; empty for a legal one."""


@dataclass(eq=False)
class Allocation:
    """Physical memory: what its bytes are, which of them are known, and the references to it."""

    size: int
    location: Location
    handles: list[int]
    mappings: int = 0
    data: Bytes = field(init=False, repr=False)
    known: npt.NDArray[np.bool_] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Begin with contents that nobody knows."""
        self.data = np.zeros(self.size, np.uint8)
        self.known = np.zeros(self.size, np.bool_)


@dataclass(eq=False)
class Mapped:
    """An allocation at an address, with the rights on it."""

    address: int
    allocation: Allocation
    rights: dict[Location, Access] = field(default_factory=dict[Location, Access])

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.allocation.size


@dataclass(frozen=True)
class Piece:
    """A part of an allocation that a range of addresses falls on."""

    allocation: Allocation
    start: int
    end: int


class Model:
    """The driver and the model side by side. Every method makes one call on both, and compares."""

    def __init__(self, bench: Bench, stream: int) -> None:
        self.bench = bench
        self.driver = bench.driver
        self.device = bench.device
        self.granule = bench.granule
        self.stream = stream
        self.allocations: list[Allocation] = []
        self.mappings: list[Mapped] = []
        self.reservations: dict[int, int] = {}
        self.accepted = 0
        self.agrees = True
        self._in_flight: list[Bytes] = []

    # -- memory objects --

    def create(self, size: int, location: Location) -> None:
        """Create an allocation."""
        broken: Broken = set() if self._whole(size) else {CudaResult.INVALID_VALUE}
        accepted, handle = self._call(broken, self.driver.create, size, self.bench.properties(location))
        if accepted:
            self.allocations.append(Allocation(size, location, [handle]))

    def retain(self, mapped: Mapped, offset: int) -> None:
        """Take one more reference from an address."""
        _, handle = self._call(set(), self.driver.retain, mapped.address + offset)
        mapped.allocation.handles.append(handle)

    def release(self, allocation: Allocation) -> None:
        """Drop one reference; a dead handle is never used again, so one must be left."""
        self.settle()
        self._call(set(), self.driver.release, allocation.handles.pop())
        self._forget_dead()

    def reserve(self, size: int) -> None:
        """Reserve a range."""
        broken: Broken = set() if self._whole(size) else {CudaResult.INVALID_VALUE}
        accepted, address = self._call(broken, self.driver.reserve, size)
        if accepted:
            for other, length in self.reservations.items():
                self._same(address + size <= other or other + length <= address, True, "reservations overlap")
            self.reservations[address] = size

    def free_range(self, address: int, size: int) -> None:
        """Free a range."""
        exact = self.reservations.get(address) == size
        broken: Broken = set() if exact and not self._touching(address, size) else {CudaResult.INVALID_VALUE}
        accepted, _ = self._call(broken, self.driver.free_range, address, size)
        if accepted:
            del self.reservations[address]

    def map(self, address: int, size: int, allocation: Allocation, offset: int) -> None:
        """Map an allocation, which must have a handle left."""
        broken: Broken = set()
        if offset or size != allocation.size:
            broken.add(CudaResult.NOT_SUPPORTED)
        if self._touching(address, size) or not self._reserved(address, size):
            broken.add(CudaResult.INVALID_VALUE)
        accepted, _ = self._call(broken, self.driver.map, address, size, allocation.handles[-1], offset)
        if accepted:
            self.mappings.append(Mapped(address, allocation))
            self.mappings.sort(key=_address)
            allocation.mappings += 1

    def set_access(self, address: int, size: int, grants: list[tuple[Location, Access]]) -> None:
        """Set rights."""
        self.settle()
        found = self._touching(address, size)
        broken: Broken = set()
        if not grants or not self._covered(found, address, size):
            broken.add(CudaResult.INVALID_VALUE)
        if any(self._forbids(mapped, location) for mapped in found for location, _ in grants):
            broken.add(CudaResult.NOT_SUPPORTED)
        accepted, _ = self._call(broken, self.driver.set_access, address, size, grants)
        if accepted:
            for mapped in found:
                mapped.rights.update(grants)

    def unmap(self, address: int, size: int) -> None:
        """Unmap whatever is in a range."""
        self.settle()
        found = self._touching(address, size)
        whole = all(address <= mapped.address and mapped.end <= address + size for mapped in found)
        accepted, _ = self._call(
            set() if whole else {CudaResult.INVALID_VALUE}, self.driver.unmap, address, size
        )
        if accepted:
            for mapped in found:
                self.mappings.remove(mapped)
                mapped.allocation.mappings -= 1
            self._forget_dead()

    def look(self, address: int) -> None:
        """Compare what the driver says of an address."""
        found = self._touching(address, 1)
        able = [place for place, right in found[0].rights.items() if right is not NONE] if found else []
        # Whether the CPU counts as somebody who has access (T12) is not laid down: not asked where it is alone.
        if not able or any(place.is_device for place in able):
            accepted, span = self._call(
                set() if able else {CudaResult.NOT_FOUND}, self.driver.address_range, address
            )
            if accepted:
                there = (found[0].address, found[0].allocation.size)
                self._same((span.base, span.size), there, "address range")
        accepted, info = self._call(
            set() if found else {CudaResult.INVALID_VALUE}, self.driver.pointer_info, address
        )
        if accepted:
            around = [
                item
                for item in self.reservations.items()
                if item[0] <= found[0].address and found[0].end <= sum(item)
            ]
            for where in around:  # none for a mapping that spans two
                self._same((info.range_start, info.range_size), where, "reservation of an address")
        if found:
            right = self.driver.get_access(address, self.device)
            self._same(right, found[0].rights.get(self.device, NONE), "access")

    # -- bytes --

    def fill(self, address: int, value: int, width: int, count: int) -> None:
        """Fill memory."""
        size = width * count
        accepted, _ = self._call(
            self._unusable(address, size, writes=True),
            self.driver.fill,
            address,
            value,
            width,
            count,
            self.stream,
        )
        if accepted:
            pattern = np.frombuffer(value.to_bytes(width, "little") * count, np.uint8)
            self._store(address, pattern, np.ones(size, np.bool_))

    def upload(self, address: int, data: Bytes) -> None:
        """Copy bytes in."""
        broken = self._unusable(address, data.size, writes=True)
        accepted, _ = self._call(
            broken, self.driver.copy_to_device, address, data.ctypes.data, data.size, self.stream
        )
        if accepted:
            self._in_flight.append(data)
            self._store(address, data, np.ones(data.size, np.bool_))

    def copy(self, destination: int, source: int, size: int) -> None:
        """Copy between two addresses; does nothing where the two are the same memory, which is undefined."""
        broken = self._unusable(destination, size, writes=True) | self._unusable(source, size, writes=False)
        if not broken and _overlap(self.pieces(destination, size), self.pieces(source, size)):
            return
        accepted, _ = self._call(broken, self.driver.copy, destination, source, size, self.stream)
        if accepted:
            self._store(destination, *self._load(source, size))

    def download(self, address: int, size: int) -> None:
        """Copy bytes out, and compare those that are known."""
        out = np.empty(size, np.uint8)
        broken = self._unusable(address, size, writes=False)
        accepted, _ = self._call(
            broken, self.driver.copy_to_host, out.ctypes.data, address, size, self.stream
        )
        if accepted:
            self.settle()
            data, known = self._load(address, size)
            wrong = np.flatnonzero((out != data) & known)
            if wrong.size:
                at = int(wrong[0])
                self._same(int(out[at]), int(data[at]), f"byte {at} of {size} at {address:#x}")

    def settle(self) -> None:
        """Wait for what is in flight; before anything is unmapped, released, or loses a right."""
        self.driver.synchronize_stream(self.stream)
        self._in_flight.clear()

    # -- questions about the model --

    def device_bytes(self) -> int:
        """Return how much memory of device 0 is in use."""
        return sum(item.size for item in self.allocations if item.location == self.device)

    def pieces(self, address: int, size: int) -> list[Piece]:
        """Return the parts of allocations behind a range, as far as it is mapped."""
        return [
            Piece(
                item.allocation,
                max(address, item.address) - item.address,
                min(address + size, item.end) - item.address,
            )
            for item in self._touching(address, size)
        ]

    def room_for(self, size: int) -> list[int]:
        """Return the addresses, granule by granule, where a mapping of `size` bytes fits into a reservation."""
        return [
            address
            for base, length in sorted(self.reservations.items())
            for address in range(base, base + length - size + 1, self.granule)
            if not self._touching(address, size)
        ]

    def usable(self, address: int, size: int, *, writes: bool) -> bool:
        """Tell whether a transfer on device 0 may use a range."""
        return not self._unusable(address, size, writes=writes)

    def _unusable(self, address: int, size: int, *, writes: bool) -> Broken:
        found = self._touching(address, size)
        rights = [mapped.rights.get(self.device, NONE) for mapped in found]
        allowed = all(right.writable if writes else right.readable for right in rights)
        mapped = sum(piece.end - piece.start for piece in self.pieces(address, size)) == size
        return set() if allowed and mapped else {CudaResult.INVALID_VALUE}

    def _touching(self, address: int, size: int) -> list[Mapped]:
        return [item for item in self.mappings if item.address < address + size and address < item.end]

    def _reserved(self, address: int, size: int) -> bool:
        """Tell whether a range is reserved space; adjacent reservations are one space (T5)."""
        end = address + size
        for start, length in sorted(self.reservations.items()):
            if start <= address < start + length:
                address = start + length
        return address >= end

    def _covered(self, found: list[Mapped], address: int, size: int) -> bool:
        """Tell whether whole mappings fill a range exactly."""
        inside = all(address <= mapped.address and mapped.end <= address + size for mapped in found)
        return inside and sum(mapped.allocation.size for mapped in found) == size

    def _forbids(self, mapped: Mapped, location: Location) -> bool:
        return mapped.allocation.location.is_device and not location.is_device

    def _whole(self, size: int) -> bool:
        return size > 0 and size % self.granule == 0

    # -- the two sides --

    def _call(self, broken: Broken, call: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
        """Make a call on the driver; return whether it was accepted, and its result. Both must be as predicted."""
        said = f"{getattr(call, '__name__', call)}{arguments}"
        try:
            result = call(*arguments)
        except DriverError as error:
            expected = sorted(f"CUDA_ERROR_{item.name}" for item in broken)
            self._same(
                error.name in expected, True, f"expected {expected or 'success'} of {said}, got {error}"
            )
            return False, None
        self._same(bool(broken), False, f"accepted, though it breaks {sorted(broken)}: {said}")
        self.accepted += 1
        return True, result

    def _same(self, found: object, expected: object, what: str) -> None:
        if found != expected:
            self.agrees = False
            raise AssertionError(f"{what}: the driver says {found}, the model {expected}")

    def _load(self, address: int, size: int) -> tuple[Bytes, npt.NDArray[np.bool_]]:
        pieces = self.pieces(address, size)
        data = [piece.allocation.data[piece.start : piece.end] for piece in pieces]
        known = [piece.allocation.known[piece.start : piece.end] for piece in pieces]
        return np.concatenate(data), np.concatenate(known)

    def _store(self, address: int, data: Bytes, known: npt.NDArray[np.bool_]) -> None:
        done = 0
        for piece in self.pieces(address, data.size):
            length = piece.end - piece.start
            piece.allocation.data[piece.start : piece.end] = data[done : done + length]
            piece.allocation.known[piece.start : piece.end] = known[done : done + length]
            done += length

    def _forget_dead(self) -> None:
        self.allocations = [item for item in self.allocations if item.handles or item.mappings]


def _address(mapped: Mapped) -> int:
    return mapped.address


def _overlap(some: list[Piece], others: list[Piece]) -> bool:
    return any(
        one.allocation is other.allocation and one.start < other.end and other.start < one.end
        for one in some
        for other in others
    )
