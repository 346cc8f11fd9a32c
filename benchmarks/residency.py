"""How fast buffers sleep, wake and move, against the link, the touching of host pages, and the same driver calls.

Run with `PYTHONPATH=src:. REMAP_DRIVER=cuda python benchmarks/residency.py` (an H200 with 48 GiB of host memory free;
`--scale 64` makes everything 64 times smaller, for the host driver). Expected on an H200, before the first run: link
55 GB/s; with host memory prepared or kept, pause at most 1.05 of (bytes / link + the raw unmap and release calls) and
resume at most 1.05 of bytes / link, for 8 × 1 GiB and for 200 × 16 MiB; the very first pause at least 0.8 of the touch
rate (4.4 GB/s with 16 threads); host memory released each time, pause at least 0.8 of the touch rate and resume at
least 0.9 of the link; without a backup at most 1.2 of the raw calls over the same chunks, for 1, 32 and 128 of them;
the first of 32 layers after at most 1/16 of a whole resume; a kernel on resumed and on migrated memory at least 0.99
of plain memory. Raw calls are those of remap's driver object, which adds about a microsecond to each. A device clears
memory after its release, and copies and calls right behind a pause may wait for that: what is marked "after a rest"
began half a second later. `benchmarks/link.py` takes these figures apart.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import Any, Self

import numpy as np

import remap
from benchmarks.link import REST, fresh, seconds
from benchmarks.record import write
from remap import GiB, MiB
from remap.locations import in_context
from remap.residency import pages
from remap.residency.arenas import SLAB
from remap.types import Access, AllocationProperties

REPEATS = 5
CLEARED = 0.06
"""Seconds after which the device has cleared 8 GiB."""


def median(times: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(times)


class Buffers:
    """Equal buffers with random contents, and the check that they have them."""

    def __init__(self, count: int, size: int) -> None:
        self.all = [remap.allocate(size, resident=0) for _ in range(count)]
        self.size = sum(one.size for one in self.all)
        self.pattern = np.frombuffer(np.random.default_rng(0).bytes(min(size, 64 * MiB)), np.uint8)
        for one in self.all:
            for offset in range(0, one.size, self.pattern.size):
                one.copy_from_host(self.pattern[: one.size - offset], offset=offset)

    def check(self) -> None:
        """Raise unless the first and the last buffer hold what they were given."""
        for one in (self.all[0], self.all[-1]):
            tail = one.size - self.pattern.size
            assert np.array_equal(one.to_host("uint8", self.pattern.size, offset=tail), self.pattern)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all."""
        for one in self.all:
            one.close()


def link(size: int) -> dict[str, float]:
    """Return the GB/s of one long copy in each direction, over pinned memory of the pool and one stream."""
    driver, at = remap.driver(), remap.device(0)
    pool = remap.host_pool()
    (extent,) = pool.take([size], at)
    extent.ready()
    pieces = list(extent.pieces(0, size))
    found: dict[str, float] = {}
    with remap.allocate(size, resident=0) as buffer, at.current(), remap.Stream(0) as stream:
        for name, copy in (("down", driver.copy_to_host), ("up", driver.copy_to_device)):

            def run(name: str = name, copy: Any = copy) -> None:
                address = buffer.address
                for host, length in pieces:
                    copy(*((host, address) if name == "down" else (address, host)), length, stream.handle)
                    address += length
                stream.synchronize()

            found[name] = size / median([seconds(run) for _ in range(REPEATS)]) / 1e9
    pool.give(extent, False)
    pool.wait()
    return found


def touch(executor: ThreadPoolExecutor, start: int, size: int) -> None:
    """Touch fresh host pages, a slab at a time in each thread."""
    list(executor.map(pages.touch, range(start, start + size, SLAB), repeat(SLAB)))


def touch_rate(size: int) -> dict[str, float]:
    """Return the GB/s at which fresh host pages are touched by 16 threads: small ones, and large ones."""
    found: dict[str, float] = {}
    for large in (False, True):
        times: list[float] = []
        for _ in range(3):
            with fresh(size, large=large) as start, ThreadPoolExecutor(16) as executor:
                times.append(seconds(partial(touch, executor, start, size)))
        found["large pages" if large else "small pages"] = size / median(times) / 1e9
    return found


