"""What graphs cost: a launch over the raw call, the footprint over many launches, and building large graphs.

Run with `PYTHONPATH=src:. python benchmarks/graphs.py`; `REMAP_DRIVER` picks the driver. Expected before the first
run: a launch of the allocating graph at most 1.3 times the raw cuGraphLaunch; 1,000 launches hold one graph's memory;
on the host driver 10,000 nodes are built and instantiated in under 2 s, at the cost a node of 1,000.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

import remap
from benchmarks.record import interleaved_us, write
from remap import MiB

SIZE = 64 * MiB
SOURCE = 'extern "C" __global__ void touch(unsigned char *data, long long value) { data[0] = value; }'


def touch_kernel(module: remap.Module) -> remap.Kernel:
    """Return a kernel that writes one byte."""
    kernel = module.function("touch")

    @kernel.host
    def touch(launch: object, data: remap.Pointer, value: int) -> None:
        del launch
        data.write("uint8", 1)[0] = value

    return kernel


def build(graph: remap.Graph, kernel: remap.Kernel, buffers: list[remap.Buffer]) -> None:
    """Allocate, write to the memory and to each buffer, and free."""
    a = graph.alloc(SIZE)
    nodes = [graph.launch(kernel, one, np.int64(1), grid=1, block=1, after=[a]) for one in (a, *buffers)]
    graph.free(a, after=nodes)


def launches() -> dict[str, Any]:
    """Compare launches with the raw calls, taking turns, with and without buffers among the arguments."""
    driver: Any = remap.driver()
    if driver.name == "cuda":
        from cuda.bindings import driver as cu

        raw: Any = cu.cuGraphLaunch
    else:
        raw = driver.graph_launch
    figures: dict[str, Any] = {}
    with remap.load(remap.source(SOURCE)) as module, remap.Stream(0) as stream:
        kernel = touch_kernel(module)
        for count in (0, 2):
            buffers = [remap.allocate(2 * MiB) for _ in range(count)]
            with remap.Graph(0) as graph:
                build(graph, kernel, buffers)
                with graph.instantiate() as executable:
                    executable.launch(stream)
                    stream.synchronize()
                    handle, queue = executable._handle, stream.handle
                    times = interleaved_us(
                        {
                            "raw": lambda handle=handle, queue=queue: raw(handle, queue),
                            "between": stream.synchronize,
                            "remap": lambda executable=executable: executable.launch(stream),
                            "after": stream.synchronize,
                        },
                        1000,
                    )
                    figures[f"{count} buffers, µs"] = {"raw": times["raw"], "remap": times["remap"]}
                    figures[f"{count} buffers, ratio"] = times["remap"] / times["raw"]
            for one in buffers:
                one.close()
        with remap.Graph(0) as graph:
            build(graph, kernel, [])
            with graph.instantiate() as executable, remap.graph_memory(0).watch() as watch:
                for _ in range(1000):
                    executable.launch(stream)
                stream.synchronize()
            figures["footprints over 1,000 launches, bytes"] = sorted(set(watch.series.used))
    remap.graph_memory(0).trim()
    return figures


def building() -> dict[str, Any]:
    """Time building and instantiating graphs of allocations, fills and frees, by number of nodes."""
    figures: dict[str, Any] = {}
    for count in (1000, 10_000, 1000, 10_000):  # the second round counts: the first warms up
        gc.collect()
        start = time.perf_counter()
        with remap.Graph(0) as graph:
            after: list[Any] = []
            for _ in range(count // 4):
                a = graph.alloc(4096, after=after)
                filled = graph.fill(a, 1, after=[a])
                after = [graph.free(a, after=[graph.join(after=[filled]), a])]
            with graph.instantiate():
                seconds = time.perf_counter() - start
        figures[f"{count} nodes, s"] = seconds
        figures[f"{count} nodes, µs a node"] = seconds / count * 1e6
    return figures


if __name__ == "__main__":
    with remap.device(0).current():
        write("graphs", {"launch": launches(), "build": building()})
