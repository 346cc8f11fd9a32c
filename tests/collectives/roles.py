"""What ranks do in the tests of collectives; each function runs in a process of its own."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np

import remap
from remap.sharing.exchange import Exchange

ROUNDS = 6


def rounds(exchange: Exchange, first_round: int, uneven: bool) -> list[str]:
    """Take norms and gather in turn, with values that differ by rank and round; return what was wrong."""
    wrong: list[str] = []
    ranks, rank = exchange.size, exchange.rank
    chance, pause = random.Random(rank), threading.Event()
    with (
        remap.MulticastCollectives(exchange, first_round=first_round) as together,
        remap.Stream(together.device) as stream,
        remap.allocate(4096) as x,
    ):
        for step in range(ROUNDS):
            value = [np.float32(1 + other + 10 * step) for other in range(ranks)]
            x.copy_from_host(np.full(1024, value[rank], np.float32))
            if uneven and chance.random() < 0.5:
                pause.wait(0.01)  # some ranks are ahead of others, in another order each time
            own = x.array("float32", 1000 - rank)
            expected = float(np.sqrt(sum((1000 - other) * value[other] ** 2 for other in range(ranks))))
            found = together.norm(own, stream=stream)
            if abs(found - expected) > 1e-5 * expected:
                wrong.append(f"step {step}: norm {found}, not {expected}")
            if uneven and chance.random() < 0.5:
                pause.wait(0.01)
            parts = together.gather(x.array("float32", 5), stream=stream)
            stream.synchronize()
            seen: Any = parts.to_host()
            if seen.tolist() != [[float(one)] * 5 for one in value]:
                wrong.append(f"step {step}: gathered {seen.tolist()}")
        if together.round != first_round + 2 * ROUNDS:
            wrong.append(f"{together.round} rounds")
        together.meet(stream=stream)
        together.check(stream=stream)
        exchange.barrier()
    if remap.collect():
        wrong.append("something was not closed")
    return wrong


def alone(exchange: Exchange) -> list[str]:
    """Rank 0 goes into a round that the other does not come to."""
    found: list[str] = []
    with remap.MulticastCollectives(exchange, timeout=0.2) as together, remap.allocate(64) as x:
        if exchange.rank == 0:
            for attempt in (
                lambda: together.norm(x),
                lambda: together.gather(x.array("float32", 4)),
                together.check,
            ):
                try:
                    attempt()
                except remap.ShareError as error:
                    found.append(str(error))
        exchange.barrier()
    return found


def asked_wrongly(exchange: Exchange) -> list[str]:
    """Ask for more room than there is, and for other types."""
    found: list[str] = []
    with remap.MulticastCollectives(exchange, capacity=1024) as together, remap.allocate(4096) as x:
        for attempt in (lambda: together.gather(x), lambda: together.norm(x.array("float64", 4))):
            try:
                attempt()
            except remap.InvalidValueError as error:
                found.append(str(error))
        empty = together.gather(x.array("float32", 0))
        found.append(str(empty.shape))
        found.append(str(together.norm(x.array("float32", 0))))
        exchange.barrier()
    return found


def one_without(exchange: Exchange) -> str:
    """Rank 1 has no multicast."""
    if exchange.rank == 1:
        remap.use("host", devices=1, capabilities={"multicast": False})
    try:
        remap.MulticastCollectives(exchange).close()
    except remap.ShareError as error:
        return str(error)
    return ""
