"""What the documentation shows, runs: every block of Python and every notebook, with warnings as errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from .pages import NOTEBOOKS, PAGES, ROOT, Block, blocks, cells, name_of

# Pages whose code needs more than an interpreter are run by the tests of what they are about.
ELSEWHERE = {
    "docs/graph-memory.md": "tests/graphs/test_docs.py",
    "docs/how-to/keep-a-torch-model.md": "tests/integrations/test_docs.py",
    "docs/how-to/keep-weights-alive.md": "tests/sharing/test_docs.py",
    "docs/kernels.md": "tests/pykernels/test_docs.py",
    "docs/memory-kinds.md": "tests/typed/test_docs.py",
    "docs/sharing.md": "tests/sharing/test_docs.py",
    "docs/symmetric-and-multicast.md": "tests/symmetric/test_examples.py",
}
CODE = [
    one
    for page in PAGES
    if name_of(page) not in ELSEWHERE
    for one in blocks(page)
    if one.language == "python"
]


def run(program: Path, code: str) -> None:
    """Run a program in a process of its own, with warnings as errors; it may only say something on stdout."""
    program.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=program.parent,
        env={**os.environ, "MPLBACKEND": "agg", "TMPDIR": str(program.parent)},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_blocks_are_found() -> None:
    """README and pages have code, and no page is left to a test that does not read it."""
    assert len([one for one in CODE if one.page == "README.md"]) >= 4
    assert len(CODE) > 20
    for page, test in ELSEWHERE.items():
        text = (ROOT / test).read_text()
        assert Path(page).name in text
        assert "BLOCKS" in text


def needs_torch(block: Block) -> bool:
    """Tell whether a block uses torch."""
    return bool(re.search(r"^\s*(import|from) torch\b|remap\.torch", block.code, re.MULTILINE))


@pytest.fixture(scope="module", name="runs")
def _runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[dict[Block, Future[None]]]:
    """Run all blocks that are asked for, as many at a time as there are processors: most of it is imports."""
    wanted: list[Block] = [
        one.callspec.params["block"]  # type: ignore[misc]
        for one in request.session.items
        if isinstance(one, pytest.Function) and one.function is test_a_block_runs
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            block: pool.submit(run, tmp_path_factory.mktemp("block") / "block.py", block.code)
            for block in wanted
            if find_spec("torch") or not needs_torch(block)
        }


@pytest.mark.parametrize("block", CODE, ids=str)
def test_a_block_runs(block: Block, runs: dict[Block, Future[None]]) -> None:
    """A block runs by itself on the driver that is tested."""
    if block not in runs:
        pytest.skip("needs torch: pip install torch")
    runs[block].result()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    """A notebook's cells run one after the other, on the driver that is tested."""
    code = ["".join(one["source"]) for one in cells(notebook) if one["cell_type"] == "code"]
    run(tmp_path / "notebook.py", "\n".join(code))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_clean(notebook: Path) -> None:
    """Notebooks are stored without what they print, so that the build runs them; and they begin with how to install."""
    code = [one for one in cells(notebook) if one["cell_type"] == "code"]
    assert "Colab" in "".join(code[0]["source"])
    assert not any(one["outputs"] or one["execution_count"] for one in code)


def test_a_program_that_fails_is_seen(tmp_path: Path) -> None:
    """The runner sees a failure and a warning: it cannot be green by looking away."""
    for code in ("raise SystemExit(1)", "import warnings; warnings.warn('a')"):
        with pytest.raises(AssertionError):
            run(tmp_path / "wrong.py", code)
