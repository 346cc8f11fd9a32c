"""Exchanges: every rank hears what every other says, in time, or learns that it will not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import remap
from remap.sharing.exchange import LARGEST, _packed, _unpacked

from . import roles
from .support import LIMIT, Child


def ranks(size: int, *, timeout: float = LIMIT, method: str = "spawn") -> list[Child]:
    """Start a process for each rank of a group."""
    group = remap.ProcessExchange.group(size, timeout=timeout)
    children = [Child(roles.rank_of, exchange, method=method) for exchange in group]
    for exchange in group:
        exchange.close()
    return children


def test_a_single_process() -> None:
    """Alone, every step is what one says oneself."""
    exchange = remap.SingleExchange()
    assert isinstance(exchange, remap.Exchange)
    assert (exchange.rank, exchange.size) == (0, 1)
    assert exchange.allgather(b"x") == [b"x"]
    assert exchange.broadcast(b"y") == b"y"
    exchange.barrier()
    assert exchange.split_by_host().size == 1
    with pytest.raises(remap.InvalidValueError):
        exchange.broadcast(b"", root=1)
    with pytest.raises(remap.InvalidValueError):
        exchange.allgather(bytes(LARGEST + 1))
    with pytest.raises(remap.InvalidValueError):
        remap.SingleExchange(timeout=0)
    with pytest.raises(remap.InvalidValueError):
        remap.ProcessExchange.group(0)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("size", [1, 4])
def test_processes(size: int, method: str) -> None:
    """Processes of multiprocessing gather, broadcast, meet and split."""
    children = ranks(size, method=method)
    for rank, child in enumerate(children):
        told = [bytes([one]) * one for one in range(size)]
        assert child.hear() == (rank, size, told, b"word", rank, size)
    for child in children:
        child.tell("end")
        child.end()


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come(absent: int) -> None:
    """A rank that stays away breaks the step for all others within their time limit, and the exchange for good."""
    children = ranks(3)
    for child in children:
        child.hear()
    start = time.monotonic()
    present = [child for rank, child in enumerate(children) if rank != absent]
    for child in present:
        child.tell("again")
        child.tell(0.5)
    for child in present:
        with pytest.raises(remap.ShareError, match="a step of all ranks"):
            child.hear()
    assert time.monotonic() - start < LIMIT / 2
    children[absent].tell("again")
    children[absent].tell(LIMIT)
    with pytest.raises(remap.ShareError):
        children[absent].hear()
    for child in children:
        child.end()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_is_killed(dead: int) -> None:
    """When a rank is killed the others need not wait for their time limit: they see its end."""
    children = ranks(3)
    for child in children:
        child.hear()
    children[dead].kill()
    start = time.monotonic()
    alive = [child for rank, child in enumerate(children) if rank != dead]
    for child in alive:
        child.tell("again")
        child.tell(LIMIT)
    for child in alive:
        with pytest.raises(remap.ShareError):
            child.hear()
    assert time.monotonic() - start < LIMIT / 2


def test_broken_for_good() -> None:
    """After a failure every later step fails at once, with the reason."""
    first, second = remap.ProcessExchange.group(2, timeout=0.05)
    with pytest.raises(remap.ShareError, match=r"within 0\.05 s"):
        first.barrier()
    assert "not every rank came" in first.broken
    start = time.monotonic()
    with pytest.raises(remap.ShareError, match="broken exchange"):
        first.barrier(timeout=LIMIT)
    with pytest.raises(remap.ShareError):
        second.barrier(timeout=LIMIT)
    assert time.monotonic() - start < LIMIT / 2


def test_what_one_rank_may_not_say() -> None:
    """A rank that says too much, or names no rank, is refused on all ranks alike, and all of them stay in step."""
    first, second = remap.ProcessExchange.group(2, timeout=LIMIT)
    steps: list[tuple[Callable[[remap.ProcessExchange], object], str]] = [
        (lambda one: one.allgather(bytes(LARGEST + 1)), f"rank 1 asked for {LARGEST + 1} bytes"),
        (lambda one: one.broadcast(bytes(LARGEST + 1), root=1), f"rank 1 asked for {LARGEST + 1} bytes"),
        (lambda one: one.broadcast(root=2), "rank 1 asked for rank 2: the ranks are 0 to 1"),
    ]
    with ThreadPoolExecutor() as pool:
        for wrong, rule in steps:
            good = pool.submit(first.allgather, b"mine")
            with pytest.raises(remap.InvalidValueError, match=rule) as caught:
                wrong(second)
            with pytest.raises(remap.InvalidValueError) as others:
                good.result(LIMIT)
            assert str(caught.value) == str(others.value)
            assert (first.broken, second.broken) == ("", "")
            good = pool.submit(first.allgather, b"mine")
            assert second.allgather(bytes(LARGEST)) == good.result(LIMIT) == [b"mine", bytes(LARGEST)]
    first.close()
    second.close()


@pytest.mark.parametrize(
    "whole", [b"", b"x" * 7, b"\xff" * 16, _packed([b"a", b"b"])[:-1], _packed([b"a", b"b", b""])]
)
def test_what_does_not_add_up(whole: bytes) -> None:
    """What rank 0 is said to have gathered is checked by the others (invariant 11)."""
    assert _unpacked(_packed([b"a", b""]), 2) == [b"a", b""]
    with pytest.raises(remap.ShareError, match="add up"):
        _unpacked(whole, 2)


# -- MPI --

MPI = """
import sys, time
import remap
exchange = remap.MpiExchange(timeout=30)
rank, size = exchange.rank, exchange.size
assert isinstance(exchange, remap.Exchange)
assert exchange.allgather(b"r" * rank) == [b"r" * one for one in range(size)]
assert exchange.broadcast(b"big" * 100_000 if rank == 2 else None, root=2) == b"big" * 100_000
part = exchange.split_by_host()
assert (part.rank, part.size) == (rank, size)
part.barrier()
start = time.perf_counter()
for _ in range(20):
    exchange.barrier()
