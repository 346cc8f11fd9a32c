"""Modules are loaded and kernels launched on whichever driver runs; compiled code on CUDA, twins on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remap
from remap import kernels, lifetime
from remap.drivers.wrappers import Faulty, Recording
from remap.errors import (
    AccessError,
    ClosedError,
    CudaResult,
    DriverError,
    InvalidValueError,
    KernelError,
    LaunchError,
    OutOfMemoryError,
)
from remap.kernels import Kernel, Module, Pointer

SOURCE = kernels.shipped("vector_add")
PTX = SOURCE.with_suffix(".ptx")
N = 1000
SHAPE: dict[str, Any] = {"grid": (N + 255) // 256, "block": 256}


def add(launch: object, a: Pointer, b: Pointer, c: Pointer, n: int) -> None:
    """Do what `vector_add` does."""
    c.write("float32", int(n))[:] = a.read("float32", int(n)) + b.read("float32", int(n))


def kernel_of(module: Module) -> Kernel:
    """Return the kernel with its twin."""
    kernel = module.function("vector_add")
    kernel.host(add)
    return kernel


@pytest.fixture
def stream() -> Iterator[remap.Stream]:
    """Give a stream that outlives the buffers and the module (fixtures end in the reverse order)."""
    with remap.Stream(remap.device()) as stream:
        yield stream


@pytest.fixture
def module() -> Iterator[Module]:
    """Give the shipped kernel's module."""
    with kernels.load(PTX) as module:
        yield module


@pytest.fixture
def buffers(module: Module) -> Iterator[tuple[remap.Buffer, ...]]:
    """Give two buffers of numbers and one for their sum."""
    made = [remap.allocate(N * 4, resident=module.device) for _ in range(3)]
    made[0].copy_from_host(np.arange(N, dtype=np.float32))
    made[1].copy_from_host(np.full(N, 0.5, np.float32))
    yield tuple(made)
    for buffer in made:
        buffer.close()


def total(buffer: remap.Buffer) -> Any:
    """Return the sum that a launch wrote."""
    return buffer.to_host("float32")[:N]


EXPECTED = np.arange(N, dtype=np.float32) + np.float32(0.5)


@pytest.mark.parametrize("path", [SOURCE, PTX], ids=["source", "ptx"])
def test_the_shipped_kernel_runs(path: Path, buffers: tuple[remap.Buffer, ...]) -> None:
    """From source or PTX, the same launch adds two vectors, with a ragged last block."""
    with kernels.load(path) as module:
        a, b, c = buffers
        kernel_of(module).launch(a, b, c, N, **SHAPE)
        module.device.synchronize()
        assert np.array_equal(total(c), EXPECTED)
        assert (module.code == "Python") == (remap.driver().name == "host")


def test_every_form_of_argument_and_stream_means_the_same(
    stream: remap.Stream, module: Module, buffers: tuple[remap.Buffer, ...]
) -> None:
    """Buffers, views, addresses and typed scalars; no stream, a stream of remap, its handle, a foreign one."""

    class Foreign:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.handle

    kernel = kernel_of(module)
    a, b, c = buffers
    for arguments, where in (
        ((a, b, c, N), None),
        ((a.array("float32"), b.array("float32"), c.array("float32"), np.uint64(N)), stream),
        ((a, b, c, np.int64(N)), stream.handle),
        ((a, b, c, N), Foreign(stream.handle)),
    ):
        c.fill(0)
        kernel.launch(*arguments, stream=where, **SHAPE)
        module.device.synchronize()
        assert np.array_equal(total(c), EXPECTED)


def test_a_view_is_passed_from_its_offset_on(module: Module, buffers: tuple[remap.Buffer, ...]) -> None:
    """A view's first element is where the kernel starts."""
    a, b, c = buffers
    c.fill(0)
    kernel_of(module).launch(a, b, c.array("float32", N - 1, offset=4), 10, grid=1, block=32)
    module.device.synchronize()
    assert np.array_equal(total(c)[:12], [0, *EXPECTED[:10], 0])


def test_closing_a_module_waits_for_its_kernels(
    stream: remap.Stream, buffers: tuple[remap.Buffer, ...]
) -> None:
    """A module closed right after a launch is unloaded when the launch has ended (A9)."""
    a, b, c = buffers
    with kernels.load(PTX) as module:
        kernel = kernel_of(module)
        kernel.launch(a, b, c, N, stream=stream, **SHAPE)
    assert stream.done
    with pytest.raises(ClosedError, match="closed module"):
        kernel.launch(a, b, c, N, **SHAPE)


