"""torch_memory_saver's whole surface over remap: its users' code runs unchanged, with no C++ build and no LD_PRELOAD.

    from remap.integrations import tms
    tms.install()                       # once in each process, before torch_memory_saver is used

Where torch_memory_saver is installed, it takes remap as its hook mode `remap`; where it is not, `import
torch_memory_saver` finds this module. SGLang's memory saver goes through either; `register` is its plugin.

A tag's memory with and without a backup are two pools, so that one `pause` keeps the one and drops the other. What is
made outside of regions stays: `TMS_INIT_ENABLE`, which makes the whole process one region, is refused.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from remap.errors import InvalidValueError, RemapError
from remap.integrations.blocks import present
from remap.integrations.memory import memory, segment_at
from remap.integrations.options import PoolOptions
from remap.integrations.pools import Pool, outside, pool_of, pools
from remap.integrations.sleeping import backup, sleep, wake
from remap.integrations.support import missing, switched_on
from remap.integrations.tensors import Tensor, device_of, span_of
from remap.residency.stores import Keep
from remap.sizes import parse_size

MODE = "remap"
"""The name of the hook mode."""

FLAG = "REMAP_TMS"
"""The environment variable that lets SGLang's memory saver go through remap."""


class TorchMemorySaver:
    """What `torch_memory_saver.torch_memory_saver` is, and what its hook modes are made of."""

    enabled: ClassVar[bool] = True
    _is_xpu: ClassVar[bool] = False

    def __init__(self) -> None:
        self._retain = os.environ.get("TMS_RETAIN_CPU_BACKUP", "0") == "1"
        self._directory: str | None = os.environ.get("TMS_DISK_BACKUP_DIR")
        self._binary_wrapper = _BinaryWrapper(self)

    @contextmanager
    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Generator[None]:
        """Let tensors that are made inside be paused by their tag; contents are kept as asked. Regions nest.

        Raises `PausedError` while the tag is paused; and inside of one its tag cannot be paused (`InUseError`).
        `cpu_backup_backend` is taken and makes no difference: host memory of backups is page-locked where it can be.
        """
        keep = _keep(enable_cpu_backup, enable_disk_backup)
        if cpu_backup_backend is not None and not enable_cpu_backup:
            raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
        with _pool(tag, keep).entered(None):
            yield

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Generator[None]:
        """Capture as `torch.cuda.graph` does, into memory that can be paused by its tag.

        Raises `NotSupportedError` without CUDA.
        """
        del cpu_backup_backend  # as in `region`
        found = _pool(tag, _keep(enable_cpu_backup, False))
        with found.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode):
            yield

    @contextmanager
    def disable(self, dispose_mem_pool_after_use: bool = True) -> Generator[None]:
        """Let tensors that are made inside be ordinary ones; what torch caches for them goes back at the end."""
        if not dispose_mem_pool_after_use:
            raise InvalidValueError(
                "disable with dispose_mem_pool_after_use=False",
                rule="the pool always goes, as in torch_memory_saver",
            )
        with outside():
            yield

    def pause(self, tag: str | None = None) -> None:
        """Pause the memory of a tag, or all of it, in one transaction. What is paused already stays so."""
        plan = {name: keep for name, keep in _pools(tag) if not pools()[name].asleep}
        sleep(plan, directory=self._directory)

    def resume(self, tag: str | None = None) -> None:
        """Resume the memory of a tag, or all of it; raises `OutOfMemoryError`, with all paused, where it is short."""
        wake([name for name, _ in _pools(tag) if pools()[name].asleep], keep_host=self._retain)

    def get_cpu_backup(self, x: Tensor, zero_copy: bool = False) -> Tensor | None:
        """Return a CPU copy of a paused tensor's contents, None where none were kept or it is not paused.

        With `zero_copy` it is the backup itself; delete it before `resume`. Once it is resumed there is none any more,
        with `retain_cpu_backup` either: that keeps the host memory, and not what was in it.
        """
        start, size = span_of(x)
        if size and not segment_at(start, device_of(x), "get_cpu_backup").paused:
            return None
        try:
            found = backup(x)
        except InvalidValueError:  # contents were given up
            return None
        return found if zero_copy else found.clone()

    # What the library's users reach for behind its facade; this is both.

    @property
    def _impl(self) -> TorchMemorySaver:
        return self

    def _ensure_initialized(self) -> None:
        pass

    @property
    def hook_mode(self) -> str:
        """The hook mode: `remap`, whichever of the library's own modes is named; others raise `ValueError`."""
        return MODE

    @hook_mode.setter
    def hook_mode(self, hook_mode: str) -> None:
        if hook_mode not in (MODE, "torch", "preload"):
            raise ValueError(f"Unknown hook mode {hook_mode!r}")

    @property
    def memory_margin_bytes(self) -> int:
        """How many bytes of a device allocations in regions leave free."""
        return self._binary_wrapper.margin

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._binary_wrapper.cdll.set_memory_margin_bytes(value)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether host memory of backups is kept for the next pause, which is then fast."""
        return self._retain

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._retain = bool(value)

    def set_disk_backup_dir(self, path: str) -> None:
        """Set the directory of disk backups, which is made where it is missing."""
        os.makedirs(path, exist_ok=True)
        self._directory = path


class _BinaryWrapper:
    """What torch_memory_saver's own facade looks for in the implementation of a mode."""

    def __init__(self, saver: TorchMemorySaver) -> None:
        self._saver = saver
        self.margin = 0

    @property
    def cdll(self) -> _BinaryWrapper:
        """Itself: the functions below have the names that the library's binary exports."""
        return self

    def set_memory_margin_bytes(self, value: int) -> None:
        """Set the margin; raises `InvalidValueError` for a negative one."""
        size = parse_size(value, "memory_margin_bytes")
        memory().table.set_margin(size)
        self.margin = size

    def tms_get_interesting_region(self) -> bool:
        """Return whether what this thread allocates now can be paused."""
        return present() is not None

    def tms_set_interesting_region(self, value: bool) -> None:
        """Leave all regions with False, as `disable` does, and go back there with True; for this thread alone.

        Outside of regions False does nothing, nor does the True after it. Any other True there raises `RemapError`.
        """
        inside = self.tms_get_interesting_region()
        if not value:
            _thread.off = True
            if inside:
                block = outside()
                block.__enter__()
                _thread.left.append(block)
        elif not inside:
            if not (_thread.left or _thread.off):
                raise RemapError(
                    "tms_set_interesting_region(True) outside of regions",
                    rule="remap pauses what is made inside of regions",
                    next_step="Enter torch_memory_saver.region(tag) around it",
                )
            _thread.off = False
            if _thread.left:
                _thread.left.pop().__exit__(None, None, None)

    def tms_get_retain_cpu_backup(self) -> bool:
        """Return whether backups' memory is kept."""
        return self._saver.retain_cpu_backup

    def tms_set_retain_cpu_backup(self, value: bool) -> None:
        """Say whether backups' memory is kept."""
        self._saver.retain_cpu_backup = value

    def tms_set_disk_backup_dir(self, path: bytes) -> None:
        """Set the directory of disk backups."""
        self._saver.set_disk_backup_dir(os.fsdecode(path))


