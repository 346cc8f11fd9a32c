"""Work in flight: nothing is taken away under it, and nothing is used before it is there (invariant 7, 13)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB
from remap.testing.stage import Stage

from .support import SIZE, acts, contents, filled, holds

pytest_plugins = ("remap.testing.stage",)


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("move", ["pause", "migrate"])
def test_moves_wait_for_queued_work(stage: Stage, move: str, escaped: bool) -> None:
    """Work that was queued before is done, and its result is what moves (traps 11, 12)."""
    del stage
    with remap.Stream(0) as stream, filled(8 * SIZE) as (buffer,):
        if escaped:
            assert buffer.address
        for value in range(200):
            buffer.fill(value, stream=stream)
        event = stream.record()
        if move == "pause":
            remap.pause(buffer)
            assert event.done
            remap.resume(buffer)
        else:
            remap.migrate(buffer, remap.Host())
            assert event.done
        assert (buffer.to_host() == 199).all()
        event.close()


def test_after_names_what_to_wait_for(stage: Stage) -> None:
    """`after=` waits for the stream or event that is named, and for nothing else; None waits for nothing."""
    with remap.Stream(0) as stream, filled(SIZE) as (buffer,):
        buffer.fill(7, stream=stream)
        event = stream.record()
        mark = stage.mark()
        remap.pause(buffer, None, after=event)
        assert "synchronize_event" in stage.names_since(mark)
        assert "synchronize_stream" not in stage.names_since(mark)
        remap.resume(buffer)
        mark = stage.mark()
        remap.pause(buffer, None, after=stream)
        assert "synchronize_stream" in stage.names_since(mark)
        remap.resume(buffer)
        stream.synchronize()
        mark = stage.mark()
        remap.pause(buffer, None, after=None)
        assert not {"synchronize_event", "synchronize_stream"} & set(stage.names_since(mark))
        remap.resume(buffer)
        event.close()


@pytest.mark.cuda
def test_a_capturing_stream_is_refused(stage: Stage) -> None:
    """A stream that is being captured refuses the pause; capture and buffers are intact (trap 13)."""
    from cuda.bindings import driver as cu

    del stage
    with remap.Stream(0) as stream, filled(SIZE, SIZE) as buffers, remap.device(0).current():
        buffers[1].fill(9, stream=stream)
        stream.synchronize()
        (error,) = cu.cuStreamBeginCapture(
            stream.handle, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )
        assert not int(error)
        buffers[1].fill(8, stream=stream)
        for act in acts(lambda: remap.pause(buffers), lambda: remap.migrate(buffers, remap.Host())):
            with pytest.raises(remap.InUseError, match="captured"):
                act()
        error, graph = cu.cuStreamEndCapture(stream.handle)
        assert not int(error), "the capture was broken"
        cu.cuGraphDestroy(graph)
        assert (buffers[1].to_host() == 9).all()


def test_what_an_order_may_name(stage: Stage) -> None:
    """An order names typed memory, groups and tags as well, and a thing twice; what is not resumed is refused (5)."""
    with remap.group("later"):
        last = remap.allocate(SIZE, resident=0)
    with last, filled(SIZE, SIZE) as buffers, remap.DeviceBuffer.zeroed(SIZE, "uint8") as typed:
        first: list[Any] = [*buffers, typed]
        remap.pause([*first, last])
        before = stage.seen()
        with pytest.raises(remap.InvalidValueError, match="not among what is to be resumed"):
            remap.resume(first, order=last)
        assert stage.unchanged(before)
        with remap.resume([*first, last], order=[typed, "later", typed], events=True) as waking:
            arriving = list(dict.fromkeys(event.buffer for event in waking.events))
        assert arriving == [typed.owner, last, *buffers]
        assert holds(buffers)


def test_an_ordered_resume(stage: Stage) -> None:
    """Buffers can be used before all bytes are there: what touches a chunk comes after it, on its stream."""
    with remap.Stream(0) as stream, filled(*[4 * SIZE] * 6) as buffers:
        remap.pause(buffers)
        order = [buffers[3], buffers[1]]
        mark = stage.mark()
        with remap.resume(buffers, order=order, events=True) as waking:
            arriving = [event.buffer for event in waking.events]
            assert arriving == [*order, buffers[0], buffers[2], buffers[4], buffers[5]]
            assert not any(buffer.paused for buffer in buffers)
            buffers[5].fill(3, stream=stream)  # would be overwritten if it did not wait for its chunk
            assert "wait_event" in stage.names_since(mark)
            for event in waking.events:
                stream.wait(event)
                event.synchronize()
                assert event.done
        stream.synchronize()
        assert (buffers[5].to_host() == 3).all()
        assert waking.result.bytes == 24 * SIZE
        assert holds(buffers[:5])
        mark = stage.mark()
        buffers[0].fill(1, stream=stream)
        assert "wait_event" not in stage.names_since(mark), "what has arrived costs nothing"
        with pytest.raises(remap.ClosedError):
            stream.wait(waking.events[0])


def test_chunk_events_tell_only_of_their_chunk(stage: Stage) -> None:
    """The first chunk has passed before the last one has to: its event does not stand behind the others."""
    with filled(*[SIZE] * 4) as buffers:
        remap.pause(buffers)
        mark = stage.mark()
        with remap.resume(buffers, events=True) as waking:
            waking.events[-1].synchronize()
            calls = [
                name for name in stage.names_since(mark) if name in {"copy_to_device", "record_event", "map"}
            ]
        assert calls == ["map", "copy_to_device", "record_event"] * 4
        assert {event.chunk.size for event in waking.events} == {SIZE}
        assert holds(buffers)


@pytest.mark.parametrize("ending", ["paused", "closed", "migrated"])
def test_moves_during_an_ordered_resume(stage: Stage, ending: str) -> None:
    """What happens to a buffer before its bytes have arrived waits for them, and the others still arrive."""
    del stage
    with filled(*[4 * SIZE] * 3) as buffers:
        remap.pause(buffers)
        waking = remap.resume(buffers, events=True)
        if ending == "paused":
            remap.pause(buffers)
            remap.resume(buffers)
        elif ending == "closed":
            buffers[2].close()
        else:
            remap.migrate(buffers, remap.Host())
        waking.close()
        assert holds(buffers[:2] if ending == "closed" else buffers)


def test_an_ordered_resume_that_fails(stage: Stage) -> None:
    """It leaves everything paused with its backups, as any other."""
    with filled(*[SIZE] * 3) as buffers:
        remap.pause(buffers)
        before = stage.seen()
        stage.faulty.fail("create", nth=3, result=remap.errors.CudaResult.OUT_OF_MEMORY)
        with pytest.raises(remap.OutOfMemoryError):
            remap.resume(buffers, events=True)
        assert stage.unchanged(before)
        with pytest.raises(remap.InvalidValueError, match="events=True"):
            remap.resume(buffers, events=True, progress=lambda *_: None)
        remap.resume(buffers)
        assert holds(buffers)


def test_two_threads(stage: Stage) -> None:
    """While one thread pauses, another that pauses, moves, closes or uses the same buffer is refused (13)."""
    del stage
    with filled(SIZE, SIZE) as buffers:
        seen: dict[str, str] = {}
        others: dict[str, Any] = {
            "pause": lambda: remap.pause(buffers[1]),
            "resume": lambda: remap.resume(buffers[1]),
            "migrate": lambda: remap.migrate(buffers[1], remap.Host()),
            "close": buffers[1].close,
            "fill": lambda: buffers[1].fill(1),
            "set_access": lambda: buffers[1].set_access({0: "r"}),
        }

        def meanwhile(_done: int, _total: int) -> None:
            for name, act in others.items():
                if name not in seen:
                    try:
                        act()
                        seen[name] = "done"
                    except remap.InUseError as error:
                        seen[name] = error.rule

        def elsewhere(done: int, total: int) -> None:
            thread = threading.Thread(target=meanwhile, args=(done, total))
            thread.start()
            thread.join()

        remap.pause(buffers, progress=elsewhere)
        assert {name: "being paused" in rule for name, rule in seen.items()} == dict.fromkeys(others, True)
        seen.clear()
        remap.resume(buffers, progress=elsewhere)
        assert {name: "being resumed" in rule for name, rule in seen.items()} == dict.fromkeys(others, True)
        assert holds(buffers)


def test_threads_that_meet(stage: Stage) -> None:
    """Threads that pause and resume the same buffers at will only ever meet InUseError, and lose nothing (13)."""
    del stage
    with filled(SIZE, SIZE, SIZE) as buffers:
        start = threading.Barrier(4)

        def go(seed: int) -> int:
            random = np.random.default_rng(seed)
            met = 0
            start.wait()
            for _ in range(25):
                some = [buffers[index] for index in random.permutation(3)[: random.integers(1, 4)]]
                try:
                    remap.pause(some)
                    remap.resume(some)
                except remap.InUseError:
                    met += 1
            return met

        with ThreadPoolExecutor(4) as executor:
            list(executor.map(go, range(4)))
        remap.resume(buffers)
        assert holds(buffers)


def test_host_memory_is_kept_for_what_sleeps(stage: Stage) -> None:
    """Buffers that sleep one after the other share no byte of the pool."""
    del stage
    with filled(*[3 * MiB, 5 * MiB, 70 * MiB, SIZE]) as buffers:
        for buffer in buffers:
            remap.pause(buffer)
        views = [remap.backup(buffer) for buffer in buffers]
        assert all(np.array_equal(view, contents(seed, view.size)) for seed, view in enumerate(views))
        del views
        for buffer in reversed(buffers):
            remap.resume(buffer)
        assert holds(buffers)
