"""Graph memory that is empty before and after, streams, and the kernels that the tests launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import remap
from remap.graphs import GraphPool
from remap.testing.graph_kernels import SOURCE, Kernels
from remap.testing.stage import Stage


@pytest.fixture
def pool(stage: Stage) -> Iterator[GraphPool]:
    """Give the graph memory of device 0, which nothing is in, and where the test must leave nothing."""
    del stage  # it looks at what is left after this fixture
    found = remap.graph_memory(0)
    found.trim()
    found.reset_high()
    assert found.footprint() == remap.graphs.GraphFigures(0, 0, 0, 0)
    yield found
    remap.device(0).synchronize()
    remap.collect()
    found.trim()
    figures = found.footprint()
    assert (figures.used, figures.reserved) == (0, 0), "the test has left graph memory behind"


@pytest.fixture
def streams(pool: GraphPool) -> Iterator[Callable[[], remap.Stream]]:
    """Give what makes streams that are closed at the end."""
    del pool
    with ExitStack() as held:
        yield lambda: held.enter_context(remap.Stream(0))


@pytest.fixture
def stream(streams: Callable[[], remap.Stream]) -> remap.Stream:
    """Give one stream."""
    return streams()


@pytest.fixture
def kernels(pool: GraphPool) -> Iterator[Kernels]:
    """Give the kernels, loaded on device 0."""
    del pool
    with remap.load(remap.source(SOURCE), device=0) as module:
        found = Kernels(module)
        yield found
        found.release()
        remap.device(0).synchronize()
