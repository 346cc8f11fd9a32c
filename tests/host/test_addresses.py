"""The table of intervals answers as a plain list would."""

from __future__ import annotations

import random
from dataclasses import dataclass

from remap.drivers.host.addresses import AddressMap


@dataclass
class Span:
    base: int
    end: int


def test_agrees_with_a_plain_list() -> None:
    """After any inserts and removals, every query gives what a search through all intervals gives."""
    chance = random.Random(4)
    table: AddressMap[Span] = AddressMap()
    model: list[Span] = []
    for step in range(6000):
        base = chance.randrange(5000) * 10
        item = Span(base, base + 10 * chance.randint(1, 3))
        clash = [other for other in model if other.base < item.end and item.base < other.end]
        assert table.overlapping(item.base, item.end) == sorted(clash, key=lambda one: one.base)
        assert table.overlaps(item.base, item.end) == bool(clash)
        if not clash:
            table.insert(item)
            model.append(item)
        elif step % 3 == 0:
            gone = chance.choice(clash)
            table.remove(gone)
            model.remove(gone)
        address = chance.randrange(50000)
        holders = [other for other in model if other.base <= address < other.end]
        assert table.at(address) is (holders[0] if holders else None)
        assert table.starting_at(base) is next((other for other in model if other.base == base), None)
    assert [one.base for one in table] == sorted(one.base for one in model)
    assert len(table) == len(model)


def test_splits_and_empties() -> None:
    """Thousands of neighbours go in and out in any order, and nothing is left behind."""
    table: AddressMap[Span] = AddressMap()
    items = [Span(base, base + 1) for base in range(5000)]
    for item in items[::2] + items[1::2]:
        table.insert(item)
    assert table.overlapping(0, 5000) == items
    assert table.overlapping(1023, 1026) == items[1023:1026]
    for item in items[1::2] + items[::2]:
        table.remove(item)
    assert len(table) == 0
    assert table.at(7) is None
    assert table.overlapping(0, 5000) == []
