"""vLLM's sleep mode over remap: a memory allocator in `CuMemAllocator`'s place, and a sleep-mode backend named `remap`.

    REMAP_VLLM=1 vllm serve MODEL --enable-sleep-mode --sleep-mode-backend remap

vLLM loads `register` in each of its processes, as a plugin. The environment variable puts the allocator in place before
the weights are loaded, which is earlier than vLLM looks for the backend; versions without backends need nothing else.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Collection, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, NamedTuple

from remap.errors import InvalidValueError, NotSupportedError, OutOfMemoryError, not_supported
from remap.integrations.memory import memory
from remap.integrations.options import PoolOptions, Release
from remap.integrations.pools import Pool, pool_of, pools
from remap.integrations.routing import check_torch
from remap.integrations.sleeping import sleep, wake
from remap.integrations.support import missing, switched_on
from remap.lifetime import capturing, undo
from remap.residency.stores import Keep

FLAG = "REMAP_VLLM"
"""The environment variable that puts the allocator in `CuMemAllocator`'s place."""

DEFERRABLE = ("weights", "kv_cache")
"""Tags that a selective wake may leave asleep; it wakes all others, as vLLM's own allocator does."""

KEPT = ("runtime", "cudagraph")
"""Tags whose contents are kept at every level, as nobody writes them anew: state of the runner, memory of graphs."""

OPTIONAL = frozenset(
    {
        "close",
        "cudagraph_pool",
        "discard",
        "python_free_callback",
        "python_malloc_callback",
        "release_pools",
    }
)
"""What some versions of `CuMemAllocator` have and others lack."""

KNOWN = OPTIONAL | frozenset(
    {
        "get_current_usage",
        "get_instance",
        "sleep",
        "use_memory_pool",
        "wake_up",
    }
)
"""The public methods of `CuMemAllocator` that this allocator stands for. A version with others is refused."""

_HOOKS: dict[str, tuple[Any, ...]] = {"run_before_unmap_hooks": ((), ()), "run_after_map_hooks": ((),)}
"""What newer versions call around sleeping and waking (`register_tag_hooks`), and with how much."""


class RemapAllocator:
    """vLLM's memory allocator over pools: `vllm.device_allocator.MemAllocator`."""

    default_tag: ClassVar[str] = "default"

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Generator[None]:
        """Let tensors that are made inside sleep and wake by their tag."""
        block = _Block(self.default_tag if tag is None else tag)
        # What is freed while weights are loaded goes back when they are.
        with _pool(block.tag, release="region").entered(None), block.others:
            _thread.blocks.append(block)
            try:
                yield
            finally:
                _thread.blocks.remove(block)

    @property
    def current_tag(self) -> str:
        """The tag of what this thread makes. Another one can be assigned, for the rest of the innermost block."""
        return _thread.blocks[-1].current if _thread.blocks else self.default_tag

    @current_tag.setter
    def current_tag(self, tag: str) -> None:
        if not _thread.blocks:  # nothing has a tag there
            return
        block = _thread.blocks[-1]
        block.others.close()
        block.current = block.tag
        if tag != block.tag:
            block.others.enter_context(_pool(tag, release="region").entered(None))
            block.current = tag

    def sleep(self, offload_tags: tuple[str, ...] | list[str] | str | None = None) -> None:
        """Put all memory to sleep in one transaction: contents of these tags are kept, the others' given up."""
        kept = (self.default_tag,) if offload_tags is None else offload_tags
        kept = (kept,) if isinstance(kept, str) else tuple(kept)
        self._sleep({tag: "host" if tag in kept else None for tag in _tags()})

    def discard(self, tags: tuple[str, ...] | list[str] | str) -> None:
        """Put the memory of these tags to sleep, and give its contents up."""
        chosen = (tags,) if isinstance(tags, str) else tuple(tags)
        self._sleep({tag: None for tag in _tags() if tag in chosen})

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake the memory of these tags, or all; raises `ShortOfMemoryError`, with all asleep, where it is short."""
        chosen = [tag for tag in _tags() if tags is None or tag in tags or tag not in DEFERRABLE]
        with _out_of_memory():
            wake([_name(tag) for tag in chosen if pools()[_name(tag)].asleep], keep_host=_keeps_host())
        _run_hooks("run_after_map_hooks")

    def get_current_usage(self) -> int:
        """Return the bytes of all pools, asleep or not."""
        return sum(one.size for tag in _tags() for one in pools()[_name(tag)].segments)

    @contextmanager
    def cudagraph_pool(self) -> Generator[tuple[int, int]]:
        """Yield the handle of a pool for a capture whose memory sleeps and wakes under the tag `cudagraph`.

        Raises `NotSupportedError` where torch has no CUDA.
        """
        check_torch()
        found = _pool("cudagraph")
        with capturing(), memory().capturing():
            yield found.graph_pool()

    def release_pools(self) -> None:
        """Give back memory that holds no tensor any more; a worker that shuts down asks for that, any number of times.

        Pools themselves stay for as long as torch may call them, so nothing else has to be done before the end.
        """
        gc.collect()
        for tag in _tags():
            if not pools()[_name(tag)].asleep:
                pools()[_name(tag)].trim()

    close = release_pools

    def _sleep(self, plan: dict[str, Keep]) -> None:
        gc.collect()
        awake = {tag: keep for tag, keep in plan.items() if not pools()[_name(tag)].asleep}
        try:
            _run_hooks("run_before_unmap_hooks", awake)
            with _out_of_memory():
                sleep({_name(tag): keep for tag, keep in awake.items()})
        except BaseException as error:
            undo(error, _run_hooks, "run_after_map_hooks")  # what they have let go of is still there
            raise


class _Block:
    """One stay in `use_memory_pool`: its tag, the one that was assigned since, and the pool of that."""

    def __init__(self, tag: str) -> None:
        self.tag = self.current = tag
        self.others = ExitStack()


class _Thread(threading.local):
    """The blocks of `use_memory_pool` that the present thread is in, outermost first."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []


