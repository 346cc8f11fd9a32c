"""Traces hear launches that were made before, and leave nothing in those that are made after."""

from __future__ import annotations

import numpy as np

import remap
from remap import MiB


@remap.kernel
def add_one(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Add one to each element."""
    i = remap.index_1d()
    if i < len(x):
        out[i] = x[i] + 1


def test_launches_that_are_kept_are_heard() -> None:
    """A launch repeated before, during and after a trace is recorded during it, once each time."""
    with (
        remap.DeviceBuffer.from_host(np.arange(64, dtype="int32")) as x,
        remap.DeviceBuffer.zeroed(64, "int32") as out,
    ):
        for _ in range(3):
            add_one.launch(x, out, grid=1, block=64)
        with remap.trace() as trace:
            for _ in range(3):
                add_one.launch(x, out, grid=1, block=64)
        for _ in range(3):
            add_one.launch(x, out, grid=1, block=64)
        assert [call.name for call in trace.calls].count("launch") == 3
        assert out.to_host().tolist() == list(range(1, 65))


def test_graphs_made_before_are_heard() -> None:
    """A graph that was instantiated before the trace is heard when it is launched during it."""
    graph = remap.Graph(remap.device())
    with graph, remap.allocate(2 * MiB) as buffer:
        graph.fill(buffer, 1)
        with graph.instantiate() as executable:
            executable.launch()
            with remap.trace() as trace:
                executable.launch()
            executable.launch()
            remap.device().synchronize()
    assert [call.name for call in trace.calls].count("graph_launch") == 1
