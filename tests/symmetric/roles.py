"""What ranks do in the tests of symmetric buffers; each function runs in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import numpy as np

import remap
from remap import MiB, ShareError
from remap.errors import CudaResult
from remap.sharing.exchange import Exchange, ProcessExchange

from .support import Belongings, use_driver


def side_by_side(exchange: Exchange) -> dict[str, Any]:
    """Write one's own memory and read everybody's, by part and as a whole; leave nothing behind."""
    _warm_up(exchange)
    before = Belongings()
    with remap.SymmetricBuffer(exchange, 3 * MiB) as sym:
        sym.local.fill(exchange.rank + 1)
        exchange.barrier()
        size = sym.rank_size
        whole = sym.array("uint8", (sym.ranks, size)).to_host()
        found: dict[str, Any] = {
            "by rank": [int(np.unique(sym.rank(rank).to_host())[0]) for rank in range(sym.ranks)],
            "whole": [row.min() == row.max() == rank + 1 for rank, row in enumerate(whole)],
            "addresses": [sym.rank(rank).address - sym.address for rank in range(sym.ranks)],
            "chunks": [(chunk.address - sym.address, chunk.size) for chunk in sym.chunks],
            "size": (sym.size, size, sym.local.size),
            "own": sym.local.number,
            "footprint": sum(sym.footprint().values()),
            "array": sym.rank(sym.ranks - 1).array("float32", 4).nbytes,
        }
        exchange.barrier()
        # Everybody writes to the next rank's memory, at a place of its own.
        target = sym.rank((exchange.rank + 1) % sym.ranks)
        target.copy_from_host(np.full(4, 100 + exchange.rank, np.uint8), offset=64)
        exchange.barrier()
        found["from neighbour"] = int(sym.local.to_host("uint8", 1, offset=64)[0])
        sym.local.copy_from(sym, source_offset=target.number * size + 64, offset=128, size=4)
        found["copied across"] = int(sym.local.to_host("uint8", 1, offset=128)[0])
        exchange.barrier()
    exchange.barrier()
    found["left"] = before.left_over()
    return found


def _warm_up(exchange: Exchange) -> None:
    """Let everything that a process opens once be open: the thread that hands memory over, the streams of copies."""
    with remap.SymmetricBuffer(exchange, 1) as sym:
        sym.local.fill(0)
        exchange.barrier()
    exchange.barrier()


def refused(exchange: Exchange, by_rank: list[dict[str, Any]]) -> tuple[str, str]:
    """Ask for a symmetric buffer, each rank with arguments of its own; return the error and what it left."""
    _warm_up(exchange)
    before = Belongings()
    arguments: dict[str, Any] = {"size": MiB, **by_rank[exchange.rank]}
    try:
        remap.SymmetricBuffer(exchange, **arguments).close()
    except ShareError as error:
        return str(error), before.left_over()
    return "", before.left_over()


def asked_wrongly(exchange: Exchange) -> str:
    """Ask where memory would have to cross hosts."""
    try:
        remap.SymmetricBuffer(exchange, MiB).close()
    except ShareError as error:
        return str(error)
    return ""


def read_only(exchange: Exchange) -> list[str]:
    """Map the others' memory read-only, and try what that forbids."""
    found: list[str] = []
    with remap.SymmetricBuffer(exchange, MiB, access="r") as sym:
        sym.local.fill(exchange.rank + 1)
        exchange.barrier()
        other = sym.rank(1 - exchange.rank)
        found.append(str(int(other.to_host()[0])))
        attempts: tuple[Callable[[], object], ...] = (
            lambda: other.fill(9),
            lambda: sym.fill(9),
            lambda: other.set_access({0: "rw"}),
        )
        for attempt in attempts:
            try:
                attempt()
            except (remap.AccessError, remap.InvalidValueError) as error:
                found.append(type(error).__name__)
        found += rights(sym)
        # What is refused changes nothing, and what is given to all goes no further than what was agreed.
        with suppress(remap.NotSupportedError):
            sym.set_access({0: "rw", remap.Host(): "r"})
        found += rights(sym)
        for right in ("r", "rw"):
            sym.set_access({0: right})
            found += rights(sym)
        exchange.barrier()
    return found


