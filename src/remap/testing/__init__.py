"""For those who write a driver: the conformance suite that both drivers of remap pass, as a class to subclass.

`DriverConformance` is the suite; its module says how it is used. The rest is what it is made of. Needs pytest and
Hypothesis; nothing else in remap imports this room.
"""

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
    "wait_until",
]
