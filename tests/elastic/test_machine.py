"""Random sequences of everything that an elastic buffer can do, against a plain model of its bytes."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import remap
from remap import Access, MiB
from remap.testing.bench import wait_until
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

GRANULE = 2 * MiB
CAPACITY = 5 * GRANULE
MOST = 3  # buffers at a time

EDGES = [
    n * GRANULE + more for n in range(6) for more in (-1, 0, 1, 4097) if 0 <= n * GRANULE + more <= CAPACITY
]
OFFSETS = st.one_of(st.sampled_from(EDGES), st.integers(0, CAPACITY))
PARTS = st.tuples(OFFSETS, OFFSETS).map(lambda pair: (min(pair), max(pair)))
PICKS = st.integers(0, MOST - 1)


class Twin:
    """One buffer and what it must look like: which bytes are committed, which are known, and what they are."""

    def __init__(self, buffer: remap.ElasticBuffer) -> None:
        self.buffer = buffer
        self.address = buffer.address
        self.committed: npt.NDArray[np.bool_] = np.zeros(CAPACITY, np.bool_)
        self.known: npt.NDArray[np.bool_] = np.zeros(CAPACITY, np.bool_)
        self.data: npt.NDArray[np.uint8] = np.zeros(CAPACITY, np.uint8)

    def drop(self, start: int, stop: int) -> None:
        """Forget bytes that are not committed any more."""
        self.committed[start:stop] = False
        self.known[start:stop] = False

    def whole(self, start: int, stop: int) -> bool:
        """Tell whether all bytes of a part are committed."""
        return bool(self.committed[start:stop].all()) and stop <= self.end

    def writable(self, start: int, stop: int) -> bool:
        """Tell whether a part may be written; a part of no bytes always may."""
        return start >= stop or not any(one < stop and start < other for one, other in self.buffer.shared)

    @property
    def end(self) -> int:
        """The end of the last committed byte."""
        found = np.flatnonzero(self.committed)
        return int(found[-1]) + 1 if found.size else 0

    @property
    def extents(self) -> list[tuple[int, int]]:
        """The committed parts."""
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self.committed, [False]))))
        return [(int(one), int(other)) for one, other in edges.reshape(-1, 2)]


class ElasticMachine(RuleBasedStateMachine):
    """Up to three buffers that fork, grow, shrink, are written and read; every byte is compared."""

    stage: Stage

    def __init__(self) -> None:
        super().__init__()
        self.twins: list[Twin] = []
        self.base = remap.device(0).memory().free
        self.count = 0

    @initialize(
        chunk=st.sampled_from(["geometric", "exact", GRANULE, 2 * GRANULE, 3 * GRANULE]),
        ahead=st.sampled_from([0, 0, 2 * GRANULE]),
        poison=st.booleans(),
    )
    def make(self, chunk: Any, ahead: int, poison: bool) -> None:
        self.poison = poison
        buffer = remap.ElasticBuffer(CAPACITY, device=0, chunk=chunk, ahead=ahead, poison=poison)
        self.twins.append(Twin(buffer))
        self.ahead = ahead

    def pick(self, index: int) -> Twin:
        return self.twins[index % len(self.twins)]

    def committed(self, twin: Twin, start: int, stop: int) -> None:
        fresh = ~twin.committed[start:stop]
        twin.committed[start:stop] = True
        if self.poison:
            fresh &= [True] if twin.writable(start, stop) else [False]
            twin.data[start:stop][fresh] = 0xCB
            twin.known[start:stop][fresh] = True

    @rule(which=PICKS, size=OFFSETS)
    def resize(self, which: int, size: int) -> None:
        twin = self.pick(which)
        twin.buffer.resize(size)
        self.committed(twin, 0, size)
        twin.drop(size, CAPACITY)

    @rule(which=PICKS, part=PARTS)
    def commit(self, which: int, part: tuple[int, int]) -> None:
        twin = self.pick(which)
        twin.buffer.commit(*part)
        self.committed(twin, *part)

    @rule(which=PICKS, part=PARTS)
    def decommit(self, which: int, part: tuple[int, int]) -> None:
        twin = self.pick(which)
        twin.buffer.decommit(*part)
        twin.drop(*part)

    @rule(which=PICKS, part=PARTS, value=st.integers(0, 255))
    def fill(self, which: int, part: tuple[int, int], value: int) -> None:
        twin, (start, stop) = self.pick(which), part
        if stop > twin.end or not twin.whole(start, stop):
            with pytest.raises(remap.InvalidValueError):
                twin.buffer.fill(value, offset=start, size=stop - start)
        elif start < stop and not twin.writable(start, stop):
            with pytest.raises(remap.AccessError, match="make_private"):
                twin.buffer.fill(value, offset=start, size=stop - start)
        else:
            twin.buffer.fill(value, offset=start, size=stop - start)
            twin.data[start:stop] = value
            twin.known[start:stop] = True

    @rule(which=PICKS, other=PICKS, part=PARTS, at=OFFSETS)
    def copy(self, which: int, other: int, part: tuple[int, int], at: int) -> None:
        target, source, (start, stop) = self.pick(which), self.pick(other), part
        size = stop - start
        if target is source or not source.whole(start, stop) or at + size > CAPACITY:
            return
        if not target.whole(at, at + size) or not target.writable(at, at + size):
            return
        target.buffer.copy_from(source.buffer, offset=at, source_offset=start, size=size)
        target.data[at : at + size] = source.data[start:stop]
        target.known[at : at + size] = source.known[start:stop]

    @precondition(lambda self: len(self.twins) < MOST)
    @rule(which=PICKS)
    def fork(self, which: int) -> None:
        source = self.pick(which)
        twin = Twin(source.buffer.fork())
        twin.committed, twin.known, twin.data = (
            source.committed.copy(),
            source.known.copy(),
            source.data.copy(),
        )
        self.twins.append(twin)
        whole = [(chunk.address - twin.address, chunk.size) for chunk in twin.buffer.chunks]
        assert sum(size for _, size in whole) == sum(stop - start for start, stop in twin.buffer.shared)

    @rule(which=PICKS, part=PARTS)
    def make_private(self, which: int, part: tuple[int, int]) -> None:
        twin = self.pick(which)
        twin.buffer.make_private(*part)
        assert twin.writable(*part)

    @precondition(lambda self: len(self.twins) > 1)
    @rule(which=PICKS)
    def close(self, which: int) -> None:
        twin = self.pick(which)
        twin.buffer.close()
        self.twins.remove(twin)

    @invariant()
    def every_byte_is_as_it_must_be(self) -> None:
        for twin in self.twins:
            buffer = twin.buffer
            assert buffer.address == twin.address
            assert list(buffer.extents) == twin.extents
            assert buffer.size == twin.end
            for start, stop in twin.extents:
                known = twin.known[start:stop]
                if known.any():
                    found = np.empty(stop - start, np.uint8)
                    buffer.copy_to_host(found, offset=start)
                    assert np.array_equal(found[known], twin.data[start:stop][known])

    @invariant()
    def chunks_are_what_the_driver_has(self) -> None:
        for twin in self.twins:
            chunks, buffer = twin.buffer.chunks, twin.buffer
            offsets = [(chunk.address - twin.address, chunk.size) for chunk in chunks]
            covered = np.zeros(CAPACITY, np.bool_)
            for start, size in offsets:
                assert not covered[start : start + size].any()
                covered[start : start + size] = True
                if not self.ahead:
                    assert twin.committed[start : start + size].any(), "a chunk with no committed byte"
            assert offsets == sorted(offsets)
            assert (covered | ~twin.committed).all()
            for chunk, (start, size) in zip(chunks, offsets, strict=True):
                with remap.device(0).current():
                    found = self.stage.inner.address_range(chunk.address)
                assert (found.base, found.size) == (chunk.address, chunk.size)
                writable = twin.writable(start, start + size)
                right = self.stage.inner.get_access(chunk.address, remap.device(0).location)
                assert (right is Access.READ) == (not writable)
            counted = buffer.footprint().get(remap.device(0).location, 0)
            if self.ahead:  # whose chunks count, too, and whose thread may be at work
                assert counted >= covered.sum()
            else:
                assert counted == covered.sum()

    @invariant()
    def memory_is_counted_once(self) -> None:
        """Without a thread that maps ahead, exactly the footprint is taken."""
        if not self.ahead:
            taken = sum(remap.footprint(twin.buffer for twin in self.twins).values())
            free = remap.device(0).memory
            assert wait_until(lambda: abs(self.base - free().free - taken) <= self.stage.slack)

    def teardown(self) -> None:
        while self.twins:
            self.twins.pop().buffer.close()
        assert wait_until(lambda: abs(remap.device(0).memory().free - self.base) <= self.stage.slack)


def test_any_sequence_of_operations(stage: Stage) -> None:
    """Growth, shrinking, forks and writes in any order and at any offset agree with the model (B3, B8, traps 2, 5)."""

    class Machine(ElasticMachine):
        pass

    Machine.stage = stage
    run_state_machine_as_test(
        Machine,
        settings=hypothesis.settings(
            max_examples=15,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=(hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large),
        ),
    )
