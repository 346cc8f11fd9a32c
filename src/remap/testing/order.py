"""Every ordered pair of life-cycle calls on the same objects, with its outcome (row B2).

The first call is made where it is legal, with all that it needs and the most that it may have: `release` while the
memory is mapped, `free_range` after the unmapping. Then the second call is made on the same allocation and the same
addresses. `OK` is success; a CUDA name is a refusal with that result, which must change nothing. Two words stand for
what no test can do on a driver, and what the objects of `remap.handles` must make impossible:

- `MISSING`: there is no handle to pass yet;
- `UNDEFINED`: the handle is dead, and the driver may do anything with it (T8).

`OPEN` is what no rule lays down: T7 lets a range with nothing mapped be unmapped, inside reserved space. Outside it a
driver may say `OK` or `INVALID_VALUE`, and nothing changes.
"""

# ruff: noqa: N802 (a test carries the number of its row)

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from remap.drivers.protocol import DEFAULT_STREAM
from remap.errors import CudaResult, DriverError
from remap.testing.bench import RW, Bench, refused

OK = "OK"
MISSING = "MISSING"
UNDEFINED = "UNDEFINED"
OPEN = "OPEN"
INVALID_VALUE = CudaResult.INVALID_VALUE.name

CALLS = ("create", "reserve", "map", "set_access", "fill", "unmap", "release", "free_range")

_TABLE = """
first \\ second | create reserve map           set_access    fill          unmap release   free_range
create         | OK     OK      INVALID_VALUE INVALID_VALUE INVALID_VALUE OPEN  OK        INVALID_VALUE
reserve        | OK     OK      MISSING       INVALID_VALUE INVALID_VALUE OK    MISSING   OK
map            | OK     OK      INVALID_VALUE OK            INVALID_VALUE OK    OK        INVALID_VALUE
set_access     | OK     OK      INVALID_VALUE OK            OK            OK    OK        INVALID_VALUE
fill           | OK     OK      INVALID_VALUE OK            OK            OK    OK        INVALID_VALUE
unmap          | OK     OK      OK            INVALID_VALUE INVALID_VALUE OK    OK        OK
release        | OK     OK      UNDEFINED     OK            OK            OK    UNDEFINED INVALID_VALUE
free_range     | OK     OK      INVALID_VALUE INVALID_VALUE INVALID_VALUE OPEN  OK        INVALID_VALUE
"""


def _read(table: str) -> dict[tuple[str, str], str]:
    header, *rows = table.strip().splitlines()
    columns = header.split("|")[1].split()
    cells: dict[tuple[str, str], str] = {}
    for row in rows:
        first, outcomes = row.split("|")
        for second, outcome in zip(columns, outcomes.split(), strict=True):
            cells[first.strip(), second] = outcome
    return cells


PAIRS = _read(_TABLE)
"""The outcome of each ordered pair (first, second)."""

TESTABLE = [pair for pair, outcome in PAIRS.items() if outcome not in {MISSING, UNDEFINED}]


class OrderRules:
    """The table, pair by pair; part of `DriverConformance`, which gives the fixtures."""

    def test_B2_the_table_is_complete(self) -> None:
        """Every ordered pair of calls is in the table, and only those with a dead or missing handle are not run."""
        assert PAIRS.keys() == set(product(CALLS, CALLS))
        left_out = PAIRS.keys() - set(TESTABLE)
        assert left_out == {
            ("reserve", "map"),
            ("reserve", "release"),
            ("release", "map"),
            ("release", "release"),
        }

    @pytest.mark.parametrize(("first", "second"), TESTABLE)
    def test_B2_pairs_of_calls(self, bench: Bench, first: str, second: str) -> None:
        """The second call has the outcome of the table; where it is refused, it changes nothing."""
        cycle = Cycle(bench)
        try:
            for call in _BEFORE[first]:
                cycle.do(call)
            cycle.do(first)
            before = cycle.seen()
            outcome = PAIRS[first, second]
            if outcome == OK:
                cycle.do(second)
            elif outcome == OPEN:
                assert _answer(lambda: cycle.do(second)) in {None, f"CUDA_ERROR_{INVALID_VALUE}"}
                assert cycle.seen() == before
            else:
                with refused(CudaResult[outcome]):
                    cycle.do(second)
                assert cycle.seen() == before
        finally:
            cycle.end()


_BEFORE: dict[str, tuple[str, ...]] = {
    "create": (),
    "reserve": (),
    "map": ("create", "reserve"),
    "set_access": ("create", "reserve", "map"),
    "fill": ("create", "reserve", "map", "set_access"),
    "unmap": ("create", "reserve", "map", "set_access"),
    "release": ("create", "reserve", "map", "set_access"),
    "free_range": ("create", "reserve"),
}
"""What is done before the first call of a pair."""


class Cycle:
    """One allocation and one range of the same size, and what has been done to them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.driver = bench.driver
        self.size = bench.size
        # Before anything is reserved, the calls name an address that is nobody's.
        self.address = self.driver.reserve(self.size)
        self.driver.free_range(self.address, self.size)
        self.handle = 0
        self.handles: list[int] = []
        self.ranges: list[int] = []

    def do(self, call: str) -> None:
        """Make one call of the life cycle."""
        calls: dict[str, Callable[[], None]] = {
            "create": self._create,
            "reserve": self._reserve,
            "map": lambda: self.driver.map(self.address, self.size, self.handle),
            "set_access": lambda: self.bench.grant(self.address, self.size, RW),
            "fill": lambda: self.driver.fill(self.address, 7, 1, self.size, DEFAULT_STREAM),
            "unmap": self._unmap,
            "release": self._release,
            "free_range": self._free_range,
        }
        calls[call]()

    def _create(self) -> None:
        handle = self.driver.create(self.size, self.bench.properties())
        self.handles.append(handle)
        self.handle = self.handle or handle

    def _reserve(self) -> None:
        address = self.driver.reserve(self.size)
        if not self.ranges:
            self.address = address
        self.ranges.append(address)

    def _unmap(self) -> None:
        self.driver.synchronize_context()
        self.driver.unmap(self.address, self.size)

    def _release(self) -> None:
        self.driver.release(self.handle)
        self.handles.remove(self.handle)

    def _free_range(self) -> None:
        self.driver.free_range(self.address, self.size)
        self.ranges.remove(self.address)

    def seen(self) -> tuple[object, ...]:
        """Return everything that the driver tells of the two."""
        self.driver.synchronize_context()
        questions: list[Callable[[], object]] = [
            self.bench.free_memory,
            lambda: self.driver.address_range(self.address),
            lambda: self.driver.pointer_info(self.address),
            lambda: self.bench.read(self.address, self.size).tobytes(),
        ]
        return tuple(_answer(question) for question in questions)

    def end(self) -> None:
        """Give everything back."""
        self.driver.synchronize_context()
        for address in self.ranges:
            self.driver.unmap(address, self.size)
            self.driver.free_range(address, self.size)
        for handle in self.handles:
            self.driver.release(handle)


def _answer(question: Callable[[], object]) -> object:
    try:
        return question()
    except DriverError as error:
        return error.name
