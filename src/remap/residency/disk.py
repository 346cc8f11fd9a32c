"""Files that paused buffers sleep in: they have no name, so that nothing is left of them when the process dies."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from remap.errors import RemapError
from remap.sizes import format_size


class DiskError(RemapError, OSError):
    """A backup could not be written to, or read from, a file."""


class DiskFile:
    """One file without a name, of a fixed size, written and read around the page cache where the system allows it."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory = directory
        self.size = size
        self._fd = -1
        try:
            self._fd = _open(directory)
            os.ftruncate(self._fd, size)
        except OSError as error:
            self.close()
            raise self._failed("create", error) from error

    def write(self, address: int, offset: int, size: int) -> None:
        """Write host memory at `address` to the file."""
        done = 0
        while done < size:
            try:
                step = os.pwrite(self._fd, _bytes(address + done, size - done), offset + done)
            except OSError as error:
                raise self._failed("write", error) from error
            done += step

    def read(self, address: int, offset: int, size: int) -> None:
        """Read into host memory at `address`."""
        done = 0
        while done < size:
            try:
                step = os.preadv(self._fd, [_bytes(address + done, size - done)], offset + done)
            except OSError as error:
                raise self._failed("read", error) from error
            if not step:
                raise self._failed("read", OSError(f"the file ends after {format_size(offset + done)}"))
            done += step

    def view(self) -> mmap.mmap:
        """Return the file as memory; what is written there is what will be read."""
        return mmap.mmap(self._fd, self.size)

    def close(self) -> None:
        """Close the file, and with it give its space back. Closing again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):  # the system has closed it all the same
                os.close(fd)

    def __del__(self) -> None:
        """Close what an interpreter that ends would leave to the system."""
        self.close()

    def _failed(self, what: str, error: OSError) -> DiskError:
        return DiskError(
            f"{what} {format_size(self.size)} of backup in {self.directory}",
            rule=error.strerror or str(error),
            next_step="Free space there, or name another directory",
        )


def check_space(directory: Path, size: int) -> None:
    """Raise `DiskError` unless a directory has room for `size` bytes."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        raise DiskError(
            f"a backup in {directory}",
            rule=error.strerror or str(error),
            next_step="Name a directory that exists and that you can write to",
        ) from error
    free = found.f_bavail * found.f_frsize
    if size > free:
        raise DiskError(
            f"a backup of {format_size(size)} in {directory}",
            rule=f"{format_size(free)} are free there",
            next_step="Free space there, or name another directory",
        )


def backup_directory(directory: str | os.PathLike[str] | None) -> Path:
    """Return the directory that backups go to: the one named, else the system's for temporary files."""
    return Path(tempfile.gettempdir() if directory is None else directory)


def _open(directory: Path) -> int:
    """Open a file without a name; the first way that the file system takes."""
    unnamed = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    for flags in (unnamed | os.O_DIRECT, unnamed):
        with suppress(OSError):
            return os.open(directory, flags, 0o600)
    fd, name = tempfile.mkstemp(prefix="remap-", dir=directory)
    os.unlink(name)
    return fd


def _bytes(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * size).from_address(address)
