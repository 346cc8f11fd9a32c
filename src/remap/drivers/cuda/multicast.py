"""Multicast objects. No call here reaches the driver unless the device says that it has them and nobody forbids it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remap.drivers.cuda.bindings import cuda, failure
from remap.drivers.cuda.structures import handle_bits
from remap.drivers.multicast_power import MulticastProperties, switched_off
from remap.errors import CudaResult, NotSupportedError, not_supported
from remap.sizes import format_size
from remap.types import Capability, Granularity


class MulticastCalls:
    """`SupportsMulticast` of the CUDA driver."""

    def device_count(self) -> int:
        raise NotImplementedError

    def capabilities(self, device: int) -> Mapping[str, Capability]:
        raise NotImplementedError

    def multicast_granularity(self, properties: MulticastProperties) -> Granularity:
        call = "cuMulticastGetGranularity"
        self._check_any(call)
        flags = cuda.CUmulticastGranularity_flags
        found: list[int] = []
        for flag in (flags.CU_MULTICAST_GRANULARITY_MINIMUM, flags.CU_MULTICAST_GRANULARITY_RECOMMENDED):
            err, value = cuda.cuMulticastGetGranularity(_prop(properties), flag)
            if err:
                raise failure(call, err, asked=f"granularity of {_told(properties)}")
            found.append(int(value))
        return Granularity(*found)

    def create_multicast(self, properties: MulticastProperties) -> int:
        call = "cuMulticastCreate"
        self._check_any(call)
        err, handle = cuda.cuMulticastCreate(_prop(properties))
        if err:
            rule = "the size must be a multiple of the multicast granularity, for two devices or more"
            rule = rule if err == CudaResult.INVALID_VALUE else ""
            raise failure(call, err, asked=f"create {_told(properties)}", rule=rule)
        return int(handle)

    def add_multicast_device(self, handle: int, device: int) -> None:
        call = "cuMulticastAddDevice"
        self._check(call, device)
        (err,) = cuda.cuMulticastAddDevice(handle, device)
        if err:
            asked = f"add device {device} to a multicast object"
            rule = "all devices of a team must be linked by the same NVLink fabric"
            raise failure(call, err, asked=asked, rule=rule if err == CudaResult.INVALID_DEVICE else "")

    def bind_multicast(self, handle: int, offset: int, memory: int, memory_offset: int, size: int) -> None:
        call = "cuMulticastBindMem"
        self._check_any(call)
        (err,) = cuda.cuMulticastBindMem(handle, offset, memory, memory_offset, size, 0)
        if err:
            asked = f"bind {format_size(size)} at offset {offset} of a multicast object"
            raise failure(call, err, asked=asked, rule=_WHY_NOT_BOUND.get(int(err), ""))

    def unbind_multicast(self, handle: int, device: int, offset: int, size: int) -> None:
        call = "cuMulticastUnbind"
        self._check(call, device)
        (err,) = cuda.cuMulticastUnbind(handle, device, offset, size)
        if err:
            asked = f"unbind {format_size(size)} at offset {offset} of a multicast object"
            raise failure(call, err, asked=asked)

    def _check_any(self, call: str) -> None:
        """Raise unless some device of this process has multicast."""
        reasons: list[str] = []
        for device in range(self.device_count()):
            reason = self._missing(device)
            if not reason:
                return
            reasons.append(reason)
        raise _refusal(call, call, reasons[0] if reasons else "there is no device")

    def _check(self, call: str, device: int) -> None:
        reason = self._missing(device)
        if reason:
            raise _refusal(call, f"multicast on device {device}", reason)

    def _missing(self, device: int) -> str:
        # Asked at each call and not only when the capabilities were probed: the variable may have been set since.
        return switched_off() or self.capabilities(device)["multicast"].reason


def _refusal(call: str, asked: str, reason: str) -> NotSupportedError:
    return not_supported(call, asked, reason, capability="multicast")


def _prop(properties: MulticastProperties) -> Any:
    prop = cuda.CUmulticastObjectProp()
    prop.numDevices = properties.devices
    prop.size = properties.size
    prop.handleTypes = handle_bits(properties.handle_types)
    prop.flags = 0
    return prop


def _told(properties: MulticastProperties) -> str:
    return f"a multicast object of {format_size(properties.size)} for {properties.devices} devices"


_WHY_NOT_BOUND = {
    int(CudaResult.INVALID_VALUE): (
        "offsets and size must be multiples of the multicast granularity and lie within both, and the memory must be "
        "on a device of the team, and shareable where the object is"
    ),
    # Its fabric manager, or its IMEX daemon.
    int(CudaResult.ILLEGAL_STATE): "the system's set-up for multicast is in an illegal state",
}
