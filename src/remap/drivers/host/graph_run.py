"""Executables and their runs: nodes in the order of their dependencies, side by side where that allows it.

A run is one piece of work of the stream that it was launched in. The stream's thread carries it out, and takes further
threads beside it while several nodes that compute or copy are ready at the same time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from remap.drivers.graph_powers import NodeKind
from remap.drivers.host import linux
from remap.drivers.host.graph_heap import Allocation, Heap
from remap.drivers.host.graph_nodes import Graph, Node
from remap.drivers.host.graph_pool import Page, Placing
from remap.drivers.host.guard import context_lost, lose_context
from remap.drivers.host.streams import Need, _StreamThread, failed
from remap.drivers.host.work import Clock, Point, Work
from remap.types import Touched

_MOST_THREADS = 128  # nodes of one run side by side; as many as kernels on a GPU
_LIGHT = frozenset({NodeKind.ALLOCATE, NodeKind.FREE, NodeKind.EMPTY, NodeKind.CHILD})


class Step:
    """A node within a program: what waits for it, and for how many others it waits."""

    __slots__ = ("body", "following", "node", "waits")

    def __init__(self, node: Node, body: Program | None) -> None:
        self.node = node
        self.body = body
        self.following: list[int] = []
        self.waits = 0


class Program:
    """The nodes of a graph as they will run; later changes of the graph do not reach it."""

    def __init__(self, graph: Graph) -> None:
        self.steps: list[Step] = []
        self._flatten(graph, [])
        # With one step at a time ready, nothing can run side by side.
        self._in_order, widest = self._sorted()
        self._single = widest <= 1
        self.allocations: list[Allocation] = []
        self.frees: list[int] = []
        self.touches: list[Touched] | None = []
        for node in self.nodes():
            if node.allocation is not None and node.kind is NodeKind.ALLOCATE:
                self.allocations.append(node.allocation)
            if node.kind is NodeKind.FREE and node.allocation is None:
                self.frees.append(node.frees)
            if node.touches is None:
                self.touches = None
            elif self.touches is not None:
                self.touches += node.touches

    def nodes(self) -> Iterator[Node]:
        """Yield every node, those of bodies included."""
        for step in self.steps:
            yield step.node
            if step.body is not None:
                yield from step.body.nodes()

    def run(self, run: Run) -> None:
        """Carry all steps out."""
        if self._single:
            for step in self._in_order:
                run.take(step)
        else:
            _Crew(self.steps, run).work()

    def _flatten(self, graph: Graph, before: list[int]) -> list[int]:
        """Add the steps of a graph behind others; return those that nothing waits for. A child's are put in place."""
        places: dict[int, int] = {}
        last: set[int] = set(before)
        for number in graph.order.sorted():
            node = graph.nodes[number]
            if node is None:
                continue
            after = [places[other] for other in graph.order.after[number]] or before
            if node.kind is NodeKind.CHILD and node.body is not None:
                after = self._flatten(node.body, after)
            body = Program(node.body) if node.kind is NodeKind.CONDITIONAL and node.body is not None else None
            step = Step(node, body)
            place = len(self.steps)
            self.steps.append(step)
            step.waits = len(set(after))
            for other in set(after):
                self.steps[other].following.append(place)
            places[number] = place
            last.difference_update(after)
            last.add(place)
        return sorted(last)

    def _sorted(self) -> tuple[list[Step], int]:
        """Return the steps in an order that keeps to the edges, and how many were ready at once at most."""
        waits = [step.waits for step in self.steps]
        ready = deque(place for place, count in enumerate(waits) if not count)
        found: list[Step] = []
        widest = 0
        while ready:
            widest = max(widest, len(ready))
            step = self.steps[ready.popleft()]
            found.append(step)
            for other in step.following:
                waits[other] -= 1
                if not waits[other]:
                    ready.append(other)
        return found, widest


