"""Hand a buffer to another process: it sees the same memory, nothing is copied, and it may only read.

python examples/share_multiprocessing.py
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np

import remap
from remap import MiB


def reader(link: Connection) -> None:
    """Open what arrives, and look at it twice."""
    with remap.open(link.recv(), access="r") as buffer:
        link.send(int(buffer.to_host("int32", 1000).sum()))
        link.recv()
        link.send(int(buffer.to_host("int32", 1000).sum()))


def main() -> None:
    """Share a buffer with a process, change it, and let the process look again."""
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=reader, args=(theirs,))
    process.start()
    numbers = np.arange(1000, dtype=np.int32)
    with remap.allocate(4 * MiB, shareable="posix_fd") as buffer:
        buffer.copy_from_host(numbers)
        ours.send(remap.export(buffer, access="r"))
        print("the reader sees", ours.recv())
        buffer.copy_from_host(2 * numbers)  # done when it returns; what follows tells the reader so
        ours.send("look again")
        print("and then", ours.recv())
    process.join()


if __name__ == "__main__":
    main()
