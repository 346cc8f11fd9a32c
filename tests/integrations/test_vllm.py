"""What vLLM expects of a memory allocator and of a sleep-mode backend; no vLLM is needed to check it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import remap
from remap import MiB

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def allocator(machine: Any) -> Iterator[Any]:
    """The allocator that stands in `CuMemAllocator`'s place."""
    assert machine is not None
    from remap.integrations import vllm

    yield vllm._allocator
    vllm._allocator.wake_up()


def loaded(allocator: Any) -> tuple[Any, Any]:
    """Return weights and a cache, made as a worker makes them."""
    with allocator.use_memory_pool(tag="weights"):
        weights = remap.torch.empty(4_000_000).normal_()
    with allocator.use_memory_pool("kv_cache"):
        cache = remap.torch.empty(4_000_000).zero_()
    return weights, cache


def test_level_one(torch: Any, allocator: Any) -> None:
    """Weights go to the host and come back; caches are dropped; usage is what was allocated."""
    weights, cache = loaded(allocator)
    kept, usage = weights.clone(), allocator.get_current_usage()
    assert usage >= weights.nbytes + cache.nbytes
    before = remap.device(0).memory().free
    allocator.sleep(offload_tags=("weights",))
    assert remap.device(0).memory().free >= before + usage - 16 * MiB
    assert allocator.get_current_usage() == usage
    allocator.sleep(offload_tags=("weights",))
    allocator.wake_up(["weights"])
    assert torch.equal(weights, kept)
    assert remap.torch.status()["vllm/kv_cache"].state == "asleep"
    allocator.wake_up(["kv_cache"])
    cache.zero_()
    assert float(cache.sum()) == 0


def test_level_two(allocator: Any) -> None:
    """Everything is dropped; a wake of all gives memory to write new weights into."""
    weights, _ = loaded(allocator)
    assert not allocator.sleep(offload_tags=())
    assert not remap.torch.status()["vllm/weights"].kept.get("host")
    allocator.wake_up()
    weights.fill_(1)
    assert float(weights.mean()) == 1


def test_tags_that_nobody_names_wake_with_any(allocator: Any) -> None:
    """Only weights and caches can be left asleep by a selective wake, as in vLLM's own allocator."""
    with allocator.use_memory_pool():
        other = remap.torch.empty(10).fill_(4)
    loaded(allocator)
    allocator.sleep()
    allocator.wake_up(["weights"])
    assert float(other.sum()) == 40
    assert remap.torch.status()["vllm/kv_cache"].state == "asleep"


def test_discarding(allocator: Any) -> None:
    """Tags that are discarded sleep without their contents; the others are awake."""
    weights, _ = loaded(allocator)
    total = float(weights.sum())
    allocator.discard("kv_cache")
    assert remap.torch.status()["vllm/kv_cache"].kept["nowhere"] >= 16_000_000
    assert float(weights.sum()) == total


def test_a_worker_that_shuts_down(allocator: Any) -> None:
    """Memory without tensors goes back, also where some of it sleeps, and what holds tensors stays."""
    weights, cache = loaded(allocator)
    usage = allocator.get_current_usage()
    del cache
    allocator.release_pools()
    assert allocator.get_current_usage() <= usage - 16_000_000
    allocator.sleep("weights")
    allocator.close()
    allocator.wake_up()
    assert weights.numel() == 4_000_000


def test_memory_of_graphs(torch: Any, allocator: Any) -> None:
    """A graph captured into the handle that vLLM asks for replays right after its memory has slept, contents kept."""
    if remap.driver().name == "host":
        with pytest.raises(remap.NotSupportedError, match="no CUDA"), allocator.cudagraph_pool():
            pass
        return
    graph = torch.cuda.CUDAGraph()
    with allocator.cudagraph_pool() as handle, torch.cuda.graph(graph, pool=handle):
        result = torch.ones(1 << 20, device="cuda") * 3
    graph.replay()
    torch.cuda.synchronize()
    allocator.sleep(("cudagraph",))
    assert remap.torch.status()["vllm/cudagraph"].kept["host"] >= result.nbytes
    allocator.wake_up()
    assert float(result.mean()) == 3


def test_everything_that_vllm_may_call_is_there(torch: Any) -> None:
    """The allocator has each method that is known of `CuMemAllocator`, but for those that only its own code calls."""
    assert torch is not None
    from remap.integrations import vllm

    inner = {"get_instance", "python_free_callback", "python_malloc_callback"}
    assert all(callable(getattr(vllm.RemapAllocator, name)) for name in vllm.KNOWN - inner)


