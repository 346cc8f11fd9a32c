"""Images of Python kernels: from the cache on disk or from NVRTC, and loaded for as long as the kernel lives."""

from __future__ import annotations

import weakref
from typing import ClassVar

from remap import drivers
from remap.drivers import Driver
from remap.errors import CompileError
from remap.kernels import cache, nvrtc
from remap.kernels.compile import architecture_for
from remap.kernels.compile import compile as compile_source
from remap.kernels.image import Image
from remap.kernels.module import Module
from remap.lifetime import Resource
from remap.locations import Device


class Code(Module):
    """A module that belongs to a kernel, not to the user: nobody has to close it, and it is in no list of live objects.

    So it keeps no driver in use, and is closed when the driver goes, also where its kernel has gone before.
    """

    __slots__ = ()

    _listed: ClassVar[dict[int, weakref.ref[Resource]]] = {}

    def _opened(self) -> None:
        self._warns = False
        self._list()


def _leave(driver: Driver) -> None:
    for code in [reference() for reference in list(Code._listed.values())]:
        if code is not None and code._driver is driver:
            code.close()


drivers.on_leave(_leave)


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
