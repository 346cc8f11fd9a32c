"""The conformance suite sees: a driver whose graph memory breaks one rule fails the test of that rule."""

# ruff: noqa: D103 (the name of a bent method says which rule it breaks)

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from remap import drivers
from remap.drivers.graph_powers import GraphFigures
from remap.drivers.wrappers import Faulty
from remap.errors import DriverError
from remap.testing.bench import Bench, OpenDriver
from remap.testing.graphs import SIZE, GraphRules


class Bent(Faulty):
    """A driver that is right in everything but one method."""

    def bend(self, method: str, replacement: Callable[..., Any]) -> None:
        """Let `replacement(inner, *arguments)` stand for a method."""
        setattr(self, method, partial(replacement, self.inner))


def addresses_never_again(driver: Any, graph: int, after: Any, device: int, size: int) -> Any:
    return driver.graph_add_allocate(graph, [], device, size)


def frees_anything(driver: Any, graph: int, after: Any, address: int) -> Any:
    try:
        return driver.graph_add_free(graph, after, address)
    except DriverError:
        return driver.graph_add_empty(graph, after)


def clones_anything(driver: Any, graph: int) -> Any:
    try:
        return driver.graph_clone(graph)
    except DriverError:
        return driver.graph_create()


def trims_nothing(driver: Any, device: int) -> None:
    del driver, device


def marks_of_any_value(driver: Any, device: int, mark: Any, value: int) -> None:
    del value
    driver.graph_set_high(device, mark, 0)


def reserved_is_less(driver: Any, device: int) -> GraphFigures:
    found = driver.graph_figures(device)
    return GraphFigures(found.used, found.used_high, max(found.reserved - SIZE, 0), found.reserved_high)


def launches_again(driver: Any, executable: int, stream: int) -> None:
    with suppress(DriverError):
        driver.graph_launch(executable, stream)


def waits_for_every_run(driver: Any, executable: int, stream: int) -> None:
    # Whoever orders all runs shares memory between graphs that the program left free to overlap.
    for other in list(driver._streams._by_handle):
        with driver._machine.lock:
            mine, theirs = driver._streams.find("", stream), driver._streams._by_handle[other]
            mine.clock.update(theirs.now())
    driver.graph_launch(executable, stream)


@pytest.fixture
def opened() -> Generator[OpenDriver]:
    found = OpenDriver(partial(drivers.open, "host", devices=2, memory="256MiB"))
    yield found
    found.close()  # with whatever the broken driver has left


@pytest.mark.parametrize(
    ("method", "replacement", "test"),
    [
        ("graph_add_allocate", addresses_never_again, "test_T16_a_later_allocation_takes_the_address"),
        ("graph_add_free", frees_anything, "test_T16_refused_frees"),
        ("graph_clone", clones_anything, "test_T16_graphs_with_memory_are_not_copied"),
        ("graph_trim", trims_nothing, "test_T15_graphs_in_one_stream_share_memory"),
        ("graph_set_high", marks_of_any_value, "test_T15_high_marks"),
        ("graph_figures", reserved_is_less, "test_T15_unfreed_allocations_hold_memory"),
        ("graph_launch", launches_again, "test_T15_unfreed_allocations_hold_memory"),
        ("graph_launch", waits_for_every_run, "test_T15_graphs_in_several_streams_do_not"),
    ],
)
def test_a_broken_rule_fails_its_test(
    opened: OpenDriver, method: str, replacement: Callable[..., Any], test: str
) -> None:
    """The test passes on the driver as it is, and fails on the one that breaks its rule."""
    with Bench(opened) as bench:
        getattr(GraphRules(), test)(bench)
    whole: Any = opened.driver
    bent = Bent(whole)
    bent.bend(method, replacement)
    opened.driver = bent
    try:
        bench = Bench(opened, slack=1 << 40)
        with pytest.raises(AssertionError):
            getattr(GraphRules(), test)(bench)
    finally:
        opened.driver = whole
