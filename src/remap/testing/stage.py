"""A stage for tests of what stands on a driver: it is watched, made to fail at will, and left as it was found.

A test module names this one in `pytest_plugins` and asks for the fixture `stage`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import pytest

import remap
from remap import lifetime
from remap.drivers.protocol import Driver
from remap.drivers.wrappers import Call, Faulty, Recording
from remap.errors import CudaResult
from remap.sizes import MiB
from remap.testing.bench import refused, wait_until


@dataclass(frozen=True)
class Seen:
    """What is taken: the live objects of remap, and the free bytes of every device."""

    alive: tuple[int, ...]
    free: tuple[int, ...]


class Stage:
    """The present driver, wrapped: `faulty` refuses calls, and `calls` writes down what remap asked for."""

    def __init__(self, inner: Driver) -> None:
        self.inner = inner
        self.faulty = Faulty(inner)
        self.recording = Recording(self.faulty)
        # On CUDA a context takes memory for itself: for streams, events, modules, and those that a refused call kept
        # from being destroyed (seen on H200: 4 MiB a stream). The host driver shows the exact figure.
        self.slack = 32 * MiB if inner.name == "cuda" else 0

    def seen(self) -> Seen:
        """Return what is taken now."""
        alive = tuple(thing.serial for thing in lifetime.live())
        return Seen(alive, tuple(device.memory().free for device in remap.devices()))

    def unchanged(self, before: Seen) -> bool:
        """Tell whether as much is taken as before, at once or, as far as memory goes, soon."""
        if self.seen().alive != before.alive:
            return False

        def same() -> bool:
            pairs = zip(self.seen().free, before.free, strict=True)
            return all(abs(now - then) <= self.slack for now, then in pairs)

        return wait_until(same)

    def since(self, mark: int) -> Sequence[Call]:
        """Return the calls that followed the first `mark` ones."""
        return self.recording.calls[mark:]

    def names_since(self, mark: int) -> list[str]:
        """Return the names of the calls that followed the first `mark` ones."""
        return [call.name for call in self.since(mark)]

    def mark(self) -> int:
        """Return how many calls there were so far."""
        return len(self.recording.calls)

    def clean_up_refused(self, mark: int) -> None:
        """Make the clean-up calls since `mark` that were refused: what they were to free has leaked, as it must."""
        for call in self.since(mark):
            if call.error is not None and call.name in {"unmap", "release", "free_range"}:
                getattr(self.inner, call.name)(*call.arguments, **call.keywords)


@pytest.fixture(scope="module", name="wrapped")
def _wrapped() -> Generator[Stage]:
    inner = remap.driver()
    stage = Stage(inner)
    remap.use(stage.recording)
    for device in remap.devices():  # contexts, the driver's own pools: what is set up once is no leak
        with remap.allocate(4 * MiB, resident=device, poison=True) as buffer:
            buffer.to_host()
    yield stage
    remap.use(inner)


@pytest.fixture(name="stage")
def _stage(wrapped: Stage) -> Generator[Stage]:
    remap.collect()
    wrapped.recording.forget()
    before = wrapped.seen()
    yield wrapped
    wrapped.faulty.heal()
    remap.collect()
    left = f"{[str(thing.describe()) for thing in lifetime.live()]}; {wrapped.seen()}, before it {before}"
    unchanged = wrapped.unchanged(before)
    for thing in sorted(lifetime.live(), key=_mappings_first):  # the next test begins with nothing
        if thing.serial not in before.alive:
            thing.close()
    assert unchanged, f"the test left behind: {left}"
    for call in wrapped.recording.calls_to("reserve"):
        if call.error is None:  # a range that has gone cannot be freed once more (T4)
            with refused(CudaResult.INVALID_VALUE):
                wrapped.inner.free_range(call.result, call.arguments[0])


def _mappings_first(thing: lifetime.Resource) -> bool:
    return not isinstance(thing, remap.Mapping | remap.Buffer)
