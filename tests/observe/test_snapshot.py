"""Snapshots: what they hold, that their sums are right, and what becomes of files that someone else wrote."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import remap
from remap import MiB, lifetime
from remap.errors import InvalidValueError
from remap.observe.snapshot import Item


def item(snapshot: remap.Snapshot, thing: lifetime.Resource) -> Item:
    """Return the item of an object."""
    found = snapshot.find(thing.serial)
    assert found is not None
    return found


def test_everything_alive_is_in_it(program: Any) -> None:
    """Every live object is an item with what `describe()` says, and the kinds of state are told apart."""
    remap.pause(program.buffer)
    snapshot = remap.snapshot()
    assert [one.serial for one in snapshot.items] == [thing.serial for thing in lifetime.live()]
    for thing in lifetime.live():
        said, found = thing.describe(), item(snapshot, thing)
        assert (found.kind, found.size, found.address) == (said.kind, said.size, said.address)
    paused = item(snapshot, program.buffer)
    assert paused.paused
    assert (paused.pieces, paused.groups) == ((), ("weights",))
    assert paused.kept == snapshot.kept == program.buffer.size
    assert item(snapshot, program.reservation).reserved == (program.reservation.address, 32 * MiB)
    rights = [item(snapshot, one).pieces[0].right for one in program.mappings]
    assert rights == ["rw", "r", "none"]
    assert [str(piece.right) for piece in item(snapshot, program.ring).pieces] == ["rw", "r"]


def test_it_is_frozen_and_keeps_nothing_alive(program: Any) -> None:
    """A snapshot does not change with the program, cannot be changed, and holds no object."""
    snapshot = remap.snapshot()
    before = snapshot.to_json()
    program.growing.resize(2 * MiB)
    assert snapshot.to_json() == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.items[0].size = 1  # type: ignore[misc]
    extra = remap.allocate(2 * MiB)
    serial = extra.serial
    held = remap.snapshot()
    with pytest.warns(ResourceWarning):
        del extra
    assert held.find(serial) is not None
    remap.collect()
    assert remap.snapshot().find(serial) is None


def test_what_was_dropped_counts_for_nobody() -> None:
    """Memory of collected objects is given back before it is counted, and during a capture it is left alone (4)."""
    device = remap.device()
    with remap.Stream(device) as stream:
        free = device.memory().free
        with pytest.warns(ResourceWarning):
            del [remap.allocate(2 * MiB)][0]
        with remap.capture(stream) as captured:
            assert lifetime.queued
            assert remap.snapshot().devices[0].free == device.memory().free <= free - 2 * MiB
            assert lifetime.queued
        captured.graph.close()
        with pytest.warns(ResourceWarning):
            del [remap.allocate(2 * MiB)][0]
        assert remap.snapshot().devices[0].free == device.memory().free
        assert not lifetime.queued
        with pytest.warns(ResourceWarning):
            del [remap.allocate(2 * MiB)][0]
        assert device.memory().free >= free
        assert not lifetime.queued


def test_what_has_no_bytes_has_no_size() -> None:
    """A stream is not told as one of 0 bytes; a buffer that is empty at its address is."""
    with remap.Stream() as stream, remap.ElasticBuffer(2 * MiB) as buffer:
        for told in (repr(stream), str(stream.describe()), str(item(remap.snapshot(), stream))):
            assert f"stream {stream.serial}" in told
            assert "0 B" not in told
        assert f"{buffer.serial} of 0 B at" in str(item(remap.snapshot(), buffer))


def test_taking_one_lets_no_address_escape(program: Any) -> None:
    """A snapshot reads addresses without letting them escape: closing still waits for known streams only (7)."""
    remap.snapshot()
    for one in (program.buffer, program.growing, program.ring, *program.mappings):
        assert one._known_uses is None or not one._known_uses.escaped


def test_aliases_count_once(program: Any) -> None:
    """One allocation at three addresses, a ring's two views, and chunks shared with a fork count once each (14)."""
    snapshot = remap.snapshot()
    device = remap.device().location
    share = snapshot.shares()[device]
    assert share.mapped == 8 * MiB + 2 * 6 * MiB + 2 * 2 * MiB + 3 * 4 * MiB
    assert share.aliases == 6 * MiB + 2 * MiB + 2 * 4 * MiB
    assert snapshot.footprint()[device] == share.footprint
    assert share.footprint == share.mapped - share.aliases + share.pools + share.graphs + share.unmapped
    memory = {item(snapshot, one).pieces[0].memory for one in (*program.mappings, program.allocation)}
    assert len(memory) == 1


