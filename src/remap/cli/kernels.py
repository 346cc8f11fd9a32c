"""The kernels demo: a reduction, a tiled transpose and a stencil, written once in Python and checked against NumPy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import remap
from remap import drivers
from remap.cli.choice import choose_driver
from remap.cli.report import Report
from remap.errors import KernelError

BLOCK = 256
TILE = 16
WEIGHT = np.float32(0.2)


@remap.kernel
def reduction(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Sum up the elements of each block in shared memory, halving the threads that add; thread 0 writes the sum."""
    part = remap.shared_array(BLOCK, np.float32)
    t = remap.thread.x
    part[t] = x[remap.index_1d()]
    remap.barrier()
    half = BLOCK // 2
    while half > 0:
        if t < half:
            part[t] += part[t + half]
        remap.barrier()
        half //= 2
    if t == 0:
        remap.unchecked(out)[remap.block.x] = part[0]


@remap.kernel
def forgetful(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Do the same with the barrier in the loop left out, for the host driver to find."""
    part = remap.shared_array(BLOCK, np.float32)
    t = remap.thread.x
    part[t] = x[remap.index_1d()]
    remap.barrier()
    half = BLOCK // 2
    while half > 0:
        if t < half:
            part[t] += part[t + half]
        half //= 2
    if t == 0:
        remap.unchecked(out)[remap.block.x] = part[0]


@remap.kernel
def transpose(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Turn a matrix over, tile by tile; a column of padding keeps the threads of a warp on different banks."""
    tile = remap.shared_array((TILE, TILE + 1), np.float32)
    across, down = remap.block.x * TILE, remap.block.y * TILE
    tile[remap.thread.y, remap.thread.x] = x.get(down + remap.thread.y, across + remap.thread.x, 0)
    remap.barrier()
    row, col = across + remap.thread.y, down + remap.thread.x
    if row < out.shape[0] and col < out.shape[1]:
        remap.unchecked(out)[row, col] = tile[remap.thread.x, remap.thread.y]


@remap.kernel
def stencil(x: remap.Slice, out: remap.DisjointSlice) -> None:
    """Average each element with its four neighbours; beyond the edge there is zero."""
    i = remap.index_2d(out.shape[1])
    r, c = i.row, i.col
    total = x.get(r, c, 0) + x.get(r - 1, c, 0) + x.get(r + 1, c, 0) + x.get(r, c - 1, 0) + x.get(r, c + 1, 0)
    out[i] = total * WEIGHT


class Step(NamedTuple):
    """One kernel with its input, the shape of its output and of its launch, and what NumPy says."""

    kernel: remap.PythonKernel
    given: Any
    shape: tuple[int, ...]
    launch: dict[str, Any]
    expected: Callable[[Any], Any]


def run(driver: str | None, device: int | None, rows: int, cols: int) -> bool:
    """Run the three kernels and tell whether all results are NumPy's, bit for bit."""
    report = Report()
    report.say("Kernels in Python: a reduction, a tiled transpose, a stencil", "bold")
    choose_driver(driver, report)
    try:
        passed = _run(remap.device(device), rows, cols, report)
    finally:
        drivers.close()
    report.say("PASS" if passed else "FAIL", "bold green" if passed else "bold red")
    return passed


def _run(at: remap.Device, rows: int, cols: int, report: Report) -> bool:
    random = np.random.default_rng(0)
    vector = random.random(rows * cols, dtype=np.float32)
    matrix = vector.reshape(rows, cols)
    blocks = math.ceil(vector.size / BLOCK)
    tiles: dict[str, Any] = {"grid": (math.ceil(cols / TILE), math.ceil(rows / TILE)), "block": (TILE, TILE)}
    one: dict[str, Any] = {"grid": blocks, "block": BLOCK}
    steps = (
        Step(reduction, vector, (blocks,), one, _sums),
        Step(transpose, matrix, (cols, rows), tiles, np.transpose),
        Step(stencil, matrix, (rows, cols), tiles, _averages),
    )
    report.step("device", f"{at}: {at.name}")
    results = [_one(step, at, report) for step in steps]  # all of them, whatever the first gives
    passed = all(results)
    if drivers.current().name == "host":
        passed = _mistake(vector, blocks, at, report) and passed
    return passed


def _one(step: Step, at: remap.Device, report: Report) -> bool:
    name = step.kernel.name
    with (
        remap.DeviceBuffer.from_host(step.given, device=at) as x,
        remap.DeviceBuffer.zeroed(step.shape, "float32", device=at) as out,
    ):
        start = time.perf_counter()
        step.kernel.launch(x, out, **step.launch)
        at.synchronize()
        took = time.perf_counter() - start
        right = bool(np.array_equal(out.to_host(), step.expected(step.given)))
    threads = math.prod(_three(step.launch["grid"])) * math.prod(_three(step.launch["block"]))
    what = f"{threads:,} threads, {took * 1e3:.1f} ms with compiling"
    report.step(name, [step.kernel.__doc__ or "", f"{what}: {'as NumPy, bit for bit' if right else 'WRONG'}"])
    return right


def _mistake(vector: Any, blocks: int, at: remap.Device, report: Report) -> bool:
    """Launch the reduction without its barrier, and show what the host driver says."""
    with (
        remap.DeviceBuffer.from_host(vector, device=at) as x,
        remap.DeviceBuffer.zeroed(blocks, "float32", device=at) as out,
    ):
        forgetful.launch(x, out, grid=blocks, block=BLOCK)
        try:
            at.synchronize()
        except KernelError as error:
            report.step(
                "forgetful",
                ["The reduction without a barrier. The host driver:", f"{error.rule} ({error.asked})"],
            )
            return True
    report.step("forgetful", "The reduction without a barrier was NOT found out.")
    return False


def _three(extent: int | tuple[int, ...]) -> tuple[int, ...]:
    return (extent,) if isinstance(extent, int) else extent


def _sums(vector: Any) -> Any:
    padded = np.zeros(math.ceil(vector.size / BLOCK) * BLOCK, np.float32)
    padded[: vector.size] = vector
    part = padded.reshape(-1, BLOCK)
    while part.shape[1] > 1:  # in the order in which the kernel adds, so that the bits are equal
        half = part.shape[1] // 2
        part = part[:, :half] + part[:, half:]
    return part[:, 0]


def _averages(matrix: Any) -> Any:
    wide = np.pad(matrix, 1)
    total = wide[1:-1, 1:-1] + wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:]
    return total * WEIGHT
