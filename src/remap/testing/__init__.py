"""For tests: a simulated machine for a block, and, for those who write a driver, the suite that both drivers pass.

`simulated` and `remap.testing.plugin` keep a test that fails from failing others. `DriverConformance` is the suite, as
a class to subclass; its module says how it is used. It needs pytest and Hypothesis, so it is loaded on first use, as
are the parts that it is made of; nothing else in remap imports this room.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from remap.testing.simulation import simulated

if TYPE_CHECKING:
    from remap.testing.bench import Bench, OpenDriver, refused, wait_until
    from remap.testing.children import run_in_child
    from remap.testing.conformance import DriverConformance
    from remap.testing.kernels import StoreKernel, open_kernel
    from remap.testing.machine import DriverMachine

__all__ = [
    "Bench",
    "DriverConformance",
    "DriverMachine",
    "OpenDriver",
    "StoreKernel",
    "open_kernel",
    "refused",
    "run_in_child",
    "simulated",
    "wait_until",
]

_ROOMS = {
    "bench": ("Bench", "OpenDriver", "refused", "wait_until"),
    "children": ("run_in_child",),
    "conformance": ("DriverConformance",),
    "kernels": ("StoreKernel", "open_kernel"),
    "machine": ("DriverMachine",),
}


def __getattr__(name: str) -> Any:
    """Load the module that `name` lives in, and keep the name here."""
    for module, names in _ROOMS.items():
        if name in names:
            value = getattr(importlib.import_module(f"remap.testing.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'remap.testing' has no attribute {name!r}")
