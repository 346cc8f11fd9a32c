"""Programs that end while Python functions of theirs are still to be called."""

from __future__ import annotations

import subprocess
import sys

import pytest

import remap

BEGIN = """
import numpy as np, remap
from remap.testing.graph_kernels import SOURCE, Kernels
module = remap.load(remap.source(SOURCE), device=0)
kernels = Kernels(module)
kernels.release()
stream = remap.Stream(0)
kernels.hold.launch(np.int64(kernels.ticks), grid=1, block=1, stream=stream)
"""
STREAM = """
with remap.device(0).current():
    remap.driver().launch_host_function(stream.handle, lambda: print("called", flush=True))
"""
GRAPH = """
graph = remap.Graph(0)
held = graph.launch(kernels.hold, np.int64(kernels.ticks), grid=1, block=1)
graph.host(print, "called", after=[held])
executable = graph.instantiate()
executable.launch(stream)
"""


@pytest.mark.parametrize("code", [STREAM, GRAPH], ids=["stream", "graph"])
def test_functions_are_called_before_the_end(code: str) -> None:
    """A program that ends with functions behind a running kernel ends in silence, once they were called.

    On the host driver they may be left out, as its threads are Python's own.
    """
    command = [sys.executable, "-W", "error", "-c", BEGIN + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "called\n" or remap.driver().name == "host"
