"""Random launch schedules against a plain model: which runs share memory, and when the footprint grows."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import remap
from remap.graphs import Executable, Graph, GraphPool
from remap.sizes import MiB
from remap.testing.graph_kernels import Kernels

pytest_plugins = ["remap.testing.stage"]
SIZE = 64 * MiB  # the size for which the figures of hardware are known
STREAMS = 3


@dataclass(eq=False)
class Slot:
    """One graph's worth of physical memory: the run that used it last, and whether an unfreed allocation holds it."""

    last: int = -1
    held: bool = False


@dataclass
class Model:
    """Runs as plain sets of the runs before them. Nothing ends by itself: kernels hold until they are released."""

    slots: list[Slot] = field(default_factory=list)
    before: list[set[int]] = field(default_factory=list)
    reached: list[set[int]] = field(default_factory=lambda: [set() for _ in range(STREAMS)])
    ended: set[int] = field(default_factory=set)
    bound: dict[int, Slot] = field(default_factory=dict)
    latest: dict[int, int] = field(default_factory=dict)

    def launch(self, graph: int, stream: int, leaves: bool) -> tuple[bool, bool]:
        """Launch a graph; tell whether the footprint grows, and whether that follows from the rules alone."""
        known = set(self.reached[stream])
        if graph in self.latest:
            last = self.latest[graph]
            known |= {last} | self.before[last]
        run = len(self.before)
        self.before.append(known)
        usable = [slot for slot in self.slots if self._free(slot, known)]
        slot = self.bound.get(graph)
        grows = not usable
        # It is the rules' alone where all that is there can be used, or nothing of it.
        certain = grows or len(usable) == sum(not slot.held for slot in self.slots)
        if slot is None or slot not in usable:
            slot = usable[0] if usable else Slot()
            if grows:
                self.slots.append(slot)
        slot.last, slot.held = run, leaves
        self.bound[graph] = slot
        self.latest[graph] = run
        self.reached[stream] = known | {run}
        return grows, certain

    def _free(self, slot: Slot, known: set[int]) -> bool:
        return not slot.held and (slot.last < 0 or slot.last in known or slot.last in self.ended)

    def wait(self, stream: int, other: int) -> None:
        """Let a stream come after another."""
        self.reached[stream] |= self.reached[other]

    def settle(self) -> None:
        """Let everything end."""
        self.ended = set(range(len(self.before)))

    def free(self, graph: int) -> None:
        """Free what a graph has left, after everything has ended."""
        self.bound[graph].held = False

    def trim(self) -> None:
        """Drop the slots that nothing uses any more."""
        kept = [slot for slot in self.slots if slot.held or slot.last not in self.ended]
        self.slots = kept
        self.bound = {graph: slot for graph, slot in self.bound.items() if slot in kept}


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("launch"), st.integers(0, 4), st.integers(0, STREAMS - 1)),
        st.tuples(st.just("launch"), st.integers(0, 4), st.integers(0, STREAMS - 1)),
        st.tuples(st.just("wait"), st.integers(0, STREAMS - 1), st.integers(0, STREAMS - 1)),
        st.tuples(st.just("settle"), st.just(0), st.just(0)),
        st.tuples(st.just("trim"), st.just(0), st.just(0)),
    ),
    min_size=1,
    max_size=14,
)


@settings(
    # On a GPU kernels hold for a set time, as nothing can release them.
    max_examples=25 if os.environ.get("REMAP_DRIVER", "host") == "host" else 8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(actions=ACTIONS)
def test_schedules(
    pool: GraphPool,
    streams: Callable[[], remap.Stream],
    kernels: Kernels,
    actions: list[tuple[str, int, int]],
) -> None:
    """After each step the footprint is the model's: runs share memory if a stream, an event or a wait orders them.

    Graphs 0 to 2 free what they allocate, 3 and 4 leave it. On CUDA, whose choice among memory that may be used again
    is its own, a step counts where the rules alone decide.
    """
    exact = remap.driver().name == "host"
    kernels.gate.clear()
    try:
        with ExitStack() as held:
            Schedule(held, kernels, streams, exact).run(actions, pool)
    finally:
        kernels.release()
        remap.device(0).synchronize()
        pool.trim()
    assert pool.footprint().reserved == 0


class Schedule:
    """Five graphs, three streams, and the model beside them."""

    def __init__(
        self, held: ExitStack, kernels: Kernels, streams: Callable[[], remap.Stream], exact: bool
    ) -> None:
        self._kernels = kernels
        self._exact = exact
        self._streams = [streams() for _ in range(STREAMS)]
        self._graphs: list[tuple[Graph, Executable]] = []
        for number in range(5):
            graph = held.enter_context(remap.Graph(0))
            a = graph.alloc(SIZE)
            kernel = graph.launch(kernels.hold, kernels.ticks, grid=1, block=1, after=[a])
            if number < 3:
                graph.free(a, after=[kernel])
            self._graphs.append((graph, held.enter_context(graph.instantiate())))
        self._model = Model()

    def run(self, actions: list[tuple[str, int, int]], pool: GraphPool) -> None:
        """Take every step, and compare after each."""
        model, certain = self._model, True
        for what, first, second in actions:
            if what == "launch":
                leaves = first >= 3
                if leaves and first in model.bound and model.bound[first].held:
                    self._settle()
                    self._graphs[first][0].allocations[0].memory.close()
                    model.free(first)
                if len(model.slots) >= 7:  # what the devices of the tests have room for
                    continue
                before = pool.footprint().used
                grows, sure = model.launch(first, second, leaves)
                self._graphs[first][1].launch(self._streams[second])
                if self._exact or (certain and sure):
                    assert (pool.footprint().used > before) == grows
            elif what == "wait" and first != second:
                self._streams[first].wait(self._streams[second])
                model.wait(first, second)
            elif what == "settle":
                self._settle()
                certain = self._exact
            elif what == "trim":
                pool.trim()
                model.trim()
            if self._exact:
                figures = pool.footprint()
                assert figures.used == figures.reserved == SIZE * len(model.slots)
        self._settle()
        for graph, _ in self._graphs[3:]:
            (allocation,) = graph.allocations
            if allocation._memory is not None:
                allocation._memory.close()

    def _settle(self) -> None:
        self._kernels.release()
        remap.device(0).synchronize()
        self._kernels.gate.clear()
        self._model.settle()
