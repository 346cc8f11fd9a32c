"""Opening the CUDA driver says exactly why it cannot, and forgets nothing of what makes it work."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys

import pytest

from remap.drivers.cuda import CudaDriver
from remap.drivers.cuda.bindings import dotted
from remap.drivers.cuda.capabilities import kernel_has_hmm
from remap.errors import RemapError

NO_BINDINGS = """
import sys
sys.modules["cuda.bindings"] = None  # an import of it fails, as where it is not installed
from remap.drivers.cuda import CudaDriver
try:
    CudaDriver()
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="this machine has libcuda")
def test_without_the_library_the_error_names_it() -> None:
    """Where there is no NVIDIA driver, the message says that, and what to do."""
    with pytest.raises(RemapError, match="libcuda") as caught:
        CudaDriver()
    assert "Install the NVIDIA driver" in str(caught.value)


def test_without_the_bindings_the_error_says_how_to_install_them() -> None:
    """Where cuda-bindings is not installed, `remap.drivers.cuda` imports, and opening names the package."""
    done = subprocess.run(
        [sys.executable, "-c", NO_BINDINGS], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.startswith("RemapError")
    assert "pip install 'remap[cu13]'" in done.stdout


def test_versions_are_written_as_people_write_them() -> None:
    """CUDA counts 12.9 as 12090."""
    assert [dotted(version) for version in (12090, 13000, 12041)] == ["12.9", "13.0", "12.4"]


@pytest.mark.parametrize(
    ("release", "has"),
    [
        ("5.15.0-100-generic", False),
        ("6.1.23", False),
        ("6.1.24-amd64", True),
        ("6.2.10", False),
        ("6.2.11", True),
        ("6.3", True),
        ("6.18.44-fc-v657-gpu", True),
        ("unknown", False),
    ],
)
def test_which_kernels_have_heterogeneous_memory_management(release: str, has: bool) -> None:
    """The fixes that HMM needs are in 6.1.24, 6.2.11 and 6.3."""
    assert kernel_has_hmm(release) is has
