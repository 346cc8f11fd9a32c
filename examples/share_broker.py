"""Weights that outlive their worker: it is killed, and its successor has them again at the same address.

    python examples/share_broker.py

A broker (`remap serve`) holds the memory. This program starts one of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import remap
from remap import MiB

SIZE = 64 * MiB


def load(path: Path, link: Connection) -> None:
    """Be the worker that loads the weights, and then serves until something kills it."""
    client = remap.connect(path)
    with client.create("weights", SIZE) as weights:
        weights.fill(42)
    serving = client.open("weights", same_address=True)
    link.send(serving.address)
    time.sleep(3600)


def main() -> None:
    """Kill the worker, and take its place."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "broker"
        command = [sys.executable, "-c", "from remap.cli import main; main()", "serve", "--path", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
            assert broker.stdout is not None
            print("broker:", broker.stdout.readline().split()[0])
            spawn = multiprocessing.get_context("spawn")
            ours, theirs = spawn.Pipe()
            worker = spawn.Process(target=load, args=(path, theirs))
            worker.start()
            address = ours.recv()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
            print("the worker was killed by", signal.Signals(-(worker.exitcode or 0)).name)
            with remap.connect(path) as client:
                with client.open("weights", same_address=True) as weights:
                    print("same address:", weights.address == address)
                    print("same bytes:", bool((weights.to_host() == 42).all()))
                client.drop("weights")
            broker.terminate()


if __name__ == "__main__":
    main()
