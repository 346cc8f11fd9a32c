"""A plugin for pytest that keeps a test which fails from failing others: what it has made is closed.

A test that fails lives on in its traceback, with everything that it has made. The next change of driver would be
refused, and a fixture that looks for leaks would find some. In the `conftest.py` at the root of the tests,

    pytest_plugins = ["remap.testing.plugin"]

lets that test fail alone. What its fixtures have made stays theirs: they close it, and may look at it first.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from remap import lifetime
from remap.testing.simulation import close_leftovers

_failed = pytest.StashKey[bool]()
_before = pytest.StashKey[set[int]]()
"""Serials of what there was before a test and its fixtures."""
_held: set[int] = set()
"""Serials of what fixtures hold that outlive a test."""
_lent: set[int] = set()
"""Serials of what fixtures hold for one test."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Close what fixtures of a failed test have left: one of them may have failed, too."""
    item.stash[_before] = _serials()
    _lent.clear()
    result = yield
    if item.stash.get(_failed, False):
        close_leftovers(item.stash[_before] | _held)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """Note what a fixture makes."""
    before = _serials()
    result = yield
    (_lent if fixturedef.scope == "function" else _held).update(_serials() - before)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Note that a test, or one of its fixtures, has failed, as expected or not."""
    if call.excinfo is not None:
        item.stash[_failed] = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Close what a failed test has made itself, before its fixtures end."""
    if item.stash.get(_failed, False):
        close_leftovers(item.stash[_before] | _held | _lent)


def _serials() -> set[int]:
    return {thing.serial for thing in lifetime.live()}
