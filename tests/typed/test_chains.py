"""Chains: work that is put together first, and run on a stream or awaited (D9)."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import ClosedError, InUseError, InvalidValueError
from remap.streams import StreamCalls
from remap.testing.stage import Stage
from remap.testing.typed import gate, hold

pytest_plugins = ("remap.testing.stage",)


class Doubler:
    """A kernel, as a chain sees one: it sets its second argument to twice the first, on a stream."""

    def launch(self, source: remap.DeviceBox, target: remap.DeviceBox, *, stream: StreamCalls) -> None:
        """Copy there, and add by copying back: what matters here is the order."""
        target.owner.copy_from(source.owner, size=source.nbytes, stream=stream)
        target[:1].fill(42, stream=stream)


def settle() -> None:
    """Wait for the device, and give the pool's free memory back."""
    remap.collect()
    remap.device().synchronize()
    remap.DeviceBox.trim()


def build(array: np.ndarray[tuple[int], np.dtype[np.int32]]) -> remap.Chain:
    """Return a chain that copies an array in, launches, and copies the result out."""
    chain = remap.chain()
    source = chain.copy_in(array)
    target = chain.empty(array.shape, array.dtype)
    chain.launch(Doubler(), source, target)
    chain.copy_out(target)
    return chain


def test_nothing_runs_before_it_is_asked_to(stage: Stage) -> None:
    """Putting a chain together makes no call of the driver, and owns nothing."""
    remap.device().properties  # noqa: B018 (asked once)
    mark = stage.mark()
    build(np.arange(100, dtype="int32"))
    assert stage.names_since(mark) == []


def test_results(stage: Stage) -> None:
    """A chain gives what was copied out: one array, several, or none; each run anew, with the array as it is then."""
    array = np.arange(100, dtype="int32")
    chain = build(array)
    for start in range(3):
        array[:] = np.arange(start, start + 100)
        result = chain.run().wait()
        assert result[0] == 42
        assert (result[1:] == array[1:]).all()
    both = remap.chain()
    ones, twos = both.zeroed(10, "int8"), both.zeroed((2, 3))
    both.copy_out(ones)
    both.copy_out(twos)
    assert [one.shape for one in both.run().wait()] == [(10,), (2, 3)]
    assert remap.chain().run().wait() is None
    settle()


def test_what_is_copied_out_is_what_was_there_then(stage: Stage) -> None:
    """Later steps that write into the same memory do not change what was copied out before them."""
    chain = remap.chain()
    memory = chain.zeroed(1000, "int32")
    chain.copy_out(memory)
    out = np.empty(1000, "int32")
    chain.launch(Doubler(), chain.copy_in(np.full(1000, 5, "int32")), memory)
    chain.copy_out(memory, out)
    chain.copy_out(memory)
    first, second, third = chain.run().wait()
    assert (first == 0).all()
    assert second is out
    assert third.tolist() == [42] + [5] * 999
    assert (second == third).all()
    settle()


def test_a_stream_of_ones_own(stage: Stage) -> None:
    """On a named stream, a chain comes after what was queued there, and run() does not wait."""
    with remap.Stream() as stream, gate(stream) as opened:
        chain = remap.chain()
        chain.copy_out(chain.zeroed(10))
        run = chain.run(stream=stream)
        assert not run.done
        opened.set()
        assert run.wait().shape == (10,)
        assert stream.done
    settle()


class Foreign:
    """A stream of another library."""

    def __init__(self, stream: remap.Stream) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return what CUDA's protocol asks for."""
        return self.stream.__cuda_stream__()


