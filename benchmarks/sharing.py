"""What sharing costs: a broker under eight clients, a successor's first read, and an open against the raw calls.

Run with `PYTHONPATH=src:. python benchmarks/sharing.py [--driver cuda] [--only PART]`. Each part prints its figures as
soon as it has them, and has a time limit (`--limit`, 20 s): what takes longer is given up, with a word about what was
waited for, and the other parts go on. Children die with the program, however it ends.

Expected before the first run: on the host driver at least 2,000 open + close a second of a 64 MiB buffer from 8 clients
on two cores, and less than 100 ms from a worker's SIGKILL to the first read of its successor, which has imported remap
already, of 1 GiB of weights: a worker that reads them, and one that has them open for writing (its successor has to
wait for its end); on one H200 an open of 10 GiB in another process, from asking to the first use by a kernel, at most 2
ms over the raw export, import, map and set access (about 1.5 ms); on two, a vector add over the peer's memory at 0.98
of the rate over raw calls or more.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np

import remap
from benchmarks.record import write
from remap import GiB, MiB

SPAWN = multiprocessing.get_context("spawn")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class TooLateError(Exception):
    """A part did not end within its time limit."""


class Part:
    """One part of the benchmark: its time limit, and the children that end with it."""

    def __init__(self, driver: str, seconds: float) -> None:
        self.driver = driver
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._children: list[Any] = []

    def start(self, play: Callable[..., None], *arguments: Any) -> Child:
        """Start a child that runs `play(driver, link, *arguments)`."""
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(
            target=_run, args=(os.getpid(), play, self.driver, theirs, arguments), daemon=True
        )
        process.start()
        theirs.close()
        self._children.append(process)
        return Child(self, process, ours)

    def broker(self, directory: str) -> Path:
        """Start a broker; return the path of its socket."""
        path = Path(directory) / "broker"
        self.start(serve, path).hear("the broker to serve")
        return path

    def left(self, what: str) -> float:
        """Return how many seconds are left; raises `TooLateError`."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TooLateError(f"given up after {self._seconds:g} s, waiting for {what}")
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._children:
            process.kill()
        for process in self._children:
            process.join()


class Child:
    """A process, and the words that are exchanged with it."""

    def __init__(self, part: Part, process: Any, link: Connection) -> None:
        self._part = part
        self.process = process
        self._link = link

    def tell(self, word: object) -> None:
        """Send something."""
        self._link.send(word)

    def hear(self, what: str) -> Any:
        """Return what it says next; raises `TooLateError`, and `RuntimeError` if it has failed."""
        if not self._link.poll(self._part.left(what)):
            self._part.left(what)
        try:
            said = self._link.recv()
        except EOFError:
            raise RuntimeError(f"a child ended, and {what} was waited for") from None
        if isinstance(said, _Failed):
            raise RuntimeError(f"a child failed, and {what} was waited for:\n{said.story}")
        return said


class _Failed:
    """What a child says when it fails."""

    def __init__(self, story: str) -> None:
        self.story = story


def _run(parent: int, play: Callable[..., None], driver: str, link: Connection, arguments: Any) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()
    try:
        play(driver, link, *arguments)
    except Exception:  # noqa: BLE001 (the parent says what it was, unless it is that which has ended)
        with suppress(OSError):
            link.send(_Failed(traceback.format_exc()))


def serve(driver: str, link: Connection, path: Path) -> None:
    """Be the broker, which needs no driver."""
    from remap.sharing.broker import serve

    del driver
    serve(path, on_ready=lambda _: link.send("serving"))


def open_and_close(driver: str, link: Connection, path: Path, seconds: float) -> None:
    """Be one client: each time it is told, open and close a buffer for some seconds, and say how many a second."""
    remap.use(driver)
    with remap.connect(path) as client:
        for _ in range(50):
            client.open("weights").close()
        link.send("ready")
        while link.recv():
            start, cycles = time.perf_counter(), 0
            while time.perf_counter() - start < seconds:
                client.open("weights").close()
                cycles += 1
            link.send(cycles / (time.perf_counter() - start))


