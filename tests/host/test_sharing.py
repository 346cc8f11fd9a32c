"""What importers refuse, and how memory is counted while it is shared."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from remap.drivers.host import HostDriver
from remap.errors import CudaResult, DriverError, OutOfMemoryError, RemapError
from remap.types import Access, AllocationProperties, HandleType, HostNuma, Location

from .support import GRANULE, LIMIT, Host, device, run_child

FD = HandleType.POSIX_FD
ADD_SEALS = 1033


def shareable(host: Host, at: Location | None = None, granules: int = 1) -> int:
    """Create shareable memory."""
    return host.driver.create(granules * GRANULE, AllocationProperties(at or device(), frozenset({FD})))


def export(host: Host, handle: int) -> int:
    """Return a descriptor of shareable memory."""
    descriptor = host.driver.export_handle(handle, FD)
    assert isinstance(descriptor, int)
    return descriptor


def memory_file(size: int, seals: int, name: str = "remap device 0") -> int:
    """Return a memory file such as a hostile process could send."""
    descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    ("size", "seals", "name", "reason"),
    [
        (GRANULE, 0, "remap device 0", "sealed"),
        (GRANULE, 0x1 | 0x2, "remap device 0", "sealed"),  # could still grow
        (0, 0x7, "remap device 0", "granularity"),
        (GRANULE + 4096, 0x7, "remap device 0", "granularity"),
        (GRANULE, 0x7, "something else", "not made by"),
        (GRANULE, 0x7, "remap device 00000", "not made by"),
        (GRANULE, 0x7, "remap device 63", "does not have"),
        (GRANULE, 0x7, "remap host_numa 9", "does not have"),
    ],
)
def test_hostile_files(host: Host, size: int, seals: int, name: str, reason: str) -> None:
    """A memory file that could change its size, or that is not what it must be, is UNKNOWN."""
    descriptor = memory_file(size, seals, name)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DriverError, match=reason) as error:
        host.driver.import_handle(descriptor, FD)
    assert error.value.code == CudaResult.UNKNOWN
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)


def test_other_things(host: Host, tmp_path: Path) -> None:
    """Files, directories, sockets and numbers that are no descriptors are UNKNOWN."""
    path = tmp_path / "file"
    path.write_bytes(bytes(GRANULE))
    for flags, where in ((os.O_RDWR, path), (os.O_RDONLY, tmp_path)):
        descriptor = os.open(where, flags)
        with pytest.raises(DriverError) as error:
            host.driver.import_handle(descriptor, FD)
        assert error.value.code == CudaResult.UNKNOWN
        os.close(descriptor)
    for number in (-1, 1 << 20, 1 << 70):
        with pytest.raises(DriverError) as error:
            host.driver.import_handle(number, FD)
        assert error.value.code == CudaResult.UNKNOWN
    with pytest.raises(DriverError) as error:
        host.driver.import_handle(b"x" * 64, HandleType.FABRIC)
    assert error.value.code == CudaResult.NOT_SUPPORTED


def test_an_exported_file_cannot_be_resized(host: Host) -> None:
    """Whoever holds the descriptor can neither shrink nor grow the memory, and sees nothing but it."""
    descriptor = export(host, shareable(host))
    for size in (0, 2 * GRANULE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    assert os.fstat(descriptor).st_size == GRANULE
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_an_import_knows_its_place(open_host: Callable[..., Host]) -> None:
    """The location comes along, rights and handle types do not; an import cannot be exported again."""
    host = open_host(numa_nodes=2)
    for place in (device(1), HostNuma(1)):
        descriptor = export(host, shareable(host, place))
        handle = host.driver.import_handle(descriptor, FD)
        assert host.driver.properties_of(handle) == AllocationProperties(place)
        with pytest.raises(DriverError) as error:
            host.driver.export_handle(handle, FD)
        assert error.value.code == CudaResult.INVALID_VALUE
        os.close(descriptor)


def test_two_imports_stand_alone(host: Host) -> None:
    """Each import has its own handle, and releasing one leaves the other; the memory counts once."""
    driver = host.driver
    handle = shareable(host)
    descriptor = export(host, handle)
    one, two = driver.import_handle(descriptor, FD), driver.import_handle(descriptor, FD)
    assert len({handle, one, two}) == 3
    assert driver.memory_info().used == GRANULE
    os.close(descriptor)
    driver.release(one)
    with pytest.raises(DriverError):
        driver.release(one)
    driver.release(handle)
    address = driver.reserve(GRANULE)
    driver.map(address, GRANULE, two)
    driver.set_access(address, GRANULE, [(device(), Access.READ)])
    assert driver.memory_info().used == GRANULE
    driver.release(two)
    driver.unmap(address, GRANULE)
    assert driver.memory_info().used == 0


def test_exported_memory_counts_while_anybody_holds_it(open_host: Callable[..., Host]) -> None:
    """A descriptor keeps its memory, so the budget stays taken; creating looks again before it gives up."""
    host = open_host(memory=2 * GRANULE)
    driver = host.driver
    handle = shareable(host, granules=2)
    descriptor = export(host, handle)
    driver.release(handle)
    with pytest.raises(OutOfMemoryError):
        driver.create(GRANULE, AllocationProperties(device()))
    os.close(descriptor)
    driver.create(GRANULE, AllocationProperties(device()))


def test_no_descriptors_leak(host: Host) -> None:
    """Creating, exporting, importing and releasing leaves as many descriptors as before."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        handle = shareable(host)
        descriptor = export(host, handle)
        imported = host.driver.import_handle(descriptor, FD)
        os.close(descriptor)
        host.driver.release(handle)
        host.driver.release(imported)
    host.driver.memory_info()
    assert len(os.listdir("/proc/self/fd")) == before


