"""Executables: graphs that can be launched."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

from remap.drivers.graph_powers import NodeKind
from remap.drivers.powers import SupportsRepeats
from remap.errors import InUseError, NotSupportedError, RemapError, not_supported
from remap.graphs import footprint
from remap.graphs.nodes import Allocation, GraphMemory, HostCall, Node, is_captured, raise_failure
from remap.kernels.module import Module
from remap.launches import MemoryUse, Repeat, Usable, launches, merged
from remap.lifetime import Description, Release, Resource, Step, epoch, watchers
from remap.locations import Device, in_context
from remap.registers import Register
from remap.sizes import counted
from remap.spans import Span
from remap.streams import Queue, Stream, StreamLike, as_stream
from remap.types import Location
from remap.uses import Uses

if TYPE_CHECKING:
    from remap.graphs.graph import Graph


class Executable(Resource):
    """A graph as it was when it was instantiated. Made by `Graph.instantiate`.

    It keeps buffers, modules and functions of its nodes alive. A launch needs the buffers open and backed, and the
    parts that nodes touch committed, and writable where they are written. A buffer that was paused and resumed, moved,
    grown, or shrunk behind those parts between two launches is at the same address, and the graph goes on.
    """

    kind: ClassVar[str] = "executable graph"

    def __init__(self, graph: Graph, auto_free: bool) -> None:
        super().__init__(graph._driver)
        self.device = graph.device
        self.auto_free = auto_free
        self._default = as_stream(None, self.device)
        self._failures = graph._failures
        self._uses = Uses()
        self._updating = False
        self._nodes: tuple[Node, ...] = ()
        with self.device.current():
            try:
                self._handle: int = self._driver.graph_instantiate(graph._handle, auto_free)
                self._open = True  # from here on an interrupt leaves it to its finaliser
            except NotSupportedError as error:
                raise error.explain(f"an executable of {graph.describe()}") from None
        self._asked = f"launch of {self.kind} {self.serial} on {self.device}"
        self._take(graph)
        self._opened()

    def _take(self, graph: Graph) -> None:
        """Note what the nodes of a graph use, so that launches keep it from being taken away."""
        self._nodes = graph.nodes
        self._kept = kept = graph.kept()
        self._used = _used(kept)
        allocations = [node for node in self._nodes if isinstance(node, Allocation)]
        # What each launch leaves allocated, what it frees of other graphs', and what it uses of theirs.
        self._left = tuple(one for one in allocations if one.freed is None)
        own = set(allocations)
        others = _distinct(one for one in kept if isinstance(one, Allocation) and one not in own)
        freed = {id(one) for node in self._nodes if node.kind is NodeKind.FREE for one in node._keeps}
        self._foreign = tuple(others)
        self._ends = tuple(one for one in others if id(one) in freed)
        self._latest: Repeat | None = None
        if any(isinstance(one, HostCall) for one in kept) or any(
            node.kind is NodeKind.HOST for node in self._nodes
        ):
            _calling.add(self)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes as they were when it was instantiated or updated."""
        return self._nodes

    def launch(self, stream: StreamLike | None = None) -> None:
        """Queue one run on a stream; does not wait.

        It comes after what the stream has, and after earlier runs of this executable. Raises `InUseError` while
        memory that an earlier launch left lives (unless made with `auto_free`), `OutOfMemoryError`, and `LaunchError`
        for what a host function has raised in an earlier run. For buffers of its nodes, as a direct use of the same
        part: `ClosedError`, `PausedError`, `InvalidValueError` where a part that a node touches is not committed any
        more, `AccessError` where one that it writes is shared with a fork by now, or a right is gone. Nothing is
        launched then. Of a kernel in CUDA C++ nobody knows what it touches: its buffers have to be open, backed and
        readable, and all else is up to you. `InUseError`, too, on a stream that is being captured, whose capture goes
        on: no driver takes an executable into a graph. Source: cuGraphLaunch.
        """
        latest = self._latest
        if launches.recorders:
            self._refuse_captured(self._default if stream is None else as_stream(stream, self.device))
        if self._failures:
            self._check()
            raise_failure(self._failures, self._asked)
        # A launch that is kept holds the driver's call itself, which a trace would not see.
        if latest is not None and latest.queue.owner is stream and not watchers:
            latest.go()
        else:
            self._launch(stream)
        if footprint.watching:
            footprint.sample(self.device, "launch")

    def _refuse_captured(self, queue: Queue) -> None:
        """Raise before the driver does, which would break the capture."""
        if is_captured(queue):
            raise InUseError(
                self._asked,
                rule="the stream is being captured, and an executable cannot become a part of a graph",
                next_step="Launch it when the capture has ended, or build the graph of both with Graph.child",
            )

    def _launch(self, stream: StreamLike | None) -> None:
        """Launch with everything that this takes, and keep the launch for the next time on the same stream."""
        self._check()
        queue = self._default if stream is None else as_stream(stream, self.device)
        if self._left or self._foreign:
            self._launch_with_memory(queue)
            return
        used = self._used
        repeat = self._repeat(queue, used, used)
        repeat.go()
        if not (queue.transient or watchers) and (stream is None or isinstance(stream, Stream)):
            with self._driver.lock:
                if used is self._used:  # else another thread has updated it
                    self._latest = repeat

    def _repeat(self, queue: Queue, used: Sequence[Usable], nodes: Sequence[Usable]) -> Repeat:
        """Return a launch on a stream, which uses all this; `nodes` is the part of it that is in the nodes."""
        call: Callable[[], None] = partial(self._queue, self.device, self._handle, queue)
        if isinstance(self._driver, SupportsRepeats) and not watchers:
            call = self._driver.repeat_graph_launch(self.device._context, self._handle, queue.handle)
        return _Run(self, (self, *used), queue, call, nodes)

    @staticmethod
    def _queue(at: Device, handle: int, queue: Queue) -> None:
        driver: Any = at._driver
        with at.current():
            driver.graph_launch(handle, queue.handle)

    def _launch_with_memory(self, queue: Queue) -> None:
        """Launch a graph that leaves memory allocated, or uses or frees what other graphs have left."""
        left = [one._memory for one in self._left if one._memory is not None and not one._memory.closed]
        if left and not self.auto_free:
            raise InUseError(
                self._asked,
                rule=f"{left[0].describe()} lives on from an earlier launch",
                next_step="Close it, free it in a stream, or instantiate with auto_free=True",
            )
        foreign = [one.memory for one in self._foreign]
        ended = [*left, *(one.memory for one in self._ends)]
        with self._driver.lock:
            for memory in ended:
                memory._check_closable()
        self._repeat(queue, [*self._used, *foreign], self._used).go()
        for memory in ended:
            memory._end()
        for one in self._left:
            one._memory = GraphMemory(one)
            one._memory._uses.add(queue)

    def upload(self, stream: StreamLike | None = None) -> None:
        """Prepare the next launch in the order of a stream, so that it takes less time. Source: cuGraphUpload."""
        self._check()
        queue = as_stream(stream, self.device)
        with queue._named(), self.device.current():
            self._driver.graph_upload(self._handle, queue.handle)
        self._uses.add(queue)

    def update(self, graph: Graph) -> None:
        """Take over the nodes of a graph of the same shape: other arguments, sizes and buffers.

        Raises `DriverError` for another shape, `NotSupportedError` for memory nodes, `InUseError` while another thread
        launches or updates it; then nothing has changed. Source: cuGraphExecUpdate.
        """
        self._check()
        graph._check()
        memory = (NodeKind.ALLOCATE, NodeKind.FREE)
        if any(node.kind in memory for node in (*self._nodes, *graph.nodes)):
            raise not_supported(
                "cuGraphExecUpdate",
                f"an update of {self.describe()} with {graph.describe()}",
                "the driver does not update graphs with memory nodes",
                "Close this executable and instantiate the graph",
            )
        begun = False
        try:
            with self._driver.lock:
                self._check()
                self._check_closable("updated")
                self._updating = begun = True
                # Until it is known which nodes it has, launches would use those of both.
                before, more = (self._used, self._kept), graph.kept()
                self._used, self._kept = [*self._used, *_used(more)], [*self._kept, *more]
                self._latest = None
            try:
                with self.device.current():
                    self._driver.graph_update(self._handle, graph._handle)
            except RemapError:
                self._used, self._kept = before
                raise
            with self._driver.lock:
                self._take(graph)
        finally:
            if begun:
                self._updating = False
        # Runs under way still use what the nodes named before.
        self._uses.keep(before[1])

    def _check_use(self, asked: str, place: Location) -> None:
        self._check()
        if self._updating:
            raise InUseError(asked, rule=_UPDATING, next_step="Let that end first")

    def _check_closable(self, doing: str = "closed") -> None:
        if self._updating:
            asked = f"{self.describe()} to be {doing}"
            raise InUseError(asked, rule=_UPDATING, next_step="Let that end first")
        launches.check_none(self._uses, self, doing)

    def _runs(self) -> bool:
        """Tell whether a stream that it was launched on has work left; does not wait."""
        if self.closed or self._epoch != epoch():
            return False
        for queue in self._uses.queues:
            with queue.kept() as there, queue.device.current():
                if there and not queue.device._driver.stream_done(queue.handle):
                    return True
        return False

    def _detach(self) -> Release:
        steps: list[Step] = [(in_context, (self.device, self._driver.graph_exec_destroy, self._handle))]
        wait = self._uses.waiter((self.device,), f"closing {self.kind} {self.serial}")
        return Release(1, steps, wait)

    def describe(self) -> Description:
        """Return what this executable is."""
        size = sum(node.size for node in self._nodes if isinstance(node, Allocation))
        detail = f"{counted(len(self._nodes), 'node')} on {self.device}"
        return Description(self.kind, self.serial, size, None, detail)


