"""The plugin for the tests of others: a test that fails fails alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import pytest, remap
import remap.testing

pytest_plugins = ["remap.testing.plugin"]

@pytest.fixture(autouse=True)
def nothing_left():
    with remap.no_leaks():
        yield
"""

MACHINE = {
    "simulated": """
@pytest.fixture
def machine():
    with remap.testing.simulated(devices=3, memory="64MiB"):
        yield
""",
    "use": """
@pytest.fixture
def machine():
    remap.use("host", devices=3, memory="64MiB")
""",
}

TESTS = """
import pytest, remap
from remap import MiB
from remap.drivers.graph_powers import CaptureMode

@pytest.fixture
def lent(machine):
    with remap.allocate("2MiB") as buffer:
        buffer.fill(3)
        yield buffer
        assert buffer.to_host()[0] == 3, "a fixture can still look at what it has made"

@pytest.fixture
def broken(machine):
    buffer = remap.allocate("2MiB")
    raise RuntimeError("in a fixture")

def test_holds_a_buffer(lent):
    buffer = remap.allocate("2MiB")
    assert buffer.size == 1

def test_views_memory(machine):
    host = remap.Host()
    buffer = remap.allocate("2MiB", resident=host, accessing=host)
    view = buffer.array().numpy()
    assert view.size == 1

def test_captures(machine):
    stream = remap.Stream()
    with stream.device.current():
        remap.driver().begin_capture(stream.handle, CaptureMode.THREAD_LOCAL)
    assert stream.closed

@pytest.mark.xfail(raises=AssertionError)
def test_expected(machine):
    buffer = remap.allocate("2MiB")
    assert buffer.closed

def test_fixture_breaks(broken):
    pass

def test_skips(machine):
    buffer = remap.allocate("2MiB")
    pytest.skip("for a reason")

def test_passes(machine, lent):
    assert len(remap.devices()) == 3
    assert remap.device().memory().total == 64 * MiB

kept = []

def test_leaves_something(machine):
    kept.append(remap.allocate("2MiB"))
"""


def test_it_needs_nothing_but_pytest() -> None:
    """Whoever tests a program of theirs needs no Hypothesis, and a program that simulates a machine no pytest."""
    program = """
import sys, remap.testing
with remap.testing.simulated(): pass
assert not {"pytest", "hypothesis"} & set(sys.modules)
import remap.testing.plugin
assert "hypothesis" not in sys.modules
assert remap.testing.DriverConformance.__name__ in dir(remap.testing)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


def outcomes(folder: Path, *arguments: str) -> tuple[dict[str, int], str]:
    """Run the tests of a folder, and return how many there are of each outcome, and what was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "-rA", *arguments, folder],
        cwd=folder,
        env={**os.environ, "REMAP_DRIVER": "host"},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    said = done.stdout
    words = said.splitlines()[-1].strip("= ").split(" in ")[0].split(", ")
    return {word.split()[1]: int(word.split()[0]) for word in words}, said


@pytest.mark.parametrize("machine", MACHINE)
def test_only_the_tests_that_fail_fail(machine: str, tmp_path: Path) -> None:
    """What a failed test holds, in whatever state, refuses neither the next machine nor the end of its fixtures."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    file = tmp_path / "test_it.py"
    file.write_text(
        TESTS.replace("\n@pytest.fixture\ndef lent", f"{MACHINE[machine]}\n@pytest.fixture\ndef lent", 1)
    )
    file.write_text(file.read_text().replace("import pytest, remap", "import pytest, remap, remap.testing"))
    found, said = outcomes(tmp_path, "--deselect", "test_it.py::test_leaves_something")
    wanted = {"failed": 3, "passed": 1, "skipped": 1, "deselected": 1, "xfailed": 1, "error": 1}
    assert found == wanted, said
    assert "in a fixture" in said


def test_a_test_that_passes_and_leaves_something_fails(tmp_path: Path) -> None:
    """The plugin hides no leak of a test that passes: the fixture of `no_leaks` finds it."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    file = tmp_path / "test_it.py"
    file.write_text(
        TESTS.replace("\n@pytest.fixture\ndef lent", f"{MACHINE['use']}\n@pytest.fixture\ndef lent", 1)
    )
    found, said = outcomes(tmp_path, "-k", "leaves_something")
    assert found["error"] == found["passed"] == 1
    assert "alive after the block: buffer" in said
