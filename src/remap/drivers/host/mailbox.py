"""A mailbox: a letter, with file descriptors beside it, that every process which holds the box can read and replace.

It is a datagram socket that is connected to itself. What is sent to it stays in its queue, where every holder may look
without taking it out (MSG_PEEK), and each look yields descriptors of one's own. It needs no server, outlives whoever
wrote into it, and goes with its last holder.

Rejected: the number of a descriptor and its owner's process id, to be opened under /proc. Numbers are used again, and
a container may forbid the look into another process. And a record for each change, read in turn: where the next look
begins (SO_PEEK_OFF) belongs to the socket, and so to all holders at once.

The first descriptor is a lock file. Who replaces the letter holds its lock, sends the new one, and only then takes
the old ones out: killed at any moment, it leaves a whole letter at the head. Its first eight bytes count the changes,
so that everybody else knows whether what was read still holds.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Generator, Sequence

from remap.drivers.host.backing import is_sealed, open_again, sealed_file

MOST_FDS = 250
"""How many descriptors a letter may have beside the lock file; the kernel takes 253 (SCM_MAX_FD)."""

LARGEST = 32 << 10
"""How many bytes a letter may have: two of them fit into a socket's buffer."""

PATIENCE = 10.0
"""How many seconds to wait for another holder to let go of the lock; nobody holds it for longer than a copy takes."""

_MAGIC = b"remapbox"
_NONCE = 16
_COUNT = struct.Struct("<Q")
_PAGE = mmap.PAGESIZE
_INT = array.array("i").itemsize


class Box:
    """One process's hold on a mailbox. Made by `create` and `adopt`, which raise `OSError` or `ValueError`."""

    def __init__(self, connection: socket.socket, lock: int) -> None:
        self._socket = connection
        self._lock = lock
        # flock tells openings apart and not threads, and all threads here share one opening.
        self._mutex = threading.RLock()
        self._depth = 0
        self._shared = mmap.mmap(lock, _PAGE)

    @classmethod
    def create(cls) -> Box:
        """Return a new, empty box."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            connection.bind(b"")  # the kernel picks a name
            # Nobody else can send to a socket that is its own peer.
            connection.connect(connection.getsockname())
            made = sealed_file("remap multicast", _PAGE)
            try:
                _send(connection, _MAGIC + bytes(_NONCE), (made,))
                lock = open_again(made)
            finally:
                os.close(made)
        except BaseException:
            connection.close()
            raise
        return cls(connection, lock)

    @classmethod
    def adopt(cls, fd: int) -> Box:
        """Return a hold of one's own on the box behind another's descriptor, which stays the other's.

        The descriptor is hostile input: anything but a box raises `ValueError` or `OSError`.
        """
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise ValueError("the descriptor is no mailbox")
        connection = socket.socket(fileno=os.dup(fd))
        try:
            os.set_inheritable(connection.fileno(), False)
            if connection.family != socket.AF_UNIX or connection.type != socket.SOCK_DGRAM:
                raise ValueError("the socket is no mailbox")
            if not connection.getsockname() or connection.getpeername() != connection.getsockname():
                raise ValueError("the socket is not connected to itself")
            letter, fds = _receive(connection)
            try:
                if not letter.startswith(_MAGIC) or not fds or not _is_lock(fds[0]):
                    raise ValueError("the socket does not hold what a mailbox holds")
                lock = open_again(fds[0])
            finally:
                _close(fds)
        except BaseException:
            connection.close()
            raise
        return cls(connection, lock)

    @property
    def fd(self) -> int:
        """The descriptor to hand to others; it stays this object's."""
        return self._socket.fileno()

    @property
    def version(self) -> int:
        """How often the content was changed."""
        return int(_COUNT.unpack_from(self._shared)[0])

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Keep all other holders, and other threads, from the box for a block; raises `TimeoutError`."""
        if not self._mutex.acquire(timeout=PATIENCE):
            raise TimeoutError("another thread holds the multicast object's lock")
        try:
            if not self._depth:
                self._take_lock()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        deadline, pause = time.monotonic() + PATIENCE, 0.0
        while True:
            time.sleep(pause)  # at first only to let the holder run
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        "another process does not let go of the multicast object's lock"
                    ) from None
                pause = min(pause + 20e-6, 1e-3)

    def read(self) -> tuple[bytes, list[int]]:
        """Return the letter and new descriptors, which are the caller's. Raises `ValueError` for what is no letter."""
        letter, fds = _receive(self._socket)
        if not letter.startswith(_MAGIC) or not fds:
            _close(fds)
            raise ValueError("the mailbox was not filled by a host driver of remap")
        os.close(fds.pop(0))
        return letter[len(_MAGIC) + _NONCE :], fds

    def write(self, letter: bytes, fds: Sequence[int]) -> None:
        """Replace the letter; the descriptors stay the caller's, who holds the lock."""
        fresh = _MAGIC + secrets.token_bytes(_NONCE) + letter  # no two letters are equal
        _send(self._socket, fresh, (self._lock, *fds))
        while self._socket.recv(LARGEST, socket.MSG_PEEK | socket.MSG_DONTWAIT) != fresh:
            self._socket.recv(LARGEST, socket.MSG_DONTWAIT)  # its descriptors go with it
        _COUNT.pack_into(self._shared, 0, (self.version + 1) % (1 << 64))

    def close(self) -> None:
        """Let go of the box. Closing again does nothing."""
        self._socket.close()
        self._shared.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _is_lock(fd: int) -> bool:
    return is_sealed(fd) and os.fstat(fd).st_size == _PAGE


def _send(connection: socket.socket, record: bytes, fds: Sequence[int]) -> None:
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([record], beside, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return the letter at the head, and new descriptors; raises `BlockingIOError` if there is none."""
    flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    letter, beside, told, _ = connection.recvmsg(LARGEST, socket.CMSG_SPACE((MOST_FDS + 1) * _INT), flags)
    fds = array.array("i")
    for level, kind, data in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _INT])
    if told & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        _close(fds)
        raise ValueError("the letter was cut off, or this process may open no more descriptors (ulimit -n)")
    return letter, list(fds)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