def ready_rate(size: int) -> dict[str, float]:
    """Return the GB/s at which fresh host pages are touched and locked by 16 threads, as a first pause has to."""
    driver, at = remap.driver(), remap.device(0)
    found: dict[str, float] = {}

    def ready(start: int) -> None:
        pages.touch(start, SLAB)
        in_context(at, driver.register_pinned, start, SLAB)

    for large in (False, True):
        times: list[float] = []
        for _ in range(3):
            with fresh(size, large=large) as start, ThreadPoolExecutor(16) as executor:
                slabs = range(start, start + size, SLAB)
                times.append(seconds(lambda: list(executor.map(ready, slabs))))  # noqa: B023
                for slab in slabs:
                    in_context(at, driver.unregister_pinned, slab)
        found["large pages" if large else "small pages"] = size / median(times) / 1e9
    return found


def raw_cycle(count: int, size: int, rest: float) -> float:
    """Return the seconds of create, map, access and copies up by raw calls, some time after unmap and release."""
    driver, at = remap.driver(), remap.device(0)
    properties, grants = AllocationProperties(at.location), ((at.location, Access.READ_WRITE),)
    pool = remap.host_pool()
    extents = pool.take([size] * count, at)
    pieces = [list(extent.pieces(0, size)) for extent in extents]
    addresses = [driver.reserve(size) for _ in range(count)]
    handles: list[int] = []
    times: list[float] = []
    with at.current(), remap.Stream(0) as stream:

        def bring() -> None:
            for address, parts in zip(addresses, pieces, strict=True):
                handle = driver.create(size, properties)
                handles.append(handle)
                driver.map(address, size, handle)
                driver.set_access(address, size, grants)
                for host, length in parts:
                    driver.copy_to_device(address, host, length, stream.handle)
                    address += length  # noqa: PLW2901
            driver.synchronize_stream(stream.handle)

        for _ in range(REPEATS + 1):
            times.append(seconds(bring))
            for address, handle in zip(addresses, handles, strict=True):
                driver.unmap(address, size)
                driver.release(handle)
            handles.clear()
            time.sleep(rest)
    for address in addresses:
        driver.free_range(address, size)
    pool.give_all(extents, False)
    pool.wait()
    return median(times[1:])


class RawBuffers:
    """Buffers of one chunk each, made and taken away by raw calls; without memory at first."""

    def __init__(self, count: int, size: int) -> None:
        self._driver, self._size = remap.driver(), size
        place = remap.device(0).location
        self._properties, self._grants = AllocationProperties(place), ((place, Access.READ_WRITE),)
        self._addresses = [self._driver.reserve(size) for _ in range(count)]
        self._handles: list[int] = []

    def give(self) -> None:
        """Create, map and set access for each."""
        driver, size = self._driver, self._size
        for address in self._addresses:
            handle = driver.create(size, self._properties)
            driver.map(address, size, handle)
            driver.set_access(address, size, self._grants)
            self._handles.append(handle)

    def take(self) -> None:
        """Unmap and release each."""
        for address, handle in zip(self._addresses, self._handles, strict=True):
            self._driver.unmap(address, self._size)
            self._driver.release(handle)
        self._handles.clear()

    def close(self) -> None:
        """Free the addresses; the memory is gone already."""
        for address in self._addresses:
            self._driver.free_range(address, self._size)


def raw_release(count: int, size: int) -> float:
    """Return the seconds of unmap + release, over buffers of one chunk each."""
    raw = RawBuffers(count, size)
    times: list[float] = []
    for _ in range(REPEATS + 1):
        raw.give()
        times.append(seconds(raw.take))
    raw.close()
    return median(times[1:])


def cycles(buffers: Buffers, repeats: int, rest: float = 0.0, **options: Any) -> tuple[float, float]:
    """Return the seconds of pause and of resume; the pool settles in between, outside of the clock, as does `rest`."""
    slept: list[float] = []
    woken: list[float] = []
    for _ in range(repeats):
        slept.append(seconds(lambda: remap.pause(buffers.all)))
        time.sleep(rest)
        woken.append(seconds(lambda: remap.resume(buffers.all, **options)))
        remap.host_pool().wait()
    buffers.check()
    return median(slept), median(woken)


