"""Pictures of what graphs hold, drawn with Matplotlib (the extra `plot`) from frozen figures."""

from __future__ import annotations

import importlib
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remap.errors import InvalidValueError, RemapError
from remap.graphs.footprint import Series
from remap.sizes import MiB, format_size

FORMATS = (".png", ".svg")


@dataclass(frozen=True, slots=True)
class Panel:
    """One series with what a reader needs to know about it. `budget` is drawn as a line across."""

    title: str
    caption: str
    series: Series
    budget: int = 0


def check_plot(path: str | os.PathLike[str]) -> Path:
    """Return the path of a picture that can be drawn; raises before any work is done for it.

    Raises `InvalidValueError` for another ending than .png or .svg, and `RemapError` where Matplotlib is missing.
    """
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise InvalidValueError(
            f"a plot in {target.name!r}", rule=f"pictures are {' or '.join(FORMATS)}", next_step="Rename it"
        )
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise RemapError(
            f"a plot in {target.name!r}",
            rule=f"Matplotlib cannot be imported ({error})",
            next_step="Install it: pip install 'remap[plot]'",
        ) from None
    return target


def draw(panels: Sequence[Panel], path: str | os.PathLike[str], *, title: str) -> Path:
    """Draw panels side by side on one scale and write the picture; the ending says which kind it is."""
    target = check_plot(path)
    figures: Any = importlib.import_module("matplotlib.figure")  # not all of its types are known
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = figures.Figure(figsize=(6.4 * columns, 4.0 * rows + 0.9), layout="constrained")
    figure.suptitle(title)
    top = max([size for panel in panels for size in (*panel.series.used, panel.budget)], default=0)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    axes = [grid[row, column] for row in range(rows) for column in range(columns)]
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes, panels, strict=False):
        samples = panel.series.samples
        places = range(len(samples))
        axis.step(places, [one.figures.reserved / MiB for one in samples], where="post", lw=5, alpha=0.3)
        axis.step(places, [one.figures.used / MiB for one in samples], where="post", lw=1.8)
        axis.plot(places, [one.figures.used_high / MiB for one in samples], "k.", ms=4)
        if panel.budget:
            axis.axhline(panel.budget / MiB, ls="--", lw=1, color="tab:red")
        axis.set_title(panel.title, fontsize=10, loc="left")
        axis.set_xticks(list(places), [one.label for one in samples], rotation=50, ha="right", fontsize=7)
        axis.set_ylim(0, max(top / MiB * 1.08, 1))
        axis.set_xlabel(textwrap.fill(panel.caption, 92), fontsize=8)
        axis.grid(axis="y", alpha=0.3)
    for row in range(rows):
        grid[row, 0].set_ylabel("MiB")
    names = ["reserved from the device", "used by graphs", "high mark of used"]
    handles = list(axes[0].lines[:3])
    if any(panel.budget for panel in panels):
        budgeted = next(axis for axis, panel in zip(axes, panels, strict=False) if panel.budget)
        handles.append(budgeted.lines[3])
        names.append(f"budget: graphs × peak of one ({format_size(max(one.budget for one in panels))})")
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8)
    figure.savefig(target, dpi=150)
    return target
