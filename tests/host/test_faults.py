"""A faulty kernel loses the context: for every call that acts in one, of every driver, until the process ends."""

from __future__ import annotations

from .support import run_child

PRELUDE = """
import inspect, sys
from remap.drivers.host import HostDriver
from remap.errors import ContextLostError, DriverError, IllegalAddressError
from remap.types import *
M = 2 << 20
D0 = Location(LocationKind.DEVICE, 0)
class Values:
    pointers = 0
    values = ()
driver = HostDriver()
driver.push_context(driver.retain_context(0))
handle = driver.create(M, AllocationProperties(D0))
address = driver.reserve(4 * M)
driver.map(address, M, handle)
driver.set_access(address, M, [(D0, Access.READ)])
plain = driver.allocate(100)
def launch(kernel, stream=0):
    driver.launch(kernel, LaunchConfig((1, 1, 1), (1, 1, 1)), stream, Values(), None)
def error_of(call, *arguments):
    try:
        call(*arguments)
    except DriverError as error:
        return error
    raise AssertionError(call)
"""


def test_faults_of_every_kind() -> None:
    """Unmapped, forbidden and read-only memory, memory over a border and another device's plain memory all fault."""
    for touch in (
        "l.read(address + M, 1)",
        "l.read(address + M - 1, 2)",
        "l.write(address, 1)",
        "l.read(plain, 101)",
        "l.read(5, 1)",
        "l.read(-5, 1)",
    ):
        out = run_child(
            PRELUDE
            + f"""
launch(lambda l: {touch})
error = error_of(driver.synchronize_context)
assert type(error) is IllegalAddressError, error
assert "kernel <lambda> " in str(error), error
print("ok")
driver.shutdown()
"""
        )
        assert out == "ok\n", touch


def test_another_devices_plain_memory_faults() -> None:
    """Kernels reach the plain memory of their own device only; copies reach that of every device."""
    run_child(
        PRELUDE
        + """
driver.push_context(driver.retain_context(1))
other = driver.allocate(100)
driver.copy(other, plain, 100, 0)
driver.copy(plain, other, 100, 0)
driver.synchronize_context()
launch(lambda l: l.read(other, 100))
driver.synchronize_context()
launch(lambda l: l.read(plain, 100))
assert error_of(driver.synchronize_context).code == 700
"""
    )


def test_every_call_reports_it() -> None:
    """After the wait that reports the fault, every call that acts in a context returns it, on every driver."""
    out = run_child(
        PRELUDE
        + """
driver.synchronize_context()
stream = driver.create_stream()
ran = []
launch(lambda l: l.write(address + M, 4), stream)
launch(lambda l: ran.append(1), stream)
driver._streams._by_handle[stream].wait(2)
driver.create(M, AllocationProperties(D0))  # nobody has waited: not yet reported
error = error_of(driver.synchronize_stream, stream)
assert error.code == 700 and error.name == "CUDA_ERROR_ILLEGAL_ADDRESS" and error.call == "cuStreamSynchronize"
assert "wrote 4 B" in str(error) and "nothing is mapped" in str(error)
assert ran == [], "work behind the fault is dropped"
calls = 0
fresh = HostDriver()
arguments = dict(
    device_properties=(0,), capabilities=(0,), can_access_peer=(0, 1), retain_context=(0,), release_context=(0,),
    push_context=(1,), granularity=(AllocationProperties(D0),), create=(M, AllocationProperties(D0)),
    release=(handle,), retain=(address,), properties_of=(handle,), reserve=(M,), free_range=(address, M),
    map=(address, M, handle), unmap=(address, M), set_access=(address, M, [(D0, Access.READ)]),
    get_access=(address, D0), address_range=(address,), pointer_info=(address,), allocate=(1,), free=(plain,),
    copy_to_device=(address, 1, 1, 0), copy_to_host=(1, address, 1, 0), copy=(address, address, 1, 0),
    fill=(address, 1, 1, 1, 0), destroy_stream=(stream,), synchronize_stream=(0,), stream_done=(0,),
    stream_capturing=(0,), wait_event=(0, 1), destroy_event=(1,), record_event=(1, 0), synchronize_event=(1,),
    event_done=(1,), elapsed=(1, 1), launch=(print, None, 0, Values(), None),
    export_handle=(handle, HandleType.POSIX_FD), import_handle=(1, HandleType.POSIX_FD),
)
# Calls that need no context go on working, as on CUDA, so that memory can be given back.
without_context = {
    "device_count", "device_properties", "can_access_peer", "capabilities", "retain_context", "release_context",
    "current_context", "push_context", "pop_context", "granularity", "create", "release", "retain", "properties_of",
    "reserve", "free_range", "map", "unmap", "set_access", "get_access", "export_handle", "import_handle",
}
for each in (driver, fresh):
    for name in dir(type(each)):
        if name.startswith("_") or name in {"name", "lock", "version", "shutdown", "after_fork"} | without_context:
            continue
        if "multicast" in name:
            continue
        call = getattr(each, name)
        required = [p for p in inspect.signature(call).parameters.values() if p.default is p.empty]
        error = error_of(call, *arguments.get(name, (1,) * len(required)))
        assert isinstance(error, IllegalAddressError), (name, error)
        calls += 1
driver.shutdown()
fresh.shutdown()
print(calls)
"""
    )
    assert int(out) > 60


def test_an_exception_in_a_kernel() -> None:
    """An exception that leaves a kernel is LAUNCH_FAILED, sticky, with the exception as its cause and in its text."""
    run_child(
        PRELUDE
        + """
def divide(launch):
    return 1 / 0
launch(divide)
for call in (driver.synchronize_context, driver.memory_info):
    error = error_of(call)
    assert isinstance(error, ContextLostError) and error.code == 719, error
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "kernel divide on device 0: ZeroDivisionError: division by zero" in str(error)
"""
    )


def test_a_kernel_cannot_hide_its_fault() -> None:
    """A kernel that swallows the exception has faulted all the same."""
    run_child(
        PRELUDE
        + """
def careless(launch):
    try:
        launch.read(address + 2 * M, 8)
    except Exception:
        pass
launch(careless)
assert error_of(driver.synchronize_context).code == 700
"""
    )


def test_views_end_with_the_launch() -> None:
    """A launch that is kept and used later gives no memory."""
    run_child(
        PRELUDE
        + """
kept = []
launch(kept.append)
driver.synchronize_context()
assert error_of(kept[0].read, address, 1).code == 1
"""
    )
