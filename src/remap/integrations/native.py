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

from remap.integrations.callbacks import (
    make_allocate,
    make_basics,
    make_free,
    make_give_back,
    make_holding,
    make_reading,
    make_settle,
    make_slots,
)
from remap.integrations.layout import Functions
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
    code = make_basics(numba, base, functions, *_memory(numba))
    take_slot, find = make_slots(code)
    settle = make_settle(code)
    give_back, drain_part = make_give_back(code)
    hold, let_go, forget = make_holding(code)
    copy, drain = make_reading(code, drain_part)
    i32, i64, void = numba.types.int32, numba.types.int64, numba.types.void

    def native(function: Any, result: Any, *arguments: Any) -> Any:
        return immortal(numba.cfunc(result(*arguments), nopython=True, error_model="numpy")(function))

    allocate = make_allocate(code, take_slot, settle, drain_part)
    free = make_free(code, find, settle, give_back)
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
