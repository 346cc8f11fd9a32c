"""Row B2 with the objects of remap: every ordered pair of life-cycle calls, and its outcome.

As in `remap.testing.order`, the first call is made where it is legal, with the most that it may have; the second is
said to the same objects. What is undefined or cannot be named on a driver is an error here, or cannot be written:
`-` stands for a method of an object that does not exist yet.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TypeVar

import pytest

import remap
from remap import MiB
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

T = TypeVar("T")

SIZE = 4 * MiB

OBJECTS = """
first \\ second | create reserve map         set_access  fill        unmap release free_range
create         | ok     ok      -           -           -           -     ok      -
reserve        | ok     ok      -           -           -           -     -       ok
map            | ok     ok      InUseError  ok          AccessError ok    ok      InUseError
set_access     | ok     ok      InUseError  ok          ok          ok    ok      InUseError
fill           | ok     ok      InUseError  ok          ok          ok    ok      InUseError
unmap          | ok     ok      ok          ClosedError ClosedError ok    ok      ok
release        | ok     ok      ClosedError ok          ok          ok    ok      InUseError
free_range     | ok     ok      ClosedError ClosedError ClosedError ok    ok      ok
"""

BEFORE = {
    "create": "",
    "reserve": "",
    "map": "create reserve",
    "set_access": "create reserve map",
    "fill": "create reserve map set_access",
    "unmap": "create reserve map set_access",
    "release": "create reserve map set_access",
    "free_range": "create reserve map set_access unmap",
}

BUFFERS = """
first \\ second | fill        copy_from_host copy_to_host copy_from   to_host     address     footprint   close
fill           | ok          ok             ok           ok          ok          ok          ok          ok
close          | ClosedError ClosedError    ClosedError  ClosedError ClosedError ClosedError ClosedError ok
"""


def read(table: str) -> dict[tuple[str, str], str]:
    """Return the cells of a table by row and column."""
    header, *rows = table.strip().splitlines()
    columns = header.split("|")[1].split()
    return {
        (row.split("|")[0].strip(), column): outcome
        for row in rows
        for column, outcome in zip(columns, row.split("|")[1].split(), strict=True)
    }


OBJECT_PAIRS = read(OBJECTS)
BUFFER_PAIRS = read(BUFFERS)


class Cycle:
    """One allocation, one reservation and one mapping, and the calls of their lives."""

    def __init__(self) -> None:
        self.made: list[remap.Mapping | remap.PhysicalAllocation | remap.Reservation] = []
        self.calls: dict[str, Callable[[], object]] = {
            "create": self.create,
            "reserve": self.reserve,
            "map": self.map,
            "set_access": lambda: self.find(remap.Mapping).set_access({0: "rw"}),
            "fill": lambda: self.find(remap.Mapping).fill(3),
            "unmap": lambda: self.find(remap.Mapping).close(),
            "release": lambda: self.find(remap.PhysicalAllocation).close(),
            "free_range": lambda: self.find(remap.Reservation).close(),
        }

    def create(self) -> None:
        """Create an allocation."""
        self.made.append(remap.create(SIZE, at=0))

    def reserve(self) -> None:
        """Reserve a range."""
        self.made.append(remap.reserve(SIZE))

    def map(self) -> None:
        """Map the first allocation into the first reservation."""
        self.made.append(self.find(remap.Reservation).map(self.find(remap.PhysicalAllocation)))

    def find(self, kind: type[T]) -> T:
        """Return the first object of a kind."""
        return next(thing for thing in self.made if isinstance(thing, kind))

    def close(self) -> None:
        """Close everything, mappings first."""
        for kind in (remap.Mapping, remap.PhysicalAllocation, remap.Reservation):
            for thing in self.made:
                if isinstance(thing, kind):
                    thing.close()


def test_the_table_is_complete() -> None:
    """Every ordered pair of calls is listed, and only what has no object yet is left out."""
    assert OBJECT_PAIRS.keys() == set(product(BEFORE, BEFORE))
    missing = {pair for pair, outcome in OBJECT_PAIRS.items() if outcome == "-"}
    methods_of_a_mapping = ("set_access", "fill", "unmap")
    assert missing == {
        *product(("create", "reserve"), ("map", *methods_of_a_mapping)),
        ("create", "free_range"),
        ("reserve", "release"),
    }


@pytest.mark.parametrize(
    ("first", "second"), [pair for pair, outcome in OBJECT_PAIRS.items() if outcome != "-"]
)
def test_pairs_of_objects(stage: Stage, first: str, second: str) -> None:
    """The second call has the outcome of the table; where it is refused, nothing changes (B2; invariants 3, 4, 5)."""
    cycle = Cycle()
    for call in (*BEFORE[first].split(), first):
        cycle.calls[call]()
    outcome = OBJECT_PAIRS[first, second]
    if outcome == "ok":
        cycle.calls[second]()
    else:
        before, described = stage.seen(), [str(thing.describe()) for thing in cycle.made]
        with pytest.raises(getattr(remap, outcome)):
            cycle.calls[second]()
        assert stage.unchanged(before)
        assert [str(thing.describe()) for thing in cycle.made] == described
    cycle.close()


@pytest.mark.parametrize(("first", "second"), BUFFER_PAIRS)
def test_pairs_of_a_buffer(stage: Stage, first: str, second: str) -> None:
    """A closed buffer refuses everything but to be closed again (B2; invariants 3 and 4)."""
    buffer, other = remap.allocate(SIZE), remap.allocate(SIZE)
    host = bytearray(16)
    calls: dict[str, Callable[[], object]] = {
        "fill": lambda: buffer.fill(1),
        "copy_from_host": lambda: buffer.copy_from_host(host),
        "copy_to_host": lambda: buffer.copy_to_host(host),
        "copy_from": lambda: buffer.copy_from(other),
        "to_host": buffer.to_host,
        "address": lambda: buffer.address,
        "footprint": buffer.footprint,
        "close": buffer.close,
    }
    calls[first]()
    outcome = BUFFER_PAIRS[first, second]
    mark = stage.mark()
    if outcome == "ok":
        calls[second]()
    else:
        with pytest.raises(getattr(remap, outcome), match=r"buffer \d+"):
            calls[second]()
        assert not stage.since(mark), "a closed object asks nothing of the driver"
    buffer.close()
    other.close()


@pytest.mark.parametrize("order", ["mapping reservation allocation", "allocation mapping reservation"])
def test_every_legal_order_of_closing(stage: Stage, order: str) -> None:
    """Memory may be closed before or after all else; a reservation only after its mappings (B2; invariants 2, 3)."""
    before = stage.seen()
    memory, addresses = remap.create(SIZE, at=0), remap.reserve(SIZE)
    mapping = addresses.map(memory, access={0: "rw"})
    things = {"mapping": mapping, "allocation": memory, "reservation": addresses}
    for name in order.split():
        if not mapping.closed:
            with pytest.raises(remap.InUseError, match="4 MiB at offset 0"):
                addresses.close()
        things[name].close()
    assert stage.unchanged(before)
