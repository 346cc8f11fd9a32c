"""A plugin of pytest that writes each report as a line of JSON at once, for `benchmarks/suite.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--reports`."""
    parser.addoption("--reports", type=Path, required=True, help="the file to write to")


def pytest_configure(config: pytest.Config) -> None:
    """Begin the file."""
    path = config.getoption("--reports")
    assert isinstance(path, Path)
    config.pluginmanager.register(Reports(path))


class Reports:
    """Writes what begins, what ends, and how."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Name the test that begins."""
        self._write(began=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write how a test went; its set-up and end only where they went wrong or skipped it."""
        if report.when == "call" or report.outcome != "passed":
            failed = "failed" if report.when == "call" else "errors"
            outcome = failed if report.failed else report.outcome
            self._write(
                test=report.nodeid,
                outcome=outcome,
                seconds=round(report.duration, 2),
                why=report.longreprtext[-3000:] if report.failed else "",
            )

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Name the test that has ended."""
        self._write(ended=nodeid)

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
