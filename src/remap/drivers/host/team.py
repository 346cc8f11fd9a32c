"""A multicast object as one process holds it: what its mailbox says, and the replicas, mapped here.

What other processes wrote into the mailbox is hostile input, and checked before anything is believed or mapped.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

from remap.drivers.host.allocations import Allocation
from remap.drivers.host.backing import Extent, inspect
from remap.drivers.host.mailbox import Box
from remap.drivers.host.space import Mapping
from remap.drivers.multicast_power import MulticastProperties
from remap.sizes import LARGEST
from remap.types import AllocationProperties, HandleType, Location

HEAD = struct.Struct("<4sIBQ")  # devices, whether it can be exported, size
DEVICE = struct.Struct("<4s24sI")  # machine, number there
BINDING = struct.Struct("<4s24sIQQQ")  # machine, number, offset in the object, offset in the file, size
MOST_DEVICES = 64
_DONTFORK = 10  # MADV_DONTFORK, as for everything that this driver maps


class Member(NamedTuple):
    """A device of a team: the machine that simulates it, and its number there."""

    machine: bytes
    number: int


class Binding(NamedTuple):
    """A replica, or a piece of one: the object's bytes from `offset` to `end` on one device."""

    member: Member
    offset: int
    end: int
    memory: mmap.mmap


class Team(Allocation):
    """A multicast object as this process holds it: an allocation that lies on no device and has no bytes of its own."""

    __slots__ = ("bindings", "bound", "box", "members", "most", "shareable", "version")

    def __init__(self, handle: int, box: Box, properties: MulticastProperties, place: Location) -> None:
        kinds = properties.handle_types
        super().__init__(handle, properties.size, AllocationProperties(place, kinds), Extent(-1, 0), 0)
        self.box = box
        self.most = properties.devices
        self.shareable = bool(kinds)
        # What the mailbox said when it had this version.
        self.version = -1
        self.members: list[Member] = []
        self.bindings: list[Binding] = []
        # This process's own bindings by (device, offset): the memory, which stays while it is bound.
        self.bound: dict[tuple[int, int], Allocation] = {}

    def refresh(self, granule: int) -> None:
        """Read the mailbox if it has changed. The caller holds its lock. Raises `ValueError` and `OSError`."""
        version = self.box.version
        if version == self.version:
            return
        records = self.box.read()
        try:
            self.members, self.bindings = _parse(records, self, granule)
        finally:
            for _, fds in records:
                for fd in fds:
                    os.close(fd)
        self.version = version

    def replicas(self, offset: int, size: int) -> tuple[memoryview, ...] | str:
        """Return the bytes of each device's replica, in the order of devices, or what is missing."""
        if len(self.members) < self.most:
            return f"{len(self.members)} of the {self.most} devices of its team have been added"
        views: list[memoryview] = []
        for member in self.members:
            for binding in self.bindings:
                if binding.member == member and binding.offset <= offset and offset + size <= binding.end:
                    start = offset - binding.offset
                    views.append(memoryview(binding.memory)[start : start + size])
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


def read_head(box: Box) -> MulticastProperties:
    """Return what an imported object is; raises `ValueError`."""
    records = box.read()
    for _, fds in records:
        for fd in fds:
            os.close(fd)
    head = records[0][0] if records else b""
    if len(head) != HEAD.size or not head.startswith(b"head"):
        raise ValueError("the object does not say what it is")
    _, devices, shareable, size = HEAD.unpack(head)
    if not 1 <= devices <= MOST_DEVICES or shareable != 1 or not 0 < size <= LARGEST:
        raise ValueError("the object claims what no object can be")
    return MulticastProperties(devices, size, frozenset({HandleType.POSIX_FD}))


def _parse(
    records: list[tuple[bytes, list[int]]], team: Team, granule: int
) -> tuple[list[Member], list[Binding]]:
    """Return the devices and the bindings in a mailbox, and map the bindings' memory; raises `ValueError`.

    Whatever other processes wrote is checked: nothing of a file that could shrink, or that is no memory of a device, is
    mapped (invariant 11).
    """
    members: list[Member] = []
    bindings: list[Binding] = []
    for record, fds in records[1:]:
        if len(record) == DEVICE.size and record.startswith(b"devi") and not fds:
            member = Member(*DEVICE.unpack(record)[1:])
            if member in members or bindings or len(members) >= team.most:
                raise ValueError("a device is out of place")
            members.append(member)
            continue
        if len(record) != BINDING.size or not record.startswith(b"bind") or len(fds) != 1:
            raise ValueError("a record has no meaning")
        _, machine, index, offset, start, size = BINDING.unpack(record)
        member = Member(machine, index)
        if (
            member not in members
            or not size
            or offset + size > team.size
            or (offset | start | size) % granule
        ):
            raise ValueError("a binding lies outside of the object")
        if team.shareable:
            location, length = inspect(fds[0], granule)
            if not location.is_device or start + size > length:
                raise ValueError("a binding lies outside of its memory")
        memory = mmap.mmap(fds[0], size, offset=start)
        memory.madvise(_DONTFORK)
        bindings.append(Binding(member, offset, offset + size, memory))
    return members, bindings
