"""The conformance suite: what every driver must do, as one class of tests.

The author of a driver subclasses it in a test module, and pytest does the rest:

    from functools import partial
    from remap import drivers
    from remap.testing import DriverConformance

    class TestHostDriver(DriverConformance):
        @classmethod
        def factory(cls):
            return partial(drivers.open, "host", devices=2)

Each rule has a number, T1 … T17, and one test or a few that carry it in their names; the docstring of a test says the
truth that it checks. What a rule leaves open is not tested.

Each test runs against an opened driver and must leave nothing behind: `Bench` says what that means and how it is
seen. So the suite needs the devices to itself. What loses the context runs in a process of its own.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from remap.testing.bench import Bench, DriverFactory, OpenDriver
from remap.testing.graphs import GraphRules
from remap.testing.kernels import KernelOpener, open_kernel
from remap.testing.machine import machine_for, wander
from remap.testing.objects import ObjectRules
from remap.testing.order import OrderRules
from remap.testing.rights import AccessRules
from remap.testing.sharing import SharingRules
from remap.testing.work import WorkRules


class DriverConformance(ObjectRules, AccessRules, WorkRules, SharingRules, OrderRules, GraphRules):
    """All rules, run on the driver that `factory` gives."""

    slack: ClassVar[int] = 0
    """The bytes of a device by which free memory may differ: what a context takes and keeps for itself."""

    transfers_checked_to_the_end: ClassVar[bool] = True
    """Whether random transfers may begin on good memory and run into forbidden memory. T9 wants them refused; where a
    driver lets one through, the context is lost and no later test says anything, so that it can be left out here."""

    threads: ClassVar[int] = 8
    """How many threads use the driver at once in the stress test."""

    steps: ClassVar[int] = 500
    """How many random steps each of these threads takes."""

    share_of_examples: ClassVar[float] = 1.0
    """How many examples the state machine tries, as a share of `max_examples` of the Hypothesis profile."""

    @classmethod
    def factory(cls) -> DriverFactory:
        """Return what opens the driver: an importable function, or a `functools.partial` of one."""
        raise NotImplementedError(f"{cls.__name__} does not say what opens its driver")

    @classmethod
    def kernel(cls) -> KernelOpener:
        """Return what makes the suite's kernel for the driver: an importable function."""
        return open_kernel

    # -- random calls --

    def test_random_calls_agree_with_the_model(self, opened: OpenDriver) -> None:
        """Any sequence of calls succeeds, fails, and moves bytes as a plain model of the rules says."""
        machine = machine_for(opened, slack=self.slack, to_the_end=self.transfers_checked_to_the_end)
        examples = int(settings().max_examples * self.share_of_examples)
        chosen = settings(max_examples=max(examples, 1), stateful_step_count=100)
        run_state_machine_as_test(machine, settings=chosen)

    def test_random_calls_from_many_threads(self, bench: Bench) -> None:
        """Threads that use one driver at once, each on its own objects, each see what the model says."""
        start = threading.Barrier(self.threads)

        def run(seed: int) -> int:
            bench.driver.push_context(bench.opened.contexts[0])
            try:
                start.wait(timeout=30)
                chance = random.Random(seed)
                return wander(bench, chance, self.steps, to_the_end=self.transfers_checked_to_the_end)
            finally:
                bench.driver.pop_context()

        with ThreadPoolExecutor(self.threads) as pool:
            accepted = list(pool.map(run, range(self.threads)))
        assert min(accepted) > self.steps // 4, f"too few of the random steps were legal calls: {accepted}"

    # -- fixtures --

    @pytest.fixture(scope="class", name="opened")
    @classmethod
    def _opened(cls) -> Generator[OpenDriver]:
        opened = OpenDriver(cls.factory())
        yield opened
        opened.close()

    @pytest.fixture(name="bench")
    def _bench(self, opened: OpenDriver) -> Generator[Bench]:
        with Bench(opened, slack=self.slack) as bench:
            yield bench

    @pytest.fixture(name="factory")
    def _factory(self) -> DriverFactory:
        return self.factory()

    @pytest.fixture(name="kernel")
    def _kernel(self) -> KernelOpener:
        return self.kernel()
