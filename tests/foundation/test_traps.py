"""Mistakes that users of other libraries met, and what happens here instead; numbers as in docs/numbers.md.

Failure safety (3, 4, 8, 10) is in `test_faults.py`, fork (44) in `test_invariants.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import remap
from remap import GiB, MiB
from remap.errors import CudaResult
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

SIZE = 4 * MiB


@pytest.mark.parametrize("times", [1, 50])
def test_memory_is_back_after_close(stage: Stage, times: int) -> None:
    """After close the memory is free, the creation reference included, however often (trap 2)."""
    before = stage.seen()
    for _ in range(times):
        with remap.allocate(SIZE, resident=0) as buffer:
            buffer.fill(1)
        memory, addresses = remap.create(SIZE, at=0), remap.reserve(SIZE)
        with memory, addresses, addresses.map(memory, access={0: "rw"}):
            pass
    # Each leak would be two granules or more, so that the slack cannot hide fifty.
    assert stage.unchanged(before)


def test_options_never_persist(stage: Stage) -> None:
    """What one call was told changes nothing of the next one (trap 6)."""
    with remap.allocate(SIZE, resident=0, access="r", alignment=GiB, poison=False) as first:
        assert first.access == {first.resident[0]: remap.Access.READ}
        with pytest.raises(remap.AccessError):
            first.fill(1)
    with remap.Stream() as stream, remap.allocate(SIZE, resident=0) as second:
        assert second.access == {second.resident[0]: remap.Access.READ_WRITE}
        second.fill(2, stream=stream)
        stream.synchronize()
        second.fill(3, offset=MiB, size=MiB)
        mark = stage.mark()
        second.fill(4)
        (filled,) = [call for call in stage.since(mark) if call.name == "fill"]
        address, _, _, count, queue = filled.arguments
        assert (address, count) == (second.address, second.size), "the offset of the call before was kept"
        assert queue != stream.handle, "the stream of the first call was kept"
        assert "synchronize_stream" in stage.names_since(mark), "not waiting was kept"
        assert (second.to_host() == 4).all()


def test_chunks_are_all_listed(stage: Stage) -> None:
    """Every chunk of a striped buffer is listed with address, size and place, as the driver has it (trap 33)."""
    places = [0, *(peer.index for peer in remap.device(0).peers())]
    with remap.allocate(3 * SIZE, resident=places, accessing=[0]) as buffer:
        chunks = buffer.chunks
        assert [chunk.location.index for chunk in chunks] == places
        assert sum(chunk.size for chunk in chunks) == buffer.size
        at = buffer.address
        for chunk in chunks:
            assert chunk.address == at
            with remap.device(0).current():
                found = stage.inner.address_range(chunk.address + chunk.size // 2)
            assert (found.base, found.size) == (chunk.address, chunk.size)
            at += chunk.size


LIMITED = """
import resource
from pathlib import Path
import remap
remap.device(0).memory()
here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (here + (1 << 30), resource.RLIM_INFINITY))
try:
    remap.reserve("64GiB")
except remap.OutOfAddressSpaceError as error:
    print(error)
with remap.allocate("8MiB", resident=0) as buffer:
    buffer.fill(5)
    print(int(buffer.to_host()[-1]))
