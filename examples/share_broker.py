"""Weights that outlive their worker: one is killed while it loads them, one while it serves, and the next goes on.

    python examples/share_broker.py

A broker (`remap serve`) holds the memory. This program starts one of its own.

The weights are loaded into a buffer of another name, which one process at a time can write to, and get their own name
when they are complete. So nobody opens half of them, whenever a worker is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import remap
from remap import MiB

SIZE = 64 * MiB


def work(path: Path, link: Connection) -> None:
    """Be a worker: load the weights if there are none, and serve until something kills it."""
    client = remap.connect(path)
    if "weights" not in names(client):
        load(client, link)
    weights = client.open("weights", same_address=True)
    link.send(weights.address)
    time.sleep(3600)


def load(client: remap.BrokerClient, link: Connection) -> None:
    """Load the weights once, whoever else tries at the same time, or was killed while it did."""
    with suppress(
        remap.InUseError
    ):  # there is one: of a worker that loads, or that has loaded, or was killed
        client.create("loading", SIZE).close()
    with client.open("loading", access="rw", same_address=True, wait=60) as memory:
        if "weights" in names(client):  # another worker has loaded them while this one waited
            return
        memory.fill(42, size=SIZE // 2)  # the model would be read here
        link.send("half of it is loaded")
        link.recv()
        memory.fill(42, offset=SIZE // 2)
        client.put("weights", memory)  # the same memory, under the name that others open


def names(client: remap.BrokerClient) -> set[str]:
    """Return the names of what the broker keeps."""
    return {one.name for one in client.list()}


def start(path: Path) -> tuple[BaseProcess, Connection]:
    """Start a worker."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    worker = spawn.Process(target=work, args=(path, theirs))
    worker.start()
    return worker, ours


def kill(worker: BaseProcess) -> str:
    """Kill a worker, and return what it died of."""
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    return signal.Signals(-(worker.exitcode or 0)).name


def main() -> None:
    """Kill a worker that loads, and one that serves, and take its place."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "broker"
        command = [sys.executable, "-c", "from remap.cli import main; main()", "serve", "--path", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
            assert broker.stdout is not None
            print("broker:", broker.stdout.readline().split()[0])
            with remap.connect(path) as client:
                worker, link = start(path)
                link.recv()
                print("a worker that was loading was killed by", kill(worker))
                print("the broker keeps:", *names(client))
                worker, link = start(path)
                link.recv()
                link.send("go on")
                address = link.recv()
                print("a worker that was serving was killed by", kill(worker))
                print("the broker keeps:", *sorted(names(client)))
                with client.open("weights", same_address=True) as weights:
                    print("same address:", weights.address == address)
                    print("same bytes:", bool((weights.to_host() == 42).all()))
                for name in ("weights", "loading"):
                    client.drop(name)
            broker.terminate()


if __name__ == "__main__":
    main()
