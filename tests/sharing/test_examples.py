"""The demo and the examples of sharing run, on whatever driver the tests run on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .support import COMMAND
from .test_exchange import mpiexec

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str, limit: float = 110.0) -> str:
    """Run a command, which must succeed in silence on its error stream, and return what it printed."""
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=False, timeout=limit)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


def test_demo_share() -> None:
    """`remap demo share` shows both views, and passes."""
    shown = run(*COMMAND, "demo", "share")
    assert shown.endswith("PASS\n")
    assert shown.count("4 MiB at 0x") == 2
    for text in ('"written first"', '"written later"', "refused"):
        assert text in " ".join(shown.split())


def test_multiprocessing() -> None:
    """The reader sees what was written before and after it opened the buffer."""
    assert run(sys.executable, "-W", "error", "share_multiprocessing.py").split() == (
        ["the", "reader", "sees", "499500", "and", "then", "999000"]
    )


def test_broker() -> None:
    """Weights are there again after their worker was killed, and not before they were loaded whole."""
    shown = run(sys.executable, "-W", "error", "share_broker.py").splitlines()
    assert shown == [
        "broker: serving",
        "a worker that was loading was killed by SIGKILL",
        "the broker keeps: loading",
        "a worker that was serving was killed by SIGKILL",
        "the broker keeps: loading weights",
        "same address: True",
        "same bytes: True",
    ]


def test_mpi() -> None:
    """Each of four ranks reads its neighbour's memory."""
    shown = run(mpiexec(), "-n", "4", sys.executable, "-W", "error", "share_mpi.py").splitlines()
    assert shown == [f"rank {rank} read {(rank + 1) % 4} from rank {(rank + 1) % 4}" for rank in range(4)]


def test_torch() -> None:
    """Each of two ranks reads its neighbour's memory."""
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "share_torch.py"],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.stdout.splitlines() == ["rank 0 read 2 from rank 1", "rank 1 read 1 from rank 0"], done.stderr
