"""What it takes to lay four MPI ranks' memory side by side, from the call to the last rank's return.

Run with `PYTHONPATH=src:. mpiexec -n 4 python benchmarks/symmetric.py [--size 64MiB]`. Expected before the first run:
on the host driver less than 50 ms for four ranks (the slowest rank of each round, the median of rounds), with
REMAP_HOST_STATE set so that the ranks share the simulated devices; a few milliseconds more with a multicast team.
"""

from __future__ import annotations

import argparse
import statistics
import time

import remap
from benchmarks.record import write
from remap import MiB
from remap.sizes import parse_size


def rounds(exchange: remap.Exchange, size: int, multicast: bool, count: int) -> list[float]:
    """Return the milliseconds that the slowest rank took to make a buffer, for each round."""
    device = remap.device(exchange.rank % len(remap.devices()))
    found: list[float] = []
    for _ in range(count):
        exchange.barrier()
        start = time.perf_counter()
        with remap.SymmetricBuffer(exchange, size, device=device, multicast=multicast):
            took = (time.perf_counter() - start) * 1000
            found.append(max(float(one) for one in exchange.allgather(repr(took).encode())))
    return found


def main() -> None:
    """Measure, and let rank 0 write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="64MiB")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    if remap.driver().name == "host":
        remap.use("host", devices=4, memory=256 * MiB)
    exchange = remap.MpiExchange()
    size = parse_size(arguments.size)
    exchange.barrier()
    assert remap.SymmetricBuffer  # loads its room: imports are not what is measured
    first = rounds(exchange, size, False, 1)[0]
    figures = {"ranks": exchange.size, "bytes_per_rank": size, "first_ms": first}
    figures["median_ms"] = statistics.median(rounds(exchange, size, False, arguments.rounds))
    if remap.driver().name == "host":
        figures["with_multicast_median_ms"] = statistics.median(
            rounds(exchange, size, True, arguments.rounds)
        )
    if exchange.rank == 0:
        write("symmetric", figures)


if __name__ == "__main__":
    main()
