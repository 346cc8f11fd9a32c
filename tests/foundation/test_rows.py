"""Rows that no other test cites: who may back a device's memory (A3), neighbours (A6), and rights (B4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import remap
from remap import Access, MiB
from remap.testing.children import run_in_child
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

SIZE = 4 * MiB
ONLY_NEXT = [[True, True, False], [False, True, True], [False, False, True]]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"peers": ONLY_NEXT}, [(0, 1), (1, 2), (2,)]),
        ({"peers": "none"}, [(0,), (1,), (2,)]),
        ({"capabilities": {"vmm": False}}, [(), (), ()]),
    ],
)
def test_backing_devices_are_within_reach_and_have_vmm(
    options: dict[str, Any], found: list[tuple[int, ...]]
) -> None:
    """A device's memory may lie on those that it reaches, not on those that reach it; itself included (A3)."""
    assert run_in_child(backing, options) == found


def backing(options: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return the numbers of the devices that may back the memory of each device of a host driver."""
    remap.use("host", devices=3, **options)
    return [tuple(one.index for one in each.backing_devices()) for each in remap.devices()]


@pytest.mark.two_devices
def test_a_neighbour_stays_out_of_reach(stage: Stage) -> None:
    """A buffer is used by a peer with no further call; one beside it that does not name the peer is not (A6)."""
    peer = remap.device(1)
    with (
        remap.allocate(SIZE, resident=0, accessing=[0, 1]) as shared,
        remap.allocate(SIZE, resident=0, accessing=0) as alone,
        remap.Stream(peer) as stream,
    ):
        alone.fill(1)
        mark = stage.mark()
        shared.fill(2, stream=stream)
        assert not {"set_access", "map"} & {*stage.names_since(mark)}
        with pytest.raises(remap.AccessError, match="device 1"):
            alone.fill(2, stream=stream)
        with pytest.raises(remap.AccessError, match="device 1"):
            alone.copy_from_host(np.zeros(1, np.uint8), stream=stream)
        assert alone.get_access(1) is Access.NONE
        stream.synchronize()
        assert (int(shared.to_host()[0]), int(alone.to_host()[0])) == (2, 1)


def test_each_mapping_has_rights_of_its_own_which_change(stage: Stage) -> None:
    """None, read and read-write, for each mapping and place; changed later, and read back from the driver (B4)."""
    rights = (Access.NONE, Access.READ, Access.READ_WRITE)
    with remap.create(SIZE, at=remap.Host()) as memory, remap.reserve(2 * SIZE) as addresses:
        one, other = (addresses.map(memory, offset=at, access={0: "rw"}) for at in (0, SIZE))
        one.fill(3)
        for right in (*rights, *reversed(rights)):
            one.set_access({0: right})
            assert [each.get_access(0) for each in (one, other)] == [right, Access.READ_WRITE]
        one.set_access({remap.Host(): "r"})  # the CPU may look where memory lies with it
        view = one.array().numpy()
        assert int(view[0]) == 3
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 4
        del view
        one.close()
        other.close()
    assert stage.inner is not None
