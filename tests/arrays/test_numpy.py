"""NumPy on the memory itself: where the CPU may look, for how long, and what it holds up."""

from __future__ import annotations

import gc
import re
import threading
import warnings
from collections.abc import Callable

import numpy as np
import pytest

import remap
from remap import Host


def test_both_ways(shared: remap.Buffer) -> None:
    """What NumPy writes the device reads, and the other way round; nothing is copied."""
    array = shared.array("float32", (10, 100))
    view = array.numpy()
    view[:] = np.arange(1000, dtype=np.float32).reshape(10, 100)
    assert (array.to_host() == view).all()
    shared.fill(0)
    assert not view.any()
    assert view.ctypes.data == array.address


def test_structures_and_times(shared: remap.Buffer) -> None:
    """Types that the array interface cannot spell come out right."""
    kind = np.dtype({"names": ["x", "y"], "formats": ["f4", "M8[s]"], "offsets": [4, 8], "itemsize": 24})
    view = shared.array(kind, 5).numpy()
    assert view.dtype == kind
    view["y"] = np.datetime64("2020-01-01")
    assert (shared.to_host(kind, 5)["y"] == np.datetime64("2020-01-01")).all()


def test_read_only(readable: remap.Mapping) -> None:
    """Where the CPU may only read, the NumPy array is read-only and cannot be made otherwise."""
    view = readable.array("u1", 16).numpy()
    assert (view == 5).all()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True


def test_refused_off_the_host(private: remap.Buffer) -> None:
    """Memory that the CPU has no right to is no NumPy array, however one asks; the error says what to do."""
    array = private.array("u1", 16)
    with pytest.raises(remap.AccessError, match="to_host"):
        array.numpy()
    with pytest.raises(remap.AccessError):
        np.asarray(array)
    private.close()  # the refusals left no export behind


GRANT = r"set_access\(\{.*?\}\)"


def advised(ask: Callable[[], object], said: str) -> str:
    """Return what the refusal of a view says is to be done, to be run."""
    with pytest.raises(remap.AccessError, match="let the CPU look") as caught:
        ask()
    found = re.search(said, caught.value.next_step)
    assert found, caught.value.next_step
    return found[0]


def test_what_lets_the_cpu_look() -> None:
    """The advice is what helps there: a right for memory of the host, other memory for what lies on a device."""
    other = "resident=.*0]"
    if remap.device(0).capabilities["coherent"]:
        pytest.skip("the CPU may look at memory of this device")
    with remap.allocate(1, resident=0) as buffer:
        array = buffer.array("u1", 16)
        for ask in (array.numpy, lambda: array.__dlpack__(copy=False)):
            if ask != array.numpy and remap.driver().name == "cuda":
                continue
            options = advised(ask, other)
            with eval(f"remap.allocate(1, {options})", {"remap": remap}) as instead:
                assert instead.array("u1", 16).numpy().size == 16
        remap.pause(buffer)
        for ask in (array.numpy, array.__dlpack__, array.__dlpack_device__):
            with pytest.raises(remap.PausedError, match=r"remap\.resume"):
                ask()
        remap.resume(buffer)
        remap.migrate(buffer, Host())
        eval(f"buffer.{advised(array.numpy, GRANT)}", {"remap": remap, "buffer": buffer})
        array.numpy()[:] = 1
        with pytest.raises(remap.AccessError) as caught:
            remap.migrate(buffer, 0)
        found = re.search(r"buffer\.set_access.*\)", caught.value.next_step)
        assert found
        eval(found[0], {"remap": remap, "buffer": buffer})
        remap.migrate(buffer, 0)


@pytest.mark.parametrize("access", ["r", "rw"])
def test_what_lets_the_cpu_look_at_shared_memory(access: str) -> None:
    """An import is given the right that it was opened with, at most."""
    if not remap.device(0).capabilities["host_numa_vmm"]:
        pytest.skip("needs host memory that can be shared")
    memory = remap.allocate(1, resident=remap.HostNuma(0), accessing=0, shareable="posix_fd")
    with memory, remap.export(memory) as exported, remap.open(exported, access=access, accessing=0) as other:
        array = other.array("u1", 16)
        step = advised(array.numpy, GRANT)
        assert f'"{access}"' in step
        eval(f"other.{step}", {"remap": remap, "other": other})
        assert array.numpy().flags.writeable == (access == "rw")


def test_asarray(shared: remap.Buffer) -> None:
    """`numpy.asarray` looks, `numpy.array` copies, and a conversion copies unless it may not."""
    array = shared.array("u1", 16)
    assert np.asarray(array).ctypes.data == array.address
    assert np.array(array).ctypes.data != array.address
    assert np.asarray(array, "f4").dtype == np.float32
    with pytest.raises(ValueError, match="copy"):
        array.__array__(np.float32, copy=False)


def test_holds_the_buffer_open(shared: remap.Buffer) -> None:
    """While a NumPy array, or any view of it, lives, closing is refused and changes nothing (trap 26)."""
    view = shared.array("u1", 100).numpy()
    part = view[10:].reshape(9, 10)[::2]
    del view
    with pytest.raises(remap.InUseError, match="1 array of"):
        shared.close()
    part[:] = 7  # the memory is there
    assert (shared.to_host("u1", 11)[10:] == 7).all()
    del part
    shared.close()
    assert shared.closed


def test_holds_the_buffer_alive() -> None:
    """A NumPy array keeps the memory when all else is dropped; with it, the buffer is collected as unclosed."""
    view = remap.allocate(1, resident=Host(), accessing=[0, Host()]).array("u1", 8).numpy()
    gc.collect()
    view[:] = 9
    assert view.sum() == 72
    with pytest.warns(ResourceWarning, match="never closed"):
        del view
    assert remap.collect() == 1


def test_waits_for_work(shared: remap.Buffer) -> None:
    """`numpy()` returns when work that was queued on the memory is done."""
    array = shared.array("u1")
    with remap.Stream(0) as stream:
        for value in range(20):
            shared.fill(value, stream=stream)
        assert (array.numpy() == 19).all()


def test_views_in_threads(shared: remap.Buffer) -> None:
    """Views taken and dropped by many threads at once leave the count of exports right (invariant 13)."""
    array = shared.array("u1", 64)
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(200):
            view = array.numpy()
            assert view.nbytes == 64
            del view

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared.close()


def test_cycles_are_collected(shared: remap.Buffer) -> None:
    """A view in a reference cycle holds the buffer until the collector has run, and not longer."""
    gc.disable()
    try:
        cycle: list[object] = [shared.array("u1", 4).numpy()]
        cycle.append(cycle)
        del cycle
        with pytest.raises(remap.InUseError):
            shared.close()
        gc.collect()
        shared.close()
    finally:
        gc.enable()


def test_empty(shared: remap.Buffer) -> None:
    """An array without elements gives a NumPy array of its shape, which holds nothing."""
    view = shared.array("f4", (0, 3)).numpy()
    assert view.shape == (0, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shared.close()
    assert view.size == 0


def test_a_buffer_is_no_array(private: remap.Buffer) -> None:
    """NumPy does not make an array of one Python object of a buffer; the error says what to call."""
    with pytest.raises(TypeError, match=r"to_host\(\).*array\(dtype\)"):
        np.asarray(private)
