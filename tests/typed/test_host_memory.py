"""Pinned, registered and managed memory (D7): both sides see the same bytes, and nothing goes too early."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import remap
from remap.errors import AccessError, ClosedError, InUseError, InvalidValueError
from remap.testing.stage import Stage
from remap.types import Host

pytest_plugins = ("remap.testing.stage",)

SHAPE = (64, 1024)


@pytest.mark.parametrize("make", [remap.pinned, remap.managed])
def test_both_sides_see_the_same_bytes(stage: Stage, make: Callable[..., Any]) -> None:
    """The CPU writes through numpy(), the device copies; the device fills, the CPU reads."""
    memory = make(SHAPE, "int32")
    view = memory.numpy()
    view[:] = np.arange(view.size).reshape(SHAPE)
    with remap.Stream(0) as stream, remap.DeviceBuffer.empty(SHAPE, "int32", device=0) as buffer:
        buffer.copy_from(memory, stream=stream)
        assert (buffer.to_host() == view).all()
        memory[3].fill(-5, stream=stream)
        stream.synchronize()
        assert (view[3] == -5).all()
    with pytest.raises(InUseError, match="of other libraries"):
        memory.close()
    del view
    memory.close()
    with pytest.raises(ClosedError):
        memory.numpy()


@pytest.mark.parametrize("make", [remap.pinned, remap.managed])
def test_empty(stage: Stage, make: Callable[..., Any]) -> None:
    """Memory of no elements is valid and allocates nothing (trap 39)."""
    mark = stage.mark()
    with make(0, "int32") as memory:
        assert memory.numpy().size == 0
        assert memory.to_host().size == 0
    assert not [name for name in stage.names_since(mark) if "pinned" in name or "managed" in name]


@pytest.mark.parametrize("make", [remap.pinned, remap.managed, remap.DeviceBuffer.empty])
def test_bytes_as_text(stage: Stage, make: Callable[..., Any]) -> None:
    """A size as text is taken where a shape is: as many elements as fill those bytes."""
    del stage
    with make("1MiB") as memory, make("8 B", "float64") as one:
        assert (memory.shape, memory.nbytes) == ((1 << 18,), 1 << 20)
        assert (one.shape, one.nbytes) == ((1,), 8)
    with pytest.raises(remap.InvalidValueError, match="a size that they fill"):
        make("9 B", "float64")


def test_numpy_waits_for_the_device(stage: Stage) -> None:
    """A view is given when the work that remap saw on the memory has passed."""
    with remap.pinned(1 << 20, "uint8") as memory, remap.Stream(0) as stream:
        memory.fill(7, stream=stream)
        view = memory.numpy()
        assert (view == 7).all()
        del view


def test_pinned_memory_is_for_copies(stage: Stage) -> None:
    """Copies between device memory and a view of pinned memory are right, in stream order."""
    with remap.pinned(1 << 16, "float32") as memory, remap.Stream(0) as stream:
        view = memory.numpy()
        view[:] = np.random.default_rng(2).random(view.size, np.float32)
        expected = view.copy()
        with remap.DeviceBuffer.from_host(view, stream=stream) as buffer:
            stream.synchronize()
            view[:] = 0
            buffer.copy_to_host(view, stream=stream)
            stream.synchronize()
        assert (view == expected).all()
        del view


def test_registered_arrays(stage: Stage) -> None:
    """An array is pinned where it is and held until it is closed; the device writes into it."""
    array = np.zeros(1 << 16, "int32")
    with remap.register(array) as memory:
        with remap.Stream(0) as stream:
            memory[:100].fill(9, stream=stream)
        assert memory.owner.get_access(Host()).writable
    assert array[:102].tolist() == [9] * 100 + [0, 0]
    frozen = np.ones(1 << 16, "int32")
    frozen.flags.writeable = False
    with remap.register(frozen) as memory, pytest.raises(AccessError):
        memory.fill(1)
    with pytest.raises(InvalidValueError, match="contiguous"):
        remap.register(np.zeros((10, 10))[:, 1:])


def test_registering_twice(stage: Stage) -> None:
    """Memory that is pinned already is refused, and the first registration stays."""
    array = np.zeros(1 << 16, "int32")
    with remap.register(array) as memory:
        with pytest.raises(remap.DriverError, match="ALREADY_REGISTERED"):
            remap.register(array)
        memory.fill(3)
    assert (array == 3).all()


def test_a_registration_that_fails_is_undone(stage: Stage) -> None:
    """An array that was locked before the refusal is unlocked again, so that it can be registered later (5)."""
    array = np.zeros(1 << 16, "int32")
    stage.faulty.fail("device_pointer")
    with pytest.raises(remap.DriverError, match="cuMemHostGetDevicePointer"):
        remap.register(array)
    with remap.register(array) as memory:
        memory.fill(3)
    assert (array == 3).all()
    stage.faulty.fail("device_pointer")
    marked = stage.mark()
    with pytest.raises(remap.DriverError, match="cuMemHostGetDevicePointer"):
        remap.pinned(SHAPE)
    assert "free_pinned" in stage.names_since(marked)


def test_an_array_that_cannot_be_unlocked_stays(stage: Stage) -> None:
    """Devices go on taking its addresses for the locked pages, so nothing else may come to lie there."""
    array = np.ones(1 << 16, "int32")
    seen = weakref.ref(array)
    address = array.ctypes.data
    memory = remap.register(array)
    stage.faulty.fail("unregister_pinned")
    with pytest.raises(remap.DriverError, match="cuMemHostUnregister"):
        memory.close()
    del array, memory
    gc.collect()
    assert seen() is not None
    driver: Any = stage.inner
    with remap.device().current():
        driver.unregister_pinned(address)


def test_managed_places(stage: Stage) -> None:
    """Prefetching and advice work on all of it or a part, and the last place is told."""
    device = remap.device(0)
    if not device.capabilities["managed_memory"]:
        pytest.skip(device.capabilities["managed_memory"].reason)
    with remap.managed((512, 1024), "float32") as memory:
        assert memory.residency() is None
        memory.fill(1)
        memory.prefetch(device)
        assert memory.residency() == device.location
        memory[:256].prefetch(Host())
        assert memory[:256].residency() == Host()
        assert memory.residency() is None
        memory.advise("read_mostly")
        memory.advise("read_mostly", on=False)
        memory[10:].advise("preferred_location", Host())
        memory.advise("accessed_by", device)
        assert (memory.to_host() == 1).all()
        with pytest.raises(InvalidValueError, match="name the location"):
            memory.advise("accessed_by")
        with pytest.raises(InvalidValueError, match="read_mostly"):
            memory.advise("often")


def test_rights_cannot_be_changed(stage: Stage) -> None:
    """Memory that is not mapped says so when its rights are to be changed, and where to go instead."""
    with remap.pinned(10) as memory, pytest.raises(AccessError, match=r"remap\.allocate"):
        memory.owner.set_access({0: "r"})
    with remap.DeviceBuffer.empty(10, source="plain") as buffer:
        with pytest.raises(AccessError, match="mapped"):
            buffer.owner.set_access({0: "r"})
        assert buffer.owner.get_access(0).writable
        assert not buffer.owner.get_access(Host()).readable


def test_a_failed_allocation(stage: Stage) -> None:
    """A refusal leaves nothing behind."""
    for call, make in (("allocate_pinned", remap.pinned), ("allocate_managed", remap.managed)):
        stage.faulty.fail(call)
        with pytest.raises(remap.DriverError):
            make(10)
    with pytest.raises(remap.OutOfMemoryError, match="of pinned memory"):
        remap.pinned(1 << 46, "uint8")
