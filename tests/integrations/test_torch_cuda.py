"""Pools under CUDA torch: what torch routes, what it says when memory is short, graphs, threads, devices, the GIL."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest

import remap
from remap import MiB

from . import libc

pytestmark = pytest.mark.cuda


def ours(tensor: Any) -> bool:
    """Tell whether a tensor lies in a pool's memory."""
    try:
        remap.torch.buffer_of(tensor)
    except remap.InvalidValueError:
        return False
    return True


def test_torch_allocates_in_the_pool(torch: Any, machine: Any) -> None:
    """Whatever torch makes inside of a block lies in the pool, and what it makes outside does not."""
    outside = torch.ones(100, device="cuda")
    with machine.pool("weights") as pool:
        tensor = torch.full((1 << 20,), 3.0, device="cuda")
        layer = torch.nn.Linear(512, 512, device="cuda")
        product = tensor * 2
    assert all(ours(one) for one in (tensor, layer.weight, layer.bias, product))
    assert not ours(outside)
    assert not ours(torch.ones(100, device="cuda"))
    assert sum(one.size for one in pool.segments) >= tensor.nbytes + product.nbytes
    assert float(product[-1]) == 6
    with machine.outside():
        assert not ours(torch.ones(5 << 20, device="cuda"))


def test_out_of_memory_is_torchs_own(torch: Any, machine: Any) -> None:
    """A null pointer becomes torch.OutOfMemoryError; the next allocation works (traps 8, 9)."""
    with machine.pool("weights"):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
        assert float(torch.ones(10, device="cuda").sum()) == 10


def test_sleep_empties_what_torch_caches(torch: Any, machine: Any) -> None:
    """Segments without tensors are given back first, are not copied, and are never handed out again."""
    with machine.pool("weights") as pool:
        kept = torch.ones(16 << 20, device="cuda")
        dropped = torch.ones(16 << 20, device="cuda")
    del dropped
    assert len(pool.segments) == 2
    moved = machine.sleep("weights")
    assert moved.buffers == 1
    assert moved.bytes == 64 * MiB
    machine.wake("weights")
    with machine.pool("weights"):
        again = torch.full((16 << 20,), 2.0, device="cuda")
    assert float(kept.mean()) == 1
    assert float(again.mean()) == 2


def test_what_is_freed_in_a_region(torch: Any, machine: Any) -> None:
    """With release="region" it goes back at its end, else with trim; tensors outlive both (trap 23)."""
    free = remap.device(0).memory().free
    with machine.pool("regions", release="region") as pool:
        kept = torch.ones(4 << 20, device="cuda")
        torch.ones(64 << 20, device="cuda")
    assert len(pool.segments) == 1
    with machine.pool("weights") as other:
        torch.ones(64 << 20, device="cuda")
    assert len(other.segments) == 1
    assert other.trim() == 256 * MiB
    assert not other.segments
    assert float(kept.mean()) == 1
    del kept
    gc.collect()
    torch.cuda.empty_cache()
    assert remap.device(0).memory().free >= free - 32 * MiB


def test_blocks_that_end_within_others(torch: Any, machine: Any) -> None:
    """Whatever else is routed just then, memory goes back, and the process goes on."""
    foreign = torch.cuda.MemPool()
    with machine.pool("regions", release="region") as pool, torch.cuda.use_mem_pool(foreign):
        kept = machine.pools()["regions"].empty(1000).fill_(1)
        with machine.pool("regions"):
            torch.ones(64 << 20, device="cuda")
        with machine.outside():
            torch.ones(64 << 20, device="cuda")
        with machine.pool("weights"):
            torch.ones(64 << 20, device="cuda")
        machine.pools()["weights"].trim()
    assert sum(one.size for one in pool.segments) <= 32 * MiB
    assert not machine.pools()["weights"].segments
    assert float(kept.sum()) == 1000


def test_blocks_that_end_out_of_order(torch: Any, machine: Any) -> None:
    """Torch is told so, too: what was entered last goes on, and nothing is routed when all have ended."""
    blocks = {tag: machine.pool(tag) for tag in ("a", "b", "c")}
    pools = {tag: block.__enter__() for tag, block in blocks.items()}
    for tag in ("a", "b"):
        with pytest.raises(remap.InUseError, match="since"):
            blocks[tag].__exit__(None, None, None)
        inner = torch.ones(64 << 20, device="cuda")
        assert machine.buffer_of(inner).tag == "c"
    blocks["c"].__exit__(None, None, None)
    plain = torch.ones(64 << 20, device="cuda")
    with pytest.raises(remap.InvalidValueError, match="pool"):
        machine.buffer_of(plain)
    with machine.pool("b"), machine.outside():
        plain = machine.empty(64 << 20)
        assert plain.is_cuda
    with pytest.raises(remap.InvalidValueError, match="pool"):
        machine.buffer_of(plain)
    assert not pools["a"].segments