def test_current_tag(allocator: Any) -> None:
    """Pools nest, and the tag is the default one outside; an exception restores it."""
    assert allocator.current_tag == "default"
    with pytest.raises(ZeroDivisionError), allocator.use_memory_pool("weights"):
        assert allocator.current_tag == "weights"
        raise ZeroDivisionError
    assert allocator.current_tag == "default"


def test_a_tag_that_is_assigned(allocator: Any) -> None:
    """What is made after `current_tag` was assigned has that tag, until another one is, or the block ends."""
    allocator.current_tag = "draft"
    assert allocator.current_tag == "default"
    made: list[Any] = []
    with allocator.use_memory_pool(tag="weights"):
        for tag in ("weights", "draft", "draft", "other", "weights"):
            allocator.current_tag = tag
            assert allocator.current_tag == tag
            made.append(remap.torch.empty(10))
        allocator.current_tag = "draft"
        with allocator.use_memory_pool("kv_cache"):
            made.append(remap.torch.empty(10))
        made.append(remap.torch.empty(10))
    assert allocator.current_tag == "default"
    buffers: list[Any] = [remap.torch.buffer_of(one) for one in made]
    tags = [one.tag.removeprefix("vllm/") for one in buffers]
    assert tags == ["weights", "draft", "draft", "other", "weights", "kv_cache", "draft"]
    allocator.sleep(("draft",))
    assert "host" in remap.torch.status()["vllm/draft"].kept
    with pytest.raises(remap.PausedError, match=r"Call wake_up\(tags=\['draft'\]\)"):
        allocator.use_memory_pool("draft").__enter__()


