"""Quiet addresses: each time others, within the range that systems leave alone."""

from __future__ import annotations

from itertools import pairwise

import pytest

from remap import GiB, MiB
from remap.sharing.quiet import QuietAddresses


@pytest.mark.parametrize("begin", [0, 0x4000, 0x7FFC])
def test_they_do_not_overlap(begin: int) -> None:
    """What is given out one after the other lies apart, whatever the sizes, and within the range also at its end."""
    places = QuietAddresses(lambda slots: min(begin, slots - 1) if begin else 0)
    given: list[tuple[int, int]] = []
    for size in (1, 5 * MiB, GiB, GiB + 1, 0):
        address = places.next(size)
        assert address >= 0x2000_0000_0000
        assert address + size <= 0x4000_0000_0000
        given.append((address, address + max(size, 1)))
    if begin < 0x7FFC:
        assert all(end <= start for (_, end), (start, _) in pairwise(given))


def test_more_than_there_is() -> None:
    """A size beyond the whole range is a hint like any other, which a driver need not follow."""
    places = QuietAddresses()
    assert places.next(64 << 40) == 0x2000_0000_0000
    assert places.next(1) >= 0x2000_0000_0000
