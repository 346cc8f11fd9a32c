"""The embedded host driver: CUDA's virtual memory management made of Linux memory files and mappings."""

from remap.drivers.host.driver import HostDriver

__all__ = ["HostDriver"]