class _Thread(threading.local):
    """What the present thread has left by `tms_set_interesting_region`: the blocks outside of regions that it is in."""

    def __init__(self) -> None:
        self.left: list[AbstractContextManager[None]] = []
        self.off = False


_thread = _Thread()

torch_memory_saver = TorchMemorySaver()
"""The one instance, under torch_memory_saver's name for it."""


def configure_subprocess() -> Any:
    """Return a context manager that does nothing: there is nothing to preload."""
    return nullcontext()


def register_hook_mode(name: str, factory: Any, *, uses_preload: bool = True) -> None:
    """Refuse: this stands for torch_memory_saver, and its one mode is `remap`."""
    raise RemapError(
        f"registering the hook mode {name!r}",
        rule="torch_memory_saver is not installed here, and remap stands for it",
    )


def register() -> None:
    """Call `install` where `REMAP_TMS` says so. A `sglang.srt.plugins` entry, loaded in each of SGLang's processes."""
    if switched_on(FLAG):
        install()


def install() -> Any:
    """Let torch_memory_saver work through remap in this process, and return its `torch_memory_saver` object.

    Call it once in each process, before regions are entered. Raises `RemapError` where another mode is in use already,
    and where `TMS_INIT_ENABLE` asks for memory outside of regions to be paused.
    """
    if switched_on("TMS_INIT_ENABLE"):
        raise RemapError(
            "torch_memory_saver over remap with TMS_INIT_ENABLE",
            rule="that makes the whole process one region, and remap pauses what is made inside of regions alone",
            next_step="Unset it, and enter torch_memory_saver.region(tag) around what is to be paused",
        )
    try:
        library: Any = importlib.import_module("torch_memory_saver")
    except ImportError:
        sys.modules["torch_memory_saver"] = sys.modules[__name__]
        return torch_memory_saver
    if library is sys.modules[__name__]:
        return torch_memory_saver
    singleton: Any = library.torch_memory_saver
    implementation = getattr(singleton, "_impl", None)
    if implementation is torch_memory_saver:
        return singleton
    if implementation is not None:
        raise RemapError(
            "torch_memory_saver over remap",
            rule=f"it works through {type(implementation).__name__} already, and has memory there",
            next_step="Call remap.integrations.tms.install() before its first use",
        )
    register = getattr(library, "register_hook_mode", None)
    if register is None:  # up to 0.0.10; it would preload its own library into children
        singleton._impl = torch_memory_saver
        library.configure_subprocess = configure_subprocess
        return singleton
    try:
        register(MODE, lambda: torch_memory_saver, uses_preload=False)
    except ValueError as error:  # it was registered before
        if "already" not in str(error):
            raise missing("torch_memory_saver", "its hook mode", error) from error
    singleton.hook_mode = MODE
    # Its users go on to name the mode that they were written for, and would have that one instead.
    type(singleton).hook_mode = TorchMemorySaver.hook_mode
    return singleton


def _keep(cpu: bool, disk: bool) -> Keep:
    if cpu and disk:
        raise ValueError("enable_cpu_backup and enable_disk_backup are mutually exclusive")
    return "host" if cpu else "disk" if disk else None


def _pool(tag: str, keep: Keep) -> Pool:
    found = pool_of(f"tms/{tag}/{keep or 'none'}", PoolOptions(), asked=False)
    found.woken_by = f"torch_memory_saver.resume({tag!r})"
    return found


def _pools(tag: str | None) -> Iterator[tuple[str, Keep]]:
    """Yield the pools of a tag, or of all tags, each with what is kept of it."""
    keeps: tuple[Keep, ...] = ("host", "disk", None)
    for name in list(pools()):
        for keep in keeps:
            suffix = f"/{keep or 'none'}"
            if (
                name.startswith("tms/")
                and name.endswith(suffix)
                and tag in (None, "", name[4 : -len(suffix)])
            ):
                yield name, keep
