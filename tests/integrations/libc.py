"""A driver's functions made of libc and Numba, none of which needs the GIL; and native threads that call a pool.

Reservations are mappings without access, memory is what a budget allows, a handle is the size it stands for. It exists
to prove that callbacks run while another thread has the GIL, which the host driver, being Python, cannot show.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np

from remap.integrations.functions import functions_of
from remap.integrations.layout import Functions
from remap.integrations.native import _memory
from remap.integrations.support import immortal

PROT_NONE, PROT_READ_WRITE, PRIVATE_ANONYMOUS = 0, 3, 0x22


def c_function(library: Any, name: str, *arguments: Any) -> Any:
    """Return a function of libc as one of integers, for compiled code."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address
    return ctypes.CFUNCTYPE(ctypes.c_int64, *arguments)(address)


def libc_functions(budget: int) -> tuple[Functions, Any]:
    """Return functions over a budget of bytes, and the array whose first element says what is left."""
    numba: Any = importlib.import_module("numba")
    library = ctypes.CDLL(None)
    i64 = ctypes.c_int64
    mmap = c_function(library, "mmap", i64, i64, i64, i64, i64, i64)
    munmap, mprotect = c_function(library, "munmap", i64, i64), c_function(library, "mprotect", i64, i64, i64)
    left = immortal(np.array([budget], np.int64))
    at = left.ctypes.data
    peek, poke = _memory(numba)

    def reserve(where: int, size: int, _alignment: int, _hint: int, _flags: int) -> int:
        found = mmap(0, size, PROT_NONE, PRIVATE_ANONYMOUS, -1, 0)
        poke(where, found)
        return 2 if found == -1 else 0

    def free_range(address: int, size: int) -> int:
        return 1 if munmap(address, size) != 0 else 0

    def create(where: int, size: int, _properties: int, _flags: int) -> int:
        if peek(at) < size:
            return 2
        poke(at, peek(at) - size)
        poke(where, size)
        return 0

    def map_(address: int, size: int, _offset: int, handle: int, _flags: int) -> int:
        if size != handle:
            return 801
        return 1 if mprotect(address, size, PROT_READ_WRITE) != 0 else 0

    def unmap(address: int, size: int) -> int:
        poke(at, peek(at) + size)
        return 1 if mprotect(address, size, PROT_NONE) != 0 else 0

    def one(_a: int) -> int:
        return 0

    def two(_a: int, _b: int) -> int:
        return 0

    def none() -> int:
        return 0

    def four(_a: int, _b: int, _c: int, _d: int) -> int:
        return 0

    def compiled(function: Any, count: int) -> Any:
        types = numba.types
        made = numba.cfunc(types.int32(*[types.int64] * count), nopython=True)(function)
        return immortal(made).ctypes

    host = functions_of_host()
    return (
        Functions(
            reserve=compiled(reserve, 5),
            free_range=compiled(free_range, 2),
            create=compiled(create, 4),
            release=compiled(one, 1),
            map=compiled(map_, 5),
            unmap=compiled(unmap, 2),
            set_access=compiled(four, 4),
            push=compiled(one, 1),
            pop=compiled(one, 1),
            synchronize=compiled(none, 0),
            capturing=compiled(two, 2),
            capture_mode=compiled(one, 1),
            memory_info=compiled(two, 2),
            lock=host.lock,
            unlock=host.unlock,
        ),
        left,
    )


def functions_of_host() -> Functions:
    """Return the host driver's functions, for the mutex's, which are libc's in any case."""
    import remap

    return functions_of(remap.driver())


def native_thread(allocate: int, free: int, rounds: int, *, touch: bool = True) -> tuple[Any, Any]:
    """Return a call that starts a native thread, one that Python never hears of, and the array it writes into.

    From a given time on the thread allocates and frees `rounds` times; with `touch`, it writes there in between. It
    writes into the array: when to begin (nanoseconds of CLOCK_MONOTONIC), when it began, when it ended, how many rounds
    went well, and 1 when all is written.
    """
    numba: Any = importlib.import_module("numba")
    library = ctypes.CDLL(None)
    i64 = ctypes.c_int64
    clock_gettime = c_function(library, "clock_gettime", i64, i64)
    call_allocate = ctypes.CFUNCTYPE(i64, i64, ctypes.c_int, i64)(allocate)
    call_free = ctypes.CFUNCTYPE(None, i64, i64, ctypes.c_int, i64)(free)
    peek, poke = _memory(numba)

    def read_clock(scratch: int) -> Any:
        clock_gettime(1, scratch)
        return peek(scratch) * 1_000_000_000 + peek(scratch + 8)

    now: Any = numba.njit(read_clock)

    def work(told: int) -> int:
        scratch = told + 64
        while now(scratch) < peek(told):
            pass
        poke(told + 8, now(scratch))
        done = 0
        for _ in range(rounds):
            address = call_allocate(3 << 20, 0, 0)
            if address != 0:
                if touch:
                    poke(address, 1)
                call_free(address, 3 << 20, 0, 0)
                done += 1
        poke(told + 16, now(scratch))
        poke(told + 24, done)
        poke(told + 32, 1)
        return 0

    body = immortal(numba.cfunc(numba.types.int64(numba.types.int64), nopython=True)(work))
    told: Any = immortal(np.zeros(16, np.int64))
    create = library.pthread_create
    create.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

    def start(begin: int) -> int:
        told[0] = begin
        thread = immortal(ctypes.c_uint64())
        assert create(ctypes.addressof(thread), None, body.address, told.ctypes.data) == 0
        return int(thread.value)

    return start, told
