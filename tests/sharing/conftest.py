"""What tests of sharing stand on: children that can import their roles, a broker, and a check that nothing is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

import remap
from remap import MiB
from remap.testing.bench import wait_until

from .support import BrokerProcess

# Children of multiprocessing import the functions that they are to run by name.
ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(autouse=True)
def _shares() -> None:
    if not remap.device(0).capabilities["posix_fd"]:
        pytest.skip(f"device 0 shares no memory: {remap.device(0).capabilities['posix_fd'].reason}")


def open_fds() -> set[str]:
    """Return this process's descriptors of memory and sockets (multiprocessing keeps pipes of its own)."""
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            what = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the directory's own
            continue
        if not what.startswith("pipe:"):
            found.add(f"{name} {what}")
    return found


@pytest.fixture(name="nothing_left")
def _nothing_left() -> Generator[None]:
    """Check that a test leaves no descriptor behind, here and with the memory behind them."""
    with remap.allocate(1, resident=0, shareable="posix_fd") as buffer, remap.export(buffer):
        pass  # the thread that hands leases over, and whatever the driver opens once
    remap.collect()
    before = open_fds()
    free = remap.device(0).memory().free
    yield
    remap.collect()
    slack = 0 if remap.driver().name == "host" else 2 * MiB
    # Asking for the free memory lets the host driver look for what nobody holds any more.
    assert wait_until(lambda: abs(remap.device(0).memory().free - free) <= slack)
    assert wait_until(lambda: open_fds() <= before), open_fds() - before


@pytest.fixture(name="broker")
def _broker(tmp_path: Path) -> Generator[BrokerProcess]:
    with BrokerProcess(tmp_path / "broker") as broker:
        yield broker
