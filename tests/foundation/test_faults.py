"""Every driver call of every operation fails in turn, and nothing is left, lost or changed (invariant 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB, RemapError
from remap.drivers.wrappers import CUDA_FUNCTIONS
from remap.errors import CudaResult
from remap.lifetime import Resource
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

SIZE = 4 * MiB

NOT_SWEPT = {"pop_context", "shutdown", "synchronize_stream", "synchronize_context", "synchronize_event"}
"""What is not made to fail: a context that cannot be popped stays current, whoever asks; and waiting fails only with
what work did before, which is then done."""

ABSORBED = {"granularity", "capabilities"}
"""Calls whose failure an operation may take for an answer: that there is no such memory here."""


@dataclass
class Scene:
    """What is there before an operation: objects by name, and the spans whose bytes and rights are looked at."""

    things: dict[str, Any] = field(default_factory=dict[str, Any])

    def look(self) -> dict[str, object]:
        """Return everything that can be told of the objects."""
        seen: dict[str, object] = {}
        for name, thing in self.things.items():
            seen[name] = str(thing.describe())
            if isinstance(thing, remap.Mapping | remap.Buffer):
                driver = remap.driver()
                devices = remap.devices()
                seen[f"{name} rights"] = [
                    driver.get_access(chunk.address, device.location)
                    for chunk in thing.chunks
                    for device in devices
                ]
                seen[f"{name} noted rights"] = dict(thing.access)
                if any(right.readable for right in thing.access.values()):
                    seen[f"{name} bytes"] = thing.to_host().tobytes()
            if isinstance(thing, remap.Reservation):
                seen[f"{name} mappings"] = thing.mappings
        return seen

    def close(self) -> None:
        """Close the objects, mappings first."""
        for thing in sorted(self.things.values(), key=lambda thing: not isinstance(thing, remap.Mapping)):
            thing.close()


@dataclass(frozen=True)
class Operation:
    """Something to do on a scene; what it returns is closed."""

    name: str
    act: Callable[[dict[str, Any]], Any]
    setting: Callable[[], dict[str, Any]] = dict


def last_device() -> int:
    """Return the number of the last device."""
    return len(remap.devices()) - 1


def handles() -> dict[str, Any]:
    """Return an allocation, and a reservation with room for three of it."""
    return {"memory": remap.create(SIZE, at=0), "range": remap.reserve(3 * SIZE)}


def mapped() -> dict[str, Any]:
    """Return the same, and the allocation mapped with known bytes."""
    things = handles()
    things["mapping"] = things["range"].map(things["memory"], access={0: "rw"})
    things["mapping"].fill(0x6B)
    return things


def buffers() -> dict[str, Any]:
    """Return two buffers with known bytes."""
    some, others = remap.allocate(SIZE, resident=0), remap.allocate(SIZE, resident=0)
    some.fill(1)
    others.fill(2)
    return {"some": some, "others": others}


def all_devices() -> list[int]:
    """Return the numbers of the devices that device 0 reaches, itself first."""
    return [0, *(device.index for device in remap.device(0).peers())]


OPERATIONS = [
    Operation("create", lambda _: remap.create(SIZE, at=0)),
    Operation("create_at_host", lambda _: remap.create(SIZE, at=remap.Host())),
    Operation("create_shareable", lambda _: remap.create(SIZE, at=0, shareable="posix_fd")),
    Operation("reserve", lambda _: remap.reserve(SIZE, alignment=64 * MiB)),
    Operation("map", lambda o: o["range"].map(o["memory"]), handles),
    Operation("map_with_access", lambda o: o["range"].map(o["memory"], access={0: "rw"}), handles),
    Operation("alias", lambda o: o["range"].map(o["memory"], offset=SIZE, access={0: "r"}), mapped),
    Operation("set_access", lambda o: o["mapping"].set_access({0: "r"}), mapped),
    Operation("take_access", lambda o: o["mapping"].set_access({0: "none"}), mapped),
    Operation(
        "set_access_of_all", lambda o: o["mapping"].set_access(dict.fromkeys(all_devices(), "r")), mapped
    ),
    Operation("get_access", lambda o: o["mapping"].get_access(0), mapped),
    Operation("outcome", lambda o: o["memory"].outcome(), mapped),
    Operation("allocate", lambda _: remap.allocate(SIZE, resident=0)),
    Operation("allocate_striped", lambda _: remap.allocate(3 * SIZE, resident=all_devices(), accessing=[0])),
    Operation("allocate_poisoned", lambda _: remap.allocate(SIZE, resident=0, poison=True)),
    Operation("allocate_aligned", lambda _: remap.allocate(SIZE, resident=0, alignment="256MiB")),
    Operation("allocate_shareable", lambda _: remap.allocate(SIZE, resident=0, shareable="posix_fd")),
    Operation("allocate_at_host", lambda _: remap.allocate(SIZE, resident=remap.Host(), accessing=[0])),
    Operation("buffer_outcome", lambda o: o["some"].outcome(), buffers),
    Operation("fill", lambda o: o["some"].fill(9), buffers),
    Operation("copy_from_host", lambda o: o["some"].copy_from_host(np.full(64, 7, np.uint8)), buffers),
    Operation("copy_to_host", lambda o: o["some"].copy_to_host(np.empty(64, np.uint8)), buffers),
    Operation("copy_from", lambda o: o["some"].copy_from(o["others"]), buffers),
    Operation("stream", lambda _: remap.Stream()),
    Operation("event", lambda _: remap.Event()),
]


@pytest.mark.parametrize("result", [CudaResult.OUT_OF_MEMORY, CudaResult.UNKNOWN], ids=lambda r: r.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_any_call_may_fail(stage: Stage, operation: Operation, result: CudaResult) -> None:
    """Whichever driver call fails, nothing was made or changed, and the same then works (invariant 5, trap 8)."""
    swept = sorted(
        name for name, call in vars(stage.faulty).items() if callable(call) and name not in NOT_SWEPT
    )
    empty = stage.seen()
    failed: list[str] = []
    for nth in count(1):
        scene = Scene(operation.setting())
        looked, seen, mark = scene.look(), stage.seen(), stage.mark()
        stage.faulty.fail(*swept, nth=nth, result=result)
        error: RemapError | None = None
        made: Any = None
        try:
            made = operation.act(scene.things)
        except RemapError as caught:
            error = caught
        refused = stage.faulty.refused
        stage.faulty.heal()
        if error is not None:
            assert refused, f"{operation.name} failed by itself: {error}"
            stage.clean_up_refused(mark)
            assert stage.unchanged(seen), f"after {refused} failed: {stage.seen()}, before {seen}"
            assert scene.look() == looked, f"after {refused} failed"
            made = operation.act(scene.things)
        elif refused:
            assert set(refused) <= ABSORBED, f"{operation.name} took no notice that {refused} failed"
        finish(made)
        scene.close()
        assert stage.unchanged(empty)
        failed += refused
        if not refused:
            break
    assert failed, f"{operation.name} made no driver call, so that this test proves nothing"


@pytest.mark.parametrize("call", ["unmap", "release", "free_range"])
def test_closing_goes_on_after_a_failure(stage: Stage, call: str) -> None:
    """A clean-up call that fails is raised once, and the others are made; closing again is silent (invariants 3, 5)."""
    before = stage.seen()
    things = [*mapped().values(), *buffers().values()]
    refused = 0
    for thing in sorted(things, key=lambda thing: not isinstance(thing, remap.Mapping)):
        mark = stage.mark()
        stage.faulty.fail(call)
        if call in needed_to_close(thing):
            with pytest.raises(remap.DriverError, match=CUDA_FUNCTIONS[call]):
                thing.close()
            refused += 1
        else:
            thing.close()
        stage.faulty.heal()
        assert thing.closed
        assert needed_to_close(thing) == set(stage.names_since(mark)) & {"unmap", "release", "free_range"}
        thing.close()
        stage.clean_up_refused(mark)
    assert refused
    assert stage.unchanged(before)


def needed_to_close(thing: Any) -> set[str]:
    """Return the calls that give an object back."""
    if isinstance(thing, remap.Buffer):
        return {"unmap", "free_range"}
    kinds = {remap.Mapping: "unmap", remap.PhysicalAllocation: "release", remap.Reservation: "free_range"}
    return {kinds[type(thing)]}


def test_the_first_error_stays(stage: Stage) -> None:
    """A clean-up that fails as well does not replace the error of the operation: it is a note on it (5, trap 10)."""
    mark = stage.mark()
    stage.faulty.fail("set_access", result=CudaResult.UNKNOWN)
    stage.faulty.fail("unmap", result=CudaResult.NOT_PERMITTED)
    with pytest.raises(remap.DriverError, match="cuMemSetAccess") as caught:
        remap.allocate(SIZE, resident=0)
    assert any("cuMemUnmap" in note for note in caught.value.__notes__)
    stage.faulty.heal()
    stage.clean_up_refused(mark)


def test_an_error_belongs_to_its_call(stage: Stage) -> None:
    """After a refused call the next, unrelated one succeeds (trap 8)."""
    acts: dict[str, Callable[[], Resource]] = {
        "create": lambda: remap.create(SIZE, at=0),
        "reserve": lambda: remap.reserve(SIZE),
    }
    for call, act in acts.items():
        stage.faulty.fail(call, result=CudaResult.OUT_OF_MEMORY)
        with pytest.raises(remap.DriverError):
            act().close()
        act().close()
    for wrong in (3, -1, "4 elephants"):
        with pytest.raises(remap.InvalidValueError):
            remap.create(wrong, at=0)
        remap.create(SIZE, at=0).close()


@pytest.mark.parametrize("failing", ["reserve", "create", "map", "set_access"])
def test_only_what_was_granted_is_freed(stage: Stage, failing: str) -> None:
    """An allocation that fails half-way frees what it was given, each once, and nothing else (trap 4)."""
    stage.faulty.fail(failing, result=CudaResult.OUT_OF_MEMORY)
    mark = stage.mark()
    with pytest.raises(remap.DriverError):
        remap.allocate(2 * SIZE, resident=[0, last_device()] if last_device() else 0, accessing=[0])
    calls = stage.since(mark)
    given = {call.result for call in calls if call.name in {"reserve", "create"} and call.error is None}
    freed = [call.arguments[0] for call in calls if call.name in {"free_range", "release"}]
    assert len(freed) == len(set(freed)), "freed twice"
    assert set(freed) == given


def test_capacity_is_reserved_once(stage: Stage) -> None:
    """A buffer of several chunks is one reservation, and is freed as one (invariant 6, trap 3)."""
    mark = stage.mark()
    buffer = remap.allocate(3 * SIZE, resident=all_devices(), accessing=[0])
    size = buffer.size
    buffer.close()
    calls = [call for call in stage.since(mark) if call.name in {"reserve", "free_range"}]
    assert [call.name for call in calls] == ["reserve", "free_range"]
    assert calls[1].arguments == (calls[0].result, size)


def finish(made: Any) -> None:
    """Close what an operation made."""
    things: Sequence[Any] = made if isinstance(made, list | tuple) else [made]
    with ExitStack() as stack:
        for thing in things:
            if isinstance(thing, Resource):
                stack.callback(thing.close)
