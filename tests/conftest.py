"""Choose the driver that the tests run on, say which it is, and skip what it cannot run."""

from __future__ import annotations

import fcntl
import gc
import linecache
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing.util import Finalize
from pathlib import Path

import hypothesis
import numpy
import pytest
from hypothesis import Phase

DRIVERS = ("host", "cuda")

# The conformance suite is library code full of assert statements: let pytest explain them, too.
pytest.register_assert_rewrite("remap.testing")

# A test that fails closes what it has made, captures too, or every test after it would fail as well.
pytest_plugins = ("remap.testing.plugin",)

# Examples are never timed. CI draws the same ones every time, so that nothing fails there by the luck of the draw; a
# developer's machine goes on looking for new ones.
hypothesis.settings.register_profile("default", deadline=None)
# pytest --hypothesis-profile long: for a night, or for a driver that has just been changed.
hypothesis.settings.register_profile("long", deadline=None, max_examples=5000)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--driver`."""
    parser.addoption(
        "--driver",
        choices=DRIVERS,
        default=None,
        help="the driver to test: host or cuda (default: REMAP_DRIVER, else host)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Settle the driver before anything can open one; child processes of the tests inherit it."""
    name = config.getoption("--driver") or os.environ.get("REMAP_DRIVER") or "host"
    if name not in DRIVERS:
        raise pytest.UsageError(f"REMAP_DRIVER={name}: the tests know {' and '.join(DRIVERS)}")
    os.environ["REMAP_DRIVER"] = name
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So it is in the background of a shell, and the tests of Ctrl-C, and their children, are not about that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if name == "cuda":
        # Joining a multicast team reaches into the fabric that all users of a machine share: not for a test.
        os.environ["REMAP_DISABLE_MULTICAST"] = "1"
        # Looking for the smallest failing example takes minutes where every example compiles or holds a GPU up.
        phases = [Phase.explicit, Phase.reuse, Phase.generate]
        hypothesis.settings.register_profile("gpu", hypothesis.settings.default, phases=phases)
        hypothesis.settings.load_profile("gpu")
    if hasattr(config, "workerinput"):  # one of several processes
        _beside_others(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Say how many processes `-n auto` starts: more than processors, since many tests wait for their children.

    On CUDA none, whose free memory is that of the whole GPU.
    """
    name = config.getoption("--driver") or os.environ.get("REMAP_DRIVER")
    return 0 if name == "cuda" else min(2 * (os.cpu_count() or 1), 4)


# -- several processes (make test) --


class Turns:
    """Who may go on, of the processes that run tests: most tests beside others, those marked `alone` beside none."""

    def __init__(self, directory: Path) -> None:
        self._door, self._room = (
            os.open(directory / name, os.O_RDWR | os.O_CREAT) for name in ("door", "room")
        )

    @contextmanager
    def turn(self, alone: bool) -> Generator[None]:
        """Wait until a test may run; one that runs alone waits until the room is empty, and keeps it so."""
        with ExitStack() as room:
            # Who waits for an empty room holds the door, or others would come in for ever.
            with _locked(self._door, fcntl.LOCK_EX):
                room.enter_context(_locked(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
            yield


@contextmanager
def _locked(file: int, how: int) -> Generator[None]:
    fcntl.flock(file, how)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing would not do: a forked child may have the file, too


_turns = pytest.StashKey[Turns]()


def _beside_others(config: pytest.Config) -> None:
    config.stash[_turns] = Turns(Path(config.option.basetemp).parent)  # pytest-xdist gives each one below it
    # Whoever exports removes the sockets that the dead have left in the user's directory: also those that a test of
    # another process has killed somebody for. So each has a directory of its own, which other users may enter as /tmp.
    own = tempfile.mkdtemp(prefix="remap-tests-")
    # The last of what multiprocessing does at its end: it has a directory of its own in there (at priority -100).
    Finalize(None, shutil.rmtree, (own,), {"ignore_errors": True}, exitpriority=-200)
    Path(own).chmod(0o755)
    os.environ["TMPDIR"] = tempfile.tempdir = own
    # From Python 3.13 on, the text of the `python -c` that this process began with is taken for that of any exec().
    linecache.cache.pop("<string>", None)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the time limit of the test begins
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for one's turn."""
    _let_imports_be()
    turns = item.config.stash.get(_turns, None)
    with nullcontext() if turns is None else turns.turn(item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_report_header() -> list[str]:
    """Say which driver runs, so that a green run cannot hide it; stop where it does not open."""
    import remap

    if not hasattr(remap, "driver"):
        return ["remap driver: none yet"]
    try:
        driver = remap.driver()
    except remap.RemapError as error:
        pytest.exit(f"the driver {os.environ['REMAP_DRIVER']} does not open: {error}", returncode=4)
    versions = f"numpy {numpy.__version__}, Python {platform.python_version()}"
    return [f"remap driver: {driver.name} ({driver.version()}), {versions}"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose marks ask for more than the driver has."""
    import remap

    if item.get_closest_marker("cuda") and os.environ["REMAP_DRIVER"] != "cuda":
        pytest.skip("needs the CUDA driver: run with --driver cuda")
    if item.get_closest_marker("two_devices") and remap.driver().device_count() < 2:
        pytest.skip("needs two devices: the driver has one")


_imported = 0


def _let_imports_be() -> None:
    """Have the collector look no more through what was imported: it does so in most tests, beside torch for 0.4 s."""
    global _imported  # noqa: PLW0603
    if len(sys.modules) > _imported + 100:
        _imported = len(sys.modules)
        gc.collect()
        gc.freeze()
