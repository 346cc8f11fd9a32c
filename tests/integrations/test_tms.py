"""torch_memory_saver's behaviour over remap: what its own public tests check, and the ways to install it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import remap
from remap import MiB

SIZE = 64_000_000
SLACK = 16 * MiB  # what torch may cache


@pytest.fixture
def saver(machine: Any) -> Iterator[Any]:
    """A memory saver of its own, by the name under which its users know it."""
    assert machine is not None
    from remap.integrations.tms import TorchMemorySaver

    saver = TorchMemorySaver()
    yield saver
    saver.resume()


def made(saver: Any, value: float, **options: Any) -> Any:
    """Return a tensor made inside of a region."""
    with saver.region(**options):
        return remap.torch.empty(SIZE // 4).fill_(value)


def free() -> int:
    """Return the free bytes of the first device."""
    return remap.device(0).memory().free


def test_pause_releases_and_resume_brings_back(saver: Any) -> None:
    """Memory is released and taken again, and the address stays."""
    before = free()
    tensor = made(saver, 100)
    held, address = free(), tensor.data_ptr()
    assert held < before
    saver.pause()
    assert free() >= before - SLACK
    saver.resume()
    assert free() <= held + SLACK
    assert tensor.data_ptr() == address
    tensor.fill_(1)
    assert float(tensor.sum()) == SIZE // 4


def test_tags(saver: Any) -> None:
    """Tags are paused and resumed by themselves, in any order, and all at once without one."""
    one, two = (
        made(saver, 1, tag="type1", enable_cpu_backup=True),
        made(saver, 2, tag="type2", enable_cpu_backup=True),
    )
    held = free()
    saver.pause("type1")
    half = free()
    assert half > held
    saver.pause("type2")
    saver.resume("type2")
    assert abs(free() - half) <= SLACK
    assert float(two.mean()) == 2
    saver.resume("type1")
    saver.pause("type1")
    saver.resume("type1")
    saver.pause()
    saver.resume()
    assert float(one.mean()) == 1


def test_cpu_backup(torch: Any, saver: Any) -> None:
    """With a backup contents stay, and can be read meanwhile; without one they are undefined, and there is none."""
    kept, given_up = made(saver, 1.5, enable_cpu_backup=True), made(saver, 20)
    assert saver.get_cpu_backup(kept) is None
    saver.pause()
    copy = saver.get_cpu_backup(kept)
    assert copy.device.type == "cpu"
    assert copy[:3].tolist() == [1.5] * 3
    assert saver.get_cpu_backup(given_up) is None
    view = saver.get_cpu_backup(kept, zero_copy=True)
    view[0] = 3
    del view
    saver.resume()
    assert kept[:2].tolist() == [3, 1.5]
    assert copy[0].item() == 1.5
    assert torch.is_tensor(given_up)


def test_retained_backups(saver: Any) -> None:
    """With retain_cpu_backup, host memory is kept for the next pause; what was in it is not looked at any more."""
    assert saver.retain_cpu_backup is False
    saver.retain_cpu_backup = True
    tensor = made(saver, 4, enable_cpu_backup=True)
    saver.pause()
    saver.resume()
    assert remap.host_pool().statistics().ready >= SIZE
    assert saver.get_cpu_backup(tensor) is None
    assert saver.get_cpu_backup(tensor, zero_copy=True) is None
    assert saver._binary_wrapper.cdll.tms_get_retain_cpu_backup() is True
    saver._binary_wrapper.cdll.tms_set_retain_cpu_backup(False)
    assert saver.retain_cpu_backup is False


def test_nested_regions(saver: Any) -> None:
    """The inner region decides inside, the outer one again after it."""
    with saver.region(tag="model", enable_cpu_backup=True):
        weight = remap.torch.empty(1000).fill_(42)
        with saver.region(tag="grad_buffer", enable_cpu_backup=False):
            gradient = remap.torch.empty(1000).fill_(99)
        extra = remap.torch.empty(1000).fill_(7)
    saver.pause("grad_buffer")
    assert float(weight.sum()) == 42_000
    saver.pause()
    saver.resume()
    assert float(weight.sum()) == 42_000
    assert float(extra.sum()) == 7_000
    gradient.fill_(0)
    assert float(gradient.sum()) == 0


def test_leaving_regions_by_hand(saver: Any) -> None:
    """Callers of the binary's own functions leave a region and go back there, each thread for itself."""
    functions = saver._impl._binary_wrapper.cdll
    saver._ensure_initialized()
    assert not functions.tms_get_interesting_region()
    with saver.region(tag="model"):
        before = functions.tms_get_interesting_region()
        functions.tms_set_interesting_region(False)
        outside = remap.torch.empty(1000).fill_(1)
        with saver.region(tag="other"):
            inner = remap.torch.empty(1000)
            functions.tms_set_interesting_region(False)
            functions.tms_set_interesting_region(True)
            again = remap.torch.empty(1000)
        functions.tms_set_interesting_region(before)
        functions.tms_set_interesting_region(True)
        model = remap.torch.empty(1000)
        with saver.disable():
            for value in (False, functions.tms_get_interesting_region(), True):
                functions.tms_set_interesting_region(value)
            assert not functions.tms_get_interesting_region()
    buffers: list[Any] = [remap.torch.buffer_of(one) for one in (inner, again, model)]
    tags = [one.tag for one in buffers]
    assert tags == ["tms/other/none", "tms/other/none", "tms/model/none"]
    saver.pause()
    assert float(outside.sum()) == 1000
    for value in (False, False, True):
        functions.tms_set_interesting_region(value)
    with pytest.raises(remap.RemapError, match=r"Enter torch_memory_saver\.region"):
        functions.tms_set_interesting_region(True)


