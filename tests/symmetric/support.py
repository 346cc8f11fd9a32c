"""Ranks as processes: each runs a role with an exchange of its own, on a driver of its own.

Nothing here imports pytest: each rank would, which takes longer than most roles.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import remap
from remap.drivers.wrappers import Faulty
from remap.lifetime import live
from remap.sharing.exchange import ProcessExchange

LIMIT = 90.0


class Outcome(NamedTuple):
    """How a rank ended: what its role returned, or the class and the text of its error, or nothing (it died)."""

    value: Any = None
    error: str = ""
    text: str = ""
    died: bool = False


def run_ranks(
    count: int,
    role: Callable[..., Any],
    /,
    *arguments: Any,
    timeout: float = 30.0,
    environment: Sequence[dict[str, str]] = (),
) -> list[Outcome]:
    """Run `role(exchange, *arguments)` on so many ranks, and return how each ended; all of them end in time.

    On the host driver each rank is a machine of its own with one device.
    """
    spawn = multiprocessing.get_context("spawn")
    exchanges = ProcessExchange.group(count, timeout=timeout)
    started: list[tuple[Any, Connection]] = []
    for rank, exchange in enumerate(exchanges):
        receiver, sender = spawn.Pipe(duplex=False)
        variables = environment[rank] if environment else {}
        child = spawn.Process(target=_play, args=(sender, exchange, role, arguments, variables), daemon=True)
        child.start()
        sender.close()
        started.append((child, receiver))
    for exchange in exchanges:
        exchange.close()
    outcomes: list[Outcome] = []
    for child, receiver in started:
        try:
            assert receiver.poll(LIMIT), f"{role.__name__} took more than {LIMIT} s on one rank"
            outcomes.append(Outcome(*receiver.recv()))
        except EOFError:
            outcomes.append(Outcome(died=True))
        finally:
            child.join(10)
            if child.is_alive():
                child.kill()
                child.join()
            child.close()
            receiver.close()
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """Return what the roles returned; all of them must have."""
    for rank, one in enumerate(outcomes):
        assert (one.error, one.died) == ("", False), f"rank {rank}: {one}"
    return [one.value for one in outcomes]


def _play(
    sender: Connection,
    exchange: ProcessExchange,
    role: Callable[..., Any],
    arguments: tuple[Any, ...],
    variables: dict[str, str],
) -> None:
    os.environ.update(variables)
    use_driver()
    try:
        answer = Outcome(role(exchange, *arguments))
    except BaseException as error:  # noqa: BLE001 (whatever it was, the parent is to see it)
        answer = Outcome(None, type(error).__name__, str(error))
    sender.send(tuple(answer))
    sender.close()


def use_driver(wrap: bool = False) -> Any:
    """Use the driver under test, on the host with one device; with `wrap`, through one that lets calls fail."""
    driver = remap.use("host", devices=1) if os.environ["REMAP_DRIVER"] == "host" else remap.driver()
    return remap.use(Faulty(driver)) if wrap else driver


class Belongings:
    """What this process holds: objects, descriptors, its device's memory and, on the host driver, address space."""

    def __init__(self) -> None:
        remap.collect()
        self.free = remap.device(0).memory().free
        self.fds = _fds()
        self.space = _space()

    def left_over(self) -> str:
        """Return what is held now and was not then, nothing if that is so.

        The thread that hands memory over closes its connections a moment after the other side is done with them.
        """
        end = time.monotonic() + 5
        while (left := self._left_over()) and time.monotonic() < end:
            time.sleep(0.01)
        return left

    def _left_over(self) -> str:
        remap.collect()
        free = (
            remap.device(0).memory().free
        )  # first: asking lets the host driver look for what nobody holds any more
        found = [f"object {one!r}" for one in live()]
        found += [f"descriptor {one}" for one in _fds() - self.fds]
        if os.environ["REMAP_DRIVER"] == "host":
            if free != self.free:
                found.append(f"{self.free - free} bytes of memory")
            if _space() != self.space:
                found.append(f"{_space()} ranges and mappings in place of {self.space}")
        return "; ".join(found)


def _space() -> tuple[int, int]:
    driver: Any = remap.driver()
    if driver.name != "host":
        return 0, 0
    space = driver._memory.space
    return len(space.reservations), len(space.mappings)


def _fds() -> set[str]:
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            what = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the directory's own
            continue
        if not what.startswith("pipe:"):
            found.add(f"{name} {what}")
    return found
