"""What the tests of residency share."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import remap
from remap import MiB, residency
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


PLACES = str(Path(residency.__file__).parent)


class Interrupted(BaseException):
    """What the handler of a signal raises."""


def interrupted(act: Callable[[], object], nth: int) -> bool:
    """Do `act`, raise at the `nth` place where the interpreter looks for signals in this room, and tell whether it did.

    It looks where a function of Python begins, and where one of C has returned.
    """
    left = nth

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in {"call", "c_return"} and frame.f_code.co_filename.startswith(PLACES):
            left -= 1
            if not left:
                sys.setprofile(None)
                raise Interrupted

    sys.setprofile(look)
    try:
        act()
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
    return False
