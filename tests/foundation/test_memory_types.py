"""Which combinations of place, shareable handle, compression and RDMA there are: tried, and not assumed (B7)."""

from __future__ import annotations

import os
from collections import Counter

import pytest

import remap
from remap import MemoryType, drivers
from remap.drivers.wrappers import Call
from remap.testing.stage import Stage
from remap.types import HandleType

pytest_plugins = ("remap.testing.stage",)


def allocate(one: MemoryType) -> remap.Buffer:
    """Allocate such memory the way that a program does."""
    asked = one.asked
    return remap.allocate(
        1,
        resident=asked.location,
        accessing=0,
        shareable=asked.handle_types,
        compressible=asked.compressible,
        rdma=asked.rdma,
    )


def test_every_combination_is_told_once(stage: Stage) -> None:
    """For each place: no handle or one of each kind, with and without compression and RDMA; a refusal says why."""
    before = stage.seen()
    found = remap.device(0).memory_types()
    assert len({one.asked for one in found}) == len(found)
    places = Counter(one.asked.location for one in found)
    assert set(places.values()) == {(1 + len(HandleType)) * 2 * 2}
    assert remap.device(0).location in places
    assert remap.Host() in places
    assert all(one.supported == (not one.reason) == bool(one) for one in found)
    assert stage.unchanged(before)


def test_what_is_told_is_so(stage: Stage) -> None:
    """What is said to be there can be allocated and is what was asked for; the rest is refused, or is not as asked."""
    before = stage.seen()
    for one in remap.device(0).memory_types():
        if one:
            with allocate(one) as buffer:
                given = buffer.outcome()
                assert (given.compressible, given.rdma) == (one.asked.compressible, one.asked.rdma), str(one)
            continue
        if one.asked.handle_types & {HandleType.FABRIC}:
            continue  # a fabric that is not there is not asked for again
        try:
            with allocate(one) as buffer:
                given = buffer.outcome()
                assert (given.compressible, given.rdma) != (one.asked.compressible, one.asked.rdma), str(one)
        except remap.RemapError:
            continue
    assert stage.unchanged(before)


def test_what_the_device_lacks_is_not_tried(stage: Stage) -> None:
    """A kind of handle that the device has not is not asked for again: finding that out can cost seconds (B1)."""
    device = remap.device(0)
    lacking = {kind for kind in HandleType if not device.capabilities[kind.value]}
    mark = len(stage.recording.calls)
    found = device.memory_types()

    def asks(call: Call) -> bool:
        return any(kind in getattr(one, "handle_types", ()) for one in call.arguments for kind in lacking)

    assert not [call for call in stage.since(mark) if asks(call)]
    assert all(not one for one in found if one.asked.handle_types & lacking)


@pytest.mark.parametrize("call", ["granularity", "create", "properties_of", "export_handle"])
def test_failures_are_reasons(stage: Stage, call: str) -> None:
    """A call that fails is why such memory cannot be had; nothing is left behind, no descriptor either."""
    healthy = remap.device(0).memory_types()
    before, descriptors = stage.seen(), len(os.listdir("/proc/self/fd"))
    stage.faulty.fail(call)
    found = remap.device(0).memory_types()
    assert stage.faulty.refused == (call,)
    stage.faulty.heal()
    (changed,) = (one for one, other in zip(found, healthy, strict=True) if one != other)
    assert not changed
    assert "UNKNOWN" in changed.reason
    assert stage.unchanged(before)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert remap.device(0).memory_types() == healthy


def test_compression_is_read_back() -> None:
    """A simulated device that compresses says so, combination by combination; one that does not, why."""
    if remap.driver().name != "host":
        pytest.skip("only the host driver compresses on request")
    own, found = remap.driver(), []
    for compression in (True, False):
        other = remap.use(drivers.open("host", compression=compression))  # which leaves the present one open
        found.append([one for one in remap.device(0).memory_types() if one.asked.compressible])
        remap.use(own)
        other.shutdown()
    granted, refused = found
    assert str(granted[0]) == "compressible, on device 0"
    assert granted[0]
    assert not any(refused)
    assert "not compressible" in refused[0].reason