def broker_rate(part: Part, clients: int = 8, seconds: float = 0.5, runs: int = 5) -> dict[str, Any]:
    """Return how many open + close of a 64 MiB buffer all clients make a second."""
    rates: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        path = part.broker(directory)
        with remap.connect(path) as client:
            client.create("weights", 64 * MiB, resident=0).close()
            workers = [part.start(open_and_close, path, seconds) for _ in range(clients)]
            for worker in workers:
                worker.hear("a client to be ready")
            for _ in range(runs):
                for worker in workers:
                    worker.tell(True)
                rates.append(sum(worker.hear("a client to count") for worker in workers))
            for worker in workers:
                worker.tell(False)
    return {
        "clients": clients,
        "cores": os.cpu_count(),
        "runs": rates,
        "open and close a second": statistics.median(rates),
    }


def work(driver: str, link: Connection, path: Path, size: int, writing: bool) -> None:
    """Be a worker in a row of them: open the weights when told to, read them, and have them open until killed.

    Everything is imported before: it is a standby. The first makes the weights.
    """
    use(driver, size)
    remap.allocate(2 * MiB, resident=0, poison=True).close()  # the driver is open
    connect: Any = remap.connect  # which loads the wing
    link.send("imported")
    access = "rw" if writing else "r"
    if link.recv() == "make":
        client = connect(path)
        weights = client.create("weights", size, resident=0)
        piece = np.random.default_rng(0).integers(0, 256, 64 * MiB, dtype=np.uint8)
        for offset in range(0, size, piece.size):
            weights.copy_from_host(piece, offset=offset)
        if not writing:
            weights.close()
            weights = client.open("weights", same_address=True)
    else:
        client = connect(path)
        weights = client.open("weights", access=access, same_address=True, wait=60)
    first = weights.to_host("uint8", 1 * MiB)
    now = time.monotonic()
    out = np.empty(64 * MiB, np.uint8)
    for offset in range(0, size, out.size):
        weights.copy_to_host(out, offset=offset)
    link.send((weights.address, int(first[12345]), now, time.monotonic() - now))
    link.recv()


def use(driver: str, size: int) -> None:
    """Open the driver with memory enough for `size` bytes."""
    if driver == "host":
        remap.use("host", memory=size + 256 * MiB)
    else:
        remap.use(driver)


def succession(part: Part, writing: bool, size: int = GiB, runs: int = 4) -> dict[str, Any]:
    """Return the milliseconds from a worker's SIGKILL to its successor's first read of the weights."""
    times: list[float] = []
    passes: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        path = part.broker(directory)
        workers = [part.start(work, path, size, writing) for _ in range(runs + 1)]
        for worker in workers:
            worker.hear("a worker to import remap")
        workers[0].tell("make")
        before = workers[0].hear("the first worker to make the weights")
        for worker, successor in pairwise(workers):
            killed = time.monotonic()
            worker.process.kill()
            successor.tell("go")
            found = successor.hear("a successor to read the weights")
            assert found[:2] == before[:2], "the same bytes at the same address"
            times.append((found[2] - killed) * 1000)
            passes.append(found[3] * 1000)
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
    link.send("ready")
    for _ in range(repeats):
        exported: Any = link.recv()
        if not isinstance(
            exported, remap.Exported
        ):  # the raw calls: a descriptor by its ticket, and the size
            raw_open(exported[0], exported[1], link)
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


