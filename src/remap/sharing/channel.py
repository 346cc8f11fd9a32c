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
import fcntl
import os
import select
import socket
import stat
import struct
import tempfile
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from remap.errors import InUseError, InvalidValueError, ShareError

LARGEST_MESSAGE = 128 << 10
"""How many bytes a message may have; a socket's default buffer holds more."""

FDS_PER_PACKET = 250
"""How many descriptors travel together; the kernel takes 253 (SCM_MAX_FD)."""

MOST_FDS = 4096
"""How many descriptors may belong to one message."""

_PATH_LIMIT = 107  # sockaddr_un.sun_path has 108 bytes, the last one 0
_COUNT = struct.Struct("!I")
_INT = array.array("i").itemsize
_CREDENTIALS = struct.Struct("3i")


class Fds:
    """Descriptors that this process owns: closed together, when they are collected, and in the child after a fork."""

    __slots__ = ("__weakref__", "_numbers")

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._numbers = list(numbers)
        _owned.add(self)

    @property
    def numbers(self) -> Sequence[int]:
        """The descriptors, in order; none once closed."""
        return tuple(self._numbers)

    def duplicate(self, first: int = 0, count: int | None = None) -> Fds:
        """Return descriptors of the same files, all or `count` of them, with a life of their own; raises `OSError`."""
        copy = Fds()
        try:
            for number in self._numbers[first : None if count is None else first + count]:
                copy.add(os.dup(number))
        except BaseException:
            copy.close()
            raise
        return copy

    def add(self, number: int) -> None:
        """Take ownership of one more."""
        self._numbers.append(number)

    def take(self, other: Fds) -> None:
        """Take over what `other` owns; it owns nothing then."""
        self._numbers += other._numbers
        other._numbers = []

    def close(self) -> None:
        """Close them. Closing again does nothing."""
        while self._numbers:
            with suppress(OSError):
                os.close(self._numbers.pop())

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._numbers)

    def __del__(self) -> None:
        """Close what is still open: that takes no lock and waits for nothing."""
        self.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close them."""
        self.close()


_owned: weakref.WeakSet[Fds] = weakref.WeakSet()


def _close_in_child() -> None:
    for one in list(_owned):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


class Channel:
    """One end of a connection. Not for several threads at a time.

    Every wait has a limit: `deadline` is a time of `time.monotonic`, None means not to wait at all (`BlockingIOError`
    then).
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection

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
        while True:
            try:
                packet, beside, flags, _ = self._socket.recvmsg(
                    _COUNT.size + LARGEST_MESSAGE, _ANCILLARY, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
            else:
                break
        fds = Fds()
        for level, kind, data in beside:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                for number in array.array("i", data[: len(data) - len(data) % _INT]):
                    fds.add(number)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
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

    def close(self) -> None:
        """Close this end. Closing again does nothing."""
        self._socket.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


# Room for more than one batch, so that a peer that sends more is found out by their number and not cut off.
_ANCILLARY = socket.CMSG_SPACE(256 * _INT)


def batches(fds: Sequence[int]) -> list[Sequence[int]]:
    """Return descriptors in the groups in which they travel."""
    return [fds[at : at + FDS_PER_PACKET] for at in range(0, len(fds), FDS_PER_PACKET)]


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


class Listener:
    """A socket that others connect to: mode 0600, at a path that one live process owns.

    The owner holds a lock on the file beside it, `PATH.lock`, which the kernel drops when the process dies, however it
    dies. So what a dead owner left can be told from what is in use, with no process ids, which are used again and mean
    nothing in another container.
    """

    def __init__(self, path: Path) -> None:
        _check_length(path)
        self.path = path
        self._fds = Fds()  # so that a forked child holds neither the lock nor the socket
        lock = _take_lock(_lock_path(path))
        if lock is None:
            raise InUseError(
                f"a socket at {path}",
                rule="a live process listens there already",
                next_step="Connect to it, or use another path",
            )
        self._fds.add(lock)
        try:
            if path.exists() and not path.is_socket():
                raise InvalidValueError(f"a socket at {path}", rule="there is a file of another kind")
            path.unlink(missing_ok=True)
            made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._fds.add(made.fileno())
            self._socket = made
            made.bind(os.fspath(path))
            path.chmod(0o600)  # nobody can connect before `listen`, so there is no moment of another mode
            made.listen(256)
            made.setblocking(False)
        except BaseException:
            self._fds.close()
            raise

    def fileno(self) -> int:
        """Return the socket's descriptor, for `select` and `asyncio`."""
        return self._socket.fileno()

    def accept(self) -> Channel | None:
        """Return the next connection, or None if there is none, or its peer is another user's (it is closed then)."""
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return None
        channel = Channel(connection)
        try:
            channel.check_peer()
        except ShareError:
            channel.close()
            return None
        return channel

    def close(self) -> None:
        """Remove the socket's file and stop listening. Closing again does nothing."""
        if self._fds:
            self.path.unlink(missing_ok=True)
            _lock_path(self.path).unlink(missing_ok=True)
            self._socket.detach()
            self._fds.close()


def connect(path: Path, *, deadline: float) -> Channel:
    """Return a connection with the process of this user that listens at `path`.

    Raises `ShareError` if there is none, if it belongs to another user, or if it does not take the connection in time.
    """
    _check_length(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        connection.connect(os.fspath(path))
        channel = Channel(connection)
        channel.check_peer()
    except OSError as error:
        connection.close()
        gone = isinstance(error, FileNotFoundError | ConnectionRefusedError)
        raise ShareError(
            f"a connection with {path}",
            rule="nobody listens there: the process has ended, or never ran" if gone else str(error),
        ) from error
    except BaseException:
        connection.close()
        raise
    return channel


def private_directory() -> Path:
    """Return the directory of this user's sockets, mode 0700, made on first use.

    Raises `ShareError` if what is there belongs to another user or is open to others.
    """
    path = Path(tempfile.gettempdir()) / f"remap-{os.geteuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ShareError(
            f"sockets in {path}",
            rule="the directory must be this user's alone (mode 0700), and it is not",
            next_step="Remove it, or set TMPDIR to a directory of yours",
        )
    return path


def remove_stale(directory: Path) -> int:
    """Remove the sockets whose owners have died from a directory, and return how many those were."""
    removed = 0
    for lock in directory.glob("*.lock"):
        with suppress(OSError):
            held = _take_lock(lock)
            if held is None:
                continue
            lock.with_suffix("").unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
            os.close(held)
            removed += 1
    return removed


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _take_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock file, or None if another holds it."""
    while True:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.path.samestat(os.fstat(held), path.stat())
        except FileNotFoundError:
            same = False
        except BlockingIOError:
            os.close(held)
            return None
        except BaseException:
            os.close(held)
            raise
        if same:
            return held
        os.close(held)  # its last owner removed it while we were opening it: that file means nothing now


def _check_length(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > _PATH_LIMIT:
        raise InvalidValueError(
            f"a socket at {path} ({length} bytes)",
            rule=f"the path of a socket has {_PATH_LIMIT} bytes at most",
            next_step="Use a shorter one, for example under /tmp",
        )
