"""The examination of one driver, in a process of its own: a crash ends it, and not the doctor who listens.

Run as `python -m remap.cli.checkup NAME [bandwidth] [facts]`; it prints one JSON object a line, as soon as it knows it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import remap
from remap import MiB, drivers
from remap.cli.partner import Partner
from remap.locations import Device
from remap.sizes import round_up

_FIRST, _SECOND = 0x5A, 0xA5


def main(arguments: list[str]) -> None:
    """Examine the driver that is named first."""
    name, *more = arguments
    try:
        driver = remap.use(name)
    except remap.DriverNotFoundError as error:
        reason = error.attempts[0][1]
        _say("driver", name=name, available=False, reason=reason, version="")
        return
    _say("driver", name=name, available=True, reason="", version=driver.version())
    for index in range(driver.device_count()):
        _say("device", **_device(remap.device(index)))
    _self_test()
    if "bandwidth" in more:
        _bandwidth()
    if "facts" in more:
        from remap.cli.facts import measure

        for fact, value in measure(driver):
            _say("fact", name=fact, value=value)
    remap.collect()
    drivers.close()


def _device(one: Device) -> dict[str, Any]:
    properties = one.properties
    return {
        "index": one.index,
        "name": one.name,
        "compute_capability": ".".join(map(str, properties.compute_capability)),
        "memory": properties.memory,
        "numa_node": properties.numa_node,
        "granularity": one.granularity().minimum if one.capabilities["vmm"] else 0,
        "peers": [peer.index for peer in one.peers()],
        "capabilities": {
            name: {"supported": found.supported, "reason": found.reason}
            for name, found in one.capabilities.items()
        },
        "memory_types": [_memory_type(found) for found in one.memory_types()],
    }


def _memory_type(found: remap.MemoryType) -> dict[str, Any]:
    asked = found.asked
    return {
        "at": "device" if asked.location.is_device else str(asked.location),
        "shareable": next(iter(asked.handle_types), None),
        "compressible": asked.compressible,
        "rdma": asked.rdma,
        "supported": found.supported,
        "reason": found.reason,
    }


# -- the self-test --


def _self_test() -> None:
    for index in range(remap.driver().device_count()):
        _test(remap.device(index))


def _test(one: Device) -> None:
    if not one.capabilities["vmm"]:
        _say("step", device=one.index, name="create", passed=False, detail=one.capabilities["vmm"].reason)
        return
    shareable = "posix_fd" if one.capabilities["posix_fd"] else None
    size = round_up(2 * MiB, one.granularity(shareable=shareable).minimum)
    allocation = _step(one, "create", lambda: remap.create(size, at=one, shareable=shareable))
    reservation = _step(one, "reserve", lambda: remap.reserve(size)) if allocation else None
    if allocation is None or reservation is None:
        return
    mapping = _step(one, "map", lambda: reservation.map(allocation, access={one: "rw"}))
    if mapping is None:
        return
    _step(one, "write and read", lambda: _write_and_read(mapping))
    if shareable:
        _step(one, "share with a child process", lambda: _share(mapping))
    _step(one, "unmap", mapping.close)
    _step(one, "give back", lambda: (reservation.close(), allocation.close()))


def _step(one: Device, name: str, call: Callable[[], Any]) -> Any:
    try:
        made = call()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is what the patient has)
        detail = f"{type(error).__name__}: {error}"
        _say("step", device=one.index, name=name, passed=False, detail=detail)
        return None
    _say("step", device=one.index, name=name, passed=True, detail="")
    return made


def _write_and_read(mapping: remap.Mapping) -> None:
    mapping.fill(_FIRST)
    _expect(mapping, _FIRST)


def _expect(memory: Any, byte: int) -> None:
    found = memory.to_host()
    if not (found == byte).all():
        raise AssertionError(f"{int((found != byte).sum())} bytes are not what was written")


def _share(mapping: remap.Mapping) -> None:
    with Partner(_read_and_write) as child:
        child.tell(remap.export(mapping))
        child.hear()
        _expect(mapping, _SECOND)


def _read_and_write(link: Connection) -> None:
    with remap.open(link.recv(), access="rw") as memory:
        _expect(memory, _FIRST)
        memory.fill(_SECOND)
    link.send("done")


# -- bandwidth --


def _bandwidth() -> None:
    for one in remap.devices():
        size = min(256 * MiB, one.memory().free // 4 // (2 * MiB) * (2 * MiB))
        if size < 2 * MiB:
            _say("bandwidth", device=one.index, name="too little free memory", gigabytes_per_second=0.0)
            continue
        with (
            remap.pinned(size, "uint8") as host,
            remap.allocate(size, resident=one) as buffer,
            remap.Stream(one) as stream,
        ):
            _links(one, host.numpy(), buffer, stream)


def _links(one: Device, array: Any, buffer: remap.Buffer, stream: remap.Stream) -> None:
    size = buffer.size
    _rate(one, "host to device", size, stream, partial(buffer.copy_from_host, array, stream=stream))
    _rate(one, "device to host", size, stream, partial(buffer.copy_to_host, array, stream=stream))
    _rate(one, "fill", size, stream, partial(buffer.fill, 1, stream=stream))
    for peer in one.peers():
        with remap.allocate(size, resident=peer, accessing=[one, peer]) as other:
            copy = partial(buffer.copy_from, other, stream=stream)
            _rate(one, f"from device {peer.index}", size, stream, copy)


def _rate(one: Device, name: str, size: int, stream: remap.Stream, call: Callable[[], Any]) -> None:
    times: list[float] = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        stream.synchronize()
        times.append(time.perf_counter() - start)
    _say(
        "bandwidth",
        device=one.index,
        name=name,
        gigabytes_per_second=size / statistics.median(times[1:]) / 1e9,
    )


def _say(kind: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"kind": kind, **values}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
