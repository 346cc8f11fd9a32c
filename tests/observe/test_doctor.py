"""The doctor: that it tells everything with reason and cure, that a crash does not take it down, and its statuses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import remap
from remap.cli import examination, run
from remap.cli.cures import Check, checks, cure
from remap.types import CAPABILITIES


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The examination of the driver under test."""
    return examination.examine((remap.driver().name,), [])


def test_every_capability_has_a_reason_and_a_cure(found: dict[str, Any]) -> None:
    """Each device answers for each capability (B1, D7); what is missing has a reason and says what to do."""
    (driver,) = found["drivers"]
    assert driver["available"]
    assert len(driver["devices"]) == remap.driver().device_count()
    for device in driver["devices"]:
        assert set(device["capabilities"]) == set(CAPABILITIES)
        for state in device["capabilities"].values():
            assert state["supported"] or (state["reason"] and state["cure"])


def test_memory_types_are_told(found: dict[str, Any]) -> None:
    """Each device tells every combination of place, handle, compression and RDMA, and why one cannot be had (B7)."""
    for one, device in zip(found["drivers"][0]["devices"], remap.devices(), strict=True):
        here = device.memory_types()
        assert [told["supported"] for told in one["memory_types"]] == [bool(each) for each in here]
        assert all(told["supported"] or told["reason"] for told in one["memory_types"])
        assert one["memory_types"][0] == {
            "at": "device",
            "shareable": None,
            "compressible": False,
            "rdma": False,
            "supported": True,
            "reason": "",
        }


