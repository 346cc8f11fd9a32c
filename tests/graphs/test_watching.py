"""Figures over time, and pictures of them (C2, C8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

import remap
from remap.errors import InvalidValueError, NotSupportedError
from remap.graphs import GraphFigures, GraphPool, Sample, Series
from remap.graphs.plot import Panel, check_plot, draw
from remap.sizes import MiB
from remap.testing.children import run_in_child

pytest_plugins = ["remap.testing.stage"]
SIZE = 64 * MiB


def test_samples_at_each_launch(pool: GraphPool, streams: Callable[[], remap.Stream]) -> None:
    """A watch takes a sample after each launch and trim on its device, and at each mark; the series is frozen."""
    stream = streams()
    with remap.Graph(0) as graph:
        a = graph.alloc(SIZE)
        graph.free(a, after=[a])
        with graph.instantiate() as executable:
            with pool.watch() as watch:
                watch.mark("start")
                executable.launch(stream)
                executable.launch(stream)
                stream.synchronize()
                pool.trim()
            executable.launch(stream)  # nobody watches any more
            stream.synchronize()
    series = watch.series
    assert series.labels == ("start", "launch 1", "launch 2", "trim 1")
    assert series.used == (0, SIZE, SIZE, 0)
    assert list(series.samples) == sorted(series.samples, key=lambda one: one.seconds)
    with pytest.raises(dataclasses.FrozenInstanceError):
        series.samples = ()  # type: ignore[misc]


@pytest.mark.two_devices
def test_devices_have_figures_of_their_own(pool: GraphPool, streams: Callable[[], remap.Stream]) -> None:
    """A launch on one device shows in its figures, and in a watch of it, and nowhere else."""
    other = remap.graph_memory(1)
    other.trim()
    stream = streams()
    with remap.Graph(0) as graph, pool.watch() as here, other.watch() as there:
        a = graph.alloc(SIZE)
        graph.free(a, after=[a])
        with graph.instantiate() as executable:
            executable.launch(stream)
            stream.synchronize()
    assert (here.series.used, there.series.used) == ((SIZE,), ())
    assert other.footprint().reserved == 0


SERIES = Series(
    tuple(Sample(f"step {n}", n * 0.1, GraphFigures(n * MiB, 4 * MiB, n * MiB, 4 * MiB)) for n in range(5))
)


@pytest.mark.parametrize("name", ["out.png", "out.svg"])
def test_pictures(tmp_path: Path, name: str) -> None:
    """A picture has its title, each panel's title and caption, every step, a scale, and a legend."""
    panels = [Panel(f"Panel {n}", f"caption {n}", SERIES, budget=4 * MiB * (n == 2)) for n in range(3)]
    target = draw(panels, tmp_path / name, title="What graphs hold")
    data = target.read_bytes()
    assert len(data) > 5000
    if name.endswith(".svg"):
        import matplotlib as mpl

        with mpl.rc_context({"svg.fonttype": "none"}):  # text as text, so that it can be read here
            text = draw(panels, target, title="What graphs hold").read_text()
        for words in (
            "What graphs hold",
            "Panel 2",
            "caption 1",
            "step 3",
            "MiB",
            "used by graphs",
            "reserved from the device",
            "budget",
        ):
            assert words in text, words
    else:
        assert data.startswith(b"\x89PNG")


def test_pictures_of_another_kind(tmp_path: Path) -> None:
    """Another ending is refused before anything is done."""
    with pytest.raises(InvalidValueError, match=r"\.png or \.svg"):
        check_plot(tmp_path / "out.gif")


def test_without_matplotlib() -> None:
    """Where Matplotlib is missing, the error names the extra; importing the rest does not need it."""
    run_in_child(without_matplotlib)


def without_matplotlib() -> None:
    """Run in a process in which Matplotlib cannot be imported."""
    import sys

    import remap.graphs

    assert "matplotlib" not in sys.modules
    assert callable(remap.graphs.Graph)
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    with pytest.raises(remap.RemapError, match=r"pip install 'remap\[plot\]'"):
        check_plot("out.png")


def test_a_driver_without_memory_pools() -> None:
    """A device that lacks memory pools refuses allocations in graphs, and names the capability (C8)."""
    if remap.driver().name != "host":
        pytest.skip("capabilities can only be switched off on the host driver")
    run_in_child(without_pools)


def without_pools() -> None:
    """Run with memory pools switched off."""
    remap.use("host", capabilities={"memory_pools": False})
    with remap.Graph(0) as graph, pytest.raises(NotSupportedError) as caught:
        graph.alloc(SIZE)
    assert caught.value.capability == "memory_pools"
