"""Processes at the other end of a connection: when is one so dead that it writes to no memory any more?

A process that is killed gives up its memory first and closes its files after that, so its connections end late: some 30
ms late for each GiB that it had touched in small pages, and several times that where cores are busy. All its threads
are marked as exiting before that, and none of them runs its program again: what they had mapped, no CPU writes.

Devices go on with what they were given until the driver has stopped them, which is when its files are closed, in some
order among the others. What comes after all of that is the end of the process, which a descriptor of it tells.
"""

from __future__ import annotations

import os
from contextlib import suppress

_EXITING = 0x4  # PF_EXITING
# Of the fields after the program's name: state, parent, group, session, terminal, its group, flags.
_FLAGS = 6


def is_exiting(process: int) -> bool:
    """Return whether no thread of a process will run its program again: it was killed, is ending, or has ended.

    False where this cannot be told, as of processes of other containers: the end of its connection tells it then.
    """
    try:
        if process <= 0 or os.readlink("/proc/self") != str(os.getpid()):  # /proc may be another container's
            return False
        threads = f"/proc/{process}/task"
        if not _has_ended(f"{threads}/{process}"):
            return False
        seen = os.listdir(threads)
        # A thread that began another one before it ended: the second look finds that.
        return all(_has_ended(f"{threads}/{one}") for one in seen) and {*os.listdir(threads)} <= {*seen}
    except FileNotFoundError:
        return True  # it is gone altogether, and there is nothing to list
    except (OSError, ValueError, IndexError):
        return False


def descriptor_of_end(process: int) -> int | None:
    """Return a descriptor that becomes readable when an exiting process has ended; None if it is not exiting."""
    if is_exiting(process):
        with suppress(OSError):
            return os.pidfd_open(process)
    return None


def _has_ended(thread: str) -> bool:
    try:
        with open(f"{thread}/stat", "rb") as file:
            # The name may hold anything, blanks and brackets too.
            return bool(int(file.read().rpartition(b")")[2].split()[_FLAGS]) & _EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return True
