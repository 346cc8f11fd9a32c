"""What pools of torch cost: sleep and wake, allocation, growth by a token, and a model's first token after waking.

Run with `PYTHONPATH=src:. python benchmarks/torch_memory.py` on a GPU, beside torch_memory_saver where it is installed.
Expected before the first run, on one H200: sleep and wake of 16 GiB in 200 tensors, with kept or prepared host memory,
at most 1.05 times (bytes / link + the raw unmap calls) and 1.05 times bytes / link; with memory that is given back and
touched anew, sleep at 4 GB/s or more. A new segment of a pool takes at most 1.5 times what a plain MemPool's does. An
ElasticTensor grows by a token in less than 10 µs a layer when it is mapped ahead, without a copy. A billion-parameter
model gives its first token within 1.3 times (its bytes / link + one decode step) after the wake was asked for, when
layers arrive in order. In the same memory at least three times as many sequences as with static caches.

With `--small` it runs on CPU torch and the host driver as well, to see that it runs: those figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import remap
from benchmarks.record import write
from remap import GiB, MiB

SERVE = Path(__file__).parents[1] / "examples" / "sleeping_models" / "serve.py"
REPEATS = 5


def seconds(call: Callable[[], Any]) -> float:
    """Return how long a call takes, the device's work included."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def link(size: int) -> dict[str, float]:
    """Return the link's rates in GB/s: the best pinned copies each way, of random bytes."""
    if not torch.cuda.is_available():
        return {"down": 1.0, "up": 1.0}
    host = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)).pin_memory()
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    down = min(seconds(lambda: host.copy_(there, non_blocking=True)) for _ in range(REPEATS))
    up = min(seconds(lambda: there.copy_(host, non_blocking=True)) for _ in range(REPEATS))
    return {"down": size / down / 1e9, "up": size / up / 1e9}


def tensors(count: int, size: int, make: Callable[[int], Any]) -> list[Any]:
    """Return tensors of random bytes."""
    piece = torch.from_numpy(np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8))
    return [make(size).copy_(piece) for _ in range(count)]


def raw_unmap(count: int, size: int) -> float:
    """Return the seconds that unmapping as many segments takes with the driver's own calls."""
    driver = remap.driver()
    properties = remap.types.AllocationProperties(remap.device(0).location)
    made: list[int] = []
    for _ in range(count):
        address = driver.reserve(size)
        handle = driver.create(size, properties)
        driver.map(address, size, handle)
        driver.set_access(address, size, ((remap.device(0).location, remap.Access.READ_WRITE),))
        driver.release(handle)
        made.append(address)

    def unmap() -> None:
        for address in made:
            driver.unmap(address, size)

    took = seconds(unmap)
    for address in made:
        driver.free_range(address, size)
    return took


def sleep_and_wake(total: int, count: int) -> dict[str, Any]:
    """Return sleep and wake of remap's pools: host memory given back, kept, and prepared."""
    size = total // count // (2 * MiB) * (2 * MiB)
    total = size * count
    rates = link(min(total, 4 * GiB))
    raw = raw_unmap(count, size)
    with remap.torch.pool("weights") as pool:
        made = tensors(count, size, lambda n: pool.empty(n, dtype=torch.uint8))
    check = made[-1].clone()
    found: dict[str, Any] = {
        "bytes": total,
        "allocations": count,
        "link, GB/s": rates,
        "raw unmap, s": raw,
        "floor of sleep, s": total / rates["down"] / 1e9 + raw,
        "floor of wake, s": total / rates["up"] / 1e9,
    }
    for kind in ("given back", "kept", "prepared"):
        if kind == "prepared":
            remap.host_pool(prepare=total).wait()
        down, up = [], []
        for number in range(REPEATS + 1):
            down.append(seconds(lambda: remap.torch.sleep("weights")))
            up.append(seconds(lambda kind=kind: remap.torch.wake("weights", keep_host=kind == "kept")))
            if kind == "given back":
                remap.host_pool().wait()  # the machine has it back: the next sleep touches fresh memory
            if kind == "kept" and number == 0:
                down.clear()  # the first of them still touches fresh memory
                up.clear()
        found[kind] = rated(total, down, up, found)
        remap.host_pool().trim()
    down = [0.0] * REPEATS
    up = [0.0] * REPEATS
    for number in range(REPEATS):
        down[number] = seconds(lambda: remap.torch.sleep({"weights": None}))
        up[number] = seconds(lambda: remap.torch.wake("weights"))
    found["without contents"] = {
        "sleep, ms": 1e3 * statistics.median(down),
        "wake, ms": 1e3 * statistics.median(up),
    }
    made[-1].copy_(check)
    return found


def rated(total: int, down: list[float], up: list[float], floors: dict[str, Any] | None) -> dict[str, float]:
    """Return medians, and their ratios to the floors of the same run."""
    sleep, wake = statistics.median(down), statistics.median(up)
    told = {
        "first sleep, GB/s": total / down[0] / 1e9,
        "sleep, s": sleep,
        "wake, s": wake,
        "sleep, GB/s": total / sleep / 1e9,
        "wake, GB/s": total / wake / 1e9,
    }
    if floors is not None:
        told["sleep over its floor"] = sleep / floors["floor of sleep, s"]
        told["wake over its floor"] = wake / floors["floor of wake, s"]
    return told


