"""A kernel of Python on one device: its module, and the launch configurations that were checked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remap.errors import LaunchError
from remap.kernels import ir
from remap.kernels.built import Code, image_for
from remap.kernels.image import Image, ImageKind
from remap.kernels.launch import Extent, Kernel, too_much_shared
from remap.kernels.spelling import entry_name
from remap.locations import Device
from remap.sizes import Size, format_size
from remap.types import LaunchConfig

if TYPE_CHECKING:
    from remap.kernels.variant import Variant

_KEPT = 256  # configurations that are remembered as checked


class Loaded:
    """A variant on one device: a module with its kernel, and the configurations that were checked."""

    def __init__(self, variant: Variant, at: Device) -> None:
        kernel = variant.kernel
        self.configs: dict[tuple[Any, Any, Any], LaunchConfig] = {}
        self.function: int | None = None
        self._variant = variant
        if at._driver.name == "cuda":
            self.module = Code(image_for(variant.cpp(), kernel.name, kernel.fma, at), at)
            self.kernel = self.module.function(entry_name(kernel.name))
            self.function = self.kernel._function
        else:
            self.module = Code(Image(ImageKind.SOURCE, b"", (), kernel.name, ()), at)
            self.kernel = Kernel(self.module, kernel.name, None, None)
        self.kernel.name, self.kernel._asked = kernel.name, variant.asked

    def check(self, grid: Extent, block: Extent, shared: Size) -> LaunchConfig:
        """Check a configuration against the device and against what the kernel does, and remember it."""
        kernel, asked = self._variant.kernel, self._variant.asked
        config = self.kernel._check(grid, block, shared)
        _check_shape(kernel, asked, config)
        if config.shared_bytes < kernel.dynamic_least:
            raise LaunchError(
                f"{asked} with {format_size(config.shared_bytes)} of dynamic shared memory",
                rule=f"the kernel uses {kernel.dynamic_least} bytes of it",
                next_step=f"Pass shared={kernel.dynamic_least} or more",
            )
        most = self.module.device.properties.shared_memory_per_block_optin
        if kernel.static_shared + config.shared_bytes > most:
            raise too_much_shared(asked, config.shared_bytes, kernel.static_shared, self.module.device, most)
        if len(self.configs) >= _KEPT:
            self.configs.clear()
        self.configs[grid, block, shared] = config
        return config


def _check_shape(kernel: ir.Kernel, asked: str, config: LaunchConfig) -> None:
    """Raise where the shape of a launch would give one index to several threads."""
    _, grid_y, grid_z = config.grid
    _, block_y, block_z = config.block
    flat = grid_y == grid_z == block_y == block_z == 1
    if kernel.index_kinds & {"1d", "warp"} and not flat:
        name = "index_1d" if "1d" in kernel.index_kinds else "warp_index"
        raise LaunchError(
            f"{asked} with grid {config.grid} and block {config.block}",
            rule=f"the kernel uses {name}(), and threads with other y or z would get the same index",
            next_step="Use a grid and a block of one dimension, or index_2d in the kernel",
        )
    if "2d" in kernel.index_kinds and (grid_z != 1 or block_z != 1):
        raise LaunchError(
            f"{asked} with grid {config.grid} and block {config.block}",
            rule="the kernel uses index_2d, and threads with another z would get the same index",
            next_step="Use a grid and a block of at most two dimensions",
        )