"""


def test_an_address_space_limit(stage: Stage) -> None:
    """Under `ulimit -v` small buffers work, and a large reservation says that addresses ran out (trap 38)."""
    if stage.inner.name == "cuda":
        pytest.skip("CUDA itself does not start under an address space limit")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LIMITED],
        check=False,
        timeout=100,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert (done.returncode, done.stderr) == (0, "")
    message, byte = done.stdout.splitlines()
    assert "64 GiB of addresses" in message
    assert byte == "5"


def test_nothing_is_reserved_in_advance(stage: Stage) -> None:
    """A buffer reserves what it needs and no fixed amount besides (trap 38)."""
    mark = stage.mark()
    remap.allocate(SIZE, resident=0).close()
    assert [call.arguments[0] for call in stage.since(mark) if call.name == "reserve"] == [SIZE]


def test_a_buffer_of_no_bytes(stage: Stage) -> None:
    """It is valid, can be used and closed, and asks nothing of the driver about memory (trap 39)."""
    mark = stage.mark()
    buffer = remap.allocate(0, resident=0)
    assert buffer.size == 0
    buffer.fill(1)
    buffer.copy_from_host(b"")
    assert buffer.to_host().size == 0
    assert buffer.chunks == ()
    assert buffer.footprint() == {}
    with remap.allocate(0, resident=0) as other:
        buffer.copy_from(other)
    buffer.close()
    memory = {"reserve", "create", "map", "set_access", "unmap", "release", "free_range"}
    assert not memory & set(stage.names_since(mark))
    assert not {"fill", "copy", "copy_to_host", "copy_to_device"} & set(stage.names_since(mark))


def test_host_memory_on_purpose_only(stage: Stage) -> None:
    """Host memory takes no node -1 and no handle type it cannot have, and needs no context (trap 40)."""
    before = stage.seen()
    with pytest.raises(remap.InvalidValueError, match="-1"):
        remap.HostNuma(-1)
    with pytest.raises(remap.RemapError) as caught:
        remap.create(SIZE, at=remap.Host(), shareable="posix_fd")
    assert caught.value.next_step, "what to ask for instead is said"
    errors: list[BaseException] = []

    def on_a_thread_without_context() -> None:
        try:
            with remap.allocate(SIZE, resident=remap.Host(), accessing=[0]) as buffer:
                buffer.fill(2)
                assert (buffer.to_host() == 2).all()
        except BaseException as error:  # noqa: BLE001 (looked at below)
            errors.append(error)

    thread = threading.Thread(target=on_a_thread_without_context)
    thread.start()
    thread.join()
    assert not errors
    assert stage.unchanged(before)


def test_an_alignment_above_the_granularity(stage: Stage) -> None:
    """It is honoured, together with a hint, whether that is free, occupied or unaligned (trap 41)."""
    del stage
    with remap.allocate(SIZE, resident=0, alignment="1GiB") as buffer:
        assert buffer.address % GiB == 0
        with remap.reserve(SIZE, alignment=GiB, hint=buffer.address) as elsewhere:
            assert elsewhere.address % GiB == 0
            assert elsewhere.address != buffer.address
        with remap.reserve(SIZE, alignment=GiB, hint=buffer.address + 64 * MiB) as aligned:
            assert aligned.address % GiB == 0
    with pytest.raises(remap.AlignmentError, match="power of two"):
        remap.reserve(SIZE, alignment=3 * MiB)


@pytest.mark.parametrize("hint", [1 << 45, (1 << 45) + 2 * MiB])
def test_a_hint_is_a_wish(stage: Stage, hint: int) -> None:
    """Where the driver refuses it, with the alignment that goes with it, the range lies elsewhere."""
    stage.faulty.fail("reserve", result=CudaResult.OUT_OF_MEMORY)
    with remap.reserve(SIZE, hint=hint) as elsewhere:
        assert elsewhere.address != hint
    stage.faulty.fail("reserve", result=CudaResult.OUT_OF_MEMORY, repeat=True)
    with pytest.raises(remap.OutOfAddressSpaceError):
        remap.reserve(SIZE, hint=hint)
    stage.faulty.heal()


def test_another_device_is_current(stage: Stage) -> None:
    """An object remembers its own device; which one is current matters not, and stays current (trap 42)."""
    before = stage.seen()
    driver = stage.inner
    buffer = remap.allocate(SIZE, resident=0)
    other = driver.device_count() - 1
    context = driver.retain_context(other)
    driver.push_context(context)
    buffer.fill(6)
    assert (buffer.to_host() == 6).all()
    buffer.close()
    with remap.allocate(SIZE, resident=0) as second:
        second.fill(1)
    assert driver.current_context() == context
    driver.pop_context()
    driver.release_context(other)
    assert stage.unchanged(before)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float64", (1 << 40, 1 << 40)), ("float64", (1 << 61,)), ("uint8", (1 << 32, 1 << 32))],
)
def test_a_shape_too_large_for_any_machine(stage: Stage, dtype: str, shape: tuple[int, ...]) -> None:
    """Shape times item size is exact: what wraps around elsewhere is an OverflowError here (trap 43)."""
    del stage
    with remap.allocate(SIZE, resident=0) as buffer, pytest.raises(OverflowError):
        buffer.array(dtype, shape)


def test_a_size_too_large_for_any_machine(stage: Stage) -> None:
    """Sizes at and beyond 2**63 are refused before the driver sees them (trap 43)."""
    mark = stage.mark()
    for size in (1 << 63, 1 << 64, (1 << 64) + SIZE):
        for act in (remap.create, remap.reserve, remap.allocate):
            with pytest.raises(remap.InvalidValueError):
                act(size)
    assert not {"create", "reserve"} & set(stage.names_since(mark))


@pytest.mark.parametrize("size", [0, -1, 3, 2 * MiB + 1, -SIZE])
def test_sizes_that_no_handle_takes(stage: Stage, size: int) -> None:
    """Handles are strict: 0, negative and unaligned sizes are refused, with the rule and the nearest that fit."""
    mark = stage.mark()
    for act in (lambda: remap.create(size, at=0), lambda: remap.reserve(size)):
        with pytest.raises(remap.InvalidValueError) as caught:
            act()
        assert caught.value.rule
    assert not {"create", "reserve"} & set(stage.names_since(mark))


def test_a_buffer_rounds_up(stage: Stage) -> None:
    """Buffers take any size: rounded up to granules, told by `.size`, and usable to the last byte (trap 5)."""
    del stage
    for size in (1, 2 * MiB - 1, 2 * MiB + 1, 5_000_000):
        with remap.allocate(size, resident=0) as buffer:
            assert size <= buffer.size < size + 2 * MiB
            data = np.arange(size, dtype=np.uint8)
            buffer.copy_from_host(data)
            assert (buffer.to_host("uint8", size) == data).all()
            buffer.fill(1, offset=buffer.size - 1)
            with pytest.raises(remap.InvalidValueError):
                buffer.fill(1, offset=buffer.size - 1, size=2)
