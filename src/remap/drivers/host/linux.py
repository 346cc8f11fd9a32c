"""The few system calls that the host driver stands on, with the kernel's errors as `OSError`.

Everything here works on raw integer addresses, which Python's `mmap` module does not offer. The calls release the
GIL (ctypes does so for functions of a `CDLL`).
"""

from __future__ import annotations

import ctypes
import functools
import mmap as _mmap
import os
import sys
from typing import Any

PROT_NONE, PROT_READ, PROT_READ_WRITE = 0, 1, 3
# From <linux/mman.h>; the mmap module knows some of these only since Python 3.12 or 3.13.
_MAP_SHARED = 0x01
_MAP_PRIVATE = 0x02
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20
_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_MADV_DONTFORK = 10
_FALLOC_PUNCH_HOLE = 0x02 | 0x01  # with KEEP_SIZE, which the kernel demands
_HOLE = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE

PAGE = _mmap.PAGESIZE


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    for name, result, arguments in (
        ("mmap", pointer, (pointer, size, number, number, number, offset)),
        ("munmap", number, (pointer, size)),
        ("mprotect", number, (pointer, size, number)),
        ("madvise", number, (pointer, size, number)),
        ("fallocate", number, (number, number, offset, offset)),
    ):
        # The names ending in 64 take a 64-bit offset on every platform; glibc has them, musl needs none.
        function = getattr(libc, f"{name}64", None) if name in {"mmap", "fallocate"} else None
        function = function or getattr(libc, name)
        function.restype, function.argtypes = result, arguments
        setattr(libc, f"remap_{name}", function)
    return libc


if sys.platform == "linux":
    _mmap_call: Any = _libc().remap_mmap
    _munmap_call: Any = _libc().remap_munmap
    _mprotect_call: Any = _libc().remap_mprotect
    _madvise_call: Any = _libc().remap_madvise
    _fallocate_call: Any = _libc().remap_fallocate

_FAILED = (1 << (8 * ctypes.sizeof(ctypes.c_void_p))) - 1


def _failure(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")


def reserve(size: int, address: int = 0) -> int:
    """Reserve `size` bytes of address space that nobody may touch and return their start.

    With an `address`, take exactly that one; raises `FileExistsError` where something is there already.
    """
    flags = _HOLE | _MAP_FIXED_NOREPLACE if address else _HOLE
    got: int = _mmap_call(address, size, PROT_NONE, flags, -1, 0)
    if got == _FAILED:
        raise _failure("mmap")
    if address and got != address:
        # Kernels before 4.17 do not know the flag and take the address for a mere hint.
        _munmap_call(got, size)
        raise FileExistsError(17, "mmap: the address is taken")
    _madvise_call(got, size, _MADV_DONTFORK)
    return got


def clear(address: int, size: int) -> None:
    """Turn a range of reserved space into a hole again, whatever is mapped there.

    It is mapped over, never unmapped: between an unmapping and a new mapping another thread's library could be
    given the address.
    """
    if _mmap_call(address, size, PROT_NONE, _HOLE | _MAP_FIXED, -1, 0) == _FAILED:
        raise _failure("mmap")
    # Also what lets the kernel merge the hole with the reservation around it.
    _madvise_call(address, size, _MADV_DONTFORK)


def place(address: int, size: int, extent: tuple[int, int], protection: int) -> None:
    """Map a part of a memory file at a fixed address of reserved space, hidden from forked children."""
    fd, offset = extent
    if _mmap_call(address, size, protection, _MAP_SHARED | _MAP_FIXED, fd, offset) == _FAILED:
        raise _failure("mmap")
    _madvise_call(address, size, _MADV_DONTFORK)


def protect(address: int, size: int, protection: int) -> None:
    """Change what the CPU may do with a range."""
    if _mprotect_call(address, size, protection):
        raise _failure("mprotect")


def give_back(address: int, size: int) -> None:
    """Return a whole reservation to the kernel."""
    if _munmap_call(address, size):
        raise _failure("munmap")


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Give the pages of a part of a file back to the kernel; the part reads as zero afterwards."""
    if _fallocate_call(fd, _FALLOC_PUNCH_HOLE, offset, size):
        raise _failure("fallocate")


def largest_map_count() -> int:
    """Return how many mappings the kernel allows a process (`vm.max_map_count`)."""
    try:
        with open("/proc/sys/vm/max_map_count", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):  # /proc hidden in a container
        return 65530


def map_count() -> int:
    """Return how many mappings this process has now; 0 where that cannot be read."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return file.read().count(b"\n")
    except OSError:
        return 0


def address_space_limit() -> int | None:
    """Return the process's limit of address space in bytes (`ulimit -v`), None where there is none."""
    import resource  # Unix only

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def copy(destination: int, source: int, size: int) -> None:
    """Copy bytes between two addresses, which may overlap."""
    ctypes.memmove(destination, source, size)


_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def view(address: int, size: int, writable: bool) -> memoryview:
    """Return the bytes at an address as they are, with no copy; valid while the memory is."""
    result: memoryview = _view(address, size, 0x200 if writable else 0x100)
    return result
