"""What sharing costs: a broker under eight clients, a successor's first read, and an open against the raw calls.

Run with `PYTHONPATH=src:. python benchmarks/sharing.py [--driver cuda]`. Expected before the first run: on the host
driver at least 2,000 open + close a second of a 64 MiB buffer from 8 clients on two cores, and less than 100 ms from a
worker's SIGKILL to the first read of its successor, which has imported remap already, of 1 GiB of weights: a worker
that reads them, and one that has them open for writing (its successor has to wait for its end); on one H200 an open of
10 GiB in another process, from asking to the first use by a kernel, at most 2 ms over the raw export, import, map and
set access (about 1.5 ms); on two, a vector add over the peer's memory at 0.98 of the rate over raw calls or more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import remap
from benchmarks.record import write
from remap import GiB, MiB

SPAWN = multiprocessing.get_context("spawn")
LIMIT = 120.0


@contextmanager
def broker() -> Generator[Path]:
    """Run a broker in a process of its own; yields the path of its socket."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "broker"
        serve = "from remap.cli import main; main()"
        command = [sys.executable, "-c", serve, "serve", "--path", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                yield path
            finally:
                process.terminate()


def open_and_close(driver: str, path: Path, barrier: Any, results: Any, seconds: float) -> None:
    """Be one client: open and close a buffer for some seconds; put (cycles, seconds)."""
    remap.use(driver)
    with remap.connect(path) as client:
        for _ in range(50):
            client.open("weights").close()
        barrier.wait(LIMIT)
        start, cycles = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            client.open("weights").close()
            cycles += 1
        results.put((cycles, time.perf_counter() - start))


def broker_rate(driver: str, clients: int = 8, seconds: float = 4.0) -> dict[str, Any]:
    """Return how many open + close of a 64 MiB buffer all clients make a second, three runs."""
    rates: list[float] = []
    with broker() as path, remap.connect(path) as client:
        client.create("weights", 64 * MiB, resident=0).close()
        for _ in range(3):
            barrier, results = SPAWN.Barrier(clients), SPAWN.Queue()
            workers = [
                SPAWN.Process(
                    target=open_and_close, args=(driver, path, barrier, results, seconds), daemon=True
                )
                for _ in range(clients)
            ]
            for worker in workers:
                worker.start()
            counts = [results.get(timeout=LIMIT) for _ in workers]
            for worker in workers:
                worker.join(LIMIT)
            rates.append(sum(cycles / took for cycles, took in counts))
        client.drop("weights")
    return {
        "clients": clients,
        "cores": os.cpu_count(),
        "runs": rates,
        "open and close a second": statistics.median(rates),
    }


def hold_weights(driver: str, path: Path, size: int, writing: bool, ready: Any) -> None:
    """Be the worker that made the weights and has them open, until it is killed."""
    use(driver, size)
    client = remap.connect(path)
    weights = client.create("weights", size, resident=0)
    piece = np.random.default_rng(0).integers(0, 256, 64 * MiB, dtype=np.uint8)
    for offset in range(0, size, piece.size):
        weights.copy_from_host(piece, offset=offset)
    address = weights.address
    if not writing:
        weights.close()
        weights = client.open("weights", same_address=True)
        weights.to_host()
    ready.send((address, int(piece[12345])))
    time.sleep(LIMIT)


def succeed(driver: str, path: Path, size: int, link: Any) -> None:
    """Be the successor: everything is imported; wait for the word, then open, read, and say when that was done."""
    use(driver, size)
    remap.allocate(2 * MiB, resident=0, poison=True).close()  # the driver is open, as in a standby worker
    connect = remap.connect  # which loads the wing
    link.send("imported")
    link.recv()
    client = connect(path)
    weights = client.open("weights", same_address=True, wait=LIMIT)
    first = weights.to_host("uint8", 1 * MiB)
    now = time.monotonic()
    whole = time.monotonic()
    out = np.empty(64 * MiB, np.uint8)
    for offset in range(0, size, out.size):
        weights.copy_to_host(out, offset=offset)
    link.send((weights.address, int(first[12345]), now, time.monotonic() - whole))
    weights.close()
    client.drop("weights")
    client.close()


def use(driver: str, size: int) -> None:
    """Open the driver with memory enough for `size` bytes."""
    if driver == "host":
        remap.use("host", memory=size + 256 * MiB)
    else:
        remap.use(driver)


def succession(driver: str, writing: bool, size: int = GiB) -> dict[str, Any]:
    """Return the milliseconds from a worker's SIGKILL to its successor's first read of the weights."""
    times: list[float] = []
    passes: list[float] = []
    with broker() as path:
        for _ in range(5):
            ours, theirs = SPAWN.Pipe()
            mine, other = SPAWN.Pipe()
            successor = SPAWN.Process(target=succeed, args=(driver, path, size, other), daemon=True)
            worker = SPAWN.Process(
                target=hold_weights, args=(driver, path, size, writing, theirs), daemon=True
            )
            successor.start()
            worker.start()
            assert mine.poll(LIMIT)
            mine.recv()
            assert ours.poll(LIMIT)
            address, byte = ours.recv()
            assert worker.pid is not None
            killed = time.monotonic()
            os.kill(worker.pid, signal.SIGKILL)
            mine.send("go")
            assert mine.poll(LIMIT)
            again, found, read, whole = mine.recv()
            assert (again, found) == (address, byte), "the same bytes at the same address"
            times.append((read - killed) * 1000)
            passes.append(whole * 1000)
            worker.join(LIMIT)
            successor.join(LIMIT)
    return {
        "bytes": size,
        "runs, ms": times,
        "SIGKILL to first read, ms": statistics.median(times),
        "a pass over all of it after that, ms": statistics.median(passes),
    }


def importing(driver: str, link: Any, repeats: int) -> None:
    """Be the importer: open what is sent, use it in a kernel (a fill), and report the microseconds."""
    remap.use(driver)
    stream = remap.Stream(0)
    remap.allocate(2 * MiB, resident=0, poison=True).close()
    for _ in range(repeats):
        exported = link.recv()
        if isinstance(exported, tuple):  # the raw calls: a descriptor by its ticket, and the size
            number, size = exported
            raw_open(number, size, link)
            continue
        start = time.perf_counter_ns()
        with remap.open(exported, access="rw") as buffer:
            buffer.fill(1, size=4096, stream=stream)
            stream.synchronize()
            took = (time.perf_counter_ns() - start) / 1000
        link.send(took)


def raw_open(number: Any, size: int, link: Any) -> None:
    """Import, map, grant and use with the driver's own calls."""
    driver: Any = remap.driver()
    kind, place = remap.HandleType.POSIX_FD, remap.device(0).location
    fd = number.detach()
    start = time.perf_counter_ns()
    handle = driver.import_handle(fd, kind)
    address = driver.reserve(size)
    driver.map(address, size, handle)
    driver.release(handle)
    driver.set_access(address, size, [(place, remap.Access.READ_WRITE)])
    with remap.device(0).current():
        driver.fill(address, 1, 1, 4096, 0)
        driver.synchronize_stream(0)
    took = (time.perf_counter_ns() - start) / 1000
    driver.unmap(address, size)
    driver.free_range(address, size)
    os.close(fd)
    link.send(took)


def open_cost(driver: str, size: int, repeats: int = 20) -> dict[str, Any]:
    """Return the milliseconds from asking to the first use in another process, over the raw calls and over remap."""
    from multiprocessing.reduction import DupFd

    use(driver, size)
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=importing, args=(driver, theirs, 2 * repeats), daemon=True)
    child.start()
    raw, own, whole = [], [], []
    raw_driver: Any = remap.driver()
    with remap.allocate(size, resident=0, shareable="posix_fd") as buffer:
        for _ in range(repeats):
            start = time.perf_counter_ns()
            handle = raw_driver.retain(buffer.address)
            fd = raw_driver.export_handle(handle, remap.HandleType.POSIX_FD)
            raw_driver.release(handle)
            exporting = (time.perf_counter_ns() - start) / 1000
            ours.send((DupFd(fd), size))
            assert ours.poll(LIMIT)
            raw.append(exporting + ours.recv())
            os.close(fd)
            start = time.perf_counter_ns()
            with remap.export(buffer) as exported:
                exporting = (time.perf_counter_ns() - start) / 1000
                ours.send(exported)
                assert ours.poll(LIMIT)
                own.append(exporting + ours.recv())
            whole.append((time.perf_counter_ns() - start) / 1000)
    child.join(LIMIT)
    return {
        "bytes": size,
        "raw export, import, map, access and use, ms": statistics.median(raw) / 1000,
        "remap, the same calls, ms": statistics.median(own) / 1000,
        "remap, from asking to first use, with the journey, ms": statistics.median(whole) / 1000,
        "over the raw calls, ms": (statistics.median(whole) - statistics.median(raw)) / 1000,
    }