def rights(sym: remap.SymmetricBuffer) -> list[str]:
    """Return the rights to the other's memory and to one's own, as the driver has them and as is said."""
    here = remap.device(0).location
    parts = (sym.rank(1 - sym.exchange.rank), sym.local)
    found = [str(remap.driver().get_access(part.address, here)) for part in parts]
    assert found == [str(part.access[here]) for part in parts]
    return found


def no_life_of_its_own(exchange: Exchange) -> list[str]:
    """Try to close, pause and move what cannot be; the buffer works afterwards."""
    found: list[str] = []
    sym = remap.SymmetricBuffer(exchange, MiB)
    view, anything = sym.local, cast("Any", sym)
    attempts: tuple[Callable[[], object], ...] = (
        view.close,
        lambda: remap.pause(anything),
        lambda: remap.migrate(anything, remap.Host()),
        lambda: sym.rank(7),
        lambda: sym.rank(-1),
        lambda: sym.multicast,
    )
    for attempt in attempts:
        try:
            attempt()
        except remap.RemapError as error:
            found.append(f"{type(error).__name__}: {error}")
    view.fill(3)
    assert int(view.to_host()[0]) == 3
    array = view.array("uint8", 4)
    exchange.barrier()
    del array
    sym.close()
    sym.close()
    attempts = (lambda: view.fill(1), lambda: sym.local.fill(1), lambda: sym.multicast)
    for attempt in attempts:
        try:
            attempt()
        except remap.ClosedError:
            found.append("closed")
    return found


def exported(exchange: Exchange) -> list[Any]:
    """Export one's own memory, another rank's, and both together."""
    found: list[Any] = []
    with remap.SymmetricBuffer(exchange, MiB) as sym:
        sym.local.fill(7 + exchange.rank)
        with remap.export(sym.local) as own, remap.open(own) as again:
            found.append(int(again.to_host()[0]))
            with remap.export(sym.local, size=1) as another:
                found.append(another.descriptor.identity == own.descriptor.identity)
        for part in (sym.rank(1 - exchange.rank), sym):
            try:
                remap.export(part).close()
            except ShareError as error:
                found.append("another process" in str(error))
        exchange.barrier()
    return found


def closed_in_any_order(exchange: Exchange) -> tuple[int, bool]:
    """Rank 0 closes first: the others go on reading its memory, and it is given back when the last has closed."""
    sym = remap.SymmetricBuffer(exchange, 4 * MiB)
    sym.local.fill(exchange.rank + 10)
    exchange.barrier()
    held = remap.device(0).memory().free
    if exchange.rank == 0:
        sym.close()
    exchange.barrier()
    seen = 10 if exchange.rank == 0 else int(sym.rank(0).to_host()[-1])
    exchange.barrier()
    sym.close()
    exchange.barrier()
    return seen, remap.device(0).memory().free >= held + 4 * MiB


STEPS = (
    ("create", 1),
    ("export_handle", 1),
    ("reserve", 1),
    ("import_handle", 1),
    ("import_handle", 2),
    ("map", 1),
    ("map", 3),
    ("set_access", 1),
    ("set_access", 3),
    ("properties_of", 1),
)
"""The driver's calls on the way to a symmetric buffer of three ranks, and which one of each fails."""

MULTICAST_STEPS = (
    ("create_multicast", 1),
    ("export_handle", 2),
    ("add_multicast_device", 1),
    ("retain", 1),
    ("bind_multicast", 1),
    ("reserve", 2),
    ("map", 4),
    ("set_access", 4),
)
"""The same, for the multicast team after it."""


