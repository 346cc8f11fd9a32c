"""Traces: that they hold every call, that viewers can read the file, and that nobody else pays."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import remap
from remap import MiB, drivers
from remap.cli import run
from remap.drivers.wrappers import Recording
from remap.errors import InUseError, InvalidValueError, OutOfMemoryError
from remap.observe.calls import as_value, taps
from remap.observe.chrome import read, to_json
from remap.observe.trace import Trace
from remap.testing.bench import wait_until
from remap.types import AllocationProperties, Host, LaunchConfig


def events_of(trace: Trace) -> list[dict[str, Any]]:
    """Return the events of a trace as its file holds them."""
    return list(json.loads(to_json(trace))["traceEvents"])


def check_format(document: dict[str, Any]) -> None:
    """Check what the Trace Event Format asks of each kind of event that a trace has."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    opened: Counter[tuple[str, str]] = Counter()
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        phase = event["ph"]
        if phase != "M":
            assert event["ts"] >= 0
        if phase == "X":
            assert event["dur"] >= 0
        elif phase == "C":
            assert event["args"]
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
        elif phase in "be":
            opened[event["cat"], event["id"]] += 1 if phase == "b" else -1
            assert opened[event["cat"], event["id"]] in (0, 1)
        else:
            assert phase == "M"
            assert event["name"] in ("process_name", "thread_name")
    assert not +opened, "spans that never end"


def test_the_file_is_what_viewers_read(tmp_path: Path) -> None:
    """Every event has the fields of its kind, and every span that begins ends."""
    with remap.trace(tmp_path / "out.json") as trace, remap.allocate(4 * MiB) as buffer:
        buffer.fill(1)
        buffer.to_host()
        remap.pause(buffer)
        remap.resume(buffer)
    document = json.loads((tmp_path / "out.json").read_text())
    check_format(document)
    names = Counter(event["name"] for event in document["traceEvents"] if event["ph"] == "X")
    assert names["cuMemCreate"] == 2
    assert names["cuMemMap"] == 2
    spans = {event["name"] for event in document["traceEvents"] if event["ph"] == "b"}
    serial = buffer.serial
    for doing in ("fill", "copy_to_host", "paused", "resumed", "close"):
        assert f"{doing}: buffer {serial}" in spans
    assert trace.left_out == 0


def test_it_hears_what_a_wrapper_hears() -> None:
    """A trace records the same calls, arguments, results and errors as a recording driver around the same one."""
    recording = Recording(drivers.open("host", devices=1))
    before = remap.driver()
    remap.use(recording)
    try:
        remap.device().memory()
        with remap.trace() as trace:
            recording.forget()
            with remap.allocate(2 * MiB) as buffer:
                buffer.fill(3)
            with pytest.raises(OutOfMemoryError):
                remap.create(2**40)
        ours = [(call.name, call.arguments, call.keywords, call.result, call.error) for call in trace.calls]
        theirs = [(c.name, c.arguments, c.keywords, c.result, c.error) for c in recording.calls]
        assert ours == theirs
        assert ("create", "CUDA_ERROR_OUT_OF_MEMORY") in [(name, error) for name, _, _, _, error in ours]
    finally:
        remap.use(before)


