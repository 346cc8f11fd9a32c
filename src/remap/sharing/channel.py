"""Channels: whole messages, with file descriptors beside them, between processes of one user on one machine.

A connection is an AF_UNIX socket of type SEQPACKET: the kernel keeps messages apart, so that one is received whole or
not at all, and nobody can stall a reader with half of one. Descriptors travel as SCM_RIGHTS and never as numbers (a
number means something in one process only, and another one may have taken it meanwhile); they arrive close-on-exec,
since Python's `recv_fds` would let children inherit them.

Three things keep others out: the directory (0700), the socket (0600), and the user id of the peer, which the kernel
vouches for and both ends check.
"""

from __future__ import annotations

import array
import math
import os
import select
import socket
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self

from remap.errors import InvalidValueError, ShareError
from remap.forks import in_child

LARGEST_MESSAGE = 128 << 10
"""How many bytes a message may have; a socket's default buffer holds more."""

FDS_PER_PACKET = 250
"""How many descriptors travel together; the kernel takes 253 (SCM_MAX_FD)."""

MOST_FDS = 4096
"""How many descriptors may belong to one message."""

LONGEST_LIMIT = 1e6
"""The longest time limit in seconds, eleven days: the system calls that wait take no longer ones, nor infinity."""

_COUNT = struct.Struct("!I")
_INT = array.array("i").itemsize
_CREDENTIALS = struct.Struct("3i")


class Fds:
    """Descriptors that this process owns: closed together, when they are collected, and in the child after a fork.

    An interrupt may come wherever a function of Python begins and a call has returned, and a number that stands nowhere
    then stays open for ever. So numbers go from one call into the list, and out of it, without a step in between.
    """

    __slots__ = ("__weakref__", "_numbers", "add")

    add: Callable[[int], None]
    """Take ownership of one more."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._numbers = list(numbers)
        self.add = self._numbers.append
        close_in_child(self)

    @property
    def numbers(self) -> Sequence[int]:
        """The descriptors, in order; none once closed."""
        return tuple(self._numbers)

    def duplicate(self, first: int = 0, count: int | None = None) -> Fds:
        """Return descriptors of the same files, all or `count` of them, with a life of their own; raises `OSError`."""
        copy = Fds()
        try:
            part = self._numbers[first : None if count is None else first + count]
            copy._numbers.extend(map(os.dup, part))
        except BaseException:
            copy.close()
            raise
        return copy

    def take(self, other: Fds) -> None:
        """Take over what `other` owns; it owns nothing then."""
        self._numbers += other._numbers
        other._numbers.clear()

    def close(self) -> None:
        """Close them. Closing again does nothing."""
        while self._numbers:
            with suppress(OSError, IndexError):  # one was closed already; there is none left
                deque(map(os.close, iter(self._numbers.pop, None)), maxlen=0)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._numbers)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Close what is still open: that takes no lock and waits for nothing.

        Not when the interpreter ends: the process's descriptors end with it, and names of modules may be gone.
        """
        if not ending():
            self.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close them."""
        self.close()


class _Closable(Protocol):
    def close(self) -> None: ...


_of_parent: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_child(what: _Closable) -> None:
    """Close something in the child whenever this process forks.

    Whoever waits for a process to end would wait for its children too, if they kept what it has open.
    """
    _of_parent.add(what)


def _close() -> None:
    for one in list(_of_parent):
        one.close()


in_child(_close)


class Channel:
    """One end of a connection. Not for several threads at a time.

    Every wait has a limit: `deadline` is a time of `time.monotonic`, None means not to wait at all (`BlockingIOError`
    then).
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        close_in_child(self)

    def fileno(self) -> int:
        """Return the socket's descriptor, for `select` and `asyncio`."""
        return self._socket.fileno()

    def send(self, message: bytes, fds: Sequence[int] = (), *, deadline: float | None) -> None:
        """Send a message with descriptors, which stay the sender's. Raises `OSError` if the peer has gone.

        The message's first packet says how many descriptors follow; each packet after it carries up to 250.
        """
        if len(message) > LARGEST_MESSAGE or len(fds) > MOST_FDS:
            raise InvalidValueError(
                f"a message of {len(message)} bytes with {len(fds)} descriptors",
                rule=f"at most {LARGEST_MESSAGE} bytes and {MOST_FDS} descriptors go together",
                next_step="Use fewer, larger chunks",
            )
        self.send_packet(_COUNT.pack(len(fds)) + message, (), deadline=deadline)
        for packet in batches(fds):
            self.send_packet(b"+", packet, deadline=deadline)

    def receive(self, *, deadline: float | None, most_fds: int = MOST_FDS) -> tuple[bytes, Fds]:
        """Return the next message and its descriptors, which are the caller's now.

        Raises `EOFError` if the peer has gone, `ShareError` for what no peer of ours would send; nothing stays open
        then.
        """
        first, none = self.receive_packet(deadline=deadline)
        message, count = parse_first(first, none, most_fds)
        fds = Fds()
        try:
            while len(fds) < count:
                _, more = self.receive_packet(deadline=deadline)
                join_packet(fds, more, count)
        except BaseException:
            fds.close()
            raise
        return message, fds

    def send_packet(self, packet: bytes, fds: Sequence[int], *, deadline: float | None) -> None:
        """Send one packet, of which `send` makes messages."""
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                self._socket.sendmsg([packet], beside, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            else:
                return

    def receive_packet(self, *, deadline: float | None) -> tuple[bytes, Fds]:
        """Return one packet and the descriptors in it; close-on-exec from the start."""
        fds = Fds()
        arrived: list[Any] = []
        try:
            while not arrived:
                try:
                    # By one call: an interrupt comes when it has returned, and what has arrived would be nobody's.
                    arrived.extend(map(self._socket.recvmsg, _ROOM, _ROOM_BESIDE, _FLAGS))
                except BlockingIOError:
                    self._wait(select.POLLIN, deadline)
            packet, beside, flags, _ = arrived[0]
            fds._numbers[:] = _descriptors(beside)
        except BaseException:
            if arrived:
                fds._numbers[:] = _descriptors(arrived[0][1])
            fds.close()
            raise
        if flags & _CUT_OFF:
            fds.close()
            rule = "it was longer than any message, or this process may open no more descriptors (ulimit -n)"
            raise ShareError("a message that was cut off", rule=rule)
        if not packet:
            fds.close()
            raise EOFError("the peer has gone")
        return packet, fds

    def peer(self) -> tuple[int, int]:
        """Return the process id and the user id of the peer, by the kernel's word."""
        found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, _ = _CREDENTIALS.unpack(found)
        return process, user

    def check_peer(self) -> None:
        """Raise `ShareError` unless the peer belongs to the same user."""
        _, user = self.peer()
        if user != os.geteuid():
            raise ShareError(
                f"a connection with a process of user {user}",
                rule=f"memory is shared between processes of one user, here {os.geteuid()}",
            )

    def _wait(self, event: int, deadline: float | None) -> None:
        if deadline is None:
            raise BlockingIOError
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise TimeoutError("the peer did not answer in time")

    def hang_up(self, message: bytes) -> None:
        """Close this end, with a last message where the peer takes one. Waits for nothing.

        What the peer has said is dropped first: the kernel would tell it of that, and not of the message.
        """
        with self, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
            while self._socket.recv(1):
                pass
            self.send(message, deadline=None)

    def close(self) -> None:
        """Close this end. Closing again does nothing."""
        self._socket.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


# As plain numbers: the enumeration's own operators take as long as receiving.
_FLAGS = (int(socket.MSG_CMSG_CLOEXEC),)
_CUT_OFF = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)

