"""What a broker keeps: named buffers, who has them open, and the connections of those."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from remap.errors import DescriptorError, InUseError, ShareError
from remap.sharing.channel import LARGEST_MESSAGE, Channel, Fds, join_packet, parse_first
from remap.sharing.descriptor import MOST_CHUNKS, Descriptor
from remap.sharing.wire import Fields, encode
from remap.types import Access, HandleType


@dataclass(eq=False, slots=True)
class Named:
    """A buffer that the broker keeps: its name, what it is, and its handles."""

    key: str
    name: str
    descriptor: Descriptor
    data: bytes
    fds: Fds
    since: float = field(default_factory=time.time)
    leases: dict[int, Lease] = field(default_factory=dict["int", "Lease"])

    @property
    def writer(self) -> Lease | None:
        """Who has it open for writing."""
        return next((lease for lease in self.leases.values() if lease.access.writable), None)

    @property
    def on_device(self) -> bool:
        """Whether devices may go on writing to it when the process that made them do so is dying."""
        return self.descriptor.driver != "host"

    def in_the_way(self, access: Access) -> list[Lease]:
        """Return the leases for which it cannot be opened so: one writer alone has it open, or many readers."""
        if not access.readable:
            return []
        return [lease for lease in self.leases.values() if access.writable or lease.access.writable]

    def holders(self) -> str:
        """Say who has it open."""
        writer = self.writer
        if writer is not None:
            return f"process {writer.client.process} has it open for writing"
        readers = sorted({lease.client.process for lease in self.leases.values()})
        if len(readers) == 1:
            return f"process {readers[0]} has it open for reading"
        listed = ", ".join(map(str, readers[:8])) + (", …" if len(readers) > 8 else "")
        return f"processes {listed} have it open for reading"

    def check_unused(self) -> None:
        """Raise `InUseError` while anyone has it open: it is not to be dropped then."""
        if self.leases:
            raise InUseError(
                f'drop of buffer "{self.name}"',
                rule=self.holders(),
                next_step="Let them close it first; or pass force=True: what they have mapped stays theirs until they "
                "close it, and nobody can open it any more",
            )

    def check_free(self, access: Access) -> None:
        """Raise `InUseError` unless it can be opened so: by one writer alone, or by many readers."""
        if self.in_the_way(access):
            raise InUseError(
                f'buffer "{self.name}" with access "{access}"',
                rule=f"{self.holders()}, and a buffer has one writer or many readers",
                next_step="Wait for them with wait=, or ask again later",
            )


@dataclass(eq=False, slots=True)
class Lease:
    """That a client has a buffer open."""

    named: Named
    access: Access
    client: Client


class Client:
    """One connection: the message that is coming in, and what the process at the other end has open.

    `heard` is when its last message came, or it itself; `due` hangs up on it while the rest of a message is to come.
    """

    def __init__(self, channel: Channel, now: float) -> None:
        self.channel = channel
        self.process, _ = channel.peer()
        self.heard = now
        self.due: asyncio.TimerHandle | None = None
        self.leases: dict[int, Lease] = {}
        self.waiting: Waiting | None = None
        self._message: bytes | None = None
        self._missing = 0
        self._fds = Fds()

    @property
    def writes_on_device(self) -> bool:
        """Whether it has a buffer open that devices may be writing to."""
        return any(lease.access.writable and lease.named.on_device for lease in self.leases.values())

    def receive(self) -> tuple[Fields, Fds] | None:
        """Take one packet; return a message if that has completed one. Raises what ends the connection."""
        packet, fds = self.channel.receive_packet(deadline=None)
        if self._message is None:
            self._message, self._missing = parse_first(packet, fds, MOST_CHUNKS)
        else:
            join_packet(self._fds, fds, self._missing)
        if len(self._fds) < self._missing:
            return None
        message, found = self._message, self._fds
        self._message, self._fds = None, Fds()
        try:
            return Fields.decode(message), found
        except ShareError:
            found.close()
            raise

    def close(self) -> None:
        """Close the connection and what has come in."""
        self._fds.close()
        self.channel.close()


@dataclass(eq=False, slots=True)
class Waiting:
    """A client that waits until a buffer exists and, if it named a right, can be opened so.

    `request` is what to answer then, None if it only wants to hear of it.
    """

    name: str
    access: Access
    timer: asyncio.TimerHandle
    request: Fields | None = None


def page(buffers: Mapping[str, Named], after: str) -> tuple[list[dict[str, object]], bool]:
    """Return what one answer says of the buffers behind a name, and whether there are more than it holds."""
    entries: list[dict[str, object]] = []
    size = 0
    for name in sorted(name for name in buffers if name > after):
        found = _entry(buffers[name])
        size += len(encode({"": found}))
        if size > LARGEST_MESSAGE - 1024:  # what stands around them
            return entries, True
        entries.append(found)
    return entries, False


def _entry(named: Named) -> dict[str, object]:
    """Return what a list of buffers says of one."""
    writer = named.writer
    return {
        "name": named.name,
        "size": named.descriptor.size,
        "chunks": len(named.descriptor.chunks),
        "locations": sorted({str(chunk.location) for chunk in named.descriptor.chunks})[:16],
        "driver": named.descriptor.driver,
        "identity": named.descriptor.identity.hex(),
        "since": named.since,
        "writer": None if writer is None else writer.client.process,
        "readers": [
            one.client.process for one in list(named.leases.values())[:16] if not one.access.writable
        ],
        "open": len(named.leases),
    }


def check_handles(descriptor: Descriptor, fds: Fds) -> None:
    """Refuse what the broker could not keep alive, or what no importer could map."""
    if descriptor.kind is not HandleType.POSIX_FD:
        raise DescriptorError(
            f"a buffer of {descriptor.kind} handles",
            rule="a fabric handle is a name and keeps nothing alive, and the broker holds handles alone",
            next_step='Allocate it with shareable="posix_fd"',
        )
    if len(fds) != len(descriptor.chunks):
        raise DescriptorError(
            f"{len(fds)} descriptors for {len(descriptor.chunks)} chunks",
            rule="each chunk has one of its own",
        )
    for number, chunk in zip(fds.numbers, descriptor.chunks, strict=True):
        status = os.fstat(number)
        wrong = stat.S_ISDIR(status.st_mode) or stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)
        if wrong or (descriptor.driver == "host" and status.st_size != chunk.size):
            raise DescriptorError(
                "a chunk of a buffer", rule="the descriptor is not one of memory of its size"
            )
