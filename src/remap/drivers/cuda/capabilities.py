"""Find out what a device can do, feature by feature, each with the reason where it cannot.

An attribute that says yes is only a promise: memory features are believed after a small allocation has worked.
Nothing here is asked twice, since a feature such as a fabric channel comes and goes only with the whole system, and
a failed probe can cost seconds.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from remap.drivers.cuda.bindings import kernel_module_text, kernel_module_version
from remap.drivers.cuda.devices import device_attribute
from remap.drivers.cuda.memory import MemoryCalls
from remap.drivers.multicast_power import switched_off
from remap.errors import DriverError, NotPermittedError
from remap.types import (
    CAPABILITIES,
    Access,
    AllocationProperties,
    Capability,
    HandleType,
    Location,
    LocationKind,
)

IMEX_CHANNELS = Path("/dev/nvidia-caps-imex-channels")


def probe(memory: MemoryCalls, device: int) -> dict[str, Capability]:
    """Return every capability of `types.CAPABILITIES` for `device`."""
    probes = _Probes(memory, device)
    found: dict[str, Capability] = {}
    for name in CAPABILITIES:
        test: Callable[[], str] = getattr(probes, name)
        reason = test()
        found[name] = Capability(name, not reason, reason)
    return found


class _Probes:
    """One method for each capability; it returns why the feature is missing, empty where it works."""

    def __init__(self, memory: MemoryCalls, device: int) -> None:
        self._memory = memory
        self._device = device
        self._location = Location(LocationKind.DEVICE, device)

    def vmm(self) -> str:
        return self._reads("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")

    def posix_fd(self) -> str:
        return self.vmm() or self._reads("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")

    def win32(self) -> str:
        if platform.system() != "Windows":
            return f"Win32 handles exist on Windows only, and this is {platform.system()}"
        return self._reads("HANDLE_TYPE_WIN32_HANDLE_SUPPORTED")

    def fabric(self) -> str:
        missing = self.vmm() or self._reads("HANDLE_TYPE_FABRIC_SUPPORTED")
        if missing:
            return missing
        # The attribute says yes on machines whose create then fails, so only the whole way tells.
        properties = AllocationProperties(self._location, frozenset({HandleType.FABRIC}))
        memory = self._memory
        try:
            with ExitStack() as undo:
                handle = memory.create(memory.granularity(properties).minimum, properties)
                undo.callback(memory.release, handle)
                exported = memory.export_handle(handle, HandleType.FABRIC)
                undo.callback(memory.release, memory.import_handle(exported, HandleType.FABRIC))
        except NotPermittedError:
            return _why_no_channel()
        except DriverError as error:
            return f"creating, exporting and importing a fabric handle failed: {error}"
        return ""

    def multicast(self) -> str:
        return switched_off() or self._reads("MULTICAST_SUPPORTED")

    def compression(self) -> str:
        missing = self.vmm() or self._reads("GENERIC_COMPRESSION_SUPPORTED")
        if missing:
            return missing
        properties = AllocationProperties(self._location, compressible=True)
        given: list[AllocationProperties] = []
        failed = self._creates(properties, lambda handle: given.append(self._memory.properties_of(handle)))
        if not failed and not given[0].compressible:
            return "the driver takes the request but returns memory that is not compressible"
        return failed

    def rdma(self) -> str:
        missing = self.vmm() or self._reads("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
        return missing or self._creates(AllocationProperties(self._location, rdma=True))

    def host_vmm(self) -> str:
        return self.vmm() or self._creates(AllocationProperties(Location(LocationKind.HOST)))

    def host_numa_vmm(self) -> str:
        missing = self.vmm() or self._reads("HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")
        node = device_attribute(self._device, "HOST_NUMA_ID")
        if not missing and (node is None or node < 0):
            return "the system has no NUMA nodes"
        return missing or self._creates(AllocationProperties(Location(LocationKind.HOST_NUMA, node or 0)))

    def memory_pools(self) -> str:
        return self._reads("MEMORY_POOLS_SUPPORTED")

    def managed_memory(self) -> str:
        return self._reads("MANAGED_MEMORY")

    def hmm(self) -> str:
        if device_attribute(self._device, "PAGEABLE_MEMORY_ACCESS"):
            if device_attribute(self._device, "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES"):
                return "the device walks the host's page tables instead (addressing mode ATS)"
            return ""
        major = device_attribute(self._device, "COMPUTE_CAPABILITY_MAJOR") or 0
        minor = device_attribute(self._device, "COMPUTE_CAPABILITY_MINOR") or 0
        module = kernel_module_text()
        lacks: list[str] = []
        if (major, minor) < (7, 5):
            lacks.append(f"compute capability 7.5 or newer (this is {major}.{minor})")
        if not kernel_has_hmm(platform.release()):
            lacks.append(f"Linux 6.1.24, 6.2.11, 6.3 or newer (this is {platform.release()})")
        if _numbers(kernel_module_version())[:1] < (535,):
            lacks.append(f"driver 535 or newer (this is {kernel_module_version() or 'unknown'})")
        if "Open Kernel Module" not in module:
            lacks.append("the driver's open kernel modules")
        if lacks:
            return "it needs " + ", and ".join(lacks)
        return "what it needs is there, but the driver has it turned off (addressing mode None)"

    def ats(self) -> str:
        missing = self._reads("PAGEABLE_MEMORY_ACCESS")
        return missing or self._reads("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES")

    def coherent(self) -> str:
        """Whether the CPU may look into device memory: grant it access to a granule and see."""
        missing = self.vmm()
        if missing:
            return missing
        memory, properties = self._memory, AllocationProperties(self._location)
        host = Location(LocationKind.HOST)
        try:
            with ExitStack() as undo:
                size = memory.granularity(properties).minimum
                handle = memory.create(size, properties)
                undo.callback(memory.release, handle)
                address = memory.reserve(size)
                undo.callback(memory.free_range, address, size)
                memory.map(address, size, handle)
                undo.callback(memory.unmap, address, size)
                memory.set_access(address, size, [(host, Access.READ_WRITE)])
        except DriverError as error:
            return f"the CPU cannot be granted access to device memory [{error.call}: {error.name}]"
        return ""

    def _reads(self, attribute: str) -> str:
        """Ask an attribute that says yes or no."""
        value = device_attribute(self._device, attribute)
        if value is None:
            return f"the driver or cuda-bindings is too old to know CU_DEVICE_ATTRIBUTE_{attribute}"
        return "" if value else f"the device reports CU_DEVICE_ATTRIBUTE_{attribute} = 0"

    def _creates(
        self, properties: AllocationProperties, look: Callable[[int], None] = lambda handle: None
    ) -> str:
        """Try one granule of such memory, and let `look` see it."""
        try:
            handle = self._memory.create(self._memory.granularity(properties).minimum, properties)
            try:
                look(handle)
            finally:
                self._memory.release(handle)
        except DriverError as error:
            return f"creating such memory failed: {error}"
        return ""


def _why_no_channel() -> str:
    """Name the missing IMEX channel."""
    channels = sorted(IMEX_CHANNELS.glob("channel*")) if IMEX_CHANNELS.is_dir() else []
    open_to_us = [channel for channel in channels if os.access(channel, os.R_OK | os.W_OK)]
    if not channels:
        cause = f"there is no IMEX channel ({IMEX_CHANNELS}/channelN)"
    elif not open_to_us:
        cause = f"this process may not open an IMEX channel ({channels[0]})"
    else:
        cause = f"the driver refused the IMEX channel ({open_to_us[0]})"
    return f"{cause}; an administrator must grant one, and exporter and importer need the same channel"


def kernel_has_hmm(release: str) -> bool:
    """Tell whether a Linux release (`uname -r`) has the fixes that heterogeneous memory management needs."""
    version = (*_numbers(release), 0, 0, 0)[:3]
    return version >= (6, 3) or (6, 2, 11) <= version < (6, 3) or (6, 1, 24) <= version < (6, 2)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading dotted numbers of a version."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
