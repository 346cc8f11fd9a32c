"""The CUDA driver: a thin layer over `cuda.bindings.driver`.

Importing this package loads the bindings, if they are installed, but neither libcuda nor a device; `CudaDriver()`
does, and raises a `RemapError` that says why where it cannot.
"""

from remap.drivers.cuda.driver import CudaDriver

__all__ = ["CudaDriver"]
