"""Clients that say nothing, or are too many: they stop nobody, and whoever is refused is told why."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import remap
from remap import MiB
from remap.sharing.connections import PATIENCE
from remap.sharing.sockets import connect as connect_channel
from remap.sharing.wire import encode
from remap.testing.bench import wait_until

from .support import LIMIT, BrokerProcess
from .test_channel import soon

SIZE = 4 * MiB
FEW, CLIENTS = 128, 48
"""How many files the broker of these tests may open, and how many clients it serves then."""

LIMITED = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW}, {FEW}))
from remap.cli import main
main()
"""


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> Generator[BrokerProcess]:
    command = (sys.executable, "-W", "error", "-c", LIMITED)
    with BrokerProcess(tmp_path / "broker", command=command) as broker:
        yield broker


def test_silent_connections_stop_nobody(small: BrokerProcess) -> None:
    """However many connect and say nothing, a client is served, and who has a buffer open keeps it."""
    with remap.connect(small.path) as client, ExitStack() as stack:
        held = stack.enter_context(client.create("held", SIZE, resident=0))
        for _ in range(2 * FEW):
            stack.enter_context(connect_channel(small.path, deadline=soon()))
        start = time.monotonic()
        with remap.connect(small.path) as other:
            other.create("a", SIZE, resident=0).close()
            with pytest.raises(remap.InUseError):
                other.open("held")
        assert time.monotonic() - start < PATIENCE
        held.fill(1)
        assert {one.name: one.open for one in client.list()} == {"a": 0, "held": 1}


def test_a_queue_at_the_door(broker: BrokerProcess) -> None:
    """Where more clients come at once than the broker takes in that moment, they wait for it, as long as they may."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        with broker.stopped():
            try:
                while True:
                    one = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    one.setblocking(False)
                    one.connect(str(broker.path))
            except BlockingIOError:
                pass
            with pytest.raises(remap.ShareError, match="takes no connection"):
                remap.connect(broker.path, timeout=0.1)
            patient = pool.submit(remap.connect, broker.path)
        patient.result(LIMIT).close()


def test_clients_with_nothing_open_make_room(small: BrokerProcess) -> None:
    """More clients than there is room for are all served: those with nothing open come back at their next request."""
    with ExitStack() as stack:
        clients = [stack.enter_context(remap.connect(small.path)) for _ in range(2 * CLIENTS)]
        clients[0].create("a", SIZE, resident=0).close()
        for client in clients:
            client.open("a").close()
        assert clients[0].status().clients == CLIENTS


def test_too_many_that_have_something_open(small: BrokerProcess) -> None:
    """Where every client has a buffer open, or waits, the next one is told so at once, until one of them is done."""
    with ExitStack() as stack:
        clients = [stack.enter_context(remap.connect(small.path)) for _ in range(CLIENTS - 1)]
        clients[0].create("a", SIZE, resident=0).close()
        held = [stack.enter_context(client.open("a")) for client in clients]
        waiting = stack.enter_context(connect_channel(small.path, deadline=soon()))
        request = encode({"op": "wait", "name": "later", "timeout": LIMIT})
        waiting.send(request, deadline=soon())
        assert wait_until(lambda: clients[0].status().waiting == 1)
        start = time.monotonic()
        for _ in range(20):
            with pytest.raises(remap.ShareError, match=rf"serves {CLIENTS} clients.*\(ulimit -n\)"):
                remap.connect(small.path)
        assert time.monotonic() - start < PATIENCE
        held[1].close()
        with remap.connect(small.path) as late, late.open("a"):
            assert clients[0].list()[0].open == CLIENTS - 1


@pytest.mark.slow
def test_silence_has_a_limit(broker: BrokerProcess) -> None:
    """Who connects and says nothing, or half of something, is hung up on; who has a buffer open, or waits, is not."""
    with ExitStack() as stack:
        silent, half, waiting = (
            stack.enter_context(connect_channel(broker.path, deadline=soon())) for _ in range(3)
        )
        idle, holder = (stack.enter_context(remap.connect(broker.path)) for _ in range(2))
        stack.enter_context(holder.create("a", SIZE, resident=0))
        half.send_packet((4).to_bytes(4, "big") + encode({"op": "create"}), (), deadline=soon())
        waiting.send(encode({"op": "wait", "name": "later", "timeout": LIMIT}), deadline=soon())
        for one in (silent, half):
            with pytest.raises(EOFError):
                one.receive(deadline=soon())
        status = idle.status()
        assert (status.clients, status.waiting) == (3, 1)
        assert idle.list()[0].writer is not None
        idle.create("later", SIZE, resident=0).close()
        waiting.receive(deadline=soon())


def test_no_descriptors_are_left(small: BrokerProcess) -> None:
    """A broker that may keep no more memory says so, serves on, and takes some again when others were dropped."""
    room = FEW - 32 - CLIENTS
    with (
        remap.connect(small.path) as client,
        remap.allocate(SIZE, resident=0, shareable="posix_fd") as buffer,
    ):
        for number in range(room):
            client.put(str(number), buffer)
        start = time.monotonic()
        with pytest.raises(remap.ShareError, match=rf"keeps {room} already.*\(ulimit -n\)"):
            client.put("one more", buffer)
        assert time.monotonic() - start < PATIENCE
        with remap.connect(small.path) as other:
            other.open("0").close()
            other.drop("1")
            other.put("one more", buffer)
