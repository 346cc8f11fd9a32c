"""The rules of memory shared between processes: T14 and T17. They need a driver that `SupportsSharing`."""

# ruff: noqa: N802 (a test carries the number of its rule)

from __future__ import annotations

import os
import signal
import socket
from multiprocessing import get_context
from multiprocessing.context import SpawnContext

import pytest

from remap.drivers.protocol import SupportsSharing
from remap.errors import CudaResult
from remap.testing.bench import NONE, RW, Bench, DriverFactory, OpenDriver, refused
from remap.testing.children import LIMIT
from remap.types import HandleType, Host, HostNuma

FD = HandleType.POSIX_FD


class SharingRules:
    """One test or a few for each rule; part of `DriverConformance`, which gives the fixtures."""

    def test_T14_the_exporter_is_killed(self, bench: Bench, factory: DriverFactory) -> None:
        """A descriptor keeps the memory when its exporter was killed: the importer maps it and reads the bytes."""
        sharing = sharing_of(bench)
        descriptor, size = receive_from_a_killed_exporter(factory)
        assert size == bench.size
        handle = sharing.import_handle(descriptor, FD)
        address = bench.reserve(2 * size)
        for wrong in (size // 2, 2 * size):
            with refused(CudaResult.NOT_SUPPORTED):
                bench.driver.map(address, wrong, handle)
        bench.driver.map(address, size, handle)
        bench.driver.release(handle)
        os.close(descriptor)
        bench.grant(address, size, RW)
        assert bench.holds(address, size, 0x5A)
        bench.fill(address, 0x6B, size)
        assert bench.holds(address, size, 0x6B)

    def test_T17_the_handle_type_is_fixed_at_create(self, bench: Bench) -> None:
        """Exporting what was not created for it is refused."""
        with refused(CudaResult.INVALID_VALUE):
            sharing_of(bench).export_handle(bench.create(), FD)

    def test_T17_host_memory(self, bench: Bench) -> None:
        """Memory at HOST takes no handle type; at HOST_NUMA a POSIX descriptor works."""
        sharing = sharing_of(bench)
        with refused(CudaResult.INVALID_VALUE):
            bench.driver.create(bench.size, bench.properties(Host(), FD))
        handle = bench.create(None, HostNuma(0), FD)
        descriptor = sharing.export_handle(handle, FD)
        assert isinstance(descriptor, int)
        os.close(descriptor)

    def test_T17_foreign_descriptors(self, bench: Bench) -> None:
        """Importing a descriptor of something else, or a closed one, is UNKNOWN."""
        sharing = sharing_of(bench)
        reading, writing = os.pipe()
        with refused(CudaResult.UNKNOWN):
            sharing.import_handle(reading, FD)
        os.close(reading)
        os.close(writing)
        with refused(CudaResult.UNKNOWN):
            sharing.import_handle(writing, FD)

    def test_T17_an_import_carries_no_rights(self, bench: Bench) -> None:
        """An import is the same memory, however the exporter maps it, and its mappings begin with no access."""
        sharing = sharing_of(bench)
        handle = bench.create(None, None, FD)
        descriptor = sharing.export_handle(handle, FD)
        assert isinstance(descriptor, int)
        address = bench.reserve(2 * bench.size)
        bench.driver.map(address, bench.size, handle)
        bench.grant(address, bench.size, RW)
        bench.fill(address, 0x1F, bench.size)
        bench.driver.unmap(address, bench.size)
        imported = sharing.import_handle(descriptor, FD)
        os.close(descriptor)
        alias = address + bench.size
        bench.driver.map(alias, bench.size, imported)
        bench.driver.release(imported)
        assert bench.driver.get_access(alias, bench.device) is NONE
        bench.grant(alias, bench.size, RW)
        assert bench.holds(alias, bench.size, 0x1F)

    def test_T17_memory_lives_as_long_as_anything_of_it(self, bench: Bench) -> None:
        """Memory stays while a handle, a mapping or a descriptor lives, and is free after the last."""
        sharing, before, size = sharing_of(bench), bench.free_memory(), bench.size
        handle = bench.driver.create(size, bench.properties(None, FD))
        descriptor = sharing.export_handle(handle, FD)
        assert isinstance(descriptor, int)
        bench.driver.release(handle)
        assert bench.free_becomes(before - size)
        handle = sharing.import_handle(descriptor, FD)
        os.close(descriptor)
        assert bench.free_becomes(before - size)
        address = bench.reserve()
        bench.driver.map(address, size, handle)
        bench.driver.release(handle)
        assert bench.free_becomes(before - size)
        bench.driver.unmap(address, size)
        assert bench.free_becomes(before)


def sharing_of(bench: Bench) -> SupportsSharing:
    """Return the driver as one that shares memory; skip the test where it does not."""
    driver = bench.driver
    if not isinstance(driver, SupportsSharing) or not driver.capabilities(0)["posix_fd"]:
        pytest.skip(f"the driver {driver.name} does not share memory through descriptors")
    return driver


def receive_from_a_killed_exporter(factory: DriverFactory) -> tuple[int, int]:
    """Return the descriptor and the size of memory full of 0x5A, whose exporter has been killed since."""
    spawn: SpawnContext = get_context("spawn")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = spawn.Process(target=_export_and_die, args=(factory, theirs), daemon=True)
        child.start()
        theirs.close()
        ours.settimeout(LIMIT)
        message, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
        child.join(LIMIT)
        died, status = not child.is_alive(), child.exitcode
        child.kill()
        child.join()
        child.close()
    assert descriptors, "the exporter ended without sending a descriptor"
    assert died
    assert status == -signal.SIGKILL, f"the exporter was to be killed; it ended with {status}"
    os.set_inheritable(descriptors[0], False)
    return descriptors[0], int(message)


def _export_and_die(factory: DriverFactory, channel: socket.socket) -> None:
    bench = Bench(OpenDriver(factory))
    sharing = sharing_of(bench)
    handle = bench.create(None, None, FD)
    address = bench.reserve()
    bench.driver.map(address, bench.size, handle)
    bench.grant(address, bench.size, RW)
    bench.fill(address, 0x5A, bench.size)
    descriptor = sharing.export_handle(handle, FD)
    assert isinstance(descriptor, int)
    socket.send_fds(channel, [str(bench.size).encode()], [descriptor])
    os.kill(os.getpid(), signal.SIGKILL)
