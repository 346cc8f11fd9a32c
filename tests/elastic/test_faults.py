"""Every driver call of every change of an elastic buffer fails in turn; nothing is leaked, lost or changed (5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB, RemapError
from remap.drivers.wrappers import CUDA_FUNCTIONS
from remap.errors import CudaResult
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

CAPACITY = 32 * MiB

NOT_SWEPT = {"pop_context", "shutdown", "synchronize_stream", "synchronize_context", "synchronize_event"}

Things = dict[str, Any]


def some(chunk: Any = 4 * MiB, **options: Any) -> Things:
    """Return a buffer with two parts of known bytes."""
    buffer = remap.ElasticBuffer(CAPACITY, device=0, chunk=chunk, **options)
    buffer.resize(5 * MiB)
    buffer.commit(20 * MiB, 23 * MiB)
    for value, (start, stop) in enumerate(buffer.extents, 1):
        buffer.fill(value, offset=start, size=stop - start)
    return {"buffer": buffer}


def forked() -> Things:
    """Return a buffer and its fork."""
    things = some()
    things["twin"] = things["buffer"].fork()
    things["twin"].commit(24 * MiB, 25 * MiB)
    return things


def pooled() -> Things:
    """Return a buffer with a pool that keeps everything, and has something."""
    pool = remap.ChunkPool(0, limit=CAPACITY)
    things = some(pool=pool) | {"pool": pool}
    things["buffer"].commit(8 * MiB, 16 * MiB)
    things["buffer"].decommit(8 * MiB, 16 * MiB)
    return things


def ring() -> Things:
    """Return a ring with known bytes."""
    found = remap.RingBuffer(2 * MiB, device=0)
    found.fill(3)
    return {"ring": found}


@dataclass(frozen=True)
class Operation:
    """Something to do; what it returns is closed if that is something to close."""

    name: str
    act: Callable[[Things], Any]
    setting: Callable[[], Things] = some


OPERATIONS = [
    Operation("make", lambda _: remap.ElasticBuffer(CAPACITY, device=0), dict),
    Operation("grow", lambda o: o["buffer"].resize(13 * MiB)),
    Operation("grow_over_a_hole", lambda o: o["buffer"].resize(30 * MiB)),
    Operation("grow_geometric", lambda o: o["buffer"].resize(13 * MiB), lambda: some("geometric")),
    Operation("grow_poisoned", lambda o: o["buffer"].resize(13 * MiB), lambda: some(poison=True)),
    Operation("grow_from_a_pool", lambda o: o["buffer"].resize(13 * MiB), pooled),
    Operation("commit", lambda o: o["buffer"].commit(6 * MiB, 31 * MiB)),
    Operation("shrink", lambda o: o["buffer"].resize(3 * MiB)),
    Operation("shrink_and_grow", lambda o: o["buffer"].resize(10 * MiB)),
    Operation("shrink_into_a_pool", lambda o: o["buffer"].resize(3 * MiB), pooled),
    Operation("decommit", lambda o: o["buffer"].decommit(2 * MiB, 22 * MiB)),
    Operation("decommit_shared", lambda o: o["buffer"].decommit(2 * MiB, 22 * MiB), forked),
    Operation("fork", lambda o: o["buffer"].fork()),
    Operation("fork_again", lambda o: o["twin"].fork(), forked),
    Operation("make_private", lambda o: o["twin"].make_private(3 * MiB, 22 * MiB), forked),
    Operation("set_access", lambda o: o["buffer"].set_access({0: "r"})),
    Operation("ring", lambda _: remap.RingBuffer(2 * MiB, device=0), dict),
    Operation("ring_set_access", lambda o: o["ring"].set_access({0: "r"}), ring),
    Operation("trim", lambda o: o["pool"].trim(), pooled),
]

MAY_BE_DONE = {"make_private": {"release"}, "shrink_into_a_pool": {"release"}, "trim": {"release"}}
"""What has two phases: when one of these calls fails, everything else is done, and the state is whole."""

ABSORBED = {
    "granularity",
    "capabilities",
}
"""Calls whose failure an operation may take for an answer."""


def look(things: Things) -> dict[str, object]:
    """Return everything that can be told of buffers."""
    seen: dict[str, object] = {}
    driver = remap.driver()
    for name, thing in things.items():
        if isinstance(thing, remap.ChunkPool):
            seen[name] = (thing.statistics().used, thing.statistics().kept)
            continue
        seen[name] = (thing.size, thing.chunks, dict(thing.access))
        seen[f"{name} rights"] = [
            driver.get_access(chunk.address, device.location)
            for chunk in thing.chunks
            for device in remap.devices()
        ]
        extents = thing.extents if isinstance(thing, remap.ElasticBuffer) else ((0, thing.size),)
        seen[f"{name} parts"] = (extents, getattr(thing, "shared", ()), getattr(thing, "generation", 0))
        seen[f"{name} bytes"] = [
            [int(np.bitwise_or.reduce(part)), int(np.bitwise_and.reduce(part))]
            for start, stop in extents
            for part in [thing.to_host(shape=stop - start, offset=start)]
        ]
    return seen


def release_leaked(stage: Stage, mark: int) -> None:
    """Make the releases since `mark` that were refused. An unmapping that was refused left everything as it was."""
    for call in stage.since(mark):
        if call.error is not None and call.name in {"release", "free_range"}:
            getattr(stage.inner, call.name)(*call.arguments)


def close(things: Things) -> None:
    """Close what there is, pools last."""
    for thing in sorted(things.values(), key=lambda thing: isinstance(thing, remap.ChunkPool)):
        thing.close()


@pytest.mark.parametrize("result", [CudaResult.OUT_OF_MEMORY, CudaResult.UNKNOWN], ids=lambda r: r.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_any_call_may_fail(stage: Stage, operation: Operation, result: CudaResult) -> None:
    """Whichever driver call fails, nothing was made or changed, and the same works afterwards (invariant 5, trap 4)."""
    swept = sorted(
        name for name, call in vars(stage.faulty).items() if callable(call) and name not in NOT_SWEPT
    )
    empty = stage.seen()
    failed: list[str] = []
    for nth in count(1):
        things = operation.setting()
        looked, seen, mark = look(things), stage.seen(), stage.mark()
        stage.faulty.fail(*swept, nth=nth, result=result)
        looks_at_memory = (
            operation.name != "grow_from_a_pool"
        )  # what it had lent for nothing is not kept again
        error: RemapError | None = None
        made: Any = None
        try:
            made = operation.act(things)
        except RemapError as caught:
            error = caught
        refused = stage.faulty.refused
        stage.faulty.heal()
        release_leaked(stage, mark)
        if error is not None:
            assert refused, f"{operation.name} failed by itself: {error}"
            if not set(refused) <= MAY_BE_DONE.get(operation.name, set()):
                if looks_at_memory:
                    assert stage.unchanged(seen), f"after {refused} failed: {stage.seen()}, before {seen}"
                else:
                    looked.pop("pool")
                found = look(things)
                assert {name: found[name] for name in looked} == looked, f"after {refused} failed"
            made = operation.act(things)
        elif refused:
            # Where memory runs out, geometric chunks give way to smaller ones.
            gives_way = operation.name == "grow_geometric" and result is CudaResult.OUT_OF_MEMORY
            absorbed = ABSORBED | (set(swept) if gives_way else set())
            assert set(refused) <= absorbed, f"{operation.name} took no notice that {refused} failed"
        if hasattr(made, "close"):
            made.close()
        close(things)
        assert stage.unchanged(empty), f"after {refused}: {stage.seen()}, before {empty}"
        failed += refused
        if not refused:
            break
    assert failed, f"{operation.name} made no driver call, so that this test proves nothing"


@pytest.mark.parametrize("setting", [some, forked, pooled, ring])
@pytest.mark.parametrize("call", ["unmap", "free_range"])
def test_closing_goes_on_after_a_failure(stage: Stage, setting: Callable[[], Things], call: str) -> None:
    """A clean-up call that fails is raised once, the others are made, and closing again is silent (invariant 3)."""
    before = stage.seen()
    things = setting()
    for thing in sorted(things.values(), key=lambda thing: isinstance(thing, remap.ChunkPool)):
        mark = stage.mark()
        if isinstance(thing, remap.ChunkPool):
            thing.close()
            continue
        stage.faulty.fail(call)
        with pytest.raises(remap.DriverError, match=CUDA_FUNCTIONS[call]):
            thing.close()
        stage.faulty.heal()
        assert thing.closed
        thing.close()
        stage.clean_up_refused(mark)
    assert stage.unchanged(before)