# -- a ledger that several processes share --

OTHER = """
import sys
from remap.drivers.host import HostDriver
from remap.errors import OutOfMemoryError
from remap.types import *
D0 = Location(LocationKind.DEVICE, 0)
driver = HostDriver(memory="8MiB")
driver.push_context(driver.retain_context(0))
print(driver.memory_info().free >> 20)
driver.create(4 << 20, AllocationProperties(D0))
try:
    driver.create(4 << 20, AllocationProperties(D0))
except OutOfMemoryError as error:
    print(error)
import os, signal
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "die" else driver.shutdown()
"""


def test_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_host: Callable[..., Host]) -> None:
    """Processes that name the same file draw on one budget; what a killed one held comes back."""
    path = tmp_path / "state"
    monkeypatch.setenv("REMAP_HOST_STATE", str(path))
    host = open_host(memory="8MiB")
    driver = host.driver
    handle = driver.create(GRANULE, AllocationProperties(device()))
    assert driver.memory_info().free == 3 * GRANULE
    out = run_child(OTHER, "end", REMAP_HOST_STATE=str(path))
    assert out.startswith("6\n")
    assert "2 MiB of 8 MiB are free" in out
    assert driver.memory_info().free == 3 * GRANULE
    with pytest.raises(AssertionError):  # the child is killed
        run_child(OTHER, "die", REMAP_HOST_STATE=str(path))
    assert len(json.loads(path.read_text())) == 2
    assert driver.memory_info().free == 3 * GRANULE
    assert len(json.loads(path.read_text())) == 1
    driver.release(handle)
    assert json.loads(path.read_text()) == []
    assert path.stat().st_mode & 0o777 == 0o600


def test_ledger_counts_shared_memory_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_host: Callable[..., Host]
) -> None:
    """Memory that two drivers hold is one entry's worth, and stays counted when its exporter leaves."""
    monkeypatch.setenv("REMAP_HOST_STATE", str(tmp_path / "state"))
    exporter, importer = open_host(memory="8MiB"), open_host(memory="8MiB")
    handle = shareable(exporter)
    descriptor = export(exporter, handle)
    imported = importer.driver.import_handle(descriptor, FD)
    os.close(descriptor)
    assert importer.driver.memory_info().used == GRANULE
    exporter.driver.shutdown()
    assert importer.driver.memory_info().used == GRANULE
    importer.driver.release(imported)
    assert importer.driver.memory_info().used == 0


KEEPER = """
import socket, sys
link = socket.socket(fileno=int(sys.argv[1]))
_, fds, _, _ = socket.recv_fds(link, 1, 1)
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["leaves", "dies"])
def test_ledger_counts_what_is_kept_by_descriptors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_host: Callable[..., Host], end: str
) -> None:
    """Memory that only a process without a driver holds counts once, until that closes it; others may come and go."""
    path = tmp_path / "state"
    monkeypatch.setenv("REMAP_HOST_STATE", str(path))
    ours, theirs = socket.socketpair()
    exporter, other = open_host(memory="8MiB"), open_host(memory="8MiB")
    descriptor = export(exporter, shareable(exporter))
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with ours, theirs, keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        socket.send_fds(ours, [b"x"], [descriptor])
        assert keeper.stdout.readline() == "held\n"
        if end == "dies":
            # Its line as that of a process that died: the table does not tell the two apart.
            rows = json.loads(path.read_text())
            path.write_text(json.dumps([[row[0], row[1] + 1, *row[2:]] for row in rows]))
        else:
            exporter.driver.shutdown()
        imported = other.driver.import_handle(descriptor, FD)
        os.close(descriptor)
        assert other.driver.memory_info().used == GRANULE
        other.driver.release(imported)
        if end == "dies":
            exporter.driver.shutdown()
        assert other.driver.memory_info().used == GRANULE
        assert [row[0] for row in json.loads(path.read_text())] == [keeper.pid]
        keeper.stdin.write("\n")
        keeper.stdin.flush()
        keeper.wait(LIMIT)
        assert other.driver.memory_info().used == 0
    assert json.loads(path.read_text()) == []


@pytest.mark.parametrize(
    "content", ["{}", "[[1]]", "[[1, 2, 3, 4, 5, 6]]", '[[1, 2, 3, "a", 5, -6]]', "\x80", "[" * 5000]
)
def test_a_broken_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    """A file that is no table of ours is refused when the driver opens, and left as it is."""
    path = tmp_path / "state"
    path.write_text(content, encoding="latin-1")
    monkeypatch.setenv("REMAP_HOST_STATE", str(path))
    with pytest.raises(RemapError, match="REMAP_HOST_STATE"):
        HostDriver()
    assert path.read_text(encoding="latin-1") == content


def test_a_ledger_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that cannot be opened, and one that is no file, are named in the error."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for path in (tmp_path / "missing" / "state", tmp_path, tmp_path / "link"):
        monkeypatch.setenv("REMAP_HOST_STATE", str(path))
        with pytest.raises(RemapError, match="cannot be used"):
            HostDriver()
