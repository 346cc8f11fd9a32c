"""The page about a torch model in a broker is true: its program runs, and finds what an earlier one has put there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "keep-a-torch-model.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_workers_share_a_model(torch: Any, tmp_path: Path) -> None:
    """The first worker puts a model of random weights into the broker, and the next ones compute with the same."""
    assert torch is not None
    (worker,) = BLOCKS
    program = tmp_path / "worker.py"
    program.write_text(worker)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    serve = [sys.executable, "-m", "remap", "serve"]
    said: list[str] = []
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=environment) as broker:
        assert broker.stdout is not None
        assert "serving" in broker.stdout.readline()
        try:
            for _ in range(2):
                done = subprocess.run(
                    [sys.executable, "-W", "error", str(program)],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=110,
                    env=environment,
                )
                assert (done.returncode, done.stderr) == (0, "")
                said.append(done.stdout)
        finally:
            broker.terminate()
    assert said[0] == said[1] != ""
