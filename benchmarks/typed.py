"""What each kind of memory costs for one pass from NumPy through a kernel and back, and what releasing memory costs.

Run with `PYTHONPATH=src:. python benchmarks/typed.py`, on either driver; `python benchmarks/tables.py` then writes the
figures into docs/memory-kinds.md. Expected on an H200 before the first run: copies through pinned memory twice as fast
as pageable ones for 64 MiB and limited by the link (55 GB/s); pinned memory read in place about as fast as copying it;
managed memory without prefetch the slowest of all for 64 MiB. Release of a DeviceBox under a running kernel below
20 µs; a DeviceBuffer waits for it; after a synchronisation both below 20 µs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

import remap
from benchmarks.record import median_us, write
from remap import KiB, MiB, kernels
from remap.kernels import Pointer

SIZES = {"4 KiB": 4 * KiB, "1 MiB": MiB, "64 MiB": 64 * MiB}
RUNNING = 0.3  # seconds for which work is under way while memory is released


def add(launch: object, a: Pointer, b: Pointer, c: Pointer, n: int) -> None:
    """Do what `vector_add` does, on the host driver."""
    c.write("float32", int(n))[:] = a.read("float32", int(n)) + b.read("float32", int(n))


def passes(kernel: remap.Kernel, size: int, stack: ExitStack) -> dict[str, Callable[[], None]]:
    """Return, for each kind of memory, one pass: from the array `a`, through the kernel, into the array `r`."""
    n = size // 4
    device = kernel.module.device
    shape: dict[str, Any] = {"grid": -(-n // 256), "block": 256}
    a, r = np.random.default_rng(0).random(n, np.float32), np.empty(n, np.float32)
    x = stack.enter_context(remap.DeviceBuffer.empty(n, device=device))
    y = stack.enter_context(remap.DeviceBuffer.empty(n, device=device))
    sent = stack.enter_context(remap.pinned(n))
    received = stack.enter_context(remap.pinned(n))
    stream = stack.enter_context(remap.Stream(device))

    def launch(source: Any, target: Any) -> None:
        kernel.launch(source, source, target, n, **shape, stream=stream)

    def explicit() -> None:
        x.copy_from_host(a, stream=stream)
        launch(x, y)
        y.copy_to_host(r, stream=stream)
        stream.synchronize()

    def pinned_copies() -> None:  # for programs whose arrays live in pinned memory
        x.copy_from(sent, stream=stream)
        launch(x, y)
        received.copy_from(y, stream=stream)
        stream.synchronize()

    def pinned_in_place() -> None:
        launch(sent, received)
        stream.synchronize()

    found: dict[str, Callable[[], None]] = {
        "explicit copies": explicit,
        "explicit copies, pinned": pinned_copies,
        "pinned, in place": pinned_in_place,
    }
    if device.capabilities["managed_memory"]:
        one, two = stack.enter_context(remap.managed(n)), stack.enter_context(remap.managed(n))
        # Held as plain arrays: a view by remap would wait for the device at each pass.
        into, out = one.numpy(), two.numpy()

        def managed() -> None:
            into[:] = a
            launch(one, two)
            stream.synchronize()
            r[:] = out

        def managed_ahead() -> None:
            into[:] = a
            one.prefetch(device, stream=stream)
            two.prefetch(device, stream=stream)
            launch(one, two)
            two.prefetch(remap.Host(), stream=stream)
            stream.synchronize()
            r[:] = out

        found |= {"managed": managed, "managed, prefetched": managed_ahead}
    if device.capabilities["hmm"] or device.capabilities["ats"]:

        def by_reference() -> None:
            launch(a, r)
            stream.synchronize()

        found["host arrays by reference"] = by_reference
    return found


def kinds(kernel: remap.Kernel) -> dict[str, dict[str, float]]:
    """Return the median microseconds of a pass by size and kind."""
    figures: dict[str, dict[str, float]] = {}
    for name, size in SIZES.items():
        with ExitStack() as stack:
            calls = passes(kernel, size, stack)
            figures[name] = {
                kind: round(median_us(call, 200 if size <= MiB else 20), 1) for kind, call in calls.items()
            }
            calls.clear()  # views of managed memory, which would keep it from closing
    return figures


def releases() -> dict[str, float]:
    """Return the microseconds of a close: under a kernel that runs for 300 ms, and after a synchronisation."""
    figures: dict[str, float] = {}
    ticks = int(remap.device(0).properties.clock_khz * 1000 * RUNNING)
    with (
        remap.load(kernels.shipped("spin"), device=0) as module,
        remap.Stream(0) as stream,
        remap.DeviceBuffer.zeroed(2, "uint64", device=0) as stamps,
    ):
        spin = module.function("spin")
        spin.host(lambda *_: time.sleep(RUNNING))
        makers: dict[str, Callable[[], Any]] = {
            "DeviceBox": lambda: remap.DeviceBox.empty(MiB, "uint8", stream=stream),
            "DeviceBuffer": lambda: remap.DeviceBuffer.empty(MiB, "uint8", device=0),
        }
        for name, make in makers.items():
            for busy in (False, True):
                # Closing a buffer waits, and so the next one would be idle.
                count = 1 if busy and name == "DeviceBuffer" else 32
                times: list[float] = []
                for _ in range(5):
                    memory = [make() for _ in range(count)]
                    times += _closes(memory, stream, spin if busy else None, stamps, ticks)
                state = "work under way" if busy else "idle"
                figures[f"{name}, {state}"] = round(statistics.median(times), 1)
    return figures


def _closes(
    memory: list[Any], stream: remap.Stream, spin: remap.Kernel | None, stamps: Any, ticks: int
) -> list[float]:
    """Return the microseconds of closing each, after `spin` and a fill of it behind that, or with nothing under way."""
    for one in memory:
        one.fill(1, stream=stream)
    stream.synchronize()
    if spin is not None:
        spin.launch(memory[0], stamps, ticks, grid=1, block=1, stream=stream)
        for one in memory:
            one.fill(2, stream=stream)
    times: list[float] = []
    for one in memory:
        start = time.perf_counter_ns()
        one.close()
        times.append((time.perf_counter_ns() - start) / 1000)
    stream.synchronize()
    return times


def chains(kernel: remap.Kernel) -> dict[str, float]:
    """Return the microseconds of a chain of copy, kernel and copy, and of the same calls one by one."""
    a = np.ones(1024, np.float32)
    shape: dict[str, Any] = {"grid": 4, "block": 256}
    chain = remap.chain(kernel.module.device)
    x, y = chain.copy_in(a), chain.empty(1024)
    chain.launch(kernel, x, x, y, 1024, **shape)
    chain.copy_out(y)

    def by_hand() -> None:
        with remap.Stream(kernel.module.device) as stream:
            one = remap.DeviceBox.from_host(a, stream=stream)
            two = remap.DeviceBox.empty(1024, stream=stream)
            kernel.launch(one, one, two, 1024, **shape, stream=stream)
            two.to_host(stream=stream)
            one.close()
            two.close()

    return {
        "chain": round(median_us(lambda: chain.run().wait(), 300), 1),
        "by hand": round(median_us(by_hand, 300), 1),
    }


def main() -> None:
    """Measure, and write the figures."""
    if remap.driver().name == "host":
        remap.use("host", capabilities={"hmm": True})  # every kind of memory that it can have
    with remap.load(kernels.shipped("vector_add"), device=0) as module:
        kernel = module.function("vector_add")
        kernel.host(add)
        figures = {"pass_us": kinds(kernel), "close_us": releases(), "chain_us": chains(kernel)}
    missing = {name: remap.device(0).capabilities[name].reason for name in ("managed_memory", "hmm", "ats")}
    write("typed", {**figures, "missing": {name: why for name, why in missing.items() if why}})


if __name__ == "__main__":
    main()
