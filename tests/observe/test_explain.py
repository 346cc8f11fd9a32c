"""Explanations: each public error has one, and each program raises what it is to explain."""

from __future__ import annotations

import builtins
import inspect
from typing import Any

import pytest

import remap
from remap.cli import run as command
from remap.errors import InvalidValueError
from remap.observe.mistake import Mistake
from remap.observe.mistakes import MISTAKES, find


def public_errors() -> set[str]:
    """Return the names of all exceptions that the package shows."""
    found: set[str] = set()
    for name in dir(remap):
        if name.endswith(("Error", "Warning")):
            value: Any = getattr(remap, name)
            if inspect.isclass(value) and issubclass(value, BaseException) and not hasattr(builtins, name):
                found.add(name)
    return found


def test_every_error_is_explained() -> None:
    """No public error lacks an explanation, and nothing is explained that is none."""
    assert public_errors() == set(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=lambda one: one.name)
def test_the_program_raises_it(mistake: Mistake) -> None:
    """Each program, run by itself, ends with its error; that of the root with one of its subclasses."""
    message = mistake.message()
    raised = message.partition(": ")[0].rpartition(".")[2] if "Warning: " not in message else mistake.name
    if mistake.name == "RemapError":
        assert raised == "InvalidValueError"
    elif mistake.name == "RemapWarning":
        assert "RemapWarning: " in message
    else:
        assert raised == mistake.name, message


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=lambda one: one.name)
def test_everything_is_said(mistake: Mistake) -> None:
    """Each has a summary, a small program, a cause and a cure, in sentences."""
    assert len(mistake.program.splitlines()) <= 20
    assert mistake.summary[0].islower()
    assert mistake.cause.endswith(".")
    assert mistake.cure.endswith(".")


@pytest.mark.parametrize("name", ["OutOfMemoryError", "outofmemory", "remap.OutOfMemoryError"])
def test_names_are_taken_as_people_write_them(name: str) -> None:
    """Case, package and suffix do not matter."""
    assert find(name).name == "OutOfMemoryError"


def test_a_wrong_name_gets_the_nearest() -> None:
    """An unknown error is refused, with the one that may have been meant."""
    with pytest.raises(InvalidValueError, match="Did you mean PausedError"):
        find("PauseError")


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("CUDA_ERROR_OUT_OF_MEMORY", "OutOfMemoryError"),
        ("2", "OutOfMemoryError"),
        ("cuda_error_illegal_address", "IllegalAddressError"),
        ("719", "ContextLostError"),
        ("CUDA_ERROR_INVALID_VALUE", "DriverError"),
    ],
)
def test_what_stands_at_the_end_of_a_message_finds_the_error(asked: str, found: str) -> None:
    """CUDA's name of a result, and its number, lead to the error that remap raises for it."""
    assert find(asked).name == found


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`remap explain` lists all errors; with one it shows program, message, cause and cure."""
    monkeypatch.setenv("COLUMNS", "100")
    assert command(["explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(MISTAKES)
    assert command(["explain", "alignment"]) == 0
    said = capsys.readouterr().out
    assert "remap.create(1000)" in said
    assert "must be a multiple" in said
    assert "cure  " in said
    assert command(["explain", "NoSuchError"]) == 1


@pytest.mark.parametrize("columns", [60, 80])
def test_it_fits_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is wrapped to the terminal's width; only a program's own lines keep theirs."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert command(["explain"]) == 0
    assert command(["explain", "OutOfMemoryError"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= columns
