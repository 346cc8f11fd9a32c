"""Sockets of this user: where they are, who may connect, and how those of dead owners are told from live ones."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from remap.errors import InUseError, InvalidValueError, ShareError
from remap.releases import end_block
from remap.sharing.channel import Channel, Fds, close_in_child

_PATH_LIMIT = 107  # sockaddr_un.sun_path has 108 bytes, the last one 0


class Listener:
    """A socket that others connect to: mode 0600, at a path that one live process owns.

    The owner holds a lock on the file beside it, `PATH.lock`, which the kernel drops when the process dies, however it
    dies. So what a dead owner left can be told from what is in use, with no process ids, which are used again and mean
    nothing in another container.
    """

    def __init__(self, path: Path) -> None:
        _check_length(path)
        self.path = path
        self._lock = Fds()
        lock = _take_lock_soon(_lock_path(path))
        if lock is None:
            raise InUseError(
                f"a socket at {path}",
                rule="a live process listens there already",
                next_step="Connect to it, or use another path",
            )
        self._lock.add(lock)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        close_in_child(self._socket)
        try:
            if path.exists() and not path.is_socket():
                raise InvalidValueError(f"a socket at {path}", rule="there is a file of another kind")
            path.unlink(missing_ok=True)
            self._socket.bind(os.fspath(path))
            path.chmod(0o600)  # nobody can connect before `listen`, so there is no moment of another mode
            self._socket.listen(256)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            self._lock.close()
            raise

    def fileno(self) -> int:
        """Return the socket's descriptor, for `select` and `asyncio`."""
        return self._socket.fileno()

    @property
    def listening(self) -> bool:
        """Whether it was not closed."""
        return bool(self._lock)

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
        if self._lock:
            self.path.unlink(missing_ok=True)
            _lock_path(self.path).unlink(missing_ok=True)
            self._socket.close()
            self._lock.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Close it; if the block failed, what closing raises is a note on its error."""
        end_block(error, self.close)


def connect(path: Path, *, deadline: float) -> Channel:
    """Return a connection with the process of this user that listens at `path`.

    Raises `ShareError` if there is none, if it belongs to another user, or if it does not take the connection in time.
    """
    _check_length(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)  # a local connection is made at once, or not yet
        pause = 0.001
        while True:
            try:
                connection.connect(os.fspath(path))
                break
            except BlockingIOError:  # more clients wait to be taken than fit into its queue
                if time.monotonic() + pause >= deadline:
                    raise TimeoutError("it takes no connection") from None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
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


def broker_path() -> Path:
    """Return the path of a broker's socket where none is given: in the private directory of this user."""
    return private_directory() / "broker"


def remove_stale(directory: Path) -> int:
    """Remove the sockets whose owners have died from a directory, and return how many those were."""
    removed = 0
    for lock in directory.glob("*.lock"):
        with suppress(OSError):
            held = _take_lock(lock)
            if held is None:
                continue
            with Fds([held]):
                lock.with_suffix("").unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
            removed += 1
    return removed


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _take_lock_soon(path: Path) -> int | None:
    """Take a lock as `_take_lock` does, but let one who only looks whether its owner has died (`remove_stale`) end."""
    for _ in range(_LOOKS):
        held = _take_lock(path)
        if held is not None:
            return held
        time.sleep(_LOOK)
    return _take_lock(path)


_LOOKS, _LOOK = 20, 0.002  # 40 ms; a look takes microseconds


def _take_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock file, or None if another holds it."""
    import fcntl  # not on Windows

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