def shape(count: int, size: int, rate: dict[str, float], touched: float, ready: float) -> dict[str, Any]:
    """Measure one shape of buffers with every setting of the pool."""
    pool = remap.host_pool()
    found: dict[str, Any] = {}
    free = raw_release(count, size)
    raw, raw_rested = raw_cycle(count, size, 0.0), raw_cycle(count, size, REST)
    with Buffers(count, size) as buffers:
        total = buffers.size
        best_down, best_up = total / rate["down"] / 1e9 + free, total / rate["up"] / 1e9
        remap.pause(buffers.all, None)
        remap.resume(buffers.all)
        for one in buffers.all:
            one.copy_from_host(buffers.pattern, offset=one.size - buffers.pattern.size)
        pool.trim()
        first = seconds(lambda: remap.pause(buffers.all))
        remap.resume(buffers.all)
        pool.trim()
        found["very first pause, of the touch rate"] = total / first / 1e9 / touched
        found["very first pause, of the rate of touching and locking"] = total / first / 1e9 / ready
        slept, woken = cycles(buffers, REPEATS)
        found["released each time: pause, of the touch rate"] = total / slept / 1e9 / touched
        found["released each time: pause, of the rate of touching and locking"] = total / slept / 1e9 / ready
        found["released each time: resume, of the link"] = best_up / woken
        cycles(buffers, 1, keep_host=True)
        slept, woken = cycles(buffers, REPEATS, keep_host=True)
        found["host memory kept: pause, of the floor"] = slept / best_down
        found["host memory kept: resume, of the floor"] = woken / best_up
        pool.trim()
        remap.host_pool(prepare=total + total // 8).wait()
        slept, woken = cycles(buffers, REPEATS)
        found["prepared: pause, of the floor"] = slept / best_down
        found["prepared: resume, of the floor"] = woken / best_up
        found["prepared: resume, of the same raw calls at once"] = woken / raw
        _, rested = cycles(buffers, REPEATS, REST)
        found["prepared: resume after a rest, of the floor"] = rested / best_up
        found["prepared: resume after a rest, of the same raw calls"] = rested / raw_rested
        found["raw calls at once and after a rest, of the floor"] = [raw / best_up, raw_rested / best_up]
        found["prepared: GB/s down and up"] = [total / slept / 1e9, total / woken / 1e9]
        remap.host_pool(prepare=0)
        pool.trim()
    return found


def without_backup(total: int) -> dict[str, Any]:
    """Measure pause and resume with keep=None, in turn with the raw calls over as many chunks.

    Each begins when the device has cleared what the one before gave back.
    """
    found: dict[str, Any] = {}
    for count in (1, 32, 128):
        size = total // count
        raw = RawBuffers(count, size)
        raw.give()
        with Buffers(count, size) as buffers, remap.ElasticBuffer(total, chunk=size) as one:
            one.resize(total)
            calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
                "raw": (raw.take, raw.give),
                "buffers": (partial(remap.pause, buffers.all, None), partial(remap.resume, buffers.all)),
                "chunks of one buffer": (partial(remap.pause, one, None), partial(remap.resume, one)),
            }
            slept: dict[str, list[float]] = {name: [] for name in calls}
            woken: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(2 * REPEATS):
                for name, (away, back) in calls.items():
                    slept[name].append(seconds(away))
                    time.sleep(CLEARED)
                    woken[name].append(seconds(back))
                    time.sleep(CLEARED)
            raw.take()
        raw.close()
        free, make = median(slept["raw"]), median(woken["raw"])
        found[f"{count} raw"] = {"pause, ms": free * 1e3, "resume, ms": make * 1e3}
        for name in list(calls)[1:]:
            found[f"{count} {name}"] = {
                "pause, ms": median(slept[name]) * 1e3,
                "resume, ms": median(woken[name]) * 1e3,
                "pause, of the raw calls": median(slept[name]) / free,
                "resume, of the raw calls": median(woken[name]) / make,
            }
    return found


