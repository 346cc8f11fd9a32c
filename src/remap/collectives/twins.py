"""The kernels of `multimem.cu` in Python, for the host driver: the same steps, in the same order."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import numpy as np

from remap.collectives.layout import ARRIVALS, PARTIAL_STEP, PARTIALS, STATUS
from remap.kernels.twin import Twin

if TYPE_CHECKING:
    from remap.drivers.multicast_power import MulticastLaunch
    from remap.drivers.protocol import HostLaunch
    from remap.kernels import Pointer


def meet(launch: HostLaunch, own: Pointer, everyone: Pointer, expected: int, slot: int, limit: int) -> None:
    """Wait for all ranks."""
    _all_have_come(launch, own, everyone, expected, slot, limit)


def add_squares(_: HostLaunch, x: Pointer, n: int, own: Pointer, slot: int) -> None:
    """Add the squares of x to this rank's partial sum."""
    values = x.read(np.float32, n)
    own.write(np.float32, 1, PARTIALS + slot * PARTIAL_STEP)[0] += np.float32(np.dot(values, values))


def reduce_norm(
    launch: HostLaunch, out: Pointer, own: Pointer, everyone: Pointer, expected: int, slot: int, limit: int
) -> None:
    """Reduce the partial sums of all ranks to the norm."""
    if not _all_have_come(launch, own, everyone, expected, slot, limit):
        return
    at = everyone.address + PARTIALS + slot * PARTIAL_STEP
    with cast("MulticastLaunch", launch).multimem(at, 4, writes=False) as replicas:
        total = np.float32(sum(float(np.frombuffer(one, np.float32)[0]) for one in replicas))
    out.write(np.float32, 1)[0] = np.sqrt(total)


def store_all(launch: HostLaunch, x: Pointer, n: int, everyone: Pointer, offset: int) -> None:
    """Store x into the memory of every rank at once."""
    values = x.read(np.float32, n)
    if n:
        with cast("MulticastLaunch", launch).multimem(
            everyone.address + offset, values.nbytes, writes=True
        ) as replicas:
            for one in replicas:
                np.frombuffer(one, np.float32)[:] = values


def _all_have_come(
    launch: HostLaunch, own: Pointer, everyone: Pointer, expected: int, slot: int, limit: int
) -> bool:
    with cast("MulticastLaunch", launch).multimem(everyone.address + ARRIVALS, 4, writes=True) as replicas:
        for one in replicas:
            counter = np.frombuffer(one, np.uint32)
            counter += np.uint32(1)  # an array's sum wraps around in silence, as the instruction's does
    end, pause = time.monotonic() + limit / 1e9, 0.0
    while (int(own.read(np.uint32, 1, ARRIVALS)[0]) - expected) % (1 << 32) >= 1 << 31:
        if time.monotonic() > end:
            own.write(np.uint32, 1, STATUS)[0] = 1
            return False
        time.sleep(pause)  # ranks may outnumber cores: whoever waits must let the one run that is waited for
        pause = min(pause + 5e-6, 5e-4)
    own.write(np.float32, 1, PARTIALS + (slot ^ 1) * PARTIAL_STEP)[0] = 0
    return True


TWINS: dict[str, Twin] = {
    "meet": meet,
    "add_squares": add_squares,
    "reduce_norm": reduce_norm,
    "store_all": store_all,
}
