"""Every MPI rank reads the memory of the next one, without a copy.

    mpiexec -n 4 python examples/share_mpi.py

The exports travel as bytes. With file descriptors, as here, the ranks have to be on one host; between hosts the same
program runs with shareable="fabric", where the machines have a common fabric.
"""

from __future__ import annotations

import remap
from remap import MiB


def main() -> None:
    """Share a buffer of each rank with the one before it."""
    exchange = remap.MpiExchange()
    rank, size = exchange.rank, exchange.size
    device = remap.device(rank % len(remap.devices()))
    with remap.allocate(4 * MiB, resident=device, shareable="posix_fd") as buffer:
        buffer.fill(rank)
        tickets = exchange.allgather(remap.export(buffer).to_bytes())
        neighbour = (rank + 1) % size
        with remap.open(tickets[neighbour], accessing=device) as other:
            found = int(other.to_host("uint8", 1)[0])
            exchange.barrier()  # nobody closes before everybody has read
        told = exchange.allgather(f"rank {rank} read {found} from rank {neighbour}".encode())
    if rank == 0:
        for line in told:
            print(line.decode())


if __name__ == "__main__":
    main()