def test_closing_a_buffer_waits_for_the_launches_that_use_it(stream: remap.Stream, module: Module) -> None:
    """A buffer closed right after a launch is unmapped when the launch has ended (trap 11)."""
    a, b, c = (remap.allocate(N * 4, resident=module.device) for _ in range(3))
    kernel_of(module).launch(a, b, c, N, stream=stream, **SHAPE)
    for buffer in (a, b, c):
        buffer.close()
    assert stream.done


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"grid": 0, "block": 32}, "0 blocks in x: every extent is 1 or more"),
        ({"grid": (1, -1), "block": 32}, "-1 blocks in y"),
        ({"grid": (1, 70000), "block": 32}, "70000 blocks in y: device 0 takes at most 65535"),
        ({"grid": 1, "block": 2048}, "2048 threads in x: device 0 takes at most 1024"),
        ({"grid": 1, "block": (32, 32, 2)}, "2048 threads a block"),
        ({"grid": 1, "block": 32, "shared": "1MiB"}, "1 MiB of dynamic shared memory"),
        ({"grid": 1.5, "block": 32}, "grid 1.5: it is a whole number"),
        ({"grid": (1, 1, 1, 1), "block": 32}, "one to three"),
        ({"grid": "big", "block": 32}, "grid 'big'"),
    ],
)
def test_a_configuration_that_no_device_takes_is_refused(
    module: Module, buffers: tuple[remap.Buffer, ...], shape: dict[str, Any], why: str
) -> None:
    """The message names the kernel, what was asked and the limit; nothing is launched."""
    a, b, c = buffers
    c.fill(9)
    with pytest.raises(LaunchError, match=why):
        kernel_of(module).launch(a, b, c, N, **shape)
    module.device.synchronize()
    assert not np.array_equal(total(c), EXPECTED)


def test_more_shared_memory_than_every_device_has_is_allowed_on_request(
    module: Module, buffers: tuple[remap.Buffer, ...]
) -> None:
    """Up to the device's own limit, dynamic shared memory needs no further call."""
    most = module.device.properties.shared_memory_per_block_optin
    kernel_of(module).launch(*buffers, N, shared=most, **SHAPE)
    module.device.synchronize()
    assert np.array_equal(total(buffers[2]), EXPECTED)
    with pytest.raises(LaunchError, match="shared memory"):
        kernel_of(module).launch(*buffers, N, shared=most + 1, **SHAPE)


def test_memory_that_the_device_may_not_use_is_refused_by_name(
    module: Module, buffers: tuple[remap.Buffer, ...]
) -> None:
    """Closed memory and memory without access are refused before the launch, and the others stay free to close."""
    a, b, c = buffers
    kernel = kernel_of(module)
    closed = remap.allocate(N * 4, resident=module.device)
    closed.close()
    with pytest.raises(ClosedError):
        kernel.launch(a, b, closed, N, **SHAPE)
    size = 2 * remap.MiB
    with (
        remap.create(size, at=module.device) as memory,
        remap.reserve(size) as reserved,
        reserved.map(memory) as mapping,
        pytest.raises(AccessError, match="launch of vector_add"),
    ):
        kernel.launch(a, b, mapping, N, **SHAPE)
    assert not any(one._busy for one in (a, b, c))


def test_wrong_arguments_are_refused_before_the_launch(
    module: Module, buffers: tuple[remap.Buffer, ...]
) -> None:
    """A wrong number or type of arguments is the same error on both drivers, from what the image tells."""
    a, b, c = buffers
    kernel = kernel_of(module)
    for arguments in (
        (a, b, c),
        (a, b, c, N, N),
        (a, b, c, 1.0),
        (a, b, c, np.int32(N)),
        (a, b, "text", N),
        (a, b, c, 1 << 70),
    ):
        with pytest.raises(LaunchError, match="vector_add"):
            kernel.launch(*arguments, **SHAPE)


def test_a_missing_function_is_not_found_and_the_message_lists_what_there_is(module: Module) -> None:
    """A name that is not in the image is NOT_FOUND on both drivers (A4)."""
    with pytest.raises(DriverError, match="It has: vector_add") as caught:
        module.function("vector_sub")
    assert caught.value.name == "CUDA_ERROR_NOT_FOUND"


