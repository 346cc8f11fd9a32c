"""The CUDA driver, and the hardware under it, are what the rule book says."""

from __future__ import annotations

from functools import partial

import pytest

from remap import drivers
from remap.sizes import MiB
from remap.testing import DriverConformance
from remap.testing.bench import DriverFactory


@pytest.mark.cuda
class TestCudaDriver(DriverConformance):
    # A context takes memory for its own page tables and queues one granule at a time, and keeps it. The suite's
    # allocations have two granules, so that a leak is larger than this.
    slack = 2 * MiB
    share_of_examples = 0.1

    @classmethod
    def factory(cls) -> DriverFactory:
        return partial(drivers.open, "cuda")
