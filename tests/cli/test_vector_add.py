"""`remap demo vector-add`: what it shows, real input, and every kind of bad input (rows A1 to A9)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import remap
from remap.cli.report import Report
from remap.cli.vector_add import Request, _Program
from remap.cli.vectors import Float32, RandomVector
from remap.kernels import Kernel
from remap.spans import Span

DRIVER = os.environ["REMAP_DRIVER"]
HOST_ONLY = pytest.mark.skipif(DRIVER != "host", reason="checks figures of the simulated devices")


def demo(
    *arguments: str | Path, limit: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the demo on the tests' driver in a process of its own; `limit` is its address space in KiB (ulimit -v)."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        "from remap.cli import main; main()",
        "demo",
        "vector-add",
    ]
    command += map(str, arguments)
    if limit is not None:
        command = ["bash", "-c", f'ulimit -v {limit}; exec "$@"', "bash", *command]
    variables = {**os.environ, "COLUMNS": "80", **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def refused(*arguments: str | Path, status: int = 1) -> str:
    """Run the demo, which must refuse with one message of that status; return the message."""
    done = demo(*arguments)
    assert done.returncode == status, done.stderr
    assert "PASS" not in done.stdout
    return done.stderr


def saved(path: Path, array: object) -> Path:
    """Write an array to a .npy file and return its path."""
    np.save(path, array)  # type: ignore[arg-type]
    return path


def test_shows_every_step() -> None:
    """The steps stand in order, from the driver to the release, and end in PASS."""
    done = demo()
    assert (done.returncode, done.stderr) == (0, "")
    labels = [line.split()[0] for line in done.stdout.splitlines() if line[:1].strip()]
    steps = ["driver", "devices", "memory", "access", "kernel", "launch", "check", "release", "PASS"]
    assert labels == ["c", *steps]
    assert f"{DRIVER}: " in done.stdout
    assert "196 blocks of 256 threads" in done.stdout
    assert "80 of 256" in done.stdout  # the ragged last block
    assert "vector_add from " in " ".join(
        done.stdout.split()
    )  # where the line is folded depends on the path's length


@HOST_ONLY
def test_picture_adds_up() -> None:
    """The bar shows equal stripes in the order given, and the legend's totals add up (A5)."""
    done = demo("--resident", "1,0", "--accessing", "0,1", "--n", "1000000", COLUMNS="60")
    assert done.returncode == 0
    bars = [line.strip() for line in done.stdout.splitlines() if line.strip().startswith("[")]
    assert len(bars) == 3
    assert set(bars) == {"[" + "1" * 23 + "0" * 23 + "]"}
    assert "1 is device 1: 6 MiB + 0 is device 0: 6 MiB = 12 MiB" in " ".join(done.stdout.split())
    assert all(len(line) <= 60 for line in done.stdout.splitlines() if "/vector_add." not in line)


@HOST_ONLY
def test_memory_comes_back() -> None:
    """Free memory falls by what was allocated and is the same as before at the end (A9)."""
    done = demo("--n", "3000000")
    released = " ".join(done.stdout[done.stdout.index("release") :].split())
    assert "device 0: free 512 MiB before, 494 MiB meanwhile, 512 MiB after" in released
    assert "device 1: free 512 MiB before, 494 MiB meanwhile, 512 MiB after" in released


def test_no_escape_codes_in_a_pipe() -> None:
    """What is not a terminal gets plain text, and a terminal without Unicode gets what it knows."""
    assert "\x1b" not in demo().stdout
    done = demo(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()


def test_plain() -> None:
    """The same program passes on plain memory (A8)."""
    done = demo("--plain")
    assert done.returncode == 0
    assert "in plain memory" in done.stdout
    assert "195.31 KiB a vector, as asked for" in done.stdout


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 70001])
@pytest.mark.parametrize("plain", [[], ["--plain"]])
def test_real_input(tmp_path: Path, length: int, plain: list[str]) -> None:
    """Vectors of any length come from files, and their sum goes to one."""
    random = np.random.default_rng(length)
    a, b = (random.random(length, dtype=np.float32) for _ in "ab")
    files: list[str | Path] = ["--a", saved(tmp_path / "a.npy", a), "--b", saved(tmp_path / "b.npy", b)]
    done = demo(*files, "--out", tmp_path / "c.npy", *plain)
    assert (done.returncode, done.stderr) == (0, "")
    assert np.array_equal(np.load(tmp_path / "c.npy"), a + b)
    assert sorted(os.listdir(tmp_path)) == ["a.npy", "b.npy", "c.npy"]


