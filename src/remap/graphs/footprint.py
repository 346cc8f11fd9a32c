"""What the graphs of a device hold: the driver's own four figures, reset of the high marks, trim, and time series."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from remap.drivers.graph_powers import GraphFigures, HighMark, SupportsGraphMemory
from remap.graphs.nodes import missing
from remap.lifetime import drain, queued
from remap.locations import Device, DeviceLike, device


class GraphPool:
    """The memory of all graphs of one device. Returned by `graph_memory`."""

    def __init__(self, at: Device) -> None:
        self.device = at
        driver: Any = at._driver
        if not isinstance(driver, SupportsGraphMemory):
            raise missing("graph memory", f"graph memory of {at}")
        self._driver: SupportsGraphMemory = driver

    def footprint(self) -> GraphFigures:
        """Return the driver's figures in bytes: `used` by graphs, `reserved` from the device, and the high marks.

        Source: cuDeviceGetGraphMemAttribute.
        """
        with self.device.current():
            return self._driver.graph_figures(self.device.index)

    def reset_high(self) -> None:
        """Reset both high marks, which then begin at the present figures. Source: cuDeviceSetGraphMemAttribute."""
        with self.device.current():
            for mark in HighMark:
                self._driver.graph_set_high(self.device.index, mark, 0)

    def trim(self) -> int:
        """Give the device back what no run and no unfreed allocation uses; return how many bytes that was.

        Executables stay; their next launch takes memory again. Source: cuDeviceGraphMemTrim.
        """
        if queued:
            drain()
        with self.device.current():
            before = self._driver.graph_figures(self.device.index).reserved
            self._driver.graph_trim(self.device.index)
            after = self._driver.graph_figures(self.device.index).reserved
        if watching:
            sample(self.device, "trim")
        return before - after

    def watch(self) -> Watch:
        """Return a context manager that takes a sample after each launch of a graph on this device."""
        return Watch(self)

    def __repr__(self) -> str:
        """Return the device."""
        return f"<remap.graph_memory of {self.device}>"


def graph_memory(at: DeviceLike | None = None) -> GraphPool:
    """Return the graph memory of a device, the fastest by default."""
    return GraphPool(device(at))


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures at one moment: what happened just before, and the seconds since the watch began."""

    label: str
    seconds: float
    figures: GraphFigures


@dataclass(frozen=True, slots=True)
class Series:
    """Samples in the order in which they were taken, for tables and plots."""

    samples: tuple[Sample, ...]

    @property
    def used(self) -> tuple[int, ...]:
        """The bytes associated with graphs at each sample."""
        return tuple(one.figures.used for one in self.samples)

    @property
    def labels(self) -> tuple[str, ...]:
        """What happened before each sample."""
        return tuple(one.label for one in self.samples)


@dataclass(eq=False)
class Watch:
    """Takes samples from `__enter__` to `__exit__`: after each launch and trim, which it counts, and at each `mark`."""

    pool: GraphPool
    _samples: list[Sample] = field(default_factory=list[Sample])
    _counts: Counter[str] = field(default_factory=Counter[str])
    _began: float = 0.0

    def mark(self, label: str) -> GraphFigures:
        """Take a sample now, under a name, and return its figures."""
        figures = self.pool.footprint()
        self._samples.append(Sample(label, time.perf_counter() - self._began, figures))
        return figures

    def _happened(self, what: str) -> None:
        self._counts[what] += 1
        self.mark(f"{what} {self._counts[what]}")

    @property
    def series(self) -> Series:
        """The samples so far."""
        return Series(tuple(self._samples))

    def __enter__(self) -> Self:
        """Begin."""
        self._began = time.perf_counter()
        watching.append((self.pool.device, self._happened))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End; the series stays."""
        watching.remove((self.pool.device, self._happened))


watching: list[tuple[Device, Callable[[str], None]]] = []
"""The watches that are on; a launch asks only whether there is any."""


def sample(at: Device, what: str) -> None:
    """Let every watch of a device take a sample after a launch or a trim."""
    for watched, happened in tuple(watching):  # another thread may begin or end a watch
        if watched == at:
            happened(what)
