"""Random calls on the driver and on the model of `remap.testing.model`: a Hypothesis state machine, and a plain walk.

Both take the same steps. A step turns three numbers into a call: on objects that exist, mostly legal, now and then not
(wrong sizes, parts of mappings, forbidden memory, the end of a reservation). Hypothesis chooses the numbers so that it
can shrink a failure; a `random.Random` chooses them in the stress test, where each thread walks for itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from remap.drivers.protocol import DEFAULT_STREAM
from remap.errors import DriverError
from remap.testing.bench import NONE, READ, RW, Bench, OpenDriver
from remap.testing.model import Mapped, Model
from remap.types import Access, Host

_NUMBERS = st.integers(0, (1 << 16) - 1)
_RIGHTS: tuple[Access, ...] = (RW, RW, RW, READ, NONE)
_LONGEST = 1 << 16
"""The most bytes of one random transfer."""


class Walk:
    """Steps on one driver: each turns three numbers into at most one call.

    `allocations` and `granules` bound how much memory it holds. Without `to_the_end`, transfers that begin on good
    memory and run into forbidden memory are left out.
    """

    def __init__(
        self, bench: Bench, stream: int, *, allocations: int, granules: int, to_the_end: bool
    ) -> None:
        self.model = Model(bench, stream)
        self.bench = bench
        self.granule = bench.granule
        self.allocations = allocations
        self.granules = granules
        self.to_the_end = to_the_end
        self.host = bool(bench.driver.capabilities(0)["host_vmm"])

    # -- objects --

    def create(self, a: int, b: int, _: int) -> None:
        """Create an allocation; now and then of a bad size, or at the host."""
        if len(self.model.allocations) >= self.allocations:
            return
        size = (1 + a % self.granules) * self.granule
        location = Host() if self.host and b % 6 == 5 else self.model.device
        self.model.create(self._spoil(size, b), location)

    def reserve(self, a: int, b: int, _: int) -> None:
        """Reserve a range; now and then of a bad size."""
        if len(self.model.reservations) < self.allocations:
            self.model.reserve(self._spoil((1 + a % (2 * self.granules)) * self.granule, b))

    def map(self, a: int, b: int, c: int) -> None:
        """Map an allocation somewhere into a reservation; now and then a part of it."""
        usable = [item for item in self.model.allocations if item.handles]
        if not usable or not self.model.reservations:
            return
        allocation = usable[a % len(usable)]
        size, offset = allocation.size, 0
        if c % 16 == 15:
            size, offset = [(size // 2, 0), (2 * size, 0), (size, self.granule)][a % 3]
        room = self.model.room_for(size)
        if room and c % 4:
            self.model.map(room[b % len(room)], size, allocation, offset)
            return
        base, length = self._reservation(b)
        address = base + c % (length // self.granule) * self.granule
        # Not past the end of the reservation: what lies there CUDA may hold itself (see T5's own tests).
        if address + size <= base + length:
            self.model.map(address, size, allocation, offset)

    def grant(self, a: int, b: int, c: int) -> None:
        """Set a right on one mapping, or on any range."""
        address, size = self._range(a, b)
        if not size:
            return
        location = self.model.device
        right = _RIGHTS[c % 5]
        # Not laid down, so not asked: the CPU and a range of both kinds of memory, or no access for it at all.
        kinds = {piece.allocation.location.is_device for piece in self.model.pieces(address, size)}
        if c % 8 == 7 and len(kinds) == 1 and right is not NONE:
            location = Host()
        self.model.set_access(address, size, [(location, right)] if c % 32 else [])

    def unmap(self, a: int, b: int, c: int) -> None:
        """Unmap one mapping, or any range; less often than things are mapped."""
        address, size = self._range(a, b)
        if size and c % 3 == 0:
            self.model.unmap(address, size)

    def retain(self, a: int, b: int, _: int) -> None:
        """Take a reference from a mapping."""
        mapped = self._mapped(a)
        if mapped is not None and len(mapped.allocation.handles) < 3:
            self.model.retain(mapped, b % mapped.allocation.size)

    def release(self, a: int, b: int, _: int) -> None:
        """Drop a reference; less often than they are taken."""
        usable = [item for item in self.model.allocations if item.handles]
        if usable and b % 4 == 0:
            self.model.release(usable[a % len(usable)])

    def free_range(self, a: int, b: int, c: int) -> None:
        """Free a reservation; now and then a part of one, or more; less often than they are made."""
        if self.model.reservations and c % 4 == 0:
            base, length = self._reservation(a)
            skip, more = [(0, 0), (0, 0), (0, self.granule), (self.granule, -self.granule)][b % 4]
            self.model.free_range(base + skip, length + more)

    def look(self, a: int, b: int, _: int) -> None:
        """Ask what an address is."""
        address, size = self._range(a, b)
        if size:
            self.model.look(address + b % size)

    # -- bytes --

    def fill(self, a: int, b: int, c: int) -> None:
        """Fill a few bytes, or a whole mapping."""
        mapped = self._mapped(a)
        if mapped is not None and c % 4 == 0:
            address, size = mapped.address, mapped.allocation.size
        else:
            address, size = self._place(a, b, c)
        if size and self._may(address, size, writes=True):
            width = (1, 2, 4)[b % 3]
            self.model.fill(address, (a * 31 + b) % (1 << 8 * width), width, size // width)

    def upload(self, a: int, b: int, c: int) -> None:
        """Copy random bytes in."""
        address, size = self._place(a, b, c)
        if size and self._may(address, size, writes=True):
            self.model.upload(address, np.random.default_rng(a).integers(0, 256, size, np.uint8))

    def copy(self, a: int, b: int, c: int) -> None:
        """Copy from one place to another."""
        destination, size = self._place(a, b, c)
        source, limit = self._place(b, c, a)
        size = min(size, limit)
        if size and self._may(destination, size, writes=True) and self._may(source, size, writes=False):
            self.model.copy(destination, source, size)

    def download(self, a: int, b: int, c: int) -> None:
        """Copy bytes out, and compare."""
        address, size = self._place(a, b, c)
        if size and self._may(address, size, writes=False):
            self.model.download(address, size)

    # -- the end --

    def compare_all(self) -> None:
        """Read every mapping that can be read, and compare."""
        for mapped in self.model.mappings:
            if mapped.rights.get(self.model.device, NONE).readable:
                self.model.download(mapped.address, mapped.allocation.size)

    def tidy(self) -> None:
        """Give everything back. After a disagreement the model may be wrong, and refusals are passed over."""
        driver, model = self.model.driver, self.model
        model.settle()
        ranges = [(mapped.address, mapped.allocation.size) for mapped in model.mappings]
        if not model.agrees:
            ranges += model.reservations.items()
        calls: list[tuple[Callable[..., None], tuple[int, ...]]] = [(driver.unmap, span) for span in ranges]
        calls += [(driver.free_range, span) for span in model.reservations.items()]
        calls += [(driver.release, (handle,)) for item in model.allocations for handle in item.handles]
        for call, arguments in calls:
            try:
                call(*arguments)
            except DriverError:
                if model.agrees:
                    raise

    # -- from numbers to objects --

    def _spoil(self, size: int, number: int) -> int:
        """Return `size`, or in one case of sixteen a size that no call takes."""
        bad: dict[int, int] = {0: size + 1, 16: 0, 32: size - self.granule // 2}
        return bad.get(number % 48, size)

    def _reservation(self, number: int) -> tuple[int, int]:
        ranges = sorted(self.model.reservations.items())
        return ranges[number % len(ranges)]

    def _mapped(self, number: int) -> Mapped | None:
        mappings = self.model.mappings
        return mappings[number % len(mappings)] if mappings else None

    def _range(self, a: int, b: int) -> tuple[int, int]:
        """Return the range of a mapping, or any granules of a reservation; size 0 where there is neither."""
        mapped = self._mapped(a)
        if mapped is not None and b % 8:
            return mapped.address, mapped.allocation.size
        if not self.model.reservations:
            return 0, 0
        base, length = self._reservation(a)
        count = length // self.granule
        first = b % count
        return base + first * self.granule, (1 + b // count % (count - first)) * self.granule

    def _place(self, a: int, b: int, c: int) -> tuple[int, int]:
        """Return a few bytes within one mapping, or anywhere; aligned to 4, and a multiple of 4 long."""
        address, size = self._range(a, b)
        granted = [
            item for item in self.model.mappings if item.rights.get(self.model.device, NONE) is not NONE
        ]
        if granted and a % 8:
            mapped = granted[a % len(granted)]
            address, size = mapped.address, mapped.allocation.size
        elif b % 4:
            return 0, 0  # forbidden memory is tried less often than there is nothing else
        if not size:
            return 0, 0
        length = min(size, 4 * (1 + c % (_LONGEST // 4)))
        if c % 5 == 4:  # across the end of the range, into whatever is behind it
            start = address + size - length // 8 * 4
            base = max(base for base in self.model.reservations if base <= address)
            end = base + self.model.reservations[base]
            return start, min(length, max(end - start, 0))
        return address + b * 4 % (size - length + 4) // 4 * 4, length

    def _may(self, address: int, size: int, *, writes: bool) -> bool:
        pieces = self.model.pieces(address, size)
        if not all(piece.allocation.location.is_device for piece in pieces):
            # CUDA lets the CPU copy host-located memory in place of a device without the right (seen on H200); the
            # rule book lays nothing down for that.
            return self.model.usable(address, size, writes=True) and not self._cpu_only_reads(address, size)
        if self.to_the_end or self.model.usable(address, size, writes=writes):
            return True
        return not self.model.usable(address, 1, writes=writes)

    def _cpu_only_reads(self, address: int, size: int) -> bool:
        """Tell whether the CPU, which makes CUDA's copies there, has less right to a range than the device."""
        touched = [one for one in self.model.mappings if one.address < address + size and address < one.end]
        return any(one.rights.get(Host(), NONE) is READ for one in touched)