_thread = _Thread()
_allocator = RemapAllocator()


class ShortOfMemoryError(OutOfMemoryError, RuntimeError):
    """`OutOfMemoryError` as vLLM's callers expect it: its own allocator raises a `RuntimeError`."""


@contextmanager
def _out_of_memory() -> Generator[None]:
    try:
        yield
    except OutOfMemoryError as error:
        found = ShortOfMemoryError(*error.args)
        found.__dict__.update(error.__dict__)
        raise found from error


class _Allocation(NamedTuple):
    """What vLLM's hooks look at of an allocation."""

    tag: str
    is_asleep: bool


def _run_hooks(name: str, *tags: Collection[str]) -> None:
    """Run what vLLM's other parts have registered for tags, in versions that have that."""
    run = getattr(sys.modules.get("vllm.device_allocator"), name, None)
    if run is not None:
        run(
            [_Allocation(tag, one.paused) for tag in _tags() for one in pools()[_name(tag)].segments],
            *tags,
        )


def register() -> None:
    """Register the backend, and put the allocator in place where `REMAP_VLLM` says so. A `vllm.general_plugins` entry.

    Does nothing in a vLLM that has neither. Raises `NotSupportedError` for one whose interface is another, before
    anything is allocated.
    """
    if not switched_on(FLAG):
        return
    install()
    factory = _factory()
    if factory is not None and "remap" not in factory._registry:
        factory.register_backend("remap", __name__, "RemapBackend")


def install() -> RemapAllocator:
    """Put the allocator in `CuMemAllocator`'s place in this process, and return it.

    Raises `NotSupportedError` for a vLLM whose interface is another, and an `ImportError` that is a `RemapError` where
    it cannot be imported.
    """
    try:
        importlib.import_module("vllm")
        cumem: Any = _import("vllm.device_allocator.cumem")
    except ImportError as error:
        raise missing("vllm", "remap as vLLM's allocator", error) from error
    if cumem is None:
        raise _refusal("it has no vllm.device_allocator.cumem")
    check_interface(cumem.CuMemAllocator)
    check_hooks(_import("vllm.device_allocator"))
    present = cumem.CuMemAllocator.instance
    if present is not None and present is not _allocator:
        raise InvalidValueError(
            "remap as vLLM's allocator",
            rule="vLLM's own is in use already, and has memory",
            next_step=f"Set {FLAG}=1 for the whole process",
        )
    cumem.CuMemAllocator.instance = _allocator
    return _allocator


def check_interface(kind: Any) -> None:
    """Raise `NotSupportedError` unless a `CuMemAllocator` class has the methods that are known here, and no others.

    Nor may a method ask its callers for more than is known here, or for less than is needed.
    """
    methods = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    lacking = KNOWN - OPTIONAL - methods
    if lacking:
        raise _refusal(f"its CuMemAllocator lacks {sorted(lacking)}")
    if methods - KNOWN:
        raise _refusal(f"its CuMemAllocator can do more than is known here: {sorted(methods - KNOWN)}")
    _check_parameters("CuMemAllocator", kind, RemapAllocator, methods)


def check_hooks(module: Any) -> None:
    """Raise `NotSupportedError` where others can hook into sleeping and waking, and not in the way known here."""
    if not hasattr(module, "register_tag_hooks"):
        return
    for name, given in _HOOKS.items():
        run = getattr(module, name, None)
        try:
            inspect.signature(run).bind(*given)  # type: ignore[arg-type]
        except TypeError:
            raise _refusal(f"its {name} is not there, or takes other arguments than are known here") from None