def every_step_fails(exchange: Exchange, multicast: bool) -> list[tuple[str, str, str]]:
    """Let one rank fail at one step after the other; each time return the step, the error and what it left behind."""
    faulty = use_driver(wrap=True)
    with remap.SymmetricBuffer(exchange, MiB, multicast=multicast):
        pass
    exchange.barrier()
    found: list[tuple[str, str, str]] = []
    for number, (call, nth) in enumerate((*STEPS, *MULTICAST_STEPS) if multicast else STEPS):
        only_first = call == "create_multicast" or (call, nth) == ("export_handle", 2)
        rank = 0 if only_first else 2 * (number % 2)
        before = Belongings()
        if exchange.rank == rank:
            faulty.fail(call, nth=nth, result=CudaResult.INVALID_HANDLE)
        story = ""
        try:
            remap.SymmetricBuffer(exchange, MiB, multicast=multicast).close()
        except ShareError as error:
            story = str(error)
        exchange.barrier()
        struck = faulty.refused
        faulty.heal()
        left = before.left_over()
        expected = (call,) if exchange.rank == rank else ()
        found.append(
            (f"{call} {nth} on rank {rank}", story, left if struck == expected else f"struck {struck}")
        )
        exchange.barrier()
    with remap.SymmetricBuffer(exchange, MiB, multicast=multicast) as sym:  # and then it works
        sym.local.fill(1)
        exchange.barrier()
    return found


class Dying:
    """An exchange whose rank is killed when it comes to a step."""

    def __init__(self, inner: ProcessExchange, step: int) -> None:
        self.rank, self.size, self._inner, self._left = inner.rank, inner.size, inner, step

    def allgather(self, data: bytes, *, timeout: float | None = None) -> list[bytes]:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._inner.allgather(data, timeout=timeout)


def killed(exchange: ProcessExchange, step: int, multicast: bool) -> tuple[str, float, str]:
    """Rank 1 is killed at a step; return the others' error, how long it took, and what it left."""
    _warm_up(exchange)
    before = Belongings()
    start = time.monotonic()
    chosen: Any = Dying(exchange, step) if exchange.rank == 1 else exchange
    try:
        remap.SymmetricBuffer(chosen, MiB, multicast=multicast).close()
    except ShareError as error:
        return str(error), time.monotonic() - start, before.left_over()
    return "", 0.0, ""


def absent(exchange: ProcessExchange) -> tuple[str, float]:
    """Rank 1 does not come; return the others' error and how long they waited."""
    start = time.monotonic()
    if exchange.rank == 1:
        while time.monotonic() < start + 60 and exchange._link(0).recv(
            1, 2
        ):  # MSG_PEEK: until rank 0 gives up
            time.sleep(0.01)
        return "", 0.0
    try:
        remap.SymmetricBuffer(exchange, MiB, timeout=0.5).close()
    except ShareError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


def launched(exchange: Exchange) -> list[float]:
    """A kernel takes the whole range, a part, and an array of it, and adds up what all ranks have."""
    source = """
extern "C" __global__ void add_up(const float *whole, float *mine, unsigned long long stride, unsigned int ranks)
{
    float sum = 0;
    for (unsigned int rank = 0; rank < ranks; ++rank)
        sum += whole[rank * stride / 4];
    mine[1] = sum;
}
"""
    from remap.kernels import Pointer

    with remap.SymmetricBuffer(exchange, MiB) as sym, remap.load(remap.source(source)) as module:
        kernel = module.function("add_up", parameters=["pointer", "pointer", "uint64", "uint32"])

        @kernel.host
        def add_up(_: object, whole: Pointer, mine: Pointer, stride: int, ranks: int) -> None:
            total = sum(whole.read("float32", 1, rank * stride)[0] for rank in range(ranks))
            mine.write("float32", 2)[1] = total

        sym.local.copy_from_host(np.array([exchange.rank + 1, 0], np.float32))
        exchange.barrier()
        for mine in (sym.local, sym.local.array("float32", 2)):
            kernel.launch(sym, mine, sym.rank_size, sym.ranks, grid=1, block=1)
        found: list[float] = sym.local.to_host("float32", 2).tolist()
        exchange.barrier()
        return found
