"""What only the CUDA driver has to prove: its answers on devices and features, its modules, its errors."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remap
from remap import kernels
from remap.drivers import open as open_driver
from remap.drivers.protocol import SupportsModules, SupportsSharing
from remap.errors import DriverError, NotPermittedError
from remap.kernels import Image, nvrtc
from remap.types import CAPABILITIES, AllocationProperties, HandleType, Host, HostNuma, Location, LocationKind

pytestmark = pytest.mark.cuda

needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")

SCALE = """
template <class T> __global__ void scale(T *x, T by, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= by;
}
struct Line { float a; double b; short c; };
extern "C" __global__ void along(const float *x, double *y, int n, Line line, float add, bool negate)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = (negate ? -1 : 1) * (line.a * x[i] + line.b) + line.c + add;
}
extern "C" __global__ void shared_sum(const float *x, float *out)
{
    extern __shared__ float part[];
    part[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) { float s = 0; for (int i = 0; i < blockDim.x; i++) s += part[i]; *out = s; }
}
"""


@pytest.fixture
def driver() -> Any:
    """Give the driver itself."""
    return remap.driver()


@pytest.fixture
def context(driver: Any) -> Iterator[None]:
    """Have device 0's context current."""
    with remap.device(0).current():
        yield


def test_it_has_the_powers_of_a_cuda_driver(driver: Any) -> None:
    """Modules and sharing are there, and the version names driver and bindings."""
    assert "cuda-bindings" in driver.version()
    assert isinstance(driver, SupportsModules)
    assert isinstance(driver, SupportsSharing)


def test_properties_are_in_their_ranges(driver: Any) -> None:
    """Every figure of a device is one that a device can have."""
    for index in range(driver.device_count()):
        found = driver.device_properties(index)
        assert found.name
        assert found.compute_capability >= (7, 0)
        assert min(found.multiprocessors, found.cores_per_multiprocessor, found.clock_khz) > 0
        assert found.shared_memory_per_block_optin >= found.shared_memory_per_block >= 48 * 1024
        assert found.speed > 0
    with pytest.raises(DriverError) as caught:
        driver.device_properties(driver.device_count())
    assert caught.value.name == "CUDA_ERROR_INVALID_DEVICE"


def test_every_capability_is_answered_with_a_reason_where_it_is_missing(driver: Any) -> None:
    """Every name is there, a missing feature says why, and the answer stays the same object (B1)."""
    for index in range(driver.device_count()):
        found = driver.capabilities(index)
        assert tuple(found) == CAPABILITIES
        assert all(bool(one.reason) != one.supported for one in found.values()), found
        assert found["vmm"]
        assert not found["win32"]
        assert driver.capabilities(index) is found


def test_fabric_is_believed_only_where_a_handle_goes_all_the_way(driver: Any) -> None:
    """Without an IMEX channel fabric is missing, and the reason names the channel and both ends."""
    found = driver.capabilities(0)["fabric"]
    properties = AllocationProperties(Location(LocationKind.DEVICE, 0), frozenset({HandleType.FABRIC}))
    if found:
        driver.release(driver.create(driver.granularity(properties).minimum, properties))
        return
    if Path("/dev/nvidia-caps-imex-channels").exists():
        pytest.skip("this machine has IMEX channels but no fabric")
    assert "IMEX channel" in found.reason
    assert "same channel" in found.reason
    with pytest.raises(NotPermittedError, match="IMEX"):
        driver.create(driver.granularity(properties).minimum, properties)


OPT_OUTS = (
    "REMAP_DISABLE_MULTICAST=1",
    "NCCL_NVLS_ENABLE=0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST=1",
    "NVSHMEM_DISABLE_NVLS=1",
)


@pytest.mark.parametrize("setting", OPT_OUTS)
def test_multicast_is_off_where_any_library_was_told_so(setting: str) -> None:
    """One opt-out of any library turns multicast off, and the reason names it."""
    name, value = setting.split("=")
    others = {one.partition("=")[0] for one in OPT_OUTS}
    kept = {key: given for key, given in os.environ.items() if key not in others}
    code = "from remap.drivers import open; print(open('cuda').capabilities(0)['multicast'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**kept, name: value},
    )
    assert "supported=False" in done.stdout
    assert setting in done.stdout