def test_more_than_one_piece(tmp_path: Path) -> None:
    """Vectors that are copied in several pieces come out whole."""
    done = demo("--n", str((1 << 22) + 3), "--out", tmp_path / "c.npy")
    assert done.returncode == 0
    assert np.load(tmp_path / "c.npy").shape == ((1 << 22) + 3,)


def test_special_numbers(tmp_path: Path) -> None:
    """NaN, infinities, overflow and denormal numbers add up as in NumPy."""
    special = np.array([np.nan, np.inf, -np.inf, 3e38, 1e-45, -0.0], np.float32)
    file = saved(tmp_path / "a.npy", special)
    done = demo("--a", file, "--b", file, "--out", file)  # the sum may replace an input
    assert (done.returncode, done.stderr) == (0, "")
    with np.errstate(over="ignore"):
        assert np.array_equal(np.load(file), special + special, equal_nan=True)


class Careless(_Program):
    """The program with a kernel that leaves some elements out, and rounds one."""

    def _launch(self, kernel: Kernel, spans: list[Span], length: int) -> None:
        super()._launch(kernel, spans, length)
        remap.device().synchronize()
        close = spans[2].to_host(np.float32, 1, offset=40) * np.float32(1 + 2**-23)
        spans[2].copy_from_host(close, offset=40)
        spans[2].fill(0, offset=4000, size=8)


def test_a_wrong_sum_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """A sum that is off by more than 1e-7 is wrong, and the first such element is named; 1e-7 is allowed (A7)."""
    nothing = {
        "driver": None,
        "device": None,
        "resident": None,
        "accessing": None,
        "files": None,
        "out": None,
    }
    request = Request(**nothing, length=5000, plain=False)
    vectors = SmallVector(5000, 1), SmallVector(5000, 2)
    assert _Program(request, Report()).run(*vectors, None)
    assert not Careless(request, Report()).run(*vectors, None)
    said = " ".join(capsys.readouterr().out.split())
    assert "the first that is wrong is element 1,000" in said


class SmallVector(RandomVector):
    """Numbers so small that rounding one of their sums is below what is allowed."""

    def piece(self, start: int, stop: int) -> Float32:
        return super().piece(start, stop) / np.float32(8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--n", "0"], "not in the range"),
        (["--n", "-4"], "not in the range"),
        (["--n", "many"], "not a valid"),
        (["--n", "3", "--a", "x", "--b", "y"], "one or the other"),
        (["--a", "x"], "go together"),
        (["--b", "x"], "go together"),
        (["--plain", "--resident", "0"], "leave --resident"),
        (["--plain", "--accessing", "0"], "leave --resident"),
        (["--resident", "zero"], "not a list of device numbers"),
        (["--resident", ""], "not a list of device numbers"),
    ],
)
def test_misuse(arguments: list[str], words: str) -> None:
    """Options that make no sense, alone or together, are misuse: status 64 (A2)."""
    assert words in " ".join(refused(*arguments, status=64).split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "99"], "device 99"),
        (["--device", "-1"], "device -1"),
        (["--resident", "99"], "device 99"),
        (["--resident", "0,0"], "twice"),
        (["--accessing", "99"], "device 99"),
        (["--n", str(10**13)], "are free"),
        (["--n", str(10**24)], "2**63"),
        (["--plain", "--n", str(10**13)], "are free"),
    ],
)
def test_what_is_not_there(arguments: list[str], words: str) -> None:
    """Devices that do not exist and more memory than there is are refused, naming what there is."""
    assert words in refused(*arguments)


@pytest.mark.two_devices
def test_device_without_access() -> None:
    """The device that adds must be among those with access."""
    assert "Add 0" in refused("--device", "0", "--accessing", "1")


