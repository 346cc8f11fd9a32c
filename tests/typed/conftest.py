"""Warm the driver up: what it sets up once, for pools or host functions, would look like a leak of the first test."""

from __future__ import annotations

import pytest

import remap
from remap.testing.typed import hold


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    for device in remap.devices():
        with remap.Stream(device) as stream:
            with remap.DeviceBox.zeroed(1 << 20, stream=stream) as box:
                hold(stream).set()
                box.fill(1.5, stream=stream)
            stream.synchronize()
        remap.DeviceBox.trim(device)
    with remap.pinned(100) as pinned, remap.DeviceBuffer.zeroed(100) as buffer:
        buffer.copy_from(pinned)
    if remap.device().capabilities["managed_memory"]:
        with remap.managed(1 << 18) as managed:
            managed.fill(1)
            managed.prefetch(remap.Host())
            managed.prefetch(0)
    remap.chain().run().wait()
