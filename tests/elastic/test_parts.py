"""What elastic buffers stand on, by itself: extents against a plain set, and how ranges are cut into chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import remap
from remap import GiB, MiB
from remap.buffers.extents import Extents
from remap.chunks.sizes import LARGEST_CHUNK, parse_chunk

END = 24
PARTS = st.tuples(st.integers(0, END), st.integers(0, END))


@given(st.lists(st.tuples(st.booleans(), PARTS), max_size=20), PARTS)
def test_extents_are_a_set(steps: list[tuple[bool, tuple[int, int]]], asked: tuple[int, int]) -> None:
    """Adding and removing parts does what it does to a set of numbers, in the fewest intervals."""
    extents, plain = Extents(), set[int]()
    for adds, (start, stop) in steps:
        (extents.add if adds else extents.remove)(start, stop)
        (plain.update if adds else plain.difference_update)(range(start, stop))
    assert {byte for start, stop in extents for byte in range(start, stop)} == plain
    assert list(extents) == runs(plain)
    assert extents.end == max(plain, default=-1) + 1
    start, stop = asked
    wanted = set(range(start, stop))
    assert extents.covers(start, stop) == (wanted <= plain)
    assert extents.overlaps(start, stop) == bool(wanted & plain)
    assert extents.gaps(start, stop) == runs(wanted - plain)
    twin = extents.copy()
    twin.add(0, END)
    assert list(extents) == runs(plain)


def runs(numbers: set[int]) -> list[tuple[int, int]]:
    """Return the intervals that numbers form."""
    edges = [n for n in sorted(numbers) if n - 1 not in numbers]
    ends = [n + 1 for n in sorted(numbers) if n + 1 not in numbers]
    return list(zip(edges, ends, strict=True))


@given(
    st.sampled_from(["exact", "geometric", 2, 3, 8]),
    st.integers(0, 200),
    st.integers(1, 200),
    st.integers(0, 100),
    st.integers(0, 400),
    st.booleans(),
)
def test_cuts_cover_what_was_asked_for(
    kind: str | int, start: int, length: int, more: int, before: int, tight: bool
) -> None:
    """The chunks of a cut cover the part, stay in the room, and are whole granules of the size that was asked for."""
    granule = 2 * MiB
    sizes = parse_chunk(kind * granule if isinstance(kind, int) else kind, granule)
    start = start * granule // sizes.unit * sizes.unit
    stop, room = start + length * granule, start + (length + more) * granule
    if isinstance(kind, int):
        stop = min(-(-stop // sizes.unit) * sizes.unit, room)
    cut = sizes.cut(start, stop, room, before * granule, tight=tight)
    assert stop <= start + sum(cut) <= room
    assert all(size > 0 and size % granule == 0 for size in cut)
    if kind == "exact":
        assert cut == [stop - start]
    if isinstance(kind, int):
        assert all(size == sizes.unit for size in cut[:-1])
    if kind == "geometric":
        assert max(cut) <= LARGEST_CHUNK
        assert sum(cut[:-1]) < stop - start
        if tight:
            assert sum(cut) == stop - start
        else:  # at most a quarter too much, but for the last granule
            assert sum(cut) - (stop - start) <= max((before * granule + sum(cut[:-1])) // 4, granule)


def test_growing_in_small_steps_takes_larger_chunks() -> None:
    """Two MiB at a time, chunks grow from 2 to 64 MiB, so that 8 GiB take fewer than 160 of them."""
    sizes = parse_chunk(None, 2 * MiB)
    mapped, cuts = 0, list[int]()
    for asked in range(2 * MiB, 8 * GiB + 1, 2 * MiB):
        if asked > mapped:
            cuts += sizes.cut(mapped, asked, 16 * GiB, mapped)
            mapped = sum(cuts)
    assert cuts[0] == 2 * MiB
    assert cuts == sorted(cuts)
    assert cuts[-1] == 64 * MiB
    assert len(cuts) < 160


@pytest.mark.parametrize("chunk", [0, 3, "1MiB", 5 * MiB, "some"])
def test_chunk_sizes_that_cannot_be(chunk: object) -> None:
    """A chunk is "exact", "geometric" or whole granules."""
    with pytest.raises(remap.InvalidValueError):
        parse_chunk(chunk, 2 * MiB)  # type: ignore[arg-type]
