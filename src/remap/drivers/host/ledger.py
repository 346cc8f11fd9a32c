"""A table of who holds how much, for several processes that share the simulated devices.

With the environment variable `REMAP_HOST_STATE` set to a path, all processes that use the same path draw on the same
budgets. The table is a small JSON file under an exclusive lock. Each line of it names its owner by process id and start
time, so that the memory of processes that died, however they died, is counted no longer.

Shareable memory lives on while any process has a descriptor of it, a broker for instance, which opens no driver. So
when a driver leaves, its lines of shareable memory go to a process that has such a descriptor, as long as it has.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import stat
from collections.abc import Generator
from typing import NamedTuple, cast

from remap.errors import RemapError

VARIABLE = "REMAP_HOST_STATE"
_LARGEST = 16 << 20  # bytes of a table; more can only be a mistake
_UNKNOWN = 0  # for the start of a process; only the kernel's own have been there since then
_NO_DRIVER = 0  # for the driver: descriptors alone
_EXHAUSTED = {errno.EMFILE, errno.ENFILE}
_numbers = itertools.count(1)


class Entry(NamedTuple):
    """Bytes that one driver holds on one place; `inode` is that of a shareable file, 0 for all other memory.

    Where `driver` is 0 a process has descriptors of the file, whatever it has them for.
    """

    process: int
    started: int
    driver: int
    place: str
    inode: int
    size: int


class _Processes:
    """What the processes of one look at the table do, each asked once."""

    def __init__(self) -> None:
        self._started: dict[int, int] = {}
        self._files: dict[int, frozenset[int] | None] = {}

    def alive(self, entry: Entry) -> bool:
        """Tell whether an owner still runs, or cannot be asked: memory of the living must not count as free."""
        process = entry.process
        if process not in self._started:
            self._started[process] = _started(process)
        if self._started[process] not in {entry.started, _UNKNOWN}:
            return False
        return entry.driver != _NO_DRIVER or self.has(process, entry.inode) is not False

    def has(self, process: int, inode: int) -> bool | None:
        """Tell whether a process has a descriptor of a shareable file; None if this process may open no more files."""
        if process not in self._files:
            self._files[process] = _files(process)
        files = self._files[process]
        return None if files is None else inode in files

    def holder(self, inode: int) -> int | None:
        """Return a process that has a descriptor of a file, 0 if there is none, and None if it cannot be seen."""
        try:
            processes = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        except OSError as error:
            return None if error.errno in _EXHAUSTED else 0
        for process in processes:
            has = self.has(process, inode)
            if has is not False:
                return process if has else None
        return 0


class Ledger:
    """One driver's access to the table. The caller holds the driver's table lock."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags, 0o600)
            status = os.fstat(self._fd)
        except OSError as error:
            raise self._unusable(str(error.strerror)) from error
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            self._close_file()
            raise self._unusable("it is not a file of this user")
        process = os.getpid()
        self._owner = (process, _started(process), next(_numbers))
        try:
            with self._locked():
                pass
        except RemapError:
            self._close_file()
            raise

    @property
    def identity(self) -> tuple[int, int]:
        """What is the same for all who share the table."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    @classmethod
    def from_environment(cls) -> Ledger | None:
        """Return the table that the environment names, if it names one."""
        path = os.environ.get(VARIABLE)
        return cls(path) if path else None

    def used(self, place: str) -> int:
        """Return the bytes that all living processes hold on a place; memory that several hold counts once."""
        with self._locked() as entries:
            return _sum(entries, place)

    def take(self, place: str, size: int, total: int, inode: int) -> int:
        """Take bytes if they fit into `total`; return how many are free, below `size` if nothing was taken."""
        with self._locked() as entries:
            free = total - _sum(entries, place)
            if size <= free:
                self._add(entries, place, size, inode)
            return free

    def hold(self, place: str, size: int, inode: int) -> None:
        """Note memory that is in use already, whoever took it first."""
        with self._locked() as entries:
            self._add(entries, place, size, inode)

    def give(self, place: str, size: int, inode: int) -> None:
        """Give back what was taken or held."""
        with self._locked() as entries:
            self._add(entries, place, -size, inode)

    def close(self) -> None:
        """Leave the table: what this driver held counts no longer. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(RemapError), self._locked() as entries:
                left = [entry for entry in entries if entry[:3] == self._owner]
                entries[:] = [entry for entry in entries if entry[:3] != self._owner]
                _hand_on(left, entries, _Processes())
            self._close_file()

    def after_fork(self) -> None:
        """Close the child's descriptor; the lock and the entries are the parent's."""
        self._close_file()

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _add(self, entries: list[Entry], place: str, size: int, inode: int) -> None:
        for index, entry in enumerate(entries):
            if entry[:3] == self._owner and entry.place == place and entry.inode == inode:
                changed = entry._replace(size=entry.size + size)
                entries[index : index + 1] = [changed] if changed.size > 0 else []
                return
        if size > 0:
            entries.append(Entry(*self._owner, place, inode, size))

    @contextlib.contextmanager
    def _locked(self) -> Generator[list[Entry]]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            before, processes = self._read(), _Processes()
            entries = [entry for entry in before if processes.alive(entry)]
            if len(entries) < len(before):
                living = set(entries)
                _hand_on([entry for entry in before if entry not in living], entries, processes)
            yield entries
            if entries != before:
                self._write(entries)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _read(self) -> list[Entry]:
        data = os.pread(self._fd, _LARGEST + 1, 0)
        if not data.strip(b"\0 \n"):
            return []
        try:
            rows: object = json.loads(data) if len(data) <= _LARGEST else None
        except (ValueError, RecursionError):
            rows = None
        entries = [_entry(row) for row in cast("list[object]", rows)] if isinstance(rows, list) else [None]
        if None in entries:
            raise self._unusable("it is not a table of the host driver")
        return cast("list[Entry]", entries)

    def _write(self, entries: list[Entry]) -> None:
        data = json.dumps(entries).encode()
        # A process killed half-way leaves spaces or a longer tail at worst, never a table that is cut short.
        os.pwrite(self._fd, data.ljust(os.fstat(self._fd).st_size), 0)
        os.ftruncate(self._fd, len(data))

    def _unusable(self, reason: str) -> RemapError:
        return RemapError(
            f"{VARIABLE}={self._path} cannot be used",
            rule=reason,
            next_step="Name a path that does not exist yet, in a directory of yours, or unset the variable",
        )


