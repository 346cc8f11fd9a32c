"""Progress: one line on a terminal, one output in a notebook, and nothing where nobody looks."""

from __future__ import annotations

import importlib
import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest

import remap
from remap import MiB

MOVE = """
import remap
with remap.allocate("8MiB", resident=0) as buffer:
    bar = remap.progress_bar("going to <sleep>")
    remap.pause(buffer, progress=bar)
    remap.resume(buffer, progress=bar)
"""


def test_it_follows_a_call() -> None:
    """It says how far the latest call has got, as text and as HTML without JavaScript that escapes its label."""
    bar = remap.progress_bar("a <b>")
    with remap.allocate(8 * MiB, resident=0) as buffer:
        remap.pause(buffer, progress=bar)
        assert (bar.done, bar.total) == (8 * MiB, 8 * MiB)
        remap.resume(buffer, progress=bar)
    assert re.fullmatch(r"a <b>: 8 MiB of 8 MiB(, [\d.]+ GB/s)? \[={30}\]", str(bar))
    html = bar._repr_html_()
    assert f'<progress max="{8 * MiB}" value="{8 * MiB}">' in html
    assert "a &lt;b&gt;" in html
    bar(0, 0)
    assert "0 B of 0 B" in str(bar)


def test_half_of_it() -> None:
    """The bar is as long as what has been done."""
    bar = remap.progress_bar()
    bar(1 * MiB, 2 * MiB)
    assert str(bar).endswith(f"[{'=' * 15}{' ' * 15}]")


def test_on_a_terminal() -> None:
    """A terminal sees one line for each call, written over until it is complete."""
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", MOVE], stderr=theirs, stdout=subprocess.PIPE, check=False)
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 4096):
            said += part
    except OSError:  # its other end is closed, and everything was read
        pass
    os.close(ours)
    assert (done.returncode, done.stdout) == (0, b"")
    assert said.count(b"8 MiB of 8 MiB") >= 2
    assert said.count(b"\n") == 2


def test_no_terminal_at_all() -> None:
    """Into a file nothing is written, and a process without an error output works, too."""
    script = "import sys\n{}" + MOVE
    for before in ("", "sys.stderr = None"):
        command = [sys.executable, "-c", script.format(before)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def needed(name: str) -> Any:
    """Import a package that the documentation's tools bring, or skip."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"needs {name}: {error}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_in_a_notebook() -> None:
    """Each call is one output of the notebook, which ends as complete."""
    client, form = needed("nbclient"), needed("nbformat")
    needed("ipykernel")
    notebook = form.v4.new_notebook(cells=[form.v4.new_code_cell(MOVE)])
    client.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    shown = [one for one in notebook.cells[0].outputs if one.output_type == "display_data"]
    assert len(shown) == 2
    for one in shown:
        assert "going to &lt;sleep&gt;: 8 MiB of 8 MiB" in one.data["text/html"]
