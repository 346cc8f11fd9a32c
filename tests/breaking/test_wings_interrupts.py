"""Ctrl-C as a driver call returns, in the middle of what the wings do: no bytes lost, and nothing that cannot go on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB, drivers, lifetime
from remap.drivers.wrappers import Faulty, Recording
from remap.errors import CudaResult
from remap.testing.bench import wait_until

SIZE = 4 * MiB


class Interrupted(BaseException):
    """What the handler of a signal raises."""


class Interrupting(Faulty):
    """A driver of which one chosen call raises an interrupt when it has been made, as the interpreter does."""

    after: str = ""

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **keywords: Any) -> Any:
            result = call(*arguments, **keywords)
            if self.after == name:
                self.after = ""
                raise Interrupted
            return result

        return made


class _Lock:
    """The lock of a driver, which raises an interrupt when it has been left for the `left`-th time."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.left = 0

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._inner.__exit__(*raised)
        self.left -= 1
        if self.left == 0 and raised[0] is None:
            raise Interrupted


class Unlocking(Faulty):
    """A driver whose lock can be interrupted as it is left."""

    def __init__(self, inner: Any) -> None:
        self._lock = _Lock(inner.lock)
        super().__init__(inner)

    @property
    def lock(self) -> Any:
        """The lock."""
        return self._lock


@pytest.fixture
def driver() -> Generator[Interrupting]:
    """Let the tests use a driver that can be interrupted."""
    wrapped = Interrupting(drivers.open())
    remap.use(wrapped)
    yield wrapped
    wrapped.after = ""
    drivers.close()


def contents() -> Any:
    """Return the bytes that the buffers of this file hold."""
    return np.frombuffer(np.random.default_rng(0).bytes(SIZE), np.uint8)


@pytest.mark.parametrize("keep", ["host", "disk"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupt_as_memory_goes_leaves_its_backup(driver: Interrupting, keep: Any, count: int) -> None:
    """An interrupt as the first unmapping returns leaves the buffers paused, and their backups are all there is (5)."""
    buffers = [remap.allocate(SIZE) for _ in range(count)]
    for buffer in buffers:
        buffer.copy_from_host(contents())
    driver.after = "unmap"
    with pytest.raises(Interrupted):
        remap.pause(buffers, keep)
    assert [buffer.paused for buffer in buffers] == [True] * count
    remap.resume(buffers)
    for buffer in buffers:
        assert np.array_equal(buffer.to_host(), contents())
        buffer.close()


@pytest.mark.parametrize("make", ["buffer", "ring", "elastic"])
@pytest.mark.parametrize("call", ["create", "map", "set_access"])
def test_an_interrupt_while_waking_leaves_it_paused(driver: Interrupting, make: str, call: str) -> None:
    """What an interrupt left half mapped does not stand in the way of the next resume (invariant 5)."""
    if make == "elastic":
        buffer: remap.Buffer = remap.ElasticBuffer(SIZE)
        buffer.resize(SIZE)  # type: ignore[attr-defined]
    else:
        buffer = remap.RingBuffer(SIZE) if make == "ring" else remap.allocate(SIZE)
    with buffer:
        buffer.copy_from_host(contents())
        remap.pause(buffer)
        driver.after = call
        with pytest.raises(Interrupted):
            remap.resume(buffer)
        assert buffer.paused
        remap.resume(buffer)
        assert np.array_equal(buffer.to_host(), contents())


def test_an_interrupt_while_growing_leaves_nothing_in_the_way(driver: Interrupting) -> None:
    """A chunk that was mapped as the interrupt came is unmapped again, and growing goes on later (invariant 5)."""
    with remap.ElasticBuffer(64 * MiB, chunk="2MiB") as buffer:
        buffer.resize(SIZE)
        buffer.copy_from_host(contents())
        free = remap.device(0).memory().free
        driver.after = "map"
        with pytest.raises(Interrupted):
            buffer.resize(4 * SIZE)
        assert buffer.size == SIZE
        assert remap.device(0).memory().free == free
        buffer.resize(4 * SIZE)
        assert np.array_equal(buffer.to_host(shape=SIZE), contents())


def test_staging_memory_stays_until_its_copies_are_done() -> None:
    """A copy to staging memory that nobody could wait for is waited for again before that memory goes.

    It was given back under the copy: the process crashed.
    """
    faulty = Faulty(drivers.open())
    recording = Recording(faulty)
    remap.use(recording)
    try:
        with remap.allocate(SIZE) as buffer:
            buffer.copy_from_host(contents())
            recording.forget()
            faulty.fail("synchronize_stream", result=CudaResult.UNKNOWN)
            with pytest.raises(remap.DriverError):
                remap.pause(buffer, "disk")
            said = [
                (call.name, call.error) for call in recording.calls_to("copy_to_host", "synchronize_stream")
            ]
            assert said[-1] == ("synchronize_stream", None), said
            assert not buffer.paused
            assert np.array_equal(buffer.to_host(), contents())
        assert wait_until(lambda: remap.host_pool().statistics().used == 0)
    finally:
        drivers.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a fork that nobody got
@pytest.mark.parametrize("act", ["pause", "migrate", "resize", "fork"])
@pytest.mark.parametrize("make", ["buffer", "elastic"])
def test_an_interrupt_as_a_lock_is_left_blocks_nobody(make: str, act: str) -> None:
    """Wherever an interrupt meets an operation, it does not stay "under way": the buffer can be used, and closed."""
    if make == "buffer" and act in ("resize", "fork"):
        pytest.skip("only elastic buffers do that")
    driver = Unlocking(drivers.open())
    remap.use(driver)
    try:
        for left in range(1, 60):
            buffer: Any = remap.ElasticBuffer(2 * SIZE) if make == "elastic" else remap.allocate(SIZE)
            if make == "elastic":
                buffer.resize(SIZE)
            buffer.copy_from_host(contents())
            driver.lock.left = left
            try:
                _act(buffer, act)
                done = driver.lock.left > 0
            except Interrupted:
                done = False
            driver.lock.left = 0
            assert not buffer._taken
            assert not getattr(buffer, "_changing", "")
            remap.resume(buffer)
            buffer.close()
            if done:
                break
        else:
            pytest.fail("the operation has no end")
        gc.collect()
        lifetime.collect()
    finally:
        drivers.close()


def _act(buffer: Any, act: str) -> None:
    if act == "pause":
        remap.pause(buffer)
    elif act == "migrate":
        remap.migrate(buffer, remap.Host())
    elif act == "resize":
        buffer.resize(SIZE // 2)
    else:
        buffer.fork().close()


def test_an_interrupt_while_pool_memory_is_made(driver: Interrupting) -> None:
    """Memory that the pool has given is freed again when what became of it is collected (invariant 4)."""
    with remap.Stream(0) as stream:
        driver.after = "create_event"
        with pytest.warns(ResourceWarning, match="pool memory .* was never closed"):
            with pytest.raises(Interrupted):
                remap.DeviceBox.empty(SIZE, "uint8", stream=stream.handle, device=0)
            gc.collect()
        remap.collect()
        remap.device(0).synchronize()
        assert remap.DeviceBox.statistics(0).used == 0
