"""Collectives: what all ranks of a program compute together, over multicast memory."""

from __future__ import annotations

from remap.collectives.multicast import MulticastCollectives

__all__ = ["MulticastCollectives"]
