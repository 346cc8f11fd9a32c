"""Random moves of several buffers, against a model that only knows bytes: a Hypothesis state machine."""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import remap
from remap import MiB
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

GRANULE = 2 * MiB
WHICH = st.sets(st.integers(0, 3), min_size=1).map(sorted)
KEEPS = st.sampled_from(["host", "disk", None])


class Moves(RuleBasedStateMachine):
    """Four buffers that sleep, wake, move, are written, closed and made anew."""

    places: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[Any] = [None] * 4
        self.bytes: list[Any] = [None] * 4
        self.known = [False] * 4
        self.keep: list[Any] = [""] * 4  # "" is awake
        self.generation = [0] * 4
        self.address = [0] * 4
        self.waking: list[remap.Waking] = []

    def some(self, which: list[int]) -> list[int]:
        """Return those of the buffers that exist."""
        return [one for one in which if self.buffers[one] is not None]

    @rule(one=st.integers(0, 3), granules=st.integers(1, 3))
    def make(self, one: int, granules: int) -> None:
        """Allocate a buffer that does not exist."""
        if self.buffers[one] is None:
            buffer = remap.allocate(
                granules * GRANULE, resident=self.places[granules % len(self.places)], accessing=[0]
            )
            buffer.fill(one)
            self.buffers[one], self.bytes[one] = buffer, np.full(buffer.size, one, np.uint8)
            self.known[one], self.keep[one], self.generation[one] = True, "", 0
            # Not `.address`: what was given away is mapped before an ordered resume returns.
            self.address[one] = buffer._address

    @rule(
        one=st.integers(0, 3),
        value=st.integers(0, 255),
        start=st.integers(0, 5 * MiB),
        size=st.integers(0, MiB),
    )
    def write(self, one: int, value: int, start: int, size: int) -> None:
        """Fill a part; a sleeping buffer refuses, but its backup takes it."""
        if not self.some([one]):
            return
        buffer = self.buffers[one]
        start = min(start, buffer.size - size)
        if self.keep[one] == "":
            buffer.fill(value, offset=start, size=size)
        else:
            with pytest.raises(remap.PausedError):
                buffer.fill(value, offset=start, size=size)
            if self.keep[one] is None:
                return
            remap.backup(buffer)[start : start + size] = value
        self.bytes[one][start : start + size] = value

    @rule(source=st.integers(0, 3), to=st.integers(0, 3))
    def copy(self, source: int, to: int) -> None:
        """Copy one buffer into another, where both are awake."""
        both = self.some([source, to])
        if source == to or len(both) < 2 or any(self.keep[one] != "" for one in both):
            return
        size = min(self.buffers[to].size, self.buffers[source].size)
        self.buffers[to].copy_from(self.buffers[source], size=size)
        self.bytes[to][:size] = self.bytes[source][:size]
        self.known[to] = self.known[source] and (self.known[to] or size == self.buffers[to].size)

    @rule(which=WHICH, keep=KEEPS)
    def pause(self, which: list[int], keep: Any) -> None:
        """Pause some; refused, with nothing done, if one sleeps in another way."""
        some = self.some(which)
        buffers = [self.buffers[one] for one in some]
        if any(self.keep[one] not in ("", keep) for one in some):
            with pytest.raises(remap.PausedError):
                remap.pause(buffers, keep, directory=self.directory)
            return
        awake = [one for one in some if self.keep[one] == ""]
        slept = remap.pause(buffers, keep, directory=self.directory)
        assert slept.buffers == len(awake)
        for one in awake:
            self.keep[one] = keep
            self.known[one] &= keep is not None
            self.generation[one] += 1

    @rule(which=WHICH, events=st.booleans(), keep_host=st.booleans(), leave=st.booleans())
    def resume(self, which: list[int], events: bool, keep_host: bool, leave: bool) -> None:
        """Resume some; an ordered resume may be left under way."""
        some = self.some(which)
        buffers = [self.buffers[one] for one in some]
        asleep = [one for one in some if self.keep[one] != ""]
        if events:
            waking = remap.resume(buffers, events=True, keep_host=keep_host)
            self.waking.append(waking)
            if not leave:
                assert waking.wait().buffers == len(asleep)
        else:
            assert remap.resume(buffers, keep_host=keep_host).buffers == len(asleep)
        for one in asleep:
            if self.keep[one] is None:
                self.buffers[one].fill(one)
                self.bytes[one][:] = one
                self.known[one] = True
            self.keep[one] = ""
            self.generation[one] += 1

    @rule(which=WHICH, place=st.integers(0, 7))
    def migrate(self, which: list[int], place: int) -> None:
        """Migrate some, asleep or awake."""
        to = self.places[place % len(self.places)]
        some = self.some(which)
        moving = [one for one in some if self.buffers[one].resident != (to,)]
        moved = remap.migrate([self.buffers[one] for one in some], to)
        assert moved.buffers == len(moving)
        for one in moving:
            self.generation[one] += 1
            assert self.buffers[one].resident == (to,)

    @rule()
    def arrive(self) -> None:
        """Wait for every resume that is under way."""
        while self.waking:
            self.waking.pop().close()

    @rule(one=st.integers(0, 3))
    def close(self, one: int) -> None:
        """Close one, asleep or awake."""
        if self.some([one]):
            self.buffers[one].close()
            self.buffers[one] = None

    @invariant()
    def right(self) -> None:
        """States, addresses, counts and every known byte are those of the model."""
        for one in self.some([0, 1, 2, 3]):
            buffer = self.buffers[one]
            assert buffer.paused == (self.keep[one] != "")
            assert (buffer._address, buffer.generation) == (self.address[one], self.generation[one])
            if self.known[one]:
                found = remap.backup(buffer) if buffer.paused else buffer.to_host()
                assert np.array_equal(found, self.bytes[one])

    def teardown(self) -> None:
        """Close all; nothing stays."""
        for one in self.some([0, 1, 2, 3]):
            self.buffers[one].close()
        self.arrive()
        assert remap.host_pool().statistics().used == 0

    directory = tempfile.gettempdir()


def test_moves(stage: Stage) -> None:
    """Whatever is done in whatever order, no byte is lost, no address moves, and nothing stays behind."""
    del stage
    Moves.places = [remap.device(0).location, remap.Host()]
    Moves.places += [peer.location for peer in remap.device(0).peers()][:1]
    run_state_machine_as_test(
        Moves, settings=settings(max_examples=40, stateful_step_count=25, deadline=None)
    )
    remap.host_pool().trim()
