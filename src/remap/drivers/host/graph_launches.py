"""Executables: made from graphs, launched, and the memory that launches take and leave."""

from __future__ import annotations

from collections.abc import Callable

from remap.drivers.host import linux
from remap.drivers.host.copies import Spans
from remap.drivers.host.graph_memory import GraphMemory, GraphRegion
from remap.drivers.host.graph_nodes import not_supported
from remap.drivers.host.graph_run import Executable, Run, all_conditions, shape_of
from remap.drivers.host.graphs import Graphs
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import invalid, system_error
from remap.drivers.host.streams import Streams
from remap.drivers.host.work import Mark, OpaqueWork, join
from remap.errors import driver_error

_UPDATE_FAILURE = 910  # CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE


class Executables:
    """All executables of a driver by handle, and the calls on them. Its methods take the table lock themselves."""

    def __init__(
        self,
        machine: Machine,
        streams: Streams,
        spans: Spans,
        opaque: OpaqueWork,
        graphs: Graphs,
        memory: GraphMemory,
    ) -> None:
        self._machine = machine
        self._streams = streams
        self._spans = spans
        self._opaque = opaque
        self._graphs = graphs
        self._memory = memory
        self._executables: dict[int, Executable] = {}
        self._conditions: dict[int, int] = {}  # their values as kernels set them

    def set_condition(self, condition: int, value: int) -> None:
        """Set a condition, from a kernel."""
        self._conditions[condition] = value

    def instantiate(self, handle: int, auto_free: bool) -> int:
        """Return an executable; a graph with memory nodes has one at a time."""
        call = "cuGraphInstantiate"
        with self._machine.lock:
            graph = self._graphs.find(call, handle)
            if graph.has_memory and graph.executables:
                rule = "a graph with memory nodes has one executable at a time"
                raise not_supported(call, "a second executable", rule)
            executable = Executable(next(self._machine.handles), graph, auto_free)
            for heap, _ in executable.heaps:
                heap.users += 1
            graph.executables += 1
            self._executables[executable.handle] = executable
            return executable.handle

    def update(self, handle: int, graph_handle: int) -> None:
        """Take over the nodes of a graph of the same shape."""
        call = "cuGraphExecUpdate"
        with self._machine.lock:
            executable, graph = self._executable(call, handle), self._graphs.find(call, graph_handle)
            for one in (executable.graph, graph):
                one.check_memory_free(call, "an update", "a graph with memory nodes cannot be updated")
            if shape_of(graph) != executable.shape:
                rule = "the graph has other nodes or edges than the one that was instantiated"
                name = "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"
                raise driver_error(call, _UPDATE_FAILURE, name, asked="an update", rule=rule)
            newer = Executable(executable.handle, graph, executable.auto_free)
            executable.program, executable.conditions = newer.program, all_conditions(graph)

    def destroy(self, handle: int) -> None:
        """Forget an executable; a run under way goes on."""
        with self._machine.lock:
            executable = self._executable("cuGraphExecDestroy", handle)
            del self._executables[handle]
            executable.graph.executables -= 1
            for heap, _ in executable.heaps:
                self._memory.leave(heap, executable.last)

    def upload(self, handle: int, stream_handle: int) -> None:
        """Do nothing but check: memory is taken at the launch."""
        call = "cuGraphUpload"
        with self._machine.lock:
            self._executable(call, handle)
        self._streams.find(call, stream_handle)

    def launch(self, handle: int, stream_handle: int) -> None:
        """Queue a run behind what the stream has, and behind earlier runs of the same executable (T15)."""
        call = "cuGraphLaunch"
        stream = self._streams.find(call, stream_handle)
        with self._machine.lock:
            executable = self._executable(call, handle)
            point = self._streams.point(stream)
            clock = point.clock
            join(clock, executable.clock)
            renewed = self._renewed(call, executable)
            ended = [self._memory.live(call, address) for address in executable.program.frees]
            for region in (*renewed, *ended):
                self._memory.check_ordered(region, clock)
            now, later = self._memory.bind(call, executable.heaps, clock, renewed)
            try:
                for address, size, extent in now:
                    linux.place(address, size, extent, linux.PROT_READ_WRITE)
            except OSError as error:
                raise system_error(call, error) from error
            run = Run(executable, later, self._conditions, point, self._memory.lives)
            tick = self._machine.tick + 1
            join(stream.clock, executable.clock)
            needs = [] if executable.last is None else [executable.last]
            # The run cannot begin before its work is known: it takes the lock that is held here.
            work = run.work = self._streams.submit(stream, "a graph", self._started(run), needs, tick)
            self._machine.tick = tick
            executable.last = (stream, work.number)
            executable.clock = stream.now()
            # What is renewed was freed before this run, and what nodes of it free, by it.
            before = Mark(stream, work.number - 1, dict(clock), str(work))
            for region in renewed:
                self._memory.let_go(region, before)
            for region in ended:
                self._memory.let_go(region, Mark(stream, work.number, dict(clock), str(work)))
            self._note(executable, run)

    # -- memory that launches left --

    def free(self, call: str, address: int, stream_handle: int | None) -> bool:
        """Free what a launch left, in the order of a stream or, after a wait, at once; False if it is not ours."""
        stream = None if stream_handle is None else self._streams.find(call, stream_handle)
        with self._machine.lock:
            if self._memory.regions.left.starting_at(address) is None:
                return False
            region = self._memory.live(call, address)
            if stream is None:
                self._memory.check_ordered(region, {})
                self._memory.let_go(region, None)
                return True
            clock = self._streams.point(stream).clock
            self._memory.check_ordered(region, clock)
            work = self._streams.submit(stream, "a free", None)
            self._memory.let_go(region, Mark(stream, work.number, clock, str(work)))
            return True

    def device_of(self, address: int) -> int | None:
        """Return the device whose graph memory begins at an address, None if there is none."""
        with self._machine.lock:
            region = self._memory.regions.left.starting_at(address)
            return None if region is None else region.device

    # -- the steps of a launch --

    def _started(self, run: Run) -> Callable[[], None]:
        def start() -> None:
            with self._machine.lock:
                pass
            run()

        return start

    def _renewed(self, call: str, executable: Executable) -> list[GraphRegion]:
        """Return the live allocations that a launch allocates anew, if it is allowed to free them."""
        regions = self._memory.regions.left
        found = [regions.starting_at(allocation.address) for allocation in executable.left]
        renewed = [region for region in found if region is not None and region.alive]
        if renewed and not executable.auto_free:
            raise invalid(
                call,
                "a launch of a graph",
                f"its allocation at {renewed[0].base:#x} lives on from an earlier launch",
                "Free it first, or instantiate with auto_free",
            )
        return renewed

    def _note(self, executable: Executable, run: Run) -> None:
        work = run.work
        assert work is not None
        last = work.stream, work.number
        for _, pages in executable.heaps:
            for page in pages:
                if page.block is not None:
                    page.block.last = last
        for allocation in executable.left:
            self._memory.hold(allocation, work, run.point)
        if executable.program.touches is None:
            self._opaque.record(work)
            return
        for touched in executable.program.touches:
            for region in self._spans.overlapping(touched.address, touched.address + touched.size):
                region.record(work, touched.writes)

    def _executable(self, call: str, handle: int) -> Executable:
        executable = self._executables.get(handle)
        if executable is None:
            raise invalid(call, f"executable graph {handle}", "there is no such executable")
        return executable
