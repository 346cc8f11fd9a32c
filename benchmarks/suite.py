"""Run the tests directory by directory and record what came of them as JSON, so that a run on a GPU can be cited.

    PYTHONPATH=src:. python benchmarks/suite.py --driver cuda --gpus 0,1 --seconds 540

Each directory runs in a process of its own, one at a time on each GPU, since many tests measure free memory. A test
that takes more than `--each` seconds has its threads printed; one at which a directory's time ran out is named as
`hung`. Reports are written as they come, so a process that is ended, or ends itself, loses none of them. Logs lie
beside the results. Exit status 0 where all passed and nothing was cut short.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LAST = 15.0
"""Seconds that pytest has to sum up once it has been interrupted."""


def directories() -> list[str]:
    """Return what can be run by itself, in the order in which one stands on another."""
    first = [
        "conformance",
        "ground",
        "foundation",
        "powers",
        "elastic",
        "residency",
        "kernels",
        "graphs",
        "sharing",
    ]
    found = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("*/test_*.py")}
    found |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("test_*.py")}
    ordered = [f"tests/{name}" for name in first if f"tests/{name}" in found]
    return ordered + sorted(found - set(ordered))


class Runner:
    """Takes directories from a queue, one process for each, on one GPU."""

    def __init__(self, options: argparse.Namespace, gpu: str | None, out: Path) -> None:
        self._options = options
        self._environment = {**os.environ, "REMAP_DRIVER": options.driver, "PYTHONUNBUFFERED": "1"}
        if gpu is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = gpu
        self._out = out

    def work(self, waiting: queue.SimpleQueue[str], end: float, runs: list[dict[str, Any]]) -> None:
        """Run until nothing waits; what the time does not reach is recorded as not run."""
        while True:
            try:
                what = waiting.get_nowait()
            except queue.Empty:
                return
            left = end - time.monotonic()
            one: dict[str, Any] = {"tests": what, "outcome": "not run: out of time"}
            if left > LAST:
                one = self._run(what, left)
            runs.append(one)
            print(json.dumps({key: value for key, value in one.items() if key != "troubles"}), flush=True)
            for trouble in one.get("troubles", ()):
                print(f"  {trouble['outcome']} {trouble['test']}: {trouble['why'][:300]}", flush=True)

    def _run(self, what: str, left: float) -> dict[str, Any]:
        name = what.replace("/", "-").removesuffix(".py")
        reports = self._out / f"{name}.jsonl"
        command = [sys.executable, "-m", "pytest", what, "--driver", self._options.driver, "-q", "--tb=short"]
        command += ["-p", "benchmarks.suite_reports", f"--reports={reports}", "-p", "no:cacheprovider"]
        command += ["-o", f"faulthandler_timeout={self._options.each}", *self._options.pytest]
        start = time.monotonic()
        with (
            (self._out / f"{name}.log").open("w") as log,
            subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=log, stderr=log, start_new_session=True
            ) as process,
        ):
            try:
                status = process.wait(min(left, self._options.directory) - LAST)
                outcome = "finished" if status in (0, 1, 5) else f"ended with status {status}"
            except subprocess.TimeoutExpired:
                outcome = "cut short: out of time"
                _end(process)
        return {
            "tests": what,
            "outcome": outcome,
            "seconds": round(time.monotonic() - start, 1),
            **_summed(reports),
        }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest, and kill it with its children where it does not answer."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LAST)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _summed(reports: Path) -> dict[str, Any]:
    """Return the counts, what went wrong, and the test that had begun and not ended."""
    counts = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)
    troubles: list[dict[str, str]] = []
    slowest: dict[str, float] = {}
    running = ""
    for line in reports.read_text().splitlines() if reports.exists() else ():
        try:
            report = json.loads(line)
        except ValueError:  # the last line of a process that was ended while it wrote
            continue
        if "began" in report:
            running = report["began"]
        elif "ended" in report:
            running = ""
        else:
            counts[report["outcome"]] += 1
            slowest[report["test"]] = report["seconds"]
            if report["outcome"] in ("failed", "errors"):
                troubles.append({key: report[key] for key in ("test", "outcome", "why")})
    longest = dict(sorted(slowest.items(), key=lambda item: -item[1])[:3])
    found: dict[str, Any] = {**counts, "slowest": longest}
    if running:
        found["hung"] = running
    if troubles:
        found["troubles"] = troubles
    return found


def main() -> int:
    """Run what was asked for, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", help="directories or files under tests/ (default: all)")
    parser.add_argument("--driver", choices=("host", "cuda"), default="host")
    parser.add_argument(
        "--gpus", default="", help="numbers with commas: a runner on each (default: one runner)"
    )
    parser.add_argument("--seconds", type=float, default=540, help="for everything (default: %(default)s)")
    parser.add_argument(
        "--directory", type=float, default=300, help="for one directory (default: %(default)s)"
    )
    parser.add_argument(
        "--each", type=float, default=60, help="before threads are printed (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="where logs go (default: a new temporary directory)")
    own, more = _split(sys.argv[1:])
    options = parser.parse_args(own)
    options.pytest = more
    out = options.out or Path(tempfile.mkdtemp(prefix="remap-suite-"))
    out.mkdir(parents=True, exist_ok=True)
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for what in options.tests or directories():
        waiting.put(what)
    end = time.monotonic() + options.seconds
    runs: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=Runner(options, gpu, out).work, args=(waiting, end, runs))
        for gpu in (options.gpus.split(",") if options.gpus else [None])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.environ["REMAP_DRIVER"] = options.driver
    from benchmarks.record import write  # only now: it opens the driver, and the runners have one GPU each

    print(f"logs are in {out}")
    write("tests", {"command": " ".join(["pytest --driver", options.driver, *more]), "runs": runs})
    return 0 if all(one["outcome"] == "finished" and not one["failed"] + one["errors"] for one in runs) else 1


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return our own arguments, and those for pytest after `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
