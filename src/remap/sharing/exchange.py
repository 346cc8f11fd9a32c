"""Exchanges: how the ranks of a program tell each other small things, with a time limit on each.

An `Exchange` is what the rooms above ask for: a rank, a size, and bytes gathered by everybody. There are four, for
mpi4py, torch.distributed, multiprocessing and a single process; anything else that has these methods will do.

A step that one rank misses cannot be taken back by the others, so the first failure breaks an exchange for good: every
later call fails at once, and the next call of the other ranks fails within its own time limit. What a rank may not say
is no such failure: the others hear of that in the step itself, and all ranks raise the same.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from remap.errors import InvalidValueError, RemapError, ShareError
from remap.sharing.channel import deadline_in
from remap.sharing.sockets import private_directory

TIMEOUT = 30.0
"""How many seconds a step may take where nobody says otherwise."""

LARGEST = 16 << 20
"""How many bytes one rank may tell the others in one step; what claims to be more is refused."""

_LONGEST = LARGEST + 1  # with the sign before them
_LONGEST_STORY = 1000


@runtime_checkable
class Exchange(Protocol):
    """The ranks of a program, and bytes told by each to all.

    Every rank calls the same methods in the same order. `timeout` is in seconds, the exchange's own by default. When it
    is over, or anything else fails, `ShareError` is raised and the exchange is broken for good. What one rank may not
    say or ask is an `InvalidValueError` on every rank, and the exchange goes on.
    """

    @property
    def rank(self) -> int:
        """This process's number among the ranks, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def allgather(self, data: bytes, *, timeout: float | None = None) -> list[bytes]:
        """Tell all ranks `data`, and return what each has told, by rank. Waits for all of them."""
        ...

    def broadcast(self, data: bytes | None = None, *, root: int = 0, timeout: float | None = None) -> bytes:
        """Return what rank `root` gave as `data`; the others' is not looked at. Waits for all ranks."""
        ...

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until every rank has come here."""
        ...

    def split_by_host(self, *, timeout: float | None = None) -> Exchange:
        """Return an exchange of those ranks that can hand each other file descriptors, in the order of ranks."""
        ...


class _Gathering(ABC):
    """An exchange made of one step: gather bytes from all. A subclass gives `_gather` and `_part`."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        if not timeout > 0:  # NaN, too
            raise InvalidValueError(f"a time limit of {timeout} s", rule="it must be more than 0")
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._broken = ""

    @property
    def broken(self) -> str:
        """Why this exchange is broken, empty while it works."""
        return self._broken

    def allgather(self, data: bytes, *, timeout: float | None = None) -> list[bytes]:
        """Tell all ranks `data`, and return what each has told, by rank. Waits for all of them."""
        return self._step(lambda: data, timeout)

    def broadcast(self, data: bytes | None = None, *, root: int = 0, timeout: float | None = None) -> bytes:
        """Return what rank `root` gave as `data`; the others' is not looked at. Waits for all ranks."""

        def say() -> bytes:
            if not 0 <= root < self.size:
                raise InvalidValueError(f"rank {root}", rule=f"the ranks are 0 to {self.size - 1}")
            return (data or b"") if self.rank == root else b""

        return self._step(say, timeout)[root]

    def _step(self, say: Callable[[], bytes], timeout: float | None) -> list[bytes]:
        """Return what each rank says. Where one can say nothing, all of them raise its error, and stay in step."""
        limit = self.timeout if timeout is None else timeout
        if self._broken:
            raise self._error("a step of a broken exchange", self._broken)
        own: InvalidValueError | None = None
        try:
            try:
                told = bytes(say())
                if len(told) > LARGEST:
                    rule = f"at most {LARGEST} can be told"
                    raise InvalidValueError(f"{len(told)} bytes in an exchange", rule=rule)
                told = told and b"+" + told
            except InvalidValueError as error:
                own = error
                told = f"-{error.asked}: {error.rule}".encode()[:_LONGEST_STORY]
            found = self._gather(told, deadline_in(limit))
            said = [one[1:] for one in found]
            refused = next((rank for rank, one in enumerate(found) if one[:1] not in {b"", b"+"}), None)
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            self._break()
            if isinstance(error, TimeoutError):
                self._broken = f"not every rank came within {limit:g} s"
            if isinstance(error, RemapError) or not isinstance(error, Exception):
                raise
            raise self._error("a step of all ranks", self._broken) from error
        if refused is None:
            return said
        why = said[refused][:_LONGEST_STORY].decode(errors="replace")
        raise InvalidValueError("a step of all ranks", rule=f"rank {refused} asked for {why}") from own

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until every rank has come here."""
        self.allgather(b"", timeout=timeout)

    def split_by_host(self, *, timeout: float | None = None) -> Exchange:
        """Return an exchange of those ranks that can hand each other file descriptors, in the order of ranks."""
        hosts = self.allgather(host_identity(), timeout=timeout)
        groups = [[rank for rank, one in enumerate(hosts) if one == host] for host in dict.fromkeys(hosts)]
        return self._part(groups)

    def _error(self, asked: str, rule: str) -> ShareError:
        return ShareError(
            f"{asked} (rank {self.rank} of {self.size})",
            rule=rule,
            next_step="The ranks are out of step from here on: end the program, or make a new exchange",
        )

    @abstractmethod
    def _gather(self, data: bytes, deadline: float) -> list[bytes]:
        """Return what each rank has told; raise `TimeoutError` at the deadline (of `time.monotonic`)."""

    @abstractmethod
    def _part(self, groups: list[list[int]]) -> Exchange:
        """Return an exchange of the group of ranks that has this one; all ranks are here, with the same groups."""

    def _break(self) -> None:  # noqa: B027 (not abstract: most have nothing to let go of)
        """Let go of what the other ranks wait for, where that can be done, so that they need not wait long."""


class SingleExchange(_Gathering):
    """The exchange of a program that has one process."""

    def __init__(self, *, timeout: float = TIMEOUT) -> None:
        super().__init__(0, 1, timeout)

    def _gather(self, data: bytes, deadline: float) -> list[bytes]:
        return [data]

    def _part(self, groups: list[list[int]]) -> Exchange:
        return self


class _Star(_Gathering):
    """An exchange over messages between two: the first rank gathers what all say and tells each the whole.

    Two messages a rank and step are not the fewest that would do, but what is agreed on here is small and happens
    once, and a star knows at once which rank is missing.
    """

    def _gather(self, data: bytes, deadline: float) -> list[bytes]:
        if self.rank:
            self._send(0, data, deadline)
            return _unpacked(self._receive(0, deadline), self.size)
        told = [data, *(self._receive(rank, deadline) for rank in range(1, self.size))]
        whole = _packed(told)
        for rank in range(1, self.size):
            self._send(rank, whole, deadline)
        return told

    @abstractmethod
    def _send(self, rank: int, data: bytes, deadline: float) -> None: ...

    @abstractmethod
    def _receive(self, rank: int, deadline: float) -> bytes: ...


class ProcessExchange(_Star):
    """The exchange of processes that `multiprocessing` starts: make them with `group`, and give each process one.

    They travel as arguments of `Process`, through its queues and pipes, with every start method.
    """

    def __init__(self, rank: int, links: Sequence[socket.socket | None], timeout: float) -> None:
        super().__init__(rank, len(links), timeout)
        self._links = list(links)

    @classmethod
    def group(cls, size: int, *, timeout: float = TIMEOUT) -> list[ProcessExchange]:
        """Return the exchanges of `size` ranks, by rank."""
        if size < 1:
            raise InvalidValueError(f"{size} ranks", rule="a program has at least one")
        pairs = [socket.socketpair() for _ in range(size - 1)]
        hub = cls(0, [None, *(ours for ours, _ in pairs)], timeout)
        spokes = [
            cls(rank, [theirs, *[None] * (size - 1)], timeout) for rank, (_, theirs) in enumerate(pairs, 1)
        ]
        return [hub, *spokes]

    def close(self) -> None:
        """Close the sockets, which breaks the exchange for all other ranks. Closing again does nothing.

        Do so in the process that made the group, once each rank has its own: a rank that dies is noticed at once when
        nobody else holds its end.
        """
        for link in self._links:
            if link is not None:
                link.close()
        self._broken = self._broken or "it was closed"

    def _break(self) -> None:
        self.close()

    def _part(self, groups: list[list[int]]) -> Exchange:
        return self  # processes of one parent share its host

    def _link(self, rank: int) -> socket.socket:
        link = self._links[rank]
        assert link is not None, "a star has links between rank 0 and each other one"
        return link

    def _send(self, rank: int, data: bytes, deadline: float) -> None:
        link = self._link(rank)
        link.setblocking(False)
        left = memoryview(_LENGTH.pack(len(data)) + data)
        while left:
            try:
                left = left[link.send(left) :]
            except BlockingIOError:
                _wait(link, select.POLLOUT, deadline)

    def _receive(self, rank: int, deadline: float) -> bytes:
        link = self._link(rank)
        link.setblocking(False)
        (length,) = _LENGTH.unpack(self._exactly(link, rank, _LENGTH.size, deadline))
        if length > _largest(self.size):
            raise ShareError(f"{length} bytes from rank {rank}", rule="no step of an exchange has that many")
        return self._exactly(link, rank, length, deadline)

    def _exactly(self, link: socket.socket, rank: int, length: int, deadline: float) -> bytes:
        got = bytearray()
        while len(got) < length:
            try:
                part = link.recv(min(length - len(got), 1 << 20))
            except BlockingIOError:
                _wait(link, select.POLLIN, deadline)
                continue
            if not part:
                raise ConnectionError(f"rank {rank} has left: it ended, or its exchange broke")
            got += part
        return bytes(got)


def host_identity() -> bytes:
    """Return what two processes have in common exactly if they can hand each other file descriptors.

    That is the running system and the directory where sockets are: containers with directories of their own are as
    far from each other as two machines.
    """
    status = os.stat(private_directory())
    boot = Path("/proc/sys/kernel/random/boot_id")
    with suppress(OSError):
        return f"{boot.read_text().strip()} {status.st_dev} {status.st_ino}".encode()
    return f"{socket.gethostname()} {status.st_dev} {status.st_ino}".encode()


def _wait(link: socket.socket, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(link, event)
    if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        raise TimeoutError


_LENGTH = struct.Struct("!Q")


def _largest(size: int) -> int:
    return (_LONGEST + _LENGTH.size) * size


def _packed(told: Sequence[bytes]) -> bytes:
    return b"".join([*(_LENGTH.pack(len(one)) for one in told), *told])


def _unpacked(whole: bytes, size: int) -> list[bytes]:
    """Take apart what `_packed` made for `size` ranks; raises `ShareError` if it does not add up."""
    at = size * _LENGTH.size
    found: list[bytes] = []
    if len(whole) >= at:
        for (length,) in _LENGTH.iter_unpack(whole[:at]):
            found.append(whole[at : at + length])
            at += length
    if len(found) != size or at != len(whole):
        raise ShareError("a step of all ranks", rule="what rank 0 gathered does not add up")
    return found