def other_saver(total: int, count: int, retain: bool) -> dict[str, Any]:
    """Return the same of torch_memory_saver, as it comes or at its best setting."""
    from torch_memory_saver import torch_memory_saver as saver

    size = total // count // (2 * MiB) * (2 * MiB)
    total = size * count
    if retain:
        saver.retain_cpu_backup = True
    with saver.region(tag="weights", enable_cpu_backup=True):
        made = tensors(count, size, lambda n: torch.empty(n, dtype=torch.uint8, device="cuda"))
    down, up = [], []
    for _ in range(REPEATS + 1 if retain else 2):  # as it comes, a pause takes many seconds
        down.append(seconds(lambda: saver.pause("weights")))
        up.append(seconds(lambda: saver.resume("weights")))
    assert made
    return rated(total, [down[0], *down[1:]] if not retain else down[1:], up[1:], None)


def allocation(size: int, count: int) -> dict[str, Any]:
    """Return what a new segment costs in a plain MemPool and in a pool of remap, in turn, in µs."""
    if not torch.cuda.is_available():
        with remap.torch.pool("new") as pool:
            took = [seconds(lambda: pool.empty(size, dtype=torch.uint8)) for _ in range(3)]
        return {"bytes": size, "remap, µs": 1e6 * statistics.median(took)}
    plain_pool = torch.cuda.MemPool()
    plain, ours, held = [], [], []

    def new() -> None:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))

    with remap.torch.pool("new"):
        new()
    with torch.cuda.use_mem_pool(plain_pool):
        new()
    for _ in range(count):
        with torch.cuda.use_mem_pool(plain_pool):
            plain.append(seconds(new))
        with remap.torch.pool("new"):
            ours.append(seconds(new))
    return {
        "bytes": size,
        "plain MemPool, µs": 1e6 * statistics.median(plain),
        "remap, µs": 1e6 * statistics.median(ours),
        "remap over plain": statistics.median(ours) / statistics.median(plain),
    }


def growth(layers: int, tokens: int) -> dict[str, Any]:
    """Return what growing by one token costs in each layer, in µs, with memory mapped ahead."""
    row = (8, 128)
    caches = [
        remap.torch.ElasticTensor(1 << 20, *row, dtype=torch.bfloat16, device=0, rows=1, ahead=16 * MiB)
        for _ in range(layers)
    ]
    pointers = [cache.data_ptr for cache in caches]
    took: list[float] = []
    for token in range(2, tokens + 2):
        start = time.perf_counter()
        for cache in caches:
            cache.resize(token)
            cache.tensor  # noqa: B018 (making the view is part of it)
        took.append((time.perf_counter() - start) / layers)
    assert pointers == [cache.tensor.data_ptr() for cache in caches], "nothing was copied"
    for cache in caches:
        cache.close()
    return {
        "layers": layers,
        "tokens": tokens,
        "median, µs a layer": 1e6 * statistics.median(took),
        "99 %, µs a layer": 1e6 * sorted(took)[int(tokens * 0.99)],
        "mean, µs a layer": 1e6 * statistics.fmean(took),
    }


def flagship(small: bool) -> dict[str, Any]:
    """Return the report of the example, and the first token's floor."""
    with tempfile.NamedTemporaryFile(suffix=".json") as told:
        size = [] if small else ["--billion", "--requests", "16", "--longest", "1024"]
        subprocess.run(
            [sys.executable, str(SERVE), *size, "--report", told.name], check=True, stdout=subprocess.DEVNULL
        )
        found: dict[str, Any] = json.loads(Path(told.name).read_text())
    if torch.cuda.is_available():
        rate = link(2 * GiB)["up"]
        step = found["the median step with plain tensors, seconds"]
        floor = found["bytes of a model's weights"] / rate / 1e9 + step
        found["floor of the first token, s"] = floor
        found["first token over its floor"] = found["the median switch"]["seconds_to_first_token"] / floor
    return found


def child(name: str, small: bool) -> dict[str, Any]:
    """Measure one thing in this process."""
    total, count = (24 * MiB, 6) if small else (16 * GiB, 200)
    if name == "sleep and wake":
        return sleep_and_wake(total, count)
    if name == "allocation":
        return {str(size): allocation(size * MiB, 50) for size in ((4,) if small else (20, 64, 256, 1024))}
    if name == "growth":
        return growth(32 if not small else 4, 5000 if not small else 200)
    if name == "flagship":
        return flagship(small)
    return other_saver(total, count, name.endswith("retain_cpu_backup"))


def measured(name: str, small: bool) -> Any:
    """Measure one thing in a process of its own, so that no cache of one is the luck of another."""
    around: Any = contextlib.nullcontext()
    if name.startswith("torch_memory_saver"):
        import torch_memory_saver

        around = torch_memory_saver.configure_subprocess()
    with around, tempfile.NamedTemporaryFile(suffix=".json") as told:
        command = [
            sys.executable,
            __file__,
            "--only",
            name,
            "--into",
            told.name,
            *(["--small"] if small else []),
        ]
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            return {"failed": done.stdout[-2000:]}
        return json.loads(Path(told.name).read_text())


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="which figures (default: all that can be had)")
    parser.add_argument("--only", help="one of the figures, in this process")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--small", action="store_true")
    told = parser.parse_args()
    names = ["sleep and wake", "allocation", "growth", "flagship"]
    if not told.small:
        with contextlib.suppress(ImportError):
            import torch_memory_saver  # noqa: F401 (whether it is there)

            names += ["torch_memory_saver, as it comes", "torch_memory_saver, with retain_cpu_backup"]
    if remap.driver().name != "cuda":
        remap.use("host", memory=512 * MiB, coherent=True, integrated=False)
    if told.only:
        found = child(told.only, told.small)
        gc.collect()
        if told.into:
            told.into.write_text(json.dumps(found))
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")])
    write("torch_memory", {name: measured(name, told.small) for name in told.names or names})


if __name__ == "__main__":
    main()
