"""The striped vector add: c = a + b over buffers whose memory lies on several devices, every step shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

import remap
from remap import drivers
from remap.buffers.plain import allocate_plain
from remap.cli.choice import choose_driver
from remap.cli.report import Report, legend
from remap.cli.vectors import (
    PIECE,
    FileVector,
    Float32,
    NpyWriter,
    RandomVector,
    Vector,
    check_writable,
    writing,
)
from remap.cli.waived import Waived
from remap.errors import InvalidValueError
from remap.kernels import Kernel, Module, Pointer, load, shipped
from remap.sizes import counted, format_size
from remap.spans import Span

BLOCK = 256
TOLERANCE = 1e-7
ITEM = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user asked for, not yet checked against what there is; None means that it was left out."""

    driver: str | None
    device: int | None
    resident: tuple[int, ...] | None
    accessing: tuple[int, ...] | None
    length: int
    files: tuple[str, str] | None
    out: str | None
    plain: bool


def run(request: Request) -> bool:
    """Run the program and tell whether the sum is right; everything is given back, after a failure too."""
    report = Report()
    target = None if request.out is None else check_writable(request.out)
    a: Vector
    b: Vector
    if request.files is not None:
        a, b = (FileVector(path) for path in request.files)
        if a.length != b.length:
            raise InvalidValueError(
                f"add {a.length:,} and {b.length:,} numbers",
                rule="the vectors must have the same length",
                next_step="Cut the longer one",
            )
    else:
        a, b = RandomVector(request.length, 1), RandomVector(request.length, 2)
    report.say(f"c = a + b for {a.length:,} float32 numbers{' in plain memory' * request.plain}", "bold")
    choose_driver(request.driver, report)
    try:
        with ExitStack() as output:
            writer = None if target is None else output.enter_context(writing(target, a.length))
            right = _Program(request, report).run(a, b, writer)
            if writer is not None:
                writer.discard = not right
        if target is not None and right:
            report.step("written", f"{target}, {a.length:,} float32")
    finally:
        drivers.close()  # contexts included
    report.say("PASS" if right else "FAIL", "bold green" if right else "bold red")
    return right


