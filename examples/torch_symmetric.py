"""Every rank of torch.distributed writes its own memory and reads everybody's, in one range of addresses.

    torchrun --nproc-per-node 2 examples/torch_symmetric.py

On GPUs torch sees all ranks' memory as one tensor, and adds it up without a copy in between.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

import remap
from remap import MiB


def main() -> None:
    """Lay all ranks' memory side by side and add it up on each of them."""
    on_gpu = remap.driver().name == "cuda"
    dist.init_process_group("nccl" if on_gpu and len(remap.devices()) > 1 else "gloo")
    device = remap.device(dist.get_rank() % len(remap.devices()))
    if on_gpu:
        torch.cuda.set_device(device.index)
    exchange = remap.TorchExchange()
    rank = exchange.rank
    with remap.SymmetricBuffer(exchange, 4 * MiB, device=device) as sym:
        sym.local.copy_from_host(np.full(1024, rank + 1, np.float32))
        exchange.barrier()  # everybody has written
        whole = sym.array("float32", (sym.ranks, sym.rank_size // 4))
        if on_gpu:
            tensor = torch.as_tensor(whole, device=f"cuda:{device.index}")
            total = float(tensor[:, :1024].sum())
            del tensor, whole  # the memory stays while torch may still look at it
        else:
            total = float(whole.to_host()[:, :1024].sum())
        exchange.barrier()  # everybody has read
        told = exchange.allgather(f"rank {rank} sees {total:.0f} in {sym.ranks} ranks' memory".encode())
    if rank == 0:
        for line in told:
            print(line.decode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
