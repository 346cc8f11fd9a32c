"""How the table of natively made segments lies in memory, and what its compiled code is given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple


class State(IntEnum):
    """What a record stands for."""

    EMPTY = 0
    LIVE = 1  # mapped, and the framework's: its free callback unmaps it
    HELD = 2  # remap's for now: it sleeps or moves, and the free callback only marks it
    GONE = 3  # was freed while it was held; Python gives it back
    PENDING = 4  # was freed during a capture, which a wait would have broken; still mapped
    BUSY = 5  # being made, or being given back


class Record(NamedTuple):
    """One segment, as a copy of its record. Its slot may come to stand for another one; its serial never does."""

    slot: int
    state: int
    address: int
    size: int
    pool: int
    serial: int
    requested: int
    chunk: int


class Counters(NamedTuple):
    """What was done on one device so far: calls, and the bytes that the framework has now.

    `pending` segments wait for a capture to end; `lost` ones could not be unmapped, or were never ours.
    """

    allocated: int
    freed: int
    failed: int
    last_error: int
    live_bytes: int
    pending: int
    lost: int


class Options(NamedTuple):
    """What a pool asks of the driver on one device: CUDA's structures as bytes, its granule, chunks a segment.

    `access` are as many descriptions as there are `accessing`, one after the other.
    """

    properties: bytes
    access: bytes
    accessing: int
    granule: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Functions:
    """A driver's functions, as ctypes functions that take and return integers; addresses are integers too."""

    reserve: Any  # (where the address goes, size, alignment, hint, flags)
    free_range: Any  # (address, size)
    create: Any  # (where the handle goes, size, properties, flags)
    release: Any  # (handle)
    map: Any  # (address, size, offset, handle, flags)
    unmap: Any  # (address, size)
    set_access: Any  # (address, size, descriptions, count)
    push: Any  # (context)
    pop: Any  # (where the context goes)
    synchronize: Any  # ()
    capturing: Any  # (stream, where the status goes)
    capture_mode: Any  # (where the mode is, and the old one goes)
    memory_info: Any  # (where free goes, where total goes)
    lock: Any  # (mutex)
    unlock: Any  # (mutex)


DEVICES, POOLS, SLOTS = 64, 256, 1 << 16
"""How many of each there can be; memory is taken only for what is used."""

WORD = 8

# The head of a device's part, in words: a mutex of 64 bytes, then figures. Counters stand in their order.
CONTEXT, INERT, CAPTURES, HIGH, MARGIN, SERIAL = range(8, 14)
ALLOCATED, FREED, FAILED, LAST_ERROR, LIVE_BYTES, PENDING, LOST = range(14, 21)
HEAD = 32

# A record. While it is BUSY, the driver writes its results into it.
R_STATE, R_ADDRESS, R_SIZE, R_POOL, R_SERIAL, R_REQUESTED, R_CHUNK, R_SCRATCH = range(8)
RECORD = 8

# What a pool asks for on a device: CUmemAllocationProp, room for MOST_ACCESSING CUmemAccessDesc, then figures.
MOST_ACCESSING = 18
O_PROPERTIES, O_ACCESS, O_COUNT, O_GRANULE, O_CHUNKS = 0, 4, 31, 32, 33
OPTION = 34

OPTIONS_AT = HEAD + SLOTS * RECORD
PART = OPTIONS_AT + POOLS * OPTION
