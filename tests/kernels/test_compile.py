"""CUDA C++ is compiled without a GPU, for one architecture or several, and the log of a failure is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from remap import kernels
from remap.errors import CompileError
from remap.kernels import Image, ImageKind, Parameter, ParameterType, nvrtc

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")

SOURCE = """
struct Pair { float x; double y; };
template <class T> __global__ void fill(T *p, T v) { p[0] = v; }
extern "C" __global__ void mixed(const float *a, long long n, float s, bool b, short h, Pair p) {}
__global__ void plain(int x) {}
"""
MIXED = (8, 8, 4, 1, 2, 16)


def sizes(image: Image, name: str) -> tuple[int, ...]:
    """Return the sizes of a kernel's parameters."""
    assert image.entries is not None
    (entry,) = [one for one in image.entries if one.name == name]
    return tuple(one.size for one in entry.parameters or ())


@pytest.mark.parametrize(("arch", "kind"), [("sm_90", ImageKind.CUBIN), ("compute_75", ImageKind.PTX)])
def test_one_architecture_gives_a_cubin_or_ptx(arch: str, kind: ImageKind) -> None:
    """`sm_` is machine code, `compute_` is PTX; the bytes say so too."""
    image = kernels.compile(SOURCE, arch=arch)
    assert (image.kind, image.architectures) == (kind, (arch,))
    again = Image.from_bytes(image.data)
    assert (again.kind, again.architectures) == (kind, (arch,))
    assert sizes(image, "mixed") == sizes(again, "mixed") == MIXED


def test_compiled_machine_code_knows_the_types_of_parameters() -> None:
    """A cubin alone tells sizes; an image that remap compiled tells integers from floating-point numbers."""
    image = kernels.compile(SOURCE, arch="sm_80")
    assert image.entries is not None
    (mixed,) = [entry for entry in image.entries if entry.name == "mixed"]
    assert mixed.parameters is not None
    assert mixed.parameters[2:4] == (Parameter(4, ParameterType.FLOAT), Parameter(1, ParameterType.INTEGER))
    assert mixed.parameters[5] == Parameter(16, ParameterType.BYTES)


def test_all_architectures_from_75_to_120_go_into_one_fatbin() -> None:
    """One fatbin holds code for every architecture from 75 to 120 that NVRTC knows, and PTX (A4)."""
    chosen = [f"sm_{number}" for number in nvrtc.architectures() if 75 <= number <= 120] + ["compute_120"]
    assert {"sm_75", "sm_90", "sm_120"} <= set(chosen)
    image = kernels.compile(SOURCE, arch=chosen)
    assert image.kind is ImageKind.FATBIN
    again = Image.from_bytes(image.data)
    assert again.architectures == image.architectures == tuple(chosen)
    assert sizes(again, "mixed") == MIXED
    assert all(again.runs_on(capability) for capability in ((7, 5), (8, 6), (9, 0), (10, 0), (12, 0)))


def test_an_architecture_named_twice_is_compiled_once() -> None:
    """Repeats change nothing."""
    assert kernels.compile(SOURCE, arch=["sm_80", "sm_80"]).architectures == ("sm_80",)


def test_template_instances_are_kernels_by_their_expression() -> None:
    """`instances` compiles a template, and its expression is the name."""
    image = kernels.compile(SOURCE, arch="sm_80", instances=("fill<float>", "fill<int>"))
    assert image.entries is not None
    assert {entry.name for entry in image.entries} == {"mixed", "plain", "fill<float>", "fill<int>"}


def test_debug_and_line_information_are_kept_on_request() -> None:
    """`debug` keeps more than `lineinfo`, and that more than neither; both together are `debug`."""
    plain, lines, debug, both = (
        len(kernels.compile(SOURCE, arch="sm_80", debug=debug, lineinfo=lineinfo).data)
        for debug, lineinfo in ((False, False), (False, True), (True, False), (True, True))
    )
    assert plain < lines < debug == both


