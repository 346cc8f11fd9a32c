"""What other processes do in these tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import remap
from remap import MiB

SPAWN = multiprocessing.get_context("spawn")
LIMIT = 100.0


def begin(driver: str) -> Any:
    """Open a driver whose memory torch can see, and return `remap.torch`."""
    if driver == "host":
        remap.use("host", memory=64 * MiB, coherent=True, integrated=False)
    else:
        remap.use(driver)
    return remap.torch


def read_and_write(driver: str, link: Any) -> None:
    """Open the tensor that comes, tell what it is, and write into it."""
    torch = begin(driver)
    assert link.poll(LIMIT)
    exported = link.recv()
    tensor = torch.open(exported, access="rw", accessing=[0, remap.Host()] if driver == "host" else [0])
    link.send((tensor[0].tolist(), tuple(tensor.shape), tensor.stride()))
    tensor[1, 3] = 100
    if tensor.is_cuda:
        tensor.cpu()


def started(count: int, role: Callable[..., None]) -> list[Any]:
    """Run a role in as many processes, and return what each tells, by rank."""
    results = SPAWN.Queue()
    exchanges = remap.ProcessExchange.group(count, timeout=LIMIT)
    children = [
        SPAWN.Process(target=role, args=(remap.driver().name, exchange, results), daemon=True)
        for exchange in exchanges
    ]
    for child in children:
        child.start()
    for exchange in exchanges:  # each child has its own end now
        exchange.close()
    found = dict(results.get(timeout=LIMIT) for _ in children)
    for child in children:
        child.join(LIMIT)
    return [found[rank] for rank in range(count)]


def wake_together(driver: str, exchange: remap.ProcessExchange, results: Any) -> None:
    """Sleep, wake while rank 1 is short of memory, then wake with memory enough."""
    torch = begin(driver)
    at = exchange.rank if driver == "cuda" else 0
    if driver == "cuda":
        torch_ = remap.integrations.tensors.torch
        torch_.cuda.set_device(at)
    with torch.pool("weights") as pool:
        count, slack = (8 * MiB, 8 * MiB) if driver == "host" else (256 * MiB, 512 * MiB)
        weights = pool.empty(count, device=at).fill_(exchange.rank + 1)
    torch.sleep("weights")
    taken = None
    if exchange.rank == 1:
        taken = remap.allocate(remap.device(at).memory().free - slack, resident=at)
    try:
        torch.wake("weights", exchange=exchange)
        first = "it woke"
    except remap.RemapError as error:
        first = f"{type(error).__name__}: {error}"
    between = torch.status()["weights"].state
    if taken is not None:
        taken.close()
    try:  # rank 0 asks for what is not there, and that is no reason for rank 1 to wait for it
        torch.wake("nothing" if exchange.rank == 0 else "weights", exchange=exchange)
    except remap.RemapError as error:
        first += f"; {type(error).__name__}: {error}"
    between += ", " + torch.status()["weights"].state
    torch.wake("weights", exchange=exchange)
    right = bool((weights == exchange.rank + 1).all())
    results.put((exchange.rank, (first, between, torch.status()["weights"].state, right)))


def wake_with_listeners(driver: str, exchange: remap.ProcessExchange, results: Any) -> None:
    """Wake with a listener that registers memory on rank 0, and one that fails on rank 1; name other tags; count."""
    torch = begin(driver)
    with torch.pool("weights") as pool:
        weights = pool.empty(MiB, device=exchange.rank if driver == "cuda" else 0).fill_(exchange.rank + 1)
    with torch.pool("kv"):
        pass
    held: list[remap.Registration] = []
    states: list[str] = []
    found: list[str] = []

    def listen(buffer: remap.Buffer) -> None:
        states.append("paused" if buffer.paused else "awake")
        if buffer.paused:
            return
        if exchange.rank == 1 and len(found) == 2:
            raise ZeroDivisionError("a listener")
        held.append(torch.registered(weights, "NCCL"))

    torch.sleep(["weights", "kv"])
    torch.buffer_of(weights).on_change(listen)

    def wake(*tags: str) -> None:
        try:
            torch.wake(tags, exchange=exchange)
        except (remap.RemapError, ZeroDivisionError) as error:
            text = f"{type(error).__name__}: {error}{getattr(error, '__notes__', '')}"
        else:
            text = "it woke"
        status = torch.status()["weights"]
        found.append(f"{status.state}, {status.resident > 0}, {len(held)} held, {text}")

    wake(*["weights", "kv"][: exchange.rank + 1])
    wake("weights" if exchange.rank else "nothing")
    wake("weights")
    results.put((exchange.rank, (found, states, bool((weights == exchange.rank + 1).all()))))
