"""What children of the tests do: functions that a spawned process can import."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

import remap
from remap import MiB

SIZE = 4 * MiB


def role(function: Callable[..., None]) -> Callable[..., None]:
    """Open the driver first, and send what the function raises instead of printing it."""

    @wraps(function)
    def played(link: Connection, driver: str, *arguments: Any) -> None:
        try:
            remap.use(driver)
            function(link, *arguments)
        except BaseException as error:  # noqa: BLE001 (the parent raises it)
            link.send(error)

    return played


@role
def importer(link: Connection, access: str = "r") -> None:
    """Open what is sent; report first and last byte each time that is asked for; write what is sent."""
    with remap.open(link.recv(), access=access) as buffer:
        link.send(("open", buffer.size))
        while (word := link.recv()) != "end":
            if word == "read":
                data = buffer.to_host()
                link.send((int(data[0]), int(data[-1]), int(data.min()), int(data.max())))
            elif isinstance(word, int):
                buffer.fill(word)
                link.send("written")
    link.send("closed")


@role
def exporter(link: Connection, value: int, die_at: str = "") -> None:
    """Export a buffer full of a value, and die by SIGKILL where that is asked for."""
    with remap.allocate(SIZE, resident=0, shareable="posix_fd") as buffer:
        buffer.fill(value)
        _die(die_at == "before export")
        with remap.export(buffer, receipts=2) as exported:
            link.send(exported)
            _die(die_at == "after sending")
            word = link.recv()
            _die(word == "die")
    link.send("closed")


@role
def forwarder(link: Connection) -> None:
    """Open what is sent, export it again, close, and end on request."""
    with remap.open(link.recv(), access="rw") as buffer:
        again = remap.export(buffer, access="r")
    link.send(again)
    link.recv()
    again.close()


def _die(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


@role
def through_queue(link: Connection, queue: Any) -> None:
    """Export, put into a queue, and close the buffer at once: the queue pickles on another thread."""
    with remap.allocate(SIZE, resident=0, shareable="posix_fd") as buffer:
        exported = remap.export(buffer)
        queue.put(exported)
        buffer.fill(9)  # the memory is the same whenever it is pickled
    link.send("put")
    link.recv()


def total(exported: remap.Exported) -> int:
    """Return the sum of shared memory; for a pool."""
    with remap.open(exported) as buffer:
        return int(buffer.to_host("uint8").sum())


@role
def worker(link: Connection, path: str, name: str, access: str, same: bool) -> None:
    """Have a buffer of a broker open until told to end."""
    with (
        remap.connect(path) as client,
        client.open(name, access=access, same_address=same, wait=30) as buffer,
    ):
        data = buffer.to_host()
        link.send((int(data[0]), int(data[-1]), buffer._address))
        while (word := link.recv()) != "end":
            buffer.fill(word)
            link.send("written")
    link.send("closed")


@role
def cycle(link: Connection, path: str, name: str, cycles: int) -> None:
    """Open and close a buffer of a broker many times."""
    with remap.connect(path) as client:
        link.send("connected")
        link.recv()
        for _ in range(cycles):
            with client.open(name, wait=30) as buffer:
                assert buffer.size
    link.send("done")


@role
def many_clients(link: Connection, path: str, name: str, clients: int, cycles: int) -> None:
    """Be many clients at once, on threads."""
    import threading

    failed: list[BaseException] = []

    def one() -> None:
        try:
            with remap.connect(path) as client:
                for _ in range(cycles):
                    client.open(name).close()
        except BaseException as error:  # noqa: BLE001 (sent below)
            failed.append(error)

    before = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=one) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    link.send(len(os.listdir("/proc/self/fd")) - before)


@role
def follower(link: Connection) -> None:
    """Wait on a stream for a shared event, then copy a byte out."""
    buffer = remap.open(link.recv())
    event = link.recv()
    link.send("ready")
    with remap.Stream(event.device) as stream:
        while link.recv() != "end":
            stream.wait(event)
            link.send("waiting")
            stream.synchronize()
            link.send(int(buffer.to_host("uint8", 1, offset=SIZE - 1)[0]))
    event.close()
    buffer.close()


@role
def rank_of(link: Connection, exchange: Any) -> None:
    """Do one of each step, and on request more."""
    told = exchange.allgather(bytes([exchange.rank]) * exchange.rank)
    word = exchange.broadcast(b"word" if exchange.rank == exchange.size - 1 else None, root=exchange.size - 1)
    part = exchange.split_by_host()
    part.barrier()
    link.send((exchange.rank, exchange.size, told, word, part.rank, part.size))
    while link.recv() == "again":
        exchange.barrier(timeout=link.recv())
        link.send("met")


@role
def connected(link: Connection, path: str, name: str, access: str) -> None:
    """Have a buffer of a broker open, and send the connection."""
    client = remap.connect(path)
    buffer = client.open(name, access=access)
    assert client._link._channel is not None
    link.send(DupFd(client._link._channel.fileno()))
    link.recv()
    buffer.close()
