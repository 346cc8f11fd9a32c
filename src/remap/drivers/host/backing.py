"""Where bytes really are: memory files of Linux.

Unshareable memory is extents of one arena file per location. Neighbouring mappings of neighbouring extents are one
mapping to the kernel, which is what lets a process hold 100,000 of them. Shareable memory has a file of its own,
since whoever is handed a descriptor can see the whole file, sealed against resizing, since a file that shrinks kills
those who read it.

This is the one module to write again for another operating system.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from typing import NamedTuple

from remap.drivers.host import linux
from remap.types import Location, LocationKind

# From <linux/fcntl.h>; Python's fcntl module has them on Linux only, so that a checker elsewhere would complain.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_GROWTH = 1 << 40
_NAME = re.compile(r"/memfd:remap (device|host|host_numa) (\d{1,4}) \(deleted\)")


class Extent(NamedTuple):
    """A part of a memory file."""

    fd: int
    offset: int


class FileIdentity(NamedTuple):
    """What tells one file from every other while it is open."""

    device: int
    inode: int


def _name(location: Location) -> str:
    """Return the name of a memory file, which says to those who import it which location it stands for."""
    return f"remap {location.kind.value} {location.index}"


def sealed_file(name: str, size: int) -> int:
    """Return a new memory file of exactly `size` zero bytes that nobody can resize; raises `OSError`."""
    made = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(made, size)
        fcntl.fcntl(made, _F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(made)
        raise
    return made


def is_sealed(fd: int) -> bool:
    """Tell whether a descriptor is one of a memory file that nobody can resize."""
    try:
        return bool(fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS == _SEALS)
    except OSError:
        return False


def give_pages(extent: Extent, size: int) -> None:
    """Give the pages of an arena's extent back. Needs no lock, as nobody else will ever be given the extent."""
    linux.punch_hole(extent.fd, extent.offset, size)


class Files:
    """The memory files that a driver holds open."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._arenas: dict[Location, Arena] = {}
        self._shared: dict[FileIdentity, SharedFile] = {}

    def arena(self, location: Location) -> Arena:
        """Return the arena of a location, made on first use."""
        arena = self._arenas.get(location)
        if arena is None:
            arena = self._arenas[location] = Arena(
                self._keep(os.memfd_create(_name(location), os.MFD_CLOEXEC))
            )
        return arena

    def create_sealed(self, location: Location, size: int) -> SharedFile:
        """Create a memory file of exactly `size` zero bytes that nobody can resize; raises `OSError`."""
        made = sealed_file(_name(location), size)
        try:
            # Opened again, since the kernel does not count the first opening of a memory file (see `alone`).
            fd = self._keep(open_again(made))
        finally:
            os.close(made)
        key = _identity(fd)
        file = self._shared[key] = SharedFile(fd, key.inode, location, size, imported=False)
        return file

    def export(self, file: SharedFile) -> int:
        """Return a new descriptor of a file, for the caller to send and close."""
        fd = open_again(file.fd)
        file.exported = True
        return fd

    def adopt(self, fd: int, location: Location, size: int) -> SharedFile:
        """Return the shared file behind another's descriptor, which stays the other's.

        A file that this driver knows already is used again, so that its memory is counted once.
        """
        key = _identity(fd)
        file = self._shared.get(key)
        if file is None:
            own = self._keep(os.dup(fd))
            file = self._shared[key] = SharedFile(own, key.inode, location, size, imported=True)
        else:
            file.users += 1
        return file

    def leave(self, file: SharedFile) -> bool:
        """Drop one user of a file; return True if that ended it, so that its budget can be given back.

        Memory that was exported stays, and stays counted, while a descriptor or a mapping of it lives anywhere (T17);
        `sweep` finds out when the last one has gone.
        """
        file.users -= 1
        if file.users or (file.exported and not _alone(file.fd)):
            return False
        self._end(file)
        return True

    def sweep(self) -> list[SharedFile]:
        """Close the files that only others used, where nobody does any more, and return them."""
        ended = [file for file in self._shared.values() if not file.users and _alone(file.fd)]
        for file in ended:
            self._end(file)
        return ended

    def _end(self, file: SharedFile) -> None:
        del self._shared[_identity(file.fd)]
        self._open.remove(file.fd)
        os.close(file.fd)

    def _keep(self, fd: int) -> int:
        self._open.add(fd)
        return fd

    def close_all(self) -> None:
        """Close everything; memory that nobody else holds is gone."""
        while self._open:
            with contextlib.suppress(OSError):
                os.close(self._open.pop())
        self._arenas.clear()
        self._shared.clear()

    def after_fork(self) -> None:
        """Close the child's copies of the descriptors; the parent's stay open."""
        self.close_all()


class SharedFile:
    """A sealed file, with how many allocations stand on it; `imported` if another process took its memory."""

    __slots__ = ("exported", "fd", "imported", "inode", "location", "size", "users")

    def __init__(self, fd: int, inode: int, location: Location, size: int, *, imported: bool) -> None:
        self.fd = fd
        self.inode = inode
        self.location = location
        self.size = size
        self.imported = imported
        self.users = 1
        self.exported = False


class Arena:
    """A sparse file that hands out extents in ascending order.

    An extent is never used again: offsets of a sparse file cost nothing (8 EiB last for years of allocating at full
    speed), allocations made one after the other stay neighbours whatever was freed before, and new memory reads
    zero with no clearing. What costs something, the pages, goes back to the kernel when an extent is freed.
    """

    __slots__ = ("_end", "_size", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._end = 0
        self._size = 0

    def allocate(self, size: int) -> Extent:
        """Return a fresh extent of zero bytes; raises `OSError`."""
        offset = self._end
        if offset + size > self._size:
            try:
                grown = offset + size + _GROWTH
                os.ftruncate(self.fd, grown)
            except OSError:  # a limit on the size of files (ulimit -f): take only what is needed
                grown = offset + size
                os.ftruncate(self.fd, grown)
            self._size = grown
        self._end = offset + size
        return Extent(self.fd, offset)


def _identity(fd: int) -> FileIdentity:
    status = os.fstat(fd)
    return FileIdentity(status.st_dev, status.st_ino)


def open_again(fd: int) -> int:
    """Return an opening of one's own of the file behind a descriptor; raises `OSError`."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _alone(fd: int) -> bool:
    """Tell whether no other opening of the file exists in any process, as a descriptor or under a mapping.

    The kernel grants a write lease only then; we give it back at once.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return False
    except OSError:  # a system without leases: then memory counts as free when we have left it
        return True
    return True


def inspect(fd: int, granularity: int) -> tuple[Location, int]:
    """Return the location and the size of memory that another process shares.

    The descriptor is hostile input: anything but a sealed memory file of this library raises `ValueError` or
    `OSError`, so that what was accepted cannot shrink under its readers.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("the descriptor is no memory file")
    if not is_sealed(fd):
        raise ValueError(
            "the memory file is not sealed against resizing, so it could shrink under its readers"
        )
    if status.st_size == 0 or status.st_size % granularity:
        raise ValueError(f"the memory file's size, {status.st_size}, is no multiple of the granularity")
    name = _NAME.fullmatch(os.readlink(f"/proc/self/fd/{fd}"))
    if name is None:
        raise ValueError("the memory file was not made by a host driver of remap")
    return Location(LocationKind(name[1]), int(name[2])), status.st_size
