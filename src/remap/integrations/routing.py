"""Routing: how allocations of a thread get into a pool's memory, by torch's `MemPool`, for the time of a block."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from remap.errors import not_supported
from remap.integrations.memory import PoolMemory
from remap.integrations.support import immortal
from remap.integrations.tensors import torch
from remap.lifetime import captures_running


class Route:
    """The `MemPool`s of one pool on one device: one for each thread that is inside, kept for the next.

    A `MemPool` belongs to the device that was current when it was made, and torch lets one thread at a time into each.
    Letting go of one is how torch is told to give back what it caches there; tensors in it live on (trap 23).
    """

    def __init__(self, pool: PoolMemory, device: int) -> None:
        self.device = device
        # It has no count of the tensors that need it, so it stays for ever; the callbacks do anyway.
        self._allocator: Any = immortal(
            torch._C._cuda_customAllocator(pool.allocate_address, pool.free_address)
        )
        self._idle: list[Any] = []
        self._for_graphs: dict[Any, Any] = {}

    def take(self) -> Any:
        """Return a `MemPool` that no thread is in."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._make()

    def put(self, mem_pool: Any) -> None:
        """Keep a `MemPool` for the next thread."""
        self._idle.append(mem_pool)

    def for_graphs(self, handle: Any = None) -> Any:
        """Return a `MemPool` for a capture: a new one, or the one that stands for a handle of the caller's.

        That one is never let go, as captures share it. A new one may be: its graph keeps the memory.
        """
        if handle is None:
            return self._make()
        for known in self._for_graphs.values():
            if known.id == handle:
                return known
        found = self._for_graphs.get(handle)
        if found is None:
            found = self._for_graphs[handle] = self._make()
        return found

    def drop_caches(self) -> None:
        """Let go of the `MemPool`s that no thread is in."""
        while self._idle:
            let_go(self.device, self._idle.pop())

    def _make(self) -> Any:
        return _new(self.device, self._allocator)


def _new(device: int, *allocator: Any) -> Any:
    with torch.cuda.device(device):
        return immortal(torch.cuda.MemPool(*allocator))


def let_go(device: int, mem_pool: Any) -> None:
    """Tell torch that nobody will enter a `MemPool` again; what it caches goes with the next `empty_cache`.

    Its destructor would see to both, but ends the process if any thread has a block or a capture under way on the
    device just then (torch 2.11). So it never runs: the object, a few hundred bytes, stays.
    """
    torch._C._cuda_releasePool(device, mem_pool.id)


def let_all_go(mem_pools: dict[int, Any]) -> None:
    """Let go of the `MemPool`s of several devices, and of what torch caches, there and elsewhere."""
    if not mem_pools:
        return
    while mem_pools:
        let_go(*mem_pools.popitem())
    if not (captures_running() or torch.cuda.is_current_stream_capturing()):
        torch.cuda.empty_cache()


class _Routed:
    """One block of a thread: the `MemPool`s that it began by device, and those of outer blocks that it ended for it."""

    __slots__ = ("begun", "paused")

    def __init__(self) -> None:
        self.begun: dict[int, Any] = {}
        self.paused: dict[int, Any] = {}


class _Thread(threading.local):
    """The blocks that the present thread is inside of, outermost first.

    And the streams, by device and handle, that have a workspace of cuBLAS.
    """

    def __init__(self) -> None:
        self.inside: list[_Routed] = []
        self.warm: set[tuple[int, int]] = set()


_thread = _Thread()


@contextmanager
def routed(mem_pools: dict[int, Any]) -> Generator[None]:
    """Route the allocations of this thread, on each device into its `MemPool`, for a block.

    The block that this one is inside of ends for that time: torch would ask it first, in versions up to 2.8. Where
    this one is not the innermost when it ends, those that were entered since go on.
    """
    block, inside = _Routed(), _thread.inside
    try:
        for at in mem_pools:
            outer = next((one.begun[at] for one in reversed(inside) if at in one.begun), None)
            if outer is not None:
                block.paused[at] = outer  # noted before: an interrupt comes when the call has returned
                _end(at, outer)
        for at, one in mem_pools.items():
            block.begun[at] = one
            _begin(at, one)
        inside.append(block)
        yield
    finally:
        if inside and inside[-1] is block:
            inside.pop()
        elif block in inside:
            _take_out(block, inside)
        try:
            while block.begun:
                _end(*block.begun.popitem())
        finally:
            while block.paused and inside is _thread.inside:  # torch begins for the thread that asks
                _begin(*block.paused.popitem())


