"""What devices are: their attributes and properties."""

from __future__ import annotations

from remap.drivers.cuda.bindings import cuda, failure
from remap.errors import CudaResult
from remap.types import DeviceProperties

# FP32 cores of one multiprocessor, by compute capability; the driver does not tell (CUDA programming guide,
# "Arithmetic instructions"). Newer ones than listed are taken to be like the newest.
_CORES = {
    (5, 0): 128,
    (5, 2): 128,
    (5, 3): 128,
    (6, 0): 64,
    (6, 1): 128,
    (6, 2): 128,
    (7, 0): 64,
    (7, 2): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 7): 128,
    (8, 8): 128,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
    (10, 1): 128,
    (10, 3): 128,
    (10, 7): 128,
    (11, 0): 128,
    (12, 0): 128,
    (12, 1): 128,
}
_CORES_OF_NEWER = 128


class DeviceCalls:
    """The CUDA driver's calls on devices; it keeps no state, since the driver answers from its own tables."""

    def device_count(self) -> int:
        err, count = cuda.cuDeviceGetCount()
        if err:
            raise failure("cuDeviceGetCount", err)
        return int(count)

    def device_properties(self, device: int) -> DeviceProperties:
        err, name = cuda.cuDeviceGetName(256, device)
        if err:
            raise failure("cuDeviceGetName", err, asked=f"device {device}")
        err, memory = cuda.cuDeviceTotalMem(device)
        if err:
            raise failure("cuDeviceTotalMem", err, asked=f"device {device}")

        def known(attribute: str, default: int = 0) -> int:
            value = device_attribute(device, attribute)
            return default if value is None else value

        capability = (known("COMPUTE_CAPABILITY_MAJOR"), known("COMPUTE_CAPABILITY_MINOR"))
        node = known("HOST_NUMA_ID", -1)
        return DeviceProperties(
            name=bytes(name).split(b"\0", 1)[0].decode(errors="replace"),
            compute_capability=capability,
            multiprocessors=known("MULTIPROCESSOR_COUNT"),
            cores_per_multiprocessor=_CORES.get(capability, _CORES_OF_NEWER),
            clock_khz=known("CLOCK_RATE"),
            memory=int(memory),
            warp_size=known("WARP_SIZE", 32),
            max_threads_per_block=known("MAX_THREADS_PER_BLOCK"),
            max_block=(known("MAX_BLOCK_DIM_X"), known("MAX_BLOCK_DIM_Y"), known("MAX_BLOCK_DIM_Z")),
            max_grid=(known("MAX_GRID_DIM_X"), known("MAX_GRID_DIM_Y"), known("MAX_GRID_DIM_Z")),
            shared_memory_per_block=known("MAX_SHARED_MEMORY_PER_BLOCK"),
            shared_memory_per_block_optin=known("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            l2_cache=known("L2_CACHE_SIZE"),
            numa_node=node if node >= 0 else None,
            integrated=bool(known("INTEGRATED")),
        )

    def can_access_peer(self, device: int, other: int) -> bool:
        err, can = cuda.cuDeviceCanAccessPeer(device, other)
        if err:
            asked = f"whether device {device} can reach device {other}"
            raise failure("cuDeviceCanAccessPeer", err, asked=asked)
        return bool(can) and device != other


def device_attribute(device: int, attribute: str) -> int | None:
    """Return `CU_DEVICE_ATTRIBUTE_…` of a device, None where the bindings or the driver do not know it.

    (cuDeviceGetAttribute)
    """
    name = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}", None)
    if name is None:
        return None
    err, value = cuda.cuDeviceGetAttribute(name, device)
    if err == CudaResult.INVALID_VALUE:  # an attribute that is newer than the driver
        return None
    if err:
        raise failure("cuDeviceGetAttribute", err, asked=f"{attribute} of device {device}")
    return int(value)
