"""A machine whose memory CPU torch can see; tests of torch are skipped, with the reason, where torch is missing."""

from __future__ import annotations

import gc
import importlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import remap
from remap import MiB


def need(name: str) -> Any:
    """Import a package, or skip with what is missing."""
    try:
        with warnings.catch_warnings():  # what a framework does while it loads is not ours to judge
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        pytest.skip(f"needs {name}: {error}")


@pytest.fixture
def torch() -> Any:
    """The torch module."""
    need("numba")
    return need("torch")


@pytest.fixture
def machine(torch: Any) -> Iterator[Any]:
    """`remap.torch` on a driver of its own: 128 MiB on each of two coherent devices, or CUDA."""
    if os.environ["REMAP_DRIVER"] == "host":
        remap.use("host", devices=2, memory=128 * MiB, coherent=True, integrated=False)
    else:  # kernels are loaded, which takes memory, before a test looks how much is free
        warm = torch.ones(1 << 20, device="cuda")
        (warm.normal_().fill_(1) * 2).sum().item()
        torch.equal(warm, warm.clone())
        del warm
        torch.cuda.empty_cache()
    yield remap.torch
    gc.collect()
    remap.collect()
    for tag, pool in list(remap.torch.pools().items()):
        assert tag == pool.tag
        pool.trim()
    remap.host_pool().trim()
    if os.environ["REMAP_DRIVER"] == "cuda":
        torch.cuda.empty_cache()
    if os.environ["REMAP_DRIVER"] == "host":
        remap.use("host")  # refused while anything lives, so that a test that leaves something behind fails
