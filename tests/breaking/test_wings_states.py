"""Buffers in states that nobody expects, and what is asked of them then."""

from __future__ import annotations

import numpy as np
import pytest

import remap
from remap import MiB


def test_a_sleeping_buffer_goes_nowhere_that_it_cannot_wake() -> None:
    """Shareable memory has no place at HOST (T17): a paused buffer is not sent there, and wakes where it was."""
    with remap.allocate(4 * MiB, shareable="posix_fd") as buffer:
        buffer.fill(5)
        remap.pause(buffer)
        with pytest.raises(remap.DriverError):
            remap.migrate(buffer, remap.Host())
        assert buffer.paused
        remap.resume(buffer)
        assert np.all(buffer.to_host() == 5)
