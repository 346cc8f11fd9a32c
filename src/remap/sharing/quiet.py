"""Where a new buffer is mapped so that other processes most likely have that address free, too."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from remap.sizes import GiB, round_up

_FIRST = 0x2000 << 32
_SLOTS = 0x2000 << 2  # of 1 GiB each


class QuietAddresses:
    """Addresses where other processes most likely have nothing, one behind the other.

    Where systems put things, libraries and stacks and whatever is mapped with no hint, is drawn anew for each
    process: in the terabyte below 0x7fff…, and above 0x55… or 0x56…. Now and then a process has something of its
    own where another one had 1 GiB of weights (seen once in some fifty). A system or device that has no such
    addresses chooses others.

    One draws where it begins, and goes on behind what it gave out last: buffers that are created one after the other
    can then be open together, though each was closed before the next was made. At the end of the range it draws anew.
    """

    __slots__ = ("_draw", "_lock", "_slot")

    def __init__(self, draw: Callable[[int], int] = secrets.randbelow) -> None:
        self._draw = draw
        self._lock = threading.Lock()
        self._slot: int | None = None

    def next(self, size: int) -> int:
        """Return an address for `size` bytes."""
        wide = max(round_up(size, GiB) // GiB, 1)
        with self._lock:
            if self._slot is None or self._slot + wide > _SLOTS:
                self._slot = self._draw(max(_SLOTS - wide, 1))
            address = _FIRST + self._slot * GiB
            self._slot += wide
        return address
