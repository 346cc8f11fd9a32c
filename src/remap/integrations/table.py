"""`Table`: what native callbacks have allocated, as Python reads it and takes it over."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remap.errors import InvalidValueError
from remap.forks import in_child
from remap.integrations import layout
from remap.integrations.layout import Counters, Functions, Options, Record, State
from remap.integrations.native import Code, compiled, entries
from remap.integrations.support import immortal


class Table:
    """The records of one driver's segments, and the compiled functions that work on them. It lives for ever.

    Python never holds its mutexes: whatever needs them is compiled, and runs without the GIL.
    """

    def __init__(self, functions: Functions) -> None:
        self._words: NDArray[np.int64] = np.zeros(layout.DEVICES * layout.PART, np.int64)
        self._base: int = self._words.ctypes.data
        self._code: Code = compiled(self._base, functions)
        self._entries: list[tuple[int, int]] = []
        self._numbers: dict[str, int] = {}
        immortal((self, functions))
        _tables.append(self)

    def add_pool(self, tag: str, options: dict[int, Options]) -> int:
        """Return the number of a pool that gets these options by device, and nothing from other devices.

        A tag that was used before, with another driver object, has its number again: callbacks are never unloaded.
        """
        number = self._numbers.get(tag)
        if number is None:
            number = len(self._entries)
            if number == layout.POOLS:
                raise InvalidValueError(
                    f"pool {tag!r}",
                    rule=f"a process can have {layout.POOLS} pools, as their callbacks are never unloaded",
                    next_step="Use a tag again",
                )
            self._entries.append(entries(number, self._code.allocate, self._code.free))
            self._numbers[tag] = number
        for at in range(layout.DEVICES):
            self.set_options(number, at, options.get(at, _NOTHING))
        return number

    def set_options(self, pool: int, device: int, options: Options) -> None:
        """Say what a pool asks for on a device."""
        at = device * layout.PART + layout.OPTIONS_AT + pool * layout.OPTION
        raw = options.properties.ljust((layout.O_ACCESS - layout.O_PROPERTIES) * layout.WORD, b"\0")
        raw += options.access.ljust((layout.O_COUNT - layout.O_ACCESS) * layout.WORD, b"\0")
        ctypes.memmove(self._base + at * layout.WORD, raw, len(raw))
        self._words[at + layout.O_COUNT] = options.accessing
        self._words[at + layout.O_CHUNKS] = options.chunks
        self._words[at + layout.O_GRANULE] = options.granule

    def entry(self, pool: int) -> tuple[int, int]:
        """Return the addresses of a pool's callbacks.

        They are `void *(size_t size, int device, stream)` and `void (void *, size_t size, int device, stream)`.
        """
        return self._entries[pool]

    def set_context(self, device: int, context: int) -> None:
        """Say which context is waited for before memory of a device is unmapped; 0 for none."""
        self._words[device * layout.PART + layout.CONTEXT] = context

    def set_margin(self, size: int) -> None:
        """Let allocations fail that would leave less than `size` bytes of a device free."""
        self._words[layout.MARGIN :: layout.PART] = size

    @property
    def margin(self) -> int:
        """How many bytes of a device allocations leave free."""
        return int(self._words[layout.MARGIN])

    def set_captures(self, count: int) -> None:
        """Say how many captures are known to go on: nothing is waited for meanwhile."""
        self._words[layout.CAPTURES :: layout.PART] = count

    def make_inert(self) -> None:
        """Let the callbacks do nothing from now on: in a forked child, and while the process ends."""
        self._words[layout.INERT :: layout.PART] = 1

    def hold(self, device: int, record: Record) -> bool:
        """Take one live segment over; False if it is not there any more."""
        return bool(self._code.hold(device, record.slot, record.serial))

    def let_go(self, device: int, record: Record) -> State:
        """Give a held segment back to the framework; GONE if that has freed it meanwhile."""
        return State(self._code.let_go(device, record.slot, record.serial))

    def forget(self, device: int, record: Record) -> None:
        """Empty the record of a segment that was GONE and has been given back."""
        self._code.forget(device, record.slot, record.serial)

    def records(self, device: int) -> list[Record]:
        """Return a copy of all records that stand for something."""
        return _copied(lambda out: self._code.copy(device, out))

    def drain(self, device: int) -> int:
        """Unmap what was freed during captures; the caller has waited. Returns how many segments."""
        return int(self._code.drain(device))

    def counters(self, device: int) -> Counters:
        """Return what was done on a device so far."""
        at = device * layout.PART
        figures = self._words[at + layout.ALLOCATED : at + layout.LOST + 1]
        return Counters(*(int(number) for number in figures))


def _copied(fill: Callable[[int], Any]) -> list[Record]:
    # Room for every record there can be, since more may come before the table is locked; pages come when written.
    out = np.zeros((layout.SLOTS, layout.RECORD), np.int64)
    count = int(fill(out.ctypes.data))
    return [Record(*row) for row in out[:count].tolist()]


_NOTHING = Options(b"", b"", 0, 0, 1)

_tables: list[Table] = []


def _make_all_inert() -> None:
    for table in _tables:
        table.make_inert()


in_child(_make_all_inert)
# Frameworks free memory while the interpreter goes, when the driver may have gone before: the end frees it all.
atexit.register(_make_all_inert)
