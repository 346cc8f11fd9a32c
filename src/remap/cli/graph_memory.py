"""The graph-memory demo: four experiments on what graphs hold, each step's figures shown and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass

import click
from rich.console import Console
from rich.text import Text

import remap
from remap import drivers
from remap.cli.choice import choose_driver
from remap.cli.graph_experiments import Bench, Experiment, run_experiment
from remap.cli.report import Report
from remap.cli.waived import Waived
from remap.drivers.graph_powers import GraphFigures
from remap.errors import InvalidValueError
from remap.graphs.plot import Panel, check_plot, draw
from remap.sizes import format_size, round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user asked for."""

    driver: str | None
    device: int | None
    experiments: tuple[int, ...]
    size: int
    graphs: int
    spin: float | None
    as_json: bool
    plot: str | None


def run(request: Request) -> bool:
    """Run the experiments and tell whether each showed what it is to show; everything is given back."""
    plot = None if request.plot is None else check_plot(request.plot)
    # With --json, the standard output is for the JSON alone; which driver was chosen and why is said beside it.
    report = Report(Console(quiet=True) if request.as_json else None)
    choice = Report(Console(stderr=True, highlight=False, markup=False)) if request.as_json else report
    if request.size == 0:
        raise InvalidValueError("--bytes 0", rule="each graph allocates one byte at least")
    report.say("What graphs hold: addresses and bytes that graphs use again", "bold")
    choose_driver(request.driver, choice)
    try:
        found = _run(request, report)
        if plot is not None:
            draw([_panel(one, found) for one in found.experiments], plot, title=found.title)
            report.step("plot", str(plot))
    finally:
        drivers.close()
    _advise(found, report)
    passed = all(one.passed for one in found.experiments)
    report.say("PASS" if passed else "FAIL", "bold green" if passed else "bold red")
    if request.as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    return passed


@dataclass(frozen=True, slots=True)
class Found:
    """What a run has found."""

    title: str
    driver: str
    device: str
    size: int
    graphs: int
    experiments: tuple[Experiment, ...]

    def advice(self) -> list[str]:
        """Return what follows from the figures of this run (C9)."""
        by_number = {one.number: one for one in self.experiments}
        shared, apart, kept = by_number.get(2), by_number.get(3), by_number.get(4)
        lines: list[str] = []
        if shared is not None and kept is not None:
            lines.append(
                f"Free inside the graph: {self.graphs} graphs that did held {format_size(shared.peak)}, "
                f"{self.graphs} that did not held {format_size(kept.peak)}."
            )
        if shared is not None and apart is not None:
            lines.append(
                f"Put what need not overlap into one stream: there {self.graphs} graphs held "
                f"{format_size(shared.peak)}, in streams of their own {format_size(apart.peak)}."
            )
        trimmed = max((one.trimmed for one in self.experiments), default=0)
        if trimmed:
            lines.append(
                f"Watch and trim: what graphs have taken stays taken when they are done; a trim gave back "
                f"{format_size(trimmed)}, and the graphs stayed instantiated."
            )
        if apart is not None:
            one = apart.peak // self.graphs
            lines.append(
                f"Budget for graphs that run at the same time: their number × one graph's peak, here "
                f"{self.graphs} × {format_size(one)} = {format_size(self.graphs * one)}."
            )
        return lines

    def as_json(self) -> dict[str, object]:
        """Return everything as plain values; sizes in bytes."""
        return {
            "bytes": self.size,
            "graphs": self.graphs,
            "driver": self.driver,
            "device": self.device,
            "experiments": {str(one.number): one.as_json() for one in self.experiments},
            "advice": self.advice(),
            "passed": all(one.passed for one in self.experiments),
        }


def _run(request: Request, report: Report) -> Found:
    at = remap.device(request.device)
    pools = at.capabilities["memory_pools"]
    if not pools:
        raise Waived(f"{at} ({at.name}) has no memory pools, which graph memory needs: {pools.reason}")
    size = round_up(request.size, at.granularity().minimum)
    if size != request.size:
        report.step("size", f"{format_size(request.size)} a graph, rounded up to {format_size(size)}")
    memory = at.memory()
    most = 1 if set(request.experiments) == {1} else request.graphs
    report.step(
        "device",
        f"{at.index} {at.name}: {format_size(memory.free)} of {format_size(memory.total)} free; "
        f"{request.graphs} graphs of {format_size(size)} each",
    )
    if most * size > memory.free:
        raise InvalidValueError(
            f"{request.graphs} graphs of {format_size(size)}",
            rule=f"{at} has {format_size(memory.free)} free, and they need {format_size(most * size)} together",
            next_step="Use a smaller --bytes or fewer --graphs",
        )
    found: list[Experiment] = []
    with Bench(at, size, request.graphs, request.spin) as bench:
        report.step("spin", bench.spin_text)
        for number in request.experiments:
            experiment = run_experiment(number, bench)
            _show(experiment, report)
            found.append(experiment)
    title = f"Graph memory: {request.graphs} graphs of {format_size(size)} on {at.name}"
    driver = f"{remap.driver().name}: {remap.driver().version()}"
    return Found(title, driver, at.name, size, request.graphs, tuple(found))


_COLUMNS = ("used", "reserved", "most used", "most reserved")
_WIDTH = 14


def _show(experiment: Experiment, report: Report) -> None:
    report.say("")
    report.say(f"{experiment.number}. {experiment.title}", "bold")
    labels = [sample.label for sample in experiment.series.samples]
    width = max(len(label) for label in (*labels, "step"))
    # A narrow terminal has room for the present figures; the marks only ever rise, so the last ones say it all.
    columns = len(_COLUMNS) if report.text_width >= width + len(_COLUMNS) * _WIDTH else 2
    rows = [_row(one.label, _texts(one.figures)[:columns], width) for one in experiment.series.samples]
    lines: list[str | Text] = [Text(row) for row in (_row("step", _COLUMNS[:columns], width), *rows)]
    if columns < len(_COLUMNS):
        marks = _texts(experiment.series.samples[-1].figures)[columns:]
        lines.append(
            "; ".join(f"{name} {mark}" for name, mark in zip(_COLUMNS[columns:], marks, strict=True))
        )
    report.step("footprint", lines)
    report.step("shows", experiment.shows)
    for check in experiment.checks:
        report.step("ok" if check.holds else "FAILED", check.text)


def _row(label: str, values: tuple[str, ...], width: int) -> str:
    return f"{label:<{width}}" + "".join(f"{value:>{_WIDTH}}" for value in values)


def _texts(figures: GraphFigures) -> tuple[str, ...]:
    every = (figures.used, figures.reserved, figures.used_high, figures.reserved_high)
    return tuple(format_size(value) for value in every)


def _advise(found: Found, report: Report) -> None:
    lines = found.advice()
    if lines:
        report.say("")
        report.say("What follows", "bold")
        for number, line in enumerate(lines, 1):
            report.step(str(number), line)


def _panel(experiment: Experiment, found: Found) -> Panel:
    budget = found.graphs * found.size if experiment.number == 3 else 0
    return Panel(f"{experiment.number}. {experiment.title}", experiment.shows, experiment.series, budget)