# Room for more than one batch, so that a peer that sends more is found out by their number and not cut off.
_ROOM, _ROOM_BESIDE = (_COUNT.size + LARGEST_MESSAGE,), (socket.CMSG_SPACE(256 * _INT),)


def _descriptors(beside: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors in what came beside a packet."""
    found: list[int] = []
    for level, kind, data in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found += array.array("i", data[: len(data) - len(data) % _INT])
    return found


def batches(fds: Sequence[int]) -> list[Sequence[int]]:
    """Return descriptors in the groups in which they travel."""
    return [fds[at : at + FDS_PER_PACKET] for at in range(0, len(fds), FDS_PER_PACKET)]


def raise_limit() -> int:
    """Let this process open as many descriptors as it may, and return how many those are."""
    import resource  # not on Windows

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def parse_first(packet: bytes, fds: Fds, most_fds: int) -> tuple[bytes, int]:
    """Return the message in a first packet and how many descriptors will follow; raises `ShareError`."""
    stray = len(fds)
    fds.close()
    if stray or len(packet) < _COUNT.size:
        raise ShareError("a message", rule="it does not begin as messages of remap do")
    (count,) = _COUNT.unpack_from(packet)
    if count > most_fds:
        raise ShareError(f"a message with {count} descriptors", rule=f"it may have {most_fds} at most")
    return packet[_COUNT.size :], count


def join_packet(fds: Fds, more: Fds, count: int) -> None:
    """Add the descriptors of one packet to those that came before; raises `ShareError` if they are too many or none."""
    if not more or len(fds) + len(more) > count:
        found = len(more)
        more.close()
        raise ShareError(
            f"a packet with {found} descriptors", rule=f"{count - len(fds)} more belong to this message"
        )
    fds.take(more)


def deadline_in(seconds: float) -> float:
    """Return when a time limit ends, as a time of `time.monotonic`; raises `InvalidValueError` for NaN."""
    if math.isnan(seconds):
        raise InvalidValueError(f"a time limit of {seconds} s", rule="it is a number of seconds")
    return time.monotonic() + min(seconds, LONGEST_LIMIT)
