"""What a driver does where the rule book has a number: measured call by call, for the profile of a driver and GPU.

Each fact is named for its rule (T1 to T17) and is a value or the name of the error; the costs are medians in
microseconds. The conformance suite says what a driver must do; this writes down what it does, to compare two. What
only ends of processes can tell is left to the suite: faults of kernels (T10), exporters that die (T14).
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from remap.drivers.graph_powers import HighMark, SupportsGraphMemory, SupportsGraphs
from remap.drivers.powers import SupportsPools
from remap.drivers.protocol import Driver, SupportsSharing
from remap.errors import DriverError, RemapError
from remap.sizes import GiB, MiB, TiB
from remap.types import Access, AllocationProperties, HandleType, Host, HostNuma, Location, LocationKind

_DEVICE = Location(LocationKind.DEVICE, 0)
_RW = Access.READ_WRITE
_REPEATS = 15
_GRAPH = 64 * MiB  # what a graph allocates: the size for which the figures of hardware are known


def measure(driver: Driver) -> Iterator[tuple[str, Any]]:
    """Yield each fact of the first device, as soon as it is known. Everything made is given back."""
    properties = driver.device_properties(0)
    yield "about.driver", f"{driver.name}: {driver.version()}"
    yield "about.device", properties.name
    yield "about.compute_capability", list(properties.compute_capability)
    yield "about.system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "about.python", platform.python_version()
    yield "about.devices", driver.device_count()
    context = driver.retain_context(0)
    yield from _without_context(driver)
    driver.push_context(context)
    try:
        yield from _objects(driver)
        yield from _mappings(driver)
        yield from _graphs(driver)
        yield from _sharing(driver)
        yield from _costs(driver)
    finally:
        driver.pop_context()
        driver.release_context(0)


def _outcome(call: Callable[[], Any]) -> str:
    """Return SUCCESS, or the name of the error without its prefix."""
    try:
        call()
    except DriverError as error:
        return error.name.removeprefix("CUDA_ERROR_")
    except RemapError as error:
        return type(error).__name__
    return "SUCCESS"


def _without_context(driver: Driver) -> Iterator[tuple[str, Any]]:
    """Yield what works on a thread on which no context is current."""
    device = AllocationProperties(_DEVICE)
    size = driver.granularity(device).minimum

    def objects() -> None:
        address, handle = driver.reserve(size), driver.create(size, device)
        driver.map(address, size, handle)
        driver.set_access(address, size, [(_DEVICE, _RW)])
        fill.append(_outcome(lambda: driver.fill(address, 1, 1, size, 0)))
        driver.unmap(address, size)
        driver.release(handle)
        driver.free_range(address, size)

    fill: list[str] = []
    yield "T11.no_context.create_map_access_unmap_release", _outcome(objects)
    yield "T11.no_context.fill", fill[0] if fill else "not reached"
    yield "T11.no_context.memory_info", _outcome(driver.memory_info)


def _objects(driver: Driver) -> Iterator[tuple[str, Any]]:
    device = AllocationProperties(_DEVICE)
    for name, place in (("device", _DEVICE), ("host", Host()), ("host_numa", HostNuma(0))):
        try:
            found = driver.granularity(AllocationProperties(place))
            yield f"T1.granularity.{name}", [found.minimum, found.recommended]
        except DriverError as error:
            yield f"T1.granularity.{name}", error.name
    granule = driver.granularity(device).minimum
    total = driver.memory_info().total
    yield "T2.create.size_0", _outcome(lambda: driver.create(0, device))
    yield "T2.create.half_a_granule", _outcome(lambda: driver.create(granule // 2, device))
    too_much = 2 * total // granule * granule
    yield "T2.create.twice_the_memory", _outcome(lambda: driver.create(too_much, device))
    before = driver.memory_info().free
    handle = driver.create(4 * granule, device)
    yield "T2.free_falls_at_create_by", before - driver.memory_info().free
    driver.release(handle)
    yield "T2.free_after_release_differs_by", before - driver.memory_info().free
    yield "T3.reserve.size_0", _outcome(lambda: driver.reserve(0))
    yield "T3.reserve.alignment_3_MiB", _outcome(lambda: driver.reserve(granule, 3 * MiB))
    address = driver.reserve(granule, GiB)
    yield "T3.reserve.alignment_1_GiB", address % GiB == 0
    yield "T4.free_range.a_part", _outcome(lambda: driver.free_range(address, granule // 2))
    driver.free_range(address, granule)
    yield "T4.free_range.twice", _outcome(lambda: driver.free_range(address, granule))
    for size, name in ((64 * TiB, "64_TiB"), (128 * TiB, "128_TiB")):
        yield f"T3.reserve.{name}", _outcome(partial(_reserve_and_free, driver, size))


def _reserve_and_free(driver: Driver, size: int) -> None:
    driver.free_range(driver.reserve(size), size)


def _mappings(driver: Driver) -> Iterator[tuple[str, Any]]:
    device = AllocationProperties(_DEVICE)
    size = driver.granularity(device).minimum
    address, handle = driver.reserve(4 * size), driver.create(size, device)
    try:
        yield "T5.map.half", _outcome(lambda: driver.map(address, size // 2, handle))
        yield "T5.map.outside", _outcome(lambda: driver.map(address + 64 * GiB, size, handle))
        driver.map(address, size, handle)
        yield "T5.map.onto_a_mapping", _outcome(lambda: driver.map(address, size, handle))
        yield "T5.map.alias", _outcome(lambda: driver.map(address + size, size, handle))
        yield "T6.access.at_first", str(driver.get_access(address, _DEVICE))
        yield "T9.fill.no_access", _outcome(lambda: driver.fill(address, 1, 1, size, 0))
        yield "T6.access.nobody", _outcome(lambda: driver.set_access(address, size, []))
        yield "T6.access.a_part", _outcome(lambda: driver.set_access(address, size // 2, [(_DEVICE, _RW)]))
        yield (
            "T6.access.hole",
            _outcome(lambda: driver.set_access(address + 2 * size, size, [(_DEVICE, _RW)])),
        )
        yield (
            "T6.access.cpu_to_device_memory",
            _outcome(lambda: driver.set_access(address, size, [(Host(), _RW)])),
        )
        driver.set_access(address, size, [(_DEVICE, Access.READ)])
        yield "T9.fill.read_only", _outcome(lambda: driver.fill(address, 1, 1, size, 0))
        yield "T7.unmap.a_part", _outcome(lambda: driver.unmap(address, size // 2))
        yield "T4.free_range.mapped", _outcome(lambda: driver.free_range(address, 4 * size))
        yield "T8.release.mapped", _outcome(lambda: driver.release(handle))
        yield "T12.address_range.size", driver.address_range(address).size
        info = driver.pointer_info(address)
        yield (
            "T12.pointer_range.is_the_reservation",
            (info.range_start, info.range_size) == (address, 4 * size),
        )
        yield "T12.address_range.hole", _outcome(lambda: driver.address_range(address + 3 * size))
        yield "T7.unmap.mappings_and_holes", _outcome(lambda: driver.unmap(address, 4 * size))
        yield "T7.unmap.nothing", _outcome(lambda: driver.unmap(address, 4 * size))
        if isinstance(driver, SupportsPools):
            yield "T12.pool_figures", driver.pool_figures(0).reserved
    finally:
        driver.unmap(address, 4 * size)
        driver.free_range(address, 4 * size)


def _graphs(driver: Driver) -> Iterator[tuple[str, Any]]:
    if not isinstance(driver, SupportsGraphs) or not isinstance(driver, SupportsGraphMemory):
        yield "T15.graphs", "the driver has none"
        return
    stream = driver.create_stream()
    try:
        yield "T13.graph.over_memory_backed_anew", _survives(driver, stream)
        if driver.capabilities(0)["memory_pools"] and driver.memory_info().free > 4 * _GRAPH:
            yield from _graph_memory(driver, stream)
    finally:
        driver.destroy_stream(stream)


def _survives(driver: Any, stream: int) -> bool | str:
    """Tell whether an executable fills the memory that stands at its address now, and not what stood there before."""
    device = AllocationProperties(_DEVICE)
    size = driver.granularity(device).minimum
    address, graph = driver.reserve(size), driver.graph_create()
    executable = 0

    def backed(call: Callable[[], Any]) -> Any:
        handle = driver.create(size, device)
        driver.map(address, size, handle)
        driver.release(handle)
        driver.set_access(address, size, [(_DEVICE, _RW)])
        driver.fill(address, 0, 1, size, stream)
        driver.synchronize_stream(stream)
        try:
            return call()
        finally:
            driver.unmap(address, size)

    def instantiated() -> int:
        driver.graph_add_fill(graph, (), address, 0x5A, 1, size)
        made: int = driver.graph_instantiate(graph)
        driver.graph_launch(made, stream)
        driver.synchronize_stream(stream)
        return made

    def launched() -> bool:
        driver.graph_launch(executable, stream)
        found = (ctypes.c_ubyte * size)()
        driver.copy_to_host(ctypes.addressof(found), address, size, stream)
        driver.synchronize_stream(stream)
        return bool(bytes(found) == b"\x5a" * size)

    try:
        executable = backed(instantiated)
        found: bool = backed(launched)
        return found
    except DriverError as error:
        return error.name
    finally:
        if executable:
            driver.graph_exec_destroy(executable)
        driver.graph_destroy(graph)
        driver.free_range(address, size)


def _graph_memory(driver: Any, stream: int) -> Iterator[tuple[str, Any]]:
    """Yield what graphs hold, step by step, and how their addresses are given; nothing is held at the end."""

    def used() -> int:
        return int(driver.graph_figures(0).used)

    def made(frees: bool) -> tuple[int, int, int, int]:
        graph = driver.graph_create()
        node, address = driver.graph_add_allocate(graph, (), 0, _GRAPH)
        last = driver.graph_add_fill(graph, [node], address, 1, 1, _GRAPH)
        if frees:
            last = driver.graph_add_free(graph, [last], address)
        return graph, driver.graph_instantiate(graph), address, last

    def launched(executable: int) -> int:
        driver.graph_launch(executable, stream)
        return used()

    driver.graph_trim(0)
    before = used()
    freeing = [made(True) for _ in range(2)]
    yield "T15.bytes_of_a_graph", _GRAPH
    yield "T15.used.instantiated", used() - before
    yield "T15.used.one_stream", [launched(executable) - before for _, executable, _, _ in freeing]
    driver.synchronize_stream(stream)
    yield "T15.used.done", used() - before
    driver.graph_trim(0)
    yield "T15.used.trimmed", used() - before
    yield "T15.high_mark.stays", driver.graph_figures(0).used_high >= _GRAPH
    yield "T15.high_mark.set_to_1", _outcome(lambda: driver.graph_set_high(0, HighMark.USED, 1))
    yield "T15.addresses_of_graphs_differ", freeing[0][2] != freeing[1][2]
    yield from _graph_addresses(driver)
    yield "T16.clone", _outcome(lambda: driver.graph_destroy(driver.graph_clone(freeing[1][0])))
    yield "T16.instantiate_twice", _outcome(lambda: driver.graph_instantiate(freeing[1][0]))
    leaving = [made(False) for _ in range(2)]
    yield "T15.used.without_free_nodes", [launched(executable) - before for _, executable, _, _ in leaving]
    yield "T15.launch_while_unfreed", _outcome(lambda: driver.graph_launch(leaving[0][1], stream))
    driver.synchronize_stream(stream)
    driver.graph_trim(0)
    yield "T15.used.trimmed_while_held", used() - before
    for _, _, address, _ in leaving:
        driver.free(address)
    yield "T15.used.freed", used() - before
    driver.graph_trim(0)
    yield "T15.used.trimmed_at_last", used() - before
    for graph, executable, _, _ in (*freeing, *leaving):
        driver.graph_exec_destroy(executable)
        driver.graph_destroy(graph)
    driver.graph_trim(0)


def _graph_addresses(driver: Any) -> Iterator[tuple[str, Any]]:
    graph = driver.graph_create()
    node, address = driver.graph_add_allocate(graph, (), 0, _GRAPH)
    free = driver.graph_add_free(graph, [node], address)
    yield "T16.free_twice", _outcome(lambda: driver.graph_add_free(graph, [free], address))
    yield "T16.free_of_a_foreign_address", _outcome(lambda: driver.graph_add_free(graph, [free], 1 << 40))
    _, again = driver.graph_add_allocate(graph, [free], 0, _GRAPH)
    yield "T16.address_after_a_free_is_the_same", again == address
    driver.graph_destroy(graph)


def _sharing(driver: Driver) -> Iterator[tuple[str, Any]]:
    if not isinstance(driver, SupportsSharing):
        yield "T17.sharing", "the driver has none"
        return
    fd = HandleType.POSIX_FD
    for name, place, kinds in (
        ("unasked", _DEVICE, ()),
        ("device_posix_fd", _DEVICE, (fd,)),
        ("device_fabric", _DEVICE, (HandleType.FABRIC,)),
        ("host_posix_fd", Host(), (fd,)),
        ("host_numa_posix_fd", HostNuma(0), (fd,)),
    ):
        wanted = AllocationProperties(place, frozenset(kinds))

        def export(wanted: AllocationProperties = wanted, kind: HandleType = (*kinds, fd)[0]) -> None:
            handle = driver.create(driver.granularity(AllocationProperties(wanted.location)).minimum, wanted)
            try:
                exported = driver.export_handle(handle, kind)
                if isinstance(exported, int):
                    os.close(exported)
            finally:
                driver.release(handle)

        yield f"T17.export.{name}", _outcome(export)
    read, write = os.pipe()
    yield "T17.import.a_pipe", _outcome(lambda: driver.import_handle(read, fd))
    os.close(read)
    os.close(write)


def _costs(driver: Driver) -> Iterator[tuple[str, Any]]:
    free = driver.memory_info().free
    for size, name in ((2 * MiB, "2_MiB"), (64 * MiB, "64_MiB"), (GiB, "1_GiB")):
        if size > free // 4:
            continue
        times: dict[str, list[float]] = {}
        for _ in range(_REPEATS):
            handle = _timed(times, "create", driver.create, size, AllocationProperties(_DEVICE))
            address = _timed(times, "reserve", driver.reserve, size)
            _timed(times, "map", driver.map, address, size, handle)
            _timed(times, "set_access", driver.set_access, address, size, [(_DEVICE, _RW)])
            _timed(times, "unmap", driver.unmap, address, size)
            _timed(times, "release", driver.release, handle)
            driver.free_range(address, size)
        for call, spent in times.items():
            yield f"cost_us.{call}.{name}", round(statistics.median(spent), 1)


def _timed(times: dict[str, list[float]], name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    start = time.perf_counter_ns()
    result = call(*arguments)
    times.setdefault(name, []).append((time.perf_counter_ns() - start) / 1000)
    return result
