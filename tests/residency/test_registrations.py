"""Memory that another library has registered stays where it is until that is over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import remap
from remap import MiB

from .support import acts

TAKING: dict[str, Callable[[remap.Buffer], object]] = {
    "paused": remap.pause,
    "migrated": lambda buffer: remap.migrate(buffer, remap.Host()),
    "closed": lambda buffer: buffer.close(),
}


@pytest.mark.parametrize("doing", TAKING)
def test_it_stays_where_it_is(doing: str) -> None:
    """What would take the memory away raises, names everyone, and changes nothing; afterwards it works."""
    with remap.allocate(4 * MiB, resident=0) as buffer:
        buffer.fill(7)
        first, second = buffer.registered("NCCL"), buffer.registered("a network adapter")
        rule = rf"to be {doing}: its memory is registered with NCCL, a network adapter"
        with pytest.raises(remap.InUseError, match=rule):
            TAKING[doing](buffer)
        assert (buffer.closed, buffer.paused, buffer.generation) == (False, False, 0)
        assert (buffer.to_host() == 7).all()
        first.close()
        with pytest.raises(remap.InUseError, match="a network adapter"):
            TAKING[doing](buffer)
        second.close()
        second.close()
        TAKING[doing](buffer)
        assert "closed" in repr(second)


def test_of_a_whole_group_all_or_none() -> None:
    """One registered buffer lets none of its group sleep (invariant 5)."""
    with remap.group("a group with a registration"):
        buffers = [remap.allocate(2 * MiB, resident=0) for _ in range(3)]
    with buffers[1].registered("UCX"), pytest.raises(remap.InUseError, match="UCX"):
        remap.pause("a group with a registration")
    assert [buffer.paused for buffer in buffers] == [False] * 3
    for buffer in buffers:
        buffer.close()


def test_a_growing_buffer_keeps_what_it_has() -> None:
    """It may grow, which takes nothing away, and neither shrink nor give parts back."""
    with remap.ElasticBuffer(capacity=16 * MiB, device=0, chunk=2 * MiB) as buffer:
        buffer.resize(4 * MiB)
        with buffer.registered("UCX"):
            buffer.resize(8 * MiB)
            for shrink in acts(lambda: buffer.resize(2 * MiB), lambda: buffer.decommit(0, 2 * MiB)):
                with pytest.raises(remap.InUseError, match="registered with UCX"):
                    shrink()
            assert buffer.size == 8 * MiB
        buffer.resize(2 * MiB)


def test_sleeping_memory_cannot_be_registered() -> None:
    """There is nothing behind it then; a closed buffer says that it is closed."""
    buffer = remap.allocate(2 * MiB, resident=0)
    remap.pause(buffer)
    with pytest.raises(remap.PausedError, match="a registration by NCCL"):
        buffer.registered("NCCL")
    remap.resume(buffer)
    buffer.close()
    with pytest.raises(remap.ClosedError):
        buffer.registered("NCCL")


def test_listeners_register_again() -> None:
    """A listener hears of each change when all is done, so it can register the memory anew (invariant 6)."""
    held: list[remap.Registration] = []

    def register(buffer: remap.Buffer) -> None:
        if not buffer.paused:
            held.append(buffer.registered("NCCL"))

    with remap.allocate(2 * MiB, resident=0) as buffer:
        buffer.on_change(register)
        for change in acts(
            lambda: (remap.pause(buffer), remap.resume(buffer)),
            lambda: remap.migrate(buffer, remap.Host()),
        ):
            change()
            with pytest.raises(remap.InUseError):
                remap.pause(buffer)
            held.pop().close()
        assert not held