@pytest.mark.parametrize("driver", ["host", "cuda"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_there_is_a_cure_for_everything(driver: str, capability: str) -> None:
    """Whatever a driver may lack, there is a next step."""
    assert cure(driver, capability, "it is so")
    assert (
        cure(driver, "multicast", "switched off by REMAP_DISABLE_MULTICAST")
        == "Unset REMAP_DISABLE_MULTICAST"
    )


def test_the_self_test_runs(found: dict[str, Any]) -> None:
    """Each device creates, maps, shares with a child process, and unmaps."""
    test = found["self_test"]
    assert test["passed"], test["steps"]
    names = [step["name"] for step in test["steps"] if step["device"] == 0]
    assert names == [
        "create",
        "reserve",
        "map",
        "write and read",
        "share with a child process",
        "unmap",
        "give back",
    ]


def test_a_crash_is_a_finding(tmp_path: Path) -> None:
    """A driver whose examination dies is reported with what it had said before, and is a problem."""
    patient = tmp_path / "patient"
    said = '{"kind": "driver", "name": "host", "available": true, "reason": "", "version": "1"}'
    patient.write_text(f"#!/bin/sh\necho '{said}'\necho Segmentation >&2\nkill -SEGV $$\n")
    patient.chmod(0o755)
    found = examination.examine(("host",), [], str(patient))
    (driver,) = found["drivers"]
    assert driver["crashed"]
    assert driver["version"] == "1"
    assert "status -11: Segmentation" in driver["reason"]
    assert found["status"] == examination.PROBLEM
    assert not found["self_test"]["passed"]


DEVICE = {"capabilities": {"vmm": {"supported": True}}}


def state(
    *,
    gpu: bool,
    cuda: bool,
    passed: bool = True,
    broken: bool = False,
    crashed: bool = False,
    vmm: bool = True,
) -> int:
    """Return the status for a machine that is described."""
    devices = [{"capabilities": {"vmm": {"supported": vmm}}}]
    drivers = [
        {"name": "cuda", "available": cuda, "crashed": crashed, "devices": devices if cuda else []},
        {"name": "host", "available": True, "crashed": False, "devices": [DEVICE]},
    ]
    system = [asdict(Check("GPU", gpu, "")), asdict(Check("module", not broken, "", needed=True))]
    return examination.status_of({"drivers": drivers, "system": system, "self_test": {"passed": passed}})


@pytest.mark.parametrize(
    ("machine", "status"),
    [
        ({"gpu": True, "cuda": True}, 0),
        ({"gpu": False, "cuda": True}, 0),  # a virtual machine may hide the bus
        ({"gpu": False, "cuda": False}, 2),
        ({"gpu": True, "cuda": False}, 1),
        ({"gpu": True, "cuda": True, "passed": False}, 1),
        ({"gpu": True, "cuda": True, "broken": True}, 1),
        ({"gpu": True, "cuda": True, "vmm": False}, 1),
        ({"gpu": False, "cuda": False, "crashed": True}, 1),
        ({"gpu": False, "cuda": False, "passed": False}, 1),
    ],
)
def test_statuses(machine: dict[str, bool], status: int) -> None:
    """0 is all well, 1 a problem, 2 no GPU: what a script can rely on."""
    assert state(**machine) == status


def test_checks_of_the_system() -> None:
    """Each check that fails says what to do."""
    all_of_them = list(checks())
    assert {"platform", "GPU", "vm.max_map_count", "memlock", "address space"} <= {
        one.name for one in all_of_them
    }
    assert [one for one in all_of_them if not one.ok and not one.cure] == []


def test_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JSON it is for scripts, with --out for files; as text it fits 60 columns and names each cure."""
    monkeypatch.setenv("COLUMNS", "60")
    driver = remap.driver().name
    status = run(["doctor", "--driver", driver])
    text = capsys.readouterr().out
    assert status in (0, 1, 2)
    assert "self-test" in text
    assert "→" in text
    out = tmp_path / "doctor.json"
    assert run(["doctor", "--driver", driver, "--json", "--out", str(out)]) == status
    assert json.loads(out.read_text())["status"] == status


def test_facts(tmp_path: Path) -> None:
    """`--facts` writes a profile with a value for the rules that can be measured."""
    out = tmp_path / "profile.json"
    run(["doctor", "--driver", remap.driver().name, "--facts", "--out", str(out)])
    profile = json.loads(out.read_text())
    facts = profile["drivers"][remap.driver().name]
    assert (profile["format"], profile["version"]) == ("remap driver profile", 1)
    assert facts["T1.granularity.device"] == [2 << 20, 2 << 20]
    assert facts["T5.map.half"] == "NOT_SUPPORTED"
    assert facts["T7.unmap.nothing"] == "SUCCESS"
    # Not T10 and T14, which only ends of processes can tell.
    measured = {f"T{number}" for number in (*range(1, 10), 11, 12, 13, 15, 16, 17)}
    assert {name.partition(".")[0] for name in facts if name[0] == "T"} == measured
    size = facts["T15.bytes_of_a_graph"]
    assert facts["T15.used.one_stream"] == [size, size]
    assert facts["T15.used.without_free_nodes"] == [size, 2 * size]
    assert [facts[f"T15.used.{step}"] for step in ("trimmed_while_held", "freed", "trimmed_at_last")] == [
        2 * size,
        2 * size,
        0,
    ]
    assert facts["T13.graph.over_memory_backed_anew"]
    assert facts["T16.address_after_a_free_is_the_same"]
    assert facts["cost_us.create.2_MiB"] > 0


def test_bandwidth() -> None:
    """On request, the links are measured for each device and its peers."""
    found = examination.examine((remap.driver().name,), ["bandwidth"])
    (driver,) = found["drivers"]
    names = {(rate["device"], rate["name"]) for rate in driver["bandwidth"]}
    for device in driver["devices"]:
        wanted = {
            "host to device",
            "device to host",
            "fill",
            *(f"from device {peer}" for peer in device["peers"]),
        }
        assert {(device["index"], name) for name in wanted} <= names
    assert all(rate["gigabytes_per_second"] > 0 for rate in driver["bandwidth"])


def test_profiles_that_are_kept() -> None:
    """The profiles in the project are of this format, and say what they were measured on."""
    folder = Path(__file__).parents[2] / "profiles"
    kept = sorted(folder.glob("*.json"))
    assert kept
    for path in kept:
        profile = json.loads(path.read_text())
        assert profile["format"] == "remap driver profile"
        for facts in profile["drivers"].values():
            assert facts["about.device"]
            assert facts["about.driver"]
