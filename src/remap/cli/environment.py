"""The environment variables that remap reads: listed once, for `remap --help`, `remap doctor` and the documentation."""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLES = {
    "REMAP_DRIVER": "the driver to open: cuda or host",
    "REMAP_HOST_OPTIONS": "the machine that the host driver simulates: devices=4,memory=256MiB",
    "REMAP_HOST_STATE": "a file through which processes share one host driver's budgets",
    "REMAP_TRACE": "record the run into this file (%p: the process)",
    "REMAP_TRACEBACK": "keep so many frames of where each object is made",
    "REMAP_CACHE": "where compiled kernels are kept; 0: nowhere",
    "REMAP_DEBUG": "1: commands show where an error comes from",
    "REMAP_DISABLE_MULTICAST": "1: never use multicast memory",
    "REMAP_TMS": "1: put remap behind torch_memory_saver in SGLang",
    "REMAP_VLLM": "1: put remap in the place of vLLM's allocator",
}
"""Each variable, and what it does in under 70 characters. They are read when a driver opens or `import remap` runs."""


def present(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return those that are set here, with their values."""
    return {name: environment[name] for name in VARIABLES if environment.get(name)}


def unknown(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return what looks like one of them and is none: most likely misspelt."""
    known = {*VARIABLES, *_OURS}
    return sorted(name for name in environment if name.startswith("REMAP_") and name not in known)


# What remap and its own programs tell each other.
_OURS = ("REMAP_TRACE_OWNER", "REMAP_RESULTS", "REMAP_EXAMPLE_MULTICAST")
