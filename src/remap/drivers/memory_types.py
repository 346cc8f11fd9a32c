"""Find out which combinations of place, shareable handle, compression and RDMA a driver gives memory for (B7)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import product

from remap.drivers.protocol import Driver, SupportsSharing
from remap.errors import RemapError
from remap.types import AllocationProperties, Capability, HandleType, Location, MemoryType

_NOT_GIVEN = "the driver takes the request, but returns memory that is not {}"


def probe(
    driver: Driver, places: tuple[Location, ...], capabilities: Mapping[str, Capability]
) -> Iterator[MemoryType]:
    """Yield every combination for each of the places, tried with a granule of memory that is given back.

    Handles that the device is known to lack are not tried: a fabric that is not there can cost seconds each time.
    """
    kinds: tuple[HandleType | None, ...] = (None, *HandleType)
    for place, kind, compressible, rdma in product(places, kinds, (False, True), (False, True)):
        asked = AllocationProperties(
            place, frozenset() if kind is None else frozenset({kind}), compressible, rdma
        )
        lacks = capabilities["vmm" if kind is None else kind.value]
        reason = lacks.reason if not lacks else _try(driver, asked, kind)
        yield MemoryType(asked, not reason, reason)


def _try(driver: Driver, asked: AllocationProperties, kind: HandleType | None) -> str:
    """Create such memory, read back what it became, and export it; return why that failed, or nothing."""
    try:
        with ExitStack() as undo:
            handle = driver.create(driver.granularity(asked).minimum, asked)
            undo.callback(driver.release, handle)
            given = driver.properties_of(handle)
            if asked.compressible and not given.compressible:
                return _NOT_GIVEN.format("compressible")
            if asked.rdma and not given.rdma:
                return _NOT_GIVEN.format("for RDMA")
            if kind is not None and isinstance(driver, SupportsSharing):
                shareable = driver.export_handle(handle, kind)
                if isinstance(shareable, int):
                    undo.callback(os.close, shareable)
    except RemapError as error:
        return str(error)
    return ""
