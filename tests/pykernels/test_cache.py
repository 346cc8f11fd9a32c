"""Compiled kernels on disk: found again, safe against what others write, and never in the way."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import remap
from remap.kernels import PythonKernel, cache, nvrtc


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Give the directory of the cache, in a place of its own."""
    before = os.environ.get("REMAP_CACHE")
    os.environ["REMAP_CACHE"] = str(tmp_path / "cache")
    yield tmp_path / "cache" / "kernels"
    if before is None:
        del os.environ["REMAP_CACHE"]
    else:
        os.environ["REMAP_CACHE"] = before


def test_what_was_written_is_read(folder: Path) -> None:
    """Content comes back under its name, from a directory that is the owner's alone."""
    cache.write("name", b"content")
    assert cache.read("name") == b"content"
    assert cache.read("other") is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_damaged_files_are_not_used(folder: Path) -> None:
    """A file that was cut short or changed is as good as none, and is replaced by the next one."""
    cache.write("name", b"content")
    path = folder / "name"
    whole = path.read_bytes()
    for damaged in (b"", whole[:10], whole[:-1], whole[:-1] + b"!"):
        path.write_bytes(damaged)
        assert cache.read("name") is None
    cache.write("name", b"content")
    assert cache.read("name") == b"content"


def test_links_and_foreign_directories_are_not_followed(folder: Path, tmp_path: Path) -> None:
    """A link in the place of a file is not read, and a directory that others may write to is not used at all."""
    cache.write("name", b"content")
    os.rename(folder / "name", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / "name")
    assert cache.read("name") is None
    (folder / "name").unlink()
    folder.chmod(0o777)
    cache.write("name", b"content")
    assert not list(folder.iterdir())
    folder.chmod(0o700)


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """Where nothing can be kept, nothing is; a file in the place of the directory, or none wanted."""
    before = os.environ.get("REMAP_CACHE")
    blocked = tmp_path / "file"
    blocked.write_text("")
    try:
        for value in (str(blocked), "0", ""):
            os.environ["REMAP_CACHE"] = value
            cache.write("name", b"content")
            assert cache.read("name") is None
    finally:
        if before is None:
            del os.environ["REMAP_CACHE"]
        else:
            os.environ["REMAP_CACHE"] = before


def test_several_may_write_at_once(folder: Path) -> None:
    """Readers see nothing or the whole, whoever writes; no temporary file is left."""
    content = bytes(range(256)) * 4096
    seen: list[bytes | None] = []

    def work() -> None:
        for _ in range(20):
            cache.write("name", content)
            seen.append(cache.read("name"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert set(seen) <= {content}
    assert [one.name for one in folder.iterdir()] == ["name"]


def made() -> PythonKernel:
    """Return a kernel that nobody has compiled."""

    @remap.kernel
    def twice(x: remap.Slice, out: remap.DisjointSlice) -> None:
        i = remap.index_1d()
        out[i] = x[i] * 2

    return twice


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    """The same source for the same architecture is found; another type, architecture or option is another file."""
    if not nvrtc.available():
        pytest.skip("NVRTC is not installed")
    single, double = np.zeros(4, np.float32), np.zeros(4, np.float64)
    first = made().compile(single, single, arch="sm_80")
    (path,) = folder.iterdir()
    written = path.stat().st_mtime_ns
    again = made().compile(single, single, arch="sm_80")
    assert again.data == first.data
    assert path.stat().st_mtime_ns == written
    made().compile(double, double, arch="sm_80")
    made().compile(single, single, arch="sm_90")
    remap.kernel(fma=True)(made().function).compile(single, single, arch="sm_80")
    assert len(list(folder.iterdir())) == 4