def test_options_reach_the_compiler() -> None:
    """A macro that is defined by an option is seen."""
    source = "#ifndef NEEDED\n#error missing\n#endif\n" + SOURCE
    with pytest.raises(CompileError, match="missing"):
        kernels.compile(source, arch="sm_80")
    kernels.compile(source, arch="sm_80", options=("-DNEEDED",))


def test_a_failure_carries_the_log_with_file_and_line() -> None:
    """The message has the compiler's own words, the name that was given, and the line."""
    with pytest.raises(CompileError, match=re.escape("wrong.cu(1): error")) as caught:
        kernels.compile("__global__ void k() { nowhere(); }", arch="sm_80", name="wrong.cu")
    assert "nowhere" in str(caught.value)


def test_source_is_text_or_what_source_made_of_it() -> None:
    """The name of a file and compiled code are refused, with what to pass instead."""
    made = kernels.compile(kernels.source(SOURCE, name="mine.cu"), arch="sm_80")
    assert made.name == "mine.cu"
    assert made.entries == kernels.compile(SOURCE, arch="sm_80").entries
    with pytest.raises(CompileError, match="compiled already"):
        kernels.compile(made, arch="sm_80")
    with pytest.raises(CompileError, match=r"name of a file.*read_text"):
        kernels.compile("mine.cu", arch="sm_80")


def test_source_tells_the_parameters_that_the_compiler_gives() -> None:
    """What is read off a declaration is what the compiled code has; what is not plain is left open."""
    text = """
        typedef unsigned long mine;
        struct pair { float a; double b; };
        extern "C" __global__ void k(float *a, const int *__restrict__ b, void *c, const double d[], float e, double f,
            int g, unsigned h, const unsigned long long i, long j, short k, unsigned char l, bool m, size_t n, int64_t,
            uint16_t p, char, mine q, pair r, const float) {}
    """
    text = text.replace("int64_t", "long long").replace("uint16_t", "unsigned short int")
    read, compiled = kernels.source(text), kernels.compile(text, arch="compute_80")
    pairs = [
        pair
        for one, other in zip(read.entries or (), compiled.entries or (), strict=True)
        for pair in zip(one.parameters or (), other.parameters or (), strict=True)
    ]
    assert [one for one, other in pairs if one.size and one != other] == []
    assert [number for number, (one, _) in enumerate(pairs) if not one.size] == [17, 18]


@pytest.mark.parametrize(
    ("arch", "why"),
    [("sm_33", "NVRTC [0-9.]+ knows"), ("hopper", 'an architecture is "sm_90"'), ([], "at least one")],
)
def test_an_architecture_that_is_none_is_refused(arch: str | list[str], why: str) -> None:
    """An unknown architecture is refused before the compiler runs, with what there is."""
    with pytest.raises(CompileError, match=why):
        kernels.compile(SOURCE, arch=arch)


@pytest.mark.parametrize("arch", [90, [75, 90], ["sm_90", 9.0]])
def test_an_architecture_is_a_text(arch: Any) -> None:
    """A number, which may mean machine code or PTX, is refused with the two ways to say it."""
    with pytest.raises(TypeError, match='"sm_90" or "compute_90"'):
        kernels.compile(SOURCE, arch=arch)


def test_a_truncated_cubin_is_refused(tmp_path: Path) -> None:
    """A cubin that was cut short is no image."""
    image = kernels.compile(SOURCE, arch="sm_80")
    path = tmp_path / "short.cubin"
    path.write_bytes(image.data[: len(image.data) // 2])
    with pytest.raises(Exception, match="damaged or cut short"):
        Image.from_file(path)


def test_shipped_ptx_has_the_parameters_of_its_source() -> None:
    """The PTX that is shipped takes what its source takes today."""
    path = kernels.shipped("vector_add")
    compiled = kernels.compile(path.read_text(), arch="compute_75")
    assert Image.from_file(path.with_suffix(".ptx")).entries == compiled.entries
