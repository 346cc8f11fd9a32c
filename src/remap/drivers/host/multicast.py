"""Multicast objects of the host driver: the rules of CUDA's, between processes, over memory files.

An object is a mailbox (`mailbox.py`) with a record of what it is, one for each device of its team, and one, with the
memory file beside it, for each binding. Every process that holds the object maps all replicas for itself; what a
`multimem` operation does to them is done under the mailbox's lock, so that it is atomic towards all others.

Where CUDA blocks until the last device has been added, this refuses with ILLEGAL_STATE: who waits there has made a
mistake, and a test should see it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Generator

from remap.drivers.host.allocations import Allocation, Allocations
from remap.drivers.host.backing import Files
from remap.drivers.host.devices import Devices
from remap.drivers.host.machine import Machine
from remap.drivers.host.mailbox import MOST_RECORDS, Box
from remap.drivers.host.refusals import invalid, system_error
from remap.drivers.host.team import BINDING, DEVICE, HEAD, MOST_DEVICES, Member, Team, read_head
from remap.drivers.multicast_power import MulticastProperties
from remap.errors import CudaResult, driver_error
from remap.sizes import format_size
from remap.types import Granularity, HandleType, Location, LocationKind


class Teams:
    """The multicast objects of a driver, and the calls on them."""

    def __init__(self, machine: Machine, devices: Devices, allocations: Allocations, files: Files) -> None:
        self._machine = machine
        self._devices = devices
        self._allocations = allocations
        self._files = files
        self._granule = machine.options.granularity
        # Devices that several processes share are the same ones in all of them; others are this driver's alone.
        ledger = machine.ledger
        self._identity = (
            secrets.token_bytes(24)
            if ledger is None
            else hashlib.sha256(repr(ledger.identity).encode()).digest()[:24]
        )
        self._held: set[Team] = set()

    @property
    def minimum(self) -> int:
        """The granularity of sizes, offsets and addresses: an object's own, twice that of allocations."""
        return 2 * self._granule

    def granularity(self, properties: MulticastProperties) -> Granularity:
        """Return the granularities of an object."""
        self._check_properties("cuMulticastGetGranularity", properties)
        return Granularity(self.minimum, 2 * self.minimum)

    def create(self, properties: MulticastProperties) -> int:
        """Create an object."""
        call = "cuMulticastCreate"
        self._check_properties(call, properties)
        if properties.size <= 0 or properties.size % self.minimum:
            raise invalid(call, f"size {properties.size}", self._multiple("sizes"))
        with _system(call):
            box = Box.create()
            try:
                head = (b"head", properties.devices, bool(properties.handle_types), properties.size)
                box.append(HEAD.pack(*head))
            except BaseException:
                box.close()
                raise
        return self._enter(box, properties)

    def _enter(self, box: Box, properties: MulticastProperties) -> int:
        with self._machine.lock:
            handle = next(self._machine.handles)
            team = Team(handle, box, properties, Location(LocationKind.DEVICE))
            team.buried = self._bury
            self._allocations.by_handle[handle] = team
            self._held.add(team)
        return handle

    def _check_properties(self, call: str, properties: MulticastProperties) -> None:
        self._devices.require(call, "multicast")
        if not 1 <= properties.devices <= MOST_DEVICES:
            raise invalid(call, f"a team of {properties.devices} devices", f"it has 1 to {MOST_DEVICES}")
        for kind in properties.handle_types:
            self._devices.require(call, kind.value)

    def _multiple(self, what: str) -> str:
        return f"{what} are positive multiples of the multicast granularity, {format_size(self.minimum)}"

    def add(self, handle: int, device: int) -> None:
        """Add a device of this machine to a team."""
        call = "cuMulticastAddDevice"
        self._devices.require(call, "multicast")
        self._devices.check(call, device)
        asked = f"device {device} in a team"
        member = Member(self._identity, device)
        with self._using(call, handle) as team, self._reading(call, team):
            if member in team.members:
                raise invalid(call, asked, "it was added before")
            if len(team.members) >= team.most:
                raise invalid(
                    call, asked, f"the team was made for {team.most} devices, and all have been added"
                )
            peers = self._machine.options.peers[device]
            for other in team.members:
                if other.machine == self._identity and not peers[other.number]:
                    rule = f"it is not linked to device {other.number} of the team"
                    raise driver_error(call, CudaResult.INVALID_DEVICE, asked=asked, rule=rule)
            team.box.append(DEVICE.pack(b"devi", *member))
            with self._machine.lock:
                team.allowed |= 1 << device

    def bind(self, handle: int, offset: int, memory: int, memory_offset: int, size: int) -> None:
        """Make memory a replica."""
        call = "cuMulticastBindMem"
        self._devices.require(call, "multicast")
        asked = f"a binding of {size} bytes at offset {offset}"
        with self._using(call, handle) as team, self._pinned(call, memory) as allocation:
            if isinstance(allocation, Team):
                raise invalid(call, asked, "the memory is a multicast object itself")
            if size <= 0 or (offset | memory_offset | size) % self.minimum or min(offset, memory_offset) < 0:
                raise invalid(call, asked, self._multiple("offsets and sizes"))
            if offset + size > team.size or memory_offset + size > allocation.size:
                rule = f"the object has {format_size(team.size)}, the memory {format_size(allocation.size)}"
                raise invalid(call, asked, rule)
            if team.shareable and allocation.file is None:
                raise invalid(call, asked, "an object that is shared takes shareable memory only")
            with self._reading(call, team):
                self._check_binding(call, asked, team, allocation, offset, offset + size)
                index = allocation.properties.location.index
                file_offset = allocation.extent.offset + memory_offset
                fd = allocation.extent.fd if allocation.file is None else self._files.export(allocation.file)
                try:
                    record = BINDING.pack(b"bind", self._identity, index, offset, file_offset, size)
                    team.box.append(record, (fd,))
                finally:
                    if allocation.file is not None:
                        os.close(fd)
                with self._machine.lock:
                    allocation.mappings += 1  # a reason to stay, as a mapping is
                    team.bound[index, offset] = allocation

    def _check_binding(
        self, call: str, asked: str, team: Team, allocation: Allocation, offset: int, end: int
    ) -> None:
        place = allocation.properties.location
        member = Member(self._identity, place.index)
        if len(team.members) < team.most:
            rule = f"{len(team.members)} of the {team.most} devices of its team have been added (CUDA would block)"
            step = "Add every device first, and let the processes agree that they have"
            raise driver_error(call, CudaResult.ILLEGAL_STATE, asked=asked, rule=rule, next_step=step)
        if not place.is_device or member not in team.members:
            raise driver_error(
                call,
                CudaResult.INVALID_DEVICE,
                asked=asked,
                rule=f"the memory is on {place}, which is not of its team",
            )
        if len(team.members) + len(team.bindings) + 1 >= MOST_RECORDS:
            raise driver_error(
                call, CudaResult.OUT_OF_MEMORY, asked=asked, rule="the object has no room for more bindings"
            )
        for other in team.bindings:
            if other.member == member and other.offset < end and offset < other.end:
                rule = f"other memory of {place} is bound at offset {other.offset} ({other.end - other.offset} bytes)"
                raise invalid(call, asked, rule, "Unbind it first")

    def unbind(self, handle: int, device: int, offset: int, size: int) -> None:
        """Undo exactly one binding."""
        call = "cuMulticastUnbind"
        self._devices.require(call, "multicast")
        self._devices.check(call, device)
        member = Member(self._identity, device)
        with self._using(call, handle) as team:
            with self._reading(call, team):
                wanted = [
                    (one.member, one.offset, one.end) != (member, offset, offset + size)
                    for one in team.bindings
                ]
                if all(wanted) or (device, offset) not in team.bound:
                    rule = f"this process bound no memory of device {device} exactly there"
                    raise invalid(call, f"{size} bytes at offset {offset} to be unbound", rule)
                team.box.keep([True] * (1 + len(team.members)) + wanted)
            self._let_go(team.bound.pop((device, offset)))

    def check_mappable(self, call: str, handle: int, address: int) -> None:
        """Raise if a handle is one of an object that cannot be mapped; the caller does not hold the table lock."""
        if not isinstance(self._allocations.by_handle.get(handle), Team):
            return
        if address % self.minimum:
            rule = f"it is no multiple of the multicast granularity, {format_size(self.minimum)}"
            raise invalid(call, f"address {address:#x}", rule)
        with self._using(call, handle) as team, self._reading(call, team):
            if len(team.members) < team.most:
                rule = f"{len(team.members)} of the {team.most} devices of its team have been added (CUDA would block)"
                raise driver_error(
                    call,
                    CudaResult.ILLEGAL_STATE,
                    asked="a mapping of a multicast object",
                    rule=rule,
                    next_step="Add every device first, and let the processes agree that they have",
                )

    @contextlib.contextmanager
    def operation(self, team: Team, offset: int, size: int) -> Generator[tuple[memoryview, ...] | str]:
        """Yield the replicas of a range, or what is missing; nothing else happens to the object meanwhile."""
        with team.box.locked():
            try:
                team.refresh(self._granule)
                found = team.replicas(offset, size)
            except (OSError, ValueError) as error:
                found = f"the multicast object is damaged: {error}"
            yield found

    # -- between processes --

    def export(self, team: Team, kind: HandleType) -> int:
        """Return a new descriptor of an object; the caller closes it, and holds the table lock."""
        call = "cuMemExportToShareableHandle"
        if kind not in team.properties.handle_types:
            rule = "the handle types are fixed at create, and this object was not created for it"
            raise invalid(call, f"{kind.value} of a multicast object", rule)
        with _system(call):
            return os.dup(team.box.fd)

    def adopt(self, fd: int) -> int:
        """Return a handle for the object behind a descriptor; raises `ValueError`, `OSError` or `TimeoutError`."""
        self._devices.require("cuMemImportFromShareableHandle", "multicast")
        box = Box.adopt(fd)
        try:
            with box.locked():
                properties = read_head(box)
        except BaseException:
            box.close()
            raise
        if properties.size % self.minimum:
            box.close()
            raise ValueError("the object was made with another granularity")
        return self._enter(box, properties)

    # -- inside --

    @contextlib.contextmanager
    def _using(self, call: str, handle: int) -> Generator[Team]:
        """Find an object, and keep it for a block."""
        with self._pinned(call, handle) as team:
            if not isinstance(team, Team):
                raise invalid(call, f"handle {handle}", "it is not the handle of a multicast object")
            yield team

    @contextlib.contextmanager
    def _pinned(self, call: str, handle: int) -> Generator[Allocation]:
        with self._machine.lock:
            found = self._allocations.find(call, handle)
            found.mappings += 1
        try:
            yield found
        finally:
            self._let_go(found)

    @contextlib.contextmanager
    def _reading(self, call: str, team: Team) -> Generator[None]:
        """Hold an object's lock for a block that begins with its state up to date."""
        try:
            with team.box.locked():
                team.refresh(self._granule)
                yield
        except (OSError, ValueError) as error:
            raise driver_error(
                call, CudaResult.UNKNOWN, asked="use of a multicast object", rule=f"it is damaged: {error}"
            ) from error

    def _let_go(self, allocation: Allocation) -> None:
        with self._machine.lock:
            dead = self._allocations.drop_mapping(allocation)
        if dead:
            self._allocations.bury(allocation)

    def _bury(self, dead: Allocation) -> None:
        """Let go of an object, and of the memory that this process bound to it."""
        assert isinstance(dead, Team)
        with self._machine.lock:
            self._held.discard(dead)
        dead.bindings.clear()
        dead.box.close()
        for allocation in dead.bound.values():
            self._let_go(allocation)
        dead.bound.clear()

    def shut_down(self) -> None:
        """Let go of everything."""
        while self._held:
            team = self._held.pop()
            team.bindings.clear()
            team.box.close()

    def after_fork(self) -> None:
        """Close the child's copies; the parent's stay."""
        self.shut_down()


@contextlib.contextmanager
def _system(call: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise system_error(call, error) from error
