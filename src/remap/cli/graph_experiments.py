"""The four experiments of the graph-memory demo, each on graphs that allocate, stay for a while, and free."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from remap.drivers.powers import SupportsPinned
from remap.errors import RemapError
from remap.graphs import Allocation, Executable, Graph, Series, Watch, graph_memory
from remap.kernels import Pointer, load, shipped
from remap.lifetime import end_block
from remap.locations import Device
from remap.streams import Stream

_STAMPS = 16  # bytes of one kernel's two time stamps
_SPIN_MS = {"cuda": 200.0, "host": 20.0}
_LIMIT = 30.0  # seconds that kernels on the host driver wait for each other


@dataclass(frozen=True, slots=True)
class Check:
    """What must hold, in words, and whether it does."""

    text: str
    holds: bool


@dataclass(slots=True)
class Experiment:
    """What one experiment has found. `series` holds the footprint at every step; `facts` are its named figures."""

    number: int
    title: str
    series: Series = field(default_factory=lambda: Series(()))
    shows: str = ""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    checks: list[Check] = field(default_factory=list[Check])
    names: dict[str, str] = field(default_factory=dict[str, str])  # better ones for some samples
    trimmed: int = 0

    @property
    def passed(self) -> bool:
        """Whether it showed what it is to show."""
        return all(check.holds for check in self.checks)

    @property
    def peak(self) -> int:
        """The most that graphs held."""
        return max(self.series.used, default=0)

    def check(self, text: str, holds: bool) -> None:
        """Note what must hold."""
        self.checks.append(Check(text, holds))

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        steps = [
            {
                "step": one.label,
                "seconds": round(one.seconds, 6),
                "used": one.figures.used,
                "used_high": one.figures.used_high,
                "reserved": one.figures.reserved,
                "reserved_high": one.figures.reserved_high,
            }
            for one in self.series.samples
        ]
        checks = [{"text": check.text, "holds": check.holds} for check in self.checks]
        return {"title": self.title, **self.facts, "steps": steps, "checks": checks, "passed": self.passed}


class Bench:
    """What the experiments share: the device, its graph memory, the kernel that stays, and its time stamps."""

    def __init__(self, at: Device, size: int, graphs: int, spin_ms: float | None) -> None:
        self.device = at
        self.size = size
        self.graphs = graphs
        self.pool = graph_memory(at)
        name = at._driver.name
        self._milliseconds = _SPIN_MS[name] if spin_ms is None else spin_ms
        self._clock = at.properties.clock_khz
        self._held = ExitStack()
        self._crowd = _Crowd()

    @property
    def ticks(self) -> int:
        """The clock ticks that a kernel stays: the rate is read from the device."""
        return int(self._milliseconds * self._clock)

    @property
    def spin_text(self) -> str:
        """How long a kernel stays, for a reader."""
        ms = f"{self._milliseconds:g} ms"
        return f"each kernel stays {ms}: {self.ticks:,} ticks of a clock of {self._clock / 1000:,.0f} MHz"

    def __enter__(self) -> Self:
        """Load the kernel, and give the device back what graphs have left in it."""
        module = self._held.enter_context(load(shipped("spin"), device=self.device))
        self._kernel = module.function("spin")
        self._kernel.host(self._crowd.stay)
        driver: Any = self.device._driver
        if not isinstance(driver, SupportsPinned):
            raise RemapError("pinned memory for time stamps", rule="the driver has none")
        with self.device.current():
            self._stamps = driver.allocate_pinned(_STAMPS * self.graphs)
            self._stamps_on_device = driver.device_pointer(self._stamps)
        self._held.callback(self._free_stamps, driver)
        self.pool.trim()
        return self

    def _free_stamps(self, driver: SupportsPinned) -> None:
        with self.device.current():
            driver.free_pinned(self._stamps)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give everything back; if the block failed, what that raises is a note on its error."""
        end_block(error, self._held.close)

    def stamps(self) -> NDArray[np.uint64]:
        """Return when each kernel began and ended, in nanoseconds of the device's timer; a row for each graph."""
        raw = ctypes.string_at(self._stamps, _STAMPS * self.graphs)
        return np.frombuffer(raw, np.uint64).reshape(self.graphs, 2)

    def build(self, held: ExitStack, number: int, *, frees: bool = True, ticks: int | None = None) -> Built:
        """Build and instantiate graph `number`: allocate, stay, free."""
        graph = held.enter_context(Graph(self.device))
        memory = graph.alloc(self.size)
        kernel = graph.launch(
            self._kernel,
            memory,
            np.uint64(self._stamps_on_device + _STAMPS * number),
            np.int64(self.ticks if ticks is None else ticks),
            grid=1,
            block=1,
            after=[memory],
        )
        if frees:
            graph.free(memory, after=[kernel])
        return Built(graph, memory, held.enter_context(graph.instantiate()))

    def streams(self, held: ExitStack, count: int) -> list[Stream]:
        """Return streams that stand apart from each other."""
        return [held.enter_context(Stream(self.device)) for _ in range(count)]

    def expect(self, together: int) -> None:
        """Say how many kernels are to run at the same time from now on (for those that are Python functions)."""
        self._crowd.expect(together, self._clock)


