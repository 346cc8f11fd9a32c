"""Ctrl-C as a driver call returns, in the middle of what the wings do: no bytes lost, and nothing that cannot go on."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB, drivers
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
@pytest.mark.parametrize("call", ["create", "map", "set_access", "retain"])
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
        if call == "retain" and make != "ring":
            pytest.skip("only a ring is mapped twice")
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
