"""The cures: what to do about each capability that is missing, and what of the system itself stands in the way."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from remap.sizes import counted, format_size

CHANNELS = "/dev/nvidia-caps-imex-channels"

_CUDA_CURES = {
    "vmm": "Use a GPU and a driver with virtual memory management: CUDA 11.2 or newer; some vGPU profiles "
    "and WSL lack it",
    "posix_fd": "Update the NVIDIA driver; without it, share between threads of one process only",
    "win32": "Nothing to do on Linux: use posix_fd",
    "fabric": "Have an administrator make an IMEX channel (modprobe nvidia NVreg_CreateImexChannel0=1, or "
    "mknod "
    f"{CHANNELS}/channel0 c MAJOR 0 with the major number of nvidia-caps-imex-channels in "
    "/proc/devices), and pass it to "
    f"the container (--device {CHANNELS}/channel0); on one machine posix_fd serves as well",
    "multicast": "It needs GPUs joined by NVSwitch and a running fabric manager (systemctl status "
    "nvidia-fabricmanager); "
    "without it remap's collectives use unicast",
    "compression": "It needs a data centre GPU whose driver has compressible memory enabled; programs run without "
    "it",
    "rdma": "Load the peer memory module (modprobe nvidia-peermem), or use a kernel and driver with "
    "dma-buf support",
    "host_vmm": "Update to a driver of CUDA 12.2 or newer; until then use remap.pinned",
    "host_numa_vmm": "Update to a driver of CUDA 12.2 or newer; on a machine without NUMA nodes use "
    "remap.Host()",
    "memory_pools": "Update to a driver of CUDA 11.2 or newer; until then use DeviceBuffer in place of "
    "DeviceBox",
    "managed_memory": "Use remap.pinned, or explicit copies",
    "hmm": "Install the open kernel modules, a driver from 535 on and Linux 6.1.24, 6.2.11 or 6.3 on; see "
    "that it is not "
    "switched off (modprobe nvidia_uvm uvm_disable_hmm=0)",
    "ats": "It is a feature of the machine (NVIDIA Grace, POWER9): nothing to install",
    "coherent": "It is a feature of the machine (NVIDIA Grace): elsewhere copy, or migrate to remap.Host()",
}

_HOST_CURES = {
    "win32": "Nothing to do on Linux: use posix_fd",
    "fabric": "Nothing to do: on one machine posix_fd serves as well",
    "compression": 'remap.use("host", compression=True) grants it',
    "coherent": 'remap.use("host", coherent=True) models a machine where the CPU may look',
    "rdma": "Nothing to do: it needs a GPU",
    "hmm": 'remap.use("host", capabilities={"hmm": True}) models a machine that has it',
    "ats": "Nothing to do: it needs a GPU",
}


def cure(driver: str, capability: str, reason: str) -> str:
    """Return what to do about a capability that a driver lacks for a reason."""
    if "REMAP_DISABLE_MULTICAST" in reason:
        return "Unset REMAP_DISABLE_MULTICAST"
    known = _CUDA_CURES if driver == "cuda" else _HOST_CURES
    return known.get(
        capability,
        f"It was switched off where the driver was opened: leave capabilities={{{capability!r}: …}} out",
    )


@dataclass(frozen=True, slots=True)
class Check:
    """One thing about the system: whether it is as it should be, what was found, and the cure.

    `needed` says that remap, or the GPU that is here, does not work without it; the others are advice.
    """

    name: str
    ok: bool
    found: str
    cure: str = ""
    needed: bool = False


def gpus_on_the_bus() -> list[str]:
    """Return the PCI addresses of NVIDIA's display and compute devices, whether a driver runs them or not."""
    found: list[str] = []
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            found.append(device.name)
    return found


def in_a_container() -> bool:
    """Tell whether this process seems to run in a container."""
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return True
    try:
        return any(
            word in Path("/proc/1/cgroup").read_text() for word in ("docker", "kubepods", "containerd", "lxc")
        )
    except OSError:
        return False


def checks() -> Iterator[Check]:
    """Yield everything about the system that remap depends on."""
    here = f"{platform.system()} {platform.release()} on {platform.machine()}"
    right = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    yield Check(
        "platform",
        right,
        here,
        "" if right else "Use Linux on x86-64: elsewhere no driver opens",
        needed=True,
    )
    yield from _nvidia()
    if sys.platform == "linux":
        yield from _limits()


def _nvidia() -> Iterator[Check]:
    container = in_a_container()
    bus = gpus_on_the_bus()
    module = Path("/proc/driver/nvidia/version").exists()
    here = module or bool(bus)
    yield Check(
        "GPU",
        here,
        f"{counted(len(bus), 'NVIDIA device')} on the PCI bus" if bus else "none on the PCI bus",
        "" if here else "Nothing, if the machine has none: the host driver runs the same programs",
    )
    try:
        bindings = metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        bindings = ""
    yield Check(
        "cuda-bindings",
        bool(bindings),
        bindings or "not installed",
        "" if bindings else "pip install 'remap[cu13]' (or cu12, to match the driver)",
        needed=here,
    )
    if not here:
        return
    load = (
        "Start the container with --gpus all"
        if container
        else "modprobe nvidia nvidia-uvm (or install the driver)"
    )
    yield Check(
        "kernel module", module, "loaded" if module else "not loaded", "" if module else load, needed=True
    )
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
        yield _node(Path("/dev") / name, container)


def _node(path: Path, container: bool) -> Check:
    if not path.exists():
        # A container may have been given another GPU than the first.
        others = sorted(Path("/dev").glob("nvidia[0-9]*")) if path.name == "nvidia0" else []
        if others:
            return _node(others[0], container)
        todo = "Start the container with --gpus all" if container else "nvidia-modprobe -u -c 0"
        return Check(str(path), False, "missing", todo, needed=True)
    if os.access(path, os.R_OK | os.W_OK):
        return Check(str(path), True, "open to this user", needed=True)
    group = path.stat().st_gid
    todo = (
        f"Add the user to its group (number {group}), or have it made with mode 0666 (NVreg_DeviceFileMode)"
    )
    return Check(str(path), False, "not open to this user", todo, needed=True)


def _limits() -> Iterator[Check]:
    if sys.platform != "linux":
        return
    import resource  # not on Windows

    count = _number("/proc/sys/vm/max_map_count")
    enough = count >= 262_144
    yield Check(
        "vm.max_map_count",
        enough,
        f"{count:,}: the host driver holds up to {int(count * 0.9):,} kernel mappings",
        ""
        if enough
        else "sysctl -w vm.max_map_count=1048576 (as root, on the machine itself and not in a container)",
    )
    for name, what, least, todo in (
        (
            "memlock",
            resource.RLIMIT_MEMLOCK,
            1 << 30,
            "ulimit -l unlimited, or --ulimit memlock=-1 for a container",
        ),
        ("address space", resource.RLIMIT_AS, 1 << 46, "ulimit -v unlimited"),
        (
            "open files",
            resource.RLIMIT_NOFILE,
            1024,
            "ulimit -n 65536, or --ulimit nofile=65536 for a container",
        ),
    ):
        soft = resource.getrlimit(what)[0]
        unlimited = soft == resource.RLIM_INFINITY
        enough = unlimited or soft >= least
        said = f"{soft:,}" if name == "open files" else format_size(soft)
        yield Check(name, enough, "unlimited" if unlimited else said, "" if enough else todo)


def _number(path: str) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return 0