def _entry(row: object) -> Entry | None:
    values = cast("list[object]", row) if isinstance(row, list) else []
    if len(values) != len(Entry._fields):
        return None
    for name, value in zip(Entry._fields, values, strict=True):
        if name == "place":
            if not isinstance(value, str):
                return None
        elif type(value) is not int or value < 0:
            return None
    return Entry(*cast("list[int]", values))  # type: ignore[arg-type]


def _sum(entries: list[Entry], place: str) -> int:
    here = [entry for entry in entries if entry.place == place]
    shared = {entry.inode: entry.size for entry in here if entry.inode}
    return sum(shared.values()) + sum(entry.size for entry in here if not entry.inode)


def _hand_on(left: list[Entry], entries: list[Entry], processes: _Processes) -> None:
    """Give shareable memory, of whom that leaves, to a process that has a descriptor of it, if there is one.

    Also where another driver holds it: that may leave before the process does.
    """
    known = {entry.inode for entry in entries if entry.driver == _NO_DRIVER}
    for entry in {entry.inode: entry for entry in left if entry.inode and entry.inode not in known}.values():
        holder = processes.holder(entry.inode)
        if holder is None:  # nobody can be asked now
            entries.append(entry)
        elif holder:
            entries.append(entry._replace(process=holder, started=_started(holder), driver=_NO_DRIVER))


def _files(process: int) -> frozenset[int] | None:
    """Return the inodes of the shareable files that a process has open; None if this process may open no more files.

    What is not to be seen, of other users and of those who hide it, counts as not there.
    """
    folder = f"/proc/{process}/fd"
    try:
        names = os.listdir(folder)
    except OSError as error:
        return None if error.errno in _EXHAUSTED else frozenset()
    found: set[int] = set()
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile
            path = f"{folder}/{name}"
            if os.readlink(path).startswith(
                "/memfd:remap "
            ):  # other file systems have files of the same number
                found.add(os.stat(path).st_ino)
    return frozenset(found)


def _started(process: int) -> int:
    """Return when a process started, in the kernel's ticks since boot; -1 if there is no such process.

    `_UNKNOWN` where that cannot be seen: /proc is hidden, or this process may open no more files.
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # The second field is the program's name in parentheses, which may contain anything.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1 if os.path.exists("/proc/self/stat") else _UNKNOWN
    except OSError:
        return _UNKNOWN
    dead = fields[0] in {b"Z", b"X"}
    return -1 if dead else int(fields[19])
