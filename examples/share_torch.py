"""Every rank of torch.distributed reads the memory of the next one, without a copy.

    torchrun --nproc-per-node 2 examples/share_torch.py

Only the small exports go through torch.distributed, over any backend; the memory itself stays where it is.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import remap
from remap import MiB


def main() -> None:
    """Share a buffer of each rank with the one before it."""
    on_gpu = remap.driver().name == "cuda"
    dist.init_process_group("nccl" if on_gpu and len(remap.devices()) > 1 else "gloo")
    device = remap.device(dist.get_rank() % len(remap.devices()))
    if on_gpu:
        torch.cuda.set_device(device.index)
    exchange = remap.TorchExchange()
    rank, size = exchange.rank, exchange.size
    with remap.allocate(4 * MiB, resident=device, shareable="posix_fd") as buffer:
        buffer.fill(rank + 1)
        tickets = exchange.allgather(remap.export(buffer).to_bytes())
        neighbour = (rank + 1) % size
        # Read-write only because torch takes no read-only arrays; nothing is written.
        with remap.open(tickets[neighbour], accessing=device, access="rw") as other:
            if on_gpu:  # torch takes the memory as it is
                found = int(torch.as_tensor(other.array("uint8"), device=f"cuda:{device.index}")[0])
            else:
                found = int(other.to_host("uint8", 1)[0])
            exchange.barrier()  # nobody closes before everybody has read
        told = exchange.allgather(f"rank {rank} read {found} from rank {neighbour}".encode())
    if rank == 0:
        for line in told:
            print(line.decode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
