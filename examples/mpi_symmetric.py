"""Every MPI rank writes its own memory and reads everybody's, in one range of addresses.

    mpiexec -n 4 python examples/mpi_symmetric.py

With REMAP_HOST_STATE=path, ranks on the host driver share its simulated devices; without it each has its own. Where
every rank has a device of its own, with multicast, and it is asked for (REMAP_EXAMPLE_MULTICAST=1), the ranks also take
a norm together, in kernels.
"""

from __future__ import annotations

import os

import numpy as np

import remap
from remap import MiB


def main() -> None:
    """Lay all ranks' memory side by side and add it up on each of them."""
    exchange = remap.MpiExchange()
    rank = exchange.rank
    device = remap.device(rank % len(remap.devices()))
    with remap.SymmetricBuffer(exchange, 4 * MiB, device=device) as sym:
        sym.local.copy_from_host(np.full(1024, rank + 1, np.float32))
        exchange.barrier()  # everybody has written
        whole = sym.array("float32", (sym.ranks, sym.rank_size // 4))  # all ranks as one array
        total = whole.to_host()[:, :1024].sum()
        exchange.barrier()  # everybody has read
        lines = [f"rank {rank} sees {total:.0f} in {sym.ranks} ranks' memory"]
    if os.environ.get("REMAP_EXAMPLE_MULTICAST") == "1":
        with (
            remap.MulticastCollectives(exchange, device=device) as together,
            remap.allocate(4096, resident=device) as x,
        ):
            x.copy_from_host(np.full(16, rank + 1, np.float32))
            lines.append(f"rank {rank} has the norm {together.norm(x.array('float32', 16)):.3f}")
            exchange.barrier()
    told = exchange.allgather("\n".join(lines).encode())
    if rank == 0:
        for one in told:
            print(one.decode())


if __name__ == "__main__":
    main()