def add_over_peer(driver: str, link: Any) -> None:
    """Be the process of device 0: add vectors that lie on device 1 and belong to another process."""
    from benchmarks.foundation import VectorAdd

    remap.use(driver)
    raw_driver: Any = remap.driver()
    device = remap.device(0)
    with device.current():
        exports = link.recv()
        count = exports[0].size // 4
        add = VectorAdd()
        buffers = [remap.open(one, access="rw", accessing=[0]) for one in exports]
        ranges: list[tuple[int, int]] = []
        for one in exports:
            with one.handles() as fds:
                handle = raw_driver.import_handle(fds.numbers[0], remap.HandleType.POSIX_FD)
            address = raw_driver.reserve(one.size)
            raw_driver.map(address, one.size, handle)
            raw_driver.release(handle)
            raw_driver.set_access(address, one.size, [(device.location, remap.Access.READ_WRITE)])
            ranges.append((address, one.size))
        own, raw = [], []
        for _ in range(5):
            own.append(add.bandwidth(*(buffer.address for buffer in buffers), count))
            raw.append(add.bandwidth(*(address for address, _ in ranges), count))
        for address, size in ranges:
            raw_driver.unmap(address, size)
            raw_driver.free_range(address, size)
        for buffer in buffers:
            buffer.close()
        add.stream.close()
        add.module.close()
    link.send((statistics.median(own), statistics.median(raw)))


