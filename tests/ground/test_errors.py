"""Errors: what they say, what they are, and that they cross processes."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import remap
from remap import errors
from remap.errors import CudaResult, DriverError, RemapError, driver_error


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


def test_a_sticky_error_is_remembered() -> None:
    """After a sticky result this process knows that its context is lost (in a child, since it stays so)."""
    program = (
        "from remap.errors import *; from remap.errors import driver_error, context_lost\n"
        "assert not context_lost()\n"
        "error = driver_error('cuCtxSynchronize', 700)\n"
        "assert isinstance(error, IllegalAddressError) and isinstance(error, ContextLostError)\n"
        "assert 'reported by, not caused by' in str(error) and context_lost()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