def test_footprints_are_counted_to_the_byte() -> None:
    """The counter follows create, alias, replace and free; what lived before is in it from the beginning (14)."""
    place = str(remap.device().location)
    remap.device().memory()
    before = remap.create(2 * MiB)
    with remap.trace() as trace:
        allocation = remap.create(4 * MiB)
        addresses = remap.reserve(16 * MiB)
        first, second = addresses.map(allocation), addresses.map(allocation, offset=8 * MiB)
        allocation.close()
        first.close()
        second.close()
        addresses.close()
        before.close()
        with remap.RingBuffer(2 * MiB), remap.DeviceBuffer.zeroed(MiB, "uint8", source="plain"):
            pass
    counted = [event["args"].get(place, 0) for event in events_of(trace) if event["ph"] == "C"]
    assert [size // MiB for size in counted] == [2, 6, 2, 0, 2, 3, 2, 0]


def test_live_objects_keep_their_driver() -> None:
    """A trace begins and ends while objects live: they are the same objects on the same driver, which is as before."""
    driver = remap.driver()
    attributes = dict(vars(driver))
    with remap.allocate(2 * MiB) as buffer:
        with remap.trace() as trace:
            buffer.fill(1)
            assert remap.driver() is driver
        assert "fill" in [call.name for call in trace.calls]
        count = len(trace.calls)
        buffer.fill(2)
        assert len(trace.calls) == count
    assert vars(driver).keys() == attributes.keys()


def test_traces_may_overlap() -> None:
    """Two traces at once each have the calls of their own time; one that ended cannot begin again."""
    outer, inner = remap.trace(), remap.trace()
    with outer:
        remap.driver().device_count()
        with inner:
            remap.driver().can_access_peer(0, 0)
        remap.driver().device_count()
    assert [call.name for call in inner.calls] == ["can_access_peer"]
    assert [call.name for call in outer.calls] == ["device_count", "can_access_peer", "device_count"]
    with pytest.raises(InUseError):
        inner.__enter__()


def test_one_begins_as_another_ends() -> None:
    """Wherever another thread ends its trace, the one that this thread begins then hears everything (13)."""
    remap.driver()
    for nth in range(1, 5000):
        ending, beginning = remap.trace().__enter__(), remap.trace()
        thread = threading.Thread(target=ending.end)
        left = [nth]

        def place(_frame: object, event: str, _argument: object, left: list[int] = left) -> None:
            left[0] -= event in {"call", "c_call"}
            if left[0] == 0:
                sys.setprofile(None)
                thread.start()  # noqa: B023
                wait_until(lambda: not thread.is_alive() or taps._lock.locked())  # noqa: B023 - locked: by this thread

        sys.setprofile(place)
        beginning.__enter__()
        sys.setprofile(None)
        if left[0] > 0:
            ending.end()
        else:
            thread.join()
        remap.driver().device_count()
        beginning.end()
        assert [call.name for call in beginning.calls] == ["device_count"]
        if left[0] > 0:
            return
    pytest.fail("it never begins")


def test_all_threads_are_heard() -> None:
    """Calls of every thread are recorded, each with its thread (13)."""
    with remap.trace() as trace:
        threads = [threading.Thread(target=remap.driver().device_count) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert len(trace.calls) == 4


def test_it_says_how_much_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace says how many calls it has; the figures that are printed of a file add up to what they say."""
    with remap.trace(tmp_path / "out.json") as trace:
        assert repr(trace) == f"<remap.Trace of 0 calls so far, for {tmp_path / 'out.json'}>"
        for _ in range(3):
            remap.allocate(4 * MiB, resident=0).close()
    assert repr(trace) == f"<remap.Trace of {len(trace.calls)} calls, for {tmp_path / 'out.json'}>"
    assert run(["trace", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    spent = sorted(call.duration / 1000 for call in trace.calls if call.name == "create")
    found = re.search(r"create: 3 calls, median ([\d.,]+) µs, ([\d.,]+) ms in all", said)
    assert found
    assert float(found[1].replace(",", "")) == pytest.approx(spent[1], abs=0.06)
    assert float(found[2].replace(",", "")) == pytest.approx(sum(spent) / 1000, abs=0.006)


def test_a_limit_bounds_what_is_kept(tmp_path: Path) -> None:
    """Beyond the limit calls are counted and not kept, and the file says so."""
    with remap.trace(tmp_path / "out.json", limit=3) as trace:
        for _ in range(10):
            remap.driver().device_count()
    assert (len(trace.calls), trace.left_out) == (3, 7)
    assert read(tmp_path / "out.json").left_out == 7
    with pytest.raises(InvalidValueError):
        remap.trace(limit=0)


def test_a_failing_block_is_written_too(tmp_path: Path) -> None:
    """The file is written whatever happens in the block, and the driver is uncovered."""
    with pytest.raises(ZeroDivisionError), remap.trace(tmp_path / "out.json"):
        remap.driver().device_count()
        raise ZeroDivisionError
    assert len(read(tmp_path / "out.json").calls) == 1


def test_a_change_of_driver_is_followed() -> None:
    """A driver that becomes the current one during a trace is recorded from then on, and uncovered with it."""
    before = remap.driver()
    with remap.trace() as trace:
        other = remap.use(drivers.open("host", devices=3))
        other.device_count()
        remap.use(before)
    assert [call.result for call in trace.calls if call.name == "device_count"] == [3]
    assert "device_count" not in vars(other)
    other.shutdown()


def test_nothing_of_the_program_is_kept_alive() -> None:
    """A record of a launch or a host function holds their names, and neither the function nor its arguments."""

    class Work:
        def __call__(self) -> None: ...

    work = Work()
    device = remap.device()
    with remap.trace() as trace, remap.Stream(device) as stream, device.current():
        remap.driver().launch_host_function(stream.handle, work)  # type: ignore[attr-defined]
        stream.synchronize()
    gone = weakref.ref(work)
    del work
    gc.collect()
    remap.device().synchronize()
    assert "launch_host_function" in [call.name for call in trace.calls]
    assert gone() is None


def test_values_as_json() -> None:
    """Arguments and results are written as values: places by name, bytes by their number, objects by their type."""
    properties = AllocationProperties(Host(), frozenset(), True)
    assert as_value(properties) == {
        "location": "host",
        "handle_types": [],
        "compressible": True,
        "rdma": False,
    }
    assert as_value(b"\0" * 64) == {"bytes": 64}
    assert as_value(LaunchConfig((1, 2, 3), (4, 5, 6)))["block"] == [4, 5, 6]
    assert as_value(test_values_as_json) == {"object": "test_values_as_json"}
    json.dumps(as_value({Host(): object(), "x": {1, 2}, "y": ["z" * 5000]}))


SCRIPT = """
import os, sys
import remap
with remap.allocate("2MiB") as memory:
    memory.fill(1)
if os.fork() == 0:
    sys.exit(0)
os.wait()
"""


def test_the_environment_traces_a_whole_run(tmp_path: Path) -> None:
    """`REMAP_TRACE` records from the first call to the end; a forked child leaves the file alone (10)."""
    if remap.driver().name != "host":
        pytest.skip("a CUDA program does not fork")
    environment = {**os.environ, "REMAP_TRACE": str(tmp_path / "run-%p.json"), "REMAP_DRIVER": "host"}
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = tmp_path.iterdir()
    check_format(json.loads(path.read_text()))
    names = [call.method for call in read(path).calls]
    assert {"reserve", "create", "map", "set_access", "fill", "unmap", "free_range"} <= set(names)


def test_children_write_files_of_their_own(tmp_path: Path) -> None:
    """A child process that inherits `REMAP_TRACE` does not write over its parent's file."""
    script = (
        "import remap, subprocess, sys; remap.driver().device_count(); "
        "subprocess.run([sys.executable, '-c', 'import remap; remap.driver().version()'], check=True)"
    )
    environment = {**os.environ, "REMAP_TRACE": str(tmp_path / "run.json")}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert len(list(tmp_path.iterdir())) == 2
    assert "device_count" in [call.method for call in read(tmp_path / "run.json").calls]


@pytest.mark.parametrize(
    "change",
    [
        {"otherData": None},
        {"otherData": {"format": "remap trace", "version": 9}},
        {"traceEvents": {}},
        {"traceEvents": [{"cat": "driver", "ph": "X"}]},
        {
            "traceEvents": [
                {"cat": "driver", "ph": "X", "ts": "0", "dur": 1, "args": {"method": "map", "arguments": []}}
            ]
        },
        {"traceEvents": [{"cat": "driver", "ph": "X", "ts": 0, "dur": 1, "tid": -1, "args": {"method": 1}}]},
    ],
    ids=lambda change: str(change)[:70],
)
def test_hostile_files_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """A trace of another version, or with fields that are not what they must be, is refused (11)."""
    path = tmp_path / "out.json"
    with remap.trace(path):
        remap.driver().device_count()
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **change}))
    with pytest.raises(InvalidValueError):
        read(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": []}', "[" * 100_000])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    """Other JSON, and what is none, is refused (11)."""
    path = tmp_path / "out.json"
    path.write_text(text)
    with pytest.raises(InvalidValueError):
        read(path)


def test_a_trace_that_cannot_be_written_after_a_failure(tmp_path: Path) -> None:
    """The block's own error is raised; that there is no file is a note on it (trap 10)."""
    with pytest.raises(ValueError, match="mine") as failed, remap.trace(tmp_path / "nowhere" / "trace.json"):
        raise ValueError("mine")
    assert "No such file" in failed.value.__notes__[0]