def peer_rate(driver: str, size: int = GiB) -> dict[str, Any]:
    """Return the GB/s of a vector add on device 0 over memory of another process on device 1, and by raw calls."""
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=add_over_peer, args=(driver, theirs), daemon=True)
    child.start()
    buffers = [remap.allocate(size, resident=1, shareable="posix_fd", poison=True) for _ in range(3)]
    ours.send([remap.export(buffer, timeout=LIMIT) for buffer in buffers])
    assert ours.poll(LIMIT)
    own, raw = ours.recv()
    child.join(LIMIT)
    for buffer in buffers:
        buffer.close()
    return {"remap, GB/s": own, "raw calls, GB/s": raw, "ratio": own / raw}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", choices=("host", "cuda"), default="host")
    driver = parser.parse_args().driver
    remap.use(driver)
    figures: dict[str, Any] = {
        "broker": broker_rate(driver),
        "successor of a reader": succession(driver, False),
        "successor of a writer": succession(driver, True),
    }
    size = 10 * GiB if driver == "cuda" else 64 * MiB
    figures["open"] = open_cost(driver, size)
    if driver == "cuda" and len(remap.devices()) > 1:
        figures["vector add over the memory of another process on a peer"] = peer_rate(driver)
    write("sharing", figures)


if __name__ == "__main__":
    main()
