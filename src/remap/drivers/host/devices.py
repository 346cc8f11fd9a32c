"""What the simulated devices say of themselves: properties, capabilities with reasons, peers."""

from __future__ import annotations

from collections.abc import Mapping

from remap.drivers.host.machine import Machine
from remap.drivers.multicast_power import switched_off
from remap.errors import CudaResult, InvalidValueError, driver_error, not_supported
from remap.types import CAPABILITIES, Capability, DeviceProperties, Location, LocationKind

# Why the host driver lacks a feature; a feature that is not listed works.
_REASONS = {
    "win32": "Win32 handles exist on Windows only",
    "fabric": "the host driver shares memory within one machine and has no fabric to other nodes",
    "compression": "the host driver keeps all memory uncompressed; the request is accepted, and read back as refused",
    "rdma": "no network adapter can reach a simulated device",
    "hmm": "simulated devices reach only memory that was made for them, as most GPUs do",
    "ats": "simulated devices have no page tables",
    "coherent": "simulated devices keep their memory from the CPU, as most GPUs do",
}
_OVERRIDDEN = "switched off when the host driver was opened"


class Devices:
    """Answers questions about devices; everything here is fixed once the driver is open."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        options = machine.options
        self._properties = [
            DeviceProperties(
                name="remap host device",
                compute_capability=(9, 0),  # the newest architecture whose rules the host driver follows
                multiprocessors=4,
                cores_per_multiprocessor=128,
                clock_khz=clock,
                memory=memory,
                l2_cache=4 << 20,
                numa_node=0,
                integrated=options.integrated,
            )
            for memory, clock in zip(options.memory, options.clock_khz, strict=True)
        ]
        self.capabilities_of_all = {name: self._capability(name) for name in CAPABILITIES}

    def _capability(self, name: str) -> Capability:
        options = self._machine.options
        supported = name not in _REASONS
        if name == "coherent":
            supported = options.coherent
        elif name == "compression":
            supported = options.compression
        elif name == "hmm":
            supported = options.capabilities.get(name, False)  # it alone can be switched on
        elif name == "multicast" and (off := switched_off()):
            return Capability(name, False, off)
        chosen = options.capabilities.get(name, supported)
        if chosen and not supported:
            rule = f"it can only be switched off: {_REASONS[name]}"
            raise InvalidValueError(f"capabilities={{{name!r}: True}}", rule=rule)
        if chosen:
            return Capability(name, True)
        return Capability(name, False, _OVERRIDDEN if supported else _REASONS[name])

    def check(self, call: str, device: int) -> None:
        """Raise INVALID_DEVICE for a number that does not exist."""
        count = self._machine.options.devices
        if not 0 <= device < count:
            rule = f"the devices are numbered 0 to {count - 1}"
            raise driver_error(call, CudaResult.INVALID_DEVICE, asked=f"device {device}", rule=rule)

    def properties(self, device: int) -> DeviceProperties:
        """Return what a device is."""
        self.check("cuDeviceGetAttribute", device)
        return self._properties[device]

    def capabilities(self, device: int) -> Mapping[str, Capability]:
        """Return every capability of a device."""
        self.check("cuDeviceGetAttribute", device)
        return dict(self.capabilities_of_all)

    def can_access_peer(self, device: int, other: int) -> bool:
        """Tell whether kernels on `device` can reach memory on `other`."""
        self.check("cuDeviceCanAccessPeer", device)
        self.check("cuDeviceCanAccessPeer", other)
        return self._machine.options.peers[device][other]

    def reason(self, capability: str) -> str:
        """Return why a capability is missing."""
        return self.capabilities_of_all[capability].reason

    def require(self, call: str, capability: str) -> None:
        """Raise NOT_SUPPORTED, naming the capability, where it is missing."""
        found = self.capabilities_of_all[capability]
        if capability == "multicast" and (off := switched_off()):
            found = Capability(capability, False, off)  # it may have been switched off since
        if not found:
            raise not_supported(call, call, found.reason, capability=capability)

    def reaches(self, device: int, location: Location) -> bool:
        """Tell whether `device` can be granted access to memory at `location`."""
        if location.kind is not LocationKind.DEVICE or location.index == device:
            return True
        return self._machine.options.peers[device][location.index]
