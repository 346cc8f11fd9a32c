"""`remap demo elastic`: a cache grows token by token, is shared, and shrinks, all under one address."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

import remap
from remap import drivers
from remap.cli.choice import choose_driver
from remap.cli.report import Report
from remap.sizes import format_size

_CELLS = 48
_FRAMES = 60  # pictures of the whole run, so that a terminal is not what is measured
_STYLES = {"#": "black on green", "+": "black on yellow", ".": "dim"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user asked for."""

    driver: str | None
    device: int | None
    capacity: int
    peak: int
    token: int
    sequences: int
    ahead: int


def run(request: Request) -> bool:
    """Run the program and tell whether every byte and every address stayed; everything is given back."""
    report = Report()
    report.say(f"a cache of {format_size(request.token)} a token, up to {format_size(request.peak)}", "bold")
    choose_driver(request.driver, report)
    try:
        right = _run(request, report)
    finally:
        drivers.close()
    report.say("PASS" if right else "FAIL", "bold green" if right else "bold red")
    return right


def _run(request: Request, report: Report) -> bool:
    at = remap.device(request.device)
    before = at.memory().free
    with ExitStack() as owned:
        cache = owned.enter_context(remap.ElasticBuffer(request.capacity, device=at, ahead=request.ahead))
        address = cache.address
        report.step(
            "reserved", f"{format_size(cache.capacity)} of addresses from {address:#x} on; no memory yet"
        )
        tokens = request.peak // request.token
        _grow(cache, tokens, request, report)
        right = _holds(cache, tokens, request.token)
        report.step("check", _told(right, cache.address == address))
        right &= cache.address == address

        forks = [owned.enter_context(cache.fork()) for _ in range(request.sequences - 1)]
        everyone = [cache, *forks]
        _share(everyone, tokens, request, report)
        shared = all(_holds(one, tokens, request.token) for one in everyone)
        report.step("check", "every sequence sees the whole prefix" if shared else "the prefix is WRONG")
        for fork in forks:
            fork.close()

        cache.make_private()
        left = _shrink(cache, tokens, request, report)
        kept = _holds(cache, left, request.token)
        report.step("check", _told(kept, cache.address == address))
        right &= shared and kept and cache.address == address
    lost = before - at.memory().free
    gone = lost < 4 << 20  # a context keeps a little for itself
    report.step("closed", "all memory is back" if gone else f"{format_size(lost)} are MISSING")
    return right and gone


def _grow(cache: remap.ElasticBuffer, tokens: int, request: Request, report: Report) -> None:
    """Grow token by token, and write each."""
    times: list[float] = []
    changes = mapped = 0
    with _picture(report, request.peak, tokens) as show:
        for token in range(tokens):
            start = time.perf_counter_ns()
            change = cache.resize((token + 1) * request.token)
            times.append((time.perf_counter_ns() - start) / 1000)
            changes += change.mapped > 0
            mapped += change.mapped
            cache.fill(token % 251, offset=token * request.token, size=request.token)
            show([cache], token)
    report.step(
        "grown",
        [
            f"{tokens:,} steps, {statistics.median(times):,.1f} µs each in the median, {max(times):,.0f} µs at most",
            f"{changes} of them mapped memory: {format_size(mapped)} in {len(cache.chunks)} chunks",
        ],
    )


def _share(everyone: Sequence[remap.ElasticBuffer], tokens: int, request: Request, report: Report) -> None:
    """Let every sequence go on by itself behind the common prefix."""
    apart = sum(sum(one.footprint().values()) for one in everyone)
    once = sum(remap.footprint(everyone).values())
    report.step(
        "forked",
        [
            f"{len(everyone)} sequences share the prefix: {format_size(once)} and not {format_size(apart)}",
            "what they share is read-only; each takes a copy of the last chunk before it goes on",
        ],
    )
    start = tokens * request.token
    room = min(request.token, request.capacity - start)
    for number, one in enumerate(everyone):
        if room:
            one.resize(start + room)
            one.make_private(start, start + room)
            one.fill(number, offset=start, size=room)
    total = sum(remap.footprint(everyone).values())
    report.step("", f"after a token more for each: {format_size(total)} altogether")


def _shrink(cache: remap.ElasticBuffer, tokens: int, request: Request, report: Report) -> int:
    """Give three quarters back, step by step; return how many tokens are left."""
    freed, left = 0, tokens
    goal = max(tokens // 4, 1)
    with _picture(report, request.peak, tokens) as show:
        while left > goal:
            left = max(left - max(tokens // 16, 1), goal)
            freed += cache.resize(left * request.token).freed
            show([cache], left)
    report.step("shrunk", f"to {format_size(cache.size)}; {format_size(freed)} went back to the driver")
    return left


@contextmanager
def _picture(report: Report, peak: int, steps: int) -> Generator[_Show]:
    """Show what is committed and mapped while it changes: live on a terminal, a few lines elsewhere."""
    console = Console(highlight=False)
    every = max(steps // _FRAMES, 1) if console.is_terminal else max(steps // 3, 1)
    show = _Show(report, peak, every)
    if not console.is_terminal:
        yield show
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        show.live = live
        yield show
        live.update(Text("\n").join(show.frame), refresh=True)


class _Show:
    """Draws a buffer every so many steps."""

    def __init__(self, report: Report, peak: int, every: int) -> None:
        self.live: Live | None = None
        self.frame: list[Text] = []
        self._report = report
        self._peak = peak
        self._every = every

    def __call__(self, buffers: Sequence[remap.ElasticBuffer], step: int) -> None:
        if step % self._every:
            return
        self.frame = _frame(buffers[0], self._peak, self._report.bar_width)
        if self.live is not None:
            self.live.update(Text("\n").join(self.frame), refresh=True)
        else:
            self._report.step("", self.frame)


def _frame(buffer: remap.ElasticBuffer, peak: int, most: int) -> list[Text]:
    """Return a bar, of which a cell is an equal share of the peak, and below it what the signs mean, with sums."""
    width = min(_CELLS, most)
    mapped = sum(buffer.footprint().values())
    committed = sum(stop - start for start, stop in buffer.extents)
    whole = max(peak, mapped)
    first, second = round(width * committed / whole), round(width * mapped / whole)
    cells = [("#", first), ("+", second - first), (".", width - second)]
    bar = Text.assemble("[", *((sign * count, _STYLES[sign]) for sign, count in cells), "]")
    beside = format_size(mapped - committed)
    return [bar, Text(f"# {format_size(committed)} committed + {beside} beside = {format_size(mapped)}")]


def _holds(buffer: remap.ElasticBuffer, tokens: int, token: int) -> bool:
    """Tell whether every byte of the first tokens is what was written."""
    batch = max((16 << 20) // token, 1)
    for first in range(0, tokens, batch):
        count = min(batch, tokens - first)
        found = buffer.to_host(shape=(count, token), offset=first * token)
        expected = (np.arange(first, first + count) % 251).astype(np.uint8)
        if not (found == expected[:, None]).all():
            return False
    return True


def _told(bytes_right: bool, address_right: bool) -> list[str]:
    return [
        "every byte is what was written" if bytes_right else "bytes are WRONG",
        "the address is what it was" if address_right else "the address has CHANGED",
    ]
