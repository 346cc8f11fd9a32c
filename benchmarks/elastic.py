"""What growing in place costs: token by token, with memory mapped ahead, from pools, and shared by forks.

Run with `PYTHONPATH=src:. python benchmarks/elastic.py` on CUDA. Expected before the first run: growing to 8 GiB in
requests of 2 MiB costs at most 0.25 of creating, mapping and granting access to each 2 MiB by raw calls (about 52 µs);
with memory mapped ahead at most 5 µs a request as the caller sees it, and about 1 µs in the median; from a pool less
than with new memory; a fork of 1 GiB less than 5 ms, whatever it holds. Ratios are of one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import remap
from benchmarks.record import write
from remap import GiB, MiB
from remap.types import Access, AllocationProperties

STEP = 2 * MiB
REPEATS = 5


def raw_growth(total: int) -> list[float]:
    """Return the µs of each create, map and access of 2 MiB by the driver's own calls."""
    create, map_, grant, close = raw_calls(total)
    times: list[float] = []
    for offset in range(0, total, STEP):
        start = time.perf_counter_ns()
        handle = create()
        map_(offset, handle)
        grant(offset)
        times.append((time.perf_counter_ns() - start) / 1000)
    close()
    return times


def raw_calls(total: int) -> tuple[Callable[..., Any], ...]:
    """Return create, map, grant and close as thin as they can be."""
    driver = remap.driver()
    if driver.name == "cuda":
        return cuda_calls(total)
    where = remap.device(0).location
    properties, handles = AllocationProperties(where), list[int]()
    address = driver.reserve(total)

    def create() -> int:
        handles.append(driver.create(STEP, properties))
        return handles[-1]

    def close() -> None:
        driver.unmap(address, total)
        for handle in handles:
            driver.release(handle)
        driver.free_range(address, total)

    grants = ((where, Access.READ_WRITE),)
    return (
        create,
        lambda offset, handle: driver.map(address + offset, STEP, handle),
        lambda offset: driver.set_access(address + offset, STEP, grants),
        close,
    )


def cuda_calls(total: int) -> tuple[Callable[..., Any], ...]:
    """Return the same of cuda.bindings."""
    from cuda.bindings import driver as cu

    from benchmarks.foundation import check, raw_access, raw_properties

    properties, access, handles = raw_properties(0), [raw_access(0)], list[Any]()
    address = int(check(cu.cuMemAddressReserve(total, 0, 0, 0)))

    def create() -> Any:
        err, handle = cu.cuMemCreate(STEP, properties, 0)
        if err:
            raise RuntimeError(err.name)
        handles.append(handle)
        return handle

    def close() -> None:
        check(cu.cuMemUnmap(address, total))
        for handle in handles:
            check(cu.cuMemRelease(handle))
        check(cu.cuMemAddressFree(address, total))

    return (
        create,
        lambda offset, handle: cu.cuMemMap(address + offset, STEP, 0, handle, 0),
        lambda offset: cu.cuMemSetAccess(address + offset, STEP, access, 1),
        close,
    )


def growth(
    total: int,
    *,
    between: Callable[[], object] | None = None,
    pool: remap.ChunkPool | None = None,
    **options: Any,
) -> list[float]:
    """Return the µs of each request of a buffer that grows by 2 MiB at a time; `between` runs after each."""
    times: list[float] = []
    with remap.ElasticBuffer(total, device=0, pool=pool, **options) as buffer:
        for size in range(STEP, total + 1, STEP):
            start = time.perf_counter_ns()
            buffer.resize(size)
            times.append((time.perf_counter_ns() - start) / 1000)
            if between is not None:
                between()
    return times


def told(times: list[float]) -> dict[str, float]:
    """Return what is said of many requests."""
    ordered = sorted(times)
    return {
        "mean": statistics.fmean(times),
        "median": statistics.median(times),
        "99 %": ordered[len(ordered) * 99 // 100],
        "max": ordered[-1],
    }


def median_run(run: Callable[[], list[float]]) -> list[float]:
    """Return the run whose mean is the median of several."""
    runs = sorted((run() for _ in range(REPEATS)), key=statistics.fmean)
    return runs[REPEATS // 2]


def work_of(microseconds: float) -> Callable[[], None]:
    """Return a wait for a device of that length, during which other threads run: what a model does between tokens."""
    stream, scratch = remap.Stream(0), remap.allocate(256 * MiB, resident=0)
    pieces = [4 << 10]
    while True:
        start = time.perf_counter_ns()
        for _ in range(20):
            scratch.fill(0, size=pieces[0], stream=stream)
            stream.synchronize()
        if (time.perf_counter_ns() - start) / 20_000 >= microseconds or pieces[0] >= scratch.size:
            break
        pieces[0] *= 2

    def work() -> None:
        scratch.fill(0, size=pieces[0], stream=stream)
        stream.synchronize()

    work.close = lambda: (stream.close(), scratch.close())  # type: ignore[attr-defined]
    return work


def compare(total: int) -> dict[str, Any]:
    """Compare growth to `total` with raw calls, in one run."""
    raw = statistics.fmean(median_run(lambda: raw_growth(total)))
    plain = told(median_run(lambda: growth(total)))
    fixed = told(median_run(lambda: growth(total, chunk=STEP)))
    with remap.ChunkPool(0, limit=total) as pool:
        growth(total, pool=pool)
        pooled = told(median_run(lambda: growth(total, pool=pool)))
    tight = told(median_run(lambda: growth(total, ahead=total // 4)))
    work = work_of(30)
    paced = told(median_run(lambda: growth(total, ahead=total // 4, between=work)))
    work.close()  # type: ignore[attr-defined]
    return {
        "raw, µs a request": raw,
        "geometric": plain,
        "geometric, ratio to raw": plain["mean"] / raw,
        "2 MiB chunks": fixed,
        "2 MiB chunks, ratio to raw": fixed["mean"] / raw,
        "from a pool": pooled,
        "ahead, without a pause": tight,
        "ahead, 30 µs of work between requests": paced,
    }


def timed(act: Callable[[], object]) -> float:
    """Return the ms of one call."""
    start = time.perf_counter_ns()
    act()
    return (time.perf_counter_ns() - start) / 1e6


def sharing_once(total: int) -> dict[str, float]:
    """Return the ms of a fork, a private copy, and giving back."""
    with remap.ElasticBuffer(2 * total, device=0) as root:
        root.resize(total)
        root.fill(1)
        forks: list[remap.ElasticBuffer] = []
        figures = {
            "fork": timed(lambda: forks.append(root.fork())),
            "fork again": timed(lambda: forks.append(forks[0].fork())),
            "make 64 MiB private": timed(lambda: forks[1].make_private(total - 64 * MiB, total)),
            "close a fork": timed(forks[0].close),
        }
        forks[1].close()
        root.make_private()
        return figures | {"shrink to nothing": timed(lambda: root.resize(0))}


def sharing(total: int) -> dict[str, float]:
    """Return the median ms of each."""
    runs = [sharing_once(total) for _ in range(REPEATS)]
    return {name: statistics.median([run[name] for run in runs]) for name in runs[0]}


if __name__ == "__main__":
    on_cuda = remap.driver().name == "cuda"
    with remap.device(0).current():
        sizes = [256 * MiB, GiB, 8 * GiB, 32 * GiB] if on_cuda else [128 * MiB]
        write(
            "elastic",
            {
                **{f"growth to {size // MiB} MiB in 2 MiB requests": compare(size) for size in sizes},
                "sharing, ms": {f"{size // MiB} MiB": sharing(size) for size in sizes[: 3 if on_cuda else 1]},
            },
        )
