"""`MulticastObject` and its view: the order is kept, and refusals say what comes first (B6)."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack

import numpy as np
import pytest

import remap
from remap import MiB, MulticastObject
from remap.drivers.multicast_power import SupportsMulticast
from remap.errors import AlignmentError, InUseError, InvalidValueError, NotSupportedError

SOURCE = """
extern "C" __global__ void store(unsigned int *everyone, unsigned int value)
{
    asm volatile("multimem.st.relaxed.sys.global.u32 [%0], %1;" ::"l"(everyone + 2), "r"(value) : "memory");
}
"""


@pytest.fixture(name="stack")
def _stack() -> Generator[ExitStack]:
    if not remap.device(0).capabilities["multicast"]:
        pytest.skip(remap.device(0).capabilities["multicast"].reason)
    if len(remap.devices()) < 2:
        pytest.skip("needs two devices")
    with ExitStack() as stack:
        yield stack


def test_refused_before_any_call() -> None:
    """Where multicast is off, as it is on the test GPUs, the refusal names the capability and makes no call."""
    capability = remap.device(0).capabilities["multicast"]
    if capability:
        pytest.skip("there is multicast here")
    with pytest.raises(NotSupportedError) as caught:
        MulticastObject.create(MiB, devices=2)
    assert caught.value.capability == "multicast"
    assert caught.value.rule == capability.reason
    driver = remap.driver()
    assert isinstance(driver, SupportsMulticast)
    with pytest.raises(NotSupportedError, match="cuMulticastAddDevice"):
        driver.add_multicast_device(0, 0)
    with pytest.raises(remap.ShareError, match="there is no multicast"):
        remap.SymmetricBuffer(remap.SingleExchange(), MiB, multicast=True)
    with remap.SymmetricBuffer(remap.SingleExchange(), MiB, multicast=None) as sym:
        assert not sym.has_multicast
        with pytest.raises(NotSupportedError, match="multicast"):
            _ = sym.multicast


@pytest.mark.cuda
def test_off_on_the_test_machines() -> None:
    """On CUDA the tests run with multicast forbidden, so that no call of it can reach a shared host's fabric."""
    assert os.environ["REMAP_DISABLE_MULTICAST"] == "1"
    for device in remap.devices():
        assert not device.capabilities["multicast"]


def test_the_whole_way(stack: ExitStack) -> None:
    """Created, devices added, memory bound, mapped: a kernel stores once and every replica has it."""
    team = stack.enter_context(MulticastObject.create(MiB, devices=2))
    assert team.size == team.granularity > MiB
    memories = [stack.enter_context(remap.create(team.size, at=index)) for index in range(2)]
    team.add(0)
    team.add(1)
    for memory in memories:
        team.bind(memory)
    view = stack.enter_context(team.map())
    assert set(view.access) == {remap.device(0).location, remap.device(1).location}
    space = stack.enter_context(remap.reserve(2 * team.size))
    own = [
        stack.enter_context(space.map(memory, offset=index * team.size, access={0: "rw", index: "rw"}))
        for index, memory in enumerate(memories)
    ]
    module = stack.enter_context(remap.load(remap.source(SOURCE), device=0))
    store = module.function("store", parameters=["pointer", "uint32"])

    @store.host
    def _(launch: object, everyone: remap.Pointer, value: int) -> None:
        with launch.multimem(everyone.address + 8, 4, writes=True) as replicas:  # type: ignore[attr-defined]
            for one in replicas:
                np.frombuffer(one, np.uint32)[0] = value

    store.launch(view, 12345, grid=1, block=1)
    for one in own:
        assert one.to_host("uint32", 1, offset=8)[0] == 12345


def test_out_of_order(stack: ExitStack) -> None:
    """Binding before every device is there, adding after binding, mapping without replicas: each is refused."""
    team = stack.enter_context(MulticastObject.create(MiB, devices=2))
    first = stack.enter_context(remap.create(team.size, at=0))
    second = stack.enter_context(remap.create(team.size, at=1))
    with pytest.raises(InUseError, match="has added 0 of the 2 devices"):
        team.bind(first)
    with pytest.raises(InUseError, match="has added 0 of the 2 devices"):
        team.map()
    team.add(0)
    with pytest.raises(InUseError, match="has added 1 of the 2 devices"):
        team.bind(first)
    team.add(1)
    with pytest.raises(InUseError, match="no memory of device 0, device 1 is bound"):
        team.map()
    team.bind(first)
    with pytest.raises(InUseError, match="the team is complete"):
        team.add(1)
    with pytest.raises(InUseError, match="no memory of device 1 is bound"):
        team.map()
    team.bind(second)
    team.map().close()


