"""Sites: where in the user's program an object was made. Recorded on request, and free when it is not.

`REMAP_TRACEBACK=1` asks for it from the beginning, `remap.record_sites()` from any point on; the number is how many
frames are kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

_OWN = str(Path(__file__).parent) + os.sep


class Sites:
    """How many frames of each new object are recorded: 0 for none."""

    __slots__ = ("depth",)

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def here(self) -> tuple[str, ...]:
        """Return the frames of the user's program that lead here, innermost first, as `file:line in function`."""
        frame: FrameType | None = sys._getframe(1)
        found: list[str] = []
        while frame is not None and len(found) < self.depth:
            code = frame.f_code
            if not code.co_filename.startswith(_OWN) and not code.co_filename.endswith("contextlib.py"):
                found.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
            frame = frame.f_back
        return tuple(found)


def _asked(text: str) -> int:
    """Read `REMAP_TRACEBACK`: a number of frames; anything else but nothing and 0 means one."""
    return int(text) if text.isdigit() else int(bool(text))


sites = Sites(_asked(os.environ.get("REMAP_TRACEBACK", "")))