def first_layer(total: int, rest: float = 0.0) -> dict[str, float]:
    """Measure when an ordered resume returns, when the first of 32 layers has arrived, and when all have."""
    with Buffers(32, total // 32) as buffers:
        remap.host_pool(prepare=total + total // 8).wait()
        returned: list[float] = []
        first: list[float] = []
        whole: list[float] = []
        for _ in range(REPEATS):
            remap.pause(buffers.all)
            time.sleep(rest)
            start = time.perf_counter()
            with remap.resume(buffers.all, events=True) as waking:
                returned.append(time.perf_counter() - start)
                waking.events[0].synchronize()
                first.append(time.perf_counter() - start)
            whole.append(time.perf_counter() - start)
        buffers.check()
    remap.host_pool(prepare=0).trim()
    return {
        "returned, ms": median(returned) * 1e3,
        "first layer, ms": median(first) * 1e3,
        "all layers, ms": median(whole) * 1e3,
        "first of all": median(first) / median(whole),
    }


def growth(sizes: Sequence[int]) -> dict[str, Any]:
    """Measure how pause and resume grow with the bytes, in eight buffers, with host memory kept."""
    found: dict[str, Any] = {}
    for total in sizes:
        with Buffers(8, total // 8) as buffers:
            cycles(buffers, 1, keep_host=True)
            slept, woken = cycles(buffers, 3, keep_host=True)
            found[f"{total // MiB} MiB"] = {
                "pause, GB/s": total / slept / 1e9,
                "resume, GB/s": total / woken / 1e9,
            }
        remap.host_pool().trim()
    return found


def moved(size: int) -> dict[str, Any]:
    """Measure migration to the host and back, and a kernel on memory that was paused and migrated."""
    found: dict[str, Any] = {}
    with Buffers(1, size) as buffers:
        away = [seconds(lambda: remap.migrate(buffers.all, remap.Host())) for _ in range(1)]
        back = [seconds(lambda: remap.migrate(buffers.all, 0))]
        buffers.check()
        found["migrate to the host and back, GB/s"] = [size / away[0] / 1e9, size / back[0] / 1e9]
    if remap.driver().name != "cuda":
        return found
    from benchmarks.foundation import VectorAdd
    from remap.buffers.plain import allocate_plain

    add = VectorAdd()
    plain = [allocate_plain(size, at=0) for _ in range(3)]
    best = add.bandwidth(*(one.address for one in plain), size // 4)
    for one in plain:
        one.close()
    with Buffers(3, size) as buffers:
        remap.pause(buffers.all)
        remap.resume(buffers.all)
        time.sleep(REST)  # until the device has cleared what the pause gave back
        found["kernel on resumed memory, of plain"] = (
            add.bandwidth(*(one.address for one in buffers.all), size // 4) / best
        )
        remap.migrate(buffers.all, remap.Host())
        remap.migrate(buffers.all, 0)
        time.sleep(REST)
        found["kernel on memory migrated back, of plain"] = (
            add.bandwidth(*(one.address for one in buffers.all), size // 4) / best
        )
    return found


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes by this")
    scale = parser.parse_args().scale
    small, large = max(16 * MiB // scale, 2 * MiB), 1 * GiB // scale
    with remap.device(0).current():
        rate = link(large)
        touched, ready = (call(max(8 * large, 2 * SLAB)) for call in (touch_rate, ready_rate))
        figures: dict[str, Any] = {
            "link, GB/s": rate,
            "touch rate, GB/s": touched,
            "rate of touching and locking, GB/s": ready,
        }
        print(figures, flush=True)
        for name, count, size in (
            ("8 × 1 GiB", 8, large),
            ("200 × 16 MiB", 200 if scale == 1 else 20, small),
        ):
            figures[name] = shape(count, size, rate, max(touched.values()), max(ready.values()))
            print(name, figures[name], flush=True)
        figures["no backup, 8 GiB"] = without_backup(8 * large if scale == 1 else 256 * MiB)
        print(figures["no backup, 8 GiB"], flush=True)
        layers = 8 * large if scale == 1 else 128 * MiB
        figures["first of 32 layers, 8 GiB"] = first_layer(layers)
        figures["first of 32 layers, 8 GiB, after a rest"] = first_layer(layers, REST)
        figures["moved"] = moved(large)
        print(figures["moved"], flush=True)
        figures["growth, host memory kept"] = growth(
            [n * large for n in (1, 8, 16)] if scale == 1 else [8 * large]
        )
        if scale == 1:
            figures["growth, host memory kept"] |= growth([256 * MiB])
    write("residency", figures)


if __name__ == "__main__":
    main()
