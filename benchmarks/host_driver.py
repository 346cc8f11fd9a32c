"""What the host driver costs on this machine: importing, mapping against bare system calls, many mappings.

Run with `PYTHONPATH=src:. python benchmarks/host_driver.py`. Expected before the first run: `import remap` in 0.15 s;
map, set access and unmap of 2 MiB at most 2.5 times the system calls that they stand for; a look-up by address among
10,000 and 100,000 mappings at most twice and three times as long as one among 100 (logarithmic: 2 and 2.5 times);
100,000 mappings in a row as one mapping of the kernel, under 100 µs each for create, map and set access.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any

import remap
from benchmarks.record import interleaved_us, write
from remap import MiB
from remap.drivers.host import HostDriver, linux
from remap.types import Access, AllocationProperties, Location, LocationKind

SIZE = 2 * MiB
DEVICE = Location(LocationKind.DEVICE, 0)
READ_WRITE = ((DEVICE, Access.READ_WRITE),)


def import_s() -> float:
    """Return the seconds that `import remap` adds to an interpreter that does nothing: the median of 21 pairs."""

    def seconds(statement: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        return time.perf_counter() - start

    return statistics.median(seconds("import remap") - seconds("pass") for _ in range(21))


def mapping() -> dict[str, float]:
    """Time map, set access and unmap against the system calls that they stand for, taking turns."""
    driver = HostDriver()
    address, handle = driver.reserve(SIZE), driver.create(SIZE, AllocationProperties(DEVICE))
    file, bare_address = os.memfd_create("bare"), linux.reserve(SIZE)
    os.ftruncate(file, SIZE)

    def ours() -> None:
        driver.map(address, SIZE, handle)
        driver.set_access(address, SIZE, READ_WRITE)
        driver.unmap(address, SIZE)

    def bare() -> None:
        linux.place(bare_address, SIZE, (file, 0), linux.PROT_READ_WRITE)
        linux.clear(bare_address, SIZE)

    times = interleaved_us({"system calls, µs": bare, "driver, µs": ours}, 5000)
    linux.give_back(bare_address, SIZE)
    os.close(file)
    driver.shutdown()
    return {**times, "ratio": times["driver, µs"] / times["system calls, µs"]}


def many(count: int) -> dict[str, Any]:
    """Make `count` mappings in a row, look addresses up among them, and take them away."""
    driver = HostDriver(memory=count * SIZE + (1 << 30))
    properties, before = AllocationProperties(DEVICE), linux.map_count()
    start = time.perf_counter()
    address = driver.reserve(count * SIZE)
    handles: list[int] = []
    for at in range(address, address + count * SIZE, SIZE):
        handles.append(driver.create(SIZE, properties))
        driver.map(at, SIZE, handles[-1])
        driver.set_access(at, SIZE, READ_WRITE)
    made = time.perf_counter() - start
    kernel = linux.map_count() - before
    chance = random.Random(1)
    probes = [address + chance.randrange(count) * SIZE + 9 for _ in range(2000)]
    rounds: list[float] = []
    for _ in range(15):
        start = time.perf_counter()
        for probe in probes:
            driver.get_access(probe, DEVICE)
        rounds.append((time.perf_counter() - start) / len(probes) * 1e6)
    start = time.perf_counter()
    driver.unmap(address, count * SIZE)
    for handle in handles:
        driver.release(handle)
    driver.free_range(address, count * SIZE)
    gone = time.perf_counter() - start
    driver.shutdown()
    return {
        "create, map and set access, µs each": made / count * 1e6,
        "look-up, µs": statistics.median(rounds),
        "unmap and release, µs each": gone / count * 1e6,
        "mappings of the kernel": kernel,
    }


if __name__ == "__main__":
    figures: dict[str, Any] = {"import remap, s": import_s(), "map, set access and unmap, 2 MiB": mapping()}
    counts = {count: many(count) for count in (100, 10_000, 100_000)}
    figures["live mappings"] = {f"{count:,}": found for count, found in counts.items()}
    figures["look-up among 10,000, ratio to 100"] = counts[10_000]["look-up, µs"] / counts[100]["look-up, µs"]
    figures["look-up among 100,000, ratio to 100"] = (
        counts[100_000]["look-up, µs"] / counts[100]["look-up, µs"]
    )
    remap.use("host")
    write("host_driver", figures)
