"""What the nodes of a graph may touch: checked when they are added, and again, as a device does, when they run."""

from __future__ import annotations

from sortedcontainers import SortedDict

from remap.drivers.host.copies import Spans
from remap.drivers.host.graph_heap import Allocation
from remap.drivers.host.graph_run import Run
from remap.drivers.host.guard import lose_context
from remap.drivers.host.machine import Machine
from remap.drivers.host.refusals import invalid
from remap.drivers.host.work import Point
from remap.errors import ContextLostError, CudaResult, driver_error
from remap.sizes import format_size


class Access:
    """One end of a copy or a fill: a range, whether it is written, and whether it is meant as host memory."""

    __slots__ = ("address", "host", "size", "writes")

    def __init__(self, address: int, size: int, *, writes: bool, host: bool = False) -> None:
        self.address = address
        self.size = size
        self.writes = writes
        self.host = host

    def __str__(self) -> str:
        verb = "write" if self.writes else "read"
        return f"{verb} of {format_size(self.size)} at {self.address:#x}"


class GraphAccess:
    """Looks memory up for nodes that copy and fill."""

    def __init__(self, machine: Machine, spans: Spans) -> None:
        self._machine = machine
        self._spans = spans

    def check(self, call: str, device: int, end: Access, allocations: SortedDict[int, Allocation]) -> None:
        """Raise INVALID_VALUE for memory that is neither there nor allocated by a node. The caller holds the lock.

        `allocations` are by address; those of one graph may lie on each other. Which one is meant is nearly always the
        nearest that begins before the end's address, so they are looked at from there on.
        """
        rule = self._rule(device, end, None)
        if rule and not any(
            end.address + end.size <= base + allocations[base].size
            for base in allocations.irange(maximum=end.address, reverse=True)
        ):
            raise invalid(call, str(end), rule)

    def usable(self, run: Run, device: int, end: Access) -> bool:
        """Tell whether a node may use memory now, and log that it does; a fault, as on a device, if not."""
        with self._machine.lock:
            rule = self._rule(device, end, run.point)
            if not rule:
                if run.work is not None and not end.host:
                    for region in self._spans.overlapping(end.address, end.address + end.size):
                        region.record(run.work, end.writes)
                return True
        error = driver_error(
            "cuGraphLaunch", CudaResult.ILLEGAL_ADDRESS, asked=f"a node of a graph: {end}", rule=rule
        )
        if isinstance(error, ContextLostError):
            lose_context(error)
        return False

    def _rule(self, device: int, end: Access, point: Point | None) -> str:
        """Return the rule that a use would break, or nothing."""
        who = 1 << device
        if end.host:
            if not self._spans.touches(end.address, end.address + end.size):
                return ""
            who |= self._machine.cpu
        found = self._spans.regions(who, end.address, end.size, end.writes, False, point)
        return found if isinstance(found, str) else ""
