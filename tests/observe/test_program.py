"""Traces as programs: the C compiles against `cuda.h`, the Python runs on cuda-bindings, nothing slips in."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import remap
from remap import MiB
from remap.cli import run
from remap.errors import InvalidValueError, OutOfMemoryError
from remap.observe.chrome import ReadTrace, read
from remap.observe.languages import writer
from remap.observe.program import write_program


def include() -> Path:
    """Return the folder of `cuda.h`: a wheel's, or a toolkit's."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (found.submodule_search_locations or [] if found else [])]
    wheels = [folder for place in places for folder in sorted(place.glob("*/include"))]
    for folder in (*wheels, Path("/usr/local/cuda/include")):
        if (folder / "cuda.h").exists():
            return folder
    pytest.skip("needs cuda.h: pip install nvidia-cuda-runtime")


@pytest.fixture
def recorded(tmp_path: Path) -> ReadTrace:
    """A run with mappings of several rights, aliases, streams, events, pools and plain memory; it fails once."""
    path = tmp_path / "run.json"
    device = remap.device()
    with remap.trace(path):
        with remap.allocate(4 * MiB) as buffer, remap.Stream(device) as stream:
            buffer.fill(1)
            buffer.fill(2, stream=stream)
            buffer.copy_from_host(buffer.to_host())
            event = stream.record()
            event.synchronize()
            event.close()
            remap.pause(buffer)
            remap.resume(buffer)
        with remap.RingBuffer(2 * MiB, second="r"):
            pass
        with remap.ElasticBuffer(capacity=32 * MiB) as growing:
            growing.resize(6 * MiB)
            with growing.fork():
                pass
            growing.resize(2 * MiB)
        with remap.DeviceBox.zeroed(1000), remap.DeviceBuffer.zeroed(1000, source="plain"):
            pass
        with remap.create(2 * MiB, shareable="posix_fd", at=remap.device()):
            pass
        with pytest.raises(OutOfMemoryError):
            remap.create(2**45)
        device.synchronize()
    return read(path)


def test_the_c_compiles(recorded: ReadTrace, tmp_path: Path) -> None:
    """The C program compiles without a warning against cuda.h."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = tmp_path / "run.c"
    source.write_text(write_program(recorded, writer("c", "a test */ int x; /*")))
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{include()}"]
    done = subprocess.run([compiler, *flags, str(source)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_python_is_python(recorded: ReadTrace) -> None:
    """The Python program compiles, and every name of cuda-bindings in it exists."""
    text = write_program(recorded, writer("python", 'a test """ + 1'))
    compile(text, "run.py", "exec")
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    words = {
        word for line in text.split("cuda.")[1:] for word in [line.split("(")[0].split(",")[0].split(".")[0]]
    }
    missing = [
        word for word in words if word.isidentifier() and not hasattr(driver, word) and word != "bindings"
    ]
    assert missing == []


@pytest.mark.cuda
def test_the_python_runs(recorded: ReadTrace, tmp_path: Path) -> None:
    """On the GPU, the recorded run goes through again as plain calls."""
    path = tmp_path / "run.py"
    path.write_text(write_program(recorded, writer("python", "a test")))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.cuda
