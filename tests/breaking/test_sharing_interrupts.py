"""Ctrl-C at every place of what shares memory: both ends agree afterwards, and nothing is lost at either."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import remap
from remap import drivers, lifetime, releases
from remap.sharing import client as sharing
from remap.sharing.exchange import TIMEOUT
from remap.testing.bench import wait_until

from ..sharing.support import BrokerProcess
from .test_every_interrupt import every

GRANULE = 64 << 10
ROOMS = (str(Path(sharing.__file__).parent), lifetime.__file__, releases.__file__)
"""Buffers have tests of their own."""

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def driver() -> Generator[Any]:
    """Let the tests use a host driver with no wrapper, and let finalisers warn: that is what they are for."""
    if remap.driver().name != "host":
        pytest.skip("what CUDA has in use is machine-wide, and each place would take its slack")
    found = remap.use("host", granularity=GRANULE, devices=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        # The thread that hands leases over, and what the driver opens once.
        with remap.allocate(GRANULE, shareable="posix_fd") as buffer, remap.export(buffer):
            pass
        yield found
        remap.collect()
    drivers.close()


@pytest.fixture(name="client")
def _client(tmp_path: Path) -> Generator[remap.BrokerClient]:
    with BrokerProcess(tmp_path / "broker") as broker, remap.connect(broker.path) as client:
        yield client


def held() -> tuple[int, ...]:
    """Return what this process holds when all that was left to do is done: memory, addresses, descriptors, objects."""
    lifetime.collect()
    free = remap.device(0).memory().free
    space = remap.driver()._memory.space  # type: ignore[attr-defined]
    descriptors = len(os.listdir("/proc/self/fd"))
    return free, len(space.reservations), len(space.mappings), descriptors, len(lifetime.live())


def connect_again(client: remap.BrokerClient) -> None:
    """Lose the connection, and make another one with the next request."""
    assert client._link._channel is not None
    client._link._channel.close()
    client.list()


CLIENTS: dict[str, Callable[[remap.BrokerClient], object]] = {
    "open for reading": lambda client: client.open("a").close(),
    "open for writing": lambda client: client.open("a", access="rw").close(),
    "create": lambda client: client.create("b", GRANULE).close(),
    "wait": lambda client: client.wait("a", access="rw"),
    "list": lambda client: client.list(),
}


@pytest.mark.parametrize("act", CLIENTS)
def test_interrupted_clients(client: remap.BrokerClient, act: str) -> None:
    """Wherever a client is interrupted, its next answers are those of its next requests, and nothing stays open (5)."""
    client.create("a", GRANULE).close()
    before = held()
    for done in every(lambda: CLIENTS[act](client), ROOMS):
        lifetime.drain()
        kept = {one.name: one.open for one in client.list()}
        assert kept.pop("a") == 0, done.where
        assert wait_until(lambda: client.status().clients == 1), done.where
        if kept:  # the broker had it when the interrupt came
            assert kept == {"b": 0}, done.where
            client.drop("b")
        assert held() == before, done.where


def test_interrupted_put(client: remap.BrokerClient) -> None:
    """The broker has it whole, or not at all, and the buffer is usable here (5)."""
    with remap.allocate(GRANULE, shareable="posix_fd") as buffer:
        client.put("b", buffer)
        client.drop("b")
        before = held()
        for done in every(lambda: client.put("b", buffer), ROOMS):
            for one in client.list():
                client.drop(one.name)
            assert held() == before, done.where


def test_interrupted_claims(client: remap.BrokerClient) -> None:
    """What is open stays known to the broker, however often a client is interrupted on its way back."""
    with client.create("a", GRANULE):
        before = held()
        for done in every(lambda: connect_again(client), ROOMS):
            assert client.list()[0].open == 1, done.where
            assert held() == before, done.where


def export_and_open(buffer: remap.Buffer, fetch: bool) -> None:
    """Export a buffer and open it here, by a ticket that is fetched or as it is."""
    with remap.export(buffer) as exported, remap.open(exported.to_bytes() if fetch else exported):
        pass


@pytest.mark.parametrize("fetch", [False, True])
def test_interrupted_exports(fetch: bool) -> None:
    """No descriptor outlives an export that came to nothing, so that closing the buffer frees its memory (4, 5)."""
    with remap.allocate(GRANULE, shareable="posix_fd") as buffer:
        before = held()
        for done in every(lambda: export_and_open(buffer, fetch), ROOMS):
            # The thread at the other end closes its connection a moment later.
            assert wait_until(lambda: held() == before), done.where


def test_an_interrupted_export_leaves_the_buffer_free_to_move() -> None:
    """A buffer whose export was interrupted was not exported, so that it sleeps (invariant 5)."""
    made: list[remap.Exported] = []
    with remap.allocate(GRANULE, shareable="posix_fd") as buffer:
        for done in every(lambda: made.append(remap.export(buffer)), ROOMS):
            assert not buffer._shared, done.where


@pytest.mark.parametrize("multicast", [False, True])
def test_interrupted_symmetric_buffers(multicast: bool) -> None:
    """What was being made, or closed, is gone altogether: range, memory, view, and what was offered (4, 5)."""

    def act() -> None:
        remap.SymmetricBuffer(remap.SingleExchange(), GRANULE, multicast=multicast).close()

    act()
    before = held()
    for done in every(act, ROOMS):
        assert wait_until(lambda: held() == before), done.where


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_interrupted_ranks(rank: int) -> None:
    """Wherever one rank is interrupted, the other has its buffer or an error at once, and nothing is left of either."""
    remap.use("host", granularity=GRANULE, devices=2)

    def make(exchange: remap.ProcessExchange) -> bool:
        try:
            remap.SymmetricBuffer(exchange, GRANULE, device=exchange.rank, multicast=True).close()
        except remap.ShareError:
            return False
        finally:
            exchange.close()
        return True

    others: list[Future[bool]] = []

    def act() -> None:
        ranks = remap.ProcessExchange.group(2)
        others.append(pool.submit(make, ranks[1 - rank]))
        made = make(ranks[rank])
        assert others[-1].result() == made

    with ThreadPoolExecutor() as pool:
        act()
        before = held()
        start = time.monotonic()
        for done in every(act, ROOMS):
            others[-1].result()
            assert time.monotonic() - start < TIMEOUT / 2, done.where
            assert wait_until(lambda: held() == before), done.where
            start = time.monotonic()
