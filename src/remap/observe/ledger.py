"""What memory was taken at each moment of a trace: worked out from the calls afterwards, and not while they run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from remap.observe.calls import CallRecord
from remap.observe.snapshot import Item
from remap.types import AllocationProperties, Host, Location, LocationKind


class _Memory:
    """One physical allocation: its bytes, and how many handles and mappings keep it."""

    __slots__ = ("kept_by", "place", "size")

    def __init__(self, size: int, place: Location, kept_by: int) -> None:
        self.size = size
        self.place = place
        self.kept_by = kept_by


class Ledger:
    """The bytes of each location, as calls take them and give them back. Memory of other processes is not counted."""

    def __init__(self, before: Iterable[Item], contexts: dict[int, int], handles: dict[int, int]) -> None:
        names = {serial: handle for handle, serial in handles.items()}
        self.bytes: dict[Location, int] = {}
        self._handles: dict[int, _Memory] = {}
        self._mapped: dict[int, tuple[int, _Memory]] = {}
        self._plain: dict[int, _Memory] = {}
        self._contexts = dict(contexts)
        self._current: dict[int, int] = {}
        known: dict[int, _Memory] = {}
        for item in before:
            for piece in item.pieces:
                if piece.source == "foreign":
                    continue
                memory = known.get(piece.memory)
                if memory is None:
                    memory = known[piece.memory] = self._new(piece.size, piece.location, 0)
                memory.kept_by += 1
                if piece.address is None:
                    self._handles[names.get(item.serial, 0)] = memory
                else:
                    # Plain memory is freed by its address, mappings are unmapped by theirs: either may come.
                    self._mapped[piece.address] = (piece.size, memory)
                    self._plain[piece.address] = memory

    def take(self, record: CallRecord) -> bool:
        """Count a call, and tell whether it changed anything."""
        name, arguments, keywords, result, error, _, _, thread = record
        step = getattr(self, f"_{name}", None)
        if error is not None or step is None:
            return False
        before = dict(self.bytes)
        step(thread, result, *arguments, **(keywords or {}))
        return self.bytes != before

    def _new(self, size: int, place: Location, kept_by: int = 1) -> _Memory:
        self.bytes[place] = self.bytes.get(place, 0) + size
        return _Memory(size, place, kept_by)

    def _drop(self, memory: _Memory | None) -> None:
        if memory is not None:
            memory.kept_by -= 1
            if memory.kept_by == 0:
                self.bytes[memory.place] -= memory.size

    # -- one method for each call that takes memory or gives it back; the first two arguments are thread and result --

    def _create(self, _: int, handle: int, size: int, properties: AllocationProperties) -> None:
        self._handles[handle] = self._new(size, properties.location)

    def _retain(self, _: int, handle: int, address: int) -> None:
        found = self._mapped.get(address)
        if found is not None:
            found[1].kept_by += 1
            self._handles[handle] = found[1]

    def _release(self, _: int, __: None, handle: int) -> None:
        # A retained handle may have the same number as the first one; the memory counts both.
        memory = self._handles.get(handle)
        self._drop(memory)
        if memory is not None and memory.kept_by == 0:
            self._handles.pop(handle, None)

    def _map(self, _: int, __: None, address: int, size: int, handle: int, offset: int = 0) -> None:
        memory = self._handles.get(handle)
        if memory is not None:
            memory.kept_by += 1
            self._mapped[address] = (size, memory)

    def _unmap(self, _: int, __: None, address: int, size: int) -> None:
        found = self._mapped.pop(address, None)
        at = address + found[0] if found else address
        if found:
            self._drop(found[1])
        if at < address + size:  # a range of several mappings, and holes
            for start in sorted(start for start in self._mapped if at <= start < address + size):
                self._drop(self._mapped.pop(start)[1])

    def _allocate(self, thread: int, address: int, size: int) -> None:
        index = self._contexts.get(self._current.get(thread, 0), 0)
        self._plain[address] = self._new(size, Location(LocationKind.DEVICE, index))

    def _pool_allocate(self, thread: int, address: int, size: int, stream: int) -> None:
        self._allocate(thread, address, size)

    def _allocate_pinned(self, _: int, address: int, size: int) -> None:
        self._plain[address] = self._new(size, Host())

    def _allocate_managed(self, _: int, address: int, size: int) -> None:
        self._plain[address] = self._new(size, Host())

    def _free(self, _: int, __: None, address: int, *rest: Any) -> None:
        self._drop(self._plain.pop(address, None))

    _pool_free = _free_pinned = _free_managed = _free

    # -- which device is the current one of each thread --

    def _retain_context(self, _: int, context: int, device: int) -> None:
        self._contexts[context] = device

    def _current_context(self, thread: int, context: int) -> None:
        self._current[thread] = context

    def _push_context(self, thread: int, _: None, context: int) -> None:
        self._current[thread] = context
