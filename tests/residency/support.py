"""What the tests of residency share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import remap
from remap import MiB
from remap.drivers.wrappers import Faulty
from remap.testing.bench import wait_until

SIZE = 4 * MiB


@cache
def contents(seed: int, size: int = SIZE) -> NDArray[np.uint8]:
    """Return bytes that no other seed gives."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)


@contextmanager
def filled(*sizes: int, **options: object) -> Generator[list[remap.Buffer]]:
    """Make buffers with known contents, and close them at the end."""
    buffers = [remap.allocate(size, resident=0, **options) for size in sizes]  # type: ignore[arg-type]
    try:
        for seed, buffer in enumerate(buffers):
            buffer.copy_from_host(contents(seed, buffer.size))
        yield buffers
    finally:
        for buffer in buffers:
            buffer.close()


def holds(buffers: Iterable[remap.Buffer]) -> bool:
    """Tell whether buffers have the contents that `filled` gave them."""
    return all(np.array_equal(one.to_host(), contents(seed, one.size)) for seed, one in enumerate(buffers))


def settled() -> bool:
    """Tell whether the host memory is given back, now or soon."""
    pool = remap.host_pool()
    pool.wait()
    return wait_until(lambda: (figures := pool.statistics()).held == 0 == figures.leaving + figures.used)


def acts(*calls: Callable[[], object]) -> tuple[Callable[[], object], ...]:
    """Return calls, with the type that a checker cannot find for lambdas."""
    return calls


class Pinning(Faulty):
    """A driver that locks no host memory until it is let."""

    def __init__(self, inner: Any) -> None:
        self.let = threading.Event()
        super().__init__(inner)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def pinning(*arguments: Any, **keywords: Any) -> Any:
            if name == "register_pinned":
                assert self.let.wait(30)
            return call(*arguments, **keywords)

        return pinning
