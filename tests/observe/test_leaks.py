"""Leaks: what is alive, how big, made where, with the cure; and the log."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

import remap
from remap import MiB
from remap.observe.leaks import no_leaks


@pytest.fixture
def sites() -> Generator[None]:
    """Record where objects are made."""
    remap.record_sites()
    yield
    remap.record_sites(0)


def test_what_is_alive() -> None:
    """Leaks are the live objects with their bytes, less those that were known before; the cure is named."""
    before = remap.leaks()
    with remap.allocate(4 * MiB) as buffer:
        found = remap.leaks(before)
        assert [item.serial for item in found] == [buffer.serial]
        assert found[0] == found[-1] == found.items[0]
        assert repr(found) == "<remap.Leaks of 1 object>"
        assert found.footprint == {remap.device().location: 4 * MiB}
        assert "1 object alive, holding 4 MiB on device 0" in str(found)
        assert "REMAP_TRACEBACK=1" in str(found)
    assert not remap.leaks(before)
    with remap.allocate(4 * MiB) as buffer:
        picture = remap.snapshot()
        assert repr(picture).startswith(f"<remap.Snapshot of {len(picture.items)} object")
        assert not remap.leaks(since=picture)
        with remap.allocate(4 * MiB) as later:
            assert [item.serial for item in remap.leaks(since=picture)] == [later.serial]
    assert str(remap.leaks(before)) == "nothing is alive"


def test_what_was_collected_is_no_leak() -> None:
    """Objects that were dropped unclosed are given back first: they warned, and are gone."""
    with pytest.warns(ResourceWarning):
        remap.allocate(2 * MiB)
        before = len(remap.leaks())
    assert not [item for item in remap.leaks().items if item.size == 2 * MiB][before:]


def test_sites(sites: None) -> None:
    """An object knows the line that made it, and the frames of remap itself are left out."""
    with remap.allocate(2 * MiB) as buffer:
        assert buffer.site[0].startswith(f"{__file__}:")
        assert buffer.site[0].endswith("in test_sites")
        assert not any("/src/remap/" in frame for frame in buffer.site)
        assert f"made at {buffer.site[0]}" in str(remap.leaks())
        item = remap.snapshot().find(buffer.serial)
        assert item is not None
        assert item.site == buffer.site


def test_sites_are_free_when_off() -> None:
    """Without being asked, an object has no site, and no room for one is filled."""
    with remap.allocate(2 * MiB) as buffer:
        assert buffer.site == ()
        assert not hasattr(buffer, "_site")


def test_the_warning_names_the_site(sites: None) -> None:
    """The warning about an object that was never closed says where it was made."""
    with pytest.warns(
        ResourceWarning, match=r"made at .*test_leaks.py:\d+ in test_the_warning_names_the_site"
    ):
        remap.allocate(2 * MiB)


def test_the_environment_asks_for_sites() -> None:
    """`REMAP_TRACEBACK=2` records two frames from the beginning."""
    script = (
        "import remap\ndef f(): return remap.allocate('2MiB')\nwith f() as b: print(len(b.site), b.site[0])"
    )
    environment = {**os.environ, "REMAP_TRACEBACK": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split(" ")[0] == "2"
    assert done.stdout.strip().endswith(":2 in f")


def test_a_block_without_leaks() -> None:
    """`no_leaks` fails over what was made inside of it and lives after it, and over nothing else."""
    outside = remap.allocate(2 * MiB)
    with no_leaks(), remap.allocate(2 * MiB):
        pass
    left: list[remap.Buffer] = []
    with pytest.raises(AssertionError, match="alive after the block: buffer"), no_leaks():
        left.append(remap.allocate(2 * MiB))
    left[0].close()
    outside.close()


LEAKING = """
import pytest
import remap

@pytest.fixture(autouse=True)
def nothing_left():
    with remap.no_leaks():
        yield

kept = []

def test_leaks():
    kept.append(remap.allocate("2MiB"))

def test_closes():
    remap.allocate("2MiB").close()
"""


def test_a_fixture_of_no_leaks_fails_by_itself(tmp_path: Path) -> None:
    """Around every test of a project, `no_leaks` fails the tests that leak, with no setting of warnings."""
    (tmp_path / "test_project.py").write_text(LEAKING)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "2 passed, 1 error" in done.stdout
    assert "alive after the block: buffer" in done.stdout


def test_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The log tells the lives of objects, and what takes their memory away, below the logger `remap`."""
    with caplog.at_level(logging.DEBUG, logger="remap"), remap.allocate(2 * MiB) as buffer:
        remap.pause(buffer)
        remap.resume(buffer)
    said = [(record.name, record.getMessage()) for record in caplog.records]
    assert any(
        name == "remap.objects" and text.startswith(f"made buffer {buffer.serial}") for name, text in said
    )
    assert ("remap.operations", f"buffer {buffer.serial} is being paused") in said
    assert any(text.startswith(f"closing buffer {buffer.serial}") for _, text in said)


def test_the_log_is_silent_by_default() -> None:
    """A program that asks for no log gets none, not even by the handler of last resort."""
    script = "import remap; remap.allocate('2MiB').close()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