def test_memory_that_is_mapped_nowhere_counts() -> None:
    """An allocation without a mapping, and one whose object was closed while it is mapped, both count."""
    with remap.reserve(2 * MiB) as addresses:
        allocation = remap.create(2 * MiB)
        place = allocation.location
        before = remap.snapshot()
        assert before.shares()[place].unmapped == 2 * MiB
        with addresses.map(allocation):
            allocation.close()
            assert remap.snapshot().shares()[place].mapped == 2 * MiB
            assert remap.snapshot().footprint() == before.footprint()


def test_footprint_agrees_with_the_driver(program: Any) -> None:
    """What mapped memory adds to the footprint is, to the byte, what the driver's free memory falls by (14)."""
    device = remap.device()
    before, free = remap.snapshot(), device.memory().free
    with remap.allocate(16 * MiB, resident=device), remap.RingBuffer(4 * MiB, device=device):
        after = remap.snapshot()
        grown = after.footprint()[device.location] - before.footprint()[device.location]
        assert grown == 20 * MiB == free - device.memory().free
        state = after.devices[device.index]
        assert state.free == device.memory().free
        assert state.used is not None
        assert state.used >= after.footprint()[device.location]


def test_plain_memory_differs_by_less_than_a_granule() -> None:
    """Plain memory is counted as asked for; the driver takes whole granules, or what a granule has left, for it."""
    device = remap.device()
    device.memory()
    before, free = remap.snapshot(), device.memory().free
    with remap.DeviceBuffer.zeroed(1000, "uint8", source="plain"):
        grown = remap.snapshot().footprint()[device.location] - before.footprint().get(device.location, 0)
        assert grown == 1000
        assert abs(free - device.memory().free - grown) < 2 * MiB


def test_pools_count_as_a_whole() -> None:
    """Pool memory is in the pool's figure, and its pieces are not counted beside it."""
    device = remap.device()
    with remap.DeviceBox.zeroed(1000):
        share = remap.snapshot().shares()[device.location]
        assert share.pools >= 1000
        assert share.mapped == 0


def test_json_there_and_back(program: Any, tmp_path: Path) -> None:
    """What is written can be read, and is equal; the file's name decides between JSON and a page."""
    remap.record_sites()
    try:
        with remap.allocate(2 * MiB):
            snapshot = remap.snapshot()
    finally:
        remap.record_sites(0)
    assert remap.Snapshot.from_json(snapshot.to_json()) == snapshot
    assert remap.Snapshot.load(snapshot.save(tmp_path / "map.json")) == snapshot
    assert snapshot.save(tmp_path / "map.html").read_text().startswith("<!doctype html>")


def test_difference(program: Any) -> None:
    """A difference names what was made, what is gone, what changed, and the bytes of each location."""
    extra = remap.allocate(2 * MiB)
    remap.device().synchronize()  # what earlier work left in the device's pool goes now
    before = remap.snapshot()
    assert not before - before
    assert str(before - before) == "nothing changed"
    extra.close()
    program.growing.make_private()
    with remap.allocate(4 * MiB) as made:
        change = remap.snapshot() - before
        assert [one.serial for one in change.made] == [made.serial]
        assert [one.serial for one in change.gone] == [extra.serial]
        assert program.growing.serial in [after.serial for _, after in change.changed]
        assert change.footprint == {remap.device().location: (4 - 2 + 6) * MiB}
        assert f"+ buffer {made.serial} of 4 MiB" in str(change)


