"""Events that several processes share: a small file in a private directory, mapped by everybody who knows its name.

The 64 bytes of an export are a mark and the name. The directory belongs to this user alone (mode 0700), and so does
each file; a name is random and never a path, and what it leads to is checked before it is believed (invariant 11).

The file counts the times that the event was recorded, by whichever process, and has a cell for each of the latest
ones, where the recording stream's thread enters its number when it gets there; the waiting thread of another process
looks at the cell. A record of a process that has died counts as reached, since its work has ended with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import struct
import tempfile
import time
from pathlib import Path

from remap.drivers.host.refusals import invalid, system_error
from remap.errors import DriverError

_MARK = b"remap host event"
_NAME_BYTES = 16
HANDLE_BYTES = 64
_CELLS = 254
# The mark, the process that made the event, how often it was recorded; and for each of the latest times its number once
# it was reached, and the process that recorded it.
_HEADER = 32
_MAKER, _RECORDED = 16, 24
_SIZE = _HEADER + 16 * _CELLS
_LONGEST_SLEEP = 0.001
_BETWEEN_LOOKS = 0.1  # seconds between two looks at whether the recording process still lives


class SharedMark:
    """One shared event's file, as one process has it."""

    def __init__(self, path: Path, fd: int, owned: bool) -> None:
        self.path = path
        self._fd = fd
        self._owned = owned
        self._over = False
        self._map = mmap.mmap(fd, _SIZE)

    @property
    def recorded(self) -> int:
        """How often the event was recorded."""
        return self._number(_RECORDED)

    def begin(self) -> int:
        """Count a record and return its number."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            number = self.recorded + 1
            struct.pack_into("<Q", self._map, self._cell(number) + 8, os.getpid())
            struct.pack_into("<Q", self._map, _RECORDED, number)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        return number

    def reach(self, number: int) -> None:
        """Enter that the stream has got to a record."""
        cell = self._cell(number)
        struct.pack_into("<Q", self._map, cell, max(number, self._number(cell)))

    def done(self, number: int) -> bool:
        """Tell whether a record was reached, or its process has gone."""
        cell = self._cell(number)
        if self._number(cell) >= number or self.recorded >= number + _CELLS:
            return True
        return not _lives(self._number(cell + 8))

    def wait(self, number: int) -> None:
        """Wait until a record is reached."""
        cell, pause, look = self._cell(number), 20e-6, time.monotonic() + _BETWEEN_LOOKS
        while self._number(cell) < number and not self._over:
            if time.monotonic() > look:
                if self.done(number):
                    return
                look = time.monotonic() + _BETWEEN_LOOKS
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP)

    def handle(self) -> bytes:
        """Return the 64 bytes by which another process finds the file."""
        return (_MARK + bytes.fromhex(self.path.name)).ljust(HANDLE_BYTES, b"\0")

    def retire(self) -> None:
        """Take the name away, if it was made here; who has the file open, and work that is queued, keep it."""
        if self._owned:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def abandon(self, number: int) -> None:
        """End every wait of this process, and those of others for a record whose work was dropped."""
        self._over = True
        if number:
            self.reach(number)
        self.retire()

    def __del__(self) -> None:
        os.close(self._fd)

    def _number(self, offset: int) -> int:
        (number,) = struct.unpack_from("<Q", self._map, offset)
        return int(number)

    def _cell(self, number: int) -> int:
        return _HEADER + 16 * (number % _CELLS)


def create() -> SharedMark:
    """Create the file of a new event."""
    call = "cuEventCreate"
    try:
        directory = _directory()
        _sweep(directory)
        path = directory / secrets.token_hex(_NAME_BYTES)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.ftruncate(fd, _SIZE)
        os.pwrite(fd, _MARK + struct.pack("<Q", os.getpid()), 0)
        return SharedMark(path, fd, owned=True)
    except OSError as error:
        raise system_error(call, error) from error


def open_handle(handle: bytes) -> SharedMark:
    """Open the file that an export names."""
    call = "cuIpcOpenEventHandle"
    if len(handle) != HANDLE_BYTES or handle[: len(_MARK)] != _MARK:
        raise invalid(call, "import of an event", f"an event's handle is {HANDLE_BYTES} bytes of an export")
    name = handle[len(_MARK) : len(_MARK) + _NAME_BYTES].hex()
    try:
        path = _directory() / name
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise _gone(call) from None
    except OSError as error:
        raise system_error(call, error) from error
    status = os.fstat(fd)
    ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_size == _SIZE
    if not ours or os.pread(fd, len(_MARK), 0) != _MARK:
        os.close(fd)
        raise invalid(call, "import of an event", "the file behind it is not one of a shared event")
    return SharedMark(path, fd, owned=False)


def _gone(call: str) -> DriverError:
    rule = "the event was destroyed, or its process belongs to another user or machine"
    return invalid(call, "import of an event", rule)


def _directory() -> Path:
    """Return the directory of this user's events, made on first use; raises `OSError` if it is somebody else's."""
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    path = base / f"remap-events-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(1, f"{path} is not a private directory of this user")
    return path


def _sweep(directory: Path) -> None:
    """Take away what processes that were killed have left behind."""
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            head = path.read_bytes()[:_RECORDED]
            if head[:_MAKER] == _MARK and not _lives(int.from_bytes(head[_MAKER:], "little")):
                path.unlink()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
