"""Copies and fills: checked and logged at the call, done on the stream's thread (T9)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from remap.drivers.host import linux
from remap.drivers.host.addresses import AddressMap
from remap.drivers.host.contexts import Contexts
from remap.drivers.host.graph_memory import GraphMemory, GraphRegions
from remap.drivers.host.machine import Machine
from remap.drivers.host.memory import Memory
from remap.drivers.host.plain import PlainMemory
from remap.drivers.host.pools import Pools
from remap.drivers.host.reachable import ReachableMemory
from remap.drivers.host.refusals import invalid
from remap.drivers.host.space import Mapping
from remap.drivers.host.streams import Streams
from remap.drivers.host.work import Point, Region
from remap.errors import DriverError
from remap.sizes import LARGEST, format_size

_BLOCK = 1 << 20  # bytes of a pattern that are built up once and then copied on; they fit into a cache


class Spans:
    """Finds the memory behind an address range and checks a device's right to it."""

    def __init__(
        self,
        memory: Memory,
        plain: PlainMemory,
        pools: Pools,
        reachable: ReachableMemory,
        graphs: GraphMemory,
    ) -> None:
        self._memory = memory
        self._plain = plain
        self._blocks = pools.blocks
        self._reachable = reachable.regions
        self._graphs = graphs.regions
        self._others: tuple[AddressMap[Any] | GraphRegions, ...] = (
            plain.regions,
            self._blocks,
            self._reachable,
            self._graphs,
        )

    @property
    def pooled(self) -> bool:
        """Whether there is memory whose use depends on where in the order of the streams it happens."""
        return len(self._blocks) > 0 or len(self._graphs) > 0

    def regions(
        self, who: int, address: int, size: int, writes: bool, strict: bool, point: Point | None
    ) -> Sequence[Region] | str:
        """Return the regions that make up a range, or the rule that would be broken by using it.

        One of the locations in `who` (bits) needs the right. A range may run over several neighbouring mappings; a
        plain allocation ends where it ends. `strict` is how kernels see plain memory: only their own device's, while
        copies reach all of it. `point` is where the work stands in the order of the streams; memory of pools may be
        used only there where it is allocated. The caller holds the table lock.
        """
        end = address + size
        mappings = self._memory.space.mappings
        found: list[Region] = []
        while address < end:
            region: Region | None = mappings.at(address)
            if region is None and not found:
                region = self._plain.regions.at(address) or self._reachable.at(address)
                if region is None and (block := self._blocks.at(address)) is not None:
                    region = block
                    if point is not None and (rule := block.refusal(point, end)):
                        return rule
                if region is None and (part := self._graphs.at(address, point)) is not None:
                    region = part
                    if point is not None and (rule := part.refusal(point)):
                        return rule
            if region is None:
                return f"nothing is mapped at {address:#x}"
            if region.multicast:
                return f"{region.base:#x} is a multicast address, which only multimem operations of kernels can use"
            if region.plain and region.end < end:
                return f"it runs over the end of the allocation of {region.end - region.base} bytes at {region.base:#x}"
            if strict or not region.plain:
                if not region.readers & who:
                    return f"device {_first(who)} has no access to the memory at {region.base:#x}"
                if writes and not region.writers & who:
                    return f"device {_first(who)} may only read the memory at {region.base:#x}"
            found.append(region)
            address = region.end
        return found

    def mapping_at(self, address: int) -> Mapping | None:
        """Return the mapping that holds an address. The caller holds the table lock."""
        return self._memory.space.mappings.at(address)

    def touches(self, start: int, end: int) -> bool:
        """Tell whether a range has an address of ours, so that it must be checked even where host memory is meant."""
        ours = self._memory.space.reservations.overlaps(start, end)
        return ours or any(table.overlaps(start, end) for table in self._others)

    def overlapping(self, start: int, end: int) -> Sequence[Region]:
        """Return everything that shares an address with a range. The caller holds the table lock."""
        found: list[Region] = [*self._memory.space.mappings.overlapping(start, end)]
        for table in self._others:
            found += table.overlapping(start, end)
        return found