def test_snapshots_of_two_processes_cannot_be_compared() -> None:
    """Numbers of objects mean nothing in another process."""
    snapshot = remap.snapshot()
    other = dataclasses.replace(snapshot, process=snapshot.process + 1)
    with pytest.raises(InvalidValueError, match="which each process counts for itself"):
        _ = snapshot - other


def damaged(**changes: Any) -> str:
    """Return a snapshot as JSON, with some fields changed."""
    values = json.loads(remap.snapshot().to_json())
    return json.dumps({**values, **changes})


GOOD_ITEM: dict[str, Any] = {
    "kind": "buffer",
    "serial": 1,
    "size": 2,
    "address": 4096,
    "detail": "",
    "reserved": [4096, 2],
    "pieces": [[4096, 2, "device 0", 1, [["device 0", "rw"]], "own"]],
    "paused": "",
    "shared": False,
    "kept": 0,
    "groups": [],
    "site": [],
}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "something else"},
        {"version": 2},
        {"version": "1"},
        {"items": {}},
        {"items": [1]},
        {"items": [{**GOOD_ITEM, "size": -1}]},
        {"items": [{**GOOD_ITEM, "size": 2**63}]},
        {"items": [{**GOOD_ITEM, "size": 1.5}]},
        {"items": [{**GOOD_ITEM, "size": True}]},
        {"items": [{**GOOD_ITEM, "kind": "x" * 5000}]},
        {"items": [{**GOOD_ITEM, "shared": "yes"}]},
        {"items": [{**GOOD_ITEM, "reserved": [1]}]},
        {"items": [{**GOOD_ITEM, "reserved": "ab"}]},
        {"items": [{**GOOD_ITEM, "pieces": [[4096, 2, "device 0", 1, []]]}]},
        {"items": [{**GOOD_ITEM, "pieces": [[4096, 2, "device zero", 1, [], "own"]]}]},
        {"items": [{**GOOD_ITEM, "pieces": [[4096, 2, "device 99999999", 1, [], "own"]]}]},
        {"items": [{**GOOD_ITEM, "pieces": [[4096, 2, "device 0", 1, [["device 0", "all"]], "own"]]}]},
        {"items": [{**GOOD_ITEM, "pieces": [[4096, 2, "device 0", 1, [], ["own"]]]}]},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_hostile_files_are_refused(changes: dict[str, Any]) -> None:
    """Every field is checked; what is wrong is an `InvalidValueError` that names it, and nothing else (11)."""
    assert remap.Snapshot.from_json(damaged(items=[GOOD_ITEM])).items[0].kind == "buffer"
    with pytest.raises(InvalidValueError):
        remap.Snapshot.from_json(damaged(**changes))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000, "1" * 10_000, '{"format": 1}'])
def test_what_is_no_snapshot_is_refused(text: str) -> None:
    """Truncated, deep and strange JSON is refused (11)."""
    with pytest.raises(InvalidValueError):
        remap.Snapshot.from_json(text)


def test_files_are_bounded(tmp_path: Path) -> None:
    """A file above the limit is not read to its end; one that is no text is refused (11)."""
    from remap.observe.reading import read_text

    path = tmp_path / "large"
    path.write_bytes(b" " * 101)
    with pytest.raises(InvalidValueError, match="larger than 100 B"):
        read_text(path, "snapshot", limit=100)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidValueError, match="not text"):
        remap.Snapshot.load(path)


def test_truncation_anywhere_is_refused(program: Any) -> None:
    """A file that ends early is refused, wherever it ends (11)."""
    text = remap.snapshot().to_json()
    for end in range(0, len(text), max(len(text) // 97, 1)):
        with pytest.raises(InvalidValueError):
            remap.Snapshot.from_json(text[:end])


def test_no_context_is_made_for_a_snapshot() -> None:
    """Devices that remap does not use are not asked for their memory, since asking would take some."""
    script = (
        "import remap; s = remap.snapshot(); assert all(d.free is None for d in s.devices), s; "
        "assert not any(d._context for d in remap.devices())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
