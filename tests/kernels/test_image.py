"""Images are told apart by their bytes, and say which kernels they hold without asking a driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from remap import kernels
from remap.errors import DriverError
from remap.kernels import Image, ImageKind, Parameter, ParameterType
from remap.kernels.image import unmangled

PTX = """
//
// .entry commented_out(
.version 6.3
.target sm_75
.address_size 64
.visible .entry first(
    .param .u64 first_param_0,
    .param .f32 first_param_1,
    .param .align 8 .b8 first_param_2[24]
)
.maxntid 128, 1, 1
{
    ret;
}
.entry second() { ret; }
"""


def test_ptx_tells_its_kernels_and_the_types_of_their_parameters() -> None:
    """PTX names each entry with the size and type of every parameter; comments do not count."""
    image = Image.from_bytes(PTX.encode(), "text")
    assert (image.kind, image.architectures) == (ImageKind.PTX, ("compute_75",))
    assert image.entries is not None
    first, second = image.entries
    assert (first.name, second.name) == ("first", "second")
    assert first.parameters == (
        Parameter(8, ParameterType.INTEGER),
        Parameter(4, ParameterType.FLOAT),
        Parameter(24, ParameterType.BYTES),
    )
    assert second.parameters == ()


def test_a_nul_may_end_ptx() -> None:
    """Files of PTX may end in the NUL that the driver wants."""
    assert Image.from_bytes(PTX.encode() + b"\0").kind is ImageKind.PTX


def test_source_tells_its_kernels_and_how_many_parameters_they_have() -> None:
    """CUDA C++ is an image too; commas inside a template's angles and comments split nothing."""
    image = kernels.source(
        "// __global__ void not_this(int a)\n"
        "__global__ void __launch_bounds__(256, 2) one(std::array<int, 3> a, /* int, */ float *b) {}\n"
        'extern "C" __global__ __launch_bounds__(64) void two(void) {}'
    )
    assert image.kind is ImageKind.SOURCE
    assert image.entries is not None
    assert [(entry.name, len(entry.parameters or ())) for entry in image.entries] == [("one", 2), ("two", 0)]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "neither a cubin, a fatbin, PTX nor CUDA C++"),
        (b"\xff\xfe\x00 something", "neither"),
        (b"plain text", "neither"),
        (b"\x7fELF", "damaged or cut short"),
        (b"\x7fELF" + bytes(60), "not for a CUDA device"),
        (b"\x50\xed\x55\xba", "damaged or cut short"),
        (b"\x50\xed\x55\xba\x01\x00\x10\x00" + bytes(8), "empty"),
        (b"\x50\xed\x55\xba\x01\x00\x10\x00\xff" + bytes(7), "cut short: 16 of 271 bytes"),
    ],
)
def test_what_is_no_image_is_refused_with_the_reason(data: bytes, why: str) -> None:
    """Bytes that are no image are INVALID_IMAGE, and the message says what is wrong with them."""
    with pytest.raises(DriverError, match=why) as caught:
        Image.from_bytes(data, "the file")
    assert caught.value.name == "CUDA_ERROR_INVALID_IMAGE"
    assert "the file" in str(caught.value)


def test_a_missing_file_is_its_own_error(tmp_path: Path) -> None:
    """A path that does not exist is FILE_NOT_FOUND, not a wrong image."""
    with pytest.raises(DriverError, match="no such file") as caught:
        Image.from_file(tmp_path / "gone.cubin")
    assert caught.value.name == "CUDA_ERROR_FILE_NOT_FOUND"


def test_saved_images_are_read_back(tmp_path: Path) -> None:
    """What `save` writes, `from_file` reads."""
    image = Image.from_bytes(PTX.encode(), "text")
    again = Image.from_file(image.save(tmp_path / "kernel.ptx"))
    assert (again.data, again.entries) == (image.data, image.entries)


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("vector_add", "vector_add"),
        ("_Z3cppi", "cpp"),
        ("_Z2tkIfEvPT_S0_", "_Z2tkIfEvPT_S0_"),
        ("_ZN2ns1fEv", "_ZN2ns1fEv"),
    ],
)
def test_unmangled_names_are_those_of_plain_functions(symbol: str, name: str) -> None:
    """A plain C++ function is found by its name; templates and members keep their symbol."""
    assert unmangled(symbol) == name


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("compute_75", (12, 0), True),
        ("compute_90", (8, 0), False),
        ("sm_90a", (9, 0), True),
        ("compute_90a", (10, 0), False),
        ("compute_100f", (10, 3), True),
        ("compute_100f", (12, 0), False),
    ],
)
def test_which_devices_run_an_architecture(
    architecture: str, capability: tuple[int, int], runs: bool
) -> None:
    """Machine code runs within its major version from its minor one on; PTX runs on everything newer."""
    assert Image(ImageKind.CUBIN, b"", (architecture,), "x").runs_on(capability) is runs


def test_the_shipped_ptx_is_what_its_source_says() -> None:
    """Every shipped kernel has PTX beside it, with the same kernels, that an old driver takes."""
    path = kernels.shipped("vector_add")
    ptx, source = Image.from_file(path.with_suffix(".ptx")), Image.from_file(path)
    assert [entry.name for entry in ptx.entries or ()] == [entry.name for entry in source.entries or ()]
    assert b".version 6.3" in ptx.data
    assert ptx.architectures == ("compute_75",)
