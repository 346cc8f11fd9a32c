"""What the native callbacks do with the table and the driver, as functions that Numba compiles.

Each function here makes those of one concern. What a compiled function closes over is a constant in it, so each takes
what it needs out of `Basics` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from remap.errors import CudaResult
from remap.integrations import layout
from remap.integrations.layout import (
    ALLOCATED,
    CAPTURES,
    CONTEXT,
    FAILED,
    FREED,
    HIGH,
    INERT,
    LAST_ERROR,
    LIVE_BYTES,
    LOST,
    MARGIN,
    O_ACCESS,
    O_CHUNKS,
    O_COUNT,
    O_GRANULE,
    O_PROPERTIES,
    PENDING,
    R_ADDRESS,
    R_CHUNK,
    R_POOL,
    R_REQUESTED,
    R_SCRATCH,
    R_SERIAL,
    R_SIZE,
    R_STATE,
    SERIAL,
    SLOTS,
    WORD,
    Functions,
    State,
)

Compiled: TypeAlias = Callable[..., Any]
"""A function that other compiled functions call, on int64 alone."""

_EMPTY, _LIVE, _HELD, _GONE, _PENDING, _BUSY = (int(state) for state in State)
_PART, _HEAD, _RECORD, _OPTION, _OPTIONS_AT = (
    words * WORD for words in (layout.PART, layout.HEAD, layout.RECORD, layout.OPTION, layout.OPTIONS_AT)
)
_OUT_OF_MEMORY, _FIRST_OF_CAPTURE, _LAST_OF_CAPTURE = int(CudaResult.OUT_OF_MEMORY), 900, 908


class Basics(NamedTuple):
    """What all of them are made with: words of memory, the table's records, and the driver."""

    numba: Any
    base: int
    functions: Functions
    peek: Compiled  # the word at an address
    poke: Compiled
    get: Compiled  # a figure of a part, or of a record
    put: Compiled
    record_of: Compiled  # the address of a slot's record


def inline(numba: Any, function: Compiled, arguments: int, result: Any = None) -> Compiled:
    """Compile a function of int64 that others call; it returns an int64 if nothing else is said."""
    i64 = numba.types.int64
    # With its types said: otherwise it is compiled anew for every constant that it is called with.
    signature = (i64 if result is None else result)(*[i64] * arguments)
    found: Compiled = numba.njit(signature, error_model="numpy")(function)
    return found


def make_basics(numba: Any, base: int, functions: Functions, peek: Compiled, poke: Compiled) -> Basics:
    """Return what all of them are made with, for a table at `base`."""

    def get(at: int, figure: int) -> Any:
        return peek(at + figure * WORD)

    def put(at: int, figure: int, value: int) -> None:
        poke(at + figure * WORD, value)

    def record_of(at: int, slot: int) -> int:
        return at + _HEAD + slot * _RECORD

    return Basics(
        numba,
        base,
        functions,
        peek,
        poke,
        inline(numba, get, 2),
        inline(numba, put, 3, numba.types.void),
        inline(numba, record_of, 2),
    )


def make_slots(code: Basics) -> tuple[Compiled, Compiled]:
    """Return `take_slot(at)` and `find(at, address)`; both give -1 where there is none."""
    get, put, record_of = code.get, code.put, code.record_of
    lock, unlock = code.functions.lock, code.functions.unlock

    def take_slot(at: int) -> Any:
        found = -1
        lock(at)
        high = get(at, HIGH)
        for slot in range(high):
            if get(record_of(at, slot), R_STATE) == _EMPTY:
                found = slot
                break
        if found < 0 and high < SLOTS:
            found = high
            put(at, HIGH, high + 1)
        if found >= 0:
            put(record_of(at, found), R_STATE, _BUSY)
        unlock(at)
        return found

    def find(at: int, address: int) -> Any:  # under the mutex
        for slot in range(get(at, HIGH)):
            record = record_of(at, slot)
            state = get(record, R_STATE)
            if state not in (_EMPTY, _BUSY) and get(record, R_ADDRESS) == address:
                return slot
        return -1

    return inline(code.numba, take_slot, 1), inline(code.numba, find, 2)


def make_settle(code: Basics) -> Compiled:
    """Return `settle(at, stream, record)`, which waits before memory goes."""
    peek, poke, get = code.peek, code.poke, code.get
    push, pop, synchronize = code.functions.push, code.functions.pop, code.functions.synchronize
    is_capturing, capture_mode = code.functions.capturing, code.functions.capture_mode

    def settle(at: int, stream: int, record: int) -> Any:
        """Wait for the device, as cudaFree does; a result of captures where one goes on, which a wait would break."""
        if get(at, CAPTURES) != 0:
            return _FIRST_OF_CAPTURE
        context = get(at, CONTEXT)
        if context == 0:
            return 0
        scratch = record + R_SCRATCH * WORD
        result = push(context)
        if result != 0:
            return result
        poke(scratch, 2)  # CU_STREAM_CAPTURE_MODE_RELAXED: another thread's capture must not mind
        capture_mode(scratch)
        mode = peek(scratch)
        poke(scratch, 0)
        result = is_capturing(stream, scratch)
        if result == 0:
            result = _FIRST_OF_CAPTURE if (peek(scratch) & 0xFFFFFFFF) != 0 else synchronize()
        poke(scratch, mode)
        capture_mode(scratch)
        pop(scratch)
        return result

    return inline(code.numba, settle, 3)


