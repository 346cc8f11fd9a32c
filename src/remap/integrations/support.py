"""What several integrations need: packages that may be missing, and objects that must never go."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from remap.errors import RemapError


def immortal(thing: Any) -> Any:
    """Keep an object until the process ends, interpreter shutdown included, and return it (trap 22)."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


def switched_on(variable: str) -> bool:
    """Tell whether an environment variable says yes; nothing, 0, false, no and off say no, in whatever case."""
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "false", "no", "off")


class MissingPackageError(RemapError, ImportError):
    """A package that an integration needs cannot be imported."""


def missing(package: str, what: str, why: object) -> MissingPackageError:
    """Return the error for a package that an integration needs and that cannot be imported."""
    rule = f"it needs {package}, which cannot be imported ({why})"
    return MissingPackageError(what, rule=rule, next_step=f"pip install {_WHEELS[package]}")


_WHEELS = {
    # Not 'remap[torch]': remap may come from a checkout, and pip would look for it elsewhere.
    "torch": "torch numba (or install remap with its extra torch)",
    "numba": "numba (or install remap with its extra torch)",
    "cupy": "cupy-cuda13x (or cupy-cuda12x, to match the driver)",
    "numba.cuda": "'numba-cuda[cu13]' (or cu12, to match the driver)",
    "torch_memory_saver": "torch_memory_saver",
    "vllm": "vllm",
}
