"""Blocks of pools: they end in the order in which they began, stay with their task, and `outside` leaves them all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import remap

# Where something is made, and not that anything is, is what these are about.
pytestmark = pytest.mark.filterwarnings("ignore:pool '.*' .* nothing was ever made")


def test_outside_of_pools(torch: Any, machine: Any) -> None:
    """Inside of `outside`, tensors are torch's own, those that remap is asked for as well; pools go on after it."""
    with machine.pool("a") as pool:
        with machine.outside():
            plain = machine.empty(10, dtype=torch.int32).fill_(1)
            assert machine.empty_like(plain).shape == (10,)
            with machine.pool("b"):
                inner = machine.empty(10)
        ours = machine.empty(10)
    assert len(pool.segments) == 1
    assert machine.buffer_of(ours).tag == "a"
    assert machine.buffer_of(inner).tag == "b"
    with pytest.raises(remap.InvalidValueError, match="pool"):
        machine.buffer_of(plain)
    with machine.outside():
        assert machine.empty(3).shape == (3,)
    with pytest.raises(remap.InvalidValueError, match="in no pool"):
        machine.empty(1)


def test_disabling_the_memory_saver(machine: Any) -> None:
    """What is made while torch_memory_saver is disabled is not paused."""
    from remap.integrations.tms import TorchMemorySaver

    saver = TorchMemorySaver()
    with saver.region():
        paused = machine.empty(10)
        with saver.disable():
            plain = machine.empty(10).fill_(2)
    saver.pause()
    assert float(plain.sum()) == 20
    assert remap.torch.buffer_of(paused).paused
    saver.resume()


def test_tasks_that_wait_inside_of_a_block(machine: Any) -> None:
    """A task is refused tensors in the pool of another one, and a block that is not the innermost says so at its end.

    Nothing is lost then: what was made stays where it is, and both pools can be entered and put to sleep.
    """
    told: dict[str, str] = {}
    made: dict[str, Any] = {}

    async def main() -> None:
        entered, asked = asyncio.Event(), asyncio.Event()

        async def first() -> None:
            with machine.pool("a"):
                await entered.wait()
                try:
                    machine.empty(3)
                except remap.InUseError as error:
                    told["asked"] = str(error)

        async def second() -> None:
            with machine.pool("b"):
                entered.set()
                await asked.wait()
                made["b"] = machine.empty(3).fill_(1)

        tasks = [asyncio.ensure_future(first()), asyncio.ensure_future(second())]
        with pytest.raises(
            remap.InUseError, match=r"a block of pool 'a' to be left: .* a block of pool 'b' since"
        ):
            await tasks[0]
        asked.set()
        await tasks[1]

    asyncio.run(main())
    assert "another task of this thread has entered a block of pool 'b' since" in told["asked"]
    assert machine.buffer_of(made["b"]).tag == "b"
    assert not machine.pools()["a"].segments
    machine.sleep(["a", "b"])
    machine.wake()
    assert float(made["b"].sum()) == 3
    with pytest.raises(remap.InvalidValueError, match="in no pool"):
        machine.empty(1)
    with machine.pool("a"):
        assert machine.buffer_of(machine.empty(1)).tag == "a"


def test_blocks_that_end_out_of_order(machine: Any) -> None:
    """The block that ends too early raises and has ended; those entered since go on, and end as ever."""
    outer, inner = machine.pool("a"), machine.pool("b")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(remap.InUseError, match="since"):
        outer.__exit__(None, None, None)
    assert machine.buffer_of(machine.empty(1)).tag == "b"
    inner.__exit__(None, None, None)
    with pytest.raises(remap.InvalidValueError, match="in no pool"):
        machine.empty(1)


def test_an_exception_that_leaves_a_block_out_of_order(machine: Any) -> None:
    """The exception passes through unchanged, whatever else would be said at the end of the block."""
    outer, inner = machine.pool("a"), machine.pool("b")
    outer.__enter__()
    inner.__enter__()
    error = ZeroDivisionError()
    assert not outer.__exit__(ZeroDivisionError, error, None)
    inner.__exit__(None, None, None)
    machine.sleep(["a", "b"])
    machine.wake()


def test_graphs_need_cuda(torch: Any, machine: Any) -> None:
    """Without CUDA, what captures graphs says what is missing, in each of its forms."""
    if remap.driver().name == "cuda":
        pytest.skip("about the host driver")
    from remap.integrations.tms import TorchMemorySaver

    why = "CUDA" if torch.cuda.is_available() else "no CUDA"
    with machine.pool("a") as pool:
        pass
    with pytest.raises(remap.NotSupportedError, match=why), machine.graph(None, "a"):
        pass
    with pytest.raises(remap.NotSupportedError, match=why):
        pool.graph_pool()
    with pytest.raises(remap.NotSupportedError, match=why), TorchMemorySaver().cuda_graph(None):
        pass
    machine.sleep("a")
    machine.wake("a")
