"""Add two vectors on the device, in plain memory or in memory that is striped over several devices.

    python examples/vector_add.py plain
    python examples/vector_add.py mapped

The two functions `plain` and `mapped` are all that differs: what allocates. The program below them does not know which
one it was given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

import remap
from remap.buffers.plain import allocate_plain
from remap.kernels import shipped
from remap.spans import Span


def plain(size: int, device: remap.Device) -> Span:
    """Allocate memory as cuMemAlloc does."""
    return allocate_plain(size, at=device)


def mapped(size: int, device: remap.Device) -> Span:
    """Allocate memory in equal stripes on every device that this one can reach."""
    return remap.allocate(size, resident=device.backing_devices(), accessing=device)


def add(allocate: Callable[[int, remap.Device], Span], length: int = 50_000) -> bool:
    """Add two vectors of random numbers in memory that `allocate` gives; tell whether the sum is right."""
    device = remap.device()
    random = np.random.default_rng(0)
    a = random.random(length, dtype=np.float32)
    b = random.random(length, dtype=np.float32)
    with (
        allocate(a.nbytes, device) as x,
        allocate(a.nbytes, device) as y,
        allocate(a.nbytes, device) as z,
        remap.load(shipped("vector_add"), device=device) as module,
    ):
        kernel = module.function("vector_add")

        @kernel.host  # what runs in the kernel's place where there is no GPU
        def _(_: object, x: remap.Pointer, y: remap.Pointer, z: remap.Pointer, n: int) -> None:
            np.add(x.read("float32", n), y.read("float32", n), out=z.write("float32", n))

        x.copy_from_host(a)
        y.copy_from_host(b)
        kernel.launch(x, y, z, length, grid=-(-length // 256), block=256)
        c = z.to_host("float32", length)
    return bool(np.abs(c - (a + b)).max() <= 1e-7)


if __name__ == "__main__":
    kinds = {"plain": plain, "mapped": mapped}
    if len(sys.argv) != 2 or sys.argv[1] not in kinds:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(kinds)}")
    right = add(kinds[sys.argv[1]])
    print(f"{sys.argv[1]} memory on the {remap.driver().name} driver: {'PASS' if right else 'FAIL'}")
    sys.exit(not right)
