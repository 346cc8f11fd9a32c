"""Write what a benchmark measured as JSON, marked with date, machine, GPU and versions; and time calls fairly."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import remap

RESULTS = Path(__file__).parent / "results"


def median_us(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call in microseconds, after a tenth as many warm-up calls."""
    times: list[float] = []
    for _ in range(repeats // 10 + 1):
        call()
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def interleaved_us(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median time of each call in microseconds, the calls taking turns so that drift hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + repeats // 10 + 1):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            call()
            if turn > repeats // 10:
                times[name].append((time.perf_counter_ns() - start) / 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, Any]:
    """Return what identifies this run: date, driver, devices, versions."""
    driver = remap.driver()
    versions: dict[str, str] = {}
    for package in ("cuda-bindings", "cuda-core", "numpy", "torch", "cupy-cuda13x", "numba-cuda"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "driver": driver.name,
        "driver_version": driver.version(),
        "devices": [device.name for device in remap.devices()],
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "versions": versions,
    }


def write(name: str, figures: dict[str, Any]) -> Path:
    """Write the figures of one run to `results/NAME-DRIVER-DATE.json`, print them, and return the path.

    `REMAP_RESULTS` names another directory.
    """
    about = machine()
    directory = Path(os.environ.get("REMAP_RESULTS", RESULTS))
    directory.mkdir(parents=True, exist_ok=True)
    where = "h200" if "H200" in about["devices"][0] else about["driver"]
    count = f"-x{len(about['devices'])}" if about["driver"] == "cuda" and len(about["devices"]) > 1 else ""
    path = directory / f"{name}-{where}{count}-{about['date']}.json"
    path.write_text(json.dumps({"about": about, "figures": figures}, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    print(f"written to {path.name}")
    return path
