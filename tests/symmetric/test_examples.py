"""The examples run, and every block of Python in the page about symmetric buffers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import remap

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "symmetric-and-multicast.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_there_are_blocks() -> None:
    """The blocks are found."""
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(tmp_path: Path, number: int) -> None:
    """A block runs by itself, in silence but for what it prints."""
    program = tmp_path / "block.py"
    program.write_text(BLOCKS[number])
    done = run(sys.executable, "-W", "error", str(program))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("multicast", [False, True])
def test_mpi(tmp_path: Path, multicast: bool) -> None:
    """Four ranks of MPI see each other's memory, on shared devices or, for a team, on a device each."""
    command = Path(sysconfig.get_path("scripts")) / "mpiexec"
    if importlib.util.find_spec("mpi4py") is None or not command.exists():
        pytest.skip("mpi4py and mpiexec are not installed: pip install remap[mpi]")
    if multicast and not remap.device(0).capabilities["multicast"]:
        pytest.skip(remap.device(0).capabilities["multicast"].reason)
    state = {"REMAP_EXAMPLE_MULTICAST": "1"} if multicast else {"REMAP_HOST_STATE": str(tmp_path / "state")}
    program = str(ROOT / "examples" / "mpi_symmetric.py")
    done = run(str(command), "-n", "4", sys.executable, "-W", "error", program, **state)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    expected: list[str] = []
    for rank in range(4):
        expected.append(f"rank {rank} sees 10240 in 4 ranks' memory")
        if multicast:
            expected.append(f"rank {rank} has the norm 21.909")  # 16 × (1 + 4 + 9 + 16), its root
    assert done.stdout.splitlines() == expected


def test_torch() -> None:
    """Two ranks of torch.distributed see each other's memory."""
    pytest.importorskip("torch")
    program = str(ROOT / "examples" / "torch_symmetric.py")
    done = run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", program)
    assert done.stdout.splitlines() == [f"rank {rank} sees 3072 in 2 ranks' memory" for rank in range(2)], (
        done.stderr
    )


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command and return how it ended."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, **environment},
    )
