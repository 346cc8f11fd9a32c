"""A driver on the test bench: contexts held, clean-up of whatever a test makes, and the check that nothing stays.

What must come back (`Bench.__exit__` looks for it):

- The free memory of every device. It is machine-wide on CUDA, so the suite needs the GPUs to itself; the check reads
  it again for `patience` seconds, since a driver may give memory back late, and allows `slack` bytes a device for what
  a context keeps for itself. The host driver's slack is 0.
- Every address range. That a range has gone is seen by trying to free it once more, which must be refused (T4). (A look
  at whether the address can be reserved again would prove less: someone else may have taken it meanwhile.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from remap.drivers.protocol import DEFAULT_STREAM, Driver
from remap.drivers.wrappers import Recording
from remap.errors import CudaResult, DriverError
from remap.types import Access, AllocationProperties, HandleType, Host, Location, LocationKind

DriverFactory: TypeAlias = Callable[[], Driver]
"""What opens the driver under test: importable, so that child processes can open it, too."""

Bytes: TypeAlias = npt.NDArray[np.uint8]

RW = Access.READ_WRITE
READ = Access.READ
NONE = Access.NONE


@contextmanager
def refused(result: CudaResult, kind: type[DriverError] = DriverError) -> Generator[None]:
    """Expect the driver to refuse what the block asks for with `result`, as an error of class `kind`."""
    expected = f"CUDA_ERROR_{result.name}"
    seen: DriverError | None = None
    try:
        yield
    except DriverError as error:
        seen = error
    assert seen is not None, f"the driver accepted what it must refuse with {expected}"
    assert (seen.name, seen.code) == (expected, result), f"expected {expected}, got {seen}"
    assert isinstance(seen, kind), f"expected an {kind.__name__}, got {seen!r}"


def wait_until(condition: Callable[[], bool], limit: float = 5.0) -> bool:
    """Look at a condition until it holds, and return True, or until `limit` seconds have passed, and return False."""
    end = time.monotonic() + limit
    pause = threading.Event()
    while not condition():
        if time.monotonic() > end:
            return False
        pause.wait(0.002)  # lets other threads, and the driver's own, run in between
    return True


@dataclass(frozen=True, slots=True)
class Region:
    """A mapping that a test works on: where it is, how large, and the allocation behind it."""

    address: int
    size: int
    handle: int


class OpenDriver:
    """A driver opened for a class of tests, with a context of every device held and that of device 0 current.

    Opening warms the driver up: what it sets up once (contexts, its own pools, the kernels behind fills) would look
    like a leak of the first test.
    """

    def __init__(self, factory: DriverFactory) -> None:
        self.factory = factory
        self.driver = factory()
        self.contexts = [self.driver.retain_context(index) for index in range(self.driver.device_count())]
        self.driver.push_context(self.contexts[0])
        with Bench(self, slack=1 << 40) as bench:
            for location in [Location(LocationKind.DEVICE, index) for index in range(len(self.contexts))]:
                bench.warm_up(location)

    def close(self) -> None:
        """Release the contexts and shut the driver down."""
        self.driver.pop_context()
        for index in range(len(self.contexts)):
            self.driver.release_context(index)
        self.driver.shutdown()

    def free_memory(self) -> list[int]:
        """Return the free bytes of every device, as the driver reports them."""
        free: list[int] = []
        for context in self.contexts:
            self.driver.push_context(context)
            try:
                free.append(self.driver.memory_info().free)
            finally:
                self.driver.pop_context()
        return free


class Bench:
    """What one test works with: the driver, recorded, and words for what tests do often.

    `size` is the usual size of an allocation: several granules, so that there are parts of it to ask for, and so that
    one that leaks is larger than any slack. Use it in a `with` statement: at the end it undoes what `reserve`,
    `create` and `region` made, in the right order, and checks that nothing stayed.
    """

    def __init__(self, opened: OpenDriver, *, slack: int = 0, patience: float = 5.0) -> None:
        self.opened = opened
        self.slack = slack
        self.patience = patience
        self.recording = Recording(opened.driver)
        self.driver: Driver = self.recording
        self.device = Location(LocationKind.DEVICE, 0)
        self.granule = self.driver.granularity(AllocationProperties(self.device)).minimum
        self.size = 2 * self.granule
        self._undo = ExitStack()
        self._free = opened.free_memory()

    # -- making things, undone at the end of the test --

    def create(
        self, size: int | None = None, location: Location | None = None, *shareable: HandleType
    ) -> int:
        """Create an allocation that is released at the end."""
        handle = self.driver.create(size or self.size, self.properties(location, *shareable))
        self._undo.callback(self.driver.release, handle)
        return handle

    def reserve(self, size: int | None = None, alignment: int = 0, hint: int = 0) -> int:
        """Reserve a range that is unmapped and freed at the end."""
        length = size or self.size
        address = self.driver.reserve(length, alignment, hint)
        self._undo.callback(self.driver.free_range, address, length)
        self._undo.callback(self.driver.unmap, address, length)
        return address

    def region(
        self,
        access: Access | None = RW,
        *,
        size: int | None = None,
        reserved: int | None = None,
        location: Location | None = None,
    ) -> Region:
        """Create, reserve and map memory; grant device 0 `access`, or nothing to anyone for None."""
        mapped = size or self.size
        handle = self.create(mapped, location)
        address = self.reserve(reserved or mapped)
        self.driver.map(address, mapped, handle)
        if access is not None:
            self.grant(address, mapped, access)
        return Region(address, mapped, handle)

    def adjacent(self, count: int, size: int) -> list[int]:
        """Reserve `count` ranges of `size` bytes, each right behind the one before.

        A hint right behind a live reservation is honoured where that space is free (T3); it is tried anew elsewhere
        where something else lies there.
        """
        for attempt in range(16):
            addresses = [self.reserve(size, hint=self._room(count * size) if attempt % 2 else 0)]
            while len(addresses) < count:
                wanted = addresses[-1] + size
                if self.reserve(size, hint=wanted) != wanted:
                    break
                addresses.append(wanted)
            if len(addresses) == count:
                return addresses
        raise AssertionError("no free hint behind a reservation was honoured in 16 places (T3)")

    def _room(self, size: int) -> int:
        """Return the base of a range that has just been free: reserved, and freed again."""
        base = self.driver.reserve(size)
        self.driver.free_range(base, size)
        return base

    def grant(self, address: int, size: int, access: Access, location: Location | None = None) -> None:
        """Set the right of one location, device 0 if none is named."""
        self.driver.set_access(address, size, [(location or self.device, access)])

    def properties(self, location: Location | None = None, *shareable: HandleType) -> AllocationProperties:
        """Return the properties of memory on device 0, or at `location`, and for these handle types."""
        return AllocationProperties(location or self.device, frozenset(shareable))

    def require(self, location: Location | None) -> None:
        """Skip the test where the driver says that it has no memory at a location of the host."""
        name = {LocationKind.HOST: "host_vmm", LocationKind.HOST_NUMA: "host_numa_vmm"}.get(
            location.kind if location else LocationKind.DEVICE
        )
        if name is not None and not self.driver.capabilities(0)[name]:
            pytest.skip(f"no memory at {location}: {self.driver.capabilities(0)[name].reason}")

    # -- using memory; each of these waits --

    def fill(self, address: int, value: int, size: int) -> None:
        """Fill bytes, and wait."""
        self.driver.fill(address, value, 1, size, DEFAULT_STREAM)
        self.driver.synchronize_context()

    def read(self, address: int, size: int) -> Bytes:
        """Return a copy of the bytes at an address."""
        out = np.empty(size, np.uint8)
        self.driver.copy_to_host(out.ctypes.data, address, size, DEFAULT_STREAM)
        self.driver.synchronize_context()
        return out

    def write(self, address: int, data: Bytes) -> None:
        """Copy bytes to an address, and wait."""
        self.driver.copy_to_device(address, data.ctypes.data, data.size, DEFAULT_STREAM)
        self.driver.synchronize_context()

    def holds(self, address: int, size: int, value: int) -> bool:
        """Tell whether every one of `size` bytes at an address has this value."""
        return bool((self.read(address, size) == value).all())

    def free_memory(self) -> int:
        """Return the free bytes of device 0."""
        return self.driver.memory_info().free

    def free_becomes(self, expected: int) -> bool:
        """Tell whether the free memory of device 0 is, or soon becomes, `expected` bytes, give or take the slack."""
        return wait_until(lambda: abs(self.free_memory() - expected) <= self.slack, self.patience)

    def warm_up(self, location: Location) -> None:
        """Use each kind of call once."""
        region = self.region(location=location)
        for width in (1, 2, 4):
            self.driver.fill(region.address, 1, width, region.size // width, DEFAULT_STREAM)
            self.driver.fill(region.address + width, 1, width, 3, DEFAULT_STREAM)
        half = region.size // 2
        self.driver.copy(region.address, region.address + half, half, DEFAULT_STREAM)
        self.write(region.address, self.read(region.address, region.size))
        self.write(region.address, self.read(region.address, 64))
        streams = [self.driver.create_stream() for _ in range(8)]
        for stream in streams:
            self.driver.fill(region.address, 1, 1, 64, stream)
            self.driver.synchronize_stream(stream)
        for stream in streams:
            self.driver.destroy_stream(stream)
        if self.driver.capabilities(0)["host_vmm"]:
            self.region(location=Host())

    # -- the end of the test --

    def __enter__(self) -> Self:
        """Return the bench itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Undo what the test made; if the test passed, check that nothing stayed."""
        self.driver.synchronize_context()
        self._undo.close()
        if error is None:
            self.check()

    def check(self) -> None:
        """Check that what the test took is free again: memory, and address ranges."""
        enough = [free - self.slack for free in self._free]

        def back() -> bool:
            return all(now >= then for now, then in zip(self.opened.free_memory(), enough, strict=True))

        if not wait_until(back, self.patience):
            now = self.opened.free_memory()
            lost = {index: then - now[index] for index, then in enumerate(self._free)}
            raise AssertionError(f"memory was not given back, bytes by device: {lost}")
        for call in self.recording.calls_to("reserve"):
            if call.error is None:
                with refused(CudaResult.INVALID_VALUE):
                    self.opened.driver.free_range(call.result, call.arguments[0])
