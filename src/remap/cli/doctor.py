"""`remap doctor`: what there is, what is missing, why, and the cure."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from remap.drivers import NAMES

WELL, PROBLEM, NO_GPU = 0, 1, 2
_PATIENCE = 300


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, for scripts.")
@click.option("--driver", type=click.Choice(NAMES), help="Look at one driver only.")
@click.option("--bandwidth", is_flag=True, help="Measure the links to the host and between devices, too.")
@click.option(
    "--facts", is_flag=True, help="Measure what the driver does rule by rule; print it as a profile (JSON)."
)
@click.option(
    "--out", type=click.Path(dir_okay=False), metavar="FILE", help="Write the JSON or the profile to a file."
)
def doctor(as_json: bool, driver: str | None, bandwidth: bool, facts: bool, out: str | None) -> int:
    """Examine this machine: drivers, devices, each capability with the reason and the cure, and a self-test.

    Each driver is examined in a process of its own. Exits with 0 if all is well, 1 if there is a problem, and 2 if
    there is no GPU.
    """
    wanted = (driver,) if driver else NAMES
    more = [word for word, on in (("bandwidth", bandwidth), ("facts", facts)) if on]
    found = examine(wanted, more)
    if facts:
        _put(json.dumps(_profile(found), indent=2), out)
    elif as_json or out:
        _put(json.dumps(found, indent=2), out)
    else:
        _report(found)
    return int(found["status"])


def examine(wanted: tuple[str, ...], more: list[str]) -> dict[str, Any]:
    """Return everything that can be found out, as values that JSON can hold."""
    from importlib.metadata import version

    from remap.cli.cures import checks

    system = [asdict(check) for check in checks()]
    drivers = [_driver(name, more) for name in wanted]
    steps = [{"driver": one["name"], **step} for one in drivers for step in one.pop("steps")]
    crashed = [one["name"] for one in drivers if one["crashed"]]
    tested = {step["driver"] for step in steps}
    passed = bool(steps) and all(step["passed"] for step in steps) and not crashed
    found = {
        "remap": version("remap"),
        "python": sys.version.split()[0],
        "drivers": drivers,
        "system": system,
        "self_test": {"passed": passed, "drivers": sorted(tested), "steps": steps},
    }
    return {**found, "status": _status(found)}


def _status(found: dict[str, Any]) -> int:
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


def _driver(name: str, more: list[str]) -> dict[str, Any]:
    """Examine a driver in a child process, and return what it said before it ended, however it did."""
    from remap.cli.cures import cure

    command = [sys.executable, "-m", "remap.cli.checkup", name, *more]
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


def _profile(found: dict[str, Any]) -> dict[str, Any]:
    from datetime import UTC, datetime

    return {
        "format": "remap driver profile",
        "version": 1,
        "measured": datetime.now(UTC).date().isoformat(),
        "drivers": {one["name"]: one["facts"] for one in found["drivers"] if one["facts"]},
    }


def _put(text: str, out: str | None) -> None:
    if out is None:
        click.echo(text)
    else:
        Path(out).write_text(text + "\n", encoding="utf-8")
        click.echo(f"written to {out}")


def _report(found: dict[str, Any]) -> None:
    from remap.cli.report import Report
    from remap.sizes import format_size

    report = Report()
    report.step("remap", f"{found['remap']} on Python {found['python']}")
    label = "system"
    for check in found["system"]:
        sign = "ok" if check["ok"] else "PROBLEM" if check["needed"] else "note"
        report.step(label, _with_cure(f"{sign}: {check['name']}: {check['found']}", check["cure"]))
        label = ""
    for one in found["drivers"]:
        report.say("")
        state = one["version"] if one["available"] else "not available"
        state = f"{state}: {one['reason']}" if one["reason"] else state
        report.step(f"{one['name']} driver", _with_cure(state, one["cure"]))
        for names, device in _alike(one["devices"]):
            peers = ", ".join(map(str, device["peers"])) or "none"
            report.step(
                names,
                f"{device['name']}, compute capability {device['compute_capability']}, "
                f"{format_size(device['memory'])}, peers: {peers}",
            )
            has = [name for name, state in device["capabilities"].items() if state["supported"]]
            report.step("", f"has {', '.join(has)}")
            for name, state in device["capabilities"].items():
                if not state["supported"]:
                    report.step("", _with_cure(f"no {name}: {state['reason']}", state["cure"]))
        for rate in one["bandwidth"]:
            report.step(
                "", f"device {rate['device']}, {rate['name']}: {rate['gigabytes_per_second']:.1f} GB/s"
            )
    report.say("")
    test = found["self_test"]
    failed = [step for step in test["steps"] if not step["passed"]]
    names = ", ".join(dict.fromkeys(step["name"] for step in test["steps"]))
    report.step(
        "self-test",
        f"{'passed' if test['passed'] else 'FAILED'} on {', '.join(test['drivers']) or 'no driver'}",
    )
    report.step("", names)
    for step in failed:
        report.step("", f"{step['driver']} device {step['device']}: {step['name']}: {step['detail']}")
    report.step("result", _RESULTS[found["status"]])


_RESULTS = {
    WELL: "all is well",
    PROBLEM: "there is a problem",
    NO_GPU: "no GPU; the host driver runs the same programs",
}


def _alike(devices: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return one device for all that are alike, with the numbers of them."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for device in devices:
        same = {name: value for name, value in device.items() if name not in ("index", "peers", "numa_node")}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(device)
    return [(f"device {','.join(str(one['index']) for one in some)}", some[0]) for some in groups.values()]


def _with_cure(text: str, cure: str) -> list[str]:
    return [text, f"  → {cure}"] if cure else [text]