def test_a_wake_that_runs_out_of_memory(allocator: Any) -> None:
    """It is a RuntimeError, as of vLLM's own allocator, and one of remap's; everything sleeps on (trap 1)."""
    total = remap.device(0).memory().total
    size = total * 7 // 10 if remap.driver().name == "host" else 1024 * MiB
    with allocator.use_memory_pool():
        tensor = remap.torch.empty(size, dtype=remap.integrations.tensors.torch.uint8)
    allocator.sleep(offload_tags=())
    room = remap.device(0).memory().free - size // 2
    with remap.allocate(room // MiB * MiB, resident=0):
        for kind in (RuntimeError, MemoryError, remap.OutOfMemoryError):
            with pytest.raises(kind, match="are free there"):
                allocator.wake_up()
        assert remap.torch.status()["vllm/default"].state == "asleep"
    allocator.wake_up()
    assert tensor.numel() == size


@pytest.fixture
def hooks(torch: Any) -> Iterator[Any]:
    """A module with what newer vLLM has for others who keep something of the memory (`register_tag_hooks`)."""
    assert torch is not None
    name = "vllm.device_allocator"
    before = sys.modules.get(name)
    module: Any = ModuleType(name)
    sys.modules[name] = module
    registered: dict[str, tuple[Any, Any]] = {}

    def before_unmap(allocations: Any, tags: Any = None) -> None:
        mapped = {one.tag for one in allocations if not one.is_asleep and (tags is None or one.tag in tags)}
        for tag in mapped & registered.keys():
            registered[tag][0]()

    def after_map(allocations: Any) -> None:
        for tag in registered.keys() - {one.tag for one in allocations if one.is_asleep}:
            registered[tag][1]()

    module.registered = registered
    module.register_tag_hooks = lambda tag, *calls: registered.update({tag: calls})
    module.run_before_unmap_hooks, module.run_after_map_hooks = before_unmap, after_map
    yield module
    del sys.modules[name]
    if before is not None:
        sys.modules[name] = before


def test_hooks_of_tags(allocator: Any, hooks: Any) -> None:
    """Who keeps something of a tag's memory lets go before it is unmapped, and is told when it is there again."""
    told: list[str] = []
    _, cache = loaded(allocator)

    def release() -> None:
        told.append(f"release {remap.torch.status()['vllm/kv_cache'].state}")

    def restore() -> None:
        told.append(f"restore {remap.torch.status()['vllm/kv_cache'].state}")

    hooks.register_tag_hooks("kv_cache", release, restore)
    allocator.discard("weights")
    assert not told
    allocator.wake_up(["weights"])
    allocator.sleep(("weights",))
    allocator.sleep(("weights",))
    allocator.wake_up(["weights"])
    allocator.wake_up(["kv_cache"])
    assert told == ["restore awake", "release awake", "restore awake"]
    told.clear()
    with remap.torch.registered(cache, "NCCL"), pytest.raises(remap.InUseError, match="NCCL"):
        allocator.discard(("kv_cache",))
    assert told == ["release awake", "restore awake"]
    hooks.registered.clear()


class Base(ABC):
    """vLLM's base class of backends, as far as it is public."""

    def __init__(self) -> None:
        self._state = "RUNNING"

    @abstractmethod
    def suspend(self, level: int = 1) -> None: ...
    @abstractmethod
    def resume(self, tags: list[str] | None = None) -> None: ...
    def state(self) -> str:
        """Return the state."""
        return self._state

    @classmethod
    def is_supported(cls) -> bool:
        """Whether it can run."""
        return True


def test_the_backend(allocator: Any) -> None:
    """It suspends by level, keeps what nobody writes anew (trap 18), resumes by tags, and tells its state.

    It is supported only with the allocator in place.
    """
    from remap.integrations import vllm

    backend = vllm.make_backend(Base)()
    weights, _ = loaded(allocator)
    total = float(weights.sum())
    backend.suspend(level=1)
    assert backend.state() == "SUSPENDED"
    backend.resume(["weights"])
    assert backend.state() == "SUSPENDED"
    backend.resume()
    assert backend.state() == "RUNNING"
    assert float(weights.sum()) == total
    with allocator.use_memory_pool(tag="runtime"):
        adapters = remap.torch.empty(1000).fill_(7)
    backend.suspend(2)
    state = remap.torch.status()
    assert [*state["vllm/weights"].kept, *state["vllm/runtime"].kept] == ["nowhere", "host"]
    backend.resume()
    assert float(adapters.sum()) == 7000
    assert backend.preserves_communicators()
    assert backend.preserves_nccl()
    assert not backend.is_supported()


class Allocator:
    """vLLM's allocator, as far as it is public."""

    instance = None

    @staticmethod
    def get_instance() -> None: ...
    def use_memory_pool(self) -> None: ...
    def sleep(self) -> None: ...
    def wake_up(self) -> None: ...
    def get_current_usage(self) -> None: ...


class Present(Allocator):
    """As vLLM 0.33 has it."""

    def cudagraph_pool(self) -> None: ...
    def discard(self, tags: tuple[str, ...]) -> None: ...
    def release_pools(self) -> None: ...
    def close(self) -> None: ...


class Newer(Allocator):
    """One that can do more."""

    def use_cudagraph_pool(self) -> None: ...


class Asked(Allocator):
    """One whose callers have to give more."""

    def sleep(self, offload_tags: object = None, *, new_required: int) -> None: ...  # type: ignore[override]


class Asleep(Present):
    """One whose callers give less."""

    def discard(self) -> None: ...  # type: ignore[override]


class Open(Allocator):
    """One that takes whatever it is given."""

    def wake_up(self, *rest: object, **options: object) -> None: ...


class Older:
    """One that can do less."""

    def sleep(self) -> None: ...


class Stricter(Base):
    """A base class of backends whose callers have to give more."""

    @abstractmethod
    def suspend(self, level: int, mode: str) -> None: ...  # type: ignore[override]


class Asking(Base):
    """A base class of backends that asks for more."""

    @abstractmethod
    def snapshot(self) -> None: ...


def test_unknown_versions_are_refused(torch: Any) -> None:
    """An interface that is not the known one is refused by name, before anything is allocated."""
    assert torch is not None
    from remap.integrations import vllm

    vllm.check_interface(Allocator)
    vllm.check_interface(Present)
    with pytest.raises(remap.NotSupportedError, match="use_cudagraph_pool"):
        vllm.check_interface(Newer)
    with pytest.raises(remap.NotSupportedError, match="wake_up"):
        vllm.check_interface(Older)
    vllm.check_interface(Open)
    with pytest.raises(remap.NotSupportedError, match=r"CuMemAllocator\.sleep takes .*new_required"):
        vllm.check_interface(Asked)
    with pytest.raises(remap.NotSupportedError, match=r"CuMemAllocator\.discard takes \[\], .*tags"):
        vllm.check_interface(Asleep)
    with pytest.raises(remap.NotSupportedError, match=r"SleepModeBackend\.suspend takes .*mode"):
        vllm.make_backend(Stricter)
    with pytest.raises(remap.NotSupportedError, match="snapshot"):
        vllm.make_backend(Asking)
    with pytest.raises(
        remap.RemapError, match=r"vllm, which cannot be imported \(No module .*vllm"
    ) as refusal:
        vllm.install()
    assert isinstance(refusal.value, ImportError)
    vllm.register()


def test_hooks_that_are_not_known(hooks: Any) -> None:
    """A version whose hooks could not be run is refused, as those who registered would not be told."""
    from remap.integrations import vllm

    vllm.check_hooks(ModuleType("without"))
    vllm.check_hooks(hooks)
    hooks.run_after_map_hooks = lambda allocations, tags: None
    with pytest.raises(remap.NotSupportedError, match="run_after_map_hooks"):
        vllm.check_hooks(hooks)
    del hooks.run_after_map_hooks
    with pytest.raises(remap.NotSupportedError, match="run_after_map_hooks is not there"):
        vllm.check_hooks(hooks)


CUMEM = """
class CuMemAllocator:
    instance, default_tag = None, "default"
    @staticmethod
    def get_instance():
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
        return CuMemAllocator.instance
    def use_memory_pool(self, tag=None): ...
    def sleep(self, offload_tags=None): ...
    def wake_up(self, tags=None): ...
    def get_current_usage(self): return 0
"""

BACKENDS = """
import importlib
from abc import ABC, abstractmethod
class SleepModeBackend(ABC):
    def __init__(self): self._state = "RUNNING"
    @abstractmethod
    def suspend(self, level=1): ...
    @abstractmethod
    def resume(self, tags=None): ...
    @classmethod
    def is_supported(cls): return True
class SleepModeBackendFactory:
    _registry = {}
    @classmethod
    def register_backend(cls, name, module_path, class_name):
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)
"""

WORKER = """
import os, remap
remap.use("host", coherent=True, integrated=False)
from importlib.metadata import EntryPoint
plugin = EntryPoint("remap", PLUGIN, "vllm.general_plugins").load()
plugin()
plugin()
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator import sleep_mode_backend as modes
if os.environ.get("REMAP_VLLM") == "1":
    allocator = CuMemAllocator.get_instance()
    assert allocator.get_current_usage() == 0
    with allocator.use_memory_pool(tag="weights"):
        weights = remap.torch.empty(1000).fill_(3)
    kind = modes.SleepModeBackendFactory._registry["remap"]()
    assert kind.is_supported()
    backend = kind()
    backend.suspend(1)
    backend.resume()
    assert float(weights.sum()) == 3000
else:
    assert not modes.SleepModeBackendFactory._registry
    assert type(CuMemAllocator.get_instance()) is CuMemAllocator
print("right")
"""


def work(tmp_path: Path, cumem: str, flag: str) -> Any:
    """Run a worker of a vLLM that has this allocator module."""
    package = tmp_path / "vllm" / "device_allocator"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("__version__ = '0.27.1'\n")
    (package / "cumem.py").write_text(cumem)
    (package / "sleep_mode_backend.py").write_text(BACKENDS)
    plugins = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["vllm.general_plugins"]
    begin = f"""
import os, sys
sys.path.insert(0, {str(tmp_path)!r})
os.environ["REMAP_VLLM"], PLUGIN = {flag!r}, {plugins["remap"]!r}
"""
    command = [sys.executable, "-c", begin + WORKER]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.parametrize("flag", ["1", "0", "false"])
def test_as_a_plugin(torch: Any, tmp_path: Path, flag: str) -> None:
    """The plugin puts allocator and backend in place with the flag, and does nothing without it."""
    assert torch is not None
    if remap.driver().name == "cuda":
        pytest.skip("about the host driver")
    done = work(tmp_path, CUMEM, flag)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "right\n")


def test_what_vllm_itself_lacks(torch: Any, tmp_path: Path) -> None:
    """Where a module of vLLM's needs what is missing, that is what is said, and not that its version is unknown."""
    assert torch is not None
    if remap.driver().name == "cuda":
        pytest.skip("about the host driver")
    done = work(tmp_path, "import not_there\n" + CUMEM, "1")
    assert "vllm, which cannot be imported (No module named 'not_there')" in done.stderr
