"""Kernels in Python as nodes of graphs, over buffers and over memory of the graph."""

from __future__ import annotations

import numpy as np

import remap
from remap.graphs import GraphPool
from remap.sizes import MiB

pytest_plugins = ["remap.testing.stage"]
N = 1000


@remap.kernel
def double(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Write twice what was read."""
    i = remap.index_1d()
    out[i] = x[i] * 2


def test_over_buffers(pool: GraphPool, stream: remap.Stream) -> None:
    """A Python kernel is a node like any other, and sees what its buffers hold at each launch."""
    del pool
    with remap.allocate(2 * MiB) as x, remap.allocate(2 * MiB) as y, remap.Graph(0) as graph:
        source, out = x.array("float32", N), y.array("float32", N)
        graph.launch(double, source, out, grid=4, block=256)
        with graph.instantiate() as executable:
            for turn in range(2):
                values = np.arange(N, dtype=np.float32) + turn
                x.copy_from_host(values)
                executable.launch(stream)
                stream.synchronize()
                assert (y.to_host("float32", N) == values * 2).all()


def test_over_memory_of_the_graph(pool: GraphPool, stream: remap.Stream) -> None:
    """An allocation of the graph is an array argument, between its node and the one that frees it."""
    del pool
    values = np.arange(N, dtype=np.float32)
    out = np.zeros(N, np.float32)
    with remap.Graph(0) as graph:
        a, b = graph.alloc(4 * N), graph.alloc(4 * N)
        copied = graph.copy(a, values, after=[a])
        doubled = graph.launch(
            double, a.array("float32", N), b.array("float32", N), grid=4, block=256, after=[copied, b]
        )
        read = graph.copy(out, b, after=[doubled])
        graph.free(a, after=[doubled])
        graph.free(b, after=[read])
        with graph.instantiate() as executable:
            executable.launch(stream)
            stream.synchronize()
    assert (out == values * 2).all()