def make_give_back(code: Basics) -> tuple[Compiled, Compiled]:
    """Return `give_back(at, slot)`, which unmaps a segment, and `drain_part(at)`: those that waited for a capture."""
    get, put, record_of = code.get, code.put, code.record_of
    lock, unlock = code.functions.lock, code.functions.unlock
    unmap, free_range = code.functions.unmap, code.functions.free_range

    def give_back(at: int, slot: int) -> None:
        record = record_of(at, slot)
        address, size = get(record, R_ADDRESS), get(record, R_SIZE)
        result = unmap(address, size)
        if result == 0:
            result = free_range(address, size)
        lock(at)
        if result != 0:
            put(at, LOST, get(at, LOST) + 1)
            put(at, LAST_ERROR, result)
        put(record, R_STATE, _EMPTY)
        unlock(at)

    give_back = inline(code.numba, give_back, 2, code.numba.types.void)

    def drain_part(at: int) -> Any:
        count = 0
        for slot in range(get(at, HIGH)):
            record = record_of(at, slot)
            lock(at)
            mine = get(record, R_STATE) == _PENDING
            if mine:
                put(record, R_STATE, _BUSY)
                put(at, PENDING, get(at, PENDING) - 1)
            unlock(at)
            if mine:
                give_back(at, slot)
                count += 1
        return count

    return give_back, inline(code.numba, drain_part, 1)


def make_back(code: Basics) -> Compiled:
    """Return `back(record, size, chunk, options)`, which puts memory behind a segment."""
    peek, get = code.peek, code.get
    reserve, free_range, create, release = (
        code.functions.reserve, code.functions.free_range, code.functions.create, code.functions.release
    )  # fmt: skip
    map_, unmap, set_access = code.functions.map, code.functions.unmap, code.functions.set_access

    def back(record: int, size: int, chunk: int, options: int) -> Any:
        """Reserve, create, map and grant access; returns a result, with nothing left behind unless it is 0."""
        result = reserve(record + R_ADDRESS * WORD, size, 0, 0, 0)
        if result != 0:
            return result
        address, done, scratch = get(record, R_ADDRESS), 0, record + R_SCRATCH * WORD
        while done < size and result == 0:
            piece = min(chunk, size - done)
            result = create(scratch, piece, options + O_PROPERTIES * WORD, 0)
            if result == 0:
                handle = peek(scratch)
                result = map_(address + done, piece, 0, handle, 0)
                release(handle)  # the mapping keeps the memory
                if result == 0:
                    done += piece
        if result == 0:
            result = set_access(address, size, options + O_ACCESS * WORD, get(options, O_COUNT))
        if result != 0:
            if done > 0:
                unmap(address, done)
            free_range(address, size)
        return result

    return inline(code.numba, back, 4)


def make_too_little(code: Basics) -> Compiled:
    """Return `too_little(at, record, size)`."""
    peek, get = code.peek, code.get
    push, pop, memory_info = code.functions.push, code.functions.pop, code.functions.memory_info

    def too_little(at: int, record: int, size: int) -> Any:
        """Tell whether an allocation would leave less memory free than it should."""
        margin, context = get(at, MARGIN), get(at, CONTEXT)
        if margin == 0 or context == 0 or push(context) != 0:
            return False
        scratch = record + R_SCRATCH * WORD
        result = memory_info(scratch, record + R_REQUESTED * WORD)
        free = peek(scratch)
        pop(scratch)
        return result == 0 and free < size + margin

    return inline(code.numba, too_little, 3, code.numba.types.boolean)


