"""Pages of the host that backups are kept in: address space, memory behind it, and what the machine has left.

Page faults one at a time are what makes fresh host memory slow, so memory is filled in by one call for each piece,
which several threads can make side by side (ctypes releases the GIL). They hold the lock of the address space for
reading meanwhile, so what takes it for writing (`open_up`, `advise`) stops all of them, and is for long ranges.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from remap.sizes import MiB

_NONE, _READ_WRITE = 0, 3
_PRIVATE, _ANONYMOUS, _NORESERVE = 0x02, 0x20, 0x4000
_DONTNEED, _DONTFORK, _HUGEPAGE, _NOHUGEPAGE, _POPULATE_WRITE = 4, 10, 14, 15, 23
_AT_ONCE = 4 * MiB  # filled in by one call, for which others wait who change the address space
_FAILED = (1 << (8 * ctypes.sizeof(ctypes.c_void_p))) - 1
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}
_EINVAL = 22


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, result, arguments in (
        ("mmap", pointer, (pointer, size, number, number, number, ctypes.c_int64)),
        ("munmap", number, (pointer, size)),
        ("mprotect", number, (pointer, size, number)),
        ("madvise", number, (pointer, size, number)),
    ):
        function = getattr(libc, name)
        function.restype, function.argtypes = result, arguments
    return libc


def reserve(size: int) -> int:
    """Reserve addresses that no forked child inherits, and return the first; raises `OSError`."""
    got: int = _libc().mmap(0, size, _NONE, _PRIVATE | _ANONYMOUS | _NORESERVE, -1, 0)
    if got == _FAILED:
        raise _failure("mmap")
    _libc().madvise(got, size, _DONTFORK)
    return got


def give_back(address: int, size: int) -> None:
    """Give addresses back, with whatever is behind them."""
    _libc().munmap(address, size)


def unmapping() -> Callable[[int, int], object]:
    """Return what gives addresses back, as a call into C: no interrupt comes between a note before it and the call."""
    call: Callable[[int, int], object] = _libc().munmap
    return call


def open_up(address: int, size: int, node: int) -> None:
    """Let there be memory behind reserved addresses once it is touched, on a NUMA node (0 or more) if it has room.

    Raises `OSError` where the system counts memory before it is touched, and has none left.
    """
    if _libc().mprotect(address, size, _READ_WRITE):
        raise _failure("mprotect")
    if node >= 0:
        _prefer(address, size, node)


def advise(address: int, size: int, large: bool) -> None:
    """Ask for large or small pages where memory is touched from now on: a wish, as some kernels are built without."""
    _libc().madvise(address, size, _HUGEPAGE if large else _NOHUGEPAGE)


def touch(address: int, size: int) -> None:
    """Put memory behind addresses that were opened up; raises `OSError` if the machine has none left."""
    libc = _libc()
    for start in range(address, address + size, _AT_ONCE):
        length = min(_AT_ONCE, address + size - start)
        if libc.madvise(start, length, _POPULATE_WRITE):
            if ctypes.get_errno() != _EINVAL:  # EINVAL: Linux before 5.14
                raise _failure("madvise")
            ctypes.memset(start, 0, length)


def discard(address: int, size: int) -> None:
    """Give the memory behind addresses back; they stay as they are, and can be touched again."""
    _libc().madvise(address, size, _DONTNEED)


def available() -> int:
    """Return how many bytes the machine, or the container that this process is in, can still give."""
    found = [int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found[0] = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        found.append(limit - int((group / "memory.current").read_text()))
    return max(min(found), 0)


def _prefer(address: int, size: int, node: int) -> None:
    """Ask for pages of one node first; without the call, or the node, the kernel takes the nearest."""
    number = _MBIND.get(platform.machine())
    if number is not None:
        mask = (ctypes.c_ulong * (node // 64 + 1))()
        mask[node // 64] = 1 << node % 64
        _libc().syscall(
            number,
            ctypes.c_void_p(address),
            ctypes.c_size_t(size),
            _MPOL_PREFERRED,
            mask,
            ctypes.c_ulong(64 * len(mask) + 1),
            0,
        )


def _failure(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
