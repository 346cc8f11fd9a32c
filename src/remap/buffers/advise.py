"""`advise`: which kind of memory suits a use, and why, on the machine at hand."""

from __future__ import annotations

from dataclasses import dataclass

from remap.locations import Device, DeviceLike, device
from remap.sizes import KiB, Size, format_size, parse_size

SMALL = 64 * KiB
"""Up to this size an array counts as small: its copy costs less than what the call around it does."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation: the kind of `memory`, the `reason`, what to `write`, and what it would have been `instead_of`.

    `instead_of` is empty where this device has what is best for the use; else it names that and what is missing.
    """

    memory: str
    reason: str
    write: str
    instead_of: str = ""

    def __str__(self) -> str:
        """Return it as one paragraph."""
        but = f" (Best would be {self.instead_of}.)" if self.instead_of else ""
        return f"{self.memory}: {self.reason}.{but} Write: {self.write}"


def advise(
    size: Size,
    *,
    read_only: bool = False,
    alternating: bool = False,
    prototype: bool = False,
    short_lived: bool = False,
    at: DeviceLike | None = None,
) -> Advice:
    """Return which memory to use for `size` bytes that a device works on.

    `read_only` is for what kernels only read, such as configuration; `alternating` for what CPU and GPU work on in
    turns; `prototype` for programs where being written quickly counts most; `short_lived` for memory that is made and
    dropped again and again. Of several, the first in the order prototype, alternating, read_only, short_lived counts.
    Asks the device for its capabilities and changes nothing.
    """
    number = parse_size(size)
    place = device(at)
    if prototype:
        return _through_host_pointers(
            place,
            "kernels take host arrays as they are, so that nothing has to be copied by hand",
            _PROTOTYPE_WITHOUT,
        )
    if alternating:
        return Advice(
            "double-buffered explicit copies",
            "while the device works on one half, the other is copied, so that neither side waits for page faults",
            "two DeviceBuffers and two remap.pinned arrays on two streams (examples/double_buffer.py)",
        )
    if read_only and number <= SMALL:
        return _through_host_pointers(
            place,
            f"{format_size(number)} that are only read cross the link once and stay in the caches",
            _CONFIGURATION_WITHOUT,
        )
    if short_lived:
        return Advice(
            "DeviceBox",
            "pool memory is freed in stream order, and its close never waits",
            "remap.DeviceBox.from_host(array, stream=s)",
        )
    return Advice(
        "DeviceBuffer with explicit copies",
        f"one copy of {format_size(number)} at the link's speed beats page faults, and kernels then run at the speed "
        "of device memory",
        "x = remap.DeviceBuffer.from_host(array, stream=s); close it when its streams have passed",
    )


_PROTOTYPE_WITHOUT = Advice(
    "managed memory",
    "one address for CPU and GPU, with pages that move to whoever touches them",
    "x = remap.managed(shape, dtype); x.numpy()[...] = values",
)
_CONFIGURATION_WITHOUT = Advice(
    "pinned memory",
    "kernels read pinned host memory in place",
    "c = remap.pinned(shape, dtype); c.numpy()[...] = values; pass c",
)
_EXPLICIT = Advice(
    "DeviceBuffer with explicit copies",
    "it works everywhere",
    "x = remap.DeviceBuffer.from_host(array)",
)


def _through_host_pointers(at: Device, reason: str, other: Advice) -> Advice:
    """Advise host arrays as arguments where the device reaches host memory by its own addresses."""
    found = at.capabilities
    for name, memory in (("hmm", "HMM"), ("ats", "ATS")):
        if found[name]:
            return Advice(f"{memory} (host arrays as arguments)", reason, "kernel.launch(numpy_array, ...)")
    missing = f"HMM, which {at} lacks: {found['hmm'].reason}"
    if other.memory == "managed memory" and not found["managed_memory"]:
        other = _EXPLICIT
    return Advice(other.memory, other.reason, other.write, missing)