def check_backend(kind: Any) -> None:
    """Raise `NotSupportedError` unless a `SleepModeBackend` class asks for `suspend` and `resume`, and nothing else."""
    asked: Iterable[str] = getattr(kind, "__abstractmethods__", ())
    if set(asked) != {"suspend", "resume"}:
        raise _refusal(f"its sleep-mode backends have to have {sorted(asked)}")


def make_backend(base: Any) -> Any:
    """Return the class of the sleep-mode backend, on vLLM's own base class."""
    check_backend(base)

    class RemapBackend(base):  # type: ignore[misc]
        """vLLM's sleep mode over remap. Level 1 keeps weights in host memory; level 2 gives them up. `KEPT` stays."""

        def suspend(self, level: int = 1, tags: tuple[str, ...] | None = None) -> None:
            """Put everything to sleep, keeping the weights, or the tags that are named, and what is always kept."""
            chosen = tags if tags is not None else ("weights",) if level == 1 else ()
            _allocator.sleep((*chosen, *KEPT))
            self._state = "SUSPENDED"

        def resume(self, tags: list[str] | None = None) -> None:
            """Wake the tags that are named, or everything; after a failure everything sleeps on."""
            _allocator.wake_up(tags)
            slept = any(pools()[_name(tag)].asleep for tag in _tags())
            self._state = "SUSPENDED" if slept else "RUNNING"

        def discard(self, tags: tuple[str, ...]) -> None:
            """Put the tags that are named to sleep without their contents."""
            _allocator.discard(tags)
            self._state = "SUSPENDED"

        @classmethod
        def is_supported(cls) -> bool:
            """Return whether the allocator is in place: without it, there is nothing of vLLM's to put to sleep."""
            cumem: Any = _import("vllm.device_allocator.cumem")
            return cumem is not None and cumem.CuMemAllocator.instance is _allocator

        @classmethod
        def preserves_communicators(cls) -> bool:
            """Return that communicators go on: their memory is not in the pools."""
            return True

        preserves_nccl = preserves_communicators

        @classmethod
        def preserves_compiled_artifacts(cls) -> bool:
            """Return that compiled kernels go on."""
            return True

        @classmethod
        def supports_selective_offload(cls) -> bool:
            """Return that `tags` says what is kept."""
            return True

    _check_parameters("SleepModeBackend", base, RemapBackend, ("suspend", "resume"))
    return RemapBackend


def _check_parameters(name: str, theirs: Any, ours: Any, methods: Iterable[str]) -> None:
    """Raise `NotSupportedError` where callers of vLLM's method have to give what ours does not take, or the reverse."""
    for method in sorted(methods):
        if not hasattr(ours, method):
            continue  # called by vLLM's own class alone
        asked, taken = _parameters(getattr(theirs, method)), _parameters(getattr(ours, method))
        for required, known in ((asked, taken), (taken, asked)):
            unknown = [
                one.name
                for one in required.values()
                if one.default is one.empty and one.kind not in _REST and one.name not in known
            ]
            if unknown and not any(one.kind in _REST for one in known.values()):
                raise _refusal(f"its {name}.{method} takes {list(asked)}, and remap's {list(taken)}")


_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(method: Any) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(method).parameters)
    found.pop("self", None)
    return found


def __getattr__(name: str) -> Any:
    """Make the backend's class when vLLM asks for it by name: its base is vLLM's."""
    if name != "RemapBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module: Any = _import("vllm.device_allocator.sleep_mode_backend")
    if module is None:
        raise AttributeError("this vLLM has no sleep-mode backends")
    return make_backend(module.SleepModeBackend)


def _factory() -> Any:
    module: Any = _import("vllm.device_allocator.sleep_mode_backend")
    if module is None:
        return None
    make_backend(module.SleepModeBackend)  # refused before vLLM asks for it
    return module.SleepModeBackendFactory


def _import(name: str) -> Any:
    """Return a module of vLLM's, None where it has none of that name; an `ImportError` where that lacks another one."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _refusal(why: str) -> NotSupportedError:
    version = getattr(_import("vllm"), "__version__", "of unknown version")
    step = f"Unset {FLAG}, or use a version that remap knows"
    return not_supported("vllm", f"remap as the allocator of vLLM {version}", why, step)


def _keeps_host() -> bool:
    """Tell whether host memory of backups is kept for the next sleep, as vLLM's own allocator keeps it by default."""
    return os.environ.get("VLLM_SLEEP_MODE_RELEASE_HOST_MEMORY", "0") in ("", "0")


def _pool(tag: str, release: Release = "pool") -> Pool:
    found = pool_of(_name(tag), PoolOptions(release=release), asked=False)
    found.woken_by = f"wake_up(tags=[{tag!r}])"
    return found


def _name(tag: str) -> str:
    return f"vllm/{tag}"


def _tags() -> list[str]:
    return [name[5:] for name in list(pools()) if name.startswith("vllm/")]
