"""Multicast objects of the host driver: the rules of CUDA's, between processes, over memory files.

An object is a mailbox (`mailbox.py`) that says what it is, which devices are in its team and which memory is bound,
with the memory files beside that. Every process that holds the object maps all replicas for itself; what a `multimem`
operation does to them is done under the mailbox's lock, so that it is atomic towards all others.

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
from remap.drivers.host.mailbox import MOST_FDS, Box
from remap.drivers.host.refusals import invalid, system_error
from remap.drivers.host.team import MOST_DEVICES, Binding, Member, State, Team, close_all
from remap.drivers.multicast_power import MulticastProperties
from remap.errors import CudaResult, DriverError, driver_error
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
        state = State(properties, (), ())
        with _system(call):
            box = Box.create()
            try:
                box.write(state.pack(), ())
            except BaseException:
                box.close()
                raise
        return self._enter(box, state)

    def _enter(self, box: Box, state: State) -> int:
        with self._machine.lock:
            handle = next(self._machine.handles)
            team = Team(handle, box, state, Location(LocationKind.DEVICE))
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
            state = team.state
            if member in state.members:
                raise invalid(call, asked, "it was added before, and a team has each device once", _ONE_EACH)
            if state.complete:
                rule = f"the team was made for {state.properties.devices} devices, and all have been added"
                raise invalid(call, asked, rule)
            peers = self._machine.options.peers[device]
            for other in state.members:
                if other.machine == self._identity and not peers[other.number]:
                    rule = f"it is not linked to device {other.number} of the team"
                    raise driver_error(call, CudaResult.INVALID_DEVICE, asked=asked, rule=rule)
            self._replace(team, state._replace(members=(*state.members, member)))
            with self._machine.lock:
                team.allowed |= 1 << device

    def _replace(self, team: Team, state: State, add: int | None = None, drop: int | None = None) -> None:
        """Write a new state, with one descriptor more, or one less, beside it. The caller holds the object's lock."""
        _, fds = team.box.read()
        try:
            kept = [fd for index, fd in enumerate(fds) if index != drop]
            team.box.write(state.pack(), kept if add is None else [*kept, add])
        finally:
            close_all(fds)

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
                start = allocation.extent.offset + memory_offset
                binding = Binding(Member(self._identity, index), offset, start, size)
                fd = allocation.extent.fd if allocation.file is None else self._files.export(allocation.file)
                try:
                    state = team.state
                    self._replace(team, state._replace(bindings=(*state.bindings, binding)), add=fd)
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
        state = team.state
        if not state.complete:
            raise _too_early(call, asked, state)
        if not place.is_device or member not in state.members:
            raise driver_error(
                call,
                CudaResult.INVALID_DEVICE,
                asked=asked,
                rule=f"the memory is on {place}, which is not of its team",
            )
        if len(state.bindings) >= MOST_FDS:
            rule = f"the object has {MOST_FDS} bindings, and has room for no more"
            raise driver_error(call, CudaResult.OUT_OF_MEMORY, asked=asked, rule=rule)
        for other in state.bindings:
            if other.member == member and other.offset < end and offset < other.end:
                rule = f"other memory of {place} is bound at offset {other.offset} ({other.size} bytes)"
                raise invalid(call, asked, rule, "Unbind it first")

    def unbind(self, handle: int, device: int, offset: int, size: int) -> None:
        """Undo exactly one binding."""
        call = "cuMulticastUnbind"
        self._devices.require(call, "multicast")
        self._devices.check(call, device)
        member = Member(self._identity, device)
        with self._using(call, handle) as team:
            with self._reading(call, team):
                state = team.state
                found = [
                    number
                    for number, one in enumerate(state.bindings)
                    if (one.member, one.offset, one.size) == (member, offset, size)
                ]
                if not found or (device, offset) not in team.bound:
                    rule = f"this process bound no memory of device {device} exactly there"
                    raise invalid(call, f"{size} bytes at offset {offset} to be unbound", rule)
                left = state.bindings[: found[0]] + state.bindings[found[0] + 1 :]
                self._replace(team, state._replace(bindings=left), drop=found[0])
            self._let_go(team.bound.pop((device, offset)))

    def check_mappable(self, call: str, handle: int, address: int) -> None:
        """Raise if a handle is one of an object that cannot be mapped; the caller does not hold the table lock."""
        if not isinstance(self._allocations.by_handle.get(handle), Team):
            return
        if address % self.minimum:
            rule = f"it is no multiple of the multicast granularity, {format_size(self.minimum)}"
            raise invalid(call, f"address {address:#x}", rule)
        with self._using(call, handle) as team, self._reading(call, team):
            if not team.state.complete:
                raise _too_early(call, "a mapping of a multicast object", team.state)

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
            letter, fds = box.read()
            close_all(fds)
            state = State.unpack(letter, len(fds), self.minimum)
            if not state.properties.handle_types:
                raise ValueError("the object was not made to be shared")
        except BaseException:
            box.close()
            raise
        return self._enter(box, state)

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
            self._allocations.drop_mapping(allocation)
        self._allocations.bury()

    def _bury(self, dead: Allocation) -> None:
        """Let go of an object, and of the memory that this process bound to it."""
        assert isinstance(dead, Team)
        with self._machine.lock:
            self._held.discard(dead)
        dead.windows.clear()
        dead.box.close()
        while dead.bound:
            self._let_go(dead.bound.popitem()[1])

    def shut_down(self) -> None:
        """Let go of everything."""
        while self._held:
            team = self._held.pop()
            team.windows.clear()
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


def _too_early(call: str, asked: str, state: State) -> DriverError:
    devices = state.properties.devices
    rule = f"{len(state.members)} of the {devices} devices of its team have been added (CUDA would block)"
    step = "Add every device first, and let the processes agree that they have"
    return driver_error(call, CudaResult.ILLEGAL_STATE, asked=asked, rule=rule, next_step=step)


_ONE_EACH = "Let every process add a device of its own"