def test_deleting_a_tensor_under_a_running_kernel(torch: Any, machine: Any) -> None:
    """Memory is not unmapped under work that uses it: the free callback waits, as cudaFree does (trap 11)."""
    with machine.pool("weights", release="pool") as pool:
        tensor = torch.ones(64 << 20, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            total = tensor.sum()
    del tensor
    pool.trim()
    side.synchronize()
    assert float(total) == 64 << 20


def test_graphs_stay_valid(torch: Any, machine: Any) -> None:
    """A graph over pool memory, and one whose own memory is in a pool, replay right after sleep and wake (trap 19)."""
    with machine.pool("weights"):
        weights = torch.randn(1024, 1024, device="cuda")
        given = torch.randn(1024, 1024, device="cuda")
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        for _ in range(2):
            (given @ weights).relu().sum(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with machine.graph(graph, "graphs"):
        result = (given @ weights).relu().sum(1)
    assert ours(result)
    graph.replay()
    torch.cuda.synchronize()
    expected = result.clone()
    for _ in range(3):
        graph.replay()  # still running when sleep is asked for: it waits (trap 11)
        machine.sleep({"weights": "host", "graphs": None})
        machine.wake()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)
    del graph, result


def test_a_capture_refuses_sleep(torch: Any, machine: Any) -> None:
    """Sleeping inside of a capture is refused, and the capture goes on (trap 13)."""
    with machine.pool("weights"):
        weights = torch.ones(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(remap.InUseError, match="captured"):
            machine.sleep("weights")
        result = weights * 2
    graph.replay()
    torch.cuda.synchronize()
    assert float(result.sum()) == 2048
    del graph, result


def test_graphs_share_memory_by_handle(torch: Any, machine: Any) -> None:
    """Captures with one handle share memory of the pool; without one each has its own."""
    handle = torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(4)]
    results = []
    for graph, pool in zip(graphs, (handle, handle, None, None), strict=True):
        with machine.graph(graph, "graphs", pool=pool):
            results.append(torch.ones(1 << 20, device="cuda") * 3)
    for graph, result in zip(graphs, results, strict=True):
        graph.replay()
        torch.cuda.synchronize()
        assert float(result.mean()) == 3
    assert all(ours(result) for result in results)
    graphs.clear()
    results.clear()


def test_threads_in_one_pool(torch: Any, machine: Any) -> None:
    """Several threads are inside of the same pool, and of others, at the same time (invariant 13)."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            for tag in ("shared", f"own{number}"):
                barrier.wait(60)
                with machine.pool(tag):
                    tensors = [torch.full((1 << 18,), float(number), device="cuda") for _ in range(20)]
                assert all(ours(one) for one in tensors)
                assert all(float(one.mean()) == number for one in tensors)
        except BaseException as error:  # noqa: BLE001 (raised below)
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures


def test_nested_pools(torch: Any, machine: Any) -> None:
    """The inner block decides inside, the outer one again after it, and one pool may be entered twice."""
    with machine.pool("outer"):
        first = torch.ones(10, device="cuda")
        with machine.pool("inner"):
            second = torch.ones(10, device="cuda")
            with machine.pool("outer"):
                third = torch.ones(10, device="cuda")
        fourth = torch.ones(10, device="cuda")
    assert [machine.buffer_of(one).tag for one in (first, second, third, fourth)] == [
        "outer", "inner", "outer", "outer",
    ]  # fmt: skip


@pytest.mark.two_devices
def test_the_device_is_the_tensors(torch: Any, machine: Any) -> None:
    """Memory lies on the tensor's device whatever is current, when it is made and when it is freed (trap 42)."""
    torch.ones(1, device="cuda:1")
    with machine.pool("weights"):
        tensors = [torch.full((1 << 20,), float(at), device=f"cuda:{at}") for at in (0, 1)]
        with torch.cuda.device(1):
            tensors.append(torch.full((1 << 20,), 1.0, device="cuda"))
    assert [machine.buffer_of(one).device for one in tensors] == [0, 1, 1]
    machine.sleep("weights")
    assert machine.status()["weights"].devices == (0, 1)
    machine.wake("weights")
    assert [float(one.mean()) for one in tensors] == [0, 1, 1]
    before = remap.device(1).memory().free
    with torch.cuda.device(0):
        del tensors[1:]
        gc.collect()
        machine.pools()["weights"].trim()
    assert remap.device(1).memory().free > before


def test_memory_that_others_can_register(torch: Any, machine: Any) -> None:
    """Shareable pools have one chunk a segment, and handles of the kinds that can be had: fabric may be left out."""
    with machine.pool("registered", shareable=["posix_fd", "fabric"]):
        tensor = torch.ones(100, device="cuda")
    buffer = machine.buffer_of(tensor)
    assert len(buffer.chunks) == 1
    outcome = buffer.outcome()
    assert "posix_fd" in outcome.handle_types
    assert ("fabric" in outcome.handle_types) == bool(remap.device(0).capabilities["fabric"])
    with machine.export(tensor).memory as exported:
        assert exported.size == tensor.nbytes


def test_callbacks_run_while_another_thread_has_the_gil(torch: Any, machine: Any) -> None:
    """The driver is called by a native thread for as long as another thread keeps the GIL (trap 24)."""
    with machine.pool("gil") as pool:
        torch.ones(1, device="cuda")
    rounds = 100
    start, told = libc.native_thread(
        pool._pool.allocate_address, pool._pool.free_address, rounds, touch=False
    )
    start(time.monotonic_ns() + 50_000_000)
    held_from = time.monotonic_ns()
    ctypes.PyDLL(None).usleep(2_000_000)
    held_until = time.monotonic_ns()
    deadline = time.monotonic() + 60
    while not told[4] and time.monotonic() < deadline:
        pass
    assert told[3] == rounds
    assert held_from < told[1] < told[2] < held_until


def test_statistics_while_another_thread_allocates(torch: Any, machine: Any) -> None:
    """A thread that asks torch for statistics, lock and all, does not deadlock with the callbacks (trap 24)."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            torch.cuda.memory_stats()
            torch.cuda.memory_snapshot()
            machine.status()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        with machine.pool("weights", release="pool") as pool:
            for _ in range(50):
                torch.ones(8 << 20, device="cuda")
        pool.trim()
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "settings", ["expandable_segments:True", "expandable_segments:True,max_split_size_mb:64"]
)
def test_expandable_segments(torch: Any, settings: str) -> None:
    """Pools work beside torch's own expandable segments, or are refused before anything is allocated (trap 25)."""
    assert torch is not None
    code = """
    import remap, torch
    plain = torch.ones(1 << 20, device="cuda")
    try:
        with remap.torch.pool("weights"):
            tensor = torch.full((1 << 20,), 2.0, device="cuda")
    except remap.InvalidValueError as error:
        print(error)
    else:
        remap.torch.buffer_of(tensor)
        remap.torch.sleep("weights"); remap.torch.wake("weights")
        assert float(tensor.mean()) == 2 and float(plain.mean()) == 1
        print("works")
    """
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "works\n" or "expandable" in done.stdout


def test_an_allocator_without_caching_is_refused(torch: Any) -> None:
    """Where torch would pass pools over, they are refused before anything is allocated (trap 25)."""
    assert torch is not None
    code = """
    import remap, torch
    try:
        with remap.torch.pool("weights"):
            pass
    except remap.NotSupportedError as error:
        print("refused")
    """
    for name, value in (
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),
    ):
        command = [sys.executable, "-c", textwrap.dedent(code)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=110, env={**os.environ, name: value}
        )
        assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_training(torch: Any, machine: Any) -> None:
    """Weights and gradients in pools train as plain ones do, with sleeps between the steps."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).cuda()
    with machine.pool("model"):
        pooled = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).cuda()
        pooled.load_state_dict(plain.state_dict())
    given = torch.randn(32, 64, device="cuda")
    for model in (plain, pooled):
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(given).square().mean().backward()
            optimizer.step()
            if model is pooled:
                machine.sleep("model")
                machine.wake("model")
    assert all(
        torch.equal(one, two) for one, two in zip(plain.parameters(), pooled.parameters(), strict=True)
    )


def test_ending_with_tensors_in_pools(torch: Any) -> None:
    """A process whose tensors outlive everything ends in silence, asleep or awake, with graphs too (trap 22)."""
    assert torch is not None
    for state in ("", 'remap.torch.sleep({"weights": "host", "graphs": None})'):
        code = f"""
        import remap, torch
        with remap.torch.pool("weights"):
            tensor = torch.ones(1 << 22, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with remap.torch.graph(graph, "graphs"):
            result = tensor * 2
        {state}
        """
        command = [sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
        assert (done.returncode, done.stderr) == (0, "")
