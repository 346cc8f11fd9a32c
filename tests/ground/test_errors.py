"""Errors: what they say, what they are, and that they cross processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

import remap
from remap import errors
from remap.errors import CudaResult, DriverError, RemapError, context_lost, driver_error


def test_the_message_has_three_parts() -> None:
    """A message says what was asked, the rule, and the next step."""
    error = RemapError("mapping of 3 B", rule="a mapping is whole granules", next_step="Use 2 MiB")
    assert str(error) == "mapping of 3 B: a mapping is whole granules. Use 2 MiB"


def test_driver_errors_keep_call_name_and_number() -> None:
    """A driver's refusal carries its function, CUDA's name of the result and its number (invariant 15)."""
    error = driver_error("cuMemMap", 1, rule="ranges do not overlap")
    assert (error.call, error.name, error.code) == ("cuMemMap", "CUDA_ERROR_INVALID_VALUE", 1)
    assert "[cuMemMap: CUDA_ERROR_INVALID_VALUE (1)]" in str(error)


@pytest.mark.parametrize(
    ("call", "code", "kinds"),
    [
        ("cuMemCreate", CudaResult.OUT_OF_MEMORY, (remap.OutOfMemoryError, MemoryError)),
        ("cuMemAddressReserve", CudaResult.OUT_OF_MEMORY, (remap.OutOfAddressSpaceError, MemoryError)),
        ("cuMemMap", CudaResult.NOT_SUPPORTED, (remap.NotSupportedError,)),
        ("cuMemCreate", CudaResult.NOT_PERMITTED, (remap.NotPermittedError,)),
        ("cuMemMap", CudaResult.INVALID_VALUE, (DriverError,)),
    ],
)
def test_results_have_their_own_errors(call: str, code: int, kinds: tuple[type, ...]) -> None:
    """Memory that ran out is told from addresses that ran out, though CUDA gives both one name."""
    assert all(isinstance(driver_error(call, code), kind) for kind in kinds)


def test_every_error_is_public_and_documented() -> None:
    """Each error class can be caught as `remap.NAME` and says what it means."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 15
    for kind in kinds:
        assert getattr(remap, kind.__name__) is kind
        assert kind.__doc__


def test_errors_cross_processes() -> None:
    """Pickling keeps class, message, attributes and notes' owner, whatever the constructor takes."""
    one = driver_error("cuMemCreate", 2, rule="too large", next_step="Ask for less")
    other = pickle.loads(pickle.dumps(one))
    assert type(other) is type(one)
    assert str(other) == str(one)
    assert (other.call, other.code, other.next_step) == ("cuMemCreate", 2, "Ask for less")


def test_a_sticky_error_says_that_the_context_is_lost() -> None:
    """A sticky result has an error of its own; making one says nothing of this process's context (invariant 15)."""
    lost = context_lost()
    error = driver_error("cuCtxSynchronize", CudaResult.ILLEGAL_ADDRESS)
    assert isinstance(error, remap.IllegalAddressError)
    assert isinstance(error, remap.ContextLostError)
    assert "reported by, not caused by" in str(error)
    assert context_lost() == lost


LOST = """
import os
import remap
from remap import MiB
from remap.drivers import open
from remap.drivers.wrappers import Faulty
from remap.errors import CudaResult, context_lost
"""


def run(program: str) -> None:
    """Run a program in a process of its own, since a lost context stays lost."""
    environment = {**os.environ, "REMAP_DRIVER": "host"}
    subprocess.run([sys.executable, "-c", LOST + program], check=True, timeout=60, env=environment)


def test_a_refused_call_tells_that_the_context_is_lost() -> None:
    """The call that ends with a sticky result is what says so to the process (invariant 15)."""
    run(
        """
driver = Faulty(open("host"))
driver.fail("device_count", result=CudaResult.ILLEGAL_ADDRESS)
assert not context_lost()
try:
    driver.device_count()
except remap.IllegalAddressError:
    assert context_lost()
"""
    )


def test_the_first_wait_reports_a_fault_though_it_happened_before() -> None:
    """A kernel's fault is reported by the first close that waits, however long ago it was; the next is silent (15)."""
    run(
        """
from remap.drivers.host import guard
from remap.testing.bench import wait_until
from remap.types import LaunchConfig
class Values:
    pointers, values = 0, ()
one, two = remap.allocate(2 * MiB), remap.allocate(2 * MiB)
stream = remap.Stream(0)
one.fill(1, stream=stream)
two.fill(1, stream=stream)
with remap.device(0).current():
    driver = remap.driver()
    driver.launch(lambda launch: launch.read(5, 1), LaunchConfig((1, 1, 1), (1, 1, 1)), stream.handle, Values(), ())
assert wait_until(guard.context_lost)  # the kernel has faulted, and nobody has waited yet
assert not context_lost()
try:
    one.close()
except remap.IllegalAddressError:
    assert context_lost()
else:
    raise AssertionError("nobody was told")
two.close()
"""
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_has_lost_nothing() -> None:
    """A child of fork begins with no context, and so with none that is lost (invariant 10)."""
    run(
        """
driver = Faulty(open("host"))
driver.fail("device_count", result=CudaResult.ILLEGAL_ADDRESS)
try:
    driver.device_count()
except remap.IllegalAddressError:
    pass
child = os.fork()
if not child:
    os._exit(int(context_lost()))
assert os.waitpid(child, 0)[1] == 0
assert context_lost()
"""
    )
