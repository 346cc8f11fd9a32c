"""Sizes in bytes: the binary units, parsing (`"64MiB"`), printing, and rounding to a granularity."""

from __future__ import annotations

import operator
import re
from fractions import Fraction
from typing import SupportsIndex, TypeAlias

from remap.errors import AlignmentError, InvalidValueError

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

# Both drivers keep addresses below 2**63, so a larger size can only be a mistake.
LARGEST = (1 << 63) - 1

Size: TypeAlias = SupportsIndex | str
"""What is taken where a size is asked for: a number of bytes, or text such as `"64MiB"`."""

_UNITS = {"": 1, "b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB}
_DECIMAL = {"kb", "mb", "gb", "tb", "k", "m", "g", "t"}
# More digits than any size has are none: Python refuses to read thousands of them.
_TEXT = re.compile(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def parse_size(value: Size, what: str = "size") -> int:
    """Return `value` as a number of bytes, 0 or more.

    Text is a number with one of the units B, KiB, MiB, GiB, TiB, in any case; `"1.5GiB"` is fine as long as it is
    whole bytes. `what` names the argument in messages. Raises `InvalidValueError`, or `TypeError` for other types.
    """
    if type(value) is int and 0 <= value <= LARGEST:
        return value
    number = _parse_text(value, what) if isinstance(value, str) else _index(value, what)
    if number < 0:
        raise InvalidValueError(f"{what} {number}", rule="sizes are 0 or more")
    if number > LARGEST:
        raise InvalidValueError(f"{what} {number}", rule="no address space is larger than 2**63 - 1 bytes")
    return number


def parse_offset(value: Size, what: str = "offset") -> int:
    """Return `value` as a number of bytes, as `parse_size` does, but leave numbers below 0 to a check of bounds."""
    return parse_size(value, what) if isinstance(value, str) else _index(value, what)


def parse_byte(value: SupportsIndex) -> int:
    """Return the value that a byte is filled with. Raises `InvalidValueError`, or `TypeError` for other types."""
    try:
        byte = operator.index(value)
    except TypeError:
        said = f"fill takes a byte, an integer from 0 to 255, not {value!r}"
        raise TypeError(f"{said}. A typed buffer (remap.DeviceBuffer) is filled with values") from None
    if not 0 <= byte <= 255:
        raise InvalidValueError(f"fill with {byte}", rule="a byte is 0 to 255")
    return byte


def _index(value: SupportsIndex, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f'{what} {value!r}: it is a whole number of bytes, or text such as "64MiB"') from None


def _parse_text(text: str, what: str) -> int:
    step = 'Write a number and a unit, such as "64MiB", or pass bytes as a number'
    match = _TEXT.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or (unit not in _UNITS and unit not in _DECIMAL):
        raise InvalidValueError(f"{what} {text!r}", rule="it is not a size", next_step=step)
    if unit in _DECIMAL:
        rule = "decimal units are not taken, as driver sizes are powers of two"
        raise InvalidValueError(f"{what} {text!r}", rule=rule, next_step="Use KiB, MiB, GiB or TiB")
    number = Fraction(match[1]) * _UNITS[unit]
    if number.denominator != 1:
        raise InvalidValueError(f"{what} {text!r}", rule="it is not a whole number of bytes", next_step=step)
    return number.numerator


def format_size(size: int) -> str:
    """Return `size` bytes as text: exact where a unit divides it, else rounded to two decimals."""
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(size) >= unit:
            return f"{size // unit} {name}" if size % unit == 0 else f"{size / unit:.2f} {name}"
    return f"{size} B"


def counted(number: int, noun: str) -> str:
    """Return a number of things in words that agree: `1 chunk`, `2 chunks`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def round_up(size: int, granularity: int) -> int:
    """Return the smallest multiple of `granularity` that is not below `size`."""
    return -(-size // granularity) * granularity


def is_power_of_two(number: int) -> bool:
    """Tell whether `number` is 1, 2, 4, …"""
    return number > 0 and number & (number - 1) == 0


def check_aligned(number: int, granularity: int, what: str) -> int:
    """Return `number` if `granularity` divides it, else raise `AlignmentError` naming both neighbours."""
    if number % granularity:
        below = number // granularity * granularity
        near = f"{below} or {below + granularity}" if below else f"{granularity}"
        raise AlignmentError(
            f"{what} {number} ({format_size(number)})",
            rule=f"it must be a multiple of {format_size(granularity)}",
            next_step=f"The nearest that fit: {near} bytes",
        )
    return number