def _take_out(block: _Routed, inside: list[_Routed]) -> None:
    """Take a block out from under those that were entered since: what it paused, they have paused now."""
    later = inside[inside.index(block) + 1 :]
    for at in list(block.begun):
        over = next((one for one in later if at in one.begun), None)
        if over is None:
            continue
        del block.begun[at], over.paused[at]  # ended when that block began
        if at in block.paused:
            over.paused[at] = block.paused.pop(at)
    inside.remove(block)


@contextmanager
def outside() -> Generator[None]:
    """Route the allocations of this thread into memory of torch's own for a block, which ends with it."""
    plain: dict[int, Any] = {}
    try:
        for at in sorted({at for block in _thread.inside for at in block.begun}):
            plain[at] = _new(at)
        with routed(plain):
            yield
    finally:
        let_all_go(plain)


def warm_up(at: int) -> None:
    """Let cuBLAS have its workspace for the current stream, outside of any pool.

    It keeps one for each thread and stream, from the first product on. Made inside of a block, that would sleep with
    the pool, and products that have nothing to do with it would fault.
    """
    stream = torch.cuda.current_stream(at).cuda_stream
    if (at, stream) in _thread.warm or _thread.inside or torch.cuda.is_current_stream_capturing():
        return
    with torch.cuda.device(at):
        for dtype in (torch.float32, torch.bfloat16):
            one = torch.ones(16, 16, dtype=dtype, device=torch.device("cuda", at))
            torch.nn.functional.linear(one, one, one[0])
            torch.mm(one, one)
    _thread.warm.add((at, stream))


@contextmanager
def own_workspaces() -> Generator[None]:
    """Let a capture have workspaces of cuBLAS of its own, in its own pool, which nothing else uses after it."""
    clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()
    try:
        yield
    finally:
        clear()


def _begin(at: int, mem_pool: Any) -> None:
    torch._C._cuda_beginAllocateCurrentThreadToPool(at, mem_pool.id)


def _end(at: int, mem_pool: Any) -> None:
    """End what `_begin` began, or do nothing where it was not: torch says so then, and has counted nothing."""
    try:
        torch._C._cuda_endAllocateToPool(at, mem_pool.id)
    except RuntimeError as error:
        if "not currently recording" not in str(error):
            raise
        return
    torch._C._cuda_releasePool(at, mem_pool.id)


def check_torch() -> None:
    """Raise `NotSupportedError` where torch cannot route allocations, before anything is allocated (trap 25)."""
    why = step = ""
    if not torch.cuda.is_available():
        why, step = "this torch has no CUDA", "Install a CUDA build of torch, or use the host driver"
    elif torch.version.hip:
        why, step = (
            "this torch is built for ROCm, and remap speaks to the CUDA driver",
            "Use torch_memory_saver there",
        )
    elif not hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool"):
        why, step = (
            f"torch {torch.__version__} cannot route one thread's allocations",
            "Update torch to 2.8 or newer",
        )
    elif torch.cuda.get_allocator_backend() != "native":
        why = f"torch's allocator is {torch.cuda.get_allocator_backend()}, and only the native one has pools"
        step = "Leave backend: out of PYTORCH_CUDA_ALLOC_CONF"
    elif os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        why, step = "PYTORCH_NO_CUDA_MEMORY_CACHING is set, and torch then passes pools over", "Unset it"
    if why:
        raise not_supported("torch.cuda.MemPool", "a pool of torch", why, step)


def expandable_segments() -> bool:
    """Tell whether torch's allocator was told to use expandable segments."""
    told = ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    settings: Any = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return bool(settings.get("expandable_segments", "expandable_segments:True" in told.replace(" ", "")))


def initialized_devices() -> list[int]:
    """Return the devices that this process has a context on, the current one in any case."""
    torch.cuda.init()
    current = torch.cuda.current_device()
    has: Any = torch._C._cuda_hasPrimaryContext
    return [at for at in range(torch.cuda.device_count()) if at == current or has(at)]
