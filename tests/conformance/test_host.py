"""The host driver obeys the rule book."""

from __future__ import annotations

from functools import partial

from remap import drivers
from remap.testing import DriverConformance
from remap.testing.bench import DriverFactory


class TestHostDriver(DriverConformance):
    @classmethod
    def factory(cls) -> DriverFactory:
        return partial(drivers.open, "host", devices=2, memory="256MiB")
