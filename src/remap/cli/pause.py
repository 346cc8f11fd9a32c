"""`remap demo pause`: buffers are put to sleep and woken; contents and addresses are checked, figures shown."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

import remap
from remap import drivers
from remap.cli.choice import choose_driver
from remap.cli.report import Report
from remap.residency.results import Moved
from remap.residency.results import Progress as Callback
from remap.residency.stores import Keep
from remap.sizes import format_size

_LINK_REPEATS = 3
_KEEPS: dict[str, Keep] = {"host": "host", "disk": "disk", "nothing": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user asked for."""

    driver: str | None
    device: int | None
    buffers: int
    size: int
    keep: str
    directory: str | None
    cycles: int
    keep_host: bool


def run(request: Request) -> bool:
    """Run the program and tell whether every byte and every address stayed; everything is given back."""
    report = Report()
    report.say(f"{request.buffers} buffers of {format_size(request.size)}, put to sleep and woken", "bold")
    choose_driver(request.driver, report)
    try:
        right = _run(request, report)
    finally:
        drivers.close()
    report.say("PASS" if right else "FAIL", "bold green" if right else "bold red")
    return right


def _run(request: Request, report: Report) -> bool:
    at = remap.device(request.device)
    right = True
    with ExitStack() as owned:
        with remap.group("demo") as group:
            for _ in range(request.buffers):
                owned.enter_context(remap.allocate(request.size, resident=at))
        pattern = np.random.default_rng(0).integers(0, 256, min(group.buffers[0].size, 1 << 24), np.uint8)
        for number, buffer in enumerate(group.buffers):
            _write(buffer, np.roll(pattern, number))
        addresses = [buffer.address for buffer in group.buffers]
        report.step(
            "memory", f"{format_size(group.size)} on {at}, {format_size(at.memory().free)} free beside it"
        )
        link = _link(at, group.buffers[0], report)
        for cycle in range(request.cycles):
            kept = _KEEPS[request.keep]
            with _bar("pausing") as progress:
                directory = request.directory if kept == "disk" else None
                slept = remap.pause(group, kept, directory=directory, progress=progress)
            _show(report, f"pause {cycle + 1}", slept, link)
            report.step("", f"{format_size(at.memory().free)} free on {at}; the addresses stay reserved")
            with _bar("resuming") as progress:
                woken = remap.resume(group, keep_host=request.keep_host, progress=progress)
            _show(report, f"resume {cycle + 1}", woken, link)
            if kept is not None:
                right &= all(
                    _holds(buffer, np.roll(pattern, number)) for number, buffer in enumerate(group.buffers)
                )
        same = [buffer.address for buffer in group.buffers] == addresses
        told = "contents given up, as asked" if request.keep == "nothing" else "every byte is what it was"
        report.step("check", told if right else "bytes are WRONG")
        report.step("", "every address is what it was" if same else "addresses have CHANGED")
    figures = remap.host_pool().statistics()
    report.step(
        "host", f"{format_size(figures.peak)} of host memory at most, {format_size(figures.held)} held now"
    )
    return right and same


def _show(report: Report, label: str, moved: Moved, link: float) -> None:
    against = f", {moved.rate / link:.0%} of the link" if moved.bytes else ""
    report.step(label, f"{moved}{against}")


def _link(at: remap.Device, buffer: remap.Buffer, report: Report) -> float:
    """Return the GB/s of one long copy from memory that stays pinned: what a move could reach at best."""
    size = min(buffer.size, 256 << 20)
    (extent,) = remap.host_pool().take([size], at)
    try:
        extent.ready()
        host = (ctypes.c_ubyte * size).from_address(extent.address)
        times: list[float] = []
        for _ in range(_LINK_REPEATS):
            start = time.perf_counter()
            buffer.copy_to_host(host)
            times.append(time.perf_counter() - start)
    finally:
        remap.host_pool().give(extent, False)
    rate = size / statistics.median(times) / 1e9
    report.step("link", f"{rate:.3g} GB/s, one copy of {format_size(size)} to host memory that is ready")
    return rate


def _write(buffer: remap.Buffer, pattern: NDArray[np.uint8]) -> None:
    for offset in range(0, buffer.size, pattern.size):
        buffer.copy_from_host(pattern[: buffer.size - offset], offset=offset)


def _holds(buffer: remap.Buffer, pattern: NDArray[np.uint8]) -> bool:
    return all(
        np.array_equal(
            buffer.to_host("uint8", min(pattern.size, buffer.size - offset), offset=offset),
            pattern[: buffer.size - offset],
        )
        for offset in range(0, buffer.size, pattern.size)
    )


@contextmanager
def _bar(doing: str) -> Generator[Callback | None]:
    """Yield what draws a bar on a terminal, None where there is none to draw on."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
