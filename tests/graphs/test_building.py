"""Building graphs: addresses, order, what is refused, and what nodes keep alive (C1, C3, C7; traps 20, 21)."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import remap
from remap import drivers
from remap.drivers.wrappers import Faulty
from remap.errors import ClosedError, InUseError, InvalidValueError, NotSupportedError
from remap.graphs import GraphPool, NodeKind
from remap.sizes import MiB
from remap.testing.bench import wait_until
from remap.testing.graph_kernels import Kernels
from remap.testing.stage import Stage

pytest_plugins = ["remap.testing.stage"]
SIZE = 4 * MiB


def test_addresses_are_known_when_nodes_are_added(pool: GraphPool) -> None:
    """An allocation has its address before anything is instantiated, and takes no memory by that (C1)."""
    with remap.Graph(0) as graph:
        first, second = graph.alloc(SIZE), graph.alloc("4MiB")
        assert first.address
        assert abs(first.address - second.address) >= SIZE
        assert pool.footprint().reserved == 0


def test_a_later_allocation_takes_the_address(pool: GraphPool) -> None:
    """In one graph an allocation that comes after a free gets the same address (C3, T16)."""
    del pool
    with remap.Graph(0) as graph:
        first = graph.alloc(SIZE)
        free = graph.free(first, after=[first])
        assert graph.alloc(SIZE, after=[free]).address == first.address
        assert graph.alloc(SIZE).address != first.address


def test_graphs_have_addresses_of_their_own(pool: GraphPool) -> None:
    """The addresses of graphs that live at the same time never overlap."""
    del pool
    graphs = [remap.Graph(0) for _ in range(8)]
    starts = sorted(graph.alloc(SIZE).address for graph in graphs)
    assert all(b - a >= SIZE for a, b in pairwise(starts))
    for graph in graphs:
        graph.close()


def test_printed(pool: GraphPool, kernels: Kernels) -> None:
    """A graph prints as one line for itself and one for each node, with what it comes after."""
    del pool
    with remap.Graph(0) as graph:
        a = graph.alloc(SIZE)
        filled = graph.fill(a, 1, after=[a])
        added = graph.launch(kernels.add, a, SIZE, 1, grid=SIZE // 256, block=256, after=[filled])
        graph.free(a, after=[added, filled])
        head, *lines = str(graph).splitlines()
        assert head.endswith("of 4 MiB (4 nodes on device 0)")
        assert lines[0] == f"  0 allocate 4 MiB at {a.address:#x}"
        assert lines[2] == "  2 kernel add, after 1"
        assert lines[3] == f"  3 free 4 MiB at {a.address:#x}, after 2, 1"
        assert repr(added) == "<remap node 2 kernel add, after 1>"
        kinds = [node.kind for node in graph.nodes]
        assert kinds == [NodeKind.ALLOCATE, NodeKind.FILL, NodeKind.KERNEL, NodeKind.FREE]


# -- bad input: each is refused, names the rule, and leaves the graph as it was --


def _free_twice(graph: remap.Graph) -> None:
    a = graph.alloc(SIZE)
    graph.free(a, after=[a])
    graph.free(a, after=[a])


def _free_a_buffer(graph: remap.Graph) -> None:
    graph.free(3)  # type: ignore[arg-type]


def _free_before_a_user(graph: remap.Graph) -> None:
    a = graph.alloc(SIZE)
    graph.fill(a, 1, after=[a])
    graph.free(a, after=[a])


def _free_before_the_allocation(graph: remap.Graph) -> None:
    a = graph.alloc(SIZE)
    graph.free(a)


def _free_what_its_graph_frees(graph: remap.Graph) -> None:
    with remap.Graph(0) as other:
        a = other.alloc(SIZE)
        other.free(a, after=[a])
        graph.free(a)


def _use_before_allocation(graph: remap.Graph) -> None:
    a = graph.alloc(SIZE)
    graph.fill(a, 1)


def _use_after_free(graph: remap.Graph) -> None:
    a = graph.alloc(SIZE)
    free = graph.free(a, after=[a])
    graph.fill(a, 1, after=[free])


def _cycle(graph: remap.Graph) -> None:
    a = graph.join(after=[])
    b = graph.join(after=[a])
    graph.order(b, a)


def _itself(graph: remap.Graph) -> None:
    a = graph.join(after=[])
    graph.order(a, a)


def _foreign_node(graph: remap.Graph) -> None:
    with remap.Graph(0) as other:
        graph.join(after=[other.join(after=[])])


def _removed_node(graph: remap.Graph) -> None:
    node = graph.join(after=[])
    graph.remove(node)
    graph.join(after=[node])


def _past_the_end(graph: remap.Graph) -> None:
    a = graph.alloc(SIZE)
    graph.fill(a, 1, offset=1, size=SIZE, after=[a])


def _host_to_host(graph: remap.Graph) -> None:
    graph.copy(np.zeros(4), np.ones(4))


def _remove_beside_memory(graph: remap.Graph) -> None:
    a = graph.alloc(SIZE)
    graph.remove(a)


def _clone_with_memory(graph: remap.Graph) -> None:
    graph.alloc(SIZE)
    graph.clone()


def _child_with_memory(graph: remap.Graph) -> None:
    with remap.Graph(0) as other:
        other.alloc(SIZE)
        graph.child(other)


def _own_child(graph: remap.Graph) -> None:
    itself = graph._graph  # type: ignore[attr-defined] # what `_Counting` stands for
    graph.child(itself)


def _fill_with_no_byte(graph: remap.Graph) -> None:
    a = graph.alloc(SIZE)
    graph.fill(a, 256, after=[a])


@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        (lambda g: g.alloc(0), InvalidValueError, "at least one byte"),
        (lambda g: g.alloc(-1), InvalidValueError, "0 or more"),
        (lambda g: g.alloc(1 << 60), remap.OutOfMemoryError, "in a graph of device 0"),
        (_free_twice, ClosedError, "frees it already"),
        (_free_a_buffer, InvalidValueError, "what a graph has allocated"),
        (_free_before_a_user, InUseError, "node 1 uses it and does not come before"),
        (_free_before_the_allocation, InUseError, "does not come before"),
        (_free_what_its_graph_frees, ClosedError, "its own graph frees it already"),
        (_use_before_allocation, InUseError, "does not come after the allocation"),
        (_use_after_free, ClosedError, "frees it"),
        (_cycle, InvalidValueError, "cycle"),
        (_itself, InvalidValueError, "cycle"),
        (_foreign_node, InvalidValueError, "no node of this graph"),
        (_removed_node, ClosedError, "removed"),
        (_past_the_end, InvalidValueError, "there are"),
        (_host_to_host, InvalidValueError, "memory of devices"),
        (_fill_with_no_byte, InvalidValueError, "0 to 255"),
        (_remove_beside_memory, NotSupportedError, "memory nodes"),
        (_clone_with_memory, NotSupportedError, "cannot be cloned"),
        (_child_with_memory, NotSupportedError, "does not copy"),
        (_own_child, InvalidValueError, "cycle"),
        (lambda g: g.condition(2), InvalidValueError, "0 or 1"),
    ],
)
def test_bad_input(
    pool: GraphPool, act: Callable[[remap.Graph], Any], kind: type[Exception], words: str
) -> None:
    """What no graph can be is refused with its rule, and adds no node."""
    with remap.Graph(0) as graph:
        seen: list[int] = []
        with pytest.raises(kind, match=words):
            act(_Counting(graph, seen))  # type: ignore[arg-type]
        assert len(graph) == (seen[-1] if seen else 0)
        graph.join(after=[])  # it goes on
    assert pool.footprint().reserved == 0


class _Counting:
    """A graph that notes how many nodes there were when each call began."""

    def __init__(self, graph: remap.Graph, seen: list[int]) -> None:
        self._graph = graph
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        self._seen.append(len(self._graph))
        return getattr(self._graph, name)


def test_closed_graph(pool: GraphPool) -> None:
    """A closed graph refuses nodes and executables; closing again does nothing."""
    del pool
    graph = remap.Graph(0)
    a = graph.alloc(SIZE)
    graph.close()
    graph.close()
    for act in (lambda: graph.alloc(SIZE), lambda: graph.free(a, after=[a]), graph.instantiate, graph.clone):
        with pytest.raises(ClosedError):
            act()


def test_one_executable_of_a_graph_with_memory(pool: GraphPool) -> None:
    """A graph with memory nodes has one executable at a time, one without may have several (T16)."""
    del pool
    with remap.Graph(0) as graph:
        node = graph.join(after=[])
        with graph.instantiate(), graph.instantiate():
            pass
        graph.alloc(SIZE, after=[node])
        with graph.instantiate(), pytest.raises(NotSupportedError, match="one executable at a time"):
            graph.instantiate()
        graph.instantiate().close()


def test_driver_failures_leave_the_graph_as_it_was(stage: Stage, pool: GraphPool, kernels: Kernels) -> None:
    """Any call of the driver that fails while a graph is built adds nothing (invariant 5)."""
    del pool
    with remap.Graph(0) as graph:
        a = graph.alloc(SIZE)
        acts: dict[str, Callable[[], object]] = {
            "graph_add_allocate": lambda: graph.alloc(SIZE),
            "graph_add_free": lambda: graph.free(a, after=[a]),
            "graph_add_fill": lambda: graph.fill(a, 1, after=[a]),
            "graph_add_copy": lambda: graph.copy(a, np.zeros(4), after=[a]),
            "graph_add_kernel": lambda: graph.launch(kernels.hold, 1, grid=1, block=1),
            "graph_add_host": lambda: graph.host(print),
            "graph_add_empty": lambda: graph.join(after=[]),
            "graph_instantiate": graph.instantiate,
        }
        for name, act in acts.items():
            before = str(graph)
            stage.faulty.fail(name)
            with pytest.raises(remap.DriverError):
                act()
            assert str(graph) == before, name
        assert list(stage.faulty.refused) == list(acts)
        graph.free(a, after=[a])


# -- what is kept alive --


def test_nodes_keep_what_they_use(pool: GraphPool, stream: remap.Stream, kernels: Kernels) -> None:
    """Buffers and arrays that only nodes refer to live until graph and executable go (trap 20)."""
    del pool
    buffer = remap.allocate(SIZE)
    array = np.full(16, 7, np.uint8)
    known = weakref.ref(buffer)
    graph = remap.Graph(0)
    copied = graph.copy(buffer, array)
    graph.launch(kernels.add, buffer, 16, 1, grid=1, block=16, after=[copied])
    executable = graph.instantiate()
    graph.close()
    del buffer, array, graph, copied
    gc.collect()
    executable.launch(stream)
    stream.synchronize()
    kept = known()
    assert kept is not None
    assert kept.to_host(shape=16).tolist() == [8] * 16
    executable.close()
    kept.close()


def test_a_closed_buffer_is_refused_at_launch(pool: GraphPool, stream: remap.Stream) -> None:
    """A launch needs the buffers of its nodes; one that was closed is named, and nothing runs (invariant 4)."""
    del pool
    with remap.Graph(0) as graph, remap.allocate(SIZE) as other:
        buffer = remap.allocate(SIZE)
        graph.fill(other, 1)
        graph.fill(buffer, 1)
        other.fill(0)
        with graph.instantiate() as executable:
            buffer.close()
            with pytest.raises(ClosedError, match="buffer"):
                executable.launch(stream)
            stream.synchronize()
            assert not other.to_host().any()


def test_dropped_allocations_are_reported_and_freed(pool: GraphPool, stream: remap.Stream) -> None:
    """Memory that a launch left, of which nobody holds an object any more, warns and is given back (trap 21)."""
    graph = remap.Graph(0)
    a = graph.alloc(SIZE)
    executable = graph.instantiate()
    executable.launch(stream)
    stream.synchronize()
    executable.close()
    graph.close()
    pool.trim()
    assert pool.footprint().used >= SIZE
    with pytest.warns(ResourceWarning, match="graph memory .* was never closed"):
        del a, graph, executable
        gc.collect()
    remap.collect()
    pool.trim()
    assert pool.footprint().reserved == 0


class Meanwhile(Faulty):
    """A driver that lets another thread try something as a node is about to be added."""

    other: Callable[[], object] | None = None

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **keywords: Any) -> Any:
            other = self.other
            if other is not None and name in {"graph_add_fill", "graph_add_copy"}:
                self.other = None
                thread = threading.Thread(target=other)
                thread.start()
                thread.join(0.2)  # it may have to wait for this one
            return call(*arguments, **keywords)

        return made


@pytest.mark.parametrize("node", ["fill", "copy"])
def test_memory_that_another_thread_takes(node: str) -> None:
    """What a node was checked against holds until it is added: who takes the memory comes before or after that (13)."""
    driver = Meanwhile(drivers.open())
    remap.use(driver)
    try:
        with remap.ElasticBuffer(4 * SIZE, device=0, chunk=SIZE) as buffer, remap.Graph(0) as graph:
            buffer.resize(2 * SIZE)
            driver.other = lambda: buffer.resize(SIZE)
            if node == "fill":
                graph.fill(buffer, 1, offset=SIZE, size=SIZE)
            else:
                graph.copy(buffer, buffer, offset=SIZE, size=SIZE)
            assert driver.other is None
            assert wait_until(lambda: buffer.size == SIZE)
    finally:
        drivers.close()
