"""The command as a whole: every part is documented, and every ending has its exit status."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import pytest

import remap as remap_package
from remap.cli import cli
from remap.cli.environment import _OURS, VARIABLES, present, unknown


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


def test_module() -> None:
    """`python -m remap` is the same command, for where the script is not on the path."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "remap", "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == remap("--help").stdout


@pytest.mark.parametrize("columns", ["60", "80", "100"])
def test_help_is_whole(columns: str) -> None:
    """No line of the lists of commands is cut off, and none is wider than a narrow terminal."""
    for arguments in (("-h",), ("demo", "-h")):
        text = remap(*arguments, COLUMNS=columns).stdout
        assert "..." not in text.partition("Commands:")[2]
        assert max(map(len, text.splitlines())) <= int(columns)


def test_environment_variables_are_listed() -> None:
    """Every REMAP_ variable that the sources read is in the help and in the documentation, and nothing else is."""
    source = Path(remap_package.__file__).parent
    named = {
        name
        for path in source.rglob("*.py")
        for name in re.findall(r'"(REMAP_[A-Z_]+)"', path.read_text("utf-8"))
    }
    assert set(VARIABLES) == named - set(_OURS)
    text = remap("--help").stdout
    page = (Path(__file__).parents[2] / "docs" / "environment.md").read_text()
    for name, what in VARIABLES.items():
        assert re.search(rf"^  {name} ", text, re.MULTILINE)
        assert re.search(rf"^\| `{name}` \|", page, re.MULTILINE)
        assert len(what) < 70
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(VARIABLES)


def test_misspelt_variables_are_noticed() -> None:
    """`remap doctor` looks for variables that are almost ours."""
    environment = {"REMAP_DRIVER": "host", "REMAP_DRIVR": "cuda", "REMAP_TRACE_OWNER": "7", "HOME": "/"}
    assert present(environment) == {"REMAP_DRIVER": "host"}
    assert unknown(environment) == ["REMAP_DRIVR"]


@pytest.mark.parametrize(
    "arguments", [("map", "none.json"), ("trace", "none.json"), ("map", "a.json", "--since", "b")]
)
def test_files_that_are_not_there(arguments: tuple[str, ...]) -> None:
    """A missing file is named in words."""
    done = remap(*arguments)
    assert done.returncode == 1
    assert re.fullmatch(r"error: \S+: no such file or directory\n", done.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", "--out"),
        ("map", "x.json", "--html"),
        ("demo", "graph-memory", "--plot"),
    ],
)
def test_files_that_cannot_be_written(arguments: tuple[str, ...]) -> None:
    """A place where nothing can be written is refused before the work, not after it."""
    done = remap(*arguments, "/no/such/folder/out.svg")
    assert (done.returncode, done.stdout) == (64, "")
    assert "there is no directory /no/such/folder" in " ".join(done.stderr.split())


def test_reader_that_goes_away() -> None:
    """A reader that closes the pipe early ends the command without a message."""
    script = (
        f"{sys.executable} -c 'from remap.cli import main; main()' demo vector-add --driver host | head -n 1"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize(
    "demo", [("vector-add",), ("elastic", "--peak", "8MiB"), ("pause", "--size", "2MiB"), ("share",), ("kernels",),
             ("graph-memory", "--spin", "1")], ids=lambda demo: demo[0],
)  # fmt: skip
def test_demos_fit_the_terminal(demo: tuple[str, ...], columns: int) -> None:
    """Without colour and in a narrow terminal, only what is one word (a path) is longer than a line."""
    done = remap("demo", *demo, "--driver", "host", COLUMNS=str(columns))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "e+" not in done.stdout
    for line in done.stdout.splitlines():
        assert len(line) <= columns or " " not in line.strip(), line
