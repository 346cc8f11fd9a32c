"""A multicast object as one process holds it: what its mailbox says, and the replicas, mapped here.

What other processes wrote into the mailbox is hostile input, and checked before anything is believed or mapped.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from remap.drivers.host.allocations import Allocation
from remap.drivers.host.backing import Extent, inspect
from remap.drivers.host.mailbox import Box
from remap.drivers.host.space import Mapping
from remap.drivers.multicast_power import MulticastProperties
from remap.sizes import LARGEST
from remap.types import AllocationProperties, HandleType, Location

_HEAD = struct.Struct("<IBQII")  # devices, whether it can be exported, size; devices added, bindings
_MEMBER = struct.Struct("<24sI")  # machine, number there
_BINDING = struct.Struct("<24sIQQQ")  # machine, number, offset in the object, offset in the file, size
MOST_DEVICES = 64
_DONTFORK = 10  # MADV_DONTFORK, as for everything that this driver maps


class Member(NamedTuple):
    """A device of a team: the machine that simulates it, and its number there."""

    machine: bytes
    number: int


class Binding(NamedTuple):
    """A replica, or a piece of one: bytes of the object that are bytes of a memory file of one device."""

    member: Member
    offset: int
    start: int
    size: int

    @property
    def end(self) -> int:
        """Where it ends in the object."""
        return self.offset + self.size


class State(NamedTuple):
    """What a mailbox says of an object. Each binding has a descriptor beside it, in the same order."""

    properties: MulticastProperties
    members: tuple[Member, ...]
    bindings: tuple[Binding, ...]

    @property
    def complete(self) -> bool:
        """Whether every device has been added."""
        return len(self.members) == self.properties.devices

    def pack(self) -> bytes:
        """Return it as a letter."""
        devices, size, kinds = self.properties.devices, self.properties.size, self.properties.handle_types
        head = _HEAD.pack(devices, bool(kinds), size, len(self.members), len(self.bindings))
        members = (_MEMBER.pack(*one) for one in self.members)
        bindings = (_BINDING.pack(*one.member, one.offset, one.start, one.size) for one in self.bindings)
        return b"".join((head, *members, *bindings))

    @classmethod
    def unpack(cls, letter: bytes, fds: int, granule: int) -> State:
        """Return what a letter with so many descriptors says; raises `ValueError` for what cannot be (invariant 11)."""
        if len(letter) < _HEAD.size:
            raise ValueError("the object does not say what it is")
        devices, shareable, size, added, bound = _HEAD.unpack_from(letter)
        if not 1 <= devices <= MOST_DEVICES or shareable > 1 or not 0 < size <= LARGEST or size % granule:
            raise ValueError("the object claims what no object can be")
        middle = _HEAD.size + added * _MEMBER.size
        if added > devices or bound != fds or len(letter) != middle + bound * _BINDING.size:
            raise ValueError("what it says of its devices and bindings does not add up")
        members = tuple(Member(*one) for one in _MEMBER.iter_unpack(letter[_HEAD.size : middle]))
        bindings = tuple(
            Binding(Member(machine, number), *rest)
            for machine, number, *rest in _BINDING.iter_unpack(letter[middle:])
        )
        for one in bindings:
            unaligned = (one.offset | one.start | one.size) % granule
            if (
                one.member not in members
                or not one.size
                or one.end > size
                or one.start > LARGEST
                or unaligned
            ):
                raise ValueError("a binding lies outside of the object")
        kinds = frozenset({HandleType.POSIX_FD}) if shareable else frozenset[HandleType]()
        return cls(MulticastProperties(devices, size, kinds), members, bindings)


class Team(Allocation):
    """A multicast object as this process holds it: an allocation that lies on no device and has no bytes of its own."""

    __slots__ = ("bound", "box", "state", "version", "windows")

    def __init__(self, handle: int, box: Box, state: State, place: Location) -> None:
        kinds = state.properties.handle_types
        properties = AllocationProperties(place, kinds)
        super().__init__(handle, state.properties.size, properties, Extent(-1, 0), 0)
        self.box = box
        # What the mailbox said when it had this version, and the memory of each binding.
        self.version = -1
        self.state = state
        self.windows: list[mmap.mmap] = []
        # This process's own bindings by (device, offset): the memory, which stays while it is bound.
        self.bound: dict[tuple[int, int], Allocation] = {}

    @property
    def shareable(self) -> bool:
        """Whether other processes may hold the object."""
        return bool(self.properties.handle_types)

    def refresh(self, granule: int) -> None:
        """Read the mailbox if it has changed. The caller holds its lock. Raises `ValueError` and `OSError`."""
        version = self.box.version
        if version == self.version:
            return
        letter, fds = self.box.read()
        try:
            state = State.unpack(letter, len(fds), granule)
            if state.properties != self.state.properties:
                raise ValueError("the object has become another one")
            self.windows = [
                self._window(fd, one, granule) for fd, one in zip(fds, state.bindings, strict=True)
            ]
            self.state = state
        finally:
            close_all(fds)
        self.version = version

    def _window(self, fd: int, binding: Binding, granule: int) -> mmap.mmap:
        """Map the memory of a binding: of a file that cannot shrink, and is memory of a device."""
        if self.shareable:
            location, length = inspect(fd, granule)
            if not location.is_device or binding.start + binding.size > length:
                raise ValueError("a binding lies outside of its memory")
        window = mmap.mmap(fd, binding.size, offset=binding.start)
        window.madvise(_DONTFORK)
        return window

    def replicas(self, offset: int, size: int) -> tuple[memoryview, ...] | str:
        """Return the bytes of each device's replica, in the order of devices, or what is missing."""
        if not self.state.complete:
            return f"{len(self.state.members)} of {self.state.properties.devices} devices have been added"
        views: list[memoryview] = []
        for member in self.state.members:
            for binding, window in zip(self.state.bindings, self.windows, strict=True):
                if binding.member == member and binding.offset <= offset and offset + size <= binding.end:
                    start = offset - binding.offset
                    views.append(memoryview(window)[start : start + size])
                    break
            else:
                return (
                    f"a device of its team (number {member.number} of its machine) has no memory bound there"
                )
        return tuple(views)


class MulticastMapping(Mapping):
    """An object at an address. The kernel has nothing there, so that whoever looks there by mistake crashes at once."""

    __slots__ = ()

    multicast = True


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