def make_allocate(code: Basics, take_slot: Compiled, settle: Compiled, drain_part: Compiled) -> Compiled:
    """Return what pools allocate with; not compiled yet, as nothing that a framework or Python calls."""
    base, get, put, record_of = code.base, code.get, code.put, code.record_of
    lock, unlock = code.functions.lock, code.functions.unlock
    back, too_little = make_back(code), make_too_little(code)

    def allocate(size: int, device: int, stream: int, pool: int) -> Any:
        at = base + device * _PART
        options = at + _OPTIONS_AT + pool * _OPTION
        granule, chunks = get(options, O_GRANULE), get(options, O_CHUNKS)
        if size <= 0 or granule == 0 or get(at, INERT) != 0:
            return 0
        slot = take_slot(at)
        if slot < 0:
            lock(at)
            put(at, FAILED, get(at, FAILED) + 1)
            put(at, LAST_ERROR, _OUT_OF_MEMORY)
            unlock(at)
            return 0
        record = record_of(at, slot)
        rounded = (size + granule - 1) // granule * granule
        chunk = (rounded // granule + chunks - 1) // chunks * granule
        result = _OUT_OF_MEMORY
        if not too_little(at, record, rounded):
            result = back(record, rounded, chunk, options)
        if result == _OUT_OF_MEMORY and get(at, PENDING) > 0 and settle(at, stream, record) == 0:
            drain_part(at)
            result = back(record, rounded, chunk, options)
        address = 0
        lock(at)
        if result == 0:
            address = get(record, R_ADDRESS)
            serial = get(at, SERIAL) + 1
            put(at, SERIAL, serial)
            put(at, ALLOCATED, get(at, ALLOCATED) + 1)
            put(at, LIVE_BYTES, get(at, LIVE_BYTES) + rounded)
            put(record, R_SIZE, rounded)
            put(record, R_POOL, pool)
            put(record, R_SERIAL, serial)
            put(record, R_REQUESTED, size)
            put(record, R_CHUNK, chunk)
            put(record, R_STATE, _LIVE)
        else:
            put(at, FAILED, get(at, FAILED) + 1)
            put(at, LAST_ERROR, result)
            put(record, R_STATE, _EMPTY)
        unlock(at)
        return address

    return allocate


def make_free(code: Basics, find: Compiled, settle: Compiled, give_back: Compiled) -> Compiled:
    """Return what pools free with."""
    base, get, put, record_of = code.base, code.get, code.put, code.record_of
    lock, unlock = code.functions.lock, code.functions.unlock

    def free(address: int, _size: int, device: int, stream: int, _pool: int) -> None:
        at = base + device * _PART
        if address == 0 or get(at, INERT) != 0:
            return
        lock(at)
        slot = find(at, address)
        record = record_of(at, max(slot, 0))
        state = get(record, R_STATE) if slot >= 0 else _EMPTY
        if state in (_LIVE, _HELD):
            put(at, FREED, get(at, FREED) + 1)
            put(at, LIVE_BYTES, get(at, LIVE_BYTES) - get(record, R_SIZE))
            put(record, R_STATE, _GONE if state == _HELD else _BUSY)
        else:
            put(at, LOST, get(at, LOST) + 1)
        unlock(at)
        if state != _LIVE:
            return
        result = settle(at, stream, record)
        if _FIRST_OF_CAPTURE <= result <= _LAST_OF_CAPTURE:
            lock(at)
            put(at, PENDING, get(at, PENDING) + 1)
            put(record, R_STATE, _PENDING)
            unlock(at)
        else:
            give_back(at, slot)

    return free


def make_holding(code: Basics) -> tuple[Compiled, Compiled, Compiled]:
    """Return what Python holds a segment with, lets it go, and forgets one that was freed meanwhile."""
    base, get, put, record_of = code.base, code.get, code.put, code.record_of
    lock, unlock = code.functions.lock, code.functions.unlock

    def change(device: int, slot: int, serial: int, before: int, after: int) -> Any:
        """Change a record's state if it is the expected one; returns the state that it had."""
        at = base + device * _PART
        lock(at)
        record = record_of(at, slot)
        state = get(record, R_STATE)
        if get(record, R_SERIAL) != serial:
            state = _EMPTY
        elif state == before:
            put(record, R_STATE, after)
        unlock(at)
        return state

    change = inline(code.numba, change, 5)

    def hold(device: int, slot: int, serial: int) -> Any:
        return 1 if change(device, slot, serial, _LIVE, _HELD) == _LIVE else 0

    def let_go(device: int, slot: int, serial: int) -> Any:
        state = change(device, slot, serial, _HELD, _LIVE)
        return _LIVE if state == _HELD else state

    def forget(device: int, slot: int, serial: int) -> Any:
        return change(device, slot, serial, _GONE, _EMPTY)

    return hold, let_go, forget


def make_reading(code: Basics, drain_part: Compiled) -> tuple[Compiled, Compiled]:
    """Return what Python copies the records of a device with, and what it drains one with."""
    base, poke, get, put, record_of = code.base, code.poke, code.get, code.put, code.record_of
    lock, unlock = code.functions.lock, code.functions.unlock

    def copy_record(at: int, slot: int, out: int) -> None:
        record = record_of(at, slot)
        poke(out, slot)
        for index in range(R_SCRATCH):
            put(out, index + 1, get(record, index))

    copy_record = inline(code.numba, copy_record, 3, code.numba.types.void)

    def copy(device: int, out: int) -> int:
        at, count = base + device * _PART, 0
        lock(at)
        for slot in range(get(at, HIGH)):
            state = get(record_of(at, slot), R_STATE)
            if state not in (_EMPTY, _BUSY):
                copy_record(at, slot, out + count * _RECORD)
                count += 1
        unlock(at)
        return count

    def drain(device: int) -> Any:
        return drain_part(base + device * _PART)

    return copy, drain