@pytest.mark.parametrize("kind", ["foreign", "handle", "default"])
def test_streams_of_all_kinds(stage: Stage, kind: str) -> None:
    """A chain runs on whatever is a stream elsewhere: another library's, a bare handle, 0 for the default one."""
    array = np.arange(100, dtype="int32")
    with remap.Stream() as own, gate(own) as opened:
        given: Any = {"foreign": Foreign(own), "handle": own.handle, "default": 0}[kind]
        seen: list[Any] = []
        chain = build(array)
        chain.call(seen.append)
        run = chain.run(stream=given)
        if kind != "default":
            assert not run.done
        opened.set()
        assert (run.wait() == np.append([42], array[1:])).all()
        assert seen == [given]
    with pytest.raises(TypeError, match="a stream is None"):
        chain.run(stream="s")  # type: ignore[arg-type]
    assert len(seen) == 1, "nothing was queued"
    settle()


def test_memory_that_is_given(stage: Stage) -> None:
    """A box among the results is the caller's, and frees itself when it is dropped."""
    settle()
    chain = remap.chain()
    memory = chain.copy_in(np.arange(1000))
    chain.give(memory)
    box = chain.run().wait()
    assert (box.to_host() == np.arange(1000)).all()
    del box  # with no warning
    gc.collect()
    settle()
    assert remap.DeviceBox.statistics().used == 0


def test_intermediate_memory_is_freed_at_once(stage: Stage) -> None:
    """Memory goes in stream order after its last use, so that a long chain takes little of it."""
    settle()
    chain = remap.chain()
    for _ in range(20):
        chain.zeroed(1 << 20, "uint8")
    run = chain.run()
    assert remap.DeviceBox.statistics().used == 0
    run.wait()
    settle()


def test_runs_that_are_dropped(stage: Stage) -> None:
    """A run that nobody waits for still happens, and frees its memory behind itself."""
    settle()
    out = np.zeros(1000, "int32")
    chain = remap.chain()
    memory = chain.copy_in(np.arange(1000, dtype="int32"))
    chain.copy_out(memory, out)
    chain.copy_out(memory)
    chain.run()
    stage.recording.forget()
    gc.collect()
    settle()
    assert (out == np.arange(1000)).all()
    assert remap.DeviceBox.statistics().used == 0


@contextmanager
def opened_at_the_end(gates: list[threading.Event]) -> Generator[None]:
    """Open gates at the end of a block, whatever happens in it."""
    try:
        yield
    finally:
        for one in gates:
            one.set()


def test_awaiting(stage: Stage) -> None:
    """Chains are awaited side by side, and the event loop runs meanwhile."""
    array = np.arange(100, dtype="int32")
    ticks = 0
    opened: list[threading.Event] = []

    async def main() -> None:
        nonlocal ticks
        held = remap.chain()
        held.call(lambda stream: opened.append(hold(stream)))
        held.copy_out(held.zeroed(5))
        waiting = asyncio.ensure_future(_awaited(held))
        results = await asyncio.gather(*(_awaited(build(array)) for _ in range(5)))
        assert all((one[1:] == array[1:]).all() for one in results)
        assert not waiting.done()
        while ticks < 10:
            await asyncio.sleep(0)
            ticks += 1
        assert not waiting.done()
        opened[0].set()
        assert (await asyncio.wait_for(waiting, 30)).shape == (5,)

    with opened_at_the_end(opened):
        asyncio.run(main())
    assert ticks == 10
    settle()


def test_cancelling(stage: Stage) -> None:
    """A task that is cancelled while it awaits leaves the work to itself, and nothing behind."""
    settle()
    opened: list[threading.Event] = []

    async def main() -> None:
        held = remap.chain()
        held.call(lambda stream: opened.append(hold(stream)))
        held.copy_out(held.zeroed(5))
        task = asyncio.ensure_future(_awaited(held))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with opened_at_the_end(opened):
        asyncio.run(main())
    remap.device().synchronize()
    stage.recording.forget()  # it remembers the host function, which holds the run
    gc.collect()
    settle()
    assert remap.DeviceBox.statistics().used == 0


async def _awaited(chain: remap.Chain) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    result: np.ndarray[tuple[int], np.dtype[np.int32]] = await chain
    return result