class Executable:
    """What can be launched. One of a graph with memory nodes shares the graph's addresses."""

    def __init__(self, handle: int, graph: Graph, auto_free: bool) -> None:
        self.handle = handle
        self.graph = graph
        self.auto_free = auto_free
        self.program = Program(graph)
        self.shape = shape_of(graph)
        self.heaps: list[tuple[Heap, list[Page]]] = [
            (heap, list(heap.pages)) for heap in graph.heaps.values() if heap.pages
        ]
        self.left = [one for one in self.program.allocations if one.freed_by < 0]
        self.conditions = all_conditions(graph)
        self.last: Need | None = None
        self.clock: Clock = {}


class Run:
    """One run of an executable."""

    def __init__(
        self,
        executable: Executable,
        placings: list[Placing],
        conditions: dict[int, int],
        point: Point,
        lives: Callable[[Allocation, Point, bool], None],
    ) -> None:
        self._program = executable.program
        self._defaults = executable.conditions
        self._placings = placings
        self._conditions = conditions  # of all graphs, as kernels set them
        self.point = point  # where it stands in the order of the streams
        self._lives = lives
        self.work: Work | None = None

    def __call__(self) -> None:
        """Map what an earlier run still used when this one was launched, and carry the steps out."""
        self._conditions.update(self._defaults)
        for address, size, extent in self._placings:
            linux.place(address, size, extent, linux.PROT_READ_WRITE)
        self._program.run(self)

    def take(self, step: Step) -> None:
        """Carry one step out; after a fault, none any more."""
        if context_lost():
            return
        node = step.node
        allocation = node.allocation
        if allocation is not None and allocation.freed_by >= 0:
            self._lives(allocation, self.point, node.kind is NodeKind.ALLOCATE)
        if node.action is not None:
            node.action(self)
        if step.body is not None:
            while self._conditions.get(node.condition, 0) and not context_lost():
                step.body.run(self)
                if not node.loop:
                    break


class _Crew:
    """The threads that carry out one run."""

    def __init__(self, steps: list[Step], run: Run) -> None:
        self._steps = steps
        self._run = run
        self._waits = [step.waits for step in steps]
        self._ready = deque(place for place, count in enumerate(self._waits) if not count)
        self._left = len(steps)
        self._idle = 0
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def work(self) -> None:
        """Carry everything out; the caller's thread takes part."""
        with self._changed:
            self._call_more()
        self._serve(counted=False)
        for thread in self._threads:
            thread.join()

    def _call_more(self) -> None:
        heavy = sum(1 for place in self._ready if self._steps[place].node.kind not in _LIGHT)
        while heavy - 1 > self._idle and len(self._threads) + 1 < _MOST_THREADS:
            thread = _StreamThread(target=self._serve, name="remap graph", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads: those there are do it one after the other
                return
            self._threads.append(thread)
            self._idle += 1  # it has not come so far yet, but it will

    def _serve(self, counted: bool = True) -> None:
        while True:
            with self._changed:
                self._idle += not counted
                counted = False
                while not self._ready and self._left:
                    self._changed.wait()
                self._idle -= 1
                if not self._left:
                    return
                place = self._ready.popleft()
            try:
                self._run.take(self._steps[place])
            except BaseException as error:  # noqa: BLE001 (it must not end the run silently)
                lose_context(failed("a graph", error))
            with self._changed:
                self._left -= 1
                for other in self._steps[place].following:
                    self._waits[other] -= 1
                    if not self._waits[other]:
                        self._ready.append(other)
                self._call_more()
                self._changed.notify_all()


def shape_of(graph: Graph) -> tuple[object, ...]:
    """Return what an update may not change: kinds and edges, bodies included."""
    kinds = tuple(
        None if node is None else (node.kind, node.body and shape_of(node.body)) for node in graph.nodes
    )
    return kinds, tuple(tuple(sorted(after)) for after in graph.order.after)


def all_conditions(graph: Graph) -> dict[int, int]:
    """Return every condition with the value that it has at each launch."""
    found = {handle: default or 0 for handle, default in graph.conditions.items()}
    for node in graph.nodes:
        if node is not None and node.body is not None:
            found.update(all_conditions(node.body))
    return found
