"""The commands with options, terminals and streams that nobody thought of: a line and an exit status, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-W", "error", "-c", "from remap.cli import main; main()"]


def remap(*arguments: str, shell: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own; `shell` is what a shell adds behind it."""
    words = [*COMMAND, *arguments]
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {shell}', "sh", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "pause", "--size", "0"),
        ("demo", "pause", "--size", "0.0GiB"),
        ("demo", "graph-memory", "--spin", "nan"),
    ],
)
def test_numbers_that_are_none_are_misuse(arguments: tuple[str, ...]) -> None:
    """What a program cannot do anything with is said at once, with the status of misuse."""
    done = remap(*arguments)
    assert done.returncode == 64
    assert "Traceback" not in done.stderr
    assert arguments[2] in done.stderr


@pytest.mark.parametrize("limit", ["nan", "inf", "1e300"])
def test_any_time_limit(limit: str) -> None:
    """Asking a broker that is not there ends with one line, whatever the time limit."""
    done = remap("serve", "--status", "--path", "/nonexistent/broker", "--timeout", limit)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [("explain",), ("demo", "vector-add"), ("-h",)])
def test_a_closed_standard_output(arguments: tuple[str, ...]) -> None:
    """A program that was started with no output at all does its work all the same."""
    done = remap(*arguments, shell=">&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_without_a_size() -> None:
    """Where the terminal says that it has no columns, lines are as long as anywhere; nothing was printed."""
    done = remap("demo", "vector-add", COLUMNS="0")
    assert done.returncode == 0
    assert done.stdout.rstrip().endswith("PASS")
