"""Host drivers that are shut down after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .support import Host


@pytest.fixture
def open_host() -> Iterator[Callable[..., Host]]:
    """Open host drivers with options; all are shut down after the test."""
    opened: list[Host] = []

    def opener(**options: Any) -> Host:
        opened.append(Host(**options))
        return opened[-1]

    yield opener
    for host in reversed(opened):
        host.driver.shutdown()


@pytest.fixture
def host(open_host: Callable[..., Host]) -> Host:
    """Return a host driver with its default options."""
    return open_host()