class Copies:
    """The calls that move and set bytes in the current context."""

    def __init__(self, machine: Machine, contexts: Contexts, streams: Streams, spans: Spans) -> None:
        self._machine = machine
        self._contexts = contexts
        self._streams = streams
        self._spans = spans

    def copy(
        self, call: str, destination: int, source: int, size: int, stream_handle: int, host: str = ""
    ) -> None:
        """Queue a copy; `host` says which end, if any, is host memory: `"source"` or `"destination"`."""
        device = self._contexts.device(call)
        stream = self._streams.find(call, stream_handle)
        if size < 0:
            raise invalid(call, f"{size} bytes", "sizes are 0 or more")
        if size == 0:
            return
        with self._machine.lock:
            point = self._streams.point(stream) if self._spans.pooled else None
            target = self._end(call, device, destination, size, True, host == "destination", point)
            origin = self._end(call, device, source, size, False, host == "source", point)
            work = self._streams.submit(stream, "a copy", lambda: linux.copy(destination, source, size))
            for region in target:
                region.record(work, True)
            for region in origin:
                region.record(work, False)

    def _end(
        self,
        call: str,
        device: int,
        address: int,
        size: int,
        writes: bool,
        host: bool,
        point: Point | None,
    ) -> Sequence[Region]:
        who = 1 << device
        if host:
            if not 0 < address <= LARGEST - size:
                raise invalid(call, f"{size} bytes of host memory at {address:#x}", "no memory is there")
            if not self._spans.touches(address, address + size):
                return ()
            who |= self._machine.cpu
        found = self._spans.regions(who, address, size, writes, False, point)
        if isinstance(found, str):
            raise _refused(call, "write" if writes else "read", address, size, found)
        return found

    def fill(self, address: int, value: int, width: int, count: int, stream_handle: int) -> None:
        """Queue a fill."""
        call = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}.get(width)
        if call is None:
            raise invalid("cuMemsetD8Async", f"width {width}", "a fill writes elements of 1, 2 or 4 bytes")
        stream = self._streams.find(call, stream_handle)
        if not 0 <= value < 1 << 8 * width:
            raise invalid(call, f"value {value}", f"it does not fit into {width} bytes without sign")
        if count < 0 or address % width:
            rule = f"the address must be a multiple of {width}, and the count 0 or more"
            raise invalid(call, f"{count} elements at {address:#x}", rule)
        if count == 0:
            return
        size = width * count
        with self._machine.lock:
            # Two rules that CUDA has for fills alone: the stream's device counts, not the current context's, and
            # the plain memory of another device will not do.
            point = self._streams.point(stream) if self._spans.pooled else None
            found = self._spans.regions(1 << stream.device, address, size, True, True, point)
            if isinstance(found, str):
                raise _refused(call, "fill", address, size, found)
            pattern = value.to_bytes(width, "little")
            work = self._streams.submit(stream, "a fill", lambda: fill(address, pattern, size))
            for region in found:
                region.record(work, True)


def _first(who: int) -> int:
    return (who & -who).bit_length() - 1


def fill(address: int, pattern: bytes, size: int) -> None:
    """Write a pattern over and over."""
    if pattern == pattern[:1] * len(pattern):
        ctypes.memset(address, pattern[0], size)
        return
    done = len(pattern)
    ctypes.memmove(address, pattern, done)
    while done < size:
        step = min(done, _BLOCK, size - done)
        ctypes.memmove(address + done, address, step)
        done += step


def _refused(call: str, verb: str, address: int, size: int, rule: str) -> DriverError:
    step = "Map memory there, or grant the device access with set_access"
    return invalid(call, f"{verb} of {format_size(size)} at {address:#x}", rule, step)
