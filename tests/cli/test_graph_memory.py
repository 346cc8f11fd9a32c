"""`remap demo graph-memory`: the four experiments, their report, JSON and picture, and every exit status (C3 … C9)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remap.sizes import MiB

DRIVER = os.environ.get("REMAP_DRIVER", "host")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the demo in a process of its own, with warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", "from remap.cli import main; main()"]
    return subprocess.run(
        [*command, "demo", "graph-memory", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_all_four(tmp_path: Path) -> None:
    """One command shows the table of all four, the picture, and the advice that follows, and passes."""
    picture = tmp_path / "footprint.svg"
    done = run("--driver", DRIVER, "--plot", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for number in range(1, 5):
        assert any(line.startswith(f"{number}. ") for line in lines)
    assert "8 × 64 MiB = 512 MiB" in " ".join(done.stdout.split())
    assert lines[-1] == "PASS"
    assert not [line for line in lines if line.startswith("FAILED")]
    assert max(len(line) for line in lines if str(picture) not in line) <= 80
    assert picture.read_text().count("<svg") == 1


def test_json() -> None:
    """The JSON has the figures of every step and the relations that hardware shows, and is alone on the output."""
    done = run("--driver", DRIVER, "--json", "--bytes", "64MiB", "--graphs", "4")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    n, g, e = found["bytes"], found["graphs"], found["experiments"]
    assert (n, g, found["passed"]) == (64 * MiB, 4, True)
    assert e["1"]["addresses"][0] == e["1"]["addresses"][1]
    assert (e["2"]["instantiated"], e["2"]["launched"], e["2"]["trimmed"]) == (0, [n] * g, 0)
    assert len(set(e["2"]["addresses"])) == g
    rising = [n * step for step in range(1, g + 1)]
    assert (e["3"]["launched"], e["3"]["overlapped"], e["3"]["done"]) == (rising, True, n * g)
    assert e["3"]["overlap_ns"] > 0
    assert e["4"]["launched"] == rising
    assert [e["4"][key] for key in ("trimmed_while_held", "freed", "trimmed")] == [n * g, n * g, 0]
    for experiment in e.values():
        assert experiment["passed"]
        assert experiment["steps"][0]["used"] == 0
        assert {"used", "used_high", "reserved", "reserved_high"} <= experiment["steps"][0].keys()
    assert len(found["advice"]) == 4


def test_one_experiment() -> None:
    """`--experiment` runs what is named, in order, and the advice keeps to what was seen."""
    done = run("--driver", DRIVER, "--json", "--experiment", "2", "--experiment", "1", "--graphs", "2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["experiments"]) == ["1", "2"]
    assert not any("Budget" in line for line in found["advice"])


def test_the_kernel_of_the_host_does_not_depend_on_luck() -> None:
    """Without any spin, kernels on the host driver still wait until all that are to overlap have begun."""
    done = run("--driver", "host", "--json", "--experiment", "3", "--spin", "0")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["experiments"]["3"]["overlapped"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--experiment", "5"),
        ("--experiment", "two"),
        ("--graphs", "0"),
        ("--bytes", "64MB"),
        ("--bytes", "much"),
        ("--plot", "footprint.gif"),
        ("--spin", "-1"),
        ("--driver", "vulkan"),
        ("extra",),
    ],
)
def test_misuse(arguments: tuple[str, ...]) -> None:
    """Misuse is 64, and prints nothing on the output."""
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (64, ""), done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--bytes", "1GiB", "--graphs", "64"), "Use a smaller --bytes or fewer --graphs"),
        (("--bytes", "0"), "one byte at least"),
        (("--device", "99"), "device 99"),
    ],
)
def test_errors(arguments: tuple[str, ...], words: str) -> None:
    """What cannot be is one message with the next step, and status 1."""
    done = run("--driver", "host", *arguments)
    assert done.returncode == 1
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_waived() -> None:
    """Without a GPU, asking for CUDA is waived (C8)."""
    if DRIVER == "cuda":
        pytest.skip("there is one")
    done = run("--driver", "cuda")
    assert done.returncode == 2
    assert done.stderr.startswith("waived: ")
