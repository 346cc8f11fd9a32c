"""`remap doctor`: what there is, what is missing, why, and the cure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from remap.cli.files import OutFile
from remap.drivers import NAMES


@click.command(short_help="Examine this machine; name what to mend.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, for scripts.")
@click.option("--driver", type=click.Choice(NAMES), help="Look at one driver only.")
@click.option("--bandwidth", is_flag=True, help="Measure the links to the host and between devices, too.")
@click.option(
    "--facts", is_flag=True, help="Measure what the driver does rule by rule; print it as a profile (JSON)."
)
@click.option("--out", type=OutFile(), metavar="FILE", help="Write the JSON or the profile to a file.")
def doctor(as_json: bool, driver: str | None, bandwidth: bool, facts: bool, out: str | None) -> int:
    """Examine this machine: drivers, devices, each capability with the reason and the cure, and a self-test.

    Each driver is examined in a process of its own. Exits with 0 if all is well, 1 if there is a problem, and 2 if
    there is no GPU.
    """
    wanted = (driver,) if driver else NAMES
    from remap.cli.examination import examine

    more = [word for word, on in (("bandwidth", bandwidth), ("facts", facts)) if on]
    found = examine(wanted, more)
    if facts:
        _put(json.dumps(_profile(found), indent=2), out)
    elif as_json or out:
        _put(json.dumps(found, indent=2), out)
    else:
        _report(found)
    return int(found["status"])


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


def _report(all_found: dict[str, Any]) -> None:
    from remap.cli.report import Report
    from remap.sizes import format_size

    report = Report()
    report.step("remap", f"{all_found['remap']} on Python {all_found['python']}")
    for name, value in all_found["environment"].items():
        report.step("environment", f"{name}={value}")
    for name in all_found["environment_unknown"]:
        report.step(
            "environment", _with_cure(f"note: {name} is none of remap's variables", "See remap --help")
        )
    label = "system"
    for check in all_found["system"]:
        sign = "ok" if check["ok"] else "PROBLEM" if check["needed"] else "note"
        report.step(label, _with_cure(f"{sign}: {check['name']}: {check['found']}", check["cure"]))
        label = ""
    for one in all_found["drivers"]:
        report.say("")
        state = one["version"] if one["available"] else "not available"
        state = f"{state}: {one['reason']}" if one["reason"] else state
        report.step(f"{one['name']} driver", _with_cure(state, one["cure"]))
        for alike in _alike(one["devices"]):
            device = alike[0]
            report.step(
                f"device {','.join(str(each['index']) for each in alike)}",
                f"{device['name']}, compute capability {device['compute_capability']}, "
                f"{format_size(device['memory'])}; {'; '.join(map(_reach, alike))}",
            )
            has = [name for name, found in device["capabilities"].items() if found["supported"]]
            report.step("", f"has {', '.join(has)}")
            for name, found in device["capabilities"].items():
                if not found["supported"]:
                    report.step("", _with_cure(f"no {name}: {found['reason']}", found["cure"]))
            report.step("", _memory_types(device["memory_types"]))
        for rate in one["bandwidth"]:
            report.step(
                "", f"device {rate['device']}, {rate['name']}: {rate['gigabytes_per_second']:.1f} GB/s"
            )
    report.say("")
    test = all_found["self_test"]
    steps: list[dict[str, Any]] = test["steps"]
    failed = [step for step in steps if not step["passed"]]
    names = ", ".join(dict.fromkeys(str(step["name"]) for step in steps))
    report.step(
        "self-test",
        f"{'passed' if test['passed'] else 'FAILED'} on {', '.join(test['drivers']) or 'no driver'}",
    )
    report.step("", names)
    for step in failed:
        report.step("", f"{step['driver']} device {step['device']}: {step['name']}: {step['detail']}")
    report.step("result", _RESULTS[int(all_found["status"])])


_RESULTS = ("all is well", "there is a problem", "no GPU; the host driver runs the same programs")


def _alike(devices: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the devices in groups of those that differ in nothing but number, peers and NUMA node."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for device in devices:
        same = {name: value for name, value in device.items() if name not in ("index", "peers", "numa_node")}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(device)
    return list(groups.values())


def _reach(device: dict[str, Any]) -> str:
    peers = ", ".join(map(str, device["peers"]))
    return f"{device['index']} reaches {peers or 'no peer'}"


def _memory_types(types: list[dict[str, Any]]) -> list[str]:
    """Return which combinations of place, handle, compression and RDMA there are, a line for each place."""
    lines: list[str] = []
    for place in dict.fromkeys(str(one["at"]) for one in types):
        here = [_memory_type(one) for one in types if one["at"] == place and one["supported"]]
        lines.append(f"memory at {'the device' if place == 'device' else place}: {', '.join(here) or 'none'}")
    refused = sum(not one["supported"] for one in types)
    return [*lines, f"{refused} of {len(types)} combinations were refused; --json says why"]


def _memory_type(one: dict[str, Any]) -> str:
    words = [word for word, on in (("compressible", one["compressible"]), ("RDMA", one["rdma"])) if on]
    return " + ".join([*(words or ["plain"]), *([one["shareable"]] if one["shareable"] else [])])


def _with_cure(text: str, cure: str) -> list[str]:
    return [text, f"  → {cure}"] if cure else [text]
