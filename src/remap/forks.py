"""Forks: what a child renews at its beginning, before any other code of it runs."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(call: Callable[[], object]) -> None:
    """Make a call at the beginning of each forked child; those that were named first are made first.

    Where there are no forks, as on Windows, it is never made. Source: os.register_at_fork.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)
