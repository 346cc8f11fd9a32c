"""The optional power of multicast: objects through which one operation reaches the memory of many devices.

A multicast object joins equal pieces of memory, one on each device of a team. Mapped like an allocation, it gives
addresses where `multimem` instructions write to every replica, or reduce over all of them, in the network that links
the devices. Plain loads, stores and copies mean nothing there.

The order is fixed: create; give every process a handle (`export_handle`, `import_handle`); add every device; bind the
memory of each; map, and grant access. CUDA blocks for ever where a device that should have been added is missing when
memory is bound or the object is mapped, so callers make sure together that they all have come so far.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from remap.types import Granularity, HandleType


@dataclass(frozen=True, slots=True)
class MulticastProperties:
    """What a multicast object is: how many devices its team has, bytes for each, and what it can be exported as.

    (`CUmulticastObjectProp`)
    """

    devices: int
    size: int
    handle_types: frozenset[HandleType] = frozenset()


@runtime_checkable
class SupportsMulticast(Protocol):
    """A driver that has multicast objects. Which devices take part, `capabilities(device)["multicast"]` tells.

    The handle of an object is one of an allocation to `map`, `release`, `export_handle` and `import_handle`, too.
    Every call raises NOT_SUPPORTED, before it reaches any device, where the capability is missing.
    """

    def multicast_granularity(self, properties: MulticastProperties) -> Granularity:
        """Return the granularities of sizes and offsets, which are the object's own. (cuMulticastGetGranularity)"""
        ...

    def create_multicast(self, properties: MulticastProperties) -> int:
        """Create a multicast object and return its handle. (cuMulticastCreate)"""
        ...

    def add_multicast_device(self, handle: int, device: int) -> None:
        """Add a device to the team, for the life of the object. (cuMulticastAddDevice)"""
        ...

    def bind_multicast(self, handle: int, offset: int, memory: int, memory_offset: int, size: int) -> None:
        """Make memory of a device of the team its replica of the range from `offset` on. (cuMulticastBindMem)

        The memory stays alive as long as it is bound. Memory for an object that can be exported, or was imported, must
        be shareable itself.
        """
        ...

    def unbind_multicast(self, handle: int, device: int, offset: int, size: int) -> None:
        """Undo exactly one binding of a device of this process. (cuMulticastUnbind)"""
        ...


@runtime_checkable
class MulticastLaunch(Protocol):
    """A launch on the host driver whose kernel can use multicast addresses."""

    def multimem(
        self, address: int, size: int, *, writes: bool
    ) -> AbstractContextManager[tuple[memoryview, ...]]:
        """Return the bytes of every replica behind a multicast address, for one `multimem` operation.

        Within the block no other operation on the object runs, in any process. An address that is not mapped, or is no
        multicast one, or behind which a replica is missing, faults the kernel (T10).
        """
        ...


_SWITCHES = (
    ("REMAP_DISABLE_MULTICAST", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
)


def switched_off() -> str:
    """Return why the environment forbids multicast, nothing where it does not.

    Joining a multicast team can hang machines whose fabric is not set up, so every library has its own way to say no;
    whoever said it to one of them meant it for all.
    """
    for name, value in _SWITCHES:
        if os.environ.get(name) == value:
            return f"the environment turns it off ({name}={value})"
    return ""