STEPS = (
    *(
        "create",
        "reserve",
        "map",
        "map",
        "grant",
        "grant",
        "unmap",
        "retain",
        "release",
        "free_range",
        "look",
    ),
    *("fill", "fill", "upload", "copy", "copy", "download", "download"),
)


def wander(bench: Bench, chance: random.Random, steps: int, *, to_the_end: bool) -> int:
    """Take random steps on a stream of one's own; return how many calls the driver accepted."""
    stream = bench.driver.create_stream()
    walk = Walk(bench, stream, allocations=3, granules=2, to_the_end=to_the_end)
    try:
        for _ in range(steps):
            step = getattr(walk, chance.choice(STEPS))
            step(*(chance.randrange(1 << 16) for _ in range(3)))
        walk.compare_all()
    finally:
        walk.tidy()
        bench.driver.destroy_stream(stream)
    return walk.model.accepted


class DriverMachine(RuleBasedStateMachine):
    """The steps as a Hypothesis state machine, on an opened driver."""

    def __init__(self, opened: OpenDriver, slack: int, to_the_end: bool) -> None:
        super().__init__()
        self.bench = Bench(opened, slack=slack)
        self.free = self.bench.free_memory()
        self.walk = Walk(self.bench, DEFAULT_STREAM, allocations=6, granules=3, to_the_end=to_the_end)

    @rule(step=st.sampled_from(STEPS), a=_NUMBERS, b=_NUMBERS, c=_NUMBERS)
    def call(self, step: str, a: int, b: int, c: int) -> None:
        """Take one step."""
        getattr(self.walk, step)(a, b, c)

    @invariant()
    def memory_adds_up(self) -> None:
        """Check that the driver's free memory is what it was, less what the model says is in use."""
        expected = self.free - self.walk.model.device_bytes()
        if not self.bench.free_becomes(expected):
            self.walk.model.agrees = False
            raise AssertionError(f"free memory: {self.bench.free_memory()}, expected {expected}")

    def teardown(self) -> None:
        """Compare every byte, give everything back, and check that nothing stayed."""
        try:
            if self.walk.model.agrees:
                self.walk.compare_all()
        finally:
            self.walk.tidy()
        if self.walk.model.agrees:
            self.bench.check()


def machine_for(opened: OpenDriver, *, slack: int, to_the_end: bool) -> type[RuleBasedStateMachine]:
    """Return the state machine for an opened driver as the class without arguments that Hypothesis takes."""

    class BoundMachine(DriverMachine):
        def __init__(self) -> None:
            super().__init__(opened, slack, to_the_end)

    return BoundMachine
