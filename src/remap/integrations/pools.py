"""`Pool`: tensors by tag, in memory of remap that can sleep."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from remap import drivers, lifetime
from remap.errors import InUseError, InvalidValueError, PausedError, RemapWarning, not_supported
from remap.integrations import routing
from remap.integrations.adopted import AdoptedBuffer
from remap.integrations.blocks import inside
from remap.integrations.memory import Memory, PoolMemory, memory
from remap.integrations.options import PoolOptions, asked_of
from remap.integrations.tensors import (
    Bytes,
    Tensor,
    device_number,
    extents_of,
    shaped,
    size_of,
    tensor_at,
    torch,
    type_of,
)
from remap.locations import DeviceLike, device
from remap.residency import group
from remap.sizes import counted


class Pool:
    """Memory for tensors under one tag. Made by `remap.torch.pool`; it lives as long as the process.

    Its tensors are ordinary ones, and may outlive every block. On the host driver torch routes nothing, as CPU torch
    has no pools: there `empty` makes tensors in it.
    """

    def __init__(self, found: Memory, tag: str, options: PoolOptions) -> None:
        self.tag = tag
        self.options = options
        self.woken_by = f"remap.torch.wake({tag!r})"
        """The call that wakes it, in the words of whoever made it: for messages."""
        self._memory = found
        self._pool: PoolMemory = found.pool(tag, lambda: asked_of(found.driver, options))
        self._routes: dict[int, routing.Route] = {}
        self._visitors: set[object] = set()
        self._move: _Move | None = None
        with group(tag) as made:  # from now on the tag is known, whether anything is made in it or not
            self._group = made

    @property
    def segments(self) -> tuple[AdoptedBuffer, ...]:
        """Its memory, as buffers, oldest first. Each stays torch's: it can sleep, move and be shared, but not close."""
        self._memory.check(f"the segments of pool {self.tag!r}")
        self._memory.reap()
        return tuple(self._memory.adopt(self._pool))

    @property
    def asleep(self) -> bool:
        """Whether it sleeps: it cannot be entered then, and its tensors cannot be used. Raises `ForkedError`."""
        self._memory.check(f"the state of pool {self.tag!r}")
        held = self._memory.known(self._pool) or self._group.buffers
        return any(one.paused for one in held) if held else self._pool.slept

    def trim(self) -> int:
        """Give back memory that holds no tensor; return how many bytes that were.

        On CUDA it empties torch's other caches, too. Memory of graphs stays.
        """
        self._memory.check(f"pool {self.tag!r} to be trimmed")
        self._memory.reap()
        before = sum(one.size for one in self._memory.adopt(self._pool))
        self._drop_caches()
        empty_caches()
        self._memory.reap()
        return before - sum(one.size for one in self._memory.adopt(self._pool))

    def empty(
        self, *shape: int | Sequence[int], dtype: Any = None, device: DeviceLike | None = None
    ) -> Tensor:
        """Return a new tensor in this pool, whatever block the caller is in; its contents are undefined.

        Raises torch's `OutOfMemoryError` on CUDA, remap's on the host driver, and `PausedError` while the pool sleeps.
        """
        self._memory.check(f"a tensor in pool {self.tag!r}")
        extents = extents_of(shape)
        kind = type_of(dtype)
        size = size_of(kind, extents)
        if drivers.current().name == "cuda":
            at = torch.cuda.current_device() if device is None else device_number(device)
            with self.entered([at]):
                return torch.empty(extents, dtype=kind, device=torch.device("cuda", at))
        at = device_number(device)
        if not size:
            return torch.empty(extents, dtype=kind)
        self._check_coherent(at)
        with self._visiting([at]):
            segment = self._pool.allocate(size, at)
        return shaped(tensor_at(self._memory.driver, at, _Own(self._pool, segment, size)), kind, extents)

    @contextmanager
    def entered(self, devices: Sequence[int] | None) -> Generator[Pool]:
        """Route this thread's allocations into the pool for a block; buffers made there join the group of its tag.

        Raises `InUseError` when it ends and is not the innermost block of its thread; nothing is lost then.
        """
        if drivers.current().name != "cuda":
            with self._visiting([] if devices is None else devices), group(self.tag), inside(self):
                yield self
            return
        chosen = routing.initialized_devices() if devices is None else list(devices)
        routing.warm_up(torch.cuda.current_device())
        with self._visiting(chosen), group(self.tag):
            taken: dict[int, Any] = {}
            try:
                for at in chosen:
                    taken[at] = self._route(at).take()
                with routing.routed(taken), inside(self):
                    yield self
            finally:
                if self.options.release == "region":
                    routing.let_all_go(taken)
                else:
                    for at, one in taken.items():
                        self._routes[at].put(one)

    @contextmanager
    def graph(self, graph: Any, *, pool: Any = None, **options: Any) -> Generator[Pool]:
        """Capture into a `torch.cuda.CUDAGraph` whose memory lies in this pool; options are `torch.cuda.graph`'s.

        Captures with the same `pool`, any handle of torch's, share memory, with torch's rules for that; it is never
        used itself. Enter this outside of blocks of the same pool. The graph stays valid over sleep and wake; it must
        not be replayed while the pool sleeps. Raises `NotSupportedError` without CUDA.
        """
        self._check_cuda("a graph")
        at = torch.cuda.current_device()
        with self._visiting([at]):
            mem_pool = self._route(at).for_graphs(pool)
            try:
                with (
                    routing.own_workspaces(),
                    lifetime.capturing(),
                    self._memory.capturing(),
                    torch.cuda.graph(graph, pool=mem_pool.id, **options),
                ):
                    yield self
            finally:
                if pool is None:
                    routing.let_go(at, mem_pool)

    def graph_pool(self, device: DeviceLike | None = None) -> tuple[int, int]:
        """Return a handle for `torch.cuda.graph(pool=…)`, for captures whose memory is to lie in this pool.

        Raises `NotSupportedError` without CUDA.
        """
        self._check_cuda("graph_pool")
        at = torch.cuda.current_device() if device is None else device_number(device)
        with self._visiting([at]):
            found: tuple[int, int] = self._route(at).for_graphs(self.tag).id
        return found

    # -- for sleeping, which has made sure that nobody is inside --

    def _warn_unused(self) -> None:
        """Say once that nothing was ever made here, where that would pass for a test of code that needs a GPU."""
        if self._memory.driver.name == "cuda" or self._pool.used or self._group.buffers:
            return
        self._pool.used = True  # said
        warnings.warn(
            f"pool {self.tag!r} is put to sleep, and nothing was ever made in it: CPU torch routes nothing into pools. "
            "Make tensors with remap.torch.empty, or move a module in with remap.torch.move_in",
            RemapWarning,
            stacklevel=3,
        )

    def _note_sleep(self) -> None:
        # Where all there is are other buffers of its group, those tell, and may go unseen.
        self._pool.slept = bool(self._memory.known(self._pool)) or not self._group.buffers

    def _note_wake(self) -> None:
        self._pool.slept = False

    def _drop_caches(self) -> None:
        for route in list(self._routes.values()):
            route.drop_caches()

    # An interrupt comes where a call returns, leaving a lock included. So what is set is set inside the block that
    # resets it, and reset in one step: a pool that is "being woken" for ever could neither be entered nor sleep.

    def _begin(self, move: _Move) -> None:
        with self._memory.lock:
            if self._visitors or self._moved_by:
                rule = (
                    f"{counted(len(self._visitors), 'block')} inside of it"
                    if self._visitors
                    else f"it is being {self._moved_by}"
                )
                raise InUseError(
                    f"pool {self.tag!r} to be {move.doing}",
                    rule=rule,
                    next_step="Leave the blocks, or let that end, first",
                )
            self._move = move

    @property
    def _moved_by(self) -> str:
        move = self._move
        return "" if move is None or move.over else move.doing

    @contextmanager
    def _visiting(self, devices: Sequence[int]) -> Generator[None]:
        self._memory.check(f"pool {self.tag!r} to be entered")
        token = object()
        try:
            with self._memory.lock:
                if self._moved_by:
                    raise InUseError(
                        f"pool {self.tag!r} to be entered",
                        rule=f"it is being {self._moved_by}",
                        next_step="Let that end first",
                    )
                if self.asleep:
                    raise PausedError(
                        f"pool {self.tag!r} to be entered",
                        rule="it sleeps, and torch would hand out memory that is not there",
                        next_step=f"Call {self.woken_by} first",
                    )
                self._visitors.add(token)
            for at in devices:
                self._memory.ready(at)
            yield
        finally:
            self._visitors.discard(token)

    def _route(self, at: int) -> routing.Route:
        with self._memory.lock:
            found = self._routes.get(at)
            if found is not None:
                return found
        routing.check_torch()
        made = routing.Route(self._pool, at)
        if routing.expandable_segments():
            self._probe(made)
        with self._memory.lock:
            return self._routes.setdefault(at, made)

    def _probe(self, route: routing.Route) -> None:
        """Make sure that torch asks our callbacks although its expandable segments are on (trap 25)."""
        before = self._memory.table.counters(route.device).allocated
        mem_pool = route.take()
        try:
            with routing.routed({route.device: mem_pool}):
                torch.empty(1, dtype=torch.uint8, device=torch.device("cuda", route.device))
        finally:
            route.put(mem_pool)
        if self._memory.table.counters(route.device).allocated == before:
            raise InvalidValueError(
                f"pool {self.tag!r}",
                rule=f"torch {torch.__version__} uses expandable segments in pools, too, and passes the callbacks over",
                next_step="Leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or update torch to 2.9 or newer",
            )

    def _check_cuda(self, asked: str) -> None:
        routing.check_torch()
        if self._memory.driver.name != "cuda":
            raise not_supported(
                "torch.cuda.MemPool",
                f"{asked} in pool {self.tag!r}",
                f"graphs of torch are CUDA's, and this is the {self._memory.driver.name} driver",
                'Begin with remap.use("cuda")',
            )

    def _check_coherent(self, at: int) -> None:
        if not device(at).capabilities["coherent"]:
            raise InvalidValueError(
                f"a CPU tensor in pool {self.tag!r}",
                rule="the CPU may not look at memory of this simulated device, and CPU torch knows no other",
                next_step='Begin with remap.use("host", coherent=True, integrated=False)',
            )

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied and pickled: a tag has one pool, which knows who is inside."""
        raise TypeError(
            f"a copy of pool {self.tag!r}: a tag has one pool. Enter remap.torch.pool({self.tag!r})"
        )

    def __repr__(self) -> str:
        """Return the tag and the state."""
        state = self._memory.past or ("asleep" if self.asleep else "")
        return f"<remap.torch.Pool {self.tag!r}{state and f', {state}'}>"


def empty_caches() -> None:
    """Let torch give back what it caches, in pools that were dropped while tensors were in them, too."""
    if drivers.current().name == "cuda":
        torch.cuda.empty_cache()


class _Own(Bytes):
    """The bytes of a tensor that remap itself allocated in a pool, for as long as a tensor needs them."""

    def __init__(self, pool: PoolMemory, segment: AdoptedBuffer, size: int) -> None:
        super().__init__(segment.record.address, size, segment)
        self._pool, self._segment = pool, segment

    def __del__(self) -> None:
        self._pool.free_later(self._segment)


class _Move:
    """A sleep or a wake of several pools: it is over for all of them in one step."""

    __slots__ = ("doing", "over")

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self.over = False


@contextmanager
def moving(chosen: Iterable[Pool], doing: str) -> Generator[None]:
    """Keep everyone out of pools for a block that takes their memory away, or gives it back."""
    move = _Move(doing)
    try:
        for pool in chosen:
            pool._begin(move)
        yield
    finally:
        move.over = True


@contextmanager
def outside() -> Generator[None]:
    """Let tensors that this thread makes be torch's own for a block, inside of pools, too; torch's caches go with it.

    `remap.torch.empty` makes ordinary ones there as well: in memory of the GPU, or of the CPU on the host driver.
    """
    with routing.outside(), inside(None):
        yield


def pools() -> dict[str, Pool]:
    """Return the pools of this process by tag, for the present driver."""
    return memory().by_tag


def pool_of(tag: str, options: PoolOptions, *, asked: bool) -> Pool:
    """Return the pool of a tag, a new one where there is none; `asked` says whether the options were named."""
    present = memory()
    if tag not in present.by_tag and drivers.current().name == "cuda":
        routing.check_torch()
    with present.lock:  # two pools of one tag would not see each other's blocks, and could sleep under them
        found: Pool | None = present.by_tag.get(tag)
        if found is None:
            found = present.by_tag[tag] = Pool(present, tag, options)
            return found
    if asked and found.options != options:
        raise InvalidValueError(
            f"pool {tag!r} with {options}",
            rule=f"it was made with {found.options}, and memory of both kinds cannot have one tag",
            next_step="Use another tag",
        )
    return found
