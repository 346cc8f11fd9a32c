"""What it costs to be watched: a driver call under a trace, sites of objects, snapshots and pages of many mappings.

Run with `PYTHONPATH=src:. python benchmarks/observe.py`. Expected before the first run, on any machine: a trace adds
under 2 µs to a driver call, and leaves nothing behind (expected 0 ns; found some 40 ns a call, as Python materialises
the attributes of the driver, whichever way its methods are covered);
recording a site adds under 10 µs to an object; a snapshot of 10,000 buffers takes under 0.5 s, its page under 1 s.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import remap
from benchmarks.record import interleaved_us, write
from remap import MiB
from remap.observe.render.terminal import as_text

CALLS = 2_000
MANY = 10_000


def call_ns(call: Callable[[], object]) -> float:
    """Return the time of a call in ns: the median of rounds of many calls."""
    rounds: list[float] = []
    for _ in range(15):
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter_ns() - start) / CALLS)
    return statistics.median(rounds)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes in seconds: the median of three."""
    times: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def traced() -> dict[str, float]:
    """Return what a trace adds to the cheapest call, and what it leaves behind."""
    driver = remap.driver()
    remap.device().memory()

    def call() -> object:
        return driver.current_context()

    before = call_ns(call)
    with remap.trace():
        during = call_ns(call)
    after = call_ns(call)
    return {
        "call_before_ns": before,
        "call_traced_ns": during,
        "call_after_ns": after,
        "trace_adds_ns": during - before,
        "after_to_before": after / before,
    }


def allocated() -> dict[str, float]:
    """Return what recording sites adds to an object."""

    def plain() -> None:
        remap.record_sites(0)
        remap.reserve(2 * MiB).close()

    def recorded() -> None:
        remap.record_sites(8)
        remap.reserve(2 * MiB).close()

    times = interleaved_us({"plain": plain, "recorded": recorded}, 500)
    remap.record_sites(0)
    return {"reserve_us": times["plain"], "site_adds_us": times["recorded"] - times["plain"]}


def pictured() -> dict[str, float]:
    """Return what pictures of many mappings cost: one allocation, at as many addresses."""
    memory, room = remap.create(2 * MiB), remap.reserve(MANY * 2 * MiB)
    mappings = [room.map(memory, offset=at * 2 * MiB) for at in range(MANY)]
    taken = remap.snapshot()
    text = taken.to_json()
    figures = {
        "mappings": float(MANY),
        "snapshot_s": seconds(remap.snapshot),
        "to_json_s": seconds(taken.to_json),
        "from_json_s": seconds(lambda: remap.Snapshot.from_json(text)),
        "json_bytes": float(len(text)),
        "page_s": seconds(taken.to_html),
        "page_bytes": float(len(taken.to_html())),
        "terminal_s": seconds(lambda: as_text(taken, 100)),
    }
    for one in mappings:
        one.close(after=None)
    room.close()
    memory.close()
    return figures


if __name__ == "__main__":
    write("observe", {"trace": traced(), "sites": allocated(), "pictures": pictured()})