def test_the_c_runs(recorded: ReadTrace, tmp_path: Path) -> None:
    """On the GPU, the compiled program goes through, too."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, program = tmp_path / "run.c", tmp_path / "run"
    source.write_text(write_program(recorded, writer("c", "a test")))
    libraries = [path for path in map(Path, LIBRARIES) if path.exists()]
    if not libraries:
        pytest.skip("needs libcuda.so.1 to link with")
    command = [compiler, "-std=c11", f"-I{include()}", str(source), str(libraries[0]), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
)


def test_what_the_program_does(recorded: ReadTrace) -> None:
    """Handles and addresses have names, aliases are offsets, refused calls and unknown ones are comments."""
    text = write_program(recorded, writer("c", "a test"))
    assert "cuMemAddressReserve(&va0, 4194304, 0, 0, 0)" in text
    assert "cuMemCreate(&mem0, 4194304, memory_at(CU_MEM_LOCATION_TYPE_DEVICE, 0, 0, 0, 0), 0)" in text
    assert "was refused: CUDA_ERROR_OUT_OF_MEMORY" in text
    assert "+ 0x200000, 2097152, 0, mem" in text
    assert "CU_MEM_ACCESS_FLAGS_PROT_READ)" in text
    assert "0x7f" not in text.replace("CHECK", "").split("main(void)")[1].partition("/*")[0]


def test_what_was_made_before_is_a_comment(tmp_path: Path) -> None:
    """Calls on memory that was made before the trace began are told and not made up."""
    with remap.allocate(2 * MiB) as buffer:
        with remap.trace(tmp_path / "run.json"):
            buffer.fill(1)
        text = write_program(read(tmp_path / "run.json"), writer("python", "a test"))
    assert "of what was made before the trace began" in text
    assert "cuMemset" not in text


def hostile(tmp_path: Path, **call: Any) -> ReadTrace:
    """Return a trace with one call that someone else wrote."""
    with remap.trace(tmp_path / "run.json"):
        pass
    document = json.loads((tmp_path / "run.json").read_text())
    event = {"cat": "driver", "ph": "X", "ts": 0, "dur": 1, "tid": 1, "args": {"result": 1, **call}}
    (tmp_path / "run.json").write_text(json.dumps({**document, "traceEvents": [event]}))
    return read(tmp_path / "run.json")


EVIL = "*/ system(0); /*\n__import__('os')"


@pytest.mark.parametrize("language", ["c", "python"])
@pytest.mark.parametrize(
    "call",
    [
        {"method": "mystery", "arguments": [EVIL]},
        {"method": EVIL, "arguments": []},
        {"method": "reserve", "arguments": [EVIL], "result": 4096},
        {"method": "retain_context", "arguments": [EVIL], "result": 1},
        {"method": "create", "arguments": [1, {"location": EVIL, "handle_types": [EVIL]}], "result": 1},
        {"method": "create", "arguments": [1, EVIL], "result": 1},
        {"method": "create", "arguments": [], "error": EVIL},
        {"method": "reserve", "arguments": [1], "result": None},
        {"method": "fill", "arguments": ["x"] * 5},
    ],
    ids=lambda call: str(call)[:60] if isinstance(call, dict) else call,
)
def test_a_hostile_trace_adds_no_code(language: str, call: dict[str, Any], tmp_path: Path) -> None:
    """Text from a trace ends up in comments that it cannot leave, or the trace is refused (11)."""
    try:
        text = write_program(hostile(tmp_path, **call), writer(language, EVIL))
    except InvalidValueError:
        return
    lines = [line.strip() for line in text.splitlines() if "system" in line or "__import__" in line]
    for line in lines:
        assert line.startswith(("/*", "#", '"""')), line
        assert line.count("*/") <= 1


def test_the_command(recorded: ReadTrace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`remap trace` prints figures, and programs; what is no trace is one message and status 1."""
    path = str(tmp_path / "run.json")
    assert run(["trace", path]) == 0
    assert "create: " in capsys.readouterr().out
    assert run(["trace", "--as", "c", path]) == 0
    assert capsys.readouterr().out.startswith("/* A run on the ")
    assert run(["trace", "--as", "python", path]) == 0
    assert "cuda.cuMemCreate" in capsys.readouterr().out
    Path(path).write_text("{")
    assert run(["trace", path]) == 1
    assert run(["trace", "--as", "cobol", path]) == 64


def test_an_unknown_language() -> None:
    """A language that nobody wrote is refused by name."""
    with pytest.raises(InvalidValueError, match="c, python"):
        writer("cobol", "")
