"""Drivers that are named wrongly: who named them is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remap


@pytest.mark.parametrize("name", ["nonsense", " host", "host,cuda", "HOST"])
def test_the_environment_names_no_driver(name: str) -> None:
    """The message names the variable, since the program that fails has named no driver itself."""
    done = subprocess.run(
        [sys.executable, "-c", "import remap; remap.driver()"],
        env={**os.environ, "REMAP_DRIVER": name},
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert f"InvalidValueError: REMAP_DRIVER={name}: the drivers are cuda, host" in done.stderr


def machine_of(options: str, program: str = "remap.driver()") -> str:
    """Run a program on the machine that the environment describes, and return what it printed, or its error."""
    done = subprocess.run(
        [sys.executable, "-c", f"import remap; {program}"],
        env={**os.environ, "REMAP_DRIVER": "host", "REMAP_HOST_OPTIONS": options},
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or done.stderr.splitlines()[-1]


LOOK = (
    "print([(at.memory().total >> 20, at.properties.clock_khz, [one.index for one in at.peers()], "
    "*(bool(at.capabilities[name]) for name in ('hmm', 'multicast', 'coherent'))) for at in remap.devices()])"
)


def test_the_environment_describes_the_machine() -> None:
    """Everything that a program can say of the simulated machine can be said from outside, where it says nothing."""
    options = (
        "devices=3, memory=256MiB:128MiB:64MiB,hmm=yes,multicast=0,coherent=False,clock_khz=1:2:3,"
        "peers=010:100:000,host_memory=1GiB,numa_nodes=2,granularity=4MiB,integrated=off,compression=on,"
    )
    assert machine_of(options, LOOK) == str(
        [
            (256, 1, [1], True, False, False),
            (128, 2, [0], True, False, False),
            (64, 3, [], True, False, False),
        ]
    )
    assert machine_of("devices=3", "print(len(remap.use('host', memory='64MiB') and remap.devices()))") == "2"
    assert machine_of("devices=3,peers=none", "remap.use('host'); print(remap.device(0).peers())") == "()"
    assert machine_of("", "print(len(remap.devices()))") == "2"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("device=3", "device=3 in REMAP_HOST_OPTIONS: its options are devices, .* Did you mean devices="),
        ("hm=1", "Did you mean hmm="),
        ("devices=x", "devices=x in REMAP_HOST_OPTIONS: it is a whole number"),
        ("devices=0", "devices=0 in REMAP_HOST_OPTIONS: a machine has 1 to 64"),
        ("devices=2,devices=3", "named twice"),
        ("devices", "a list of name=value"),
        ("memory=", "a list of name=value"),
        ("memory=huge", "memory 'huge' in REMAP_HOST_OPTIONS: it is not a size"),
        ("memory=64MiB:64MiB:64MiB", "in REMAP_HOST_OPTIONS: give one value, or one for each of 2 devices"),
        ("hmm=perhaps", "hmm=perhaps in REMAP_HOST_OPTIONS: it is one of 1, yes"),
        ("fabric=yes", "in REMAP_HOST_OPTIONS: it can only be switched off"),
        ("peers=01:1", "in REMAP_HOST_OPTIONS: 2 devices need a matrix"),
        ("peers=some", "in REMAP_HOST_OPTIONS"),
    ],
)
def test_the_environment_describes_no_machine(options: str, said: str) -> None:
    """What cannot be is refused with the name of the variable, since the program has named no option itself."""
    assert re.search(f"(InvalidValueError|AlignmentError): .*{said}", machine_of(options))


@pytest.mark.parametrize("wrong", [None, 5, object()])
def test_what_is_no_driver(wrong: Any) -> None:
    """Anything but a name or a driver is a TypeError, and the present driver stays."""
    present = remap.driver()
    with pytest.raises(TypeError, match="driver"):
        remap.use(wrong)
    assert remap.driver() is present


def test_a_shape_of_truth_values(tmp_path: Path) -> None:
    """A .npy file whose shape NumPy itself stumbles over is one message and no traceback."""
    path, good = tmp_path / "bad.npy", tmp_path / "good.npy"
    np.save(good, np.zeros(4, np.float32))
    path.write_bytes(good.read_bytes().replace(b"(4,), }   ", b"(True,), }"))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import remap.cli; remap.cli.main()",
            "demo",
            "vector-add",
            "--a",
            str(path),
            "--b",
            str(good),
        ],
        env={**os.environ, "REMAP_DRIVER": "host"},
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: read")
    assert "Traceback" not in done.stderr


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    """A path in `REMAP_TRACE` that cannot be written is one message when the run ends, which is otherwise as ever."""
    path = tmp_path / "nowhere" / "run.json"
    done = subprocess.run(
        [sys.executable, "-c", "import remap; remap.allocate(1).close(); print('done')"],
        env={**os.environ, "REMAP_DRIVER": "host", "REMAP_TRACE": str(path)},
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "done\n"
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"remap: REMAP_TRACE={path}: no trace was written: ")
    assert "Name a file in a directory where this process may write" in said