class _Run(Repeat):
    """A launch of an executable as long as that has the nodes whose memory the launch uses."""

    __slots__ = ("_nodes", "_of")

    def __init__(
        self,
        of: Executable,
        things: Sequence[Usable],
        queue: Queue,
        call: Callable[[], None],
        nodes: Sequence[Usable],
    ) -> None:
        super().__init__(things, queue, of._asked, call)
        self._uses, self._held = _distinct(self._uses), _distinct(self._held)  # parts have those of the whole
        self._of = ref(of)
        self._nodes = nodes

    def _check_current(self) -> None:
        of = self._of()
        if of is not None and of._used is not self._nodes:
            raise InUseError(
                self._asked, rule="another thread has updated it meanwhile", next_step="Launch it again"
            )


def _used(kept: Iterable[object]) -> list[Usable]:
    """Return what launches keep from being taken away, and which parts of it they read and write."""
    kept = list(kept)
    parts = merged(one for one in kept if isinstance(one, MemoryUse))
    return [*_distinct(one for one in kept if isinstance(one, (Span, Module))), *parts]


_UPDATING = "another thread is updating it"

_calling: Register[Executable] = Register()
"""Those that call functions of Python."""


def _let_runs_end() -> None:
    """Wait, when the process ends, for runs that call Python, which cannot be called any more when it has ended.

    Where they do not end, there is a limit.
    """
    end, pause = time.monotonic() + _PATIENCE, threading.Event()
    with suppress(RemapError):  # a lost context, or a driver that has gone
        while any(one._runs() for one in _calling) and time.monotonic() < end:
            pause.wait(0.002)


_PATIENCE = 5.0
atexit.register(_let_runs_end)


def _distinct(things: Iterable[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())