def test_every_kind_of_memory_works_or_is_refused_by_name(driver: Any) -> None:
    """Location × handle type × compression × RDMA: each is created and read back, or refused with an error (B7)."""
    places = (Location(LocationKind.DEVICE, 0), Host(), HostNuma(0))
    kinds = (frozenset[HandleType](), frozenset({HandleType.POSIX_FD}), frozenset({HandleType.FABRIC}))
    refusals = {"CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED"}
    outcomes: list[str] = []
    for place, kind, compressible, rdma in itertools.product(places, kinds, (False, True), (False, True)):
        asked = AllocationProperties(place, kind, compressible, rdma)
        outcomes.append(outcome(driver, asked))
        assert outcomes[-1] in {"works", *refusals}, asked
    assert outcomes.count("works") >= 4


def outcome(driver: Any, asked: AllocationProperties) -> str:
    """Return how creating such memory ends."""
    try:
        handle = driver.create(driver.granularity(asked).minimum, asked)
    except DriverError as error:
        return error.name
    found = driver.properties_of(handle)
    driver.release(handle)
    # Host memory reads back as that of the node the driver took (seen on H200).
    place_kept = found.location == asked.location or (
        asked.location == Host() and not found.location.is_device
    )
    return "works" if place_kept and found.handle_types == asked.handle_types else f"{found}"


def test_both_handle_types_at_once_are_read_back(driver: Any) -> None:
    """A bit-or of handle types, which no enum has a name for, is read back as the set it is."""
    both = frozenset({HandleType.POSIX_FD, HandleType.FABRIC})
    asked = AllocationProperties(Location(LocationKind.DEVICE, 0), both)
    if not driver.capabilities(0)["fabric"]:
        with pytest.raises(NotPermittedError):
            driver.create(driver.granularity(asked).minimum, asked)
        return
    handle = driver.create(driver.granularity(asked).minimum, asked)
    found = driver.properties_of(handle)
    driver.release(handle)
    assert found.handle_types == both


def test_contexts_are_released_as_often_as_they_were_retained(driver: Any) -> None:
    """A release beyond our own count is refused before it takes away what somebody else holds."""
    other = open_driver("cuda")
    assert other.retain_context(0) == other.retain_context(0)
    other.release_context(0)
    other.release_context(0)
    with pytest.raises(DriverError, match="each retain can be released once"):
        other.release_context(0)
    other.retain_context(0)
    other.shutdown()
    other.shutdown()


def test_a_child_of_fork_is_refused() -> None:
    """In a child of fork, every call and a new opening raise ForkedError; the parent goes on."""
    code = """
import os
from remap.drivers import open
from remap.errors import ForkedError
driver = open("cuda")
kind = type(driver)
pid = os.fork()
if pid == 0:
    status = 0
    for call in (lambda: driver.device_count(), lambda: driver.memory_info(), lambda: kind()):
        try:
            call()
        except ForkedError:
            continue
        except BaseException:
            pass
        status = 1
    os._exit(status)
_, status = os.waitpid(pid, 0)
driver.device_count()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("context")
def test_errors_tell_the_call_the_name_and_the_rule(driver: Any) -> None:
    """A refused call names itself, CUDA's result, what was asked and why not."""
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: driver.create(1, AllocationProperties(Location(LocationKind.DEVICE, 0))), "multiple"),
        (lambda: driver.reserve(3), "power of two"),
        (lambda: driver.copy_to_host(np.zeros(1).ctypes.data, 1 << 44, 8, 0), "readable"),
        (lambda: driver.fill(1 << 44, 1, 1, 8, 0), "writable"),
    ]
    for call, words in calls:
        with pytest.raises(DriverError) as caught:
            call()
        assert caught.value.name == "CUDA_ERROR_INVALID_VALUE"
        assert words in str(caught.value)
        assert caught.value.call in str(caught.value)


@pytest.mark.usefixtures("context")
def test_bad_ptx_comes_with_the_assemblers_log(driver: Any) -> None:
    """PTX that does not assemble is refused with the line that is wrong."""
    text = kernels.shipped("vector_add").with_suffix(".ptx").read_text().replace("add.f32", "odd.f32")
    with pytest.raises(DriverError, match="odd") as caught:
        driver.load_module(text.encode())
    assert caught.value.name == "CUDA_ERROR_INVALID_PTX"