def test_bad_files(tmp_path: Path) -> None:
    """Each file that is no vector of float32 is refused, by its name and what is wrong with it."""
    good = saved(tmp_path / "good.npy", np.zeros(10, np.float32))
    whole = good.read_bytes()
    for name, content in (
        ("cut.npy", whole[:-5]),
        ("header.npy", whole[:30]),
        ("empty.npy", b""),
        ("text.npy", b"hello"),
    ):
        (tmp_path / name).write_bytes(content)
    huge = b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }"
    (tmp_path / "huge.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00" + huge.ljust(117) + b"\n")
    (tmp_path / "broken.npy").write_bytes(
        b"\x93NUMPY\x01\x00v\x00" + b"{'descr': (((, \x00\xff".ljust(117) + b"\n"
    )
    saved(tmp_path / "double.npy", np.zeros(10))
    saved(tmp_path / "swapped.npy", np.zeros(10, ">f4"))
    saved(tmp_path / "matrix.npy", np.zeros((2, 5), np.float32))
    saved(tmp_path / "scalar.npy", np.float32(1))
    saved(tmp_path / "objects.npy", np.array([None]))
    np.savez(tmp_path / "several.npz", a=np.zeros(3))
    (tmp_path / "directory.npy").mkdir()
    words = {
        "cut.npy": "cut short",
        "header.npy": "cut short",
        "empty.npy": "cut short",
        "text.npy": "no .npy file",
        "huge.npy": "no .npy file",
        "broken.npy": "no .npy file",
        "double.npy": "float64",
        "swapped.npy": ">f4",
        "matrix.npy": "2-dimensional",
        "scalar.npy": "0-dimensional",
        "objects.npy": "no .npy file",
        "several.npz": "archive",
        "directory.npy": "directory",
        "missing.npy": "No such file",
    }
    for name, said in words.items():
        message = refused("--a", tmp_path / name, "--b", good)
        assert name in message
        assert said in message


def test_different_lengths(tmp_path: Path) -> None:
    """Vectors of different length are refused with both lengths."""
    files = [saved(tmp_path / f"{n}.npy", np.zeros(n, np.float32)) for n in (10, 11)]
    message = refused("--a", files[0], "--b", files[1])
    assert "10 and 11" in message


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    """Where the sum cannot go is found before the work, and nothing is left there."""
    assert "directory" in refused("--out", tmp_path)
    assert "no directory" in refused("--out", tmp_path / "missing" / "c.npy")
    assert "no regular file" in refused("--out", "/dev/null")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_without_permission(tmp_path: Path) -> None:
    """A directory that the user may not write to is named."""
    tmp_path.chmod(0o500)
    assert "not writable" in refused("--out", tmp_path / "c.npy")


def test_failure_leaves_no_file(tmp_path: Path) -> None:
    """A run that fails in the middle leaves neither the output nor a part of it, and an old one as it was."""
    old = saved(tmp_path / "c.npy", np.ones(3, np.float32))
    before = old.read_bytes()
    assert demo("--out", old, "--n", str(10**13)).returncode == 1
    assert os.listdir(tmp_path) == ["c.npy"]
    assert old.read_bytes() == before


@pytest.mark.skipif(DRIVER != "host", reason="CUDA itself reserves more address space than such limits allow")
@pytest.mark.parametrize("limit", [60_000, 100_000, 150_000, 400_000])
def test_little_address_space(limit: int) -> None:
    """Under a limit of address space the demo passes, or says that this limit, and not memory, is the reason."""
    done = demo(limit=limit)
    assert done.returncode in (0, 1)
    if done.returncode:
        assert done.stderr


@pytest.mark.skipif(DRIVER != "host", reason="needs a machine without CUDA")
def test_waived_without_cuda() -> None:
    """CUDA asked for where it is not: waived with the reason, status 2 (A2), by option and by environment."""
    for done in (demo("--driver", "cuda"), demo(REMAP_DRIVER="cuda")):
        if done.returncode == 0:
            pytest.skip("this machine has CUDA")
        assert done.returncode == 2
        assert done.stderr.startswith("waived: driver cuda: ")


@HOST_ONLY
def test_says_why_cuda_was_not_used() -> None:
    """Left to choose, the demo names the driver that it took, and why not the one before it."""
    done = demo(REMAP_DRIVER="")
    assert done.returncode == 0
    assert "host: " in done.stdout or "cuda: " in done.stdout
    if "host: " in done.stdout:
        assert "cuda not used: " in done.stdout
