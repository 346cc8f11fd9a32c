"""The two wrappers: what they add, and that they are otherwise the driver they wrap."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import threading
from collections.abc import Generator
from functools import partial
from time import perf_counter_ns

import pytest

import remap
from remap import drivers
from remap.drivers import graph_powers, multicast_power, powers, protocol
from remap.drivers.protocol import Driver, SupportsModules, SupportsSharing
from remap.drivers.wrappers import CUDA_FUNCTIONS, Faulty, Recording
from remap.errors import CudaResult, DriverError, InvalidValueError, OutOfAddressSpaceError, context_lost
from remap.sizes import MiB
from remap.types import AllocationProperties, Location, LocationKind

HERE = AllocationProperties(Location(LocationKind.DEVICE, 0))
METHODS = sorted(
    name for name, _ in inspect.getmembers(Driver, inspect.isfunction) if not name.startswith("_")
)


@pytest.fixture
def host() -> Generator[Driver]:
    """Open a host driver of its own."""
    driver = drivers.open("host", devices=1, memory="64MiB")
    yield driver
    driver.shutdown()


@pytest.mark.parametrize("wrap", [Recording, Faulty, lambda driver: Recording(Faulty(Recording(driver)))])
def test_a_wrapper_is_the_driver_it_wraps(host: Driver, wrap: type[Recording]) -> None:
    """It has every method of the protocol, and the same name, lock and optional powers; other attributes pass."""
    wrapped = wrap(host)
    assert wrapped.name == host.name
    assert wrapped.lock is host.lock
    assert wrapped.version() == host.version()
    for name in METHODS:
        assert callable(inspect.getattr_static(wrapped, name)), name
    for power in (SupportsModules, SupportsSharing):
        assert isinstance(wrapped, power) == isinstance(host, power)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = wrapped.no_such_thing


def test_a_record_says_everything(host: Driver) -> None:
    """A record has method, arguments, result or error, time and thread; records are frozen and print as calls."""
    recording = Recording(host)
    address = recording.reserve(2 * MiB, hint=0)
    with pytest.raises(DriverError):
        recording.free_range(address, 4 * MiB)
    thread = threading.Thread(target=recording.free_range, args=(address, 2 * MiB))
    thread.start()
    thread.join()
    reserved, refused, freed = recording.calls
    assert (reserved.name, reserved.arguments, reserved.keywords) == ("reserve", (2 * MiB,), {"hint": 0})
    assert (reserved.result, reserved.error) == (address, None)
    assert (refused.result, refused.error) == (None, "CUDA_ERROR_INVALID_VALUE")
    assert reserved.thread == threading.get_ident() != freed.thread
    assert reserved.start + reserved.duration <= refused.start
    assert str(refused) == f"free_range({address:#x}, 4194304) -> CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(dataclasses.FrozenInstanceError):
        reserved.result = 0  # type: ignore[misc]
    assert recording.calls_to("reserve") == (reserved,)
    recording.forget()
    assert recording.calls == ()


def test_a_limit_keeps_the_newest(host: Driver) -> None:
    """With a limit, old records go first."""
    recording = Recording(host, limit=2)
    for _ in range(3):
        recording.device_count()
    recording.version()
    assert [call.name for call in recording.calls] == ["device_count", "version"]


def test_the_nth_call_of_a_kind_fails(host: Driver) -> None:
    """The n-th call of the named methods is refused, before and after it they succeed, and others are not counted."""
    faulty = Faulty(host)
    faulty.fail("reserve", nth=2, result=CudaResult.OUT_OF_MEMORY)
    first = faulty.reserve(2 * MiB)
    handle = faulty.create(2 * MiB, HERE)
    with pytest.raises(OutOfAddressSpaceError, match="cuMemAddressReserve"):
        faulty.reserve(2 * MiB)
    second = faulty.reserve(2 * MiB)
    assert faulty.refused == ("reserve",)
    for address in (first, second):
        faulty.free_range(address, 2 * MiB)
    faulty.release(handle)


def test_the_nth_call_overall_fails(host: Driver) -> None:
    """Without a name every call counts."""
    faulty = Faulty(host)
    faulty.fail(nth=3)
    faulty.device_count()
    faulty.version()
    with pytest.raises(DriverError) as caught:
        faulty.device_count()
    assert (caught.value.name, caught.value.code) == ("CUDA_ERROR_UNKNOWN", 999)
    faulty.device_count()


def test_faults_repeat_and_heal(host: Driver) -> None:
    """A repeated fault strikes until heal(), which forgets it all; several faults count by themselves."""
    faulty = Faulty(host)
    faulty.fail("device_count", repeat=True)
    faulty.fail("version", nth=2)
    for _ in range(3):
        with pytest.raises(DriverError):
            faulty.device_count()
    faulty.version()
    with pytest.raises(DriverError):
        faulty.version()
    assert faulty.refused == ("device_count",) * 3 + ("version",)
    faulty.heal()
    assert not faulty.refused
    assert faulty.device_count() == 1


def test_a_refused_call_does_not_arrive(host: Driver) -> None:
    """What is refused never reaches the driver."""
    recording = Recording(host)
    faulty = Faulty(recording)
    faulty.fail("create", result=CudaResult.OUT_OF_MEMORY)
    with pytest.raises(remap.OutOfMemoryError):
        faulty.create(2 * MiB, HERE)
    assert recording.calls == ()
    assert not context_lost()


@pytest.mark.parametrize(
    ("calls", "nth", "said"),
    [
        (("no_such_call",), 1, r"Name a method of remap\.drivers\.protocol\.Driver"),
        (("fail",), 1, "Did you mean"),
        (("creat",), 1, "Did you mean 'create'"),
        (("create", "cuMemCreat"), 1, "no call 'cuMemCreat'. Did you mean 'cuMemCreate'"),
        (("create",), 0, "counted from 1"),
    ],
)
def test_faults_that_could_never_strike(host: Driver, calls: tuple[str, ...], nth: int, said: str) -> None:
    """A method that does not exist, or a count below 1, is refused; what was meant is named."""
    with pytest.raises(InvalidValueError, match=said):
        Faulty(host).fail(*calls, nth=nth)


def test_faults_by_the_name_that_errors_have(host: Driver) -> None:
    """A call goes by the CUDA function that its errors name, too: all methods that stand for it are counted."""
    faulty = Faulty(host)
    faulty.fail("cuMemCreate", result=CudaResult.OUT_OF_MEMORY)
    with pytest.raises(remap.OutOfMemoryError) as caught:
        faulty.create(2 * MiB, HERE)
    assert caught.value.call == "cuMemCreate"
    faulty.fail("cuEventCreate", nth=2)
    faulty.retain_context(0)
    faulty.push_context(1)
    event = faulty.create_event()
    with pytest.raises(DriverError, match="cuEventCreate"):
        faulty.create_shared_event()
    faulty.destroy_event(event)
    faulty.pop_context()
    faulty.release_context(0)
    assert faulty.refused == ("create", "create_shared_event")


def test_an_injected_error_says_so() -> None:
    """No advice to make room where a test has refused the memory; and who looks can tell, after a pickle as well."""
    before = remap.driver()
    faulty = Faulty(before)
    remap.use(faulty)
    try:
        with remap.ElasticBuffer(4 * MiB) as cache:
            for ask in (
                lambda: remap.allocate(2 * MiB),
                lambda: cache.resize(2 * MiB),
                lambda: remap.DeviceBuffer.empty(4, source="plain"),
            ):
                faulty.fail("create", "allocate", result=CudaResult.OUT_OF_MEMORY, repeat=True)
                with pytest.raises(remap.OutOfMemoryError, match="injected by Faulty") as caught:
                    ask()
                assert "free there" not in str(caught.value)
                assert caught.value.injected
                assert pickle.loads(pickle.dumps(caught.value)).injected
                faulty.heal()
        with pytest.raises(remap.OutOfMemoryError) as caught:
            remap.allocate("1TiB")
        assert not caught.value.injected
    finally:
        remap.use(before)


def test_the_functions_exist() -> None:
    """The names of CUDA functions belong to methods of the protocols."""
    documented = {
        name
        for module in (protocol, powers, graph_powers, multicast_power)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
    }
    assert CUDA_FUNCTIONS.keys() <= documented


@pytest.mark.alone
@pytest.mark.parametrize("wrap", [partial(Recording, limit=1000), Faulty])
def test_a_wrapper_costs_little(host: Driver, wrap: type[Recording]) -> None:
    """A wrapped call takes less than 2 µs longer, in the best of many rounds."""

    def best(driver: Driver) -> float:
        rounds: list[float] = []
        for _ in range(30):
            start = perf_counter_ns()
            for _ in range(200):
                driver.device_count()
            rounds.append((perf_counter_ns() - start) / 200)
        return min(rounds)

    assert best(wrap(host)) - best(host) < 2000
