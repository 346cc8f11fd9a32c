"""Sizes: parsing, printing, rounding, alignment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remap.errors import AlignmentError, InvalidValueError
from remap.sizes import (
    GiB,
    KiB,
    MiB,
    check_aligned,
    counted,
    format_size,
    is_power_of_two,
    parse_size,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("64MiB", 64 * MiB), (" 1.5 gib ", 3 * GiB // 2), ("2kib", 2 * KiB), ("7B", 7), ("12", 12)],
)
def test_text_is_parsed(text: str, expected: int) -> None:
    """A number with a binary unit, in any case, is that many bytes."""
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "MiB", "1 mb", "1GB", "-1", "1e3", "0.3B", "1.0000000001KiB", "1 MiB 2", "٣MiB"]
)
def test_other_text_is_refused(text: str) -> None:
    """What is not a size, or not whole bytes, is refused with the way to write one."""
    with pytest.raises(InvalidValueError, match=r"Write|Use|sizes"):
        parse_size(text)


@pytest.mark.parametrize("value", [-1, 1 << 63, 10**30])
def test_impossible_numbers_are_refused(value: int) -> None:
    """Negative and absurd numbers are refused before anything is asked of a driver."""
    with pytest.raises(InvalidValueError, match="size"):
        parse_size(value)


def test_only_whole_numbers_are_sizes() -> None:
    """NumPy integers are sizes; floats are not, as they may have lost bytes already."""
    assert parse_size(np.int64(5)) == 5
    with pytest.raises(TypeError, match=r"size 1\.5: it is a whole number of bytes"):
        parse_size(1.5)  # type: ignore[arg-type]


@given(st.integers(0, 1 << 62))
def test_exact_sizes_survive_printing(size: int) -> None:
    """What is printed without decimals parses back to the same number."""
    text = format_size(size)
    if "." not in text:
        assert parse_size(text) == size


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 30))
def test_rounding_up_is_the_next_multiple(size: int, granularity: int) -> None:
    """The result is a multiple, not below the size, and less than one granule above it."""
    rounded = round_up(size, granularity)
    assert rounded % granularity == 0
    assert 0 <= rounded - size < granularity


def test_misalignment_names_the_neighbours() -> None:
    """The message of a misaligned size says which sizes near it fit."""
    with pytest.raises(AlignmentError, match=f"{2 * MiB} or {4 * MiB}"):
        check_aligned(3 * MiB, 2 * MiB, "size")
    assert check_aligned(4 * MiB, 2 * MiB, "size") == 4 * MiB


def test_powers_of_two() -> None:
    """1, 2 and 4 are powers of two; 0, 3 and negatives are not."""
    assert [number for number in (-2, 0, 1, 2, 3, 4) if is_power_of_two(number)] == [1, 2, 4]


def test_things_are_counted_in_words_that_agree() -> None:
    """One thing is no plural."""
    assert [counted(n, "chunk") for n in (0, 1, 2, 1000)] == [
        "0 chunks",
        "1 chunk",
        "2 chunks",
        "1,000 chunks",
    ]
