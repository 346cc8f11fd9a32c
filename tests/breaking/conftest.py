"""What is alive before a test of this directory is what is alive after it."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from remap import lifetime


@pytest.fixture(autouse=True)
def nothing_left() -> Generator[None]:
    """Fail a test that leaves objects of remap open."""
    before = lifetime.live()
    yield
    lifetime.collect()
    left = [thing for thing in lifetime.live() if thing not in before]
    assert not left, f"left open: {left}"