@dataclass(frozen=True, slots=True)
class Built:
    """A graph, its allocation, and its executable."""

    graph: Graph
    memory: Allocation
    executable: Executable


class _Crowd:
    """The twin of the kernel on the host driver: it stays its time, and until all that are to overlap have begun.

    So whether they overlap does not depend on how soon threads are given a processor.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expected = 1
        self._came = 0
        self._khz = 1

    def expect(self, together: int, khz: int) -> None:
        with self._changed:
            self._expected, self._came, self._khz = together, 0, khz

    def stay(self, launch: object, data: Pointer, stamps: int, ticks: int) -> None:
        del launch
        began = time.perf_counter_ns()
        data.write("uint8", 1)[0] = 1
        end = time.monotonic() + int(ticks) / self._khz / 1000
        with self._changed:
            self._came += 1
            self._changed.notify_all()
            limit = time.monotonic() + _LIMIT
            while self._came < self._expected and time.monotonic() < limit:
                self._changed.wait(limit - time.monotonic())
            while (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
        times = (ctypes.c_uint64 * 2).from_address(int(stamps))
        times[:] = [began, time.perf_counter_ns()]


def run_experiment(number: int, bench: Bench) -> Experiment:
    """Run one experiment; it begins with nothing in the pool, and leaves nothing there."""
    title, run = _EXPERIMENTS[number]
    bench.pool.trim()
    bench.pool.reset_high()
    experiment = Experiment(number, title)
    try:
        with ExitStack() as held, bench.pool.watch() as watch:
            watch.mark("start")
            run(bench, held, watch, experiment)
            names = experiment.names
            experiment.series = Series(
                tuple(replace(one, label=names.get(one.label, one.label)) for one in watch.series.samples)
            )
        experiment.check("everything starts from 0", experiment.series.used[0] == 0)
    finally:
        bench.pool.trim()
    return experiment


def _reuse_of_addresses(bench: Bench, held: ExitStack, watch: Watch, found: Experiment) -> None:
    graph = held.enter_context(Graph(bench.device))
    first = graph.alloc(bench.size)
    free = graph.free(first, after=[first])
    second = graph.alloc(bench.size, after=[free])
    graph.free(second, after=[second])
    executable = held.enter_context(graph.instantiate())
    found.facts["instantiated"] = watch.mark("instantiated").used
    stream = bench.streams(held, 1)[0]
    executable.launch(stream)
    stream.synchronize()
    found.facts["launched"] = watch.series.used[-1]
    found.facts["addresses"] = [first.address, second.address]
    found.trimmed = bench.pool.trim()
    found.shows = (
        f"The second allocation comes after the free of the first, and has its address: {first.address:#x} and "
        f"{second.address:#x}. The graph holds one allocation's worth, not two."
    )
    found.check("both allocations have the same address", first.address == second.address)
    found.check("the graph holds the memory of one", found.facts["launched"] == bench.size)


def _one_stream(bench: Bench, held: ExitStack, watch: Watch, found: Experiment) -> None:
    graphs = [bench.build(held, number) for number in range(bench.graphs)]
    found.facts["instantiated"] = watch.mark("instantiated").used
    bench.expect(1)
    stream = bench.streams(held, 1)[0]
    launched = _launch(graphs, [stream] * len(graphs), watch)
    stream.synchronize()
    addresses = [one.memory.address for one in graphs]
    _finish(bench, watch, found, launched, addresses)
    found.shows = (
        f"{len(graphs)} graphs in one stream cannot overlap, so they share the memory of one, at "
        f"{len(set(addresses))} different addresses. It stays taken until the trim."
    )
    found.check("instantiating takes nothing", found.facts["instantiated"] == 0)
    found.check(
        "the first launch takes one graph's worth, the others nothing", launched == [bench.size] * len(graphs)
    )
    found.check("each graph has an address of its own", len(set(addresses)) == len(graphs))
    found.check("the memory stays when all are done", found.facts["done"] == bench.size)
    found.check("a trim gives it back", found.facts["trimmed"] == 0)


def _several_streams(bench: Bench, held: ExitStack, watch: Watch, found: Experiment) -> None:
    count = bench.graphs
    streams = bench.streams(held, count)
    with ExitStack() as quick:
        graphs = [bench.build(quick, number, ticks=0) for number in range(count)]
        bench.expect(1)
        without: list[int] = []
        for one, stream in zip(graphs, streams, strict=True):
            without += _launch([one], [stream], watch)
            stream.synchronize()
        found.facts["without_spin"] = without
    for number in range(1, count + 1):
        found.names[f"launch {number}"] = f"no spin {number}"
        found.names[f"launch {count + number}"] = f"launch {number}"
    bench.pool.trim()
    graphs = [bench.build(held, number) for number in range(count)]
    found.facts["instantiated"] = watch.mark("instantiated").used
    bench.expect(count)
    launched = _launch(graphs, streams, watch)
    for stream in streams:
        stream.synchronize()
    stamps = bench.stamps()
    last_begin, first_end = int(stamps[:, 0].max()), int(stamps[:, 1].min())
    found.facts["overlapped"] = overlapped = last_begin < first_end
    found.facts["overlap_ns"] = first_end - last_begin
    _finish(bench, watch, found, launched, [one.memory.address for one in graphs])
    found.shows = (
        f"{count} graphs in {count} streams ran at the same time for {(first_end - last_begin) / 1e6:.1f} ms, by the "
        "device's own timer, so each had memory of its own. Without the spin, and each waited for before the next, "
        f"they may use memory again across streams, and held at most {max(without) // bench.size} × one graph's."
    )
    found.check("all kernels overlapped", overlapped)
    expected = [bench.size * number for number in range(1, count + 1)]
    found.check("each launch takes one graph's worth more", launched == expected)
    found.check("the memory stays when all are done", found.facts["done"] == bench.size * count)
    found.check("a trim gives it back", found.facts["trimmed"] == 0)


def _without_free(bench: Bench, held: ExitStack, watch: Watch, found: Experiment) -> None:
    graphs = [bench.build(held, number, frees=False, ticks=0) for number in range(bench.graphs)]
    found.facts["instantiated"] = watch.mark("instantiated").used
    bench.expect(1)
    stream = bench.streams(held, 1)[0]
    launched = _launch(graphs, [stream] * len(graphs), watch)
    stream.synchronize()
    bench.pool.trim()
    found.facts["trimmed_while_held"] = watch.series.used[-1]
    for one in graphs:
        one.memory.memory.close()
    _finish(bench, watch, found, launched, [one.memory.address for one in graphs], done="freed")
    whole = bench.size * len(graphs)
    found.shows = (
        "What a graph does not free is held, so that each launch takes more, in one stream too, and a trim finds "
        "nothing to give back. Freed from outside, the memory still belongs to the graphs, until a trim; they stay "
        "instantiated."
    )
    found.check(
        "each launch takes one graph's worth more",
        launched == [bench.size * number for number in range(1, len(graphs) + 1)],
    )
    found.check("a trim gives nothing back while it is held", found.facts["trimmed_while_held"] == whole)
    found.check("freeing leaves the footprint", found.facts["freed"] == whole)
    found.check("a trim then gives all of it back", found.facts["trimmed"] == 0)


def _launch(graphs: Sequence[Built], streams: Sequence[Stream], watch: Watch) -> list[int]:
    """Launch every graph without waiting, and return what graphs hold after each."""
    held: list[int] = []
    for one, stream in zip(graphs, streams, strict=True):
        one.executable.launch(stream)
        held.append(watch.series.used[-1])
    return held


def _finish(
    bench: Bench,
    watch: Watch,
    found: Experiment,
    launched: list[int],
    addresses: list[int],
    done: str = "done",
) -> None:
    found.facts["launched"] = launched
    found.facts["addresses"] = addresses
    found.facts[done] = watch.mark(done).used
    found.trimmed = bench.pool.trim()
    found.facts["trimmed"] = watch.series.used[-1]


_EXPERIMENTS: dict[int, tuple[str, Callable[[Bench, ExitStack, Watch, Experiment], None]]] = {
    1: ("Addresses are used again within a graph", _reuse_of_addresses),
    2: ("Graphs in one stream share memory", _one_stream),
    3: ("Graphs that may overlap do not share", _several_streams),
    4: ("Allocations without a free hold memory", _without_free),
}