@needs_nvrtc
@pytest.mark.parametrize("form", ["cubin", "fatbin", "ptx", "source"])
def test_every_form_of_image_runs(form: str, tmp_path: Path) -> None:
    """A cubin, a fatbin of several architectures, PTX and source give the same results, from files too."""
    device = remap.device(0)
    major, minor = device.properties.compute_capability
    own = f"sm_{major}{minor}"
    arch = {"cubin": own, "fatbin": ["sm_75", own, "compute_75"], "ptx": "compute_75", "source": None}[form]
    if arch is None:
        image = kernels.source(kernels.shipped("vector_add").read_text(), name="vector_add.cu")
    else:
        image = kernels.compile(kernels.shipped("vector_add").read_text(), arch=arch)
    if form == "ptx":  # written by a compiler that may be newer than the driver
        image = Image.from_file(kernels.shipped("vector_add").with_suffix(".ptx"))
    path = image.save(tmp_path / f"kernel.{form}")
    with kernels.load(path) as module, remap.allocate(4096, resident=0) as a:
        a.copy_from_host(np.arange(1024, dtype=np.float32))
        module.function("vector_add").launch(a, a, a, 1024, grid=4, block=256)
        module.device.synchronize()
        assert np.array_equal(a.to_host("float32", 1024), 2 * np.arange(1024, dtype=np.float32))
        assert module.code == (f"{own}, which the driver made from compute_75" if form == "ptx" else own)


@needs_nvrtc
def test_a_wrong_architecture_is_its_own_error(tmp_path: Path) -> None:
    """An image without code for the device is NO_BINARY_FOR_GPU, and names both sides (A4)."""
    major = remap.device(0).properties.compute_capability[0]
    wrong = "sm_75" if major != 7 else "sm_90"
    path = kernels.compile(SCALE, arch=wrong).save(tmp_path / "wrong.cubin")
    with pytest.raises(DriverError, match=wrong) as caught:
        kernels.load(path)
    assert caught.value.name == "CUDA_ERROR_NO_BINARY_FOR_GPU"
    assert f"the device is sm_{major}" in str(caught.value)


@needs_nvrtc
def test_structures_and_mixed_scalars_arrive_as_they_are() -> None:
    """A structure by value with padding, a float, a bool and an int, in a layout that the driver agrees on (D4)."""
    line = np.dtype([("a", "f4"), ("b", "f8"), ("c", "i2")], align=True)
    value = np.array((2.0, 0.25, 3), line)[()]
    n = 100
    with (
        kernels.load(kernels.source(SCALE)) as module,
        remap.allocate(4 * n, resident=0) as x,
        remap.allocate(8 * n, resident=0) as y,
    ):
        x.copy_from_host(np.arange(n, dtype=np.float32))
        kernel = module.function("along")
        driver: Any = remap.driver()
        with module.device.current():
            sizes = driver.parameter_sizes(kernel._function)
        assert kernel.parameters is not None
        assert sizes is None or sizes == tuple(one.size for one in kernel.parameters)
        kernel.launch(x, y, n, value, 0.5, True, grid=1, block=128)
        module.device.synchronize()
        expected = -(2.0 * np.arange(n) + 0.25) + 3 + 0.5
        assert np.allclose(y.to_host("float64", n), expected)


@needs_nvrtc
def test_template_instances_are_found_by_their_expression() -> None:
    """An instance that was asked for when compiling is a function of the module by that name."""
    major, minor = remap.device(0).properties.compute_capability
    image = kernels.compile(SCALE, arch=f"sm_{major}{minor}", instances=("scale<double>",))
    with kernels.load(image) as module, remap.allocate(80, resident=0) as x:
        x.copy_from_host(np.ones(10))
        module.function("scale<double>").launch(x, 3.0, 10, grid=1, block=32)
        module.device.synchronize()
        assert np.array_equal(x.to_host("float64", 10), np.full(10, 3.0))


@needs_nvrtc
def test_dynamic_shared_memory_beyond_48_kib_is_allowed_by_itself() -> None:
    """A launch that asks for more than every device has just works, up to the device's limit."""
    most = remap.device(0).properties.shared_memory_per_block_optin
    with (
        kernels.load(kernels.source(SCALE)) as module,
        remap.allocate(4096, resident=0) as x,
        remap.allocate(4, resident=0) as out,
    ):
        x.copy_from_host(np.ones(1024, np.float32))
        module.function("shared_sum").launch(x, out, grid=1, block=1024, shared=most)
        module.device.synchronize()
        assert out.to_host("float32", 1)[0] == 1024


@needs_nvrtc
def test_launches_from_several_threads_do_not_mix_their_arguments() -> None:
    """Blocks of arguments are used again, but never by two launches at once."""
    from concurrent.futures import ThreadPoolExecutor

    n = 64
    with kernels.load(kernels.shipped("vector_add")) as module, remap.allocate(4 * n, resident=0) as one:
        one.copy_from_host(np.ones(n, np.float32))
        kernel = module.function("vector_add")

        def work(number: int) -> bool:
            with remap.allocate(4 * n, resident=0) as mine:
                mine.copy_from_host(np.full(n, number, np.float32))
                for _ in range(200):
                    kernel.launch(one, mine, mine, n, grid=1, block=64)
                module.device.synchronize()
                return bool((mine.to_host("float32", n) == number + 200).all())

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))
