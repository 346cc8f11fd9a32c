"""What a command raises when it cannot run here through no fault of anyone."""

from __future__ import annotations


class Waived(Exception):  # noqa: N818 (it is no error)
    """What was asked for needs something that this machine does not have; the message is the reason."""
