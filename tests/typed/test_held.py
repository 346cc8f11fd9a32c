"""What copies on a stream hold: the host's side, for as long as they need it, and streams, until they are closed."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import remap
from remap.testing.stage import Stage
from remap.testing.typed import gate, hold

pytest_plugins = ("remap.testing.stage",)

BATCH = 1 << 18  # elements of 4 bytes: as much as is looked after one by one
FEW = 4


class Batch(np.ndarray[Any, Any]):
    """An array that can be asked whether it lives."""


def batch(number: int, count: int = BATCH) -> Batch:
    """Return an array of one number."""
    return np.full(count, number, np.float32).view(Batch)


def living(references: list[weakref.ref[Batch]]) -> int:
    """Return how many arrays live."""
    gc.collect()
    return sum(one() is not None for one in references)


def host_only() -> None:
    """Skip on CUDA, where a copy of pageable memory makes the caller wait for what is queued before it."""
    if remap.driver().name != "host":
        pytest.skip("CUDA waits in a copy of pageable memory behind a gate")


class Foreign:
    """A stream of another library."""

    def __init__(self, stream: remap.Stream) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return what CUDA's protocol asks for."""
        return self.stream.__cuda_stream__()


@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("kind", ["stream", "handle", "foreign"])
@pytest.mark.parametrize("count", [BATCH, 16])
def test_arrays_of_copies_that_have_passed_go(stage: Stage, way: str, kind: str, count: int) -> None:
    """A program that waits for its stream, and never for the memory, does not fill the host's memory."""
    references: list[weakref.ref[Batch]] = []
    with remap.DeviceBuffer.zeroed(count) as buffer, remap.Stream() as stream:
        turns = 600 if count == 16 else 20
        for number in range(turns):
            given: Any = {"stream": stream, "handle": stream.handle, "foreign": Foreign(stream)}[kind]
            array = batch(number, count)
            references.append(weakref.ref(array))
            if way == "in":
                buffer.copy_from_host(array, stream=given)
            else:
                buffer.copy_to_host(array, stream=given)
            stream.synchronize()
            del array
        # Small ones on a stream of ours are looked after many at a time.
        assert living(references) <= (2 * 256 if count == 16 and kind == "stream" else FEW)
        assert buffer.to_host()[0] == (turns - 1 if way == "in" else 0)


def test_a_stream_that_never_comes_to_rest(stage: Stage) -> None:
    """Arrays go as their copies pass, though there is always something left to do on the stream."""
    host_only()
    references: list[weakref.ref[Batch]] = []
    with remap.DeviceBuffer.zeroed(BATCH) as buffer, remap.Stream() as stream:
        held: list[threading.Event] = []
        try:
            for number in range(20):
                array = batch(number)
                references.append(weakref.ref(array))
                buffer.copy_from_host(array, stream=stream)
                del array
                with stream.record() as copied:
                    held.append(hold(stream))
                    for one in held[:-1]:
                        one.set()
                    copied.synchronize()
                assert not stream.done
            assert living(references) <= FEW
        finally:
            for one in held:
                one.set()


def test_arrays_of_copies_under_way_stay(stage: Stage) -> None:
    """However many there are, and whoever queues them: what has not been copied yet is there when its turn comes."""
    host_only()
    with remap.Stream() as stream, gate(stream) as opened, remap.DeviceBuffer.zeroed((8, BATCH)) as buffer:
        references: list[weakref.ref[Batch]] = []

        def queue(rows: range) -> None:
            for row in rows:
                array = batch(row + 1)
                references.append(weakref.ref(array))
                buffer[row].copy_from_host(array, stream=stream if row % 2 else stream.handle)

        threads = [threading.Thread(target=queue, args=(range(first, first + 4),)) for first in (0, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert living(references) == 8
        opened.set()
        stream.synchronize()
        assert buffer.to_host()[:, -1].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_capture_keeps_the_arrays_of_its_copies(stage: Stage) -> None:
    """A captured copy reads its array at each launch of the graph: nothing on the stream tells when it has passed."""
    with remap.DeviceBuffer.zeroed(BATCH) as buffer, remap.Stream() as stream:
        array = batch(3)
        reference = weakref.ref(array)
        with remap.capture(stream) as capture:
            buffer.copy_from_host(array, stream=stream)
        del array
        with capture.graph as graph, graph.instantiate() as executable:
            for number in range(4):  # copies beside it, which let go of theirs
                buffer.copy_from_host(batch(number), stream=stream)
                stream.synchronize()
            executable.launch(stream)
            stream.synchronize()
            assert buffer.to_host()[0] == 3
            assert reference() is not None


@pytest.mark.parametrize("way", ["in", "out"])
def test_pinned_memory_closes_once_its_copies_have_passed(stage: Stage, way: str) -> None:
    """A copy through `numpy()` of pinned memory is a use of that memory: closing waits for it, and refuses nothing."""
    with remap.DeviceBuffer.from_host(np.full(BATCH, 5, np.float32)) as buffer, remap.Stream() as stream:
        pinned = remap.pinned(BATCH)
        pinned.fill(7)
        view = pinned.numpy()  # which waits for the devices, so not behind the gate
        with gate(stream) as opened:
            if way == "in":
                buffer.copy_from_host(view, stream=stream)
            else:
                buffer.copy_to_host(view, stream=stream)
            del view
            threading.Timer(0.05, opened.set).start()
            pinned.close()
            assert opened.is_set(), "closing waits for the copy"
        stream.synchronize()
        assert buffer.to_host()[0] == (7 if way == "in" else 5)
        with remap.pinned(4) as small:
            view = small.numpy()
            buffer[:4].copy_to_host(view[:4], stream=stream)
            stream.synchronize()
            with pytest.raises(remap.InUseError, match="of other libraries"):
                small.close()  # the view is the caller's own
            assert view.tolist() == buffer.to_host()[:4].tolist()
            del view


def test_streams_that_were_closed_are_named_no_more(stage: Stage) -> None:
    """Memory that is used on one stream after the other does not keep all of them."""
    with remap.DeviceBuffer.zeroed(16) as buffer:
        streams: list[weakref.ref[remap.Stream]] = []
        for number in range(20):
            with remap.Stream() as stream:
                buffer.fill(number, stream=stream)
            streams.append(weakref.ref(stream))
        assert buffer.to_host().tolist() == [19.0] * 16
        gc.collect()
        assert not any(one() for one in streams[:-1])


@remap.kernel
def beyond(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Read what is not there."""
    i = remap.index_1d()
    out[i] = x[int(i) + 1]


def test_a_copy_tells_nothing_of_kernels(stage: Stage) -> None:
    """What a kernel before it did wrongly is left to who waits: the copy is queued, and raises nothing."""
    host_only()
    passed = threading.Event()
    with (
        remap.DeviceBuffer.zeroed(16) as x,
        remap.DeviceBuffer.zeroed(16) as out,
        remap.DeviceBuffer.zeroed(BATCH) as buffer,
        remap.Stream() as stream,
        remap.Graph() as graph,
    ):
        graph.host(passed.set)
        with graph.instantiate() as executable:
            buffer.copy_from_host(batch(1), stream=stream)
            beyond.launch(x, out, grid=1, block=16, stream=stream)
            executable.launch(stream)
            assert passed.wait(30)
            buffer.copy_from_host(batch(2), stream=stream)
            with pytest.raises(remap.KernelError, match="nothing lies there"):
                stream.synchronize()
        assert buffer.to_host()[0] == 2