def test_messages_name_its_own_calls(saver: Any) -> None:
    """Whoever enters a paused region reads what to call in torch_memory_saver's words."""
    made(saver, 1, tag="kv")
    saver.pause("kv")
    with pytest.raises(remap.PausedError, match=r"Call torch_memory_saver\.resume\('kv'\) first"):
        made(saver, 1, tag="kv")


def test_a_process_that_is_one_region(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMS_INIT_ENABLE asks for what remap cannot do: refused, instead of pausing nothing (trap 7)."""
    assert machine is not None
    from remap.integrations import tms

    monkeypatch.setenv("TMS_INIT_ENABLE", "1")
    with pytest.raises(remap.RemapError, match=r"TMS_INIT_ENABLE: .*Unset it, and enter .*region"):
        tms.install()


def test_disk_backup(saver: Any, tmp_path: Path) -> None:
    """Contents may be kept in files of a directory; both kinds of backup at once are refused."""
    saver.set_disk_backup_dir(str(tmp_path / "backups"))
    assert (tmp_path / "backups").is_dir()
    tensor = made(saver, 8, enable_disk_backup=True)
    saver.pause()
    saver.resume()
    assert float(tensor.mean()) == 8
    with (
        pytest.raises(ValueError, match="exclusive"),
        saver.region(enable_cpu_backup=True, enable_disk_backup=True),
    ):
        pass
    with pytest.raises(ValueError, match="requires"), saver.region(cpu_backup_backend="mmap"):
        pass


def test_a_margin(torch: Any, saver: Any) -> None:
    """Regions leave as much memory free as memory_margin_bytes says."""
    saver.memory_margin_bytes = free() - 16 * MiB
    with saver.region(), pytest.raises((torch.OutOfMemoryError, remap.OutOfMemoryError)):
        remap.torch.empty(8 * MiB)
    saver.memory_margin_bytes = 0
    with pytest.raises(remap.InvalidValueError, match="memory_margin_bytes"):
        saver.memory_margin_bytes = -1
    assert saver.memory_margin_bytes == 0


def test_resuming_with_too_little_memory(saver: Any) -> None:
    """Raises, and everything can be resumed later, where torch_memory_saver ended the process (trap 1)."""
    tensor = made(saver, 6, enable_cpu_backup=True)
    saver.pause()
    room = free() - (0 if remap.driver().name == "host" else 40 * MiB)
    with remap.allocate(room, resident=0), pytest.raises(remap.OutOfMemoryError):
        saver.resume()
    saver.resume()
    assert float(tensor.mean()) == 6


def test_the_mode(saver: Any) -> None:
    """The hook mode reads `remap`, takes the names that users set, and refuses others."""
    assert saver.hook_mode == "remap"
    saver.hook_mode = "torch"
    assert saver.enabled
    with pytest.raises(ValueError, match="Unknown"):
        saver.hook_mode = "magic"


LIBRARY = '''
"""What is public of torch_memory_saver {kind} a registry of modes."""
from contextlib import contextmanager

class TorchMemorySaver:
    def __init__(self):
        self._impl, self._mode = None, "preload"

    def _set_mode(self, mode):
        if self._impl is not None and modes:
            raise RuntimeError("Cannot configure after initialization")
        if modes and mode not in modes:
            raise ValueError(f"Unknown hook mode {{mode!r}}")
        self._mode = mode

    @contextmanager
    def region(self, tag="default", enable_cpu_backup=False):
        self._ensure_initialized()
        with self._impl.region(tag=tag, enable_cpu_backup=enable_cpu_backup):
            yield

    def pause(self, tag=None):
        self._ensure_initialized()
        self._impl.pause(tag=tag)

    def resume(self, tag=None):
        self._ensure_initialized()
        self._impl.resume(tag=tag)

    def _ensure_initialized(self):
        if self._impl is None:
            self._impl = modes[self._mode]()

    hook_mode = property(None, _set_mode)

torch_memory_saver, modes = TorchMemorySaver(), {{}}
'''

REGISTRY = """
def register_hook_mode(name, factory, *, uses_preload=True):
    if name in modes:
        raise ValueError(f"Hook mode {name!r} is already registered")
    modes[name] = factory

register_hook_mode("preload", None)
"""

USE = """
import sys, remap
remap.use("host", coherent=True, integrated=False)
from remap.integrations import tms
tms.install()
tms.install()
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "preload"
saver._ensure_initialized()
saver.hook_mode = "preload"
functions = saver._impl._binary_wrapper.cdll
with saver.region(tag="kv_cache", enable_cpu_backup=True):
    assert functions.tms_get_interesting_region()
    tensor = remap.torch.empty(1000).fill_(5)
before = remap.device(0).memory().free
saver.pause("kv_cache")
assert remap.device(0).memory().free > before
saver.resume("kv_cache")
assert float(tensor.sum()) == 5000
import torch_memory_saver
print(torch_memory_saver.__name__)
"""


@pytest.mark.parametrize("kind", ["with", "without", "no"])
def test_installing(torch: Any, tmp_path: Path, kind: str) -> None:
    """It becomes the library's mode, takes the implementation's place in older ones, or stands for a missing one."""
    assert torch is not None
    if remap.driver().name == "cuda":
        pytest.skip("about the host driver; on CUDA the real library is used")
    if kind != "no":
        (tmp_path / "torch_memory_saver.py").write_text(
            LIBRARY.format(kind=kind) + REGISTRY * (kind == "with")
        )
    begin = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    if kind == "no":  # also where the library is installed
        begin += "sys.modules['torch_memory_saver'] = None\n"
    command = [sys.executable, "-c", begin + USE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    expected = "remap.integrations.tms" if kind == "no" else "torch_memory_saver"
    assert (done.returncode, done.stderr, done.stdout) == (0, "", expected + "\n")


REAL = """
import os, remap
remap.use("host", coherent=True, integrated=False)
from remap.integrations import tms
saver = tms.install()
import torch_memory_saver as library
assert saver is library.torch_memory_saver and library is not tms
saver.hook_mode = "torch"
with library.configure_subprocess():
    assert "torch_memory_saver" not in os.environ.get("LD_PRELOAD", "")
with saver.region(tag="kv", enable_cpu_backup=True):
    kept = remap.torch.empty(1000).fill_(5)
    with saver.region(tag="scratch"):
        given_up = remap.torch.empty(1000)
    with saver.disable():
        pass
with saver.region(tag="kv", enable_disk_backup=True):
    on_disk = remap.torch.empty(1000).fill_(6)
with saver.region(tag="kv", enable_cpu_backup=True, cpu_backup_backend="mmap"):
    mapped = remap.torch.empty(1000).fill_(7)
saver.memory_margin_bytes = 0
saver.retain_cpu_backup = True
assert saver.retain_cpu_backup and saver.enabled
saver.set_disk_backup_dir(DIRECTORY)
saver.pause("kv")
assert float(saver.get_cpu_backup(kept).sum()) == 5000 and saver.get_cpu_backup(given_up) is None
saver.pause()
saver.resume()
assert [float(one.sum()) for one in (kept, on_disk, mapped)] == [5000, 6000, 7000]
public = lambda kind: {name for name in dir(kind) if not name.startswith("_")}
assert public(type(saver)) <= public(tms.TorchMemorySaver), public(type(saver))
assert {"TorchMemorySaver", "torch_memory_saver", "configure_subprocess"} <= public(tms)
print("right")
"""


def test_the_library_itself(torch: Any, tmp_path: Path) -> None:
    """Over the installed library, its own facade does all that it can, and preloads nothing into children."""
    assert torch is not None
    if remap.driver().name == "cuda":
        pytest.skip("about the host driver: tensors are made by remap")
    if find_spec("torch_memory_saver") is None:
        pytest.skip("needs torch_memory_saver")
    command = [sys.executable, "-W", "ignore", "-c", f"DIRECTORY = {str(tmp_path)!r}\n" + REAL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "right\n")


# What SGLang's adapter does: it looks for the library when it is imported, and its plugins are loaded after that.
ADAPTER = """
import os, remap
remap.use("host", coherent=True, integrated=False)
import torch_memory_saver
saver = torch_memory_saver.torch_memory_saver
from importlib.metadata import EntryPoint
plugin = EntryPoint("remap", PLUGIN, "sglang.srt.plugins").load()
plugin()
plugin()
if os.environ["REMAP_TMS"] != "1":
    assert getattr(saver, "_impl", None) is None
else:
    with torch_memory_saver.configure_subprocess():
        assert "torch_memory_saver" not in os.environ.get("LD_PRELOAD", "")
    assert saver.enabled
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = remap.torch.empty(1000).fill_(5)
        with saver.disable():
            pass
    with saver.region(tag="kv_cache", enable_cpu_backup=False):
        cache = remap.torch.empty(1000)
    saver.pause(tag="kv_cache")
    saver.pause(tag="weights")
    saver.resume(tag="weights")
    saver.resume(tag="kv_cache")
    assert float(weights.sum()) == 5000
print("right")
"""


@pytest.mark.parametrize("flag", ["1", "0", "No"])
def test_as_a_plugin_of_sglang(torch: Any, flag: str) -> None:
    """SGLang's adapter goes through remap with the flag, and is left alone without it."""
    assert torch is not None
    if remap.driver().name == "cuda":
        pytest.skip("about the host driver: tensors are made by remap")
    if find_spec("torch_memory_saver") is None:
        pytest.skip("needs torch_memory_saver")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    begin = f"PLUGIN = {project['entry-points']['sglang.srt.plugins']['remap']!r}\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", begin + ADAPTER],
        env={**os.environ, "REMAP_TMS": flag},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "right\n")