def open_cost(part: Part, repeats: int = 20) -> dict[str, Any]:
    """Return the milliseconds from asking to the first use in another process, over the raw calls and over remap."""
    from multiprocessing.reduction import DupFd

    size = 10 * GiB if part.driver == "cuda" else 64 * MiB
    child = part.start(importing, 2 * repeats)
    child.hear("the importer to be ready")
    raw: list[float] = []
    own: list[float] = []
    whole: list[float] = []
    raw_driver: Any = remap.driver()
    with remap.allocate(size, resident=0, shareable="posix_fd") as buffer:
        for _ in range(repeats):
            start = time.perf_counter_ns()
            handle = raw_driver.retain(buffer.address)
            fd = raw_driver.export_handle(handle, remap.HandleType.POSIX_FD)
            raw_driver.release(handle)
            exporting = (time.perf_counter_ns() - start) / 1000
            child.tell((DupFd(fd), size))
            raw.append(exporting + child.hear("an import by the raw calls"))
            os.close(fd)
            start = time.perf_counter_ns()
            with remap.export(buffer) as exported:
                exporting = (time.perf_counter_ns() - start) / 1000
                child.tell(exported)
                own.append(exporting + child.hear("an import by remap"))
            whole.append((time.perf_counter_ns() - start) / 1000)
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
        exports: list[remap.Exported] = link.recv()
        count = exports[0].size // 4
        add = VectorAdd()
        buffers = [remap.open(one, access="rw", accessing=[0]) for one in exports]
        ranges: list[tuple[int, int]] = []
        for one in exports:
            fds: Any = one.handles()
            with fds:
                handle = raw_driver.import_handle(fds.numbers[0], remap.HandleType.POSIX_FD)
            address = raw_driver.reserve(one.size)
            raw_driver.map(address, one.size, handle)
            raw_driver.release(handle)
            raw_driver.set_access(address, one.size, [(device.location, remap.Access.READ_WRITE)])
            ranges.append((address, one.size))
        own: list[float] = []
        raw: list[float] = []
        for _ in range(5):
            own.append(add.bandwidth(buffers[0].address, buffers[1].address, buffers[2].address, count))
            raw.append(add.bandwidth(ranges[0][0], ranges[1][0], ranges[2][0], count))
        for address, size in ranges:
            raw_driver.unmap(address, size)
            raw_driver.free_range(address, size)
        for buffer in buffers:
            buffer.close()
        add.stream.close()
        add.module.close()
    link.send((statistics.median(own), statistics.median(raw)))


def peer_rate(part: Part, size: int = GiB) -> dict[str, Any]:
    """Return the GB/s of a vector add on device 0 over memory of another process on device 1, and by raw calls."""
    if part.driver != "cuda" or len(remap.devices()) < 2:
        return {"not measured": "it takes two GPUs"}
    child = part.start(add_over_peer)
    buffers = [remap.allocate(size, resident=1, shareable="posix_fd", poison=True) for _ in range(3)]
    child.tell([remap.export(buffer) for buffer in buffers])
    own, raw = child.hear("the vector adds")
    for buffer in buffers:
        buffer.close()
    return {"remap, GB/s": own, "raw calls, GB/s": raw, "ratio": own / raw}


PARTS: dict[str, tuple[str, Callable[[Part], dict[str, Any]]]] = {
    "broker": ("broker", broker_rate),
    "reader": ("successor of a reader", lambda part: succession(part, writing=False)),
    "writer": ("successor of a writer", lambda part: succession(part, writing=True)),
    "open": ("open", open_cost),
    "peer": ("vector add over the memory of another process on a peer", peer_rate),
}


def main() -> int:
    """Measure, say what was found at once, and write it all; return 1 if a part failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", choices=("host", "cuda"), default="host")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be given several times")
    parser.add_argument("--limit", type=float, default=20, help="seconds that one part may take")
    arguments = parser.parse_args()
    remap.use(arguments.driver)
    figures: dict[str, Any] = {}
    failed = False
    for name in arguments.only or PARTS:
        title, measure = PARTS[name]
        start = time.monotonic()
        try:
            with Part(arguments.driver, arguments.limit) as part:
                figures[title] = measure(part)
        except (TooLateError, RuntimeError) as error:
            failed = True
            figures[title] = {"failed": str(error)}
        took = time.monotonic() - start
        print(f"{name}, {took:.1f} s: {json.dumps(figures[title])}", flush=True)
    write("sharing" if not arguments.only else f"sharing-{'-'.join(arguments.only)}", figures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
