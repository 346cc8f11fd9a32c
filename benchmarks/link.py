"""What the speed of a resume depends on: the kind of host memory, streams, sizes of copies, and what went before.

Run with `PYTHONPATH=src:. REMAP_DRIVER=cuda python benchmarks/link.py` (3 GiB of host memory, under a minute;
`--scale 64` for the host driver). It tells apart why resumes of any size were measured at 49.5 GB/s on an H200, whose
link reads at 55.2. Expected there, before the first run:

- If small pages read slower over the link: "small pages" up well below "cuMemHostAlloc" up, in every size of copy.
- If cutting copies at 32 MiB costs it: "as the pool" up below "large pages" up, and 16 MiB below 1 GiB, with one
  stream.
- If the device still clears the memory that the pause before has just given back (2.2 ms for each GiB, which is also
  what a resume without contents took): "made right after a release" below "made after a rest".
  This one is what the figures so far point to; then a resume that does not follow its pause at once runs at 1.05.
- Calls: create, map and access of 32 × 256 MiB at 0.03, 0.01 and 0.1 ms each after a rest; several times as much right
  after a release, or beside copies, if those contend.
- Preparing: touching and locking go on side by side, so a first pause can reach the slower of the two, and no more.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import remap
from benchmarks.record import write
from remap import GiB, MiB
from remap.locations import in_context
from remap.residency import pages
from remap.residency.arenas import SLAB
from remap.types import Access, AllocationProperties

REPEATS = 5
REST = 0.5
"""Seconds after which the device has cleared what was given back."""

Pieces = list[tuple[int, int]]


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextmanager
def host_memory(kind: str, size: int) -> Generator[Pieces]:
    """Yield host memory of a kind as (address, size) of the pieces that a copy may not cross."""
    driver: Any = remap.driver()
    if kind == "as the pool":
        pool = remap.host_pool()
        (extent,) = pool.take([size], remap.device(0))
        extent.ready()
        try:
            yield list(extent.pieces(0, size))
        finally:
            pool.give(extent, False)
            pool.wait()
        return
    if kind == "cuMemHostAlloc":
        address = driver.allocate_pinned(size)
        try:
            yield [(address, size)]
        finally:
            driver.free_pinned(address)
        return
    with fresh(size, large=kind == "large pages") as address:
        pages.touch(address, size)
        driver.register_pinned(address, size)
        try:
            yield [(address, size)]
        finally:
            driver.unregister_pinned(address)


@contextmanager
def fresh(size: int, *, large: bool) -> Generator[int]:
    """Yield addresses of which no page was touched."""
    base = pages.reserve(size + SLAB)
    start = -(-base // SLAB) * SLAB
    pages.open_up(start, size, -1)
    pages.advise(start, size, large)
    try:
        yield start
    finally:
        pages.give_back(base, size + SLAB)


def cut(pieces: Pieces, size: int) -> Pieces:
    """Return pieces cut into copies of at most `size` bytes."""
    return [
        (address + start, min(size, length - start))
        for address, length in pieces
        for start in range(0, length, size)
    ]


def run(copies: Pieces, address: int, streams: Sequence[remap.Stream], *, up: bool) -> None:
    """Copy between host memory and the device, the streams in turn, and wait."""
    driver = remap.driver()
    for number, (host, length) in enumerate(copies):
        lane = streams[number % len(streams)].handle
        if up:
            driver.copy_to_device(address, host, length, lane)
        else:
            driver.copy_to_host(host, address, length, lane)
        address += length
    for stream in streams:
        stream.synchronize()


def by_kind(size: int, scale: int) -> dict[str, Any]:
    """Return the GB/s down and up for each kind of host memory, number of streams and size of copies."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        buffer = stack.enter_context(remap.allocate(size, resident=0))
        lanes = [stack.enter_context(remap.Stream(0)) for _ in range(2)]
        for kind in ("cuMemHostAlloc", "small pages", "large pages", "as the pool"):
            with host_memory(kind, size) as pieces:
                for count in (1, 2):
                    for length in (16 * MiB // scale, 256 * MiB // scale, GiB // scale):
                        copies = cut(pieces, length)
                        rates: list[float] = []
                        for up in (False, True):
                            times = [
                                seconds(lambda: run(copies, buffer.address, lanes[:count], up=up))  # noqa: B023
                                for _ in range(REPEATS)
                            ]
                            rates.append(size / statistics.median(times) / 1e9)
                        name = f"{kind}, {count} stream{'s' * (count > 1)}, {length * scale // MiB} MiB"
                        found[name] = {"down": rates[0], "up": rates[1]}
    return found


def by_target(size: int) -> dict[str, float]:
    """Return the GB/s up into memory that was there, that was just made, and that was made right after a release."""
    found: dict[str, float] = {}
    with host_memory("as the pool", size) as pieces, remap.Stream(0) as stream:
        for name, released, rest in (
            ("memory that was there", False, 0.0),
            ("memory made after a rest", True, REST),
            ("memory made right after a release", True, 0.0),
        ):
            times: list[float] = []
            with remap.allocate(size, resident=0) as buffer:
                for _ in range(REPEATS):
                    if released:
                        remap.pause(buffer, None)
                        time.sleep(rest)
                        remap.resume(buffer)
                    times.append(seconds(lambda: run(pieces, buffer._address, [stream], up=True)))
            found[f"into {name}"] = size / statistics.median(times) / 1e9
    return found


def calls(count: int, size: int) -> dict[str, dict[str, float]]:
    """Return the ms of all creates, maps and grants of `count` allocations: after a rest, a release, beside copies."""
    driver, place = remap.driver(), remap.device(0).location
    properties, grants = AllocationProperties(place), ((place, Access.READ_WRITE),)
    base = driver.reserve(count * size)
    found: dict[str, dict[str, float]] = {}
    with (
        host_memory("as the pool", size) as pieces,
        remap.allocate(size, resident=0) as buffer,
        remap.Stream(0) as stream,
    ):
        for name, rest, copying in (
            ("after a rest", REST, False),
            ("right after a release", 0.0, False),
            ("after a rest, beside copies", REST, True),
        ):
            taken: list[list[float]] = []
            for _ in range(REPEATS):
                time.sleep(rest)
                for _ in range(count if copying else 0):
                    address = buffer.address
                    for host, length in pieces:
                        driver.copy_to_device(address, host, length, stream.handle)
                        address += length
                handles: list[int] = []
                at = range(base, base + count * size, size)
                taken.append(
                    [
                        seconds(lambda: handles.extend([driver.create(size, properties) for _ in at])),  # noqa: B023
                        seconds(lambda: [driver.map(a, size, h) for a, h in zip(at, handles, strict=True)]),  # noqa: B023
                        seconds(lambda: [driver.set_access(one, size, grants) for one in at]),  # noqa: B023
                    ]
                )
                stream.synchronize()
                driver.unmap(base, count * size)
                for handle in handles:
                    driver.release(handle)
            medians = [statistics.median(times) * 1e3 for times in zip(*taken, strict=True)]
            found[name] = dict(zip(("create", "map", "access"), medians, strict=True))
    driver.free_range(base, count * size)
    return found


def preparing(size: int) -> dict[str, dict[str, float]]:
    """Return the GB/s at which fresh host memory is touched, locked and given back, by kind of page and threads."""
    driver, at = remap.driver(), remap.device(0)
    found: dict[str, dict[str, float]] = {}

    def lock(start: int) -> None:
        in_context(at, driver.register_pinned, start, SLAB)

    def unlock(start: int) -> None:
        in_context(at, driver.unregister_pinned, start)

    for kind in ("small pages", "large pages"):
        for threads in (1, 4, 16):
            with fresh(size, large=kind == "large pages") as start, ThreadPoolExecutor(threads) as executor:
                slabs = range(start, start + size, SLAB)

                def each(call: Callable[[int], None], slabs: range = slabs, on: Any = executor) -> float:
                    return size / seconds(lambda: list(on.map(call, slabs))) / 1e9

                found[f"{kind}, {threads} threads"] = {
                    "touch": each(lambda start: pages.touch(start, SLAB)),
                    "lock": each(lock),
                    "unlock": each(unlock),
                    "discard": each(lambda start: pages.discard(start, SLAB)),
                }
    return found


def measure(scale: int) -> dict[str, Any]:
    """Measure everything, and print it as it comes."""
    figures: dict[str, Any] = {}
    with remap.device(0).current():
        for name, part in (
            ("link by kind of host memory, GB/s", lambda: by_kind(GiB // scale, scale)),
            ("link by kind of target, GB/s", lambda: by_target(GiB // scale)),
            ("calls for 32 × 256 MiB, ms", lambda: calls(32, max(256 * MiB // scale, 2 * MiB))),
            ("preparing host memory, GB/s", lambda: preparing(max(2 * GiB // scale, 2 * SLAB))),
        ):
            figures[name] = part()
            print(name)
            for key, value in figures[name].items():
                print(f"  {key}: {value}", flush=True)
    return figures


def main() -> None:
    """Say what is expected, measure, and record it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes by this")
    scale = parser.parse_args().scale
    print(__doc__)
    write("link", measure(scale))


if __name__ == "__main__":
    main()
