"""The command as a whole: every part is documented, and every ending has its exit status."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import click
import pytest

from remap.cli import cli


def remap(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, with warnings as errors."""
    import os

    return subprocess.run(
        [sys.executable, "-W", "error", "-c", "from remap.cli import main; main()", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def commands(
    command: click.Command = cli, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command with the words that name it."""
    yield path, command
    if isinstance(command, click.Group):
        for name, one in command.commands.items():
            yield from commands(one, (*path, name))


@pytest.mark.parametrize(
    ("path", "command"),
    list(commands()),
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_everything_is_documented(path: tuple[str, ...], command: click.Command) -> None:
    """Every command and every option says what it is for."""
    assert command.help, path
    for parameter in command.params:
        if isinstance(parameter, click.Argument):  # arguments carry no help of their own
            assert parameter.human_readable_name.upper().strip("[]") in command.help, (path, parameter.name)
            continue
        assert isinstance(parameter, click.Option)
        assert parameter.help, (path, parameter.name)


@pytest.mark.parametrize(
    "arguments", [(), ("-h",), ("--help",), ("demo",), ("demo", "-h"), ("demo", "vector-add", "-h")]
)
def test_help(arguments: tuple[str, ...]) -> None:
    """Help is success, and lists what there is."""
    done = remap(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: remap")
    if arguments == ("demo",):
        assert "vector-add" in done.stdout


def test_version() -> None:
    """`--version` prints the version of the installed package."""
    try:
        installed = version("remap")
    except PackageNotFoundError:
        pytest.skip("remap runs from its sources here and is not installed")
    done = remap("--version")
    assert (done.returncode, done.stdout) == (0, f"remap, version {installed}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("paint",),
        ("--colour",),
        ("demo", "paint"),
        ("demo", "vector-add", "--driver", "vulkan"),
        ("demo", "vector-add", "extra"),
    ],
)
def test_misuse(arguments: tuple[str, ...]) -> None:
    """Misuse is 64, which cannot be taken for waived (A2), and says where help is."""
    done = remap(*arguments)
    assert (done.returncode, done.stdout) == (64, "")
    assert "--help" in done.stderr or "Usage:" in done.stderr


def test_debug_shows_where_an_error_comes_from() -> None:
    """An error is one message; with REMAP_DEBUG it is a traceback."""
    arguments = ("demo", "vector-add", "--driver", "host", "--device", "99")
    plain = remap(*arguments, REMAP_DEBUG="")
    assert (plain.returncode, len(plain.stderr.splitlines())) == (1, 1)
    assert plain.stderr.startswith("error: device 99")
    debug = remap(*arguments, REMAP_DEBUG="1")
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr


def test_reader_that_goes_away() -> None:
    """A reader that closes the pipe early ends the command without a message."""
    script = (
        f"{sys.executable} -c 'from remap.cli import main; main()' demo vector-add --driver host | head -n 1"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""
