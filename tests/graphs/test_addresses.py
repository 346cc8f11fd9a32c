"""Random graphs against a plain model: which allocations may share addresses, and that none ever shares bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import remap
from remap.graphs import Allocation, GraphPool, Node
from remap.sizes import KiB, MiB

pytest_plugins = ["remap.testing.stage"]
_SETTINGS = settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@dataclass(eq=False)
class Life:
    """One allocation: its node, the node that frees it, and the nodes that come before it."""

    node: Allocation
    before: set[int]
    free: Node | None = None


@dataclass
class Model:
    """The order of a graph's nodes as plain sets, and the lives of its allocations."""

    before: dict[int, set[int]] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)

    def note(self, node: Node) -> None:
        """Note a node and everything that comes before it."""
        self.before[node.number] = {one.number for one in node.after}.union(
            *(self.before[one.number] for one in node.after)
        )

    def ends_before(self, one: Life, other: Life) -> bool:
        """Tell whether one allocation is always freed before the other is made."""
        return one.free is not None and one.free.number in self.before[other.node.number]


def overlap(a: Allocation, b: Allocation) -> bool:
    """Tell whether two allocations share an address."""
    return a.address < b.address + b.size and b.address < a.address + a.size


# A step of a random graph: what to do, a size, which live allocation, and which of the latest nodes to come after.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "alloc", "free", "free", "join"]),
        st.integers(0, 4),
        st.integers(0, 100),
        st.sets(st.integers(0, 6), max_size=3),
    ),
    min_size=3,
    max_size=40,
)


def build(graph: remap.Graph, steps: list[tuple[str, int, int, set[int]]], sizes: list[int]) -> Model:
    """Build a random graph: every allocation is filled with a byte of its own right after it is made."""
    model, nodes = Model(), list[Node]()
    for what, size, which, back in steps:
        after = [nodes[-1 - step] for step in back if step < len(nodes)]
        open_lives = [life for life in model.lives if life.free is None]
        if what == "alloc":
            made = graph.alloc(sizes[size % len(sizes)], after=after)
            model.note(made)
            model.lives.append(Life(made, model.before[made.number]))
            filled = graph.fill(made, len(model.lives) % 251 + 1, after=[made])
            model.note(filled)
            nodes += [made, filled]
        elif what == "free" and open_lives:
            life = open_lives[which % len(open_lives)]
            users = [graph.nodes[number] for number in life.node._users]
            life.free = graph.free(life.node, after=dict.fromkeys([*after, *users, life.node]))
            model.note(life.free)
            nodes.append(life.free)
        elif what == "join":
            joined = graph.join(after=after)
            model.note(joined)
            nodes.append(joined)
    return model


@_SETTINGS
@given(steps=STEPS, mixed=st.booleans())
def test_only_lifetimes_that_cannot_overlap_share_addresses(
    pool: GraphPool, steps: list[tuple[str, int, int, set[int]]], mixed: bool
) -> None:
    """Two allocations share an address only if one is always freed before the other is made."""
    del pool
    sizes = [512, 4 * KiB, 300 * KiB, 2 * MiB, 5 * MiB] if mixed else [2 * MiB]
    with remap.Graph(0) as graph:
        model = build(graph, steps, sizes)
        for index, one in enumerate(model.lives):
            for other in model.lives[:index]:
                if overlap(one.node, other.node):
                    assert model.ends_before(other, one), f"{one.node} lies on {other.node}\n{graph}"


@_SETTINGS
@given(steps=STEPS)
def test_freed_addresses_are_used_again(pool: GraphPool, steps: list[tuple[str, int, int, set[int]]]) -> None:
    """Of equal sizes, an allocation gets new addresses only where all old ones may still be in use (host driver)."""
    del pool
    if remap.driver().name != "host":
        return  # how far a GPU's driver looks is its own business
    with remap.Graph(0) as graph:
        model = build(graph, steps, [2 * MiB])
        for index, one in enumerate(model.lives):
            earlier = model.lives[:index]
            known = {other.node.address for other in earlier}
            taken = {other.node.address for other in earlier if not model.ends_before(other, one)}
            assert (one.node.address in known) == bool(known - taken), f"{one.node}\n{graph}"


@settings(_SETTINGS, max_examples=25)
@given(steps=STEPS, mixed=st.booleans())
def test_no_allocation_loses_its_bytes(
    pool: GraphPool, steps: list[tuple[str, int, int, set[int]]], mixed: bool
) -> None:
    """However nodes overlap in time, each allocation holds what was written to it until it is freed."""
    sizes = [512, 4 * KiB, 300 * KiB, 2 * MiB] if mixed else [2 * MiB]
    with remap.Graph(0) as graph, remap.Stream(0) as stream:
        model, outs = Model(), list[tuple[int, np.ndarray]]()
        nodes: list[Node] = []
        for what, size, which, back in steps:
            after = [nodes[-1 - step] for step in back if step < len(nodes)]
            open_lives = [life for life in model.lives if life.free is None]
            if what == "alloc":
                made = graph.alloc(sizes[size % len(sizes)], after=after)
                value = len(model.lives) % 251 + 1
                filled = graph.fill(made, value, after=[made])
                out = np.zeros(made.size, np.uint8)
                read = graph.copy(out, made, after=[filled])
                outs.append((value, out))
                model.lives.append(Life(made, set()))
                nodes += [made, filled, read]
            elif what == "free" and open_lives:
                life = open_lives[which % len(open_lives)]
                users = [graph.nodes[number] for number in life.node._users]
                life.free = graph.free(life.node, after=dict.fromkeys([*after, *users]))
                nodes.append(life.free)
        left = [life.node for life in model.lives if life.free is None]
        with graph.instantiate() as executable:
            for _ in range(2):
                executable.launch(stream)
                stream.synchronize()
                for value, out in outs:
                    assert (out == value).all(), str(graph)
                    out[:] = 0
                for allocation in left:
                    allocation.memory.close()
    pool.trim()
    assert pool.footprint().reserved == 0
