"""The examples run, on whatever driver the tests run on, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example in a process of its own, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments], cwd=EXAMPLES, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("kind", ["plain", "mapped"])
def test_vector_add(kind: str) -> None:
    """The vector add passes on plain and on mapped memory, with nothing but the allocation changed (A8)."""
    done = run("vector_add.py", kind)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{kind} memory on the ")
    assert done.stdout.endswith("PASS\n")


def test_vector_add_says_how_to_call_it() -> None:
    """Without the name of a kind of memory, the example says what it takes."""
    done = run("vector_add.py")
    assert done.returncode == 1
    assert "plain|mapped" in done.stderr


WRONG = {
    "--quantum 0": "argument --quantum: 0: it is 1 or more",
    "--quantum -1": "argument --quantum: -1: it is 1 or more",
    "--requests 0": "argument --requests: 0: it is 1 or more",
    "--requests -3": "it is 1 or more",
    "--static 0": "it is 1 or more",
    "--layers 0": "it is 1 or more",
    "--layers many": "invalid positive value",
    "--longest 1": "--longest 1: a prompt has up to 8 tokens",
    "--longest 8": "--longest 8: a prompt has up to 8 tokens",
    "--static 1 --longest 16": "--static 1: there are to be 2 pages of 16, for 16 tokens",
    "--static 2 --longest 9": "--static 2: there are to be 2 pages of 16, for 9 tokens",
    "--heads 3": "--width 64: it is an even number for each of 3 heads",
    "--heads 64": "--width 64: it is an even number for each of 64 heads",
    "--width 30": "--width 30: it is an even number",
    "--kv-heads 3": "--kv-heads 3: they divide the 4 heads",
    "--vocabulary 8": "--vocabulary 8: a token is chosen among 40",
    "--report nowhere/report.json": "there is no such directory",
}


SERVE = """
import sys
sys.path.insert(0, "sleeping_models")
import serve
for options in sys.argv[1:]:
    try:
        serve.main(options.split())
    except SystemExit as ended:
        print(ended.code)
"""


def test_serving_with_wrong_options() -> None:
    """Each ends at once, with what is wrong and status 2."""
    pytest.importorskip("torch")
    pytest.importorskip("numba")
    done = run("-c", SERVE, *WRONG)
    assert done.stdout.split() == ["2"] * len(WRONG)
    told = [line for line in done.stderr.splitlines() if "error: " in line]
    for said, line in zip(WRONG.values(), told, strict=True):
        assert said in line


def test_double_buffer() -> None:
    """The double-buffered example gives right results (D7)."""
    done = run("double_buffer.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("PASS\n")
