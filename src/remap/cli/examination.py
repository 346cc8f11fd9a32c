"""The examination of a machine: its system, each driver in a process of its own, and what follows from it all."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import remap
from remap.cli.cures import checks, cure
from remap.cli.environment import present, unknown

WELL, PROBLEM, NO_GPU = 0, 1, 2
_PATIENCE = 300


def examine(wanted: tuple[str, ...], more: list[str], python: str = sys.executable) -> dict[str, Any]:
    """Return everything that can be found out, as values that JSON can hold; `python` runs the examinations."""
    system = [asdict(check) for check in checks()]
    drivers = [_driver(name, more, python) for name in wanted]
    steps = [{"driver": one["name"], **step} for one in drivers for step in one.pop("steps")]
    crashed = [one["name"] for one in drivers if one["crashed"]]
    tested = {step["driver"] for step in steps}
    passed = bool(steps) and all(step["passed"] for step in steps) and not crashed
    found = {
        "remap": remap.__version__,
        "python": sys.version.split()[0],
        "drivers": drivers,
        "system": system,
        "environment": present(),
        "environment_unknown": unknown(),
        "self_test": {"passed": passed, "drivers": sorted(tested), "steps": steps},
    }
    return {**found, "status": status_of(found)}


def status_of(found: dict[str, Any]) -> int:
    """Return the exit status for what was found."""
    here = {one["name"]: one for one in found["drivers"]}
    gpu = next(check["ok"] for check in found["system"] if check["name"] == "GPU")
    cuda = here.get("cuda")
    if cuda is not None and not cuda["available"] and not gpu and not cuda["crashed"]:
        others = [one for one in found["drivers"] if one["name"] != "cuda"]
        well = all(one["available"] for one in others) and (found["self_test"]["passed"] or not others)
        return NO_GPU if well else PROBLEM
    broken = [check for check in found["system"] if check["needed"] and not check["ok"]]
    missing = [one for one in found["drivers"] if not one["available"]]
    no_vmm = [
        device
        for one in found["drivers"]
        for device in one["devices"]
        if not device["capabilities"]["vmm"]["supported"]
    ]
    return PROBLEM if broken or missing or no_vmm or not found["self_test"]["passed"] else WELL


def _driver(name: str, more: list[str], python: str) -> dict[str, Any]:
    """Examine a driver in a child process, and return what it said before it ended, however it did."""
    command = [python, "-m", "remap.cli.checkup", name, *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        said, status, noise = done.stdout, done.returncode, done.stderr
    except subprocess.TimeoutExpired as error:
        said, status, noise = str(error.stdout or ""), -1, f"it did not end within {_PATIENCE} s"
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    parts: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        parts.setdefault(line.pop("kind"), []).append(line)
    about = parts.get("driver", [{"name": name, "available": False, "reason": "", "version": ""}])[0]
    if status:
        last = noise.strip().splitlines()[-1] if noise.strip() else "it said nothing"
        about["reason"] = f"the examination ended with status {status}: {last}"
        about["cure"] = f"Run it by hand to see more: {' '.join(command)}"
    devices = parts.get("device", [])
    for device in devices:
        for capability, state in device["capabilities"].items():
            if not state["supported"]:
                state["cure"] = cure(name, capability, state["reason"])
    return {
        "cure": "",
        **about,
        "crashed": bool(status),
        "devices": devices,
        "steps": parts.get("step", []),
        "bandwidth": parts.get("bandwidth", []),
        "facts": {fact["name"]: fact["value"] for fact in parts.get("fact", [])},
    }
