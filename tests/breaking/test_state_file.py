"""The table that several processes share: the living are never counted out."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

import remap
from remap import MiB, drivers
from remap.testing.children import run_in_child
from remap.types import AllocationProperties, Location, LocationKind


def starved() -> tuple[int, int, int]:
    """Return the free bytes of a device before, while and after this process can open no more files."""
    remap.use("host", devices=1, memory=64 * MiB)
    free = [remap.device(0).memory().free]
    held: list[int] = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        free.append(remap.device(0).memory().free)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    free.append(remap.device(0).memory().free)
    return free[0], free[1], free[2]


def test_a_process_without_descriptors(tmp_path: Path) -> None:
    """A process that can open no files cannot ask who lives; it took the others for dead, and their memory for free."""
    if remap.driver().name != "host":
        pytest.skip("the table is the host driver's")
    os.environ["REMAP_HOST_STATE"] = str(tmp_path / "state")  # the child inherits it
    try:
        driver = drivers.open("host", devices=1, memory=64 * MiB)
        driver.create(32 * MiB, AllocationProperties(Location(LocationKind.DEVICE)))
        assert run_in_child(starved) == (32 * MiB, 32 * MiB, 32 * MiB)
        driver.shutdown()
    finally:
        del os.environ["REMAP_HOST_STATE"]
