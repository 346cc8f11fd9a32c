"""Images of Python kernels: from the cache on disk or from NVRTC, and loaded for as long as the kernel lives."""

from __future__ import annotations

from remap.errors import CompileError
from remap.kernels import cache, nvrtc
from remap.kernels.compile import architecture_for
from remap.kernels.compile import compile as compile_source
from remap.kernels.image import Image
from remap.kernels.module import Module
from remap.locations import Device


class Code(Module):
    """A module that belongs to a kernel, not to the user: nobody has to close it, and it counts as no live object."""

    __slots__ = ()

    def _opened(self) -> None:
        self._open, self._warns = True, False


def image_for(text: str, name: str, fma: bool, at: Device | str) -> Image:
    """Return the compiled image of generated CUDA C++ for a device, or for an architecture such as `"sm_90"`.

    Raises `CompileError` where NVRTC is not installed and nothing is in the cache.
    """
    arch = at if isinstance(at, str) else architecture_for(at.properties.compute_capability)
    options = ("--fmad=true" if fma else "--fmad=false",)
    key = cache.key(text, arch, *options, ".".join(map(str, nvrtc.version())))
    kept = cache.read(key)
    if kept is not None:
        return Image.from_bytes(kept, name)
    try:
        image = compile_source(text, arch=arch, options=options, name=f"{name}.cu")
    except CompileError as error:
        if "NVRTC is not installed" not in str(error):
            error.add_note("This is a mistake of remap: the text was generated. kernel.source(…) shows it")
        raise
    cache.write(key, image.data)
    return image