step = (time.perf_counter() - start) / 20

# memory handed round: each rank opens that of the next
remap.use("host", memory="64MiB")
buffer = remap.allocate("4MiB", resident=0, shareable="posix_fd")
buffer.fill(rank)
tickets = exchange.allgather(remap.export(buffer).to_bytes())
with remap.open(tickets[(rank + 1) % size]) as other:
    assert (other.to_host() == (rank + 1) % size).all()
    exchange.barrier()
buffer.close()

late = remap.MpiExchange(timeout=0.4)
if rank == 3:
    exchange.barrier()
else:
    begin = time.monotonic()
    try:
        late.barrier()
        print("no error", flush=True)
    except remap.ShareError as error:
        assert "within 0.4 s" in str(error), error
    assert time.monotonic() - begin < 20
    exchange.barrier()
print(f"rank {rank} done, {step * 1000:.2f} ms a step", flush=True)
# What was being sent when the exchange broke will never be received, so MPI_Finalize could wait for ever.
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
import os
sys.stdout.flush()
os._exit(0)
"""


def mpiexec() -> str:
    """Return the command that starts MPI programs; skip the test where there is none."""
    command = Path(sysconfig.get_path("scripts")) / "mpiexec"
    if importlib.util.find_spec("mpi4py") is None or not command.exists():
        pytest.skip("mpi4py and mpiexec are not installed: pip install remap[mpi]")
    return str(command)


def test_mpi() -> None:
    """Four ranks of MPI, as root, do every step, hand memory round, and see in time that one does not come."""
    done = subprocess.run(
        [mpiexec(), "-n", "4", sys.executable, "-W", "error", "-c", MPI],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        env=os.environ,
    )
    assert done.stdout.count(" done, ") == 4, done.stdout + done.stderr
    assert "no error" not in done.stdout
    assert "Traceback" not in done.stderr


# -- torch --

TORCH = """
import sys
import torch.distributed as dist
import remap
rank, size, path, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size)
exchange = remap.TorchExchange(timeout=60)
assert isinstance(exchange, remap.Exchange)
assert exchange.allgather(b"r" * rank) == [b"r" * one for one in range(size)]
assert exchange.allgather(b"") == [b""] * size
assert exchange.broadcast(b"word" if rank == 1 else None, root=1) == b"word"
part = exchange.split_by_host()
assert (part.rank, part.size) == (rank, size)
part.barrier()
part.allgather(b"x")
parts = exchange._part([[0], [1]])
assert parts.size == 1 and parts.allgather(bytes([rank])) == [bytes([rank])]
print("done", flush=True)
exchange.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_torch(tmp_path: Path, backend: str) -> None:
    """Two ranks of torch.distributed do every step, over the CPU and, with two GPUs, over NCCL."""
    pytest.importorskip("torch")
    if backend == "nccl" and (remap.driver().name != "cuda" or remap.driver().device_count() < 2):
        pytest.skip("NCCL needs two GPUs")
    script = f"import torch; torch.cuda.set_device({{rank}})\n{TORCH}" if backend == "nccl" else TORCH
    command = [sys.executable, "-c"]
    processes = [
        subprocess.Popen(
            [*command, script.replace("{rank}", str(rank)), str(rank), "2", str(tmp_path / "store"), backend],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=2 * LIMIT)
        assert (process.returncode, out) == (0, "done\n"), err
