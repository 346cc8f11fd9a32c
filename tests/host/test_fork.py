"""In a forked child the parent's driver is inert, its memory is not there, and a new driver can be opened."""

from __future__ import annotations

import sys

import pytest

from .support import run_child

PRELUDE = """
import os, warnings
from remap.drivers.host import HostDriver
from remap.errors import ForkedError
from remap.types import *
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: a fork with threads around
M = 2 << 20
D0 = Location(LocationKind.DEVICE, 0)
driver = HostDriver()
driver.push_context(driver.retain_context(0))
handle = driver.create(M, AllocationProperties(D0, frozenset({HandleType.POSIX_FD})))
address = driver.reserve(2 * M)
driver.map(address, M, handle)
driver.set_access(address, M, [(D0, Access.READ_WRITE)])
driver.fill(address, 5, 1, M, 0)
driver.synchronize_context()
plain = driver.allocate(10)

def in_child(body):
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_inert_in_the_child() -> None:
    """Every call raises `ForkedError` at once, though the parent held the locks; shutting down is silent."""
    run_child(
        PRELUDE
        + """
def body():
    for call in (driver.device_count, driver.memory_info, lambda: driver.unmap(address, M), driver.synchronize_context):
        try:
            call()
        except ForkedError as error:
            assert "fork" in str(error) and "Open another in the child" in str(error)
        else:
            raise AssertionError(call)
    with driver.lock:
        pass
    driver.shutdown()
with driver._machine.lock, driver.lock:
    in_child(body)
assert driver.address_range(address).size == M
driver.shutdown()
"""
    )


def test_nothing_of_the_parents_is_there() -> None:
    """The child has neither the parent's mappings nor its descriptors; the parent keeps both."""
    run_child(
        PRELUDE
        + """
def ranges():
    for line in open("/proc/self/maps"):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        yield start, end, line
def body():
    for start, end, line in ranges():
        assert not (start < address + 2 * M and address < end), line
        assert not (start <= plain < end), line
        assert "memfd:remap" not in line
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        assert "memfd:remap" not in name
before = len(os.listdir("/proc/self/fd"))
in_child(body)
assert len(os.listdir("/proc/self/fd")) == before
driver.fill(address, 6, 1, M, 0)
driver.synchronize_context()
driver.shutdown()
"""
    )


def test_a_new_driver_in_the_child() -> None:
    """A driver opened in the child works, also when the parent had lost its context."""
    run_child(
        PRELUDE
        + """
class Values:
    pointers = 0
    values = ()
def body():
    own = HostDriver()
    own.push_context(own.retain_context(0))
    where = own.reserve(M)
    own.map(where, M, own.create(M, AllocationProperties(D0)))
    own.set_access(where, M, [(D0, Access.READ_WRITE)])
    own.fill(where, 1, 1, M, 0)
    own.synchronize_context()
    own.shutdown()
in_child(body)
driver.launch(lambda l: l.read(1, 1), LaunchConfig((1, 1, 1), (1, 1, 1)), 0, Values(), ())
try:
    driver.synchronize_context()
except Exception:
    pass
in_child(body)
driver.shutdown()
"""
    )


@pytest.mark.skipif(sys.platform == "linux", reason="this is what happens elsewhere")
def test_other_platforms() -> None:
    """Elsewhere, opening names the platform."""
    run_child(
        """
from remap.drivers.host import HostDriver
from remap.errors import RemapError
import sys
try:
    HostDriver()
except RemapError as error:
    assert sys.platform in str(error)
"""
    )
