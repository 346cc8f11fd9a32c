"""A mailbox: records, with file descriptors beside them, that every process which holds the box can read.

It is a datagram socket that is connected to itself. What is sent to it stays in its queue, where every holder may look
at all of it without taking anything out (MSG_PEEK), and each look yields descriptors of one's own. It needs no server,
outlives whoever wrote into it, and goes with its last holder.

Rejected: the number of a descriptor and its owner's process id, to be opened under /proc. Numbers are used again, and
a container may forbid the look into another process.

The first record carries a lock file. Holders that change something take its lock, and count the change in its first
eight bytes, so that everybody else knows whether what they have read still holds.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Generator, Sequence

from remap.drivers.host.backing import is_sealed, open_again, sealed_file

RECORD = 96
"""How many bytes a record has at most."""

MOST_RECORDS = 256
"""How many records a box holds; the kernel's buffer for one socket has room for a few more."""

PATIENCE = 10.0
"""How many seconds to wait for another holder to let go of the lock; nobody holds it for longer than a copy takes."""

_PEEK_OFF = 42  # SO_PEEK_OFF, which the socket module does not name
_LOCK = b"remapbox"
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
            connection.bind(
                b""
            )  # the kernel picks a name; nobody else can send there once it is its own peer
            connection.connect(connection.getsockname())
            made = sealed_file("remap multicast", _PAGE)
            try:
                _send(connection, _LOCK, (made,))
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
            connection.setsockopt(socket.SOL_SOCKET, _PEEK_OFF, -1)
            record, fds = _peek(connection) or (b"", [])
            try:
                if record != _LOCK or len(fds) != 1 or not _is_lock(fds[0]):
                    raise ValueError("the socket does not begin as a mailbox does")
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

    def read(self) -> list[tuple[bytes, list[int]]]:
        """Return all records with new descriptors, which are the caller's. The caller holds the lock.

        Raises `ValueError` for more records than a box has, or with more descriptors.
        """
        found: list[tuple[bytes, list[int]]] = []
        # Where the next look begins belongs to the socket, which all holders share: hence the lock.
        self._socket.setsockopt(socket.SOL_SOCKET, _PEEK_OFF, 0)
        try:
            while (one := _peek(self._socket)) is not None:
                found.append(one)
                if len(found) > MOST_RECORDS or len(one[1]) > 1:
                    raise ValueError("the mailbox was not filled by a host driver of remap")
        except BaseException:
            for _, fds in found:
                _close(fds)
            raise
        finally:
            self._socket.setsockopt(socket.SOL_SOCKET, _PEEK_OFF, -1)
        _close(found[0][1])
        return found[1:]

    def append(self, record: bytes, fds: Sequence[int] = ()) -> None:
        """Add a record; the descriptors stay the caller's, who holds the lock and has seen that there is room."""
        _send(self._socket, record, fds)
        self._changed()

    def keep(self, wanted: Sequence[bool]) -> None:
        """Drop the records, in the order of `read`, that are not wanted. The caller holds the lock.

        A process that is killed in the middle of this takes the rest with it: the team is broken then, as it is on a
        GPU where a device falls out of it.
        """
        lock_record, records = _take(self._socket), [_take(self._socket) for _ in wanted]
        try:
            for record, fds in [
                lock_record,
                *(one for one, want in zip(records, wanted, strict=True) if want),
            ]:
                _send(self._socket, record, fds)
        finally:
            for _, fds in [lock_record, *records]:
                _close(fds)
        self._changed()

    def _changed(self) -> None:
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


def _peek(connection: socket.socket, flags: int = socket.MSG_PEEK) -> tuple[bytes, list[int]] | None:
    """Return the next record and its descriptors, None behind the last one."""
    try:
        record, beside, told, _ = connection.recvmsg(
            RECORD + 1, socket.CMSG_SPACE(4 * _INT), flags | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        return None
    fds = array.array("i")
    for level, kind, data in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _INT])
    if told & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(record) > RECORD:
        _close(fds)
        raise ValueError("a record of the mailbox was cut off, or this process may open no more descriptors")
    return record, list(fds)


def _take(connection: socket.socket) -> tuple[bytes, list[int]]:
    found = _peek(connection, 0)
    if found is None:
        raise ValueError("a record of the mailbox is missing")
    return found


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
