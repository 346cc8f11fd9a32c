"""Allocation callbacks that never need the GIL, made without a C compiler.

A framework calls its allocator under a lock of its own, and a thread that has the GIL may be waiting for that lock: a
callback that needed the GIL would deadlock (trap 24). So Numba compiles the callbacks to machine code that calls the
driver's functions by address and writes what it did into a table (`layout`), which Python reads later. A small entry
for each pool, made with LLVM, adds the pool's number to the arguments.

The table has a part for each device: a mutex, counters, a record for each segment, and what each pool asks for. The
mutex is held for the table alone and never while the driver works, and Python takes it only inside of compiled
functions, which run without the GIL. Nothing here is ever unloaded, since a framework may call until the process ends
(trap 22), or cached on disk, since the code contains addresses.

Rejected: to tell the pool by thread-local storage, set where a pool is entered. A pool is also used by threads that
never entered it, such as those of a capture.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

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
    Functions,
    State,
)
from remap.integrations.support import immortal, missing


class Code(NamedTuple):
    """The compiled functions: addresses of the two that pools enter, and ctypes functions for Python."""

    allocate: int
    free: int
    hold: Any
    let_go: Any
    forget: Any
    copy: Any
    drain: Any


def compiled(base: int, functions: Functions) -> Code:
    """Compile the callbacks for a table at `base` and one driver's functions. Takes a few seconds, once."""
    numba = _numba()
    peek, poke = _memory(numba)
    reserve, free_range, create, release = (
        functions.reserve, functions.free_range, functions.create, functions.release
    )  # fmt: skip
    map_, unmap, set_access = functions.map, functions.unmap, functions.set_access
    push, pop, synchronize = functions.push, functions.pop, functions.synchronize
    is_capturing, capture_mode, memory_info = (
        functions.capturing, functions.capture_mode, functions.memory_info
    )  # fmt: skip
    lock, unlock = functions.lock, functions.unlock
    out_of_memory, first_of_capture, last_of_capture = int(CudaResult.OUT_OF_MEMORY), 900, 908
    empty, live, held, gone, pending, busy = (int(state) for state in State)
    word, part, slots = layout.WORD, layout.PART * layout.WORD, layout.SLOTS
    head, record_size, option_size = (
        layout.HEAD * word, layout.RECORD * word, layout.OPTION * word
    )  # fmt: skip
    options_at = layout.OPTIONS_AT * word
    i32, i64, void = numba.types.int32, numba.types.int64, numba.types.void

    def inline(function: Any, arguments: int, result: Any = i64) -> Any:
        # With its types said: otherwise it is compiled anew for every constant that it is called with.
        return numba.njit(result(*[i64] * arguments), error_model="numpy")(function)

    def get(at: int, figure: int) -> Any:
        return peek(at + figure * word)

    get = inline(get, 2)

    def put(at: int, figure: int, value: int) -> None:
        poke(at + figure * word, value)

    put = inline(put, 3, void)

    def record_of(at: int, slot: int) -> int:
        return at + head + slot * record_size

    record_of = inline(record_of, 2)

    def find(at: int, address: int) -> Any:  # under the mutex
        for slot in range(get(at, HIGH)):
            record = record_of(at, slot)
            state = get(record, R_STATE)
            if state not in (empty, busy) and get(record, R_ADDRESS) == address:
                return slot
        return -1

    find = inline(find, 2)

    def take_slot(at: int) -> Any:
        found = -1
        lock(at)
        high = get(at, HIGH)
        for slot in range(high):
            if get(record_of(at, slot), R_STATE) == empty:
                found = slot
                break
        if found < 0 and high < slots:
            found = high
            put(at, HIGH, high + 1)
        if found >= 0:
            put(record_of(at, found), R_STATE, busy)
        unlock(at)
        return found

    take_slot = inline(take_slot, 1)

    def settle(at: int, stream: int, record: int) -> Any:
        """Wait for the device, as cudaFree does; a result of captures where one goes on, which a wait would break."""
        if get(at, CAPTURES) != 0:
            return first_of_capture
        context = get(at, CONTEXT)
        if context == 0:
            return 0
        scratch = record + R_SCRATCH * word
        result = push(context)
        if result != 0:
            return result
        poke(scratch, 2)  # CU_STREAM_CAPTURE_MODE_RELAXED: another thread's capture must not mind
        capture_mode(scratch)
        mode = peek(scratch)
        poke(scratch, 0)
        result = is_capturing(stream, scratch)
        if result == 0:
            result = first_of_capture if (peek(scratch) & 0xFFFFFFFF) != 0 else synchronize()
        poke(scratch, mode)
        capture_mode(scratch)
        pop(scratch)
        return result

    settle = inline(settle, 3)

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
        put(record, R_STATE, empty)
        unlock(at)

    give_back = inline(give_back, 2, void)

    def drain_part(at: int) -> Any:
        count = 0
        for slot in range(get(at, HIGH)):
            record = record_of(at, slot)
            lock(at)
            mine = get(record, R_STATE) == pending
            if mine:
                put(record, R_STATE, busy)
                put(at, PENDING, get(at, PENDING) - 1)
            unlock(at)
            if mine:
                give_back(at, slot)
                count += 1
        return count

    drain_part = inline(drain_part, 1)

    def back(record: int, size: int, chunk: int, options: int) -> Any:
        """Reserve, create, map and grant access; returns a result, with nothing left behind unless it is 0."""
        result = reserve(record + R_ADDRESS * word, size, 0, 0, 0)
        if result != 0:
            return result
        address, done, scratch = get(record, R_ADDRESS), 0, record + R_SCRATCH * word
        while done < size and result == 0:
            piece = min(chunk, size - done)
            result = create(scratch, piece, options + O_PROPERTIES * word, 0)
            if result == 0:
                handle = peek(scratch)
                result = map_(address + done, piece, 0, handle, 0)
                release(handle)  # the mapping keeps the memory
                if result == 0:
                    done += piece
        if result == 0:
            result = set_access(address, size, options + O_ACCESS * word, get(options, O_COUNT))
        if result != 0:
            if done > 0:
                unmap(address, done)
            free_range(address, size)
        return result

    back = inline(back, 4)

    def too_little(at: int, record: int, size: int) -> Any:
        """Tell whether an allocation would leave less memory free than it should."""
        margin, context = get(at, MARGIN), get(at, CONTEXT)
        if margin == 0 or context == 0 or push(context) != 0:
            return False
        scratch = record + R_SCRATCH * word
        result = memory_info(scratch, record + R_REQUESTED * word)
        free = peek(scratch)
        pop(scratch)
        return result == 0 and free < size + margin

    too_little = inline(too_little, 3, numba.types.boolean)

    def allocate(size: int, device: int, stream: int, pool: int) -> Any:
        at = base + device * part
        options = at + options_at + pool * option_size
        granule, chunks = get(options, O_GRANULE), get(options, O_CHUNKS)
        if size <= 0 or granule == 0 or get(at, INERT) != 0:
            return 0
        slot = take_slot(at)
        if slot < 0:
            lock(at)
            put(at, FAILED, get(at, FAILED) + 1)
            put(at, LAST_ERROR, out_of_memory)
            unlock(at)
            return 0
        record = record_of(at, slot)
        rounded = (size + granule - 1) // granule * granule
        chunk = (rounded // granule + chunks - 1) // chunks * granule
        result = out_of_memory
        if not too_little(at, record, rounded):
            result = back(record, rounded, chunk, options)
        if result == out_of_memory and get(at, PENDING) > 0 and settle(at, stream, record) == 0:
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
            put(record, R_STATE, live)
        else:
            put(at, FAILED, get(at, FAILED) + 1)
            put(at, LAST_ERROR, result)
            put(record, R_STATE, empty)
        unlock(at)
        return address

    def free(address: int, _size: int, device: int, stream: int, _pool: int) -> None:
        at = base + device * part
        if address == 0 or get(at, INERT) != 0:
            return
        lock(at)
        slot = find(at, address)
        record = record_of(at, max(slot, 0))
        state = get(record, R_STATE) if slot >= 0 else empty
        if state in (live, held):
            put(at, FREED, get(at, FREED) + 1)
            put(at, LIVE_BYTES, get(at, LIVE_BYTES) - get(record, R_SIZE))
            put(record, R_STATE, gone if state == held else busy)
        else:
            put(at, LOST, get(at, LOST) + 1)
        unlock(at)
        if state != live:
            return
        result = settle(at, stream, record)
        if first_of_capture <= result <= last_of_capture:
            lock(at)
            put(at, PENDING, get(at, PENDING) + 1)
            put(record, R_STATE, pending)
            unlock(at)
        else:
            give_back(at, slot)

    def copy_record(at: int, slot: int, out: int) -> None:
        record = record_of(at, slot)
        poke(out, slot)
        for index in range(R_SCRATCH):
            put(out, index + 1, get(record, index))

    copy_record = inline(copy_record, 3, void)

    def change(device: int, slot: int, serial: int, before: int, after: int) -> Any:
        """Change a record's state if it is the expected one; returns the state that it had."""
        at = base + device * part
        lock(at)
        record = record_of(at, slot)
        state = get(record, R_STATE)
        if get(record, R_SERIAL) != serial:
            state = empty
        elif state == before:
            put(record, R_STATE, after)
        unlock(at)
        return state

    change = inline(change, 5)

    def hold(device: int, slot: int, serial: int) -> Any:
        return 1 if change(device, slot, serial, live, held) == live else 0

    def let_go(device: int, slot: int, serial: int) -> Any:
        state = change(device, slot, serial, held, live)
        return live if state == held else state

    def forget(device: int, slot: int, serial: int) -> Any:
        return change(device, slot, serial, gone, empty)

    def copy(device: int, out: int) -> int:
        at, count = base + device * part, 0
        lock(at)
        for slot in range(get(at, HIGH)):
            state = get(record_of(at, slot), R_STATE)
            if state not in (empty, busy):
                copy_record(at, slot, out + count * record_size)
                count += 1
        unlock(at)
        return count

    def drain(device: int) -> Any:
        return drain_part(base + device * part)

    def native(function: Any, result: Any, *arguments: Any) -> Any:
        return immortal(numba.cfunc(result(*arguments), nopython=True, error_model="numpy")(function))

    return Code(
        allocate=native(allocate, i64, i64, i32, i64, i64).address,
        free=native(free, void, i64, i64, i32, i64, i64).address,
        hold=native(hold, i64, i64, i64, i64).ctypes,
        let_go=native(let_go, i64, i64, i64, i64).ctypes,
        forget=native(forget, i64, i64, i64, i64).ctypes,
        copy=native(copy, i64, i64, i64).ctypes,
        drain=native(drain, i64, i64).ctypes,
    )


def entries(pool: int, allocate: int, free: int) -> tuple[int, int]:
    """Return the addresses of two functions that call `allocate` and `free` with a pool's number behind the rest."""
    _numba()  # it sets LLVM up for this processor
    binding: Any = importlib.import_module("llvmlite.binding")
    module = binding.parse_assembly(
        f"""
        define i64 @allocate(i64 %size, i32 %device, i64 %stream) {{
          %f = inttoptr i64 {allocate} to ptr
          %r = tail call i64 %f(i64 %size, i32 %device, i64 %stream, i64 {pool})
          ret i64 %r
        }}
        define void @free(i64 %address, i64 %size, i32 %device, i64 %stream) {{
          %f = inttoptr i64 {free} to ptr
          tail call void %f(i64 %address, i64 %size, i32 %device, i64 %stream, i64 {pool})
          ret void
        }}
        """
    )
    module.verify()
    machine = binding.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    engine = immortal(binding.create_mcjit_compiler(module, machine))
    engine.finalize_object()
    return int(engine.get_function_address("allocate")), int(engine.get_function_address("free"))


def _memory(numba: Any) -> tuple[Any, Any]:
    """Return functions for compiled code that read and write an int64 at an address."""
    extending: Any = importlib.import_module("numba.extending")
    llvm: Any = importlib.import_module("llvmlite.ir")
    i64, pointer = numba.types.int64, llvm.IntType(64).as_pointer()

    def peek(_typing: Any, _address: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return builder.load(builder.inttoptr(values[0], pointer))

        return i64(i64), generate

    def poke(_typing: Any, _address: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            builder.store(values[1], builder.inttoptr(values[0], pointer))
            return context.get_dummy_value()

        return numba.types.void(i64, i64), generate

    return extending.intrinsic(peek), extending.intrinsic(poke)


def _numba() -> Any:
    try:
        return importlib.import_module("numba")
    except ImportError as error:
        raise missing("numba", "allocation callbacks without a C compiler", error) from error