def test_replicas_and_offsets(stack: ExitStack) -> None:
    """Unequal replicas, and offsets or sizes that do not fit, are refused with both sides named."""
    team = stack.enter_context(MulticastObject.create(5 * MiB, devices=2))
    unit = team.granularity
    assert team.size == 2 * unit
    first = stack.enter_context(remap.create(2 * unit, at=0))
    second = stack.enter_context(remap.create(unit, at=1))
    team.add(0)
    team.add(1)
    for offset, skip, size in ((MiB, 0, unit), (0, MiB, unit), (0, 0, unit // 2)):
        with pytest.raises(AlignmentError):
            team.bind(first, offset=offset, memory_offset=skip, size=size)
    for offset, skip, size in ((2 * unit, 0, unit), (0, 2 * unit, unit), (unit, 0, 2 * unit), (0, 0, 0)):
        with pytest.raises(InvalidValueError):
            team.bind(first, offset=offset, memory_offset=skip, size=size)
    with pytest.raises(InvalidValueError):
        team.bind(first, offset=unit)
    team.bind(first)
    team.bind(second)
    with pytest.raises(InvalidValueError, match="unequal replicas"):
        team.map()
    for what in ((0, 2), (MiB, 0), (-1, 2)):
        with pytest.raises(InvalidValueError):
            MulticastObject.create(what[0], devices=what[1])


@pytest.mark.parametrize("captured", ["memory", "view"])
def test_a_refused_close_closes_nothing(stack: ExitStack, captured: str) -> None:
    """Where the memory or the view of a symmetric buffer cannot go yet, both stay; then both go (invariant 5)."""
    sym = stack.enter_context(remap.SymmetricBuffer(remap.SingleExchange(), MiB, multicast=True))
    view = sym.multicast
    module = stack.enter_context(remap.load(remap.source(SOURCE), device=0))
    store = module.function("store", parameters=["pointer", "uint32"])
    store.host(lambda _, everyone, value: None)
    with remap.Stream(0) as stream:
        with remap.capture(stream) as capture:
            if captured == "memory":
                sym.local.fill(1, stream=stream)
            else:
                store.launch(view, 1, grid=1, block=1, stream=stream)
            with pytest.raises(InUseError, match="is being captured"):
                sym.close()
            assert (sym.closed, view.closed) == (False, False)
        capture.graph.close()
        sym.local.fill(2)
        sym.close()
        assert (sym.closed, view.closed) == (True, True)


def test_a_view_is_for_kernels(stack: ExitStack) -> None:
    """A view refuses copies, fills and arrays: only multimem instructions mean anything there."""
    team = stack.enter_context(MulticastObject.create(MiB, devices=1))
    memory = stack.enter_context(remap.create(team.size, at=0))
    team.add(0)
    team.bind(memory)
    view = team.map()
    for attempt in (
        lambda: view.fill(0),
        lambda: view.copy_from_host(np.zeros(4)),
        lambda: view.to_host("uint8", 4),
        lambda: view.array("float32", 1),
    ):
        with pytest.raises(InvalidValueError, match="only multimem instructions"):
            attempt()
    assert view.chunks == ()
    view.close()
    view.close()
    with pytest.raises(remap.ClosedError):
        view.fill(0)


def test_a_closed_object(stack: ExitStack) -> None:
    """A closed object is of no use, and its view lives on."""
    team = MulticastObject.create(MiB, devices=1)
    memory = stack.enter_context(remap.create(team.size, at=0))
    team.add(0)
    team.bind(memory)
    view = stack.enter_context(team.map())
    team.close()
    for attempt in (lambda: team.add(0), lambda: team.bind(memory), team.map, team.export):
        with pytest.raises(remap.ClosedError):
            attempt()
    assert view.address