def test_results_are_given_once(stage: Stage) -> None:
    """The results of a run are taken once."""
    run = remap.chain().run()
    run.wait()
    with pytest.raises(ClosedError):
        run.wait()
    settle()


@pytest.mark.parametrize("call", ["synchronize_event", "copy_to_host", "synchronize_stream"])
def test_a_wait_that_fails_loses_no_result(stage: Stage, call: str) -> None:
    """Whatever a wait was told, the results are there for the next one (invariant 5)."""
    run = build(np.arange(100, dtype="int32")).run()
    stage.faulty.fail(call)
    with pytest.raises(remap.DriverError):
        run.wait()
    assert stage.faulty.refused == (call,)
    assert run.wait()[:3].tolist() == [42, 1, 2]
    with pytest.raises(ClosedError):
        run.wait()
    settle()


def test_two_threads_wait_for_a_run(stage: Stage) -> None:
    """Both wait; one gets the results, and the other is told that they were taken (invariant 13)."""
    found: list[object] = []

    def take() -> None:
        try:
            found.append(run.wait())
        except ClosedError as error:
            found.append(error)

    with remap.Stream() as stream:
        with gate(stream) as opened:
            run = build(np.arange(100, dtype="int32")).run(stream=stream)
            threads = [threading.Thread(target=take) for _ in range(2)]
            for thread in threads:
                thread.start()
            assert not found
            opened.set()
            for thread in threads:
                thread.join(30)
        assert sorted(type(one).__name__ for one in found) == ["ClosedError", "ndarray"]
    settle()


def test_failures(stage: Stage) -> None:
    """A step that fails raises there; what the run had allocated is freed, and the chain can be run again."""
    settle()
    chain = build(np.arange(100, dtype="int32"))
    stage.faulty.fail("copy")
    with pytest.raises(remap.DriverError):
        chain.run()
    stage.faulty.heal()
    settle()
    assert remap.DeviceBox.statistics().used == 0
    assert chain.run().wait().shape == (100,)
    settle()


def test_bad_input(stage: Stage) -> None:
    """Mistakes are refused when the chain is put together."""
    chain, other = remap.chain(), remap.chain()
    memory = chain.zeroed(10)
    with pytest.raises(InvalidValueError, match="of another chain"):
        other.copy_out(memory)
    with pytest.raises(InvalidValueError, match="convert"):
        chain.copy_out(memory, np.empty(9, "float32"))
    with pytest.raises(InvalidValueError, match="contiguous"):
        chain.copy_in(np.arange(10)[::2])
    number: Any = 5
    with pytest.raises(TypeError, match="copy_out takes what a step gives"):
        chain.copy_out(number)
    with pytest.raises(TypeError, match="give takes what a step"):
        chain.give(number)
    chain.give(memory)
    with pytest.raises(InvalidValueError, match="gave it away"):
        chain.give(memory)
    with pytest.raises(InvalidValueError, match="gave it away"):
        chain.copy_out(memory)
    with pytest.raises(InvalidValueError, match="gave it away"):
        chain.launch(Doubler(), memory, memory)
    with chain.run().wait() as box:
        assert not box.to_host().any()
    settle()


@pytest.mark.cuda
def test_refused_under_capture(stage: Stage) -> None:
    """A chain is not run on a stream that is being captured, and the capture goes on (trap 13)."""
    cuda = pytest.importorskip("cuda.bindings.driver")
    with remap.Stream() as stream, stream.device.current():
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        (err,) = cuda.cuStreamBeginCapture(stream.handle, mode)
        assert not err
        with pytest.raises(InUseError):
            build(np.arange(10, dtype="int32")).run(stream=stream)
        err, graph = cuda.cuStreamEndCapture(stream.handle)
        assert not err, "the capture was broken"
        cuda.cuGraphDestroy(graph)
