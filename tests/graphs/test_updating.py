"""An executable that one thread updates while another launches it (invariants 7 and 13)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

import remap
from remap import MiB
from remap.drivers.wrappers import Faulty
from remap.errors import CudaResult

LIMIT = 30


class Halting(Faulty):
    """A driver that holds the call named `at` back until it is let."""

    def __init__(self, inner: Any) -> None:
        self.at = ""
        self.come, self.let = threading.Event(), threading.Event()
        super().__init__(inner)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        checked = super()._wrap(name, call)

        def halting(*arguments: Any, **keywords: Any) -> Any:
            if name == self.at:
                self.come.set()
                assert self.let.wait(LIMIT)
            return checked(*arguments, **keywords)

        return halting


class Scene:
    """Two buffers, a graph that fills each, and an executable of the first."""

    def __init__(self, driver: Halting, held: ExitStack) -> None:
        self.driver = driver
        self.buffers = [held.enter_context(remap.allocate(2 * MiB, resident=0)) for _ in range(2)]
        self.graphs = [held.enter_context(remap.Graph(remap.device(0))) for _ in range(2)]
        for graph, buffer in zip(self.graphs, self.buffers, strict=True):
            graph.fill(buffer, 5)
        self.executable = held.enter_context(self.graphs[0].instantiate())
        self.stream = held.enter_context(remap.Stream(0))
        self.pool = held.enter_context(ThreadPoolExecutor(1))

    @contextmanager
    def halted(self, call: str, act: Callable[[], object]) -> Generator[None]:
        """Run a block while another thread that does `act` is held back in a call of the driver."""
        self.driver.at = call
        doing = self.pool.submit(act)
        try:
            assert self.driver.come.wait(LIMIT)
            self.driver.at = ""
            yield
        finally:
            self.driver.let.set()
        doing.result(LIMIT)

    def launch(self) -> None:
        """Launch on the stream."""
        self.executable.launch(self.stream)


@pytest.fixture
def scene() -> Generator[Scene]:
    """Let a test use a driver that can be halted."""
    own = remap.driver()
    driver = Halting(own)
    remap.use(driver)
    try:
        with ExitStack() as held:
            yield Scene(driver, held)
    finally:
        remap.use(own)


def test_no_update_while_it_is_launched(scene: Scene) -> None:
    """An update is refused then: the launch that is kept would protect the memory of the old nodes."""
    with (
        scene.halted("graph_launch", scene.launch),
        pytest.raises(remap.InUseError, match="under way in another thread"),
    ):
        scene.executable.update(scene.graphs[1])
    scene.executable.update(scene.graphs[1])
    scene.launch()
    scene.buffers[1].close()  # waits: the driver refuses to unmap what work may use


def test_no_launch_while_it_is_updated(scene: Scene) -> None:
    """A launch, a second update and closing are refused then, and all work afterwards."""
    scene.launch()
    with scene.halted("graph_update", lambda: scene.executable.update(scene.graphs[1])):
        for act in (
            scene.launch,
            lambda: scene.executable.update(scene.graphs[0]),
            scene.executable.close,
        ):
            with pytest.raises(remap.InUseError, match="another thread is updating it"):
                act()
    scene.launch()
    scene.buffers[1].close()
    scene.buffers[0].close()
    with pytest.raises(remap.ClosedError):
        scene.launch()


def test_an_update_that_is_refused(scene: Scene) -> None:
    """It changes nothing, and launches use what they used before (invariant 5)."""
    scene.launch()
    scene.driver.fail("graph_update", result=CudaResult.UNKNOWN)
    with pytest.raises(remap.DriverError, match="UNKNOWN"):
        scene.executable.update(scene.graphs[1])
    scene.buffers[1].close()
    scene.launch()
    scene.stream.synchronize()
    assert (scene.buffers[0].to_host() == 5).all()
    scene.launch()
    scene.buffers[0].close()