class _Program:
    """One run: the devices it uses, and its steps in order."""

    def __init__(self, request: Request, report: Report) -> None:
        self._report = report
        self._plain = request.plain
        self._device = remap.device(request.device)
        vmm = self._device.capabilities["vmm"]
        if not vmm and not request.plain:
            raise Waived(
                f"{self._device} ({self._device.name}) has no virtual memory management: {vmm.reason}. "
                "Use --plain, or --driver host"
            )
        backing = (self._device,) if request.plain else self._device.backing_devices()
        self._resident = backing if request.resident is None else _devices(request.resident)
        self._accessing = (self._device,) if request.accessing is None else _devices(request.accessing)
        if self._device not in self._accessing:
            raise InvalidValueError(
                f"--accessing {','.join(str(one.index) for one in self._accessing)}",
                rule=f"{self._device} adds, so it must have access",
                next_step=f"Add {self._device.index}, or choose another --device",
            )
        self._show_devices(backing)

    def run(self, a: Vector, b: Vector, writer: NpyWriter | None) -> bool:
        """Allocate, copy in, launch, copy out and check, release; tell whether the sum is right."""
        free = [one.memory().free for one in self._resident]
        with ExitStack() as owned:
            # These lines are all that differs between plain and mapped memory.
            spans = [owned.enter_context(self._allocate(a.length * ITEM)) for _ in "abc"]
            self._show_memory(spans, a.length * ITEM)
            kernel = self._kernel(owned.enter_context(load(shipped("vector_add"), device=self._device)))
            held = [one.memory().free for one in self._resident]
            for span, vector in zip(spans, (a, b), strict=False):
                for start, stop in _pieces(vector.length):
                    span.copy_from_host(vector.piece(start, stop), offset=start * ITEM)
            self._launch(kernel, spans, a.length)
            self._device.synchronize()
            worst, where = _check(spans[2], a, b, writer)
        right = worst <= TOLERANCE
        place = "" if right else f"; the first that is wrong is element {where:,}"
        self._report.step("check", f"largest error against NumPy {worst:g}, allowed {TOLERANCE:g}{place}")
        after = [one.memory().free for one in self._resident]
        self._report.step("release", self._released(free, held, after))
        return right

    def _allocate(self, size: int) -> Span:
        if self._plain:
            return allocate_plain(size, at=self._device)
        return remap.allocate(size, resident=self._resident, accessing=self._accessing)

    def _kernel(self, module: Module) -> Kernel:
        kernel = module.function("vector_add")

        @kernel.host
        def add(_: object, a: Pointer, b: Pointer, c: Pointer, n: int) -> None:
            with np.errstate(all="ignore"):  # a GPU does not mention overflow
                np.add(a.read("float32", n), b.read("float32", n), out=c.write("float32", n))

        image = module.image
        self._report.step(
            "kernel", f"{kernel.name} from {image.name} ({image.kind}), which runs as {module.code}"
        )
        return kernel

    def _launch(self, kernel: Kernel, spans: list[Span], length: int) -> None:
        if not length:
            self._report.step("launch", "none: there is nothing to add")
            return
        blocks = -(-length // BLOCK)
        kernel.launch(*spans, length, grid=blocks, block=BLOCK)
        last = length - (blocks - 1) * BLOCK
        work = "all" if last == BLOCK else f"{last} of {BLOCK}"
        self._report.step(
            "launch",
            f"{counted(blocks, 'block')} of {BLOCK} threads on {self._device}; "
            f"in the last block {work} threads have work",
        )

    def _show_devices(self, backing: tuple[remap.Device, ...]) -> None:
        lines: list[str] = []
        for one in remap.devices():
            vmm, info = one.capabilities["vmm"], one.memory()
            roles = [role for role, those in self._roles(backing).items() if one in those]
            lines.append(
                f"{one.index} {one.name}: vmm {'yes' if vmm else f'no ({vmm.reason})'}, "
                f"{format_size(info.free)} of {format_size(info.total)} free; {', '.join(roles) or 'not used'}"
            )
        self._report.step("devices", lines)

    def _roles(self, backing: tuple[remap.Device, ...]) -> dict[str, tuple[remap.Device, ...]]:
        could = tuple(one for one in backing if one not in self._resident)
        return {"adds": (self._device,), "holds memory": self._resident, "could hold memory": could}

    def _show_memory(self, spans: list[Span], asked: int) -> None:
        count = len(self._resident)
        if self._plain:
            rounding = f"{format_size(asked)} a vector, as asked for"
        else:
            granule = max(one.granularity().minimum for one in self._resident)
            rounding = (
                f"{format_size(asked)} a vector, rounded up to a multiple of "
                f"{counted(count, 'device')} × {format_size(granule)}: {format_size(spans[0].size)}"
            )
        lines = [rounding]
        for name, span in zip("abc", spans, strict=True):
            runs = [(chunk.location, chunk.size) for chunk in span.chunks]
            if not runs:
                lines.append(f"{name} has no bytes, and so no address")
                continue
            chunks = counted(len(runs), "chunk")
            start = span.address
            lines.append(f"{name} {start:#x} to {start + span.size:#x}, {chunks}")
            self._report.step("memory" if name == "a" else "", lines)
            self._report.step("", [self._report.bar(runs)])
            lines = []
        if lines:
            self._report.step("memory", lines)
            return
        every = [(chunk.location, chunk.size) for span in spans for chunk in span.chunks]
        share = format_size(-(-spans[0].size // self._report.bar_width))
        self._report.step("", [f"{legend(every)} in all; a character is {share}"])
        rights = ", ".join(f"{place} {_WORDS[right]}" for place, right in spans[0].access.items())
        self._report.step("access", f"{rights}; nobody else")

    def _released(self, free: list[int], held: list[int], after: list[int]) -> list[str]:
        return [
            f"{one}: free {format_size(before)} before, {format_size(during)} meanwhile, {format_size(now)} after"
            for one, before, during, now in zip(self._resident, free, held, after, strict=True)
        ]


_WORDS = {
    remap.Access.READ_WRITE: "reads and writes",
    remap.Access.READ: "reads",
    remap.Access.NONE: "has no access",
}


def _devices(numbers: tuple[int, ...]) -> tuple[remap.Device, ...]:
    return tuple(remap.device(number) for number in numbers)


def _pieces(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, PIECE):
        yield start, min(start + PIECE, length)


def _check(result: Span, a: Vector, b: Vector, writer: NpyWriter | None) -> tuple[float, int]:
    """Copy the sum out piece by piece; return the largest error and where the first one stands."""
    worst, where = 0.0, 0
    for start, stop in _pieces(a.length):
        found: Float32 = result.to_host(np.float32, stop - start, offset=start * ITEM)
        if writer is not None:
            writer.write(found)
        with np.errstate(over="ignore", invalid="ignore"):  # the input may hold infinities and NaN
            expected = a.piece(start, stop) + b.piece(start, stop)
            wrong = (found != expected) & ~(np.isnan(found) & np.isnan(expected))
            if not wrong.any():
                continue
            errors = np.abs(found[wrong].astype(np.float64) - expected[wrong])
            errors[np.isnan(errors)] = np.inf
        largest = float(errors.max())
        if worst <= TOLERANCE < largest:
            where = start + int(np.flatnonzero(wrong)[np.argmax(errors > TOLERANCE)])
        worst = max(worst, largest)
    return worst, where