def test_types_can_be_named_to_check_a_kernel(module: Module, buffers: tuple[remap.Buffer, ...]) -> None:
    """Named types take the place of what the image tells."""
    kernel = module.function("vector_add", ["pointer", "pointer", "pointer", "uint64"])
    kernel.host(add)
    kernel.launch(*buffers, N, **SHAPE)
    module.device.synchronize()
    assert np.array_equal(total(buffers[2]), EXPECTED)
    with pytest.raises(InvalidValueError, match="parameter type"):
        module.function("vector_add", ["what"])


def test_a_mistake_in_a_twin_is_reported_and_costs_nothing(
    module: Module, buffers: tuple[remap.Buffer, ...], stream: remap.Stream
) -> None:
    """What a twin raises is a KernelError that names kernel, error and line; the context and the memory are intact."""
    kernel = module.function("vector_add")

    @kernel.host
    def _(launch: object, a: Pointer, b: Pointer, c: Pointer, n: int) -> None:
        raise ValueError("the sum is late")

    if remap.driver().name != "host":
        return  # the compiled kernel runs there, and a twin never does
    kernel.launch(*buffers, N, **SHAPE, stream=stream)
    said = r"vector_add.*ValueError: the sum is late \(.*test_launch\.py:\d+\)"
    with pytest.raises(KernelError, match=said) as caught:
        stream.synchronize()
    assert isinstance(caught.value.__cause__, ValueError)
    kernel_of(module).launch(*buffers, N, **SHAPE, stream=stream)
    stream.synchronize()
    a, b, c = (one.to_host("float32", N) for one in buffers)
    assert np.array_equal(c, a + b)


def test_a_twin_takes_as_many_arguments_as_its_kernel(module: Module) -> None:
    """A twin of other arity is refused when it is registered; one that takes any number, and defaults, are fine."""
    kernel = module.function("vector_add")
    with pytest.raises(TypeError, match=r"vector_add is called with the launch and the kernel's 4 arguments"):
        kernel.host(lambda launch, a, b: None)
    with pytest.raises(TypeError, match="takes nothing"):
        kernel.host(lambda: None)
    kernel.host(lambda *everything: None)
    kernel.host(lambda launch, a, b, c, n=5: None)


def test_the_same_function_is_the_same_kernel(module: Module) -> None:
    """Asking twice gives one object, so that a twin stays registered."""
    assert module.function("vector_add") is module.function("vector_add")


def test_an_unclosed_module_warns_and_is_unloaded_later() -> None:
    """A module that is dropped is queued, and given back by the next call (invariant 4)."""
    module = kernels.load(PTX)
    with pytest.warns(ResourceWarning, match="module"):
        del module
    assert lifetime.drain() == 1


@pytest.mark.parametrize("call", ["create_event", "record_event"])
def test_a_launch_that_no_event_tells_of(stream: remap.Stream, call: str) -> None:
    """Where a bare handle is refused its event, the kernel runs all the same, and whoever closes waits (7)."""
    own = remap.driver()
    stream.close()
    faulty = Faulty(own)
    recording = Recording(faulty)
    remap.use(recording)
    try:
        with kernels.load(PTX) as module, remap.Stream(module.device) as bare:
            kernel = kernel_of(module)
            made = [remap.allocate(N * 4, resident=module.device) for _ in range(3)]
            made[0].copy_from_host(np.full(N, 3, np.float32))
            made[1].copy_from_host(np.full(N, 4, np.float32))
            faulty.fail(call, result=CudaResult.OUT_OF_MEMORY, repeat=True)
            kernel.launch(*made, N, stream=bare.handle, **SHAPE)
            assert set(faulty.refused) == {call}
            faulty.heal()
            recording.forget()
            made[0].close()
            assert recording.calls_to("synchronize_context")
            assert set(made[2].to_host("float32", N).tolist()) == {7.0}
            for buffer in made[1:]:
                buffer.close()
    finally:
        remap.use(own)


def test_a_failed_launch_leaves_every_buffer_free() -> None:
    """When the driver refuses a launch, nothing counts as used, and everything can be closed."""
    own = remap.driver()
    faulty = Faulty(own)
    remap.use(faulty)
    try:
        with kernels.load(PTX) as module:
            kernel = kernel_of(module)
            made = [remap.allocate(N * 4, resident=module.device) for _ in range(3)]
            faulty.fail("launch", result=CudaResult.OUT_OF_MEMORY)
            with pytest.raises(OutOfMemoryError):
                kernel.launch(*made, N, **SHAPE)
            assert not any(one._busy for one in made)
            assert not any(one._uses for one in made)
            for buffer in made:
                buffer.close()
    finally:
        remap.use(own)
